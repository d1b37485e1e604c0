"""The coordinator's child process that touches values: makes, encodes, checks and folds models.

`python -m coordinator.aggregation.process` does the jobs of `jobs` in the order in which they come; it ends at the
end of its input, and dies with its parent.

What fedfit raises on purpose, and what the disk refuses, becomes a `Failure`. A bug ends the process with a traceback
and exit code 1; whoever started it starts another.

Covers: the process and its jobs. One thread: sums have the same bits on every machine of a kind.
Does not cover: which updates count, and what becomes permanent: `out` is a plain file that the coordinator publishes.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.aggregation.job_child import answer_jobs
from coordinator.aggregation.jobs import (
    CalibrateJob,
    Calibration,
    CheckedUpdate,
    CheckJob,
    EncodeJob,
    EvaluateJob,
    Failure,
    FoldedModel,
    FoldJob,
    InitJob,
    Job,
    ProbeJob,
    ServerEvaluation,
    SliceEvaluation,
    StudyJob,
    StudyStarted,
    StudyTimes,
    TellJob,
    WrittenFile,
    name_of,
)
from coordinator.aggregation.task_source import recipe_of, task_place
from coordinator.results.similarity_record import Findings
from edge_client import durable, faults, records
from edge_client.config.run_file import RunFile
from edge_client.device import guard
from edge_client.errors import FedfitError, InputError, MachineError, PayloadError
from edge_client.methods import user_methods
from edge_client.records import Report
from edge_client.wire.container import EXTRA_PREFIX, MEMORY_PREFIX, MODEL_PREFIX, TableRow

# torch is imported inside the jobs: malloc must be pinned before it is loaded
if TYPE_CHECKING:
    from torch import Tensor

    from coordinator.aggregation.extraction import Cutter
    from coordinator.aggregation.frozen import FrozenUpdate
    from coordinator.aggregation.knowledge import Studies
    from edge_client.data.sources import Samples
    from edge_client.methods.base import Method
    from edge_client.models.contract import Model
    from edge_client.task.run_model import Recipe
    from edge_client.wire.tensors import ContainerReader

__all__ = ["check_first_model", "do", "main"]

_log = logging.getLogger(__name__)

_MAX_COUNTER = 2**53
_CUTTERS: dict[str, Cutter] = {}
_STUDIES: list[Studies] = []  # one, once it is needed


def do(job: Job[Any]) -> object:
    """Do one job; what fedfit raises on purpose, and what the disk refuses, becomes an answer."""
    faults.in_round(getattr(job, "round", None))  # of jobs that belong to one
    name = name_of(job)
    try:
        with _user_method(job, f"the server's {name}"), durable.disk_errors(f"aggregator job {name!r}"):
            return _DO[type(job)](job)
    except FedfitError as error:
        return Failure.of(error)


def _user_method(job: Job[Any], doing: str) -> AbstractContextManager[object]:
    """Errors of a user's method name its file."""
    run = getattr(job, "run", None)  # a check has none
    return user_methods.around(run.method.name, doing) if run is not None else nullcontext()


def check_first_model(run: RunFile, task: str | None) -> None:
    """Make the first model of a run and forget it; raises what a coordinator would find out when the run's turn comes.

    `task`: where the file of the run's task lies. What a run goes on from (`init`) is not looked at. Loads torch.
    """
    with user_methods.around(run.method.name, "the server's init"):
        _first_model(InitJob(run=run, task=task, out=""))


def _init(job: InitJob) -> WrittenFile:
    from edge_client.wire import tensors

    state, meta = _first_model(job)
    table = [(name, tensors.codec_for(value, "fp32"), value.shape) for name, value in state.items()]
    return _write(job.out, table, iter(state.values()), meta)


def _first_model(job: InitJob) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """All tensors that the server keeps of a run's version 0, and what is said of them."""
    from coordinator.aggregation.knowledge import first_memory
    from edge_client.methods import coverage
    from edge_client.models.slicing import parse
    from edge_client.training import seeds

    recipe, cutter = recipe_of(job.run, job.task), _cutter(job.run, job.task)
    method = cutter.method
    _seed(seeds.derive(job.run.seed, "init"))
    model = recipe.build_weights()
    method.check(model)
    _check_slices(recipe, cutter.rungs, model)
    method.slices.first_weights(model, lambda cut: recipe.build(model.input_shape, parse(cut)))
    if job.start is not None:
        _start_from(job, model, cutter)
    state: dict[str, Tensor] = {MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
    _seed(seeds.derive(job.run.seed, "extra"))
    state |= {EXTRA_PREFIX + name: value for name, value in method.travel.extra_tensors(model).items()}
    if job.start is not None and method.travel.inherits_extra:
        state |= _inherited(state, job.start)
    state |= _slices(recipe, cutter, state)
    if job.start is not None and job.start_run is not None:
        _take_sizes(state, job, cutter, cutter.of_another(job.start_run))
    state |= first_memory(method.knowledge.teacher, job.run)
    meta = coverage.describe(
        method.plans, stem=model.order[0], kept=method.travel.never_returned(model), notes=method.travel.notes(model)
    )
    return state, meta


def _check_slices(recipe: Recipe, rungs: Sequence[str], model: Model) -> None:
    """Raise `InputError` for slices that devices could not build."""
    import torch

    from edge_client.models.slicing import parse

    if tuple(rungs) != ("full",) and not hasattr(model, "units"):
        raise InputError(
            f"slices: the server cannot cut {', '.join(rungs)} out of a task's model without the shape of a sample; "
            "tell it, Task(input=(3, 96, 96)), or leave slices out"
        )
    for spec in (parse(rung) for rung in rungs):
        if spec.exit is not None:  # only an architecture knows whether it can end there
            with torch.random.fork_rng(devices=[]):
                recipe.build(model.input_shape, spec)


def _slices(recipe: Recipe, cutter: Cutter, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The models of slices that are models of their own; raises `InputError` for a slice that cannot be trained."""
    from coordinator.aggregation.extraction import beginning
    from edge_client.models.slicing import parse, take_tensor

    found: dict[str, Tensor] = {}
    for rung in cutter.rungs:
        another = bool(parse(rung).model)
        places = {} if another else cutter.places(rung, list(state))
        if not cutter.apart:
            continue
        cutter.method.check(cutter.own_model(rung))
        if rung != "full":
            own = {name: take_tensor(state[place.name], place.where).clone() for name, place in places.items()}
            own = _another(recipe, cutter.method, rung) if another else own
            found |= {beginning(rung) + name: tensor for name, tensor in own.items()}
    return found


def _another(recipe: Recipe, method: Method, rung: str) -> dict[str, Tensor]:
    """The first tensors of a model that is no part of the run's, as they follow from the run's seed and its name."""
    from edge_client.models.slicing import parse
    from edge_client.training import seeds

    assert recipe.input_shape is not None  # or `_check_slices` had refused it
    _seed(seeds.derive(recipe.run.seed, "init", rung))
    model = recipe.build(recipe.input_shape, parse(rung))
    tensors = {MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
    return tensors | {EXTRA_PREFIX + name: value for name, value in method.travel.extra_tensors(model).items()}


def _start_from(job: InitJob, model: Model, cutter: Cutter) -> None:
    """The weights of another run's model in place of random ones; raises `InputError` if it is another model."""
    from edge_client.task.run_model import fill
    from edge_client.wire import tensors
    from edge_client.wire.tensors import ContainerReader

    state = model.state_dict()
    table = [(MODEL_PREFIX + name, tensors.codec_for(value, "fp32"), value.shape) for name, value in state.items()]
    with ContainerReader(Path(str(job.start))) as reader:
        _check_start(table, reader, job.run)
        built = cutter.method.slices.network("full")
        if job.start_run is not None and built not in (
            "full",
            cutter.of_another(job.start_run).method.slices.network("full"),
        ):
            raise InputError(
                f"init = {job.run.init!r}: {job.run.method.name!r} has networks of {built} side by side, and the model "
                "of that run is not made of such; start from a run with the same method and bases, or leave init out"
            )
        fill(model, ((name, reader.tensor(name)) for name in reader.names(MODEL_PREFIX)))


def _inherited(state: Mapping[str, Tensor], start: str) -> dict[str, Tensor]:
    """The method's tensors of the start, if it has all of them; those of another method, or of none, are made anew."""
    from edge_client.wire.tensors import ContainerReader

    own = {name: value for name, value in state.items() if name.startswith(EXTRA_PREFIX)}
    with ContainerReader(Path(start)) as reader:
        came = {entry.name: tuple(entry.shape) for entry in reader.header.entries}
        if any(came.get(name) != tuple(value.shape) for name, value in own.items()):
            return {}
        return {name: reader.tensor(name) for name in own}


def _take_sizes(state: Mapping[str, Tensor], job: InitJob, cutter: Cutter, other: Cutter) -> None:
    """What belongs to one size alone is that size's of the other run, whatever method kept it there, in place."""
    from edge_client.models.slicing import parse, take_tensor
    from edge_client.wire.tensors import ContainerReader

    assert job.start_run is not None
    with ContainerReader(Path(str(job.start))) as reader:
        for rung in cutter.rungs:
            if (
                rung not in other.rungs
                or not cutter.method.slices.network(rung) == other.method.slices.network(rung) == rung
            ):
                continue
            if job.run.section(rung) != job.start_run.section(rung) and parse(rung).model:
                raise InputError(
                    f"init = {job.run.init!r}: the slice {rung!r} is another model there; call this run's otherwise, "
                    "and it begins at random"
                )
            theirs = other.sources(rung, reader.header)
            for name, place in cutter.sources_in(rung, list(state)).items():
                own = name.startswith(MODEL_PREFIX) and not place.name.startswith(MODEL_PREFIX)
                if own and name in theirs and place.where is None:
                    value = take_tensor(reader.tensor(theirs[name].name), theirs[name].where)
                    state[place.name].copy_(value)


def _calibrate(job: CalibrateJob) -> Calibration:
    """Rows, or none where the shape of a sample is known to the devices alone, or this machine cannot measure it."""
    from edge_client.measuring.calibration import calibrated, job_for
    from edge_client.methods import registry

    shape = recipe_of(job.run, job.task).input_shape
    if shape is None:
        return Calibration(rows={})
    rules = registry.plan_rules(job.run.method.name, job.run.method.parameters)
    task = f"{job.task}:{task_place(job.run)[1]}" if job.task is not None else None
    try:
        rows = {
            rung: calibrated(job_for(job.run, rules, shape, task=task, cut=rung), durable.cache_dir())
            for rung in registry.rungs(job.run)
        }
    except (InputError, MachineError) as error:
        _log.warning("devices will measure the model themselves: %s", error)
        return Calibration(rows={})
    return Calibration(rows=rows)


def _cutter(run: RunFile, task: str | None) -> Cutter:
    """The slices of a run; of the last one they are kept."""
    from coordinator.aggregation.extraction import Cutter

    key = json.dumps([records.to_map(run), task], sort_keys=True)
    if key not in _CUTTERS:
        _CUTTERS.clear()
        _CUTTERS[key] = Cutter(recipe_of(run, task))
    return _CUTTERS[key]


def _seed(seed: int) -> None:
    """Every global generator that a user's model may draw from."""
    import random

    import numpy
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def _check_start(table: Sequence[TableRow], start: ContainerReader, run: RunFile) -> None:
    """The first difference between the run's model and the one that it shall start from."""
    came = {e.name: e for e in start.header.entries if e.name.startswith(MODEL_PREFIX)}
    wanted = {name for name, _, _ in table}
    problem = next((f"it has {_short(name)}, the run's model has not" for name in came if name not in wanted), "")
    for name, codec, shape in table:
        if name not in came:
            problem = f"it has no {_short(name)}"
        elif tuple(came[name].shape) != tuple(shape) or (came[name].codec == "i64") != (codec == "i64"):
            problem = f"its {_short(name)} is {list(came[name].shape)}, the run's model has {list(shape)}"
        else:
            continue
        break
    if problem:
        raise InputError(f"init = {run.init!r} is another model than {run.what!r}: {problem}")


def _short(name: str) -> str:
    return repr(name.removeprefix(MODEL_PREFIX)[:80])


def _evaluate(job: EvaluateJob) -> ServerEvaluation:
    faults.point("aggregator.evaluate")
    recipe = recipe_of(job.run, job.task)
    samples = _test_samples(recipe, job.data)
    rungs = _cutter(job.run, job.task).rungs
    return ServerEvaluation(results=tuple(_evaluate_slice(job, recipe, samples, rung) for rung in rungs))


def _test_samples(recipe: Recipe, path: str) -> Samples:
    from edge_client.data.sets import npz
    from edge_client.data.sources import all_samples

    return all_samples(npz(path, test=True), recipe.run.classes, recipe.input_shape)


def _evaluate_slice(job: EvaluateJob, recipe: Recipe, samples: Samples, rung: str) -> SliceEvaluation:
    from coordinator.aggregation.comparison import microbatch
    from edge_client.models.slicing import parse
    from edge_client.task.run_model import fill
    from edge_client.training.evaluate import evaluate
    from edge_client.wire.tensors import ContainerReader

    cutter = _cutter(job.run, job.task)
    model = recipe.build(samples.shape, parse(cutter.method.slices.network(rung)))
    with ContainerReader(Path(job.model)) as reader:
        fill(model, zip(cutter.sources(rung, reader.header), cutter.tensors(rung, reader), strict=True))
        predict = cutter.client(rung, model, reader).predict if cutter.method.slices.predicts_by_client else model
    model.requires_grad_(False)
    with recipe.user_code("evaluation"):
        result = evaluate(model, predict, samples, num_classes=len(job.run.classes), microbatch=microbatch(model))
    return SliceEvaluation(
        slice=rung,
        num_samples=result.num_samples,
        num_correct=result.num_correct,
        loss_sum=result.finite_loss_sum,
        confusion=tuple(result.confusion.flatten().tolist()),
    )


def _probe(job: ProbeJob) -> Findings:
    """Of devices that train several networks at once, as the server has them, there is no one model to look at."""
    from coordinator.aggregation.comparison import Probed, Probing
    from edge_client.methods import registry

    faults.point("aggregator.probe")
    recipe, cutter = recipe_of(job.run, job.task), _cutter(job.run, job.task)
    probed = [
        Probed(
            device=u.device, slice=u.slice, update=Path(u.path), own=Path(u.method_state) if u.method_state else None
        )
        for u in job.updates
    ]
    several, method = cutter.method.slices.predicts_by_client, job.run.method
    samples = _test_samples(recipe, job.data)
    if len(samples) == 0:
        raise InputError(f"{job.data}: expected at least one test sample, got none")
    return Probing(recipe, cutter, samples).findings(
        [] if several else probed,
        round_=job.round,
        before=Path(job.base),
        after=Path(job.model),
        is_global=not several and registry.has_global_model(method.name, method.parameters),
    )


def _encode(job: EncodeJob) -> WrittenFile:
    from edge_client.wire.tensors import ContainerReader

    cutter = _cutter(job.run, job.task)
    with ContainerReader(Path(job.model)) as reader:
        table = cutter.table(job.slice, reader.header, job.run.rounds.codec)
        return _write(job.out, table, cutter.tensors(job.slice, reader), cutter.meta(job.slice, reader.header))


def _tell(job: TellJob) -> WrittenFile:
    from coordinator.aggregation.knowledge import public, told
    from edge_client.wire.tensors import ContainerReader

    teacher = _cutter(job.run, None).method.knowledge.teacher
    assert teacher is not None
    with ContainerReader(Path(job.model)) as reader:
        asked = {"cut": job.slice, "device": job.device}
        table, tensors = (
            public(reader, job.run) if job.public else told(teacher, reader, job.run, round_=job.round, **asked)
        )
    return _write(job.out, table, iter(tensors), {})


def _study(job: StudyJob) -> StudyStarted:
    """Answers at once: the fold of the next round waits for what comes out of it."""
    _studies().begin(job.run, Path(job.model), job.version)
    return StudyStarted()


def _studies() -> Studies:
    from coordinator.aggregation.knowledge import Studies

    if not _STUDIES:
        _STUDIES.append(Studies())
    return _STUDIES[0]


def _does_study(run: RunFile) -> bool:
    from edge_client.methods import registry

    rules = registry.knowledge(run.method.name, run.method.parameters)
    return rules is not None and rules.studies


def _write(out: str, table: Sequence[TableRow], tensors: Iterator[Tensor], meta: Mapping[str, Any]) -> WrittenFile:
    """Write a container; a file that could not be finished is removed."""
    from edge_client.wire.tensors import write_container

    path = Path(out)
    try:
        faults.point("aggregator.write")
        sha256, length = write_container(path, meta, table, tensors)
    except (FedfitError, OSError):
        path.unlink(missing_ok=True)
        raise
    return WrittenFile(sha256=sha256, length=length)


def _check(job: CheckJob) -> CheckedUpdate:
    from coordinator.aggregation.knowledge import check_values
    from edge_client.wire.tensors import ContainerReader

    faults.point("aggregator.check")
    with ContainerReader(Path(job.base)) as base, ContainerReader(Path(job.update)) as update:
        report = records.from_map(Report, update.header.meta)
        grown = report.steps * job.max_passes
        names = update.names(MODEL_PREFIX) + update.names(EXTRA_PREFIX)
        squares = sum(_check_model_tensor(name, update, base, report, grown) for name in names)
        if job.knowledge is not None:
            check_values(update, job.knowledge, job.codec)
        for name in update.names("evaluation/"):
            _check_counts(name, update.tensor(name), low=0)
        most = _max_norm(job, base)
    norm = math.sqrt(squares)
    if norm > most:
        raise PayloadError("norm", f"the update moves the model by {norm:.6g}, at most {most:.6g} is accepted")
    return CheckedUpdate(norm=norm)


def _max_norm(job: CheckJob, base: ContainerReader) -> float:
    """What is usual, or before anything is: a multiple of the model that was sent; + 1 for one that is all zeros."""
    from edge_client.params import square_sum

    if job.max_norm is not None or job.max_ratio is None:
        return math.inf if job.max_norm is None else job.max_norm
    names = [entry.name for entry in base.header.entries if entry.codec != "i64"]
    return job.max_ratio * (math.sqrt(sum(square_sum(base.tensor(name)) for name in names)) + 1.0)


def _check_model_tensor(
    name: str, update: ContainerReader, base: ContainerReader, report: Report, max_growth: int
) -> float:
    """Sum of squares of the tensor's delta; raises if it is not finite, or a counter that grew too much."""
    from edge_client.params import square_sum

    entry, sent = update.entry(name), base.entry(name)
    if entry.shape != sent.shape or (entry.codec == "i64") != (sent.codec == "i64"):
        raise PayloadError(
            "shape",
            f"{name!r} is {entry.codec} {list(entry.shape)}, assignment sent {sent.codec} {list(sent.shape)}",
        )
    value = update.tensor(name)
    if entry.codec == "i64":
        _check_counts(name, value, low=0 if report.payload == "params" else -_MAX_COUNTER)
        before = base.tensor(name)
        after = value if report.payload == "params" else value + before
        if value.numel() and not (int(after.min()) >= 0 and int((after - before).max()) <= max_growth):
            raise PayloadError("range", f"{name!r} counts what {report.steps} steps cannot make of it")
        return 0.0
    squares = square_sum(value, base.tensor(name) if report.payload == "params" else None)
    if not math.isfinite(squares):
        raise PayloadError("not_finite", f"{name!r} has values that are not finite")
    return squares


def _check_counts(name: str, value: Tensor, *, low: int) -> None:
    if value.is_floating_point():
        raise PayloadError("dtype", f"{name!r} is not an integer tensor")
    if value.numel() and not low <= int(value.min()) <= int(value.max()) <= _MAX_COUNTER:
        raise PayloadError("range", f"{name!r} has values outside of {low} to {_MAX_COUNTER}")


def _fold(job: FoldJob) -> FoldedModel:
    from coordinator.aggregation.knowledge import learnt
    from edge_client.wire.tensors import ContainerReader

    faults.point("aggregator.fold.begin")
    with ContainerReader(Path(job.model)) as reader:
        teacher = _cutter(job.run, job.task).method.knowledge.teacher
        studied, times = _joined(job)
        (rows, memory), missing = learnt(teacher, reader, _updates(job), job.run, round_=job.round, studied=studied)
        model = [entry for entry in reader.header.entries if not entry.name.startswith(MEMORY_PREFIX)]
        table = [*((entry.name, entry.codec, entry.shape) for entry in model), *rows]
        remembered = ((name, tensor) for (name, _, _), tensor in zip(rows, memory, strict=True))
        folded = itertools.chain(_folded(job, reader), remembered)
        written = _write(job.out, table, _in_order(folded, table), reader.header.meta)
    faults.point("aggregator.fold.written")
    return FoldedModel(sha256=written.sha256, length=written.length, left_out=tuple(missing), study=times)


def _joined(job: FoldJob) -> tuple[Mapping[str, Tensor], StudyTimes | None]:
    """What the method made of the version before, beside the round; and how long this fold waited for it."""
    if not _does_study(job.run):
        return {}, None
    begin = time.monotonic()
    study = _studies().result(job.run, Path(job.model), job.round - 1)
    waited_s = time.monotonic() - begin
    return study.made, StudyTimes(began_s=study.began_s, ended_s=study.ended_s, waited_s=waited_s)


def _updates(job: FoldJob) -> list[FrozenUpdate]:
    from coordinator.aggregation.frozen import FrozenUpdate

    return [
        FrozenUpdate(device=u.device, path=Path(u.path), num_samples=u.num_samples, slice=u.slice) for u in job.updates
    ]


def _folded(job: FoldJob, reader: ContainerReader) -> Iterator[tuple[str, Tensor]]:
    """The new tensors by their names in the container: of one model, or of each slice that is one of its own."""
    from coordinator.aggregation.extraction import beginning
    from coordinator.aggregation.frozen import FrozenSet, ModelState, stored_name

    cutter, train, model = _cutter(job.run, job.task), job.run.train, Path(job.model)
    momentum = train.momentum if train.optimizer == "sgd" else 0.0
    updates = _updates(job)
    if not cutter.apart:
        frozen = FrozenSet(model, updates, places=cutter.places, num_devices=job.num_devices, momentum=momentum)
        for name, tensor in cutter.method.server.fold(ModelState(reader), frozen, round=job.round):
            yield stored_name(name), tensor
        return
    for cut in ("full", *(rung for rung in cutter.rungs if rung != "full")):
        state = ModelState(reader, beginning(cut))
        own = [update for update in updates if update.slice == cut]
        if own:
            frozen = FrozenSet(model, own, beginning=beginning(cut), momentum=momentum)  # not all devices are its
            folded = cutter.method.server.fold(state, frozen, round=job.round)
        else:
            folded = ((name, state.tensor(name)) for name in state.names())
        for name, tensor in folded:
            yield beginning(cut) + stored_name(name), tensor


def _in_order(folded: Iterator[tuple[str, Tensor]], table: Sequence[TableRow]) -> Iterator[Tensor]:
    """The tensors of a fold; a model that is not finite is never written: every later round would inherit it."""
    from edge_client.params import square_sum

    for index, ((listed, _, _), (name, tensor)) in enumerate(zip(table, folded, strict=True)):
        if name != listed:
            raise ValueError(f"the method folded {name!r} where {listed!r} was due; keep the order of state.names()")
        if index == len(table) // 2:
            faults.point("aggregator.fold.middle")
        if tensor.is_floating_point() and not math.isfinite(square_sum(tensor)):
            raise PayloadError("not_finite", f"the fold of the updates makes {name!r} not finite")
        yield tensor


_DO: Mapping[type, Callable[[Any], object]] = {
    InitJob: _init,
    CalibrateJob: _calibrate,
    EncodeJob: _encode,
    TellJob: _tell,
    StudyJob: _study,
    CheckJob: _check,
    FoldJob: _fold,
    EvaluateJob: _evaluate,
    ProbeJob: _probe,
}


def main() -> int:
    """Answer jobs until the input ends."""
    guard.die_with_parent()
    guard.pin_malloc()
    # every tensor is read into fresh memory: with huge pages a fifth less time goes into getting it
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator ends us by EOF
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    import torch

    torch.set_num_threads(1)
    answer_jobs(do)
    return 0


if __name__ == "__main__":
    guard.end(main())
