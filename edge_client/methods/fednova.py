"""FedNova. Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020.

A device that makes more local steps moves further, and FedAvg listens to it more than to others. FedNova divides each
device's way by how far its steps carry, takes the mean of these directions, and goes along it as far as the devices did
on average. Down and up: what FedAvg sends, and the number of steps.

    a_i = (tau_i - rho (1 - rho^tau_i) / (1 - rho)) / (1 - rho)     of tau_i steps with momentum rho; tau_i without
    d_i = (x - x_i) / a_i
    x   <- x - (sum of p_i a_i) (sum of p_i d_i),  p_i = n_i / sum of n

This is computed from the weighted mean m of the x_i with the weights n_i / a_i: x <- x + s (m - x), where s is
(sum of p a) (sum of p / a), 1 or more. Devices with equal a give m and s = 1: FedAvg, bit for bit.

Deviations: with Adam a_i = tau_i, which the paper does not derive. Where only some devices cover an element, all sums
are over them. Buffers of a BatchNorm move without steps: their mean is weighted by n_i. A device without a step counts
for nothing. Steps are what devices say, and bounded only by what their samples allow.

Legend: x = the server's weights, x_i = a device's, n_i = its samples, rho = the run's train.momentum.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from edge_client.methods.base import Frozen, Method, PlainClient
from edge_client.methods.cards.fednova import FedNovaParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.params import IndexMap, Part, coverage_mean, coverage_sum, is_buffer

__all__ = ["FedNovaServer", "effective_steps", "method"]


def effective_steps(steps: int, momentum: float) -> float:
    """a_i: the sum over all steps of how far each one carries, 1 + rho + rho^2 + ... as long as it lasts."""
    if momentum == 0:
        return float(steps)
    if momentum == 1:
        return steps * (steps + 1) / 2
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


class FedNovaServer(CoverageServer):
    """The normalised mean of what is trained, the coverage mean of buffers."""

    def fold_tensor(self, name: str, old: Tensor, frozen: Frozen) -> Tensor:
        """The new value of one tensor."""
        if is_buffer(name) or not old.is_floating_point():
            return super().fold_tensor(name, old, frozen)
        largest = max((effective_steps(header.steps, frozen.momentum) for header in frozen.headers), default=0.0)
        owners: list[tuple[IndexMap | None, float, float]] = []  # where, n_i, largest a / a_i

        def parts() -> Iterator[Part]:
            for header, value, where in frozen.column(name):
                if header.steps > 0:
                    ratio = largest / effective_steps(header.steps, frozen.momentum)
                    owners.append((where, float(header.num_samples), ratio))
                    yield value, where, header.num_samples * ratio

        mean = coverage_mean(old, parts()).double()
        further = _scale(old, owners) - 1  # s - 1
        return (mean + further * (mean - old.double())).to(old.dtype)


def _scale(old: Tensor, owners: list[tuple[IndexMap | None, float, float]]) -> Tensor:
    """s for each element, or one for all; 1 where nobody is: with ratios r it is (sum n / r) (sum n r) / (sum n)^2."""
    by_a = coverage_sum(old.shape, ((where, n / ratio) for where, n, ratio in owners))
    by_inverse = coverage_sum(old.shape, ((where, n * ratio) for where, n, ratio in owners))
    total = coverage_sum(old.shape, ((where, n) for where, n, _ in owners))
    return (by_a * by_inverse / (total * total)).masked_fill(total == 0, 1.0)


def method(parameters: FedNovaParameters) -> Method:
    """FedNova, for the registry."""
    return Method(
        client=PlainClient,
        server=FedNovaServer(),
    )
