"""The tables of `state.db`, and the statements that turn each older layout into the next one."""

from __future__ import annotations

from typing import Final

__all__ = ["LAYOUT", "MIGRATIONS", "SCHEMA"]

LAYOUT: Final = 11  # kept in the file as its `user_version`
SCHEMA: Final = """
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
    moments TEXT NOT NULL DEFAULT '{}', PRIMARY KEY (run, number, attempt)
) STRICT;
CREATE TABLE lease (
    issue INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL, run TEXT NOT NULL,
    round INTEGER NOT NULL, attempt INTEGER NOT NULL, device TEXT NOT NULL, train INTEGER NOT NULL,
    evaluate INTEGER NOT NULL, version INTEGER NOT NULL, plan TEXT, state TEXT NOT NULL, code TEXT NOT NULL,
    detail TEXT NOT NULL, log TEXT NOT NULL, slice TEXT NOT NULL DEFAULT 'full',
    moments TEXT NOT NULL DEFAULT '{}', phases TEXT NOT NULL DEFAULT '{}'
) STRICT;
CREATE INDEX lease_round ON lease (run, round, attempt);
CREATE INDEX lease_device ON lease (device, issue);
CREATE TABLE update_ (
    run TEXT NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, device TEXT NOT NULL,
    lease TEXT NOT NULL UNIQUE, sha256 TEXT NOT NULL, length INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    norm REAL NOT NULL, report TEXT NOT NULL, PRIMARY KEY (run, round, attempt, device)
) STRICT;
CREATE TABLE small_blob (lease TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT;
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
CREATE INDEX round_open ON round (run, number, attempt) WHERE state IN ('RUNNING', 'FROZEN');
CREATE INDEX lease_device_failed ON lease (device, issue) WHERE state IN ('declined', 'refused', 'expired');
CREATE INDEX lease_run_failed ON lease (run, issue) WHERE state IN ('declined', 'refused', 'expired');
CREATE TABLE page_token (
    name TEXT PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, role TEXT NOT NULL, created_s INTEGER NOT NULL,
    used_s INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE page_session (
    sha256 TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, csrf TEXT NOT NULL, expires_s INTEGER NOT NULL
) STRICT;
CREATE TABLE page_action (
    id INTEGER PRIMARY KEY, at_s INTEGER NOT NULL, name TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL
) STRICT;
"""
MIGRATIONS: Final = {  # layout -> the statements that lead to the next one
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
    7: """
CREATE INDEX round_open ON round (run, number, attempt) WHERE state IN ('RUNNING', 'FROZEN');
CREATE INDEX lease_device_failed ON lease (device, issue) WHERE state IN ('declined', 'refused', 'expired');
CREATE INDEX lease_run_failed ON lease (run, issue) WHERE state IN ('declined', 'refused', 'expired');
""",
    8: """
ALTER TABLE round ADD COLUMN moments TEXT NOT NULL DEFAULT '{}';
ALTER TABLE lease ADD COLUMN moments TEXT NOT NULL DEFAULT '{}';
ALTER TABLE lease ADD COLUMN phases TEXT NOT NULL DEFAULT '{}';
""",
    9: """
CREATE TABLE page_token (
    name TEXT PRIMARY KEY, sha256 TEXT NOT NULL UNIQUE, role TEXT NOT NULL, created_s INTEGER NOT NULL,
    used_s INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE page_session (
    sha256 TEXT PRIMARY KEY, name TEXT NOT NULL, role TEXT NOT NULL, csrf TEXT NOT NULL, expires_s INTEGER NOT NULL
) STRICT;
CREATE TABLE page_action (
    id INTEGER PRIMARY KEY, at_s INTEGER NOT NULL, name TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL
) STRICT;
""",
    10: """
CREATE TABLE small_blob (lease TEXT PRIMARY KEY, body BLOB NOT NULL) STRICT;
""",
}
