"""The parameters of every method: type, range, default, the paper's symbol. Free of torch: the coordinator checks runs.

A field's metadata: `symbol` (as the paper writes it) and `help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from edge_client.records import Between, Matches

__all__ = [
    "FeDepthParameters",
    "FedAvgParameters",
    "FedNovaParameters",
    "FedPerParameters",
    "FedProxParameters",
    "FedRolexParameters",
    "HeteroFLParameters",
    "InCoParameters",
    "LocalParameters",
    "MoonParameters",
    "ScaffoldParameters",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAvgParameters:
    """FedAvg has none of its own: batch, epochs and learning rate (B, E, eta) belong to the run's `train`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProxParameters:
    """FedProx."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=0.01,
        metadata={"symbol": "mu", "help": "weight of the proximal term (mu/2)||w - w_t||^2, equation 2; 0 is FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaffoldParameters:
    """Scaffold."""

    correction: bool = field(
        default=True,
        metadata={"symbol": "c - c_i", "help": "correct each local step by the control variates; false is FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedNovaParameters:
    """FedNova has none of its own: tau_i are the steps that a device made, rho is the run's `train.momentum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoonParameters:
    """MOON."""

    mu: Annotated[float, Between(0, 1000)] = field(
        default=1.0, metadata={"symbol": "mu", "help": "weight of the contrastive loss; 0 is FedAvg"}
    )
    temperature: Annotated[float, Between(0.001, 1000)] = field(
        default=0.5, metadata={"symbol": "tau", "help": "divides the cosines in the contrastive loss"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeteroFLParameters:
    """HeteroFL."""

    scaler: bool = field(
        default=True,
        metadata={
            "symbol": "1/r",
            "help": "divide what layers put out by their share r of the channels while training, in a model without "
            "normalisation: with one the factor has no effect",
        },
    )
    mask: bool = field(
        default=False,
        metadata={
            "symbol": "masked cross-entropy",
            "help": "logits of classes that a device has not are 0 in its loss, and it has no say in their rows of the "
            "output layer; tells the server which classes a device has",
        },
    )
    redraw: bool = field(
        default=False,
        metadata={
            "symbol": "dynamic",
            "help": "each device draws one of the slices that it has memory for in every round; false: the largest",
        },
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "1/m", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRolexParameters:
    """FedRolex."""

    roll: bool = field(
        default=True,
        metadata={
            "symbol": "n mod K",
            "help": "the window of channels moves by one in every round; false: it stays, which is HeteroFL's",
        },
    )
    uniform: bool = field(
        default=True,
        metadata={"symbol": "p_n", "help": "all devices count the same; false: by their samples, as in FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FedPerParameters:
    """FedPer."""

    personal: Annotated[int, Between(0, 1000)] = field(
        default=1,
        metadata={"symbol": "K_P", "help": "last units with parameters that never leave a device; 0 is FedAvg"},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameters:
    """Training alone has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeDepthParameters:
    """FeDepth and m-FeDepth."""

    budget_mode: Annotated[str, Matches("per_group|split")] = field(
        default="per_group",
        metadata={
            "symbol": "problem (1)",
            "help": "per_group: each group is trained for train.epochs; split: the groups share them",
        },
    )
    partial: bool = field(
        default=True,
        metadata={
            "symbol": "partial training",
            "help": "the first blocks may stay untrained on a device that cannot train them even one by one",
        },
    )
    averaging: Annotated[str, Matches("masked|plain")] = field(
        default="masked",
        metadata={
            "symbol": "p_k",
            "help": "masked: a tensor's mean is over the devices that trained it; plain: over all, trained or not",
        },
    )
    bypass: bool = field(
        default=False,
        metadata={
            "symbol": "partial training",
            "help": "jump over untrained blocks instead of running them; what they take and give must have one shape",
        },
    )
    mutual: Annotated[int, Between(1, 8)] = field(
        default=1,
        metadata={"symbol": "M", "help": "models at most that a device with surplus memory trains side by side"},
    )
    cost: Annotated[str, Matches("measured|table-1")] = field(
        default="measured",
        metadata={
            "symbol": "Table 1",
            "help": "what a group takes: measured, or by the authors' own rule, to compare results with theirs",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InCoParameters:
    """InCo."""

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
