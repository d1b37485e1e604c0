"""What the store costs for a round of ten devices, with 10,000 rounds in it and with ten: CPU time, as a ratio."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.federation import scratch
from benchmarks.figures import Figure
from benchmarks.restart import a_round, fill
from coordinator.state import RETAINED_MODELS
from coordinator.store.sqlite import SqliteStore

__all__ = ["measure"]

_REPEATS = 9
_ROUNDS = 20  # in each repeat


def measure(*, quick: bool) -> list[Figure]:
    """CPU milliseconds of the store for a round: its rows, its queries, and whether each of its blobs is needed."""
    many = 1000 if quick else 10_000
    few_ms, many_ms = _rounds(10), _rounds(many)
    floor = sorted(few_ms)[len(few_ms) // 2]
    return [
        Figure(name="a round, 10 rounds stored", unit="ms", values=few_ms),
        Figure(name=f"a round, {many} rounds stored", unit="ms", values=many_ms),
        Figure(name=f"{many} rounds against 10", unit="", values=tuple(ms / floor for ms in many_ms), at_most=1.1),
    ]


def _rounds(stored: int) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        fill(Path(folder), stored, enrolled=10)
        store = SqliteStore(Path(folder) / "state.db", sync=False)
        number, spent = stored, []
        for _ in range(_REPEATS):
            began = time.process_time()
            for _ in range(_ROUNDS):
                number += 1
                _round(store, number)
            spent.append(1000 * (time.process_time() - began) / _ROUNDS)
        store.close()
    return tuple(spent)


def _round(store: SqliteStore, number: int) -> None:
    """What the coordinator writes and asks for one round, in turns of the loop."""
    with store.turn():
        updates = a_round(store, number)
    for update in updates:
        store.blob_references.is_needed(update.sha256, RETAINED_MODELS)
    store.updates.of_attempt("bench-1", number, 1)
    store.updates.recent_norms("bench-1", 5)
    store.leases.drop_rate("bench-1", 100)
    store.leases.run_failures("bench-1", 20)
    for update in updates:
        store.updates.last_counted_lease("bench-1", update.device)
        store.leases.device_failures(update.device, 5)
