"""FedProx. Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

FedAvg whose devices minimise F_k(w) + (mu/2)||w - w_t||^2: the proximal term holds a device near the received weights
w_t, so that devices with different data or different amounts of work drift apart less. Travels as FedAvg does.

Covers the proximal term over the parameters that a phase trains (not over buffers). Does not cover the paper's
gamma-inexact solutions as a stopping rule: a device's work is bounded by the run's epochs and max-steps.
The anchor is read from the file that it came in, a few parameters at a time, in every step: a copy of all weights would
be there while activations are.

Legend: mu = parameters.mu, w = a parameter, w_t = its anchor, the received value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from edge_client.methods.base import Batch, Job, Method, Phase, PlainClient, Term
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.parameters import FedProxParameters
from edge_client.records import TrainingPlan
from edge_client.training.contract import named_parameters

__all__ = ["FedProxClient", "method"]


class FedProxClient(PlainClient):
    """Cross entropy and the proximal term."""

    def __init__(self, parameters: FedProxParameters) -> None:
        self._mu = parameters.mu
        self._anchor: dict[str, Tensor] = {}

    def begin(self, job: Job) -> None:
        """The received weights are the anchor; what can be read again is not kept."""
        super().begin(job)
        self._keep_anchors()

    def replan(self, plan: TrainingPlan) -> None:
        """Modules that another plan needs are as they were received."""
        self._keep_anchors()

    def _keep_anchors(self) -> None:
        if self._mu > 0:
            known = self.job.received if self.job.received is not None else {}
            params = named_parameters(self.job.model, self.job.modules)
            new = {name: param for name, param in params.items() if name not in self._anchor and name not in known}
            self._anchor |= {name: param.detach().clone() for name, param in new.items()}

    def _received(self, name: str) -> Tensor:
        kept = self._anchor.get(name)
        if kept is not None:
            return kept
        assert self.job.received is not None
        return self.job.received[name]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """Cross entropy, then the proximal term of a few parameters at a time, together as large as the largest."""
        yield from super().terms(batch, phase)
        if self._mu == 0 or not batch.first:
            return
        params = named_parameters(self.job.model, self.job.modules)
        for names in _groups({name: param.numel() for name, param in params.items() if name in phase.trainable}):
            # in one function: w - w_t and its square would each take as much again as the parameter
            near = [functional.mse_loss(params[name], self._received(name), reduction="none").sum() for name in names]
            yield Term(name="proximal", weight=self._mu / 2, once=torch.stack(near).sum())


def _groups(sizes: Mapping[str, int]) -> list[list[str]]:
    """Neighbours that are together no larger than the largest: a graph for each small parameter would take longer."""
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
        name="fedprox",
        paper="Li et al., MLSys 2020, arXiv:1812.06127",
        parameters=parameters,
        client=partial(FedProxClient, parameters),
        server=CoverageServer(),
    )
