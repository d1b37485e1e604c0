"""`coordinator simulate`: a run file, or flags, on virtual devices of this machine; methods and seeds as a grid."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.aggregation.pretrained import resolved
from coordinator.aggregation.task_source import with_task
from coordinator.cli.options import formatted, show, warn
from coordinator.results.run_directory import DATA, LOG, RunDirectory
from coordinator.run_check import guessing_warning, warnings_of
from coordinator.simulation.run_options import Combination, Flags, Missing, combinations, complete
from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.device.profile import measure
from edge_client.errors import ConflictError, InputError, NothingFitsError
from edge_client.methods import user_methods

if TYPE_CHECKING:
    from coordinator.simulation.simulation import Processes

__all__ = ["add_options"]

Json = dict[str, Any]

_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `simulate`."""
    formatted(parser).set_defaults(do=_simulate)
    add = parser.add_argument
    add("file", type=Path, nargs="?", metavar="FILE.toml", help="a run file; flags change what it says")
    text = "several: all combinations with the seeds, below --out; FILE.py:OBJECT tries one of your own"
    add("--method", metavar="NAME[,NAME]", help=text)
    add("--model", metavar="NAME", help="a built-in model: coordinator models list (default: small-cnn)")
    add("--seed", metavar="N[,N]", help="of the devices' data and the training (default: 1)")
    add("--rounds", type=int, metavar="N", help="default: those of the run file, or 10")
    add("--participation", type=float, metavar="SHARE", help="of the devices, in each round")
    add("--data", metavar="SOURCE[:PATH]", help="such as cifar10:/data/cifar10 (default: digits)")
    add("--partition", metavar="TEXT", help="iid, dirichlet:0.5, ...")
    add("--devices", type=int, metavar="N", help="how many virtual devices")
    add("--training-budgets", metavar="LIST", help="40MB,80MB in turns, or 40MB*10,80MB*6")
    add("--accelerator", metavar="NAME", help="where devices train: none (the CPU), auto, or such as cuda:0")
    add("--slices", metavar="LIST", help="parts of the model, the largest first: full,depth:1.1.2.2,width:1/2")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the run file; NAME: method.NAME")
    add("--name", metavar="NAME", help="of the run")
    add("--out", type=Path, metavar="DIR", help="default: simulations/NAME, or NAME-2 for other settings")
    add("--workers", type=int, metavar="N", help="processes that train (default: one per core)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One combination, resolved."""

    file: RunFile
    base: Path  # what all runs of a grid share is below
    folder: Path
    finished: Json | None
    task_source: str = ""
    task_path: str = ""


def _simulate(options: argparse.Namespace) -> None:
    if options.workers is not None and options.workers < 1:
        raise InputError(f"--workers: expected 1 or more, got {options.workers}")
    flags = Flags(**{f.name: getattr(options, f.name) for f in dataclasses.fields(Flags)})
    with user_methods.register(flags.method) if flags.method is not None else contextlib.nullcontext() as method:
        _simulate_all(dataclasses.replace(flags, method=method), options)


def _simulate_all(flags: Flags, options: argparse.Namespace) -> None:
    from coordinator.cli import simulation_report  # rich takes 0.1 s to load

    combined = combinations(flags)
    runs = _resolve(combined, options)
    warn(text for run in runs if run.finished is None for text in warnings_of(run.file))
    try:
        results = _run_all(runs, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped; the same command continues where it stopped") from None
    warn(text for run, result in zip(runs, results, strict=True) if (text := _close_to_guessing(run, result)))
    if len(combined) == 1:
        show(options, results[0], simulation_report.result)
    else:
        show(options, {"runs": results}, simulation_report.grid)


def _close_to_guessing(run: _Run, result: Json) -> str:
    scores = [value for value in result["accuracy_per_round"] if value is not None]
    text = guessing_warning(scores, len(run.file.classes), "accuracy")
    return f"{run.folder}: {text}" if text else ""


def _resolve(combined: Sequence[Combination], options: argparse.Namespace) -> list[_Run]:
    """Complete and check every combination before the first of them begins."""
    missing: dict[tuple[str, str], Missing] = {}
    runs = []
    for one in combined:
        file = resolved(complete(one, _missing(one, missing)), options.file or Path("here"))
        source, path = "", ""
        if file.task is not None:
            if options.file is None:
                raise InputError("a task needs a run file that names it; write task = ... into FILE.toml")
            file, source, path = with_task(file, file.task, options.file)
        name = "." if len(combined) == 1 else f"{one.method.replace('+', '-')}-seed-{one.seed}"
        if options.out is None and len(combined) == 1:
            base, finished = _beside(Path("simulations"), file, name)
        else:
            base = options.out if options.out is not None else Path("simulations") / file.name
            finished = RunDirectory(base / name).check(file)
        folder = base / name
        runs.append(_Run(file=file, base=base, folder=folder, finished=finished, task_source=source, task_path=path))
    return runs


def _beside(parent: Path, file: RunFile, name: str) -> tuple[Path, Json | None]:
    """The folder of this very run, finished or not, or a new one: NAME, NAME-2, NAME-3, ... below `parent`."""
    for number in itertools.count(1):
        base = parent / (file.name if number == 1 else f"{file.name}-{number}")
        try:
            return base, RunDirectory(base / name).check(file)
        except ConflictError:
            continue
    raise AssertionError("unreachable")


def _missing(one: Combination, known: dict[tuple[str, str], Missing]) -> Missing | None:
    """The shape and classes of the data, where the run file lacks them; the data is opened once."""
    from coordinator.simulation import data as simulation_data

    table, model = one.table, one.table.get("model", {})
    section = table.get("simulate", {})
    is_complete = "classes" in table and ("task" in table or (isinstance(model, dict) and "input" in model))
    if is_complete or not isinstance(section, dict) or not section.get("data"):
        return None
    key = (str(section["data"]), str(section.get("partition", "")))
    if key not in known:
        known[key] = simulation_data.describe(*key)
    return known[key]


def _run_all(runs: Sequence[_Run], options: argparse.Namespace) -> list[Json]:
    """Run one after the other, with the same worker processes and the same copy of the data."""
    from coordinator.simulation.simulation import Processes
    from coordinator.simulation.worker_pool import WorkerPool

    results: list[Json] = []
    with contextlib.ExitStack() as opened:
        processes: Processes | None = None
        for run in runs:
            if run.finished is not None:
                print(f"{run.folder} is finished already", file=sys.stderr)
                results.append({**run.finished, "out": str(run.folder)})
                continue
            if processes is None:
                threads = run.file.train.threads
                num_workers = options.workers or max(1, measure(None).cores // threads)
                processes = Processes(WorkerPool(num_workers, threads=threads))
                opened.callback(processes.close)
            with _leaving_nothing(run):
                results.append(_run_one(run, processes))
    for run in runs:
        shutil.rmtree(run.base / DATA, ignore_errors=True)
    return results


@contextlib.contextmanager
def _leaving_nothing(run: _Run) -> Iterator[None]:
    """A run that is refused has no folder: the mended one takes its place."""
    try:
        yield
    except (InputError, NothingFitsError):
        for folder in {run.folder: None, run.base: None}:
            RunDirectory(folder).leave()
        raise


def _run_one(run: _Run, processes: Processes) -> Json:
    from coordinator.cli import simulation_report
    from coordinator.simulation import data as simulation_data
    from coordinator.simulation import simulation

    setup = simulation.Setup(
        file=run.file,
        folder=run.folder,
        data=simulation_data.prepare(run.file, run.base / DATA) if run.file.task is None else None,
        task_source=run.task_source,
        task_path=run.task_path,
    )
    progress = simulation_report.Progress(run.file)
    watched = progress.watching(simulation_report.header(setup, processes.pool.size))
    asking = user_methods.guard(run.file.method.name, "on the server", user_lines_only=True)
    with watched, _logging_to(run.folder / "state"), asking:
        return {**simulation.simulate(setup, processes, progress), "out": str(run.folder)}


@contextlib.contextmanager
def _logging_to(folder: Path) -> Iterator[None]:
    """What the coordinator says goes to a file of the run."""
    with durable.disk_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / LOG, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_LOG_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    before = root.level
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)
        handler.close()
