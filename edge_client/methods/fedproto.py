"""FedProto. Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.

Devices with models of their own exchange one mean feature per class, its prototype, and nothing else: 4 C F bytes. Each
pulls the features of its samples towards the prototypes over all devices, and may answer with the class of the nearest
one. Down: prototypes. Up: the device's own. On the device: the model and the state of its optimizer.

    l = CE(p, y) + lambda MSE(s, s_y)     a sample whose class has no prototype counts with 0, in the mean as well

Deviations: the mean over devices is uniform, as in the released code (the paper weights by counts); features of
different widths are different tables. `inference` = "prototype" answers, among the classes that the device has, with
the nearest prototype; before any came, or with "classifier", the model's classifier answers.

Legend: s, p = features and logits of a sample, s_y = the prototype of its class, lambda = parameters.ld.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from edge_client.methods.base import Batch, Job, KnowledgeExchange, Method, Outcome, Phase, Term, Travel
from edge_client.methods.cards.fedproto import FedProtoParameters
from edge_client.methods.class_means import TAPS, ClassExchange, ClassTeacher, class_traffic, features_and_logits
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.fedper import PersonalClient, everything
from edge_client.methods.felo import check_features
from edge_client.methods.local import keep_the_model
from edge_client.training.objectives import cross_entropy

__all__ = ["FedProtoClient", "method", "nearest"]

_FAR = 1e4  # squared distance to a class that this device cannot answer with; finite, so that losses are


class FedProtoClient(PersonalClient):
    """Cross entropy and the distance of features to the prototype of their class."""

    def __init__(self, parameters: FedProtoParameters) -> None:
        super().__init__(everything)
        self._ld = parameters.ld
        self._nearest = parameters.inference == "prototype"
        self._exchange: ClassExchange

    def begin(self, job: Job) -> None:
        """The device's own model, and the prototypes."""
        super().begin(job)
        check_features(job.model, "fedproto")
        self._exchange = ClassExchange(job, ("feature",))

    def phases(self) -> Sequence[Phase]:
        """One phase; features are observed."""
        return [replace(phase, taps=frozenset({TAPS["feature"]})) for phase in super().phases()]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """One term: both losses come from one pass."""
        if self._ld == 0 or self._exchange.empty:
            yield from super().terms(batch, phase)
            return
        features, logits = features_and_logits(self.job.model, batch.x)
        each = cross_entropy(logits, batch.y)
        match = self._exchange.target("feature", batch, features)
        if match is not None:
            target, mask, _ = match
            each = each + self._ld * (features - target).square().mean(dim=1) * mask
        del features, logits
        yield Term(name="cross_entropy+prototypes", each=each)

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """Add up features by class."""
        self._exchange.observe(batch, taps)

    def end(self) -> Outcome:
        """The prototypes; the model stays here."""
        return replace(super().end(), knowledge=self._exchange.tables())

    def predict(self, x: Tensor) -> Tensor:
        """Minus the squared distance to each prototype, in place of logits; or the model's logits."""
        targets = self._exchange.targets("feature")
        if not self._nearest or targets is None:
            return super().predict(x)
        prototypes, present = targets
        mine = present.bool() & present.new_tensor([count > 0 for count in self.job.class_counts], dtype=torch.bool)
        if not bool(mine.any()):
            return super().predict(x)
        features, _ = features_and_logits(self.job.model, x)
        return nearest(features.float(), prototypes, mine)


def nearest(features: Tensor, prototypes: Tensor, allowed: Tensor) -> Tensor:
    """[b, F], [C, F], [C] of bool -> [b, C]: minus squared distances; classes that are not allowed are far away."""
    distances = torch.cdist(features, prototypes).square()
    far = distances.amax(dim=1, keepdim=True) + _FAR
    return -torch.where(allowed, distances, far)


def method(parameters: FedProtoParameters) -> Method:
    """FedProto, for the registry."""
    return Method(
        client=partial(FedProtoClient, parameters),
        server=CoverageServer(),
        check=partial(check_features, method="fedproto"),
        travel=Travel(never_returned=keep_the_model),
        knowledge=KnowledgeExchange(teacher=ClassTeacher(), traffic=partial(class_traffic, labels=("feature",))),
    )
