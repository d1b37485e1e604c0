"""The parameters of every method: type, range, default, the paper's symbol. Free of torch: the coordinator checks runs.

A field's metadata: `symbol` (as the paper writes it) and `help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from edge_client.records import Between

__all__ = ["FedAvgParameters", "FedProxParameters"]


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
