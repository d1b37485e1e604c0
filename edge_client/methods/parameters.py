"""The parameters of every method: type, range, default, the paper's symbol. Free of torch: the coordinator checks runs.

A field's metadata: `symbol` (as the paper writes it) and `help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from edge_client.records import Between, Matches

__all__ = ["FeDepthParameters", "FedAvgParameters", "FedProxParameters"]


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
