"""Felo. Chan and Ngai, "Exploiting Features and Logits in Heterogeneous Federated Learning", arXiv:2210.15527.

Devices of different architectures tell each other, per class, what their features and logits look like; the server
sends the means over devices, and each device pulls its own towards them. Weights are averaged among devices of one
architecture. Down: weights of the architecture, class means of features (of its width) and logits. Up: the same of the
device, for the classes that it has.

    l = CE(p, y) + alpha (MSE(s, s_y) + KL(softmax(p_y) || softmax(p)))

MSE is the mean over a feature's numbers, KL the sum over classes; both are means over the samples whose class has a
target. Targets are constant: MSE moves the extractor only, KL everything.

Deviations: class means, never features of single samples, which the released code uploads; a class that nobody ever
had has no target and takes no part (there: an error); what a device said of a class stays until it says something new
(there: a mean over the whole history); features are grouped by width, logits are shared by all. `kl_reduction` "mean"
divides the KL by the number of classes, as the released code does.

Legend: s, p = features and logits of a sample, s_y, p_y = targets of its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from edge_client.errors import InputError
from edge_client.methods.base import Batch, Job, KnowledgeExchange, Method, Outcome, Phase, PlainClient, Term
from edge_client.methods.cards.felo import FeloParameters
from edge_client.methods.class_means import TAPS, ClassExchange, ClassTeacher, class_traffic, features_and_logits
from edge_client.methods.fedavg import CoverageServer
from edge_client.models.contract import Model
from edge_client.training.objectives import cross_entropy, divergence

__all__ = ["FeloClient", "check_features", "method"]

_LABELS = ("feature", "logit")


class FeloClient(PlainClient):
    """Cross entropy and the distance to the targets of each sample's class."""

    def __init__(self, parameters: FeloParameters) -> None:
        self._alpha = parameters.alpha
        self._by_class = parameters.kl_reduction == "mean"
        self._exchange: ClassExchange

    def begin(self, job: Job) -> None:
        """Take the targets out of what came."""
        super().begin(job)
        check_features(job.model, "felo")
        self._exchange = ClassExchange(job, _LABELS)

    def phases(self) -> Sequence[Phase]:
        """One phase; the activations that it observes are those whose means are sent."""
        taps = frozenset(TAPS.values()) if self._alpha > 0 else frozenset()
        return [replace(phase, taps=taps) for phase in super().phases()]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """One term: all losses come from one pass."""
        if self._alpha == 0 or self._exchange.empty:
            yield from super().terms(batch, phase)
            return
        features, logits = features_and_logits(self.job.model, batch.x)
        each = cross_entropy(logits, batch.y)
        for distance in (self._feature_term(features, batch), self._logit_term(logits, batch)):
            if distance is not None:
                each = each + self._alpha * distance
        del features, logits
        yield Term(name="cross_entropy+targets", each=each)

    def _feature_term(self, features: Tensor, batch: Batch) -> Tensor | None:
        """Of each sample, so that the mean over the whole batch is the mean over the samples with a target."""
        match = self._exchange.target("feature", batch, features)
        if match is None:
            return None
        target, mask, count = match
        return (features - target).square().mean(dim=1) * mask * (batch.num_whole / count)

    def _logit_term(self, logits: Tensor, batch: Batch) -> Tensor | None:
        match = self._exchange.target("logit", batch, logits)
        if match is None:
            return None
        target, mask, count = match
        scale = batch.num_whole / count / (logits.shape[1] if self._by_class else 1)
        return divergence(target, logits) * mask * scale

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """Add up features and logits by class."""
        self._exchange.observe(batch, taps)

    def end(self) -> Outcome:
        """The class means."""
        return Outcome(knowledge=self._exchange.tables())


def check_features(model: Model, method: str) -> None:
    """Raise `InputError` for a model of one unit; a model without shapes has no taps yet, and is checked on devices."""
    if hasattr(model, "taps") and "features" not in model.taps:
        raise InputError(
            f"method {method!r} exchanges what the model's classifier gets, and this model is one unit; "
            "make it two or more (an nn.Sequential, or Task(units=[...]))"
        )


def method(parameters: FeloParameters) -> Method:
    """Felo, for the registry."""
    teacher = ClassTeacher(by_count=parameters.weighting == "count", max_age=parameters.max_age)
    return Method(
        client=partial(FeloClient, parameters),
        server=CoverageServer(),
        check=partial(check_features, method="felo"),
        knowledge=KnowledgeExchange(teacher=teacher, traffic=partial(class_traffic, labels=_LABELS)),
    )
