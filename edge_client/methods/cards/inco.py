"""The card of InCo."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from edge_client.methods.card import Card
from edge_client.records import Between, Matches

if TYPE_CHECKING:
    from edge_client.methods.base import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class InCoParameters:
    """Parameters of InCo."""

    rule: Annotated[str, Matches("released|theorem|text|no_opt|no_norm|sum|off")] = field(
        default="released",
        metadata={
            "symbol": "theta",
            "help": "how a stage's first layer changes the later ones: the authors' code, Theorem 3.1, the paper's "
            "text, three ablations; off: not at all",
        },
    )
    granularity: Annotated[str, Matches("kernel|tensor")] = field(
        default="kernel",
        metadata={"symbol": "g_k", "help": "what has one theta: each kernel of a convolution, or the whole tensor"},
    )
    theta_max: Annotated[float, Between(0, 1000)] = field(
        default=5.0, metadata={"symbol": "theta", "help": "largest theta of released and no_norm"}
    )
    clip: Annotated[float, Between(0, 1000)] = field(
        default=0.1,
        metadata={"symbol": "g_k", "help": "largest element of a changed update; 0: no such limit"},
    )
    weights: Annotated[str, Matches("samples|uniform")] = field(
        default="samples",
        metadata={
            "symbol": "Algorithm 1",
            "help": "samples: devices count as in the method underneath; uniform: each the same, as in the authors' "
            "code",
        },
    )
    server_lr: Annotated[float, Between(0, 1000)] = field(
        default=1.0,
        metadata={"symbol": "g", "help": "multiplies the mean step of all parameters before the rule"},
    )


# why a method that exchanges knowledge refuses to be under InCo
NOT_UNDER_INCO = {"inco": "its rule is for methods that share weights and nothing else"}


def load(parameters: InCoParameters, base: Method) -> Method:
    """The method with these parameters; imports torch."""
    from edge_client.methods.inco import method

    return method(parameters, base)


CARD = Card(
    name="inco",
    paper="Chan et al., ICLR 2024, arXiv:2308.11464",
    parameters=InCoParameters,
    load=load,
    over=True,
    shown_with="preresnet20",
    as_plain=True,
)
