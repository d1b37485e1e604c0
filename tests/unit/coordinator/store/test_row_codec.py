"""Rows as columns: what SQLite stores of them, and that they come back equal."""

from __future__ import annotations

import sqlite3

import pytest
from rows import PLAN, deployment_row, device_row, evaluation_row, lease_row, round_row, run_row, update_row

from coordinator.store.row_codec import from_columns, to_columns


def test_flags_are_numbers_and_sequences_are_json() -> None:
    """True is 1, an empty sequence is `[]`, and text stays as it is."""
    columns = to_columns(lease_row(1, train=True, evaluate=False, code="late"))
    assert (columns["train"], columns["evaluate"], columns["log"], columns["code"]) == (1, 0, "[]", "late")


@pytest.mark.parametrize(
    "row",
    [
        device_row("a", labels={"line": "ü"}),
        run_row(dry=True, best_version=2, environment={"cores": [1, 2]}),
        round_row(extended=True, bytes_up=5),
        lease_row(1, plan=PLAN, log=("x", "y")),
        update_row(),
        evaluation_row(),
        deployment_row(),
    ],
    ids=lambda row: type(row).__name__,
)
def test_rows_come_back_equal(row: object) -> None:
    """Written to a table of a real database and read again, with a column that the class does not have."""
    columns = to_columns(row)
    database = sqlite3.connect(":memory:")
    database.row_factory = sqlite3.Row
    names = ", ".join(f'"{name}"' for name in columns)
    database.execute(f"CREATE TABLE t ({names}, other)")
    database.execute(f"INSERT INTO t ({names}) VALUES ({', '.join('?' * len(columns))})", tuple(columns.values()))
    assert from_columns(type(row), database.execute("SELECT * FROM t").fetchone()) == row
    database.close()
