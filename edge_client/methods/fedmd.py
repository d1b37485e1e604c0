"""FedMD. Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", arXiv:1910.03581.

Devices with models of their own, of any architecture, tell their logits for shared samples; each learns towards the
mean over devices, the consensus, and then from its own data. Down: the consensus (the shared samples, once). Up:
logits. On the device: the model and the states of its optimizers.

    digest    mean absolute error between logits and consensus, over shared samples
    revisit   CE on the device's own data

Deviations: one exchange per round: logits are those of the model that a device ends a round with, in evaluation mode,
and the consensus comes with its next assignment. There is no training on the shared samples before the first round:
they need no labels. The mean is over the devices of the last round. BatchNorm's running statistics stay those of the
device's own data.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from edge_client.config.run_file import RunFile
from edge_client.knowledge.kinds import PublicSamples, SampleLogits, one
from edge_client.methods.base import (
    Batch,
    Job,
    KnowledgeExchange,
    LeftOut,
    Lesson,
    Method,
    Outcome,
    Received,
    Term,
    Traffic,
    Travel,
)
from edge_client.methods.cards.fedmd import FedMdParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.local import keep_the_model
from edge_client.methods.shared_samples import (
    SharedSamplesClient,
    load_public,
    no_samples,
    other_classes,
    other_samples,
    outputs,
    window,
)
from edge_client.models.contract import Model

__all__ = ["ConsensusTeacher", "FedMdClient", "consensus", "method"]

_log = logging.getLogger(__name__)


class FedMdClient(SharedSamplesClient):
    """Digest the consensus, then revisit the device's own data."""

    def __init__(self, parameters: FedMdParameters) -> None:
        super().__init__()
        self._parameters = parameters
        self._consensus: SampleLogits | None = None

    def begin(self, job: Job) -> None:
        """Keep the consensus, if there is one."""
        super().begin(job)
        self._consensus = one(self.job.knowledge, SampleLogits)
        num_classes = math.prod(job.model.units[-1].out_shape)
        if self._consensus is not None and self._consensus.values.shape[1] != num_classes:
            num_logits = self._consensus.values.shape[1]
            _log.warning("the consensus is of %d classes, this model has %d; it is left out", num_logits, num_classes)
            self._consensus = None

    def lesson(self) -> tuple[Tensor, int]:
        """The samples of the consensus."""
        if self._consensus is None:
            return torch.empty(0, dtype=torch.int64), 0
        return self._consensus.ids, self._parameters.digest_epochs

    def learning_terms(self, batch: Batch) -> Iterator[Term]:
        """The mean absolute error."""
        assert self._consensus is not None
        logits = self.job.model(batch.x)
        target = self._consensus.values[batch.y.cpu()].to(logits.device)
        yield Term(name="consensus", each=(logits - target).abs().mean(dim=1))

    def end(self) -> Outcome:
        """Logits of the trained model, in evaluation mode."""
        outcome = super().end()
        if self.public is None:
            return outcome
        ids = window(self.job.round, len(self.public), self._parameters.samples)
        _, logits = outputs(self.job.model, self.public[ids], (), self.chunk)
        return replace(outcome, knowledge=(SampleLogits(ids=ids, values=logits),))


def consensus(answers: Iterator[SampleLogits], ids: Tensor) -> SampleLogits | None:
    """The mean over devices; answers for other samples do not count."""
    total: Tensor | None = None
    count = 0
    for answer in answers:
        if answer.ids.equal(ids) and (total is None or answer.values.shape == total.shape):
            total = answer.values.double() if total is None else total + answer.values.double()
            count += 1
    return None if total is None else SampleLogits(ids=ids, values=(total / count).float())


class ConsensusTeacher:
    """The server's side. Memory: `public`, and of the last round `ids` and `values`."""

    def __init__(self, parameters: FedMdParameters) -> None:
        self._parameters = parameters

    def begin(self, run: RunFile) -> Mapping[str, Tensor]:
        """The shared samples; raises `InputError` without."""
        return {"public": load_public(self._parameters.public, run, self._parameters.public_samples)}

    def learn(
        self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson, studied: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The consensus of the devices of this round."""
        public = memory["public"]
        ids = window(lesson.round, len(public), self._parameters.samples)
        answers = (item for _, items in received() for item in items if isinstance(item, SampleLogits))
        fitting = (item for item in answers if item.values.shape[1] == lesson.num_classes)
        result = consensus(fitting, ids)
        return {"public": public} if result is None else {"public": public, "ids": result.ids, "values": result.values}

    def left_out(self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson) -> Sequence[LeftOut]:
        """Logits for other samples than the round's, or of another number of classes."""
        total = len(memory["public"])
        if total == 0:
            return [no_samples(self._parameters.public)]
        ids = window(lesson.round, total, self._parameters.samples)
        problems: list[LeftOut] = []
        for header, items in received():
            answer = one(items, SampleLogits)
            if answer is not None and not answer.ids.equal(ids):
                problems.append(other_samples(header.device, answer.ids, ids))
            elif answer is not None and answer.values.shape[1] != lesson.num_classes:
                problems.append(other_classes(header.device, answer.values.shape[1], lesson.num_classes))
        return problems

    def study(self, memory: Mapping[str, Tensor], lesson: Lesson) -> Mapping[str, Tensor]:
        """Nothing takes long."""
        return {}

    def tell(self, memory: Mapping[str, Tensor], *, cut: str, device: str, lesson: Lesson) -> tuple[SampleLogits, ...]:
        """The consensus, as soon as there is one."""
        return (SampleLogits(ids=memory["ids"], values=memory["values"]),) if "ids" in memory else ()


def _traffic(parameters: FedMdParameters, model: Model) -> Traffic:
    total = parameters.public_samples
    ids, num_classes = window(1, total, parameters.samples), math.prod(model.units[-1].out_shape)
    logits = SampleLogits(ids=ids, values=torch.empty(len(ids), num_classes, device="meta"))
    once = PublicSamples(values=torch.empty(total, *model.input_shape, device="meta"))
    return Traffic(up=(logits,), down=(logits,), once=(once,))


def method(parameters: FedMdParameters) -> Method:
    """FedMD, for the registry."""
    return Method(
        client=partial(FedMdClient, parameters),
        server=CoverageServer(),
        travel=Travel(never_returned=keep_the_model),
        knowledge=KnowledgeExchange(teacher=ConsensusTeacher(parameters), traffic=partial(_traffic, parameters)),
    )
