"""One suite over every store: what was written is there, together or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from rows import (
    PLAN,
    device_row,
    digest,
    evaluation_row,
    lease_row,
    model_row,
    report,
    round_row,
    run_row,
    update_row,
)

from coordinator.store.base import Store
from coordinator.store.memory import MemoryStore
from coordinator.store.sqlite import SqliteStore
from edge_client import faults
from edge_client.errors import ConflictError, DiskFullError, MachineError, NoSuchNameError

Step: TypeAlias = Callable[[Store], None]


@pytest.fixture(params=["sqlite", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made: Store = SqliteStore(tmp_path / "state.db") if request.param == "sqlite" else MemoryStore()
    yield made
    made.close()


def _with_run(store: Store) -> Store:
    store.add_run(run_row())
    store.add_initial_model(model_row(0), digest("settings"), 8)
    return store


def _with_round(store: Store) -> Store:
    _with_run(store).open_round(round_row(), [lease_row(1, "a"), lease_row(2, "b", train=False)])
    return store


def _with_update(store: Store) -> Store:
    _with_round(store).save_update(update_row(), evaluation_row(), "lease-1")
    return store


def _dump(store: Store) -> list[object]:
    """All that a store says, for comparing."""
    return [
        store.devices(),
        store.runs(),
        store.models("r-1"),
        store.rounds("r-1"),
        store.leases("r-1", 1, 1),
        store.updates("r-1", 1, 1),
        store.evaluations("r-1"),
        store.traffic("r-1"),
        store.setting("k"),
        store.next_issue(),
    ]


WRITES: dict[str, Step] = {
    "device": lambda s: s.add_device(device_row("x")),
    "run": lambda s: s.add_run(run_row("r-2")),
    "run-state": lambda s: s.set_run_state("r-1", "stopped", "why"),
    "failed": lambda s: s.fail_run("r-1", "why"),
    "lost": lambda s: s.drop_update(update_row()),
    "setting": lambda s: s.set_setting("k", "v"),
    "leases": lambda s: s.add_leases([lease_row(3, "c")]),
    "lease": lambda s: s.set_lease("lease-2", "declined", code="c", detail="d", log=["l"]),
    "deadline": lambda s: s.save_deadline("r-1", 1, 1, remaining_s=5.0, extended=True, elapsed_s=7.0),
    "update": lambda s: s.save_update(None, evaluation_row("b"), "lease-2"),
    "freeze": lambda s: s.freeze("r-1", 1, 1, "hash"),
    "round": lambda s: s.commit_round(1, 1, model_row(1)),
    "announce": lambda s: s.announce("r-1", 1, 1),
    "abandon": lambda s: s.abandon("r-1", 1, 1, "few"),
    "open": lambda s: s.open_round(round_row(2), [lease_row(4, round=2)]),
    "traffic": lambda s: s.add_traffic("r-1", {"a": (1, 2)}),
}


@pytest.mark.parametrize("point", sorted(WRITES))
def test_a_full_disk_at_the_commit_leaves_the_state_unchanged(
    store: Store, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Every write; the next try works."""
    _with_update(store)
    before = _dump(store)
    place = {"failed": "run-state", "lost": "update"}.get(point, point)
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"enospc:store.{place}.commit")])
    with pytest.raises(DiskFullError, match="cannot save"):
        WRITES[point](store)
    assert _dump(store) == before
    WRITES[point](store)
    assert _dump(store) != before


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """Close and open again: every row is the same."""
    store = SqliteStore(tmp_path / "state.db")
    _with_update(store)
    for step in WRITES.values():
        step(store)
    before = _dump(store)
    store.close()
    again = SqliteStore(tmp_path / "state.db")
    assert _dump(again) == before
    again.close()


def test_what_was_not_committed_is_gone_after_a_crash(tmp_path: Path) -> None:
    """A second connection sees the file as the next process would."""
    store = SqliteStore(tmp_path / "state.db")
    _with_round(store)
    store._db.execute("UPDATE round SET state = 'FROZEN'")
    other = sqlite3.connect(tmp_path / "state.db")
    assert other.execute("SELECT state FROM round").fetchall() == [("RUNNING",)]
    other.close()
    store._db.rollback()
    store.close()


def test_a_database_that_breaks_while_it_is_used_is_said_to_be_broken(tmp_path: Path) -> None:
    """Pages are overwritten under a store that is open: a read ends with one line, not with a traceback."""
    store = SqliteStore(tmp_path / "state.db")
    for number in range(200):
        store.add_run(run_row(f"r-{number}"))
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._db.execute("PRAGMA cache_size = 0")
    size = (tmp_path / "state.db").stat().st_size
    with open(tmp_path / "state.db", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    store._db.execute("PRAGMA shrink_memory")
    with pytest.raises(MachineError, match="cannot read"):
        store.runs()
    store.close()


@pytest.mark.parametrize("content", [b"not a database" * 400, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_database_is_said_to_be_one(tmp_path: Path, content: bytes) -> None:
    """One line with what to do, not a traceback."""
    (tmp_path / "state.db").write_bytes(content)
    with pytest.raises(MachineError, match="restore a backup"):
        SqliteStore(tmp_path / "state.db")


def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    """And not touched."""
    store = SqliteStore(tmp_path / "state.db")
    store._db.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(MachineError, match="upgrade fedfit"):
        SqliteStore(tmp_path / "state.db")


def test_the_epoch_always_grows(store: Store) -> None:
    """With the wall clock, or by one when the clock stands still or was set back."""
    assert [store.next_epoch(wall) for wall in (100, 100, 5, 200)] == [100, 101, 102, 200]


def test_the_federation_is_made_once(store: Store) -> None:
    """The second proposal is ignored."""
    assert store.federation("first") == "first"
    assert store.federation("second") == "first"


def test_settings_are_small_texts(store: Store) -> None:
    """Empty if never set."""
    assert store.setting("k") == ""
    store.set_setting("k", "v")
    store.set_setting("k", "w")
    assert store.setting("k") == "w"


def test_devices_are_added_replaced_and_removed(store: Store) -> None:
    """A name is taken once; an unknown one lists the known."""
    store.add_device(device_row("b", labels={"site": "north"}))
    store.add_device(device_row("a"))
    assert store.devices() == [device_row("a"), device_row("b", labels={"site": "north"})]
    with pytest.raises(ConflictError, match="exists already"):
        store.add_device(device_row("a", key=digest("new")))
    store.add_device(device_row("a", key=digest("new")), replace=True)
    assert store.devices()[0].key == digest("new")
    store.remove_device("a")
    with pytest.raises(NoSuchNameError, match="known: b"):
        store.remove_device("a")


def test_runs_are_numbered_by_name(store: Store) -> None:
    """r-1 and r-10 give r-11; r-x-1 and rr-3 are other names."""
    assert store.next_run_number("r") == 1
    for run in ("r-1", "r-10", "r-x-1", "rr-3"):
        store.add_run(run_row(run))
    assert store.next_run_number("r") == 11
    assert [run.id for run in store.runs()] == ["r-1", "r-10", "r-x-1", "rr-3"]
    assert store.run("nobody") is None


def test_the_oldest_run_in_a_state_is_found(store: Store) -> None:
    """Of two that are queued the first; of none, none."""
    for run in ("r-1", "r-2", "r-3"):
        store.add_run(run_row(run))
    store.set_run_state("r-1", "finished")
    found = store.first_run("queued")
    assert found is not None
    assert found.id == "r-2"
    assert store.first_run("running") is None


@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_run_that_fails_takes_its_open_round_with_it(store: Store, state: str) -> None:
    """Its update is not needed any more, open leases are closed, and rounds that counted still do."""
    _with_update(store)
    if state == "FROZEN":
        store.freeze("r-1", 1, 1, "hash")
    store.fail_run("r-1", "crashed: why")
    run = store.run("r-1")
    assert run is not None
    assert (run.state, run.reason) == ("failed", "crashed: why")
    assert [(r.state, r.reason) for r in store.rounds("r-1")] == [("ABANDONED", "crashed: why")]
    assert [lease.state for lease in store.leases("r-1", 1, 1)] == ["stored", "cancelled"]
    assert not store.is_needed(update_row().sha256, 2)


@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_lost_update_is_dropped_and_its_lease_offered_again(store: Store, state: str) -> None:
    """Together; a frozen round runs again, and the update may come again."""
    _with_update(store)
    if state == "FROZEN":
        store.freeze("r-1", 1, 1, "hash")
    store.drop_update(update_row())
    assert store.updates("r-1", 1, 1) == []
    assert store.leases("r-1", 1, 1)[0].state == "offered"
    assert store.rounds("r-1")[0].state == "RUNNING"
    store.save_update(update_row(), None, "lease-1")
    assert store.updates("r-1", 1, 1) == [update_row()]


def test_the_first_model_starts_the_run(store: Store) -> None:
    """Version 0, the settings' blob and the state, together."""
    _with_run(store)
    run = store.run("r-1")
    assert run is not None
    assert (run.state, run.settings_sha256, run.settings_length) == ("running", digest("settings"), 8)
    assert store.last_model("r-1") == model_row(0) == store.model("r-1", 0)
    assert store.model("r-1", 1) is None


def test_rows_come_back_as_they_were_written(store: Store) -> None:
    """Flags, plans, reports, logs and matrices too."""
    _with_run(store)
    leases = [lease_row(1, "a", plan=PLAN), lease_row(2, "b", evaluate=False)]
    store.open_round(round_row(extended=True), leases)
    store.set_lease("lease-2", "declined", code="crashed", detail="why", log=["x", "y"])
    store.save_update(update_row(), evaluation_row(), "lease-1")
    assert store.rounds("r-1") == [round_row(extended=True)]
    first, second = store.leases("r-1", 1, 1)
    assert first == lease_row(1, "a", plan=PLAN, state="stored")
    assert second == lease_row(2, "b", evaluate=False, state="declined", code="crashed", detail="why", log=("x", "y"))
    assert store.updates("r-1", 1, 1) == [update_row()]
    assert store.update_of_lease("lease-1") == update_row()
    assert store.evaluations("r-1") == [evaluation_row()]
    assert store.lease("nobody") is None


def test_an_update_counts_once_per_attempt_and_device(store: Store) -> None:
    """A second one is not written, nor is its evaluation or its lease's end; another attempt is another row."""
    _with_update(store)
    store.add_leases([lease_row(3, "a")])
    before = _dump(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.save_update(update_row(lease="lease-3"), evaluation_row(num_correct=1), "lease-3")
    assert _dump(store) == before
    store.open_round(round_row(attempt=2), [lease_row(4, "a", attempt=2)])
    store.save_update(update_row(lease="lease-4", attempt=2), None, "lease-4")
    assert len(store.updates("r-1", 1, 2)) == 1


def test_a_lease_brings_one_update(store: Store) -> None:
    """Even under another device's name."""
    _with_update(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.save_update(update_row("b", "lease-1"), None, "lease-1")


def test_a_version_exists_once(store: Store) -> None:
    """No fork: the second commit of version 1 fails and changes nothing."""
    _with_update(store)
    store.commit_round(1, 1, model_row(1))
    before = _dump(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.commit_round(1, 1, model_row(1, sha256=digest("fork")))
    assert _dump(store) == before


def test_a_round_is_opened_with_its_leases_or_not_at_all(store: Store) -> None:
    """The second lease has an issue that is taken."""
    _with_round(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.open_round(round_row(2), [lease_row(3, round=2), lease_row(2, "c", id="x", round=2)])
    assert [r.number for r in store.rounds("r-1")] == [1]
    assert store.lease("lease-3") is None


def test_the_newest_attempt_is_the_last_round(store: Store) -> None:
    """By number, then by attempt."""
    _with_run(store)
    assert store.last_round("r-1") is None
    for number, attempt in ((1, 1), (1, 2), (2, 1)):
        store.open_round(round_row(number, attempt), [])
        last = store.last_round("r-1")
        assert last is not None
        assert (last.number, last.attempt) == (number, attempt)


def test_an_evaluation_that_is_repeated_replaces_the_first(store: Store) -> None:
    """An abandoned attempt evaluated the same version on the same device."""
    _with_update(store)
    store.save_update(None, evaluation_row(num_correct=9), "lease-2")
    assert [row.num_correct for row in store.evaluations("r-1", 0)] == [9]
    assert store.evaluations("r-1", 1) == []
    assert store.evaluated_versions("r-1") == [0]


def test_updates_are_sorted_by_device(store: Store) -> None:
    """Whatever the order of their arrival."""
    _with_run(store)
    store.open_round(round_row(), [lease_row(i, name) for i, name in enumerate("cab", 1)])
    for i, name in enumerate("cab", 1):
        store.save_update(update_row(name, f"lease-{i}"), None, f"lease-{i}")
    assert [update.device for update in store.updates("r-1", 1, 1)] == ["a", "b", "c"]


def test_the_drop_rate_is_the_share_of_finished_leases_without_an_update(store: Store) -> None:
    """stored, declined, expired count; offered, accepted, cancelled, evaluations do not: 2 of 3; of the last 1: all."""
    _with_run(store)
    assert store.drop_rate("r-1", 100) == 0.0
    states = ["stored", "declined", "expired", "offered", "accepted", "cancelled"]
    store.open_round(round_row(), [lease_row(i, f"d{i}", state=state) for i, state in enumerate(states, 1)])
    store.add_leases([lease_row(50, "e", train=False, state="expired")])
    assert store.drop_rate("r-1", 100) == pytest.approx(2 / 3)
    assert store.drop_rate("r-1", 1) == 1.0


def test_norms_come_from_committed_rounds_only(store: Store) -> None:
    """Rounds 1 and 2 are committed, 3 is running, an abandoned attempt of 2 does not count; the newest one: round 2."""
    _with_run(store)
    attempts = ((1, 1, 1.0), (2, 1, 9.0), (2, 2, 2.0), (3, 1, 3.0))
    for issue, (number, attempt, norm) in enumerate(attempts, 1):
        store.open_round(round_row(number, attempt), [lease_row(issue, round=number, attempt=attempt)])
        update = update_row(lease=f"lease-{issue}", round=number, attempt=attempt, norm=norm)
        store.save_update(update, None, f"lease-{issue}")
    store.commit_round(1, 1, model_row(1))
    store.abandon("r-1", 2, 1, "few")
    store.commit_round(2, 2, model_row(2))
    assert store.recent_norms("r-1", 5) == [1.0, 2.0]
    assert store.recent_norms("r-1", 1) == [2.0]


def test_the_last_plan_of_each_device_is_known(store: Store) -> None:
    """Of its newest update that had one."""
    _with_run(store)
    store.open_round(round_row(), [lease_row(1, "a"), lease_row(2, "b")])
    store.save_update(update_row("a", "lease-1"), None, "lease-1")
    store.save_update(update_row("b", "lease-2", report=report(plan=None)), None, "lease-2")
    assert store.last_plans("r-1") == {"a": PLAN}


def test_traffic_adds_up(store: Store) -> None:
    """Per device, both ways."""
    _with_run(store)
    store.add_traffic("r-1", {"a": (1, 2), "b": (5, 0)})
    store.add_traffic("r-1", {"a": (10, 20)})
    assert store.traffic("r-1") == {"a": (11, 22), "b": (5, 0)}


def test_needed_blobs_are_settings_kept_models_and_open_updates(store: Store) -> None:
    """Of three versions the newest two are kept; an update is needed until its round is committed or abandoned."""
    _with_update(store)
    update = update_row().sha256
    assert store.needed_blobs(2) == {digest("settings"), model_row(0).sha256, update}
    store.freeze("r-1", 1, 1, "hash")
    assert store.is_needed(update, 2)
    store.commit_round(1, 1, model_row(1))
    assert not store.is_needed(update, 2)
    store.open_round(round_row(2), [lease_row(9, round=2)])
    store.commit_round(2, 1, model_row(2, sent_sha256=digest("sent")))
    kept = {model_row(1).sha256, model_row(2).sha256, digest("sent")}
    assert store.needed_blobs(2) == {digest("settings")} | kept
    assert not store.is_needed(model_row(0).sha256, 2)
    assert all(store.is_needed(sha256, 2) for sha256 in kept | {digest("settings")})


def test_abandoned_updates_are_not_needed_but_stay_on_record(store: Store) -> None:
    """I2: a receipted update is in a frozen set, or its attempt was abandoned with a row."""
    _with_update(store)
    store.abandon("r-1", 1, 1, "too few")
    assert not store.is_needed(update_row().sha256, 2)
    assert store.updates("r-1", 1, 1) == [update_row()]
    assert store.rounds("r-1")[0].reason == "too few"


def test_only_a_committed_round_makes_a_lease_count(store: Store) -> None:
    """lease-1's update counts when its round is committed, not when it is stored."""
    _with_update(store)
    assert store.last_counted_lease("r-1", "a") is None
    store.freeze("r-1", 1, 1, digest("set"))
    store.commit_round(1, 1, model_row(1))
    assert store.last_counted_lease("r-1", "a") == "lease-1"
    assert store.last_counted_lease("r-1", "b") is None
