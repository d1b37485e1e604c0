"""Finding the folders of simulations, and reading one as a record.

Covers: finished, unfinished and running simulations; damaged files.
Does not cover: writing them (`coordinator.results.run_directory`, `coordinator.simulation.round_log`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from coordinator.results.run_directory import RESULT, ROUNDS, RUN, SIMILARITY, STATE
from coordinator.results.run_record import DeviceRecord, FailureRecord, LeftOutRecord, RoundRecord, RunRecord, is_better
from coordinator.results.similarity_record import Similarity
from coordinator.results.training_budgets import budgets_by_name
from edge_client import durable
from edge_client.config.run_file import RunFile, load_run_file
from edge_client.errors import InputError, NoSuchNameError, PayloadError
from edge_client.records import Between, Count, Positive, from_map

__all__ = ["find_runs", "holds_runs", "read_run"]

R = TypeVar("R")
Json = Mapping[str, Any]
Share = Annotated[float, Between(0, 1)]
Duration = Annotated[float, Between(0, 1e12)]

_MAX_DEPTH = 4  # folders of grids, in folders of papers
_LOOKED_FOR = f"folders with {RUN} and {ROUNDS} or {RESULT}, as `coordinator simulate --out DIR` leaves them"


# the keys that this module reads; others are ignored


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """A line of rounds.jsonl."""

    round: Positive
    accuracy: Share | None = None
    loss: float | None = None
    macro_f1: Share | None = None
    balanced_accuracy: Share | None = None
    accuracy_per_architecture: Mapping[str, Share] = field(default_factory=dict)
    accuracy_per_device: Mapping[str, Share] = field(default_factory=dict)
    bytes_up: Count
    bytes_down: Count
    seconds: Duration = 0.0
    devices: tuple[Mapping[str, Any], ...] = ()
    failures: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A device that trained in a round."""

    device: str
    plan: str = ""
    predicted_training: Count | None = None
    peak: Count
    base: Count = 0
    samples: Count | None = None
    replans: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A device that took no part in a round."""

    device: str
    code: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """result.json, without what is in the rounds as well."""

    rounds: Count
    accuracy_before: Share | None = None
    model_sha256: str = ""
    whole_model_bytes: Positive | None = None
    reason: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    per_device: tuple[Mapping[str, Any], ...] = ()
    left_out: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _LeftOut:
    """Knowledge that could not be used."""

    device: str | None = None
    round: Count
    code: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Moved:
    """Bytes that a device sent and received."""

    device: str
    bytes_up: Count
    bytes_down: Count


# finding


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The runs that these folders are or contain, each once; raises `NoSuchNameError` for one without any."""
    runs: dict[Path, Path] = {}
    for place in places:
        with durable.disk_errors(f"cannot look into {place}"):
            if not place.is_dir():
                raise NoSuchNameError(f"{place} is no folder; expected a simulation, or a folder of {_LOOKED_FOR}")
            folders = list(_runs_below(place, _MAX_DEPTH))
        if not folders:
            raise NoSuchNameError(f"no simulation in {place} nor below; looked for {_LOOKED_FOR}")
        for folder in folders:
            runs.setdefault(folder.resolve(), folder)
    return list(runs.values())


def holds_runs(place: Path) -> bool:
    """Whether `find_runs` finds a run in a folder."""
    with durable.disk_errors(f"cannot look into {place}"):
        return place.is_dir() and any(True for _ in _runs_below(place, _MAX_DEPTH))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in os.scandir(folder)}
    if names.keys() & {ROUNDS, RESULT} or {RUN, STATE} <= names.keys():
        yield folder
    elif depth:
        for name in sorted((name for name, is_folder in names.items() if is_folder), key=_natural):
            yield from _runs_below(folder / name, depth - 1)


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which seed-2 comes before seed-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


# reading


def read_run(folder: Path) -> RunRecord:
    """The record of a simulation; raises `InputError` that names the missing or damaged file."""
    file = load_run_file(folder / RUN)
    log = _read_log(folder / ROUNDS)
    result = _read_result(folder, len(log.rounds))
    before = result.accuracy_before if result is not None else None
    first = [RoundRecord(number=0, accuracy=before)] if before is not None else []
    rounds = [*first, *log.rounds]
    return RunRecord(
        name=folder.resolve().name,
        file=file,
        state="finished" if result is not None else "unfinished",
        reason=result.reason if result is not None else "",
        num_rounds=len(log.rounds),
        best=_best(rounds, file.stop.metric),
        rounds=rounds,
        devices=_devices(file, log, result.per_device if result is not None else (), str(folder / RESULT)),
        failures=log.failures,
        left_out=[_left_out(row, str(folder / RESULT)) for row in result.left_out] if result is not None else [],
        environment=result.environment if result is not None else {},
        model_sha256=result.model_sha256 if result is not None else "",
        whole_model_bytes=result.whole_model_bytes if result is not None else None,
        similarity=_read_similarity(folder / SIMILARITY),
        memory_of="training",
        folder=folder,
    )


def _left_out(row: Json, where: str) -> LeftOutRecord:
    left_out = _picked(_LeftOut, row, where)
    return LeftOutRecord(device=left_out.device or "", round=left_out.round, code=left_out.code, detail=left_out.detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """The contents of rounds.jsonl."""

    rounds: list[RoundRecord] = field(default_factory=list)
    trained: dict[str, list[_Trained]] = field(default_factory=dict)  # by device
    failures: list[FailureRecord] = field(default_factory=list)


def _read_log(path: Path) -> _Log:
    log = _Log()
    for where, line in _lines(path):
        log.rounds.append(_round(line))
        for row in line.devices:
            trained = _picked(_Trained, row, where)
            log.trained.setdefault(trained.device, []).append(trained)
        for row in line.failures:
            failure = _picked(_Failed, row, where)
            log.failures.append(
                FailureRecord(device=failure.device, round=line.round, code=failure.code, detail=failure.detail)
            )
    return log


def _lines(path: Path) -> Iterator[tuple[str, _Line]]:
    """The rounds in order, each with its line number; a line that is still being written is left out."""
    with durable.disk_errors(f"cannot read {path}"):
        if not path.exists():
            return
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    return
                where = f"{path}, line {number}"
                line = _picked(_Line, _json(raw, where), where)
                if line.round != number:
                    raise InputError(f"{where}: expected round {number}, got {line.round}; is a line missing?")
                yield where, line


def _read_result(folder: Path, num_rounds: int) -> _Result | None:
    path = folder / RESULT
    with durable.disk_errors(f"cannot read {path}"):
        if not path.exists():
            return None
        raw = path.read_bytes()
    result = _picked(_Result, _json(raw, str(path)), str(path))
    if result.rounds != num_rounds:
        raise InputError(f"{path} tells of {result.rounds} rounds, {folder / ROUNDS} has {num_rounds}")
    return result


def _read_similarity(path: Path) -> Similarity:
    with durable.disk_errors(f"cannot read {path}"):
        raw = path.read_bytes() if path.exists() else b"{}"
    return _picked(Similarity, _json(raw, str(path)), str(path))


def _json(raw: bytes, where: str) -> object:
    """NaN and infinity, which a diverged training brings, count as not known."""
    try:
        return json.loads(raw, parse_constant=lambda _: None)
    except ValueError as error:
        raise InputError(f"{where}: expected JSON: {error}") from None


def _picked(cls: type[R], data: object, where: str) -> R:
    """The keys that a dataclass has, checked."""
    names = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    mine = {key: value for key, value in data.items() if key in names} if isinstance(data, Mapping) else data
    try:
        return from_map(cls, mine, where=where)
    except PayloadError as error:
        raise InputError(error.detail) from None


def _round(line: _Line) -> RoundRecord:
    return RoundRecord(
        number=line.round,
        accuracy=line.accuracy,
        balanced_accuracy=line.balanced_accuracy,
        macro_f1=line.macro_f1,
        loss=line.loss,
        per_architecture=line.accuracy_per_architecture,
        per_device=line.accuracy_per_device,
        bytes_up=line.bytes_up,
        bytes_down=line.bytes_down,
        num_updates=len(line.devices),
        seconds=line.seconds,
    )


def _best(rounds: Sequence[RoundRecord], metric: str) -> int | None:
    """The first round with the best value."""
    best: tuple[int, float] | None = None
    for record in rounds:
        value = record.value(metric)
        if value is not None and (best is None or is_better(metric, value, best[1])):
            best = (record.number, value)
    return best[0] if best is not None else None


def _devices(file: RunFile, log: _Log, per_device: Sequence[Json], where: str) -> list[DeviceRecord]:
    """All devices of the run, also those that never trained."""
    moved = {one.device: one for one in (_picked(_Moved, row, where) for row in per_device)}
    failed = {failure.device: failure.code for failure in log.failures if failure.device not in log.trained}
    budgets = budgets_by_name(file)
    return [
        _device(name, budgets.get(name), log.trained.get(name, ()), moved.get(name), failed.get(name, ""))
        for name in sorted(budgets.keys() | log.trained.keys())
    ]


def _device(
    name: str, budget: int | None, trained: Sequence[_Trained], moved: _Moved | None, failure: str
) -> DeviceRecord:
    last = trained[-1] if trained else None
    highest = max(trained, key=lambda one: one.peak - one.base, default=None)
    peak = highest.peak - highest.base if highest is not None else None
    return DeviceRecord(
        name=name,
        budget_bytes=budget,
        plan=last.plan if last is not None else "",
        failure=failure,
        predicted_bytes=(highest.predicted_training or None) if highest is not None else None,
        peak_bytes=peak,
        inside_budget=budget is None or (peak or 0) <= budget,
        replans=sum(one.replans for one in trained),
        num_rounds=len(trained),
        num_samples=last.samples if last is not None else None,
        bytes_up=moved.bytes_up if moved is not None else None,
        bytes_down=moved.bytes_down if moved is not None else None,
    )
