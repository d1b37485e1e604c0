"""Migrations: a database of an older layout is opened, and keeps its rows."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from rows import deployment_row, evaluation_row, left_out_row, model_row, round_row, update_row
from stores import with_update

from coordinator.store.schema import LAYOUT, MIGRATIONS
from coordinator.store.sqlite import SqliteStore

RECORDED = Path(__file__).parents[3] / "versions" / "state-10.sql"
_EVALUATION = "run, version, device, num_samples, num_correct, loss_sum, confusion"
# layout -> the statements that take away what the next one added
_BACKWARDS = {
    10: ["DROP TABLE small_blob"],
    9: [f"DROP TABLE page_{name}" for name in ("token", "session", "action")],
    8: [
        "ALTER TABLE round DROP COLUMN moments",
        "ALTER TABLE lease DROP COLUMN moments",
        "ALTER TABLE lease DROP COLUMN phases",
    ],
    7: ["DROP INDEX round_open", "DROP INDEX lease_device_failed", "DROP INDEX lease_run_failed"],
    6: ["DROP TABLE left_out"],
    5: ["DROP TABLE deployment"],
    4: [
        "ALTER TABLE lease DROP COLUMN slice",
        "DROP TABLE part",
        "ALTER TABLE evaluation RENAME TO newer",
        f"CREATE TABLE evaluation AS SELECT {_EVALUATION} FROM newer",
        "DROP TABLE newer",
    ],
    3: ["ALTER TABLE round DROP COLUMN num_available"],
    2: ["ALTER TABLE round DROP COLUMN bytes_up", "ALTER TABLE round DROP COLUMN bytes_down"],
    1: [
        *(f"ALTER TABLE run DROP COLUMN {name}" for name in ("dry", "best_version", "environment", "created_s")),
        "ALTER TABLE run DROP COLUMN task_sha256",
        "ALTER TABLE model DROP COLUMN score",
        "ALTER TABLE round DROP COLUMN elapsed_s",
        "DROP INDEX lease_device",
        "DROP TABLE run_device",
    ],
}


def _reopened_from(layout: int, path: Path) -> SqliteStore:
    """A store with an update, set back to an older layout and opened again."""
    with_update(SqliteStore(path)).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        for older in range(LAYOUT - 1, layout - 1, -1):
            for statement in _BACKWARDS[older]:
                database.execute(statement)
        database.execute(f"PRAGMA user_version = {layout}")
        database.commit()
    return SqliteStore(path)


def _columns(path: Path) -> dict[str, set[tuple[str, str]]]:
    """Table -> its columns with their types."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: {row[1:3] for row in database.execute(f"PRAGMA table_info({table})")} for table in tables}


@pytest.mark.parametrize("layout", sorted(MIGRATIONS))
def test_an_older_layout_gets_the_tables_of_the_newest(tmp_path: Path, layout: int) -> None:
    """Every table and column of a new database is there, and the rows of before are read."""
    SqliteStore(tmp_path / "new.db").close()
    store = _reopened_from(layout, tmp_path / "state.db")
    assert _columns(tmp_path / "state.db") == _columns(tmp_path / "new.db")
    assert len(store.updates.of_attempt("r-1", 1, 1)) == 1
    store.close()


def test_a_recorded_database_of_layout_10_keeps_its_rows(tmp_path: Path) -> None:
    """Written by the version before small updates were rows: the update has no bytes here; a new one may have some."""
    with contextlib.closing(sqlite3.connect(tmp_path / "state.db")) as database:
        database.executescript(RECORDED.read_text(encoding="utf-8"))
    store = SqliteStore(tmp_path / "state.db")
    assert store.updates.of_attempt("r-1", 1, 1) == [update_row()]
    assert store.updates.body("lease-1") is None
    assert [device.name for device in store.devices.all()] == ["a"]
    assert (store.settings.federation("new"), store.runs.device_info("r-1")) == ("fed", {"a": {"client": "0.1.0"}})
    store.updates.save(update_row("b", "lease-2"), None, "lease-2", body=b"bytes")
    assert store.updates.body("lease-2") == b"bytes"
    store.close()


def test_layout_6_gets_knowledge_left_out(tmp_path: Path) -> None:
    """It has none at first, and takes new rows."""
    store = _reopened_from(6, tmp_path / "state.db")
    assert store.rounds.left_out("r-1") == []
    store.rounds.commit(1, 1, model_row(1), [left_out_row()])
    assert store.rounds.left_out("r-1") == [left_out_row()]
    store.close()


def test_layout_5_gets_deployments(tmp_path: Path) -> None:
    """It has none at first, and takes new ones."""
    store = _reopened_from(5, tmp_path / "state.db")
    assert store.deployments.all() == []
    store.deployments.add([deployment_row()])
    assert store.deployments.all() == [deployment_row()]
    store.close()


def test_layout_4_gets_slices(tmp_path: Path) -> None:
    """What devices trained and evaluated before there were slices was the full model."""
    store = _reopened_from(4, tmp_path / "state.db")
    assert [lease.slice for lease in store.leases.of_attempt("r-1", 1, 1)] == ["full", "full"]
    assert store.evaluations.all("r-1") == [evaluation_row()]
    store.close()


def test_layout_2_gets_the_bytes_of_rounds(tmp_path: Path) -> None:
    """Older rounds do not know their traffic; rounds that are announced from now on do."""
    store = _reopened_from(2, tmp_path / "state.db")
    assert store.rounds.all("r-1") == [round_row()]
    store.rounds.announce("r-1", 1, 1)
    assert store.rounds.all("r-1")[0].bytes_down == 0
    store.close()


def test_layout_1_gets_scores(tmp_path: Path) -> None:
    """A version of before has none, and can get one."""
    store = _reopened_from(1, tmp_path / "state.db")
    assert store.models.scores("r-1") == {}
    store.models.save_score("r-1", 0, 0.5, 0)
    assert store.models.scores("r-1") == {0: 0.5}
    store.close()
