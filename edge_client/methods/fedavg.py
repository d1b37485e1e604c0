"""FedAvg. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Each device trains the received weights on its own data for E epochs; the coordinator takes the mean of the results,
weighted by their numbers of samples n_k. Down: all weights and buffers. Up: the same, and n_k.

Deviations: the mean runs over the devices that answered (the sum of their n_k, not of all devices', divides), and
BatchNorm buffers, which the paper's models do not have, are averaged like weights (integer counters: the largest).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from edge_client.methods.base import Frozen, Header, Method, PlainClient, State
from edge_client.methods.cards.fedavg import FedAvgParameters
from edge_client.params import coverage_mean

__all__ = ["CoverageServer", "method"]


class CoverageServer:
    """The coverage mean of every tensor, weighted by n_k or uniform; what no update covers stays as it was."""

    def __init__(self, *, uniform: bool = False) -> None:
        self.uniform = uniform

    def weight(self, header: Header) -> float:
        """What an update counts."""
        return 1.0 if self.uniform else float(header.num_samples)

    def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new state."""
        for name in state.names():
            yield name, self.fold_tensor(name, state.tensor(name), frozen)

    def fold_tensor(self, name: str, old: Tensor, frozen: Frozen) -> Tensor:
        """The new value of one; what a method with another rule overrides."""
        parts = ((value, where, self.weight(header)) for header, value, where in frozen.column(name))
        return coverage_mean(old, parts)


def method(parameters: FedAvgParameters) -> Method:
    """FedAvg, for the registry."""
    return Method(
        client=PlainClient,
        server=CoverageServer(),
    )
