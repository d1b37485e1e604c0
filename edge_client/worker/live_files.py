"""The files through which a daemon and its worker communicate while the worker runs, in the work directory.

    plan.json     worker -> daemon: the plan that it is about to train by, and the budget in force
    budget.json   daemon -> worker: less memory is left, use no more than this

Each is replaced as a whole and never synced: after a power cut the worker starts again, and what its predecessor left
is removed.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from edge_client.errors import PayloadError
from edge_client.records import Ceiling, Count, Hash, TrainingPlan, from_map, to_map

__all__ = ["BudgetFile", "Trial", "clear", "read_trial", "write_budget", "write_trial"]

R = TypeVar("R")

_PLAN, _BUDGET = "plan.json", "budget.json"
_LONGEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The plan that a worker trains by, and the budget that it must not exceed."""

    key: Hash  # of the model and how it is trained
    budget_bytes: Count  # in force; the plan may have been made for another one
    plan: TrainingPlan

    def exceeded(self) -> Ceiling | None:
        """The ceiling to remember if the worker exceeded its budget; None if the plan has no prediction."""
        if self.plan.training_bytes == 0:
            return None
        return Ceiling(key=self.key, training_bytes=self.plan.training_bytes, budget_bytes=self.budget_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budget:
    budget_bytes: Count


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


def read_trial(folder: Path) -> Trial | None:
    """The plan that the worker in `folder` trained by last; None if it had none yet."""
    return _read(folder / _PLAN, Trial)


def clear(folder: Path) -> None:
    """Remove the files of an earlier worker."""
    for name in (_PLAN, _BUDGET):
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
