"""Measures what each unit of a model costs: `python -m edge_client.calibration JOB.json ROWS.json`.

A process of its own, because torch's profiler leaves tens of megabytes behind. It trains real steps on random samples
at two small batches through the same loop and the same method as a worker, and reads every allocation from the
profiler: the whole model at once, each block as a group of its own where the method trains by groups, and a pass
without gradients; once for each kind of recomputation. What libraries take beside torch is measured on a whole step.

Covers: the measurement, its process, the key under which rows are kept. Does not cover: what follows from rows
(`planning.cost`). The numbers are those of this machine's kind and torch; another machine's rows are a good guess.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client import durable
from edge_client.device import guard, meter
from edge_client.device.probe import find_torch
from edge_client.errors import FedfitError, MachineError
from edge_client.planning.cost import measured_bytes
from edge_client.planning.rows import (
    Line,
    Lines,
    ModelRows,
    UnitRow,
    envelope,
    line_through,
    load_rows,
    minus,
    plus,
    save_rows,
)
from edge_client.records import Count, Hash, PlanRules, TrainingPlan, from_map, to_map
from edge_client.run_file import RunFile

if TYPE_CHECKING:
    from torch import Tensor

    from edge_client.methods.base import Client, Method
    from edge_client.models.contract import Model, Unit

__all__ = ["CalibrationJob", "become", "calibrated", "job_for", "main", "measure", "measure_beside"]

_log = logging.getLogger(__name__)

_BATCHES = ((8, 16), (4, 8), (2, 4))  # the first whose activations are small
_ACTIVATION_BYTES = 256 * 2**20
_PREFIX = "fedfit/"
_COPIES = 3  # of all activations, roughly, during a step
_WORKER_BYTES = 4 * 10**6  # that a worker takes beside what is done here: its order, progress, results
_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob:
    """What to measure; everything that changes the numbers is in the key."""

    run: RunFile  # its model or task, classes and method count
    input_shape: tuple[int, ...]
    task: str | None = None  # path of the task's file
    dtype: str = "fp32"
    limit_bytes: Count = 0  # of this process; 0: none
    key: Hash = "0" * 64


def job_for(
    run: RunFile,
    rules: PlanRules,
    input_shape: Sequence[int],
    *,
    task: str | None = None,
    dtype: str = "fp32",
) -> CalibrationJob:
    """A job and its key: equal keys have equal rows."""
    torch = find_torch()
    what = {
        "format": 1,
        "model": to_map(replace(run.model, init="random")) if run.model is not None else None,
        "task": run.task.sha256 if run.task is not None else None,
        "input": list(input_shape),
        "classes": len(run.classes),
        "groups": rules.groups,
        "auxiliary": rules.auxiliary,
        "dtype": dtype,
        "threads": run.train.threads,
        "torch": torch.version if torch is not None else "",
        "machine": platform.machine(),
    }
    key = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
    return CalibrationJob(run=run, input_shape=tuple(input_shape), task=task, dtype=dtype, key=key)


def calibrated(job: CalibrationJob, cache: Path | None) -> ModelRows:
    """The rows of a job: from the cache, or measured in a process of its own and kept there. Raises `MachineError`."""
    path = cache / f"{job.key}.json" if cache is not None else None
    known = load_rows(path, key=job.key) if path is not None else None
    if known is not None:
        return known
    with tempfile.TemporaryDirectory(prefix="fedfit-calibration-") as folder:
        given, out = Path(folder) / "job.json", Path(folder) / "rows.json"
        given.write_text(json.dumps(to_map(job)), encoding="utf-8")
        _run_process(given, out)
        rows = load_rows(out, key=job.key)
    if rows is None:
        raise MachineError("the calibration left no rows")
    if path is not None:
        try:
            save_rows(path, rows)
        except OSError as error:
            _log.warning("cannot keep cost rows in %s: %s", path, error.strerror)
    return rows


def _run_process(given: Path, out: Path) -> None:
    command = [sys.executable, "-m", "edge_client.calibration", str(given), str(out)]
    env = {**os.environ, "FEDFIT_PARENT_PID": str(os.getpid())}
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"the calibration did not end within {_TIMEOUT_S:g} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if not line.startswith("USDT:")]
        why = lines[-1] if lines else "it said nothing"
        raise MachineError(f"the calibration ended with exit code {done.returncode}: {why[:300]}")


def become(job: CalibrationJob, workdir: Path) -> None:
    """Replace this worker by a calibration that becomes the worker again: two of them would not fit side by side."""
    guard.lift_limit()
    (workdir / "calibration.json").write_text(json.dumps(to_map(job)), encoding="utf-8")
    os.execv(sys.executable, [sys.executable, "-m", "edge_client.calibration", "--for", str(workdir)])


def measure_beside(job: CalibrationJob, workdir: Path) -> None:
    """For a process that has memory for both: measure in another one; a failure is told, and not tried again."""
    guard.lift_limit()
    (workdir / "calibration.json").write_text(json.dumps(to_map(job)), encoding="utf-8")
    try:
        calibrated(replace(job, limit_bytes=0), durable.cache_dir())
    except MachineError as error:
        _log.warning("%s", error)


def _for_worker(workdir: Path) -> None:
    """Measure, keep the rows where the worker looks first, and become the worker."""
    job = from_map(CalibrationJob, json.loads((workdir / "calibration.json").read_bytes()), where="calibration job")
    try:
        save_rows(durable.cache_dir() / f"{job.key}.json", measure(job))
    except (FedfitError, OSError, MemoryError, RuntimeError) as error:  # the worker does without
        _log.warning("the calibration failed: %s", error)
    guard.lift_limit()
    os.execv(sys.executable, [sys.executable, "-m", "edge_client.worker", str(workdir)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[0] == "--for":
        _stand_guard()
        _for_worker(Path(arguments[1]))
    given, out = Path(arguments[0]), Path(arguments[1])
    _stand_guard()
    job = from_map(CalibrationJob, json.loads(given.read_bytes()), where="calibration job")
    os.environ["OMP_NUM_THREADS"] = str(job.run.train.threads)
    try:
        save_rows(out, measure(job))
    except FedfitError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _stand_guard() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parent = os.environ.get("FEDFIT_PARENT_PID", "")
    guard.die_with_parent(int(parent) if parent.isdigit() else None)
    guard.pin_malloc()
    guard.raise_oom_score()


def measure(job: CalibrationJob) -> ModelRows:
    """The rows, measured in this process; malloc must be pinned before torch is loaded."""
    import torch

    import edge_client.assignment  # all that a worker loads: its base is measured here  # noqa: F401
    from edge_client.methods import registry
    from edge_client.models.layout import allows_channels_last, to_channels_last
    from edge_client.run_model import recipe
    from edge_client.task import read_source
    from edge_client.task_files import split_place
    from edge_client.training.loop import Settings
    from edge_client.training.warmup import warm_up

    torch.set_num_threads(job.run.train.threads)
    _open_some_data()
    source = read_source(*split_place(job.task)) if job.task is not None else None
    model = recipe(job.run, source).build(job.input_shape)
    channels_last = allows_channels_last(model)
    if channels_last:
        to_channels_last(model)
    warm_up(model, Settings(batch=1, microbatch=1, learning_rate=0.0, seed=0, channels_last=channels_last))
    base_bytes = meter.rss_bytes()
    if job.limit_bytes:
        guard.limit_growth(job.limit_bytes)
    bench = _Bench(
        model=model,
        method=registry.get(job.run.method.name, job.run.method.parameters),
        num_classes=len(job.run.classes),
        channels_last=channels_last,
        dtype=job.dtype,
        batches=_batches(model),
    )
    grown = bench.grown()  # first: a process that has used the profiler has memory to spare
    modes = {"plain" if kind is None else kind: bench.rows(kind) for kind in (None, *model.recompute_kinds)}
    rows = ModelRows(
        key=job.key,
        torch=str(torch.__version__),
        machine=platform.machine(),
        channels_last=channels_last,
        dtype=job.dtype,
        batches=bench.batches,
        base_bytes=base_bytes + _WORKER_BYTES,
        model_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        hidden_bytes=0,
        has_batchnorm=bench.has_batchnorm(),
        has_batch_statistics=bench.has_batch_statistics(),
        min_batch=model.min_batch,
        modes=modes,
    )
    hidden = (grown[kind] - measured_bytes(rows, kind, bench.batches[1]) for kind in grown)
    return replace(rows, hidden_bytes=max(0, *hidden))


def _open_some_data() -> None:
    """As a worker does: what it loads for that stays."""
    from edge_client.data.sources import open_data
    from edge_client.files import DataSection

    section = DataSection(source="digits", partition="dirichlet:1", part=(0, 2))
    open_data(section, tuple(str(digit) for digit in range(10)), (1, 8, 8), {})


def _batches(model: Model) -> tuple[int, int]:
    per_sample = 4 * _COPIES * sum(unit.num_activations for unit in model.units)
    fitting = (pair for pair in _BATCHES if pair[1] * per_sample <= _ACTIVATION_BYTES)
    return next(fitting, _BATCHES[-1])


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
        """One trace per training step: each begins with its batch."""
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


@dataclass(slots=True, kw_only=True)
class _Bench:
    """One model on the bench."""

    model: Model
    method: Method
    num_classes: int
    channels_last: bool
    dtype: str
    batches: tuple[int, int]
    out_bytes: dict[str, int] = field(default_factory=dict)

    def rows(self, kind: str | None) -> tuple[UnitRow, ...]:
        """One row per unit, with this kind of recomputation."""
        self.model.recompute = kind
        whole = _Pair(self.batches, *(self._steps(batch, ())[0] for batch in self.batches))
        blocks = [unit.name for unit in self.model.units if unit.kind == "block"]
        alone: dict[str, _Pair] = {}
        if self.method.plans.groups and blocks:
            one, other = (self._steps(batch, tuple((name,) for name in blocks)) for batch in self.batches)
            alone = {name: _Pair(self.batches, *pair) for name, *pair in zip(blocks, one, other, strict=True)}
        evaluated = _Pair(self.batches, *(self._forward(batch) for batch in self.batches))
        self.model.recompute = None
        return tuple(_UnitMeter(self, name, whole, alone.get(name), evaluated).row() for name in self.model.order)

    def grown(self) -> dict[str | None, int]:
        """Kind of recomputation -> peak of a step of the whole model, as the kernel counts it."""
        found: dict[str | None, int] = {}
        for kind in (None, *self.model.recompute_kinds):
            self.model.recompute = kind
            self._train(self.batches[1], ())
            before = meter.rss_bytes() if meter.reset_peak() else meter.peak_rss_bytes()
            self._train(self.batches[1], ())
            found[kind] = meter.peak_rss_bytes() - before
        self.model.recompute = None
        return found

    def has_batchnorm(self) -> bool:
        return any(True for _ in self._norms())

    def has_batch_statistics(self) -> bool:
        return any(not norm.track_running_stats for norm in self._norms())

    def _norms(self) -> Iterator[Any]:
        from torch import nn

        return (part for part in self.model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))

    def _steps(self, batch: int, groups: tuple[tuple[str, ...], ...]) -> list[_Trace]:
        """A trace of one step per group, or of one step over everything."""
        self._train(batch, groups)  # libraries choose their kernels at the first step of a shape
        with _profiled() as trace, self._marked():
            self._train(batch, groups)
        return trace.parts()

    def _train(self, batch: int, groups: tuple[tuple[str, ...], ...]) -> None:
        from edge_client.training.loop import Settings, train

        plan = TrainingPlan(groups=groups, microbatch=batch, budget_bytes=0, predicted_bytes=0)
        settings = Settings(
            batch=batch,
            microbatch=batch,
            learning_rate=0.0,
            seed=0,
            channels_last=self.channels_last,
            dtype=self.dtype,
        )
        client = self._client(plan)
        adjust = client.adjust

        def stepping(name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
            _mark("step")
            adjust(name, param, grad, kept)

        client.adjust = stepping  # type: ignore[method-assign]
        train(self.model, client, _RandomData(self.model.input_shape, batch, self.num_classes), settings)

    def _client(self, plan: TrainingPlan) -> Client:
        from edge_client.methods.base import Job
        from edge_client.training.loop import generator

        client = self.method.client()
        job = Job(
            model=self.model,
            round=1,
            num_rounds=1,
            epochs=1,
            learning_rate=0.0,
            class_counts=(1,) * self.num_classes,
            plan=plan,
            rng=lambda purpose: generator(0, purpose),
            extra=self.method.extra_tensors(self.model),
        )
        client.begin(job)
        return client

    def _forward(self, batch: int) -> _Trace:
        import torch

        data = _RandomData(self.model.input_shape, batch, self.num_classes)
        self.model.eval()
        with _profiled() as trace, self._marked(), torch.no_grad():
            x, _ = data.batch(torch.arange(batch))
            if self.channels_last and x.ndim == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            self.model(x)
            _mark("end")
        return trace.parts()[0]

    @contextlib.contextmanager
    def _marked(self) -> Iterator[None]:
        """Marks before and after each unit's forward, and where its backward begins."""
        import torch

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


class _RandomData:
    """Samples that cost nothing but themselves."""

    def __init__(self, shape: tuple[int, ...], num_samples: int, num_classes: int) -> None:
        import torch

        self._shape = shape
        self.labels = torch.arange(num_samples) % num_classes

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        _mark("batch")
        return torch.rand(len(indices), *self._shape), self.labels[indices]


@dataclass(frozen=True, slots=True)
class _Pair:
    """The same steps at two batches: lines through both."""

    batches: tuple[int, int]
    one: _Trace
    other: _Trace

    def has(self, mark: str) -> bool:
        return mark in self.one.marks

    def live(self, mark: str) -> Line:
        """Bytes in use at a mark."""
        return line_through(self.batches, self.one.live[self.one.at(mark)], self.other.live[self.other.at(mark)])

    def moments(self, start: str, end: str) -> list[Line]:
        """Bytes in use at the first mark, and after every allocation until the second."""
        here, there = self.one.between(start, end), self.other.between(start, end)
        if len(here) != len(there):  # another kernel was chosen: the worst of both will do
            here, there = [max(here)], [max(there)]
        return [line_through(self.batches, one, other) for one, other in zip(here, there, strict=True)]

    def seconds(self, start: str, end: str) -> Line:
        """Time from mark to mark."""
        spent = [t.seconds[t.at(end)] - t.seconds[t.at(start)] for t in (self.one, self.other)]
        return line_through(self.batches, *spent)


@dataclass(frozen=True, slots=True)
class _UnitMeter:
    """Reads the row of one unit from the traces."""

    bench: _Bench
    name: str
    whole: _Pair
    alone: _Pair | None
    evaluated: _Pair

    def row(self) -> UnitRow:
        """All of it."""
        units = self.bench.model.units
        number = self.bench.model.order.index(self.name)
        sizes = self._sizes(number)
        before = units[number - 1].name if number else None
        following = sum(sum(self._sizes(later)) for later in range(number + 1, len(units)))
        held = self._held(self.whole, before) if before else (0.0, 0.0)
        ends = f"grad/{before}" if before and self.whole.has(f"grad/{before}") else "step"
        after = f"post/{self.name}"
        begins = after if units[number].kind == "head" else f"grad/{self.name}"
        return UnitRow(
            name=self.name,
            kind=units[number].kind,
            parameter_bytes=sum(sizes),
            largest_bytes=max(sizes, default=0),
            out_bytes=self.bench.out_bytes[self.name],
            held=self._held(self.whole, self.name),
            forward=_above(self.whole.moments(f"post/{before}" if before else f"pre/{self.name}", after), held),
            backward=_above(self._backward(begins, ends), plus(held, (0.0, following))),
            evaluate=envelope(self.evaluated.moments(f"frozen/pre/{self.name}", f"frozen/post/{self.name}")),
            forward_s=self.whole.seconds(f"pre/{self.name}", f"post/{self.name}"),
            backward_s=self.whole.seconds(begins, ends) if self.whole.has(begins) else (0.0, 0.0),
            paper=self._paper(units[number]),
            **self._as_group(units[-1].name, self._sizes(len(units) - 1)),
        )

    def _paper(self, unit: Unit) -> Line:
        from edge_client.planning.paper_cost import unit_cost  # torch

        return line_through((1, 2), *(float(unit_cost(self.bench.model, unit, batch=batch)) for batch in (1, 2)))

    def _backward(self, begins: str, ends: str) -> list[Line]:
        """A unit in front of all that is trained has none."""
        return self.whole.moments(begins, ends) if self.whole.has(begins) else []

    def _as_group(self, head: str, head_sizes: list[int]) -> dict[str, Any]:
        if self.alone is None:
            return {}
        first, held = self._first(), self._held(self.alone, self.name)
        own = self.alone.has(f"post/{head}")  # an auxiliary head is no unit: it counts as one piece, both ways
        gradients = (0.0, float(sum(head_sizes)) if own else 0.0)
        end = f"grad/{self.name}"
        return {
            "alone_held": held,
            "alone_forward": envelope(self.alone.moments(f"pre/{first}", f"post/{self.name}")),
            "alone_backward": _above(self.alone.moments(end, "step"), gradients),
            "head_forward": _above(self.alone.moments(f"post/{self.name}", f"post/{head}"), held) if own else (),
            "head_backward": _above(self.alone.moments(f"post/{head if own else self.name}", end), held),
        }

    def _first(self) -> str:
        """The first block is trained with the stem."""
        assert self.alone is not None
        return next(mark for mark in self.alone.one.marks if mark.startswith("pre/")).removeprefix("pre/")

    def _held(self, pair: _Pair, name: str) -> Line:
        return minus(pair.live(f"post/{name}"), (float(self.bench.out_bytes[name]), 0.0))

    def _sizes(self, number: int) -> list[int]:
        parameters = dict(self.bench.model.named_parameters())
        named = (parameters[name] for name in self.bench.model.units[number].parameters)
        return [param.nbytes for param in named if param.requires_grad]


def _above(lines: Sequence[Line], floor: Line) -> Lines:
    return envelope(minus(line, floor) for line in lines)


_clock: list[float] = []  # processor time at each mark: a busy machine does not make a unit slower


def _mark(name: str) -> None:
    from torch.autograd.profiler import record_function

    with record_function(_PREFIX + name):
        _clock.append(time.thread_time())


def _marker(name: str) -> Callable[[Tensor], None]:
    return lambda grad: _mark(name)


@contextlib.contextmanager
def _profiled() -> Iterator[_Trace]:
    """Fills a trace with what was allocated inside."""
    from torch.autograd import profiler

    trace = _Trace()
    _clock.clear()
    with profiler.profile(profile_memory=True) as profile:
        yield trace
    found = []
    for event in profile.kineto_results.events():
        at = event.start_ns() if hasattr(event, "start_ns") else event.start_us() * 1000
        if event.name() == "[memory]":
            found.append((at, "", event.nbytes()))
        elif event.name().startswith(_PREFIX):
            found.append((at, event.name().removeprefix(_PREFIX), 0))
    found.sort(key=lambda row: row[0])
    live, moments = 0.0, []
    for _, mark, num_bytes in found:
        live += num_bytes
        if num_bytes > 0:
            moments.append(live)
        if mark:
            trace.add(mark, live, moments, _clock[len(trace.marks)])
            moments = []


if __name__ == "__main__":
    sys.exit(main())
