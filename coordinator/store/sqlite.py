"""The store on SQLite: WAL, synchronous=FULL (simulations: OFF), one writer."""

from __future__ import annotations

import dataclasses
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from coordinator.store.base import (
    DeploymentRow,
    DeviceRow,
    EvaluationRow,
    LeaseRow,
    LeftOutRow,
    ModelRow,
    PartRow,
    RoundRow,
    RunRow,
    UpdateRow,
)
from edge_client import durable, faults
from edge_client.errors import ConflictError, DiskFullError, MachineError, NoSuchNameError
from edge_client.records import Report, TrainingPlan, from_map, to_map

__all__ = ["SqliteStore", "read_meta"]

T = TypeVar("T")

_LAYOUT = 7
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE device (name TEXT PRIMARY KEY, key TEXT NOT NULL, password TEXT NOT NULL, labels TEXT NOT NULL) STRICT;
CREATE TABLE run (
    id TEXT PRIMARY KEY, file TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    settings_sha256 TEXT NOT NULL, settings_length INTEGER NOT NULL, task_sha256 TEXT NOT NULL DEFAULT '',
    dry INTEGER NOT NULL DEFAULT 0, best_version INTEGER, environment TEXT NOT NULL DEFAULT '{}',
    created_s INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE model (
    run TEXT NOT NULL REFERENCES run(id), version INTEGER NOT NULL, sha256 TEXT NOT NULL, length INTEGER NOT NULL,
    sent_sha256 TEXT NOT NULL, sent_length INTEGER NOT NULL, set_hash TEXT NOT NULL, score REAL,
    PRIMARY KEY (run, version)
) STRICT;
CREATE TABLE part (
    run TEXT NOT NULL REFERENCES run(id), version INTEGER NOT NULL, slice TEXT NOT NULL, sha256 TEXT NOT NULL,
    length INTEGER NOT NULL, PRIMARY KEY (run, version, slice)
) STRICT;
CREATE TABLE round (
    run TEXT NOT NULL REFERENCES run(id), number INTEGER NOT NULL, attempt INTEGER NOT NULL, state TEXT NOT NULL,
    goal INTEGER NOT NULL, quorum INTEGER NOT NULL, remaining_s REAL NOT NULL, extended INTEGER NOT NULL,
    reason TEXT NOT NULL, set_hash TEXT NOT NULL DEFAULT '', elapsed_s REAL NOT NULL DEFAULT 0,
    bytes_up INTEGER, bytes_down INTEGER, num_available INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (run, number, attempt)
) STRICT;
CREATE TABLE lease (
    issue INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL, run TEXT NOT NULL,
    round INTEGER NOT NULL, attempt INTEGER NOT NULL, device TEXT NOT NULL, train INTEGER NOT NULL,
    evaluate INTEGER NOT NULL, version INTEGER NOT NULL, plan TEXT, state TEXT NOT NULL, code TEXT NOT NULL,
    detail TEXT NOT NULL, log TEXT NOT NULL, slice TEXT NOT NULL DEFAULT 'full'
) STRICT;
CREATE INDEX lease_round ON lease (run, round, attempt);
CREATE INDEX lease_device ON lease (device, issue);
CREATE TABLE update_ (
    run TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, device TEXT NOT NULL,
    lease TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL, length INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    norm REAL NOT NULL, report TEXT NOT NULL, PRIMARY KEY (run, round, attempt, device)
) STRICT;
CREATE INDEX update_device ON update_ (run, device, round);
CREATE TABLE evaluation (
    run TEXT NOT NULL, version INTEGER NOT NULL, device TEXT NOT NULL, num_samples INTEGER NOT NULL,
    num_correct INTEGER NOT NULL, loss_sum REAL NOT NULL, confusion TEXT NOT NULL, slice TEXT NOT NULL DEFAULT 'full',
    PRIMARY KEY (run, version, device, slice)
) STRICT;
CREATE TABLE traffic (
    run TEXT NOT NULL, device TEXT NOT NULL, up INTEGER NOT NULL, down INTEGER NOT NULL, PRIMARY KEY (run, device)
) STRICT;
CREATE TABLE run_device (
    run TEXT NOT NULL, device TEXT NOT NULL, info TEXT NOT NULL, PRIMARY KEY (run, device)
) STRICT;
CREATE TABLE deployment (
    id TEXT NOT NULL, issue INTEGER NOT NULL, device TEXT NOT NULL, run TEXT NOT NULL, version INTEGER NOT NULL,
    architecture TEXT NOT NULL, precision TEXT NOT NULL, sha256 TEXT NOT NULL, length INTEGER NOT NULL,
    input TEXT NOT NULL, classes_sha256 TEXT NOT NULL, state TEXT NOT NULL, code TEXT NOT NULL, detail TEXT NOT NULL,
    created_s INTEGER NOT NULL, PRIMARY KEY (id, device)
) STRICT;
CREATE TABLE left_out (
    run TEXT NOT NULL, device TEXT NOT NULL, code TEXT NOT NULL, round INTEGER NOT NULL, detail TEXT NOT NULL,
    PRIMARY KEY (run, device, code)
) STRICT;
"""
_MIGRATIONS = {  # layout -> what makes the next one of it
    1: """
ALTER TABLE run ADD COLUMN task_sha256 TEXT NOT NULL DEFAULT '';
ALTER TABLE run ADD COLUMN dry INTEGER NOT NULL DEFAULT 0;
ALTER TABLE run ADD COLUMN best_version INTEGER;
ALTER TABLE run ADD COLUMN environment TEXT NOT NULL DEFAULT '{}';
ALTER TABLE run ADD COLUMN created_s INTEGER NOT NULL DEFAULT 0;
ALTER TABLE model ADD COLUMN score REAL;
ALTER TABLE round ADD COLUMN elapsed_s REAL NOT NULL DEFAULT 0;
CREATE INDEX lease_device ON lease (device, issue);
CREATE TABLE run_device (
    run TEXT NOT NULL, device TEXT NOT NULL, info TEXT NOT NULL, PRIMARY KEY (run, device)
) STRICT;
""",
    2: """
ALTER TABLE round ADD COLUMN bytes_up INTEGER;
ALTER TABLE round ADD COLUMN bytes_down INTEGER;
""",
    3: """
ALTER TABLE round ADD COLUMN num_available INTEGER NOT NULL DEFAULT 0;
""",
    4: """
ALTER TABLE lease ADD COLUMN slice TEXT NOT NULL DEFAULT 'full';
CREATE TABLE part (
    run TEXT NOT NULL REFERENCES run(id), version INTEGER NOT NULL, slice TEXT NOT NULL, sha256 TEXT NOT NULL,
    length INTEGER NOT NULL, PRIMARY KEY (run, version, slice)
) STRICT;
ALTER TABLE evaluation RENAME TO evaluation_4;
CREATE TABLE evaluation (
    run TEXT NOT NULL, version INTEGER NOT NULL, device TEXT NOT NULL, num_samples INTEGER NOT NULL,
    num_correct INTEGER NOT NULL, loss_sum REAL NOT NULL, confusion TEXT NOT NULL, slice TEXT NOT NULL DEFAULT 'full',
    PRIMARY KEY (run, version, device, slice)
) STRICT;
INSERT INTO evaluation SELECT *, 'full' FROM evaluation_4;
DROP TABLE evaluation_4;
""",
    5: """
CREATE TABLE deployment (
    id TEXT NOT NULL, issue INTEGER NOT NULL, device TEXT NOT NULL, run TEXT NOT NULL, version INTEGER NOT NULL,
    architecture TEXT NOT NULL, precision TEXT NOT NULL, sha256 TEXT NOT NULL, length INTEGER NOT NULL,
    input TEXT NOT NULL, classes_sha256 TEXT NOT NULL, state TEXT NOT NULL, code TEXT NOT NULL, detail TEXT NOT NULL,
    created_s INTEGER NOT NULL, PRIMARY KEY (id, device)
) STRICT;
""",
    6: """
CREATE TABLE left_out (
    run TEXT NOT NULL, device TEXT NOT NULL, code TEXT NOT NULL, round INTEGER NOT NULL, detail TEXT NOT NULL,
    PRIMARY KEY (run, device, code)
) STRICT;
""",
}

_KEPT_MODELS = """FROM (
    SELECT m.sha256, m.sent_sha256 FROM run JOIN model m ON m.run = run.id
    AND m.version > (SELECT max(n.version) FROM model n WHERE n.run = run.id) - ?1
    UNION ALL
    SELECT m.sha256, m.sent_sha256 FROM run JOIN model m ON m.run = run.id AND m.version = run.best_version)"""
# CROSS: few rounds are open, and there are many updates
_OPEN_UPDATES = """FROM round r CROSS JOIN update_ u ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   WHERE r.state IN ('RUNNING', 'FROZEN')"""

_WANTED = "FROM deployment WHERE state IN ('pending', 'active')"
_OPEN_PARTS = "FROM part p JOIN run ON run.id = p.run WHERE run.state = 'running'"


def _supersede(db: sqlite3.Connection, rows: Sequence[DeploymentRow]) -> None:
    key = [(row.id, row.device) for row in rows]
    db.executemany("UPDATE deployment SET state = 'superseded' WHERE id = ? AND device = ?", key)


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """As `durable.disk_errors`, for what SQLite says of the disk too."""
    try:
        with durable.disk_errors(what):
            yield
    except sqlite3.OperationalError as error:
        kind = DiskFullError if "full" in str(error) else MachineError
        raise kind(f"{what}: {error}") from error
    except sqlite3.DatabaseError as error:
        if type(error) is not sqlite3.DatabaseError:  # a broken constraint is a bug of ours
            raise
        raise MachineError(f"{what}: {error}; restore a backup of the state directory") from error


def _open_database(path: Path, *, sync: bool = True) -> sqlite3.Connection:
    """Open a SQLite file, used by one thread; with `sync` what is committed survives a power cut."""
    connection = sqlite3.connect(path, isolation_level="IMMEDIATE")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={'FULL' if sync else 'OFF'}")
    connection.execute("PRAGMA foreign_keys=ON")
    os.chmod(path, 0o600)
    return connection


def _commit(connection: sqlite3.Connection, *, point: str) -> None:
    """Commit, or roll back and raise. Points: `<point>.commit`, `<point>.committed`."""
    try:
        faults.point(f"{point}.commit")
        connection.commit()
    except (OSError, sqlite3.Error):
        connection.rollback()
        raise
    faults.point(f"{point}.committed")


def read_meta(path: Path) -> dict[str, str]:
    """The epoch, the federation and the settings of a store that is not opened for it: nothing is changed."""
    with _disk_errors(f"cannot read {path}"):
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        try:
            return dict(connection.execute("SELECT key, value FROM meta"))
        finally:
            connection.close()


class SqliteStore:
    """Implements `coordinator.store.base.Store`; used by one thread."""

    def __init__(self, path: Path, *, sync: bool = True) -> None:
        """Without `sync` (simulations) a commit survives the end of this process, but not a power cut."""
        with _disk_errors(f"cannot open {path}"):
            self._db = _open_database(path, sync=sync)
            self._db.row_factory = sqlite3.Row
            self._prepare()

    def _prepare(self) -> None:
        try:
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise MachineError(f"state.db is damaged ({error}); restore a backup of the state directory") from error
        if found > _LAYOUT:
            raise MachineError(f"state.db has layout {found}, this fedfit knows {_LAYOUT}; upgrade fedfit")
        if found == _LAYOUT:
            return
        changes = _SCHEMA if found == 0 else "".join(_MIGRATIONS[layout] for layout in range(found, _LAYOUT))
        try:
            self._db.executescript(f"BEGIN; {changes} PRAGMA user_version = {_LAYOUT}; COMMIT;")
        finally:
            if self._db.in_transaction:
                self._db.rollback()

    @contextmanager
    def _transaction(self, point: str) -> Iterator[sqlite3.Connection]:
        with _disk_errors(f"cannot save ({point})"):
            try:
                yield self._db
                _commit(self._db, point=f"store.{point}")
            finally:
                if self._db.in_transaction:
                    self._db.rollback()

    def _insert(self, table: str, row: Any) -> None:
        values = {name: _to_column(getattr(row, name)) for name in (f.name for f in dataclasses.fields(row))}
        marks = ", ".join(f":{name}" for name in values)
        self._db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", values)

    def _read(self, query: str, *arguments: object) -> list[sqlite3.Row]:
        with _disk_errors("cannot read state.db"):
            return self._db.execute(query, arguments).fetchall()

    def _all(self, cls: type[T], query: str, *arguments: object) -> list[T]:
        return [_from_row(cls, row) for row in self._read(query, *arguments)]

    def _one(self, cls: type[T], query: str, *arguments: object) -> T | None:
        return next(iter(self._all(cls, query, *arguments)), None)

    def _get_meta(self, key: str) -> str | None:
        rows = self._read("SELECT value FROM meta WHERE key = ?", key)
        return rows[0][0] if rows else None

    # the federation and its devices

    def next_epoch(self, wall_s: int) -> int:
        """Higher than all before."""
        epoch = max(int(self._get_meta("epoch") or 0) + 1, wall_s)
        with self._transaction("epoch") as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('epoch', ?)", (str(epoch),))
        return epoch

    def federation(self, fresh: str) -> str:
        """The federation's id."""
        known = self._get_meta("federation")
        if known is None:
            with self._transaction("federation") as db:
                db.execute("INSERT INTO meta VALUES ('federation', ?)", (fresh,))
        return known or fresh

    def setting(self, key: str) -> str:
        """What was kept under `key`; empty if nothing was."""
        return self._get_meta(f"setting.{key}") or ""

    def set_setting(self, key: str, value: str) -> None:
        """Keep a small text over restarts."""
        if self.setting(key) != value:
            with self._transaction("setting") as db:
                db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"setting.{key}", value))

    def devices(self) -> list[DeviceRow]:
        """All enrolled devices, by name."""
        return self._all(DeviceRow, "SELECT * FROM device ORDER BY name")

    def add_device(self, *devices: DeviceRow, replace: bool = False) -> None:
        """Enrol devices, all or none; `ConflictError` if a name is taken."""
        with self._transaction("device") as db:
            for device in devices:
                if replace:
                    db.execute("DELETE FROM device WHERE name = ?", (device.name,))
                try:
                    self._insert("device", device)
                except sqlite3.IntegrityError:
                    raise ConflictError(f"device {device.name!r} exists already; choose another name") from None

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Replace a device's labels."""
        with self._transaction("device") as db:
            if db.execute("UPDATE device SET labels = ? WHERE name = ?", (_to_column(labels), name)).rowcount == 0:
                raise NoSuchNameError.of("device", name, [d.name for d in self.devices()])

    def remove_device(self, name: str) -> None:
        """Forget a device, its secrets, and what was deployed to it."""
        with self._transaction("device") as db:
            db.execute("DELETE FROM deployment WHERE device = ?", (name,))
            if db.execute("DELETE FROM device WHERE name = ?", (name,)).rowcount == 0:
                raise NoSuchNameError.of("device", name, [d.name for d in self.devices()])

    # runs and models

    def add_run(self, run: RunRow) -> None:
        """A new run."""
        with self._transaction("run"):
            self._insert("run", run)

    def remove_run(self, run_id: str) -> None:
        """Forget a run and everything of it."""
        with self._transaction("run") as db:
            own = ("update_", "evaluation", "traffic", "run_device", "lease", "round", "part", "left_out", "deployment")
            for table in (*own, "model"):
                db.execute(f"DELETE FROM {table} WHERE run = ?", (run_id,))
            db.execute("DELETE FROM run WHERE id = ?", (run_id,))

    def save_score(self, run_id: str, version: int, score: float, best_version: int) -> None:
        """What the run's metric says of a version, and which version it likes best now."""
        with self._transaction("score") as db:
            db.execute("UPDATE model SET score = ? WHERE run = ? AND version = ?", (score, run_id, version))
            db.execute("UPDATE run SET best_version = ? WHERE id = ?", (best_version, run_id))

    def scores(self, run_id: str) -> dict[int, float]:
        """Version -> score, oldest first."""
        query = "SELECT version, score FROM model WHERE run = ? AND score IS NOT NULL ORDER BY version"
        return {row["version"]: row["score"] for row in self._read(query, run_id)}

    def remember_device(self, run_id: str, device: str, info: Mapping[str, Any]) -> None:
        """What a device was when it first took part; the first word stays."""
        with self._transaction("run-device") as db:
            db.execute("INSERT OR IGNORE INTO run_device VALUES (?, ?, ?)", (run_id, device, _to_column(info)))

    def remembered_devices(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Device -> what it was."""
        rows = self._read("SELECT device, info FROM run_device WHERE run = ? ORDER BY device", run_id)
        return {row["device"]: json.loads(row["info"]) for row in rows}

    def next_run_number(self, name: str) -> int:
        """The number that makes NAME-n new."""
        taken = [row[0] for row in self._read("SELECT id FROM run WHERE id GLOB ? || '-*'", name)]
        numbers = [int(tail) for tail in (run_id[len(name) + 1 :] for run_id in taken) if tail.isdigit()]
        return max(numbers, default=0) + 1

    def runs(self) -> list[RunRow]:
        """All runs, oldest first."""
        return self._all(RunRow, "SELECT * FROM run ORDER BY rowid")

    def run(self, run_id: str) -> RunRow | None:
        """One run."""
        return self._one(RunRow, "SELECT * FROM run WHERE id = ?", run_id)

    def first_run(self, state: str) -> RunRow | None:
        """The oldest run in a state."""
        return self._one(RunRow, "SELECT * FROM run WHERE state = ? ORDER BY rowid LIMIT 1", state)

    def set_run_state(self, run_id: str, state: str, reason: str = "") -> None:
        """How a run stands."""
        with self._transaction("run-state") as db:
            db.execute("UPDATE run SET state = ?, reason = ? WHERE id = ?", (state, reason, run_id))

    def fail_run(self, run_id: str, reason: str) -> None:
        """The run has failed, and with it its open round and leases, together: nobody needs their blobs any more."""
        with self._transaction("run-state") as db:
            db.execute("UPDATE run SET state = 'failed', reason = ? WHERE id = ?", (reason, run_id))
            db.execute(
                "UPDATE round SET state = 'ABANDONED', reason = ? WHERE run = ? AND state IN ('RUNNING', 'FROZEN')",
                (reason, run_id),
            )
            db.execute(
                """UPDATE lease SET state = 'cancelled', code = 'abandoned', detail = 'the run failed'
                   WHERE run = ? AND state IN ('offered', 'accepted')""",
                (run_id,),
            )

    def add_initial_model(self, model: ModelRow, settings_sha256: str, settings_length: int) -> None:
        """Version 0 and the run's settings: the run can begin."""
        with self._transaction("initial") as db:
            self._insert("model", model)
            db.execute(
                "UPDATE run SET settings_sha256 = ?, settings_length = ?, state = 'running' WHERE id = ?",
                (settings_sha256, settings_length, model.run),
            )

    def last_model(self, run_id: str) -> ModelRow | None:
        """The newest version."""
        return self._one(ModelRow, "SELECT * FROM model WHERE run = ? ORDER BY version DESC LIMIT 1", run_id)

    def model(self, run_id: str, version: int) -> ModelRow | None:
        """One version."""
        return self._one(ModelRow, "SELECT * FROM model WHERE run = ? AND version = ?", run_id, version)

    def models(self, run_id: str) -> list[ModelRow]:
        """All versions, oldest first."""
        return self._all(ModelRow, "SELECT * FROM model WHERE run = ? ORDER BY version", run_id)

    def add_part(self, part: PartRow) -> list[PartRow]:
        """A slice of the newest version; those of older versions are forgotten, and returned."""
        with self._transaction("part") as db:
            query = "SELECT * FROM part WHERE run = ? AND version < ? ORDER BY slice"
            old = self._all(PartRow, query, part.run, part.version)
            db.execute("DELETE FROM part WHERE run = ? AND version < ?", (part.run, part.version))
            db.execute("DELETE FROM part WHERE run = ? AND slice = ?", (part.run, part.slice))
            self._insert("part", part)
        return old

    def parts(self, run_id: str) -> list[PartRow]:
        """The slices of the newest version that were cut so far."""
        return self._all(PartRow, "SELECT * FROM part WHERE run = ? ORDER BY slice", run_id)

    # rounds and leases

    def open_round(self, round_: RoundRow, leases: Sequence[LeaseRow]) -> None:
        """A round and its leases, together."""
        with self._transaction("open"):
            self._insert("round", round_)
            for lease in leases:
                self._insert("lease", lease)

    def add_leases(self, leases: Sequence[LeaseRow]) -> None:
        """Substitutes in a running round."""
        with self._transaction("leases"):
            for lease in leases:
                self._insert("lease", lease)

    def next_issue(self) -> int:
        """The number of the next lease."""
        ((highest,),) = self._read("SELECT coalesce(max(issue), 0) FROM lease")
        return int(highest) + 1

    def last_round(self, run_id: str) -> RoundRow | None:
        """The newest round's newest attempt."""
        query = "SELECT * FROM round WHERE run = ? ORDER BY number DESC, attempt DESC LIMIT 1"
        return self._one(RoundRow, query, run_id)

    def rounds(self, run_id: str) -> list[RoundRow]:
        """All attempts of all rounds, oldest first."""
        return self._all(RoundRow, "SELECT * FROM round WHERE run = ? ORDER BY number, attempt", run_id)

    def leases(self, run_id: str, number: int, attempt: int) -> list[LeaseRow]:
        """The leases of an attempt, in the order of issue."""
        query = "SELECT * FROM lease WHERE run = ? AND round = ? AND attempt = ? ORDER BY issue"
        return self._all(LeaseRow, query, run_id, number, attempt)

    def lease(self, lease_id: str) -> LeaseRow | None:
        """One lease."""
        return self._one(LeaseRow, "SELECT * FROM lease WHERE id = ?", lease_id)

    def set_lease(
        self, lease_id: str, state: str, *, code: str = "", detail: str = "", log: Sequence[str] = ()
    ) -> None:
        """How a lease stands."""
        with self._transaction("lease") as db:
            db.execute(
                "UPDATE lease SET state = ?, code = ?, detail = ?, log = ? WHERE id = ?",
                (state, code, detail, json.dumps(list(log)), lease_id),
            )

    def recent_failures(self, device: str, limit: int) -> list[LeaseRow]:
        """A device's newest leases that brought nothing and have a reason, newest first."""
        query = """SELECT * FROM lease WHERE device = ? AND state IN ('declined', 'refused', 'expired')
                   ORDER BY issue DESC LIMIT ?"""
        return self._all(LeaseRow, query, device, limit)

    def run_failures(self, run_id: str, limit: int) -> list[LeaseRow]:
        """The same of a run."""
        query = """SELECT * FROM lease WHERE run = ? AND state IN ('declined', 'refused', 'expired')
                   ORDER BY issue DESC LIMIT ?"""
        return self._all(LeaseRow, query, run_id, limit)

    def save_deadline(
        self, run_id: str, number: int, attempt: int, *, remaining_s: float, extended: bool, elapsed_s: float
    ) -> None:
        """How long the round still has and the run was active, should we die now."""
        with self._transaction("deadline") as db:
            db.execute(
                """UPDATE round SET remaining_s = ?, extended = ?, elapsed_s = ?
                   WHERE run = ? AND number = ? AND attempt = ?""",
                (remaining_s, int(extended), elapsed_s, run_id, number, attempt),
            )

    # updates

    def save_update(
        self,
        update: UpdateRow | None,
        evaluation: EvaluationRow | None,
        lease_id: str,
        traffic: Mapping[str, tuple[int, int]] = {},
    ) -> None:
        """The update's row, its evaluation, its lease's end and what travelled for it, together."""
        with self._transaction("update") as db:
            if update is not None:
                self._insert("update_", update)
            if evaluation is not None:
                self._put_evaluation(db, evaluation)
            db.execute("UPDATE lease SET state = 'stored', code = '', detail = '' WHERE id = ?", (lease_id,))
            for (run_id,) in db.execute("SELECT run FROM lease WHERE id = ?", (lease_id,)).fetchall():
                _add_traffic(db, run_id, traffic)

    def _put_evaluation(self, db: sqlite3.Connection, evaluation: EvaluationRow) -> None:
        key = (evaluation.run, evaluation.version, evaluation.device, evaluation.slice)
        db.execute("DELETE FROM evaluation WHERE run = ? AND version = ? AND device = ? AND slice = ?", key)
        self._insert("evaluation", evaluation)

    def save_evaluation(self, evaluation: EvaluationRow) -> None:
        """A result that came without an update: the server's own."""
        with self._transaction("evaluation") as db:
            self._put_evaluation(db, evaluation)

    def drop_update(self, update: UpdateRow) -> None:
        """Forget an update whose blob is lost; its lease is offered again, in a round that is running again."""
        with self._transaction("update") as db:
            db.execute("DELETE FROM update_ WHERE lease = ?", (update.lease,))
            db.execute("UPDATE lease SET state = 'offered', code = '', detail = '' WHERE id = ?", (update.lease,))
            db.execute(
                """UPDATE round SET state = 'RUNNING', set_hash = ''
                   WHERE run = ? AND number = ? AND attempt = ? AND state = 'FROZEN'""",
                (update.run, update.round, update.attempt),
            )

    def updates(self, run_id: str, number: int, attempt: int) -> list[UpdateRow]:
        """The stored updates of an attempt, sorted by device."""
        query = "SELECT * FROM update_ WHERE run = ? AND round = ? AND attempt = ? ORDER BY device"
        return self._all(UpdateRow, query, run_id, number, attempt)

    def recent_updates(self, run_id: str, limit: int) -> list[UpdateRow]:
        """The newest updates of a run, oldest first."""
        query = "SELECT * FROM update_ WHERE run = ? ORDER BY round DESC, attempt DESC, device LIMIT ?"
        return self._all(UpdateRow, query, run_id, limit)[::-1]

    def num_updates(self, run_id: str) -> dict[int, int]:
        """Round -> how many updates its model was made of."""
        query = """SELECT r.number, count(*) AS count FROM round r CROSS JOIN update_ u
                   ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   WHERE r.run = ? AND r.state IN ('COMMITTED', 'ANNOUNCED') GROUP BY r.number ORDER BY r.number"""
        return {row["number"]: row["count"] for row in self._read(query, run_id)}

    def update_of_lease(self, lease_id: str) -> UpdateRow | None:
        """The update that a lease brought."""
        return self._one(UpdateRow, "SELECT * FROM update_ WHERE lease = ?", lease_id)

    def last_counted_lease(self, run_id: str, device: str) -> str | None:
        """The newest lease of a device whose update went into a committed model."""
        query = """SELECT u.lease FROM update_ u JOIN round r
                   ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   WHERE u.run = ? AND u.device = ? AND r.state IN ('COMMITTED', 'ANNOUNCED')
                   ORDER BY u.round DESC LIMIT 1"""
        rows = self._read(query, run_id, device)
        return rows[0][0] if rows else None

    def freeze(self, run_id: str, number: int, attempt: int, set_hash: str) -> None:
        """The set of updates is final; what comes later is late."""
        with self._transaction("freeze") as db:
            db.execute(
                "UPDATE round SET state = 'FROZEN', set_hash = ? WHERE run = ? AND number = ? AND attempt = ?",
                (set_hash, run_id, number, attempt),
            )

    def commit_round(self, number: int, attempt: int, model: ModelRow, left_out: Sequence[LeftOutRow] = ()) -> None:
        """The new version, the end of its round and what knowledge it was made without, together."""
        with self._transaction("round") as db:
            self._insert("model", model)
            for row in left_out:
                key = (row.run, row.device, row.code)
                db.execute("DELETE FROM left_out WHERE run = ? AND device = ? AND code = ?", key)
                self._insert("left_out", row)
            db.execute(
                "UPDATE round SET state = 'COMMITTED' WHERE run = ? AND number = ? AND attempt = ?",
                (model.run, number, attempt),
            )

    def announce(self, run_id: str, number: int, attempt: int) -> None:
        """The devices have been told; what has travelled for the run by now is kept with the round."""
        with self._transaction("announce") as db:
            db.execute(
                """UPDATE round SET state = 'ANNOUNCED',
                       bytes_up = (SELECT coalesce(sum(up), 0) FROM traffic WHERE run = ?1),
                       bytes_down = (SELECT coalesce(sum(down), 0) FROM traffic WHERE run = ?1)
                   WHERE run = ?1 AND number = ?2 AND attempt = ?3""",
                (run_id, number, attempt),
            )

    def abandon(self, run_id: str, number: int, attempt: int, reason: str) -> None:
        """The attempt ends without a model; its updates stay on record and count nowhere."""
        with self._transaction("abandon") as db:
            db.execute(
                "UPDATE round SET state = 'ABANDONED', reason = ? WHERE run = ? AND number = ? AND attempt = ?",
                (reason, run_id, number, attempt),
            )

    def left_out(self, run_id: str) -> list[LeftOutRow]:
        """What a run could not use, by device and code."""
        return self._all(LeftOutRow, "SELECT * FROM left_out WHERE run = ? ORDER BY device, code", run_id)

    # what follows from it

    def evaluations(self, run_id: str, version: int | None = None) -> list[EvaluationRow]:
        """Results by version and device."""
        if version is None:
            query = "SELECT * FROM evaluation WHERE run = ? ORDER BY version, device, slice"
            return self._all(EvaluationRow, query, run_id)
        query = "SELECT * FROM evaluation WHERE run = ? AND version = ? ORDER BY device, slice"
        return self._all(EvaluationRow, query, run_id, version)

    def evaluated_versions(self, run_id: str) -> list[int]:
        """The versions that somebody judged, oldest first."""
        query = "SELECT DISTINCT version FROM evaluation WHERE run = ? ORDER BY version"
        return [row[0] for row in self._read(query, run_id)]

    def last_plans(self, run_id: str) -> dict[str, TrainingPlan]:
        """The plan that each device last trained with in this run; the next assignment carries it."""
        last = self._one(ModelRow, "SELECT * FROM model WHERE run = ? ORDER BY version DESC LIMIT 1", run_id)
        # of the bare columns of a group, SQLite takes those of the row with the maximum
        query = """SELECT *, max(1000000 * round + attempt) FROM update_ WHERE run = ? AND round >= ? GROUP BY device"""
        since = max(0, (last.version if last else 0) - 50)
        rows = self._all(UpdateRow, query, run_id, since)
        return {row.device: row.report.plan for row in rows if row.report.plan is not None}

    def recent_norms(self, run_id: str, rounds: int) -> dict[str, list[float]]:
        """Slice -> norms of the updates of the newest committed rounds: the usual size of a change."""
        query = """SELECT l.slice, u.norm FROM update_ u
                   JOIN round r ON r.run = u.run AND r.number = u.round AND r.attempt = u.attempt
                   JOIN lease l ON l.id = u.lease
                   WHERE u.run = ?1 AND r.state IN ('COMMITTED', 'ANNOUNCED')
                   AND u.round > (SELECT coalesce(max(version), 0) FROM model WHERE run = ?1) - ?2
                   ORDER BY u.round, u.device"""
        norms: dict[str, list[float]] = {}
        for slice_, norm in self._read(query, run_id, rounds):
            norms.setdefault(slice_, []).append(norm)
        return norms

    def drop_rate(self, run_id: str, leases: int) -> float:
        """Share of the newest finished leases that brought nothing."""
        # + keeps it off the index of rounds: the newest leases are at the end of the table
        query = """SELECT avg(state != 'stored') FROM (SELECT state FROM lease WHERE +run = ? AND train = 1
                   AND state NOT IN ('offered', 'accepted', 'cancelled') ORDER BY issue DESC LIMIT ?)"""
        ((rate,),) = self._read(query, run_id, leases)
        return float(rate or 0.0)

    def add_traffic(self, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None:
        """Count what travelled, as published: device -> (bytes up, bytes down)."""
        with self._transaction("traffic") as db:
            _add_traffic(db, run_id, moved)

    def traffic(self, run_id: str) -> dict[str, tuple[int, int]]:
        """Device -> (bytes up, bytes down)."""
        rows = self._read("SELECT device, up, down FROM traffic WHERE run = ? ORDER BY device", run_id)
        return {row["device"]: (row["up"], row["down"]) for row in rows}

    # deployments

    def trained_slices(self, run_id: str) -> dict[str, str]:
        """Device -> the slice that it trained last in a run."""
        query = "SELECT device, slice FROM lease WHERE run = ? AND train = 1 AND state = 'stored' ORDER BY issue"
        return {row["device"]: row["slice"] for row in self._read(query, run_id)}

    def next_deployment(self) -> int:
        """The issue of the next deployment."""
        ((last,),) = self._read("SELECT coalesce(max(issue), 0) FROM deployment")
        return int(last) + 1

    def add_deployment(self, rows: Sequence[DeploymentRow]) -> list[DeploymentRow]:
        """A deployment to these devices; returns what was pending on them, which is superseded now."""
        devices = {row.device for row in rows}
        before = [row for row in self.wanted_deployments() if row.device in devices and row.state == "pending"]
        with self._transaction("deployment") as db:
            _supersede(db, before)
            for row in rows:
                self._insert("deployment", row)
        return before

    def deployments(self, run_id: str | None = None) -> list[DeploymentRow]:
        """All of a run, or all, the oldest first, and by device."""
        query = "SELECT * FROM deployment WHERE ?1 IS NULL OR run = ?1 ORDER BY issue, device, id"
        return self._all(DeploymentRow, query, run_id)

    def wanted_deployments(self) -> list[DeploymentRow]:
        """Those that are pending or active."""
        return self._all(DeploymentRow, f"SELECT * {_WANTED} ORDER BY issue, device, id")

    def set_deployment(
        self, deployment: str, device: str, state: str, *, code: str = "", detail: str = ""
    ) -> list[DeploymentRow]:
        """What became of a deployment on a device; returns what was active there, if it is superseded now."""
        query = "SELECT * FROM deployment WHERE device = ? AND state = 'active' AND id != ? ORDER BY issue, id"
        before = self._all(DeploymentRow, query, device, deployment) if state == "active" else []
        with self._transaction("deployed") as db:
            _supersede(db, before)
            db.execute(
                "UPDATE deployment SET state = ?, code = ?, detail = ? WHERE id = ? AND device = ?",
                (state, code, detail, deployment, device),
            )
        return before

    # blobs

    def needed_blobs(self, keep_models: int) -> set[str]:
        """Every blob that a row needs: settings and newest models of runs, updates of open rounds, what is deployed."""
        needed: set[str] = set()
        for row in self._read("SELECT settings_sha256, task_sha256 FROM run"):
            needed.update(sha256 for sha256 in row if sha256)
        for row in self._read(f"SELECT sha256, sent_sha256 {_KEPT_MODELS}", keep_models):
            needed.update((row[0], row[1]))
        needed.update(row[0] for row in self._read(f"SELECT u.sha256 {_OPEN_UPDATES}"))
        needed.update(row[0] for row in self._read(f"SELECT p.sha256 {_OPEN_PARTS}"))
        needed.update(row[0] for row in self._read(f"SELECT sha256 {_WANTED}"))
        return needed

    def is_needed(self, sha256: str, keep_models: int) -> bool:
        """Whether a row still needs this blob."""
        queries = (
            (f"SELECT 1 {_KEPT_MODELS} WHERE ?2 IN (sha256, sent_sha256)", (keep_models, sha256)),
            (f"SELECT 1 {_OPEN_UPDATES} AND u.sha256 = ?", (sha256,)),
            (f"SELECT 1 {_OPEN_PARTS} AND p.sha256 = ?", (sha256,)),
            (f"SELECT 1 {_WANTED} AND sha256 = ?", (sha256,)),
            ("SELECT 1 FROM run WHERE ?1 IN (settings_sha256, task_sha256)", (sha256,)),
        )
        return any(self._read(query, *arguments) for query, arguments in queries)

    def backup(self, path: Path) -> None:
        """A consistent copy of everything into a new file, while the store is in use."""
        with _disk_errors(f"cannot copy state.db to {path}"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            copy = sqlite3.connect(path)
            try:
                self._db.backup(copy)
            finally:
                copy.close()

    def close(self) -> None:
        """Close the database."""
        self._db.close()


def _add_traffic(db: sqlite3.Connection, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None:
    db.executemany(
        """INSERT INTO traffic VALUES (?1, ?2, ?3, ?4)
           ON CONFLICT (run, device) DO UPDATE SET up = up + ?3, down = down + ?4""",
        [(run_id, device, up, down) for device, (up, down) in moved.items()],
    )


def _to_column(value: Any) -> Any:
    if isinstance(value, (str, float, type(None))):
        return value
    if isinstance(value, (bool, int)):
        return int(value)
    return json.dumps(to_map(value), separators=(",", ":"))


_FLAGS = {"train", "evaluate", "extended", "dry"}
_JSON = {"labels", "file", "log", "confusion", "environment", "input"}


def _from_row(cls: type[T], row: sqlite3.Row) -> T:
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # every row class is a dataclass
        value = row[f.name]
        if f.name in _FLAGS:
            value = bool(value)
        elif f.name in _JSON:
            value = json.loads(value)
            value = tuple(value) if isinstance(value, list) else value
        elif f.name == "plan" and value is not None:
            value = from_map(TrainingPlan, json.loads(value))
        elif f.name == "report":
            value = from_map(Report, json.loads(value))
        values[f.name] = value
    return cls(**values)
