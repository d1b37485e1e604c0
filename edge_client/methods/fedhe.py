"""FedHe. Chan and Ngai, "FedHe: Heterogeneous Models and Communication-Efficient Federated Learning", MSN 2021.

Devices with models of their own, of any architecture, exchange the mean logits of each class and nothing else, about
4 C (C + 1) bytes. Each pulls the logits of its samples towards those of their class over all devices. Down: class
means of logits. Up: the device's own. On the device: the model and the state of its optimizer.

    l = CE(p, y) + alpha MSE(p, p_y)      MSE over the samples whose class has a target

Deviations: devices of a round answer together instead of one after another, and the server takes the mean of the newest
value of each device; distillation begins in the second round.

Legend: p = logits of a sample, p_y = the target of its class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from edge_client.methods.base import Batch, Job, KnowledgeExchange, Method, Outcome, Phase, Term, Travel
from edge_client.methods.cards.fedhe import FedHeParameters
from edge_client.methods.class_means import TAPS, ClassExchange, ClassTeacher, class_traffic
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.fedper import PersonalClient, everything
from edge_client.methods.local import keep_the_model
from edge_client.training.objectives import cross_entropy

__all__ = ["FedHeClient", "method"]


class FedHeClient(PersonalClient):
    """Cross entropy and the distance of logits to those of their class."""

    def __init__(self, parameters: FedHeParameters) -> None:
        super().__init__(everything)
        self._alpha = parameters.alpha
        self._exchange: ClassExchange

    def begin(self, job: Job) -> None:
        """The device's own model, and the targets."""
        super().begin(job)
        self._exchange = ClassExchange(job, ("logit",))

    def phases(self) -> Sequence[Phase]:
        """One phase; logits are observed."""
        return [replace(phase, taps=frozenset({TAPS["logit"]})) for phase in super().phases()]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """One term: both losses come from one pass."""
        logits = self.job.model(batch.x)
        each = cross_entropy(logits, batch.y)
        match = self._exchange.target("logit", batch, logits) if self._alpha > 0 else None
        if match is not None:
            target, mask, count = match
            each = each + self._alpha * (logits - target).square().mean(dim=1) * mask * (batch.num_whole / count)
        del logits
        yield Term(name="cross_entropy+targets", each=each)

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """Add up logits by class."""
        self._exchange.observe(batch, taps)

    def end(self) -> Outcome:
        """The class means; the model stays here."""
        return replace(super().end(), knowledge=self._exchange.tables())


def method(parameters: FedHeParameters) -> Method:
    """FedHe, for the registry."""
    return Method(
        client=partial(FedHeClient, parameters),
        server=CoverageServer(),
        travel=Travel(never_returned=keep_the_model),
        knowledge=KnowledgeExchange(teacher=ClassTeacher(), traffic=partial(class_traffic, labels=("logit",))),
    )
