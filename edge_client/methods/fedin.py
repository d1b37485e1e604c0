"""FedIN. Chan et al., "FedIN: Federated Intermediate Layers Learning for Model Heterogeneity", arXiv:2304.00759.

A model is extractor w_e, middle w_in and classifier w_c. Devices with middles of different depths also send what one
batch of their samples looks like before and after the middle, and learn to map what others sent, with their own middle,
together with their own task. Down: weights, one batch of foreign feature pairs. Up: weights, one batch of own pairs.

    l_local = CE(f(x; w), y) + (mu/2) ||w - w_t||^2
    l_IN    = MSE(f_in(s_in; w_in), s_out)              in every step, with the pairs S of the round

Their gradients meet (`alleviation`) as
    weighted    Z = G_IN + G_local / 2                                   Eq. 14 with lambda = 1, what the paper runs
    projection  Z = G_IN, or G_IN - (b/a) G_local where b < 0            Eq. 13 per tensor: a = <G_local, G_local>,
                                                                         b = <G_local, G_IN>
    sequential  a step of G_local, then one of G_IN on the middle alone  the paper's ablation "w/o Opt"
On extractor and classifier Z is G_local, halved by "weighted" (which Adam does not notice) unless `rescale_outer`.
Without pairs, as in the first round, a device minimises l_local alone.

Deviations: the paper calls Eq. 14 the optimum; it is a weighted sum, and <Z, G_local> may be negative. The extractor is
the units up to the first with parameters (for a ResNet the stem): nothing that leaves a device is a raw sample. Running
statistics of BatchNorms are put back after each pass over foreign features. The pairs sent are the last `pairs` samples
of the last epoch, as the forward pass of that training step saw them. The pool keeps the newest uploads of each
signature, and a device gets pairs of others while there are any.

Legend: s_in, s_out = outputs of extractor and middle for one sample, S = received pairs, w_t = received weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor

from edge_client.config.run_file import RunFile
from edge_client.device.accelerator import device_of
from edge_client.errors import InputError
from edge_client.knowledge.kinds import FeaturePairs, one
from edge_client.methods.base import (
    Batch,
    Header,
    Job,
    KnowledgeExchange,
    LeftOut,
    Lesson,
    Method,
    Outcome,
    Phase,
    Received,
    Term,
    Traffic,
)
from edge_client.methods.cards.fedin import FedInParameters
from edge_client.methods.cards.fedprox import FedProxParameters
from edge_client.methods.class_means import device_number
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.fedprox import FedProxClient
from edge_client.models.contract import Model
from edge_client.models.recompute import Begin
from edge_client.models.taps import flat_width, tapped
from edge_client.training.optimizers import Optimizer
from edge_client.training.pieces import InPieces
from edge_client.training.seeds import derive

__all__ = ["FedInClient", "PairPool", "PairTeacher", "check", "extractor", "fold_pairs", "method", "project"]

_log = logging.getLogger(__name__)

_MAPPING = "mapping"
_OUT = "features"


class FedInClient(FedProxClient):
    """FedProx, and the mapping of foreign features through this device's middle."""

    def __init__(self, parameters: FedInParameters) -> None:
        super().__init__(FedProxParameters(mu=parameters.mu))
        self._parameters = parameters
        self._maps = False  # there are foreign pairs of this model
        self._most = parameters.pairs  # of them at a time
        self._seen: list[tuple[Tensor, Tensor]] = []  # the newest rows, in and out
        self._optimizer: Optimizer | None = None  # of steps on the middle alone

    def begin(self, job: Job) -> None:
        """Look for foreign pairs; they are read when they are needed, and not kept beside activations."""
        super().begin(job)
        check(job.model)
        pairs = one(job.knowledge, FeaturePairs) if self._parameters.pairs else None
        if pairs is not None:
            shape = next(unit.out_shape for unit in job.model.units if unit.name == extractor(job.model))
            signature = _signature(torch.tensor((*shape, flat_width(job.model, _OUT))))
            self._maps = pairs.signature == signature and len(pairs.inputs) >= job.model.min_batch
            if pairs.signature != signature:
                _log.warning("pairs %s are not of this model, which has %s; left out", pairs.signature, signature)
        if self._parameters.alleviation == "sequential" and job.optimizer is not None:
            self._optimizer = job.optimizer()

    def phases(self) -> Sequence[Phase]:
        """One phase; the gradient of the mapping is kept apart where the two must be compared."""
        separate_gradients = self._maps and (self._parameters.alleviation == "projection" or self._rescales)
        taps = frozenset({_tap(self.job.model), _OUT}) if self._parameters.pairs else frozenset[str]()
        keep = frozenset({_MAPPING}) if separate_gradients else frozenset[str]()
        return [replace(phase, taps=taps, keep=keep) for phase in super().phases()]

    @property
    def _rescales(self) -> bool:
        return self._parameters.alleviation == "weighted" and self._parameters.rescale_outer

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """The local loss, then the mapping, once per step and a microbatch at a time."""
        self._forget(coming=batch.num_whole if batch.first else 0)  # they are not beside the whole batch's activations
        self._most = batch.most or self._most
        halved = self._maps and self._parameters.alleviation == "weighted"
        for term in super().terms(batch, phase):
            yield replace(term, weight=term.weight / 2) if halved else term
        if self._maps and batch.first and self._parameters.alleviation != "sequential":
            yield from self._mapping(separate_gradients=bool(phase.keep))

    def _mapping(self, *, separate_gradients: bool = False) -> Iterator[Term]:
        """l_IN in pieces of a microbatch, also beside a small last batch: their shares are of the mean over all."""
        model, pairs = self.job.model, one(self.job.knowledge, FeaturePairs)
        assert pairs is not None
        move = device_of(model).move
        size = max(self._most, model.min_batch)
        count = len(pairs.inputs) - (len(pairs.inputs) % size if len(pairs.inputs) % size < model.min_batch else 0)
        for first in range(0, count, size):
            rows = slice(first, min(first + size, count))
            part = FeaturePairs(inputs=move(pairs.inputs[rows]), outputs=move(pairs.outputs[rows]))
            with _restored_buffers(model):  # until its gradient has been taken
                yield from _at_once(model, part, count) if separate_gradients else _unit_by_unit(model, part, count)

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        """Eq. 13; or Eq. 14 with the whole gradient outside of the middle."""
        mapping = kept.get(_MAPPING)
        if self._parameters.alleviation == "projection" and mapping is not None:
            grad.copy_(project(grad, mapping))
        elif self._rescales and self._maps:
            grad.mul_(2) if mapping is None else grad.add_(mapping)

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        """Sequential: a step of the mapping alone."""
        super().after_step(params, learning_rate)
        if not self._maps or self._optimizer is None:
            return
        plan, device = self.job.plan, device_of(self.job.model)
        terms = self._mapping()
        with torch.enable_grad():
            while True:
                with device.autocast(plan.dtype if plan is not None else "fp32"):  # as the loop computes its terms
                    term = next(terms, None)
                if term is None:
                    break
                assert term.once is not None
                if term.once.requires_grad:  # not of a first unit without parameters
                    term.once.backward()  # type: ignore[no-untyped-call]
        for name, param in params.items():
            if param.grad is not None:
                self._optimizer.step(name, param, param.grad, learning_rate)
                param.grad = None

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """Keep the newest rows of the last epoch."""
        if not batch.last_epoch or not self._parameters.pairs:
            return
        most = self._parameters.pairs
        newest = (taps[_tap(self.job.model)][-most:], taps[_OUT][-most:].flatten(1))
        inputs, outputs = (rows.to("cpu", copy=True) for rows in newest)
        self._seen.append((inputs, outputs))
        self._forget(coming=0)

    def _forget(self, coming: int) -> None:
        """Drop rows that will not be among the newest after so many more."""
        spare = sum(len(rows) for rows, _ in self._seen) + coming - self._parameters.pairs
        while self._seen and spare > 0:
            inputs, outputs = self._seen.pop(0)
            if spare < len(inputs):
                self._seen.insert(0, (inputs[spare:].clone(), outputs[spare:].clone()))
            spare -= len(inputs)

    def end(self) -> Outcome:
        """This device's pairs."""
        if not self._seen:
            return Outcome()
        inputs, outputs = (torch.cat(rows)[-self._parameters.pairs :] for rows in zip(*self._seen, strict=True))
        return Outcome(knowledge=(FeaturePairs(inputs=inputs.contiguous(), outputs=outputs.contiguous()),))


def project(local: Tensor, mapping: Tensor) -> Tensor:
    """Eq. 13 for one tensor: G_IN without its part against G_local."""
    b = torch.sum(local * mapping)
    if b >= 0:
        return mapping.clone()
    return mapping - b / torch.sum(local * local) * local


def _at_once(model: Model, pairs: FeaturePairs, count: int) -> Iterator[Term]:
    """The share of some of `count` pairs in l_IN."""
    start = _middle(model)[0]
    seen, _ = tapped(model, [_OUT], pairs.inputs.clone() if model.overwrites(start) else pairs.inputs, start=start)
    yield Term(name=_MAPPING, once=_distance(seen[_OUT], pairs, count))


def _unit_by_unit(model: Model, pairs: FeaturePairs, count: int) -> Iterator[Term]:
    """The same, back-propagated from unit to unit, of which one at a time is in memory.

    All gradients of the local loss are there as well. A unit's term is a number whose gradient at the unit's output is
    what the units after it handed back, g: its gradient is that of l_IN, by the chain rule.
    """
    *units, last = _middle(model)
    device = device_of(model)
    inputs, states, x = [], [], pairs.inputs
    with _whole_units(model), torch.no_grad(), InPieces():
        for unit in units:
            inputs.append(x)
            states.append(device.random_states())
            x = model.run_units([unit], x.clone() if model.overwrites(unit) else x)
    x = x.detach().requires_grad_()
    with InPieces():
        seen, _ = tapped(model, [_OUT], x.clone() if model.overwrites(last) else x, start=last)
    after = device.random_states()
    yield Term(name=_MAPPING, once=_distance(seen.pop(_OUT), pairs, count))
    while units:
        unit, g, x = units.pop(), x.grad, inputs.pop().detach().requires_grad_(bool(inputs))
        if g is None:  # the output does not depend on what is before
            return
        device.set_random_states(states.pop())  # the same random numbers as in the first pass
        with _whole_units(model), InPieces():
            out = model.run_units([unit], x.clone() if model.overwrites(unit) else x)
        device.set_random_states(after)
        once = Begin.apply(out, g.to(out.dtype))  # type: ignore[no-untyped-call]
        del out, g
        yield Term(name=_MAPPING, once=once, reported=False)


def _middle(model: Model) -> list[str]:
    """The units behind the extractor, up to the one that puts out the features, or has them inside."""
    module = model.taps[_OUT]
    end = next(number for number, unit in enumerate(model.order) if module == unit or module.startswith(f"{unit}."))
    return list(model.order[model.order.index(extractor(model)) + 1 : end + 1])


def _distance(out: Tensor, pairs: FeaturePairs, count: int) -> Tensor:
    return (out.flatten(1) - pairs.outputs).square().sum() / (count * pairs.outputs.shape[1])


@contextmanager
def _whole_units(model: Model) -> Iterator[None]:
    """Units do not run again in backward here: each would run a third time."""
    before = model.recompute
    model.recompute = None if before == "units" else before
    try:
        yield
    finally:
        model.recompute = before


@contextmanager
def _restored_buffers(model: Model) -> Iterator[None]:
    """Put running statistics back at the end: they are those of this device's samples."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def extractor(model: Model) -> str:
    """The unit that ends the extractor: the first one with parameters."""
    return next(name for name in model.order if any(True for _ in model.unit(name).parameters()))


def _tap(model: Model) -> str:
    unit = extractor(model)
    return next(tap for tap, module in model.taps.items() if module == unit)


def check(model: Model) -> None:
    """Raise `InputError` for a model with nothing between extractor and classifier; without shapes none are known."""
    if not hasattr(model, "taps"):
        return
    with_parameters = [name for name in model.order if any(True for _ in model.unit(name).parameters())]
    if len(with_parameters) < 3 or _OUT not in model.taps:
        raise InputError(
            f"method 'fedin' trains what is between a model's first and last unit with parameters, and this model has "
            f"{len(with_parameters)} of them; take one with three or more, or use fedprox"
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairPool:
    """The server's pairs of one signature, upload by upload, the oldest first."""

    devices: Tensor  # [n] int64, as `device_number` makes them
    uploads: Tensor  # [n] int64: equal for the pairs of one upload, ascending
    inputs: Tensor  # [n, *shape]
    outputs: Tensor  # [n, width]

    @classmethod
    def of(cls, uploads: Sequence[tuple[str, FeaturePairs]], *, first: int = 0) -> PairPool:
        """Uploads of one signature, by device; they are numbered from `first` on."""
        sizes = [len(pairs.inputs) for _, pairs in uploads]
        numbers = [device_number(device) for device, _ in uploads]
        return cls(
            devices=torch.repeat_interleave(torch.tensor(numbers), torch.tensor(sizes)),
            uploads=torch.repeat_interleave(torch.arange(first, first + len(sizes)), torch.tensor(sizes)),
            inputs=torch.cat([pairs.inputs for _, pairs in uploads]),
            outputs=torch.cat([pairs.outputs for _, pairs in uploads]),
        )

    def newest(self, most: int) -> PairPool:
        """The last `most` uploads."""
        rows = self.uploads > int(self.uploads[-1]) - most
        return PairPool(
            devices=self.devices[rows],
            uploads=self.uploads[rows],
            inputs=self.inputs[rows],
            outputs=self.outputs[rows],
        )

    def followed_by(self, other: PairPool) -> PairPool:
        """The pairs of both, the other's last."""
        return PairPool(
            devices=torch.cat([self.devices, other.devices]),
            uploads=torch.cat([self.uploads, other.uploads]),
            inputs=torch.cat([self.inputs, other.inputs]),
            outputs=torch.cat([self.outputs, other.outputs]),
        )

    def draw(self, device: str, size: int, rng: Generator) -> FeaturePairs | None:
        """`size` random pairs of others; a device's own only while there are no others."""
        foreign = (self.devices != device_number(device)).nonzero()[:, 0]
        usable = foreign if len(foreign) else torch.arange(len(self.devices))
        if len(usable) == 0:
            return None
        rows = usable[torch.randperm(len(usable), generator=rng)[:size]]
        return FeaturePairs(inputs=self.inputs[rows], outputs=self.outputs[rows])

    def tensors(self) -> dict[str, Tensor]:
        """For the server's state."""
        return {"devices": self.devices, "uploads": self.uploads, "in": self.inputs, "out": self.outputs}


def fold_pairs(
    pools: Mapping[str, PairPool], uploads: Iterable[tuple[str, FeaturePairs]], *, most: int
) -> dict[str, PairPool]:
    """The pools by signature after a round, each with its newest `most` uploads."""
    groups: dict[str, list[tuple[str, FeaturePairs]]] = {}
    for device, pairs in uploads:
        groups.setdefault(pairs.signature, []).append((device, pairs))
    folded = dict(pools)
    for signature, group in groups.items():
        old = folded.get(signature)
        new = PairPool.of(group, first=int(old.uploads[-1]) + 1 if old is not None else 0)
        folded[signature] = (new if old is None else old.followed_by(new)).newest(most)
    return folded


class PairTeacher:
    """The server's side: a pool of pairs for each signature. Each device draws from the one of its architecture.

    Memory: `pairs/SIGNATURE/...`, a `PairPool` each, and `shape/SLICE`: the shapes of an architecture's pairs.
    """

    def __init__(self, parameters: FedInParameters) -> None:
        self._most = parameters.pool_batches
        self._size = parameters.pairs

    def begin(self, run: RunFile) -> Mapping[str, Tensor]:
        """An empty memory."""
        return {}

    def learn(
        self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson, studied: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Add the pairs of this round to the pools."""
        uploads = _received_pairs(received)
        shapes = _shapes(memory, uploads)
        fitting = [
            (header.device, pairs)
            for header, pairs in uploads
            if pairs.signature == _signature(shapes[_SHAPE + header.slice])
        ]
        pools = fold_pairs(_pools(memory), fitting, most=self._most)
        tensors = {f"{_POOL}{sign}/{name}": t for sign, pool in pools.items() for name, t in pool.tensors().items()}
        return {**tensors, **shapes}

    def left_out(self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson) -> Sequence[LeftOut]:
        """Pairs of another signature than those of most devices of the slice."""
        uploads = _received_pairs(received)
        shapes = _shapes(memory, uploads)
        signatures = [_signature(shapes[_SHAPE + header.slice]) for header, _ in uploads]
        return [
            LeftOut(
                device=header.device,
                code="signature",
                detail=f"its pairs are {pairs.signature}, those of slice {header.slice!r} are {expected}; left out",
            )
            for (header, pairs), expected in zip(uploads, signatures, strict=True)
            if pairs.signature != expected
        ]

    def study(self, memory: Mapping[str, Tensor], lesson: Lesson) -> Mapping[str, Tensor]:
        """Nothing takes long."""
        return {}

    def tell(self, memory: Mapping[str, Tensor], *, cut: str, device: str, lesson: Lesson) -> tuple[FeaturePairs, ...]:
        """Random pairs of other devices, once there are any of this architecture's signature."""
        shape = memory.get(_SHAPE + cut)
        pools = _pools(memory, only=_signature(shape)) if shape is not None and self._size else {}
        rng = torch.Generator().manual_seed(derive(lesson.seed, "pairs", lesson.round, device))
        samples = (pool.draw(device, self._size, rng) for pool in pools.values())
        return tuple(pairs for pairs in samples if pairs is not None)


_POOL = "pairs/"
_SHAPE = "shape/"


def _received_pairs(received: Received) -> list[tuple[Header, FeaturePairs]]:
    return [(header, item) for header, items in received() for item in items if isinstance(item, FeaturePairs)]


def _shapes(memory: Mapping[str, Tensor], uploads: Sequence[tuple[Header, FeaturePairs]]) -> dict[str, Tensor]:
    """The shapes of each slice's pairs: of this round, or for slices without pairs in it, of an earlier one."""
    return {name: memory[name] for name in memory if name.startswith(_SHAPE)} | _usual_shapes(uploads)


def _signature(shape: Tensor) -> str:
    *inputs, width = (str(dim) for dim in shape.tolist())
    return f"{'x'.join(inputs)}>{width}"


def _usual_shapes(uploads: Sequence[tuple[Header, FeaturePairs]]) -> dict[str, Tensor]:
    """For each slice the shapes of the pairs of most of its devices; those of the others are left out."""
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for header, pairs in uploads:
        shapes.setdefault(header.slice, []).append((*pairs.inputs.shape[1:], pairs.outputs.shape[1]))
    return {
        _SHAPE + cut: torch.tensor(max(sorted(candidates), key=candidates.count)) for cut, candidates in shapes.items()
    }


def _pools(memory: Mapping[str, Tensor], only: str = "") -> dict[str, PairPool]:
    names = [name.removeprefix(_POOL) for name in memory if name.startswith(_POOL)]
    signatures = sorted({name.rpartition("/")[0] for name in names})
    return {
        signature: PairPool(
            devices=memory[f"{_POOL}{signature}/devices"],
            uploads=memory[f"{_POOL}{signature}/uploads"],
            inputs=memory[f"{_POOL}{signature}/in"],
            outputs=memory[f"{_POOL}{signature}/out"],
        )
        for signature in signatures
        if only in ("", signature)
    }


def _traffic(parameters: FedInParameters, model: Model) -> Traffic:
    shape = next(unit.out_shape for unit in model.units if unit.name == extractor(model))
    pairs = FeaturePairs(
        inputs=torch.empty(parameters.pairs, *shape, device="meta"),
        outputs=torch.empty(parameters.pairs, flat_width(model, _OUT), device="meta"),
    )
    return Traffic(up=(pairs,), down=(pairs,)) if parameters.pairs else Traffic()


def method(parameters: FedInParameters) -> Method:
    """FedIN, for the registry."""
    return Method(
        client=partial(FedInClient, parameters),
        server=CoverageServer(uniform=parameters.uniform),
        check=check,
        knowledge=KnowledgeExchange(teacher=PairTeacher(parameters), traffic=partial(_traffic, parameters)),
    )
