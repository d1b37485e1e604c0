"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

FedAvg whose devices minimise F_k(w) + (mu/2)||w - w_t||^2: the proximal term holds a device near the received weights
w_t, so that devices with different data or different amounts of work drift apart less. Travels as FedAvg does.

Covers the proximal term over the parameters that a phase trains (not over buffers). Does not cover the paper's
gamma-inexact solutions as a stopping rule: a device's work is bounded by the run's epochs and max-steps.
The anchors of large parameters are read from the file that they came in, a few at a time, in every step: a copy of all
weights would be there while activations are. Those of small ones (biases, norms) are many and next to nothing: they are
kept, and one graph is for all of them.

Legend: mu = parameters.mu, w = a parameter, w_t = its anchor, the received value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from edge_client.methods.base import Batch, Job, Method, Phase, PlainClient, Term
from edge_client.methods.cards.fedprox import KEPT_ANCHOR_BYTES, FedProxParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.records import TrainingPlan
from edge_client.training.contract import named_parameters

__all__ = ["FedProxClient", "method"]

_SMALL = 256  # elements: reading an anchor of so many takes longer than the term does


class FedProxClient(PlainClient):
    """Cross entropy and the proximal term."""

    def __init__(self, parameters: FedProxParameters) -> None:
        self._mu = parameters.mu
        self._anchor: dict[str, Tensor] = {}
        self._small: set[str] = set()  # of these, what could be read again

    def begin(self, job: Job) -> None:
        """The received weights are the anchor; what can be read again is kept if it is small."""
        super().begin(job)
        self._keep_anchors()

    def replan(self, plan: TrainingPlan) -> None:
        """Modules that another plan needs are as they were received."""
        self._keep_anchors()

    def _keep_anchors(self) -> None:
        if self._mu == 0:
            return
        received = self.job.received if self.job.received is not None else {}
        room = KEPT_ANCHOR_BYTES - sum(self._anchor[name].nbytes for name in self._small)
        for name, param in named_parameters(self.job.model, self.job.modules).items():
            if name in self._anchor:
                continue
            if name not in received:
                self._anchor[name] = param.detach().clone()
            elif param.numel() <= _SMALL and param.nbytes <= room:
                self._anchor[name] = received[name]  # not the parameter itself: it may have been trained meanwhile
                self._small.add(name)
                room -= param.nbytes

    def _anchor_copy(self, name: str) -> Tensor:
        """A copy, which may be overwritten."""
        anchor = self._anchor.get(name)
        if anchor is not None:
            return anchor.clone()
        assert self.job.received is not None
        return self.job.received[name]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """Cross entropy, then the proximal term of a few parameters at a time, together as large as the largest."""
        yield from super().terms(batch, phase)
        if self._mu == 0 or not batch.first:
            return
        params = named_parameters(self.job.model, self.job.modules)
        trained = [name for name in params if name in phase.trainable]
        small = [name for name in trained if name in self._small]
        if small:
            yield self._proximal([_flat(params, small)], [_flat(self._anchor, small)])
        for names in _groups({name: params[name].numel() for name in trained if name not in self._small}):
            yield self._proximal([params[name] for name in names], [self._anchor_copy(name) for name in names])

    def _proximal(self, now: Sequence[Tensor], anchors: Sequence[Tensor]) -> Term:
        distances = [_Distance.apply(*pair) for pair in zip(now, anchors, strict=True)]  # type: ignore[no-untyped-call]
        return Term(name="proximal", weight=self._mu / 2, once=torch.stack(distances).sum())


class _Distance(torch.autograd.Function):
    """||w - w_t||^2 in no more memory than that of w_t: it becomes the difference, and that the gradient."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, anchor: Tensor) -> Tensor:
        ctx.difference = torch.sub(w, anchor, out=anchor)
        flat = anchor.flatten()
        return torch.dot(flat, flat)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        difference, ctx.difference = ctx.difference, None
        return difference.mul_(2 * grad), None


def _flat(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def _groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Neighbours that are together no larger than the largest: a graph for each of them would take longer."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room:
            groups.append([])
            room = max(sizes.values())
        groups[-1].append(name)
        room -= size
    return groups


def method(parameters: FedProxParameters) -> Method:
    """FedProx, for the registry."""
    return Method(
        client=partial(FedProxClient, parameters),
        server=CoverageServer(),
    )
