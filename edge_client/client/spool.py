"""The durable state of a device, in `STATE/state.json`: its lease, its finished update, the newest assignment seen, and
what was too much for its memory.

One small file that is replaced as a whole, three times per round, to spare SD cards.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

from edge_client import durable
from edge_client.client.events import Finished
from edge_client.errors import PayloadError
from edge_client.records import Ceiling, Count, from_map, to_map
from edge_client.wire.messages import Assign

__all__ = ["Saved", "Spool"]

log = logging.getLogger(__name__)

_MOST_CEILINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state of a device between two processes; all defaults for one that has never worked."""

    assign: Assign | None = None
    finished: Finished | None = None
    attempts: Count = 0  # workers that may have begun on the lease, without those that
    replans: Count = 0  # went over their budget
    highest: tuple[Count, Count] = (0, 0)  # (epoch, issue) of the newest assignment seen
    ceilings: tuple[Ceiling, ...] = ()  # the newest last


class Spool:
    """The file and its contents."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with durable.disk_errors(f"cannot read {path}"):
            self._saved = _read(path)

    def load(self) -> Saved:
        """Read the file."""
        return self._saved

    def save(self, assign: Assign, finished: Finished | None, attempts: int, replans: int = 0) -> None:
        """Keep the lease; durable when this returns."""
        saved = Saved(
            assign=assign,
            finished=finished,
            attempts=attempts,
            replans=replans,
            highest=(assign.epoch, assign.issue),
            ceilings=self._saved.ceilings,
        )
        self._write(saved, point="daemon.assign" if finished is None else "daemon.update")

    def forget(self) -> None:
        """The lease is over; the newest assignment seen stays."""
        self._write(Saved(highest=self._saved.highest, ceilings=self._saved.ceilings), point="daemon.forget")

    def remember(self, ceiling: Ceiling) -> None:
        """Keep a plan that needs too much memory here; durable with the next `save` or `forget`."""
        others = [known for known in self._saved.ceilings if not _is_stricter(ceiling, known)]
        self._saved = replace(self._saved, ceilings=(*others, ceiling)[-_MOST_CEILINGS:])

    def ceilings(self, budget_bytes: int) -> dict[str, int]:
        """How many bytes are too much for a budget, by key: the least that were too much for one as large or larger."""
        limits: dict[str, int] = {}
        for known in self._saved.ceilings:
            if budget_bytes <= known.budget_bytes and known.memory == "host":
                limits[known.key] = min(known.training_bytes, limits.get(known.key, known.training_bytes))
        return limits

    def accelerator_ceilings(self) -> tuple[Ceiling, ...]:
        """What went over the accelerator's memory; its budget is known to the worker alone."""
        return tuple(known for known in self._saved.ceilings if known.memory == "accelerator")

    def _write(self, saved: Saved, *, point: str) -> None:
        with durable.disk_errors(f"cannot write {self._path}"):
            durable.write_bytes(self._path, json.dumps(to_map(saved)).encode(), point=point)
        self._saved = saved


def _is_stricter(new: Ceiling, known: Ceiling) -> bool:
    """Whether `new` is the stricter bound: fewer bytes were too much, for a budget at least as large."""
    less, larger = new.training_bytes <= known.training_bytes, new.budget_bytes >= known.budget_bytes
    return (new.key, new.memory) == (known.key, known.memory) and less and larger


def _read(path: Path) -> Saved:
    """Read the state; a damaged file is put aside, because the coordinator offers a lost lease again."""
    try:
        return from_map(Saved, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Saved()
    except (ValueError, RecursionError, PayloadError) as error:
        log.error("%s is not readable (%s); kept as %s.damaged, this device begins anew", path, error, path.name)
        os.replace(path, path.with_name(f"{path.name}.damaged"))
        return Saved()
