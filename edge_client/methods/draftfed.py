"""DraftFed. Liao et al., "DraftFed: a Draft-based Personalized Federated Learning Approach for Heterogeneous
Convolutional Neural Networks".

Devices with CNNs of their own exchange drafts: what their first and their last convolution and their classifier put out
for shared samples without labels; where others have fewer convolutions, also what the convolution of that number puts
out. The server fits the shapes of all to those of each architecture and takes means; each device learns towards them,
then from its own data. Down: targets (the shared samples, once). Up: drafts. On the device: the model and the states of
its optimizers.

    l = lambda_1 MSE(D1, T1) + lambda_2 MSE(D2, T2) + lambda_3 CE(D3, softmax(T3))     over shared samples
    T1 = mean of all D1, fitted;  T3 = mean of all logits
    T2 = mean of D2 of all models with as many convolutions, and of the same convolution of the deeper ones, fitted

Fitting: positions by area (fewer) or bilinear (more), an axis at a time; the first channels, or zeros for those that
lack. With `mask_padding` a channel's mean is over the models that have it.

Deviations: Eq. 6 of the paper averages drafts of one model at several depths, for which neither the shapes nor the text
fit; here, as its Eq. 5 and Fig. 5 say, models of at least that depth. One exchange per round: drafts are those of the
model that a device ends a round with, in evaluation mode, and targets come with its next assignment. Nobody learns from
the drafts of the first `warmup_rounds`. Learning is in training mode, and running statistics are put back. Positions
are convolutions, or for models that name none their blocks. Channels of different models mean different things, and
nothing here matches them.

Legend: D1, D2, D3 = drafts of the first and the last convolution and of the classifier, T = their targets.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from edge_client.config.run_file import RunFile
from edge_client.errors import InputError
from edge_client.knowledge.kinds import DraftSet, PublicSamples, one
from edge_client.methods.base import (
    Batch,
    Header,
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
from edge_client.methods.cards.draftfed import DraftFedParameters
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
from edge_client.models.taps import tapped

__all__ = ["DraftFedClient", "DraftTeacher", "align", "draft_taps", "method", "targets"]

_log = logging.getLogger(__name__)

_INTERPOLATED = {1: "linear", 2: "bilinear", 3: "trilinear"}
_TARGETS, _DEPTH = "targets/", "depth/"
_COPIES = 4


def draft_taps(model: Model) -> dict[int, str]:
    """Number of a convolution -> its tap; of a model without such taps, its blocks."""
    for pattern in (r"conv_(\d+)", r"block_(\d+)_out"):
        taps = {int(match[1]): tap for tap in model.taps if (match := re.fullmatch(pattern, tap)) is not None}
        if taps:
            return dict(sorted(taps.items()))
    return {}


class DraftFedClient(SharedSamplesClient):
    """Draft learning, local learning, drafts."""

    def __init__(self, parameters: DraftFedParameters) -> None:
        super().__init__()
        self._parameters = parameters
        self._targets: DraftSet | None = None

    def begin(self, job: Job) -> None:
        """Keep the targets, if there are any."""
        super().begin(job)
        check(job.model)
        self._targets = one(self.job.knowledge, DraftSet)
        if self._targets is not None and not self._fits(self._targets):
            _log.warning("targets for %d convolutions are not of this model; they are left out", self._targets.depth)
            self._targets = None

    def _fits(self, targets: DraftSet) -> bool:
        """Whether targets have the shapes of this model's own drafts."""
        model = self.job.model
        taps = draft_taps(model)
        ends = {number: taps[number] for number in (1, max(taps))}
        seen, logits = outputs(model, torch.zeros(1, *model.input_shape), sorted(set(ends.values())), 1)
        shapes = {number: seen[tap].shape[1:] for number, tap in ends.items()}
        target_shapes = {number: draft.shape[1:] for number, draft in targets.convs.items()}
        return shapes == target_shapes and logits.shape[1] == targets.logits.shape[1]

    def lesson(self) -> tuple[Tensor, int]:
        """The samples of the targets; none in the first rounds, whose drafts are those of untrained models."""
        if self._targets is None or self.job.round <= self._parameters.warmup_rounds + 1:
            return torch.empty(0, dtype=torch.int64), 0
        return self._targets.ids, self._parameters.draft_epochs

    def learning_terms(self, batch: Batch) -> Iterator[Term]:
        """One term: all drafts come from one pass."""
        assert self._targets is not None
        taps, parameters = draft_taps(self.job.model), self._parameters
        ends = {number: taps[number] for number in (1, max(taps))}
        kind, self.job.model.recompute = self.job.model.recompute, None  # what is inside of units needs its gradient
        seen, logits = tapped(self.job.model, sorted(set(ends.values())), batch.x)
        rows, device = batch.y.cpu(), logits.device
        each = parameters.lambda3 * soft_cross_entropy(logits, self._targets.logits[rows].to(device))
        for (number, tap), weight in zip(ends.items(), (parameters.lambda1, parameters.lambda2), strict=False):
            target = self._targets.convs[number][rows].to(device)
            each = each + weight * functional.mse_loss(seen[tap], target, reduction="none").flatten(1).mean(dim=1)
        del seen, logits, target
        yield Term(name="drafts", each=each)
        self.job.model.recompute = kind

    def end(self) -> Outcome:
        """Drafts of the trained model, in evaluation mode, with what shallower models need."""
        outcome = super().end()
        if self.public is None:
            return outcome
        ids = window(self.job.round, len(self.public), self._parameters.draft_batch)
        taps = draft_taps(self.job.model)
        depth = max(taps)
        other_depths = self._targets.depths.tolist() if self._targets is not None else []
        numbers = sorted({1, depth, *(number for number in other_depths if number < depth and number in taps)})
        seen, logits = outputs(self.job.model, self.public[ids], [taps[number] for number in numbers], self.chunk)
        drafts = DraftSet(
            ids=ids,
            depths=torch.tensor([depth]),
            convs={number: seen[taps[number]].contiguous() for number in numbers},
            logits=logits,
        )
        return replace(outcome, knowledge=(drafts,))


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """CE with softmax(target) in place of a label: [b, K], [b, K] -> [b]."""
    return functional.cross_entropy(logits, target.softmax(dim=1), reduction="none")


def check(model: Model) -> None:
    """Raise `InputError` for a model without anything to draft; one without shapes has no taps yet."""
    if hasattr(model, "taps") and not draft_taps(model):
        raise InputError(
            "method 'draftfed' exchanges what a model's convolutions or blocks put out, and this model has none; "
            "make it three units or more"
        )


def align(draft: Tensor, shape: Sequence[int]) -> Tensor:
    """[n, c, *positions] as [n, *shape]: Eq. 7, with zeros for missing channels."""
    sized = _positions(draft, tuple(shape[1:]))
    lacking = shape[0] - sized.shape[1]
    if lacking <= 0:
        return sized[:, : shape[0]]
    return functional.pad(sized, (0, 0) * (sized.ndim - 2) + (0, lacking))


def _positions(draft: Tensor, positions: tuple[int, ...]) -> Tensor:
    stored = tuple(draft.shape[2:])
    if len(stored) != len(positions):  # a vector beside maps: their mean; maps beside a vector: the same everywhere
        flat = draft.flatten(2).mean(dim=2) if stored else draft
        return flat.reshape(*flat.shape, *[1] * len(positions)).expand(*flat.shape, *positions)
    if not positions or stored == positions:
        return draft
    shrunk = tuple(min(pair) for pair in zip(stored, positions, strict=True))
    sized = functional.interpolate(draft, size=shrunk, mode="area") if shrunk != stored else draft
    if shrunk == positions:
        return sized
    return functional.interpolate(sized, size=positions, mode=_INTERPOLATED[len(positions)], align_corners=False)


@dataclass(slots=True, kw_only=True)
class _Mean:
    """The mean of fitted drafts; with `masked`, each channel's over the models that have it."""

    shape: tuple[int, ...]  # of one sample
    masked: bool = False
    total: Tensor | None = None
    counts: Tensor | None = None  # per channel

    def add(self, draft: Tensor) -> None:
        fitted = align(draft, self.shape).double()
        present = torch.ones(self.shape[0], dtype=torch.float64)
        if self.masked:
            present[draft.shape[1] :] = 0
        self.total = fitted if self.total is None else self.total + fitted
        self.counts = present if self.counts is None else self.counts + present

    def value(self) -> Tensor:
        assert self.total is not None
        assert self.counts is not None
        counts = self.counts.clamp(min=1).view(-1, *[1] * (self.total.ndim - 2))
        return (self.total / counts).float()


def targets(like: DraftSet, drafts: Iterable[DraftSet], *, mask_padding: bool = False) -> DraftSet:
    """T1, T2 and T3 for models with the depth and the shapes of `like`, which is one of `drafts`."""
    depth = like.depth
    first = _Mean(shape=tuple(like.convs[1].shape[1:]), masked=mask_padding)
    last = _Mean(shape=tuple(like.convs[depth].shape[1:]), masked=mask_padding)
    logits: list[Tensor] = []
    depths = set()
    for draft in drafts:
        depths.add(draft.depth)
        first.add(draft.convs[1])
        if depth in draft.convs and draft.depth >= depth:
            last.add(draft.convs[depth])
        if draft.logits.shape == like.logits.shape:
            logits.append(draft.logits.double())
    return DraftSet(
        ids=like.ids,
        depths=torch.tensor(sorted(depths)),
        convs={1: first.value(), depth: last.value()},
        logits=(torch.stack(logits).sum(dim=0) / len(logits)).float(),
    )


class DraftTeacher:
    """The server's side. Memory: `public`, `targets/SLICE/...` of the last round, `depth/SLICE` of all rounds.

    Devices learn the depths of all architectures that ever took part: one that was away may be back in their round.
    """

    def __init__(self, parameters: DraftFedParameters) -> None:
        self._parameters = parameters

    def begin(self, run: RunFile) -> Mapping[str, Tensor]:
        """The shared samples; raises `InputError` without."""
        return {"public": load_public(self._parameters.public, run, self._parameters.public_samples)}

    def learn(
        self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson, studied: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Targets for every architecture that took part in this round."""
        public = memory["public"]
        ids = window(lesson.round, len(public), self._parameters.draft_batch)

        def drafts() -> Iterator[tuple[Header, DraftSet]]:
            return ((header, draft_set) for header, draft_set in _drafts(received) if draft_set.ids.equal(ids))

        usual_shapes = _usual_shapes(drafts())
        depth_of = {name: memory[name] for name in memory if name.startswith(_DEPTH)}
        depth_of |= {_DEPTH + cut: torch.tensor(depth) for cut, (depth, *_) in usual_shapes.items()}
        depths = torch.tensor(sorted({int(depth) for depth in depth_of.values()}))
        new_memory = {"public": public, **depth_of}
        for cut, shapes in usual_shapes.items():
            like = next(
                draft_set for header, draft_set in drafts() if header.slice == cut and _shapes(draft_set) == shapes
            )
            new_targets = targets(
                like, (draft_set for _, draft_set in drafts()), mask_padding=self._parameters.mask_padding
            )
            tensors = {"ids": new_targets.ids, **new_targets.tensors(), "depths": depths}
            new_memory |= {f"{_TARGETS}{cut}/{name}": tensor for name, tensor in tensors.items() if name != "ranges"}
        return new_memory

    def left_out(self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson) -> Sequence[LeftOut]:
        """Drafts for samples of another round, logits of another width, and shapes that no target will have."""
        total = len(memory["public"])
        if total == 0:
            return [no_samples(self._parameters.public)]
        ids = window(lesson.round, total, self._parameters.draft_batch)
        usual_shapes = _usual_shapes((header, drafts) for header, drafts in _drafts(received) if drafts.ids.equal(ids))
        problems: list[LeftOut] = []
        for header, drafts in _drafts(received):
            if not drafts.ids.equal(ids):
                problems.append(other_samples(header.device, drafts.ids, ids))
                continue
            if drafts.logits.shape[1] != lesson.num_classes:
                problems.append(other_classes(header.device, drafts.logits.shape[1], lesson.num_classes))
            if _shapes(drafts)[:3] != usual_shapes[header.slice][:3]:
                problems.append(_odd_shapes(header, drafts, usual_shapes[header.slice]))
        return problems

    def study(self, memory: Mapping[str, Tensor], lesson: Lesson) -> Mapping[str, Tensor]:
        """Nothing takes long."""
        return {}

    def tell(self, memory: Mapping[str, Tensor], *, cut: str, device: str, lesson: Lesson) -> tuple[DraftSet, ...]:
        """The targets of this architecture, as soon as there are any."""
        prefix = f"{_TARGETS}{cut}/"
        tensors = {name.removeprefix(prefix): memory[name] for name in memory if name.startswith(prefix)}
        if not tensors:
            return ()
        convs = {int(name[5:]): tensor for name, tensor in tensors.items() if name.startswith("conv_")}
        return (DraftSet(ids=tensors["ids"], depths=tensors["depths"], convs=convs, logits=tensors["logits"]),)


_Shapes = tuple[int, tuple[int, ...], tuple[int, ...], int]  # depth, of the first and the last draft, classes


def _shapes(drafts: DraftSet) -> _Shapes:
    ends = (tuple(drafts.convs[number].shape[1:]) for number in (1, drafts.depth))
    return drafts.depth, *ends, drafts.logits.shape[1]  # type: ignore[return-value]


def _drafts(received: Received) -> Iterator[tuple[Header, DraftSet]]:
    for header, items in received():
        drafts = one(items, DraftSet)
        if drafts is not None:
            yield header, drafts


def _usual_shapes(received: Iterable[tuple[Header, DraftSet]]) -> dict[str, _Shapes]:
    """For each slice the shapes of most of its devices: targets have the shapes that most can use."""
    shapes: dict[str, list[_Shapes]] = {}
    for header, drafts in received:
        shapes.setdefault(header.slice, []).append(_shapes(drafts))
    return {cut: max(sorted(candidates), key=candidates.count) for cut, candidates in sorted(shapes.items())}


def _odd_shapes(header: Header, drafts: DraftSet, usual: _Shapes) -> LeftOut:
    described, expected = (
        f"{depth} convolutions, {first} to {last}" for depth, first, last, _ in (_shapes(drafts), usual)
    )
    detail = (
        f"its drafts are of {described}, those of slice {header.slice!r} of {expected}; "
        "it cannot use the slice's targets"
    )
    return LeftOut(device=header.device, code="signature", detail=detail)


def _sample_bytes(model: Model) -> int:
    """Of draft learning: of both ends the target, the output itself, the squares, and their gradient."""
    taps = draft_taps(model) if hasattr(model, "taps") else {}
    if not taps:
        return 0
    seen, logits = outputs(model, torch.zeros(1, *model.input_shape), sorted({taps[1], taps[max(taps)]}), 1)
    return 4 * _COPIES * (sum(draft.numel() for draft in seen.values()) + logits.numel())


def _traffic(parameters: DraftFedParameters, model: Model) -> Traffic:
    """The drafts of a round, without supplements, whose number depends on the other models of a run."""
    total, taps = parameters.public_samples, draft_taps(model)
    seen, logits = outputs(model, torch.zeros(1, *model.input_shape), [taps[1], taps[max(taps)]], 1)
    ids = window(1, total, parameters.draft_batch)

    def many(one_sample: Tensor) -> Tensor:
        return torch.empty(len(ids), *one_sample.shape[1:], device="meta")

    convs = {number: many(seen[taps[number]]) for number in (1, max(taps))}
    drafts = DraftSet(ids=ids, depths=torch.tensor([max(taps)]), convs=convs, logits=many(logits))
    once = PublicSamples(values=torch.empty(total, *model.input_shape, device="meta"))
    return Traffic(up=(drafts,), down=(drafts,), once=(once,))


def method(parameters: DraftFedParameters) -> Method:
    """DraftFed, for the registry."""
    return Method(
        client=partial(DraftFedClient, parameters),
        server=CoverageServer(),
        check=check,
        travel=Travel(never_returned=keep_the_model),
        knowledge=KnowledgeExchange(
            teacher=DraftTeacher(parameters), traffic=partial(_traffic, parameters), sample_bytes=_sample_bytes
        ),
    )
