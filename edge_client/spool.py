"""What a device must not forget, in `STATE/state.json`: its lease, its finished update, the newest assignment seen.

One small file that is replaced as a whole, three times per round, to spare SD cards.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from edge_client import durable
from edge_client.errors import PayloadError
from edge_client.records import Count, from_map, to_map
from edge_client.session import Finished
from edge_client.wire.messages import Assign

__all__ = ["Saved", "Spool"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """The state of a device between two processes; one that has never worked knows nothing."""

    assign: Assign | None = None
    finished: Finished | None = None
    attempts: Count = 0  # workers that may have begun on the lease
    highest: tuple[Count, Count] = (0, 0)  # (epoch, issue) of the newest assignment seen


class Spool:
    """The file, and what it says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with durable.disk_errors(f"cannot read {path}"):
            self._saved = _read(path)

    def load(self) -> Saved:
        """What is on disk."""
        return self._saved

    def save(self, assign: Assign, finished: Finished | None, attempts: int) -> None:
        """Keep the lease; durable when this returns."""
        highest = (assign.epoch, assign.issue)
        saved = Saved(assign=assign, finished=finished, attempts=attempts, highest=highest)
        self._write(saved, point="daemon.assign" if finished is None else "daemon.update")

    def forget(self) -> None:
        """The lease is over; the newest assignment seen stays."""
        self._write(Saved(highest=self._saved.highest), point="daemon.forget")

    def _write(self, saved: Saved, *, point: str) -> None:
        with durable.disk_errors(f"cannot write {self._path}"):
            durable.write_bytes(self._path, json.dumps(to_map(saved)).encode(), point=point)
        self._saved = saved


def _read(path: Path) -> Saved:
    """A device must come back after any power cut: without its file it begins anew, and is offered its lease again."""
    try:
        return from_map(Saved, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Saved()
    except (ValueError, RecursionError, PayloadError) as error:
        log.error("%s is not readable (%s); kept as %s.damaged, this device begins anew", path, error, path.name)
        os.replace(path, path.with_name(f"{path.name}.damaged"))
        return Saved()
