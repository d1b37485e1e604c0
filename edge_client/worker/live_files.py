"""The files through which a daemon and its worker communicate while the worker runs, in the work directory.

    plan.json     worker -> daemon: the plan that it is about to train by, and the budget in force
    budget.json   daemon -> worker: less memory is left, use no more than this
    use.json      worker -> daemon: what it has of memory that an accelerator shares with the host, and nobody else sees

Each is replaced as a whole and never synced: after a power cut the worker starts again, and what its predecessor left
is removed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from edge_client.errors import PayloadError
from edge_client.records import Ceiling, Count, Hash, Matches, TrainingPlan, from_map, to_map

__all__ = [
    "BudgetFile",
    "Trial",
    "clear",
    "mark_accelerator",
    "read_trial",
    "read_use",
    "write_budget",
    "write_trial",
    "write_use",
]

R = TypeVar("R")

_PLAN, _BUDGET, _USE = "plan.json", "budget.json", "use.json"
_LONGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The plan that a worker trains by, and the budget that it must not exceed."""

    key: Hash  # of the model and how it is trained
    budget_bytes: Count  # in force; the plan may have been made for another one
    plan: TrainingPlan
    accelerator_budget_bytes: Count = 0  # in force there; 0: it is part of the other
    memory: Annotated[str, Matches(r"host|accelerator")] = "host"  # that was too small, if the worker said so

    def exceeded(self) -> Ceiling | None:
        """The ceiling to remember if the worker exceeded its budget; None if the plan has no prediction."""
        if self.plan.training_bytes == 0:
            return None
        of_accelerator = self.memory == "accelerator" and self.accelerator_budget_bytes > 0
        return Ceiling(
            key=self.key,
            training_bytes=self.plan.training_bytes,
            budget_bytes=self.accelerator_budget_bytes if of_accelerator else self.budget_bytes,
            memory="accelerator" if of_accelerator else "host",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budget:
    budget_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    accelerator_bytes: Count


class BudgetFile:
    """The budget that the daemon set last, as the worker reads it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _BUDGET
        self._seen = 0

    def new_budget(self) -> int | None:
        """A budget that was not read before; costs one `stat` if there is none."""
        try:
            changed = os.stat(self._path).st_mtime_ns
        except FileNotFoundError:
            return None
        if changed == self._seen:
            return None
        self._seen = changed
        budget = _read(self._path, _Budget)
        return budget.budget_bytes if budget is not None else None


def write_budget(folder: Path, budget_bytes: int) -> None:
    """Write a new budget for the worker in `folder`."""
    _replace(folder / _BUDGET, _Budget(budget_bytes=budget_bytes))


def write_trial(folder: Path, trial: Trial) -> None:
    """Write, for the daemon, the plan that the worker is about to train by."""
    _replace(folder / _PLAN, trial)


def mark_accelerator(folder: Path) -> None:
    """Note that it was the accelerator which refused memory to the plan in force."""
    trial = read_trial(folder)
    if trial is not None:
        write_trial(folder, replace(trial, memory="accelerator"))


def write_use(folder: Path, num_bytes: int) -> None:
    """Write, for the daemon, what the worker has of the accelerator's memory."""
    _replace(folder / _USE, _Use(accelerator_bytes=num_bytes))


def read_use(folder: Path) -> int:
    """What the worker in `folder` has of the accelerator's memory, where that is the host's too."""
    use = _read(folder / _USE, _Use)
    return use.accelerator_bytes if use is not None else 0


def read_trial(folder: Path) -> Trial | None:
    """The plan that the worker in `folder` trained by last; None if it had none yet."""
    return _read(folder / _PLAN, Trial)


def clear(folder: Path) -> None:
    """Remove the files of an earlier worker."""
    for name in (_PLAN, _BUDGET, _USE):
        (folder / name).unlink(missing_ok=True)


def _replace(path: Path, record: object) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(to_map(record)), encoding="utf-8")
    os.replace(temporary, path)


def _read(path: Path, cls: type[R]) -> R | None:
    try:
        with open(path, encoding="utf-8") as file:
            return from_map(cls, json.loads(file.read(_LONGEST_BYTES)))
    except (OSError, ValueError, RecursionError, PayloadError):
        return None
