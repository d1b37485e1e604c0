"""What each unit of a model costs, from traces of real steps.

Steps on random samples at two small batches go through the same loop and the same method as a worker's. The profiler
tells every allocation: of the whole model at once, of each block as a group of its own where the method trains by
groups, of a pass without gradients; once for each kind of recomputation. Each step has two pieces: the second one adds
its gradients to those of the first.

What torch does not see is measured as the kernel counts it, and before anything else, because a process that has used
the profiler has memory to spare: libraries keep code and tables for every number of samples that they have met.
Covers: the measurement. Does not cover: its process and cache (`calibration`), what follows (`planning.cost`).
"""

from __future__ import annotations

import bisect
import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from edge_client.device import guard, meter
from edge_client.measuring.rehearsal import RandomSamples, Rehearsal
from edge_client.models.contract import Model, Unit
from edge_client.models.layout import precision
from edge_client.planning.cost import measured_bytes
from edge_client.planning.paper_cost import unit_cost
from edge_client.planning.rows import Line, Lines, ModelRows, UnitRow, envelope, line_through, minus, plus
from edge_client.records import TrainingPlan
from edge_client.training.contract import Batch, Phase, Term
from edge_client.training.evaluate import evaluate
from edge_client.training.inputs import in_layout
from edge_client.training.loop import train

__all__ = ["measure"]

_BATCHES = ((8, 16), (4, 8), (2, 4))  # the first whose activations are small
_ACTIVATION_BYTES = 256 * 2**20
_LARGE_BATCHES = (128, 64, 32)  # for what libraries keep: with them if the activations are small
_LARGE_BYTES = 64 * 2**20
_COPIES = 3  # of all activations, roughly, during a step
_PREFIX = "fedfit/"
_WORKER_BYTES = 4 * 10**6  # that a worker takes beside what is done here: its order, progress, results

Groups = tuple[tuple[str, ...], ...]


def measure(made: Rehearsal, *, key: str, limit_bytes: int = 0) -> ModelRows:
    """The rows of a model that is warm, in this process."""
    base_bytes = meter.rss_bytes()
    if limit_bytes:
        guard.limit_growth(limit_bytes)
    model = made.model
    bench = _Bench(made=made, batches=_batches(model))
    hidden = bench.hidden()
    modes = {"plain" if kind is None else kind: bench.rows(kind, hidden) for kind in (None, *model.recompute_kinds)}
    rows = ModelRows(
        key=key,
        torch=str(torch.__version__),
        machine=platform.machine(),
        channels_last=made.channels_last,
        dtype=made.dtype,
        batches=bench.batches,
        base_bytes=base_bytes + _WORKER_BYTES,
        model_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        hidden_bytes=hidden.kept.whole,
        hidden_size_bytes=hidden.size.whole,
        hidden_rest_bytes=hidden.rest_bytes,
        has_batchnorm=any(True for _ in _norms(model)),
        has_batch_statistics=any(not norm.track_running_stats for norm in _norms(model)),
        min_batch=model.min_batch,
        modes=modes,
    )
    beside_torch = hidden.peak_bytes - measured_bytes(rows, None, hidden.batch)
    return replace(rows, hidden_bytes=max(hidden.kept.whole, beside_torch))


def _batches(model: Model) -> tuple[int, int]:
    fitting = (pair for pair in _BATCHES if pair[1] * _per_sample(model) <= _ACTIVATION_BYTES)
    return next(fitting, _BATCHES[-1])


def _per_sample(model: Model) -> int:
    return 4 * _COPIES * sum(unit.num_activations for unit in model.units)


def _norms(model: Model) -> Iterator[nn.modules.batchnorm._BatchNorm]:
    return (part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))


@dataclass(frozen=True, slots=True)
class _Grown:
    """What the process has grown by: until each block was trained, where each is trained by itself; and in all."""

    until: tuple[int, ...]
    whole: int

    def __add__(self, other: _Grown) -> _Grown:
        return self._with(other, lambda one, two: one + two)

    def or_more(self, other: _Grown) -> _Grown:
        """The larger one."""
        return self._with(other, max)

    def _with(self, other: _Grown, both: Callable[[int, int], int]) -> _Grown:
        until = tuple(both(one, two) for one, two in zip(self.until, other.until, strict=True))
        return _Grown(until, both(self.whole, other.whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hidden:
    """What the kernel counts, on top of the warm process."""

    batch: int  # of the largest step
    peak_bytes: int  # of a step of the whole model
    kept: _Grown  # after training with two numbers of samples, of which one is the last of an epoch
    rest_bytes: int  # that a single sample at the end of an epoch takes more than a few
    size: _Grown  # that one number of samples more takes


@dataclass(slots=True, kw_only=True)
class _Bench:
    """One model on the bench."""

    made: Rehearsal
    batches: tuple[int, int]
    out_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.made.model

    @property
    def own_bytes(self) -> int:
        """Copies of all weights that the method keeps: planners know of them by its rules."""
        weights = sum(param.nbytes for param in self.model.parameters())
        return self.made.method.plans.weight_copies * weights

    def singles(self) -> Groups:
        """Each block as a group; none if the method trains no groups."""
        if not self.made.method.plans.groups:
            return ()
        return tuple((unit.name,) for unit in self.model.units if unit.kind == "block")

    def rows(self, kind: str | None, hidden: _Hidden) -> tuple[UnitRow, ...]:
        """One row per unit, with this kind of recomputation."""
        self.model.recompute = kind
        whole = self._pieces(())[0]
        groups = self.singles()
        alone = dict(zip((name for (name,) in groups), self._pieces(groups), strict=True)) if groups else {}
        evaluated = _Pair(self.batches, *(self._forward(batch) for batch in self.batches))
        self.model.recompute = None
        meters = (_UnitMeter(self, name, whole, alone.get(name), evaluated) for name in self.model.order)
        kept, size = (dict(zip(alone, grown.until, strict=True)) for grown in (hidden.kept, hidden.size))
        return tuple(
            replace(unit.row(), hidden_bytes=kept.get(unit.name, 0), hidden_size_bytes=size.get(unit.name, 0))
            for unit in meters
        )

    def hidden(self) -> _Hidden:
        """As a worker does: evaluate, then train, with all numbers of samples that a batch may end with."""
        small, large = self.batches[0], self._large()
        base = meter.rss_bytes()
        self._evaluate(large, small)
        evaluated = meter.rss_bytes() - base
        few, many = self._grown(small), self._grown(large)
        meter.reset_peak()
        self._train(large, ())
        peak_bytes = meter.peak_rss_bytes() - base
        odd, lone = self._grown(small // 2 + 1), self._grown(self.model.min_batch)
        kept = few + many
        return _Hidden(
            batch=large,
            peak_bytes=peak_bytes - self.own_bytes,
            kept=_Grown(tuple(evaluated + until for until in kept.until), evaluated + kept.whole),
            rest_bytes=max(0, lone.whole - few.whole),
            size=odd.or_more(lone),
        )

    def _grown(self, batch: int) -> _Grown:
        """By training with so many samples at a time, for the first time."""
        before = meter.rss_bytes()
        groups = self.singles()
        until = self._train(batch, groups) if groups else []
        self._train(batch, ())
        return _Grown(tuple(max(0, after - before) for after in until), max(0, meter.rss_bytes() - before))

    def _large(self) -> int:
        fitting = (batch for batch in _LARGE_BATCHES if batch * _per_sample(self.model) <= _LARGE_BYTES)
        return max(self.batches[1], next(fitting, 0))

    def _evaluate(self, *sizes: int) -> None:
        for size in sizes:
            evaluate(
                self.model,
                self.model,
                self.made.samples(size),
                num_classes=self.made.num_classes,
                microbatch=size,
                channels_last=self.made.channels_last,
                dtype=self.made.dtype,
            )

    def _pieces(self, groups: Groups) -> list[_Step]:
        """Of each group, or of everything: a first piece of a batch, and one that adds to its gradients."""
        one, other = (self._trace(batch, groups) for batch in self.batches)
        pairs = [_Pair(self.batches, *pair) for pair in zip(one, other, strict=True)]
        return [_Step(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]

    def _trace(self, batch: int, groups: Groups) -> list[_Trace]:
        self._train(batch, groups)  # libraries choose their kernels at the first step of a shape
        with _profiled() as trace, self._marked():
            self._train(batch, groups, pieces=2)
        return trace.parts()

    def _train(self, batch: int, groups: Groups, pieces: int = 1) -> list[int]:
        """One step of each group; returns the RSS after each, without what the method keeps."""
        done = self._train_once(batch, groups, pieces)
        gc.collect()  # a client half may be in a circle, and all that it keeps with it
        return done

    def _train_once(self, batch: int, groups: Groups, pieces: int) -> list[int]:
        plan = TrainingPlan(groups=groups, microbatch=batch, budget_bytes=0, predicted_bytes=0)
        settings = replace(self.made.settings(pieces * batch, plan), optimizer="sgd", momentum=0.0, weight_decay=0.0)
        client = self.made.client(plan)
        terms = client.terms

        def marked(batch: Batch, phase: Phase) -> Iterator[Term]:
            yield from terms(batch, phase)
            _mark("done")

        client.terms = marked  # type: ignore[method-assign]
        after: list[int] = []
        samples = _Marked(self.made.samples(pieces * batch))
        own = self.own_bytes
        train(self.model, client, samples, settings, progress=lambda *_: after.append(meter.rss_bytes() - own))
        return after

    def _forward(self, batch: int) -> _Trace:
        samples = in_layout(_Marked(self.made.samples(batch)), channels_last=self.made.channels_last)
        self.model.eval()
        with _profiled() as trace, self._marked(), torch.no_grad(), precision(self.made.dtype):
            x, _ = samples.batch(torch.arange(batch))
            self.model(x)
            _mark("end")
        return trace.parts()[0]

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Marks before and after each unit's forward, and where its backward begins."""
        original = self.model.run_units

        def run_units(names: Sequence[str], x: Tensor) -> Tensor:
            for name in names:
                frozen = "" if torch.is_grad_enabled() else "frozen/"
                _mark(f"{frozen}pre/{name}")
                x = original([name], x)
                self.out_bytes[name] = x.nbytes // max(1, len(x))
                _mark(f"{frozen}post/{name}")
                if x.requires_grad:
                    x.register_hook(_marker(f"grad/{name}"))  # type: ignore[no-untyped-call]
            return x

        self.model.run_units = run_units  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.model.run_units


class _Marked:
    """Samples with a mark where each batch begins."""

    def __init__(self, samples: RandomSamples) -> None:
        self._samples = samples
        self.labels = samples.labels

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        _mark("batch")
        return self._samples.batch(indices)


@dataclass(slots=True)
class _Trace:
    """Bytes in use at each mark, after each allocation before it, and the time of it."""

    marks: list[str] = field(default_factory=list)
    live: list[float] = field(default_factory=list)
    moments: list[list[float]] = field(default_factory=list)  # since the mark before
    seconds: list[float] = field(default_factory=list)

    def add(self, mark: str, live: float, moments: list[float], seconds: float) -> None:
        self.marks.append(mark)
        self.live.append(live)
        self.moments.append(moments)
        self.seconds.append(seconds)

    def at(self, mark: str) -> int:
        return self.marks.index(mark)

    def between(self, start: str, end: str) -> list[float]:
        """In use at the first mark, and after each allocation until the second."""
        first, last = self.at(start), self.at(end)
        return [self.live[first], *(m for moments in self.moments[first + 1 : last + 1] for m in moments)]

    def parts(self) -> list[_Trace]:
        """One trace per piece: each begins with its samples."""
        starts = [number for number, mark in enumerate(self.marks) if mark == "batch"]
        ends = [*starts[1:], len(self.marks)]
        return [self._cut(start, end) for start, end in zip(starts, ends, strict=True)]

    def _cut(self, start: int, end: int) -> _Trace:
        here = slice(start, end)
        floor = self.live[start]
        return _Trace(
            self.marks[here],
            [live - floor for live in self.live[here]],
            [[moment - floor for moment in moments] for moments in self.moments[here]],
            self.seconds[here],
        )


@dataclass(frozen=True, slots=True)
class _Pair:
    """The same piece at two batches: lines through both."""

    batches: tuple[int, int]
    one: _Trace
    other: _Trace

    def has(self, mark: str) -> bool:
        return mark in self.one.marks

    def live(self, mark: str) -> Line:
        """Bytes in use at a mark."""
        return line_through(self.batches, self.one.live[self.one.at(mark)], self.other.live[self.other.at(mark)])

    def moments(self, start: str, end: str) -> list[Line]:
        """Bytes in use at the first mark, and after every allocation until the second; none if nothing begins there."""
        if not self.has(start):
            return []
        here, there = self.one.between(start, end), self.other.between(start, end)
        if len(here) != len(there):  # another kernel was chosen: the worst of both will do
            here, there = [max(here)], [max(there)]
        return [line_through(self.batches, one, other) for one, other in zip(here, there, strict=True)]

    def seconds(self, start: str, end: str) -> Line:
        """Time from mark to mark."""
        if not self.has(start):
            return 0.0, 0.0
        spent = [t.seconds[t.at(end)] - t.seconds[t.at(start)] for t in (self.one, self.other)]
        return line_through(self.batches, *spent)


@dataclass(frozen=True, slots=True)
class _Step:
    """Two pieces of a batch."""

    fresh: _Pair
    adding: _Pair  # above gradients of earlier pieces, which are not in its lines


@dataclass(frozen=True, slots=True)
class _UnitMeter:
    """Reads the row of one unit from the traces."""

    bench: _Bench
    name: str
    whole: _Step
    alone: _Step | None
    evaluated: _Pair

    def row(self) -> UnitRow:
        """All of it."""
        units = self.bench.model.units
        number = self.bench.model.order.index(self.name)
        sizes = self._sizes(number)
        fresh = self.whole.fresh
        before = units[number - 1].name if number else None
        following = sum(sum(self._sizes(later)) for later in range(number + 1, len(units)))
        held = self._held(fresh, before) if before else (0.0, 0.0)
        after, ends = f"post/{self.name}", f"grad/{before}" if fresh.has(f"grad/{before}") else "done"
        begins = after if units[number].kind == "head" else f"grad/{self.name}"
        return UnitRow(
            name=self.name,
            kind=units[number].kind,
            parameter_bytes=sum(sizes),
            largest_bytes=max(sizes, default=0),
            out_bytes=self.bench.out_bytes[self.name],
            held=self._held(fresh, self.name),
            forward=_above(fresh.moments(f"post/{before}" if before else f"pre/{self.name}", after), held),
            backward=_above(fresh.moments(begins, ends), plus(held, (0.0, following))),
            adding=_above(self.whole.adding.moments(begins, ends), held),
            evaluate=envelope(self.evaluated.moments(f"frozen/pre/{self.name}", f"frozen/post/{self.name}")),
            forward_s=fresh.seconds(f"pre/{self.name}", after),
            backward_s=fresh.seconds(begins, ends),
            paper=self._paper(units[number]),
            **self._as_group(units[-1].name, self._sizes(len(units) - 1)),
        )

    def _paper(self, unit: Unit) -> Line:
        return line_through((1, 2), *(float(unit_cost(self.bench.model, unit, batch=batch)) for batch in (1, 2)))

    def _as_group(self, head: str, head_sizes: list[int]) -> dict[str, Any]:
        if self.alone is None:
            return {}
        fresh, adding = self.alone.fresh, self.alone.adding
        held = self._held(fresh, self.name)
        own = fresh.has(f"post/{head}")  # an auxiliary head is no unit: it counts as one piece, both ways
        gradients = (0.0, float(sum(head_sizes)) if own else 0.0)
        turn, end = f"post/{head if own else self.name}", f"grad/{self.name}"
        return {
            "alone_held": held,
            "alone_forward": envelope(fresh.moments(_first(fresh), f"post/{self.name}")),
            "alone_backward": _above(fresh.moments(end, "done"), gradients),
            "alone_adding": envelope(adding.moments(end, "done")),
            "head_forward": _above(fresh.moments(f"post/{self.name}", turn), held) if own else (),
            "head_backward": _above(fresh.moments(turn, end), held),
            "head_adding": _above(adding.moments(turn, end), held),
        }

    def _held(self, pair: _Pair, name: str) -> Line:
        return minus(pair.live(f"post/{name}"), (float(self.bench.out_bytes[name]), 0.0))

    def _sizes(self, number: int) -> list[int]:
        parameters = dict(self.bench.model.named_parameters())
        named = (parameters[name] for name in self.bench.model.units[number].parameters)
        return [param.nbytes for param in named if param.requires_grad]


def _first(pair: _Pair) -> str:
    """Where a group begins: the first block is trained with the stem."""
    return next(mark for mark in pair.one.marks if mark.startswith("pre/"))


def _above(lines: Sequence[Line], floor: Line) -> Lines:
    return envelope(minus(line, floor) for line in lines)


_clock: list[float] = []  # processor time at each mark: a busy machine does not make a unit slower


def _mark(name: str) -> None:
    with profiler.record_function(_PREFIX + name):
        _clock.append(time.thread_time())


def _marker(name: str) -> Callable[[Tensor], None]:
    return lambda grad: _mark(name)


@contextmanager
def _profiled() -> Iterator[_Trace]:
    """Fills a trace with what was allocated inside."""
    trace = _Trace()
    _clock.clear()
    with profiler.profile(profile_memory=True) as profile:
        yield trace
    found, norms = [], []
    for event in profile.kineto_results.events():
        at, name = _start_ns(event), event.name()
        if name == "[memory]":
            found.append((at, "", event.nbytes()))
        elif name.startswith(_PREFIX):
            found.append((at, name.removeprefix(_PREFIX), 0))
        elif name == "aten::native_batch_norm_backward":
            norms.append((at, at + _duration_ns(event)))
    found.sort(key=lambda row: row[0])
    _drop_early(found, norms)
    live, moments = 0.0, []
    for _, mark, num_bytes in found:
        live += num_bytes
        if num_bytes > 0:
            moments.append(live)
        if mark:
            trace.add(mark, live, moments, _clock[len(trace.marks)])
            moments = []


def _start_ns(event: Any) -> int:
    return int(event.start_ns() if hasattr(event, "start_ns") else event.start_us() * 1000)


def _duration_ns(event: Any) -> int:
    return int(event.duration_ns() if hasattr(event, "duration_ns") else event.duration_us() * 1000)


def _drop_early(found: list[tuple[int, str, int]], norms: Sequence[tuple[int, int]]) -> None:
    """A BatchNorm's backward makes room for its result twice and drops the first before it writes: that is no memory.

    The second of the two then comes after the end of the first. Both together would be the worst moment of many models.
    """
    times = [at for at, _, _ in found]
    for start, end in norms:
        inside = range(bisect.bisect_left(times, start), bisect.bisect_right(times, end) - 1)
        before: set[int] = set()
        for number in inside:
            size = found[number][2]
            if size > 0 and size in before and found[number + 1][2] == -size:
                found[number], found[number + 1] = found[number + 1], found[number]
                break
            before.add(size)
