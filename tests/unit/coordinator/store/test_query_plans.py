"""Queries of every update and every tick do not look at all that the coordinator has ever stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import digest, round_row, run_row
from stores import with_update

from coordinator.store.base import Store
from coordinator.store.sqlite import SqliteStore

GROW = ("model", "round", "lease", "update_", "evaluation")  # the tables that grow with every round
QUERIES: dict[str, Callable[[Store], object]] = {
    "is a blob needed": lambda store: store.blob_references.is_needed(digest("x"), 10),
    "needed blobs": lambda store: store.blob_references.needed(10),
    "failures of a device": lambda store: store.leases.device_failures("a", 5),
    "failures of a run": lambda store: store.leases.run_failures("r-1", 20),
    "updates of an attempt": lambda store: store.updates.of_attempt("r-1", 1, 1),
    "leases of an attempt": lambda store: store.leases.of_attempt("r-1", 1, 1),
    "a device's last update that counted": lambda store: store.updates.last_counted_lease("r-1", "a"),
    "norms of the last rounds": lambda store: store.updates.recent_norms("r-1", 5),
    "the last round": lambda store: store.rounds.last("r-1"),
    "the last version": lambda store: store.models.last("r-1"),
    "the next lease": lambda store: store.leases.next_issue(),
}


def _plans(path: Path, queries: Callable[[Store], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of SQLite's plans for all that `queries` reads."""
    lines: list[str] = []
    store = SqliteStore(path)
    database = store._database
    read = database.read

    def explain(query: str, *arguments: object) -> list[sqlite3.Row]:
        lines.extend(row["detail"] for row in read(f"EXPLAIN QUERY PLAN {query}", *arguments))
        return read(query, *arguments)

    monkeypatch.setattr(database, "read", explain)
    queries(store)
    store.close()
    return lines


@pytest.mark.parametrize("name", QUERIES)
def test_queries_find_their_rows_by_an_index(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`SCAN m` reads a whole table, `SEARCH m USING INDEX` only its rows; an index of open rounds may be read whole."""
    store = with_update(SqliteStore(tmp_path / "state.db"))
    store.runs.add(run_row("r-2"))
    store.rounds.open(round_row(2), [])
    store.close()
    plan = _plans(tmp_path / "state.db", QUERIES[name], monkeypatch)
    tables = {*GROW, "m", "n", "r", "u", "l"}  # and the names that the queries give them
    scans = [line for line in plan if line.startswith("SCAN ") and line.split()[1] in tables]
    assert plan
    assert [line for line in scans if "INDEX round_open" not in line] == []
