"""One suite over every store: what was written is there, together or not at all."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import pytest
from rows import (
    PLAN,
    deployment_row,
    device_row,
    digest,
    evaluation_row,
    lease_row,
    left_out_row,
    model_row,
    part_row,
    report,
    round_row,
    run_row,
    update_row,
)

from coordinator.store import sqlite
from coordinator.store.base import Store
from coordinator.store.rows import SERVER
from coordinator.store.sqlite import SqliteStore
from edge_client import faults
from edge_client.errors import ConflictError, DiskFullError, MachineError, NoSuchNameError

Step: TypeAlias = Callable[[Store], object]


@pytest.fixture(params=[SqliteStore])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    store: Store = request.param()
    yield store
    store.close()


def _with_run(store: Store) -> Store:
    store.runs.add(run_row())
    store.runs.start(model_row(0), digest("settings"), 8)
    return store


def _with_round(store: Store) -> Store:
    _with_run(store).rounds.open(round_row(), [lease_row(1, "a"), lease_row(2, "b", train=False)])
    return store


def _with_update(store: Store) -> Store:
    _with_round(store).updates.save(update_row(), evaluation_row(), "lease-1")
    return store


def _dump(store: Store) -> list[object]:
    """All that a store says, for comparing."""
    return [
        store.devices.all(),
        store.runs.all(),
        store.models.all("r-1"),
        store.models.parts("r-1"),
        store.rounds.all("r-1"),
        store.leases.of_attempt("r-1", 1, 1),
        store.updates.of_attempt("r-1", 1, 1),
        store.evaluations.all("r-1"),
        store.traffic.by_device("r-1"),
        store.models.scores("r-1"),
        store.rounds.left_out("r-1"),
        store.runs.device_info("r-1"),
        store.leases.device_failures("b", 9),
        store.leases.run_failures("r-1", 9),
        store.updates.last_plans("r-1"),
        store.blob_references.needed(1),
        store.settings.get("k"),
        store.leases.next_issue(),
        store.deployments.all(),
    ]


WRITES: dict[str, Step] = {
    "device": lambda s: s.devices.add(device_row("x")),
    "labels": lambda s: s.devices.set_labels("known", {"line": "a"}),
    "removed device": lambda s: s.devices.remove("known"),
    "run": lambda s: s.runs.add(run_row("r-2")),
    "removed run": lambda s: s.runs.remove("r-1"),
    "initial": lambda s: s.runs.start(model_row(0, "r-0"), digest("first"), 1),
    "part": lambda s: s.models.add_part(part_row(0)),
    "score": lambda s: s.models.save_score("r-1", 0, 0.5, 0),
    "run-device": lambda s: s.runs.save_device_info("r-1", "a", {"client": "1"}),
    "evaluation": lambda s: s.evaluations.save(evaluation_row(SERVER)),
    "run-state": lambda s: s.runs.set_state("r-1", "stopped", "why"),
    "failed": lambda s: s.runs.fail("r-1", "why"),
    "lost": lambda s: s.updates.drop(update_row()),
    "setting": lambda s: s.settings.set("k", "v"),
    "leases": lambda s: s.leases.add([lease_row(3, "c")]),
    "lease": lambda s: s.leases.set_state("lease-2", "declined", code="c", detail="d", log=["l"]),
    "deadline": lambda s: s.rounds.save_deadline("r-1", 1, 1, remaining_s=5.0, extended=True, elapsed_s=7.0),
    "update": lambda s: s.updates.save(None, evaluation_row("b"), "lease-2"),
    "freeze": lambda s: s.rounds.freeze("r-1", 1, 1, "hash"),
    "round": lambda s: s.rounds.commit(1, 1, model_row(1), [left_out_row()]),
    "announce": lambda s: s.rounds.announce("r-1", 1, 1),
    "abandon": lambda s: s.rounds.abandon("r-1", 1, 1, "few"),
    "open": lambda s: s.rounds.open(round_row(2), [lease_row(4, round=2)]),
    "traffic": lambda s: s.traffic.add("r-1", {"a": (1, 2)}),
    "deployment": lambda s: s.deployments.add([deployment_row(2, "b")]),
    "deployed": lambda s: s.deployments.set_state("deployment-1", "b", "active"),
}


def test_every_transaction_of_the_store_is_among_the_writes() -> None:
    """But for those of a start, whose values no dump shows."""
    sources = [path.read_text(encoding="utf-8") for path in Path(sqlite.__file__).parent.glob("*.py")]
    points = {point for source in sources for point in re.findall(r'\.transaction\("([a-z-]+)"\)', source)}
    assert points - set(WRITES) == {"epoch", "federation"}


@pytest.mark.parametrize("point", sorted(WRITES))
def test_a_full_disk_at_the_commit_leaves_the_state_unchanged(
    store: Store, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Every write; the next try works."""
    _with_update(store).devices.add(device_row("known"))
    store.runs.add(run_row("r-0"))
    store.deployments.add([deployment_row(1, "b")])
    before = _dump(store)
    others = {"failed": "run-state", "lost": "update", "labels": "device", "removed device": "device"}
    place = (others | {"removed run": "run"}).get(point, point)
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"enospc:store.{place}.commit")])
    with pytest.raises(DiskFullError, match="cannot save"):
        WRITES[point](store)
    assert _dump(store) == before
    WRITES[point](store)
    assert _dump(store) != before


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """Close and open again: every row is the same."""
    store = SqliteStore(tmp_path / "state.db")
    _with_update(store).devices.add(device_row("known"))
    store.runs.add(run_row("r-0"))
    store.deployments.add([deployment_row(1, "b")])
    for name, step in WRITES.items():
        if not name.startswith("removed"):
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
    store._database._connection.execute("UPDATE round SET state = 'FROZEN'")
    other = sqlite3.connect(tmp_path / "state.db")
    assert other.execute("SELECT state FROM round").fetchall() == [("RUNNING",)]
    other.close()
    store._database._connection.rollback()
    store.close()


def test_a_database_that_breaks_while_it_is_used_is_said_to_be_broken(tmp_path: Path) -> None:
    """Pages are overwritten under a store that is open: a read ends with one line, not with a traceback."""
    store = SqliteStore(tmp_path / "state.db")
    for number in range(200):
        store.runs.add(run_row(f"r-{number}"))
    store._database._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._database._connection.execute("PRAGMA cache_size = 0")
    size = (tmp_path / "state.db").stat().st_size
    with open(tmp_path / "state.db", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (size - 4096))
    store._database._connection.execute("PRAGMA shrink_memory")
    with pytest.raises(MachineError, match="cannot read"):
        store.runs.all()
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
    store._database._connection.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(MachineError, match="upgrade fedfit"):
        SqliteStore(tmp_path / "state.db")


def test_the_epoch_always_grows(store: Store) -> None:
    """With the wall clock, or by one when the clock stands still or was set back."""
    assert [store.settings.next_epoch(wall) for wall in (100, 100, 5, 200)] == [100, 101, 102, 200]


def test_the_federation_is_made_once(store: Store) -> None:
    """The second proposal is ignored."""
    assert store.settings.federation("first") == "first"
    assert store.settings.federation("second") == "first"


def test_settings_are_small_texts(store: Store) -> None:
    """Empty if never set."""
    assert store.settings.get("k") == ""
    store.settings.set("k", "v")
    store.settings.set("k", "w")
    assert store.settings.get("k") == "w"


def test_devices_are_added_replaced_and_removed(store: Store) -> None:
    """A name is taken once; an unknown one lists the known."""
    store.devices.add(device_row("b", labels={"site": "north"}))
    store.devices.add(device_row("a"))
    assert store.devices.all() == [device_row("a"), device_row("b", labels={"site": "north"})]
    with pytest.raises(ConflictError, match="exists already"):
        store.devices.add(device_row("a", key=digest("new")))
    store.devices.add(device_row("a", key=digest("new")), replace=True)
    assert store.devices.all()[0].key == digest("new")
    store.devices.remove("a")
    with pytest.raises(NoSuchNameError, match="known: b"):
        store.devices.remove("a")


def test_runs_are_numbered_by_name(store: Store) -> None:
    """r-1 and r-10 give r-11; r-x-1 and rr-3 are other names."""
    assert store.runs.next_number("r") == 1
    for run in ("r-1", "r-10", "r-x-1", "rr-3"):
        store.runs.add(run_row(run))
    assert store.runs.next_number("r") == 11
    assert [run.id for run in store.runs.all()] == ["r-1", "r-10", "r-x-1", "rr-3"]
    assert store.runs.get("nobody") is None


def test_the_oldest_run_in_a_state_is_found(store: Store) -> None:
    """Of two that are queued the first; of none, none."""
    for run in ("r-1", "r-2", "r-3"):
        store.runs.add(run_row(run))
    store.runs.set_state("r-1", "finished")
    found = store.runs.oldest("queued")
    assert found is not None
    assert found.id == "r-2"
    assert store.runs.oldest("running") is None


@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_run_that_fails_takes_its_open_round_with_it(store: Store, state: str) -> None:
    """Its update is not needed any more, open leases are closed, and rounds that counted still do."""
    _with_update(store)
    if state == "FROZEN":
        store.rounds.freeze("r-1", 1, 1, "hash")
    store.runs.fail("r-1", "crashed: why")
    run = store.runs.get("r-1")
    assert run is not None
    assert (run.state, run.reason) == ("failed", "crashed: why")
    assert [(r.state, r.reason) for r in store.rounds.all("r-1")] == [("ABANDONED", "crashed: why")]
    assert [lease.state for lease in store.leases.of_attempt("r-1", 1, 1)] == ["stored", "cancelled"]
    assert not store.blob_references.is_needed(update_row().sha256, 2)


@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_lost_update_is_dropped_and_its_lease_offered_again(store: Store, state: str) -> None:
    """Together; a frozen round runs again, and the update may come again."""
    _with_update(store)
    if state == "FROZEN":
        store.rounds.freeze("r-1", 1, 1, "hash")
    store.updates.drop(update_row())
    assert store.updates.of_attempt("r-1", 1, 1) == []
    assert store.leases.of_attempt("r-1", 1, 1)[0].state == "offered"
    assert store.rounds.all("r-1")[0].state == "RUNNING"
    store.updates.save(update_row(), None, "lease-1")
    assert store.updates.of_attempt("r-1", 1, 1) == [update_row()]


@pytest.mark.parametrize("state", ["COMMITTED", "ANNOUNCED", "ABANDONED"])
def test_a_round_that_is_over_stays_over_when_an_update_is_dropped(store: Store, state: str) -> None:
    """Only a frozen one runs again."""
    _with_update(store)
    if state == "ABANDONED":
        store.rounds.abandon("r-1", 1, 1, "few")
    else:
        store.rounds.commit(1, 1, model_row(1))
    if state == "ANNOUNCED":
        store.rounds.announce("r-1", 1, 1)
    store.updates.drop(update_row())
    assert store.rounds.all("r-1")[0].state == state


def test_a_lease_that_brought_its_update_has_no_reason_any_more(store: Store) -> None:
    """Its log stays; so it is when the update is lost again."""
    _with_round(store)
    store.leases.set_state("lease-1", "expired", code="late", detail="why", log=["x"])
    store.updates.save(update_row(), None, "lease-1")
    assert store.leases.get("lease-1") == lease_row(1, "a", state="stored", log=("x",))
    store.leases.set_state("lease-1", "stored", code="c", detail="d")
    store.updates.drop(update_row())
    assert store.leases.get("lease-1") == lease_row(1, "a", state="offered")


def test_the_first_model_starts_the_run(store: Store) -> None:
    """Version 0, the settings' blob and the state, together."""
    _with_run(store)
    run = store.runs.get("r-1")
    assert run is not None
    assert (run.state, run.settings_sha256, run.settings_length) == ("running", digest("settings"), 8)
    assert store.models.last("r-1") == model_row(0) == store.models.get("r-1", 0)
    assert store.models.get("r-1", 1) is None


def test_rows_come_back_as_they_were_written(store: Store) -> None:
    """Flags, plans, reports, logs and matrices too."""
    _with_run(store)
    leases = [lease_row(1, "a", plan=PLAN), lease_row(2, "b", evaluate=False)]
    store.rounds.open(round_row(extended=True), leases)
    store.leases.set_state("lease-2", "declined", code="crashed", detail="why", log=["x", "y"])
    store.updates.save(update_row(), evaluation_row(), "lease-1")
    assert store.rounds.all("r-1") == [round_row(extended=True)]
    first, second = store.leases.of_attempt("r-1", 1, 1)
    assert first == lease_row(1, "a", plan=PLAN, state="stored")
    assert second == lease_row(2, "b", evaluate=False, state="declined", code="crashed", detail="why", log=("x", "y"))
    assert store.updates.of_attempt("r-1", 1, 1) == [update_row()]
    assert store.updates.of_lease("lease-1") == update_row()
    assert store.evaluations.all("r-1") == [evaluation_row()]
    assert store.leases.get("nobody") is None


def test_an_update_counts_once_per_attempt_and_device(store: Store) -> None:
    """A second one is not written, nor is its evaluation or its lease's end; another attempt is another row."""
    _with_update(store)
    store.leases.add([lease_row(3, "a")])
    before = _dump(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row(lease="lease-3"), evaluation_row(num_correct=1), "lease-3")
    assert _dump(store) == before
    store.rounds.open(round_row(attempt=2), [lease_row(4, "a", attempt=2)])
    store.updates.save(update_row(lease="lease-4", attempt=2), None, "lease-4")
    assert len(store.updates.of_attempt("r-1", 1, 2)) == 1


def test_a_lease_brings_one_update(store: Store) -> None:
    """Even under another device's name."""
    _with_update(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row("b", "lease-1"), None, "lease-1")


def test_a_version_exists_once(store: Store) -> None:
    """No fork: the second commit of version 1 fails and changes nothing."""
    _with_update(store)
    store.rounds.commit(1, 1, model_row(1))
    before = _dump(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.commit(1, 1, model_row(1, sha256=digest("fork")))
    assert _dump(store) == before


def test_a_round_is_opened_with_its_leases_or_not_at_all(store: Store) -> None:
    """The second lease has an issue that is taken."""
    _with_round(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.open(round_row(2), [lease_row(3, round=2), lease_row(2, "c", id="x", round=2)])
    assert [r.number for r in store.rounds.all("r-1")] == [1]
    assert store.leases.get("lease-3") is None


def test_the_newest_attempt_is_the_last_round(store: Store) -> None:
    """By number, then by attempt."""
    _with_run(store)
    assert store.rounds.last("r-1") is None
    for number, attempt in ((1, 1), (1, 2), (2, 1)):
        store.rounds.open(round_row(number, attempt), [])
        last = store.rounds.last("r-1")
        assert last is not None
        assert (last.number, last.attempt) == (number, attempt)


def test_an_evaluation_that_is_repeated_replaces_the_first(store: Store) -> None:
    """An abandoned attempt evaluated the same version on the same device."""
    _with_update(store)
    store.updates.save(None, evaluation_row(num_correct=9), "lease-2")
    assert [row.num_correct for row in store.evaluations.all("r-1", 0)] == [9]
    assert store.evaluations.all("r-1", 1) == []
    assert store.evaluations.versions("r-1") == [0]


def test_updates_are_sorted_by_device(store: Store) -> None:
    """Whatever the order of their arrival."""
    _with_run(store)
    store.rounds.open(round_row(), [lease_row(i, name) for i, name in enumerate("cab", 1)])
    for i, name in enumerate("cab", 1):
        store.updates.save(update_row(name, f"lease-{i}"), None, f"lease-{i}")
    assert [update.device for update in store.updates.of_attempt("r-1", 1, 1)] == ["a", "b", "c"]


def test_the_drop_rate_is_the_share_of_finished_leases_without_an_update(store: Store) -> None:
    """stored, declined, expired count; offered, accepted, cancelled, evaluations do not: 2 of 3; of the last 1: all."""
    _with_run(store)
    assert store.leases.drop_rate("r-1", 100) == 0.0
    states = ["stored", "declined", "expired", "offered", "accepted", "cancelled"]
    store.rounds.open(round_row(), [lease_row(i, f"d{i}", state=state) for i, state in enumerate(states, 1)])
    store.leases.add([lease_row(50, "e", train=False, state="expired")])
    assert store.leases.drop_rate("r-1", 100) == pytest.approx(2 / 3)
    assert store.leases.drop_rate("r-1", 1) == 1.0


def test_norms_come_from_committed_rounds_only(store: Store) -> None:
    """Of each slice: 1 and 2 are committed, 3 is running, an abandoned attempt of 2 does not count; newest: round 2."""
    _with_run(store)
    attempts = ((1, 1, 1.0), (2, 1, 9.0), (2, 2, 2.0), (3, 1, 3.0))
    for issue, (number, attempt, norm) in enumerate(attempts, 1):
        slices = [lease_row(issue, round=number, attempt=attempt, slice="full" if number == 1 else "width:1/2")]
        store.rounds.open(round_row(number, attempt), slices)
        update = update_row(lease=f"lease-{issue}", round=number, attempt=attempt, norm=norm)
        store.updates.save(update, None, f"lease-{issue}")
    store.rounds.commit(1, 1, model_row(1))
    store.rounds.abandon("r-1", 2, 1, "few")
    store.rounds.commit(2, 2, model_row(2))
    assert store.updates.recent_norms("r-1", 5) == {"full": [1.0], "width:1/2": [2.0]}
    assert store.updates.recent_norms("r-1", 1) == {"width:1/2": [2.0]}


def test_the_last_plan_of_each_device_is_known(store: Store) -> None:
    """Of its newest update that had one."""
    _with_run(store)
    store.rounds.open(round_row(), [lease_row(1, "a"), lease_row(2, "b")])
    store.updates.save(update_row("a", "lease-1"), None, "lease-1")
    store.updates.save(update_row("b", "lease-2", report=report(plan=None)), None, "lease-2")
    assert store.updates.last_plans("r-1") == {"a": PLAN}


def test_traffic_adds_up(store: Store) -> None:
    """Per device, both ways."""
    _with_run(store)
    store.traffic.add("r-1", {"a": (1, 2), "b": (5, 0)})
    store.traffic.add("r-1", {"a": (10, 20)})
    assert store.traffic.by_device("r-1") == {"a": (11, 22), "b": (5, 0)}


def test_traffic_of_an_update_counts_with_its_row(store: Store) -> None:
    """1 + 10 bytes up, 2 + 20 down, in the run of the lease; a lease that nobody has counts nothing."""
    _with_run(store)
    store.rounds.open(round_row(), [lease_row(1)])
    store.traffic.add("r-1", {"a": (1, 2)})
    store.updates.save(update_row(), None, "lease-1", {"a": (10, 20)})
    store.updates.save(None, None, "nobody", {"a": (100, 200)})
    assert store.traffic.by_device("r-1") == {"a": (11, 22)}


def test_needed_blobs_are_settings_kept_models_and_open_updates(store: Store) -> None:
    """Of three versions the newest two are kept; an update is needed until its round is committed or abandoned."""
    _with_update(store)
    update = update_row().sha256
    assert store.blob_references.needed(2) == {digest("settings"), model_row(0).sha256, update}
    store.rounds.freeze("r-1", 1, 1, "hash")
    assert store.blob_references.is_needed(update, 2)
    store.rounds.commit(1, 1, model_row(1))
    assert not store.blob_references.is_needed(update, 2)
    store.rounds.open(round_row(2), [lease_row(9, round=2)])
    store.rounds.commit(2, 1, model_row(2, sent_sha256=digest("sent")))
    kept = {model_row(1).sha256, model_row(2).sha256, digest("sent")}
    assert store.blob_references.needed(2) == {digest("settings")} | kept
    assert not store.blob_references.is_needed(model_row(0).sha256, 2)
    assert all(store.blob_references.is_needed(sha256, 2) for sha256 in kept | {digest("settings")})


def test_abandoned_updates_are_not_needed_but_stay_on_record(store: Store) -> None:
    """I2: a receipted update is in a frozen set, or its attempt was abandoned with a row."""
    _with_update(store)
    store.rounds.abandon("r-1", 1, 1, "too few")
    assert not store.blob_references.is_needed(update_row().sha256, 2)
    assert store.updates.of_attempt("r-1", 1, 1) == [update_row()]
    assert store.rounds.all("r-1")[0].reason == "too few"


def test_only_a_committed_round_makes_a_lease_count(store: Store) -> None:
    """lease-1's update counts when its round is committed, not when it is stored."""
    _with_update(store)
    assert store.updates.last_counted_lease("r-1", "a") is None
    store.rounds.freeze("r-1", 1, 1, digest("set"))
    store.rounds.commit(1, 1, model_row(1))
    assert store.updates.last_counted_lease("r-1", "a") == "lease-1"
    assert store.updates.last_counted_lease("r-1", "b") is None


def test_labels_are_replaced_as_a_whole(store: Store) -> None:
    """Of a device that is there."""
    store.devices.add(device_row("a", labels={"line": "a", "site": "north"}))
    store.devices.set_labels("a", {"line": "b"})
    assert store.devices.all()[0].labels == {"line": "b"}
    with pytest.raises(NoSuchNameError, match="known: a"):
        store.devices.set_labels("b", {})


def test_the_best_version_is_kept_with_its_score(store: Store) -> None:
    """Of versions 0 to 3 the newest and the best are needed; a version without a score has none."""
    _with_run(store)
    for version in (1, 2, 3):
        store.rounds.open(round_row(version), [])
        store.rounds.commit(version, 1, model_row(version))
    store.models.save_score("r-1", 0, 0.25, 0)
    store.models.save_score("r-1", 2, 0.125, 0)
    run, model = store.runs.get("r-1"), store.models.get("r-1", 2)
    assert run is not None
    assert model is not None
    assert (run.best_version, model.score) == (0, 0.125)
    assert store.models.scores("r-1") == {0: 0.25, 2: 0.125}
    assert store.blob_references.needed(1) == {digest("settings"), model_row(0).sha256, model_row(3).sha256}
    assert store.blob_references.is_needed(model_row(0).sha256, 1)
    assert not store.blob_references.is_needed(model_row(2).sha256, 1)


def test_the_first_word_about_a_device_stays(store: Store) -> None:
    """By name; another run remembers others."""
    _with_run(store)
    store.runs.save_device_info("r-1", "b", {"cpu": "arm", "cores": [1, 2]})
    store.runs.save_device_info("r-1", "b", {"cpu": "x86"})
    store.runs.save_device_info("r-1", "a", {})
    assert list(store.runs.device_info("r-1").items()) == [("a", {}), ("b", {"cpu": "arm", "cores": [1, 2]})]
    assert store.runs.device_info("r-2") == {}


def test_a_removed_run_leaves_nothing(store: Store) -> None:
    """Its rows are gone, those of another are not; its numbers may be given again, and an unknown one is no error."""
    _with_update(store)
    store.traffic.add("r-1", {"a": (1, 2)})
    store.runs.save_device_info("r-1", "a", {})
    store.runs.add(run_row("r-2"))
    store.runs.start(model_row(0, "r-2"), digest("others"), 8)
    store.runs.remove("r-1")
    store.runs.remove("nobody")
    assert [run.id for run in store.runs.all()] == ["r-2"]
    gone = (
        store.models.all,
        store.rounds.all,
        store.evaluations.all,
        store.traffic.by_device,
        store.runs.device_info,
        store.updates.last_plans,
    )
    assert [len(asked("r-1")) for asked in gone] == [0] * 6
    assert (store.leases.get("lease-1"), store.updates.of_lease("lease-1"), store.leases.next_issue()) == (
        None,
        None,
        1,
    )
    assert store.blob_references.needed(2) == {digest("others"), model_row(0, "r-2").sha256}
    _with_update(store)
    assert [run.id for run in store.runs.all()] == ["r-2", "r-1"]


def test_failures_are_the_newest_leases_that_brought_nothing(store: Store) -> None:
    """declined, refused and expired; of a device over all runs, of a run over all devices."""
    _with_run(store)
    states = ["declined", "stored", "refused", "cancelled", "expired", "offered"]
    store.rounds.open(round_row(), [lease_row(i, "ab"[i % 2], state=state) for i, state in enumerate(states, 1)])
    store.runs.add(run_row("r-2"))
    store.rounds.open(round_row(run="r-2"), [lease_row(9, "b", run="r-2", state="declined", log=("x",))])
    assert [lease.issue for lease in store.leases.device_failures("b", 9)] == [9, 5, 3, 1]
    assert [lease.issue for lease in store.leases.device_failures("b", 1)] == [9]
    assert store.leases.device_failures("b", 1)[0].log == ("x",)
    assert [lease.issue for lease in store.leases.run_failures("r-1", 2)] == [5, 3]


def test_recent_updates_are_the_newest_oldest_first(store: Store) -> None:
    """By round and attempt; within one, the devices backwards."""
    _with_run(store)
    for issue, (number, attempt, device) in enumerate([(1, 1, "a"), (1, 2, "b"), (1, 2, "a"), (2, 1, "a")], 1):
        store.leases.add([lease_row(issue, device, round=number, attempt=attempt)])
        update = update_row(device, f"lease-{issue}", round=number, attempt=attempt)
        store.updates.save(update, None, f"lease-{issue}")
    assert [update.lease for update in store.updates.recent("r-1", 9)] == ["lease-1", "lease-2", "lease-3", "lease-4"]
    assert [update.lease for update in store.updates.recent("r-1", 2)] == ["lease-3", "lease-4"]


def test_updates_are_counted_that_a_model_was_made_of(store: Store) -> None:
    """Two in the attempt of round 1 that was committed; not the one of the attempt before, nor of the open round."""
    _with_run(store)
    store.rounds.open(round_row(), [lease_row(1, "a")])
    store.updates.save(update_row("a", "lease-1"), None, "lease-1")
    store.rounds.abandon("r-1", 1, 1, "too few")
    store.rounds.open(round_row(attempt=2), [lease_row(2, "a", attempt=2), lease_row(3, "b", attempt=2)])
    for device, lease in (("a", "lease-2"), ("b", "lease-3")):
        store.updates.save(update_row(device, lease, attempt=2), None, lease)
    assert store.updates.counts("r-1") == {}
    store.rounds.freeze("r-1", 1, 2, "set")
    store.rounds.commit(1, 2, model_row(1))
    store.rounds.open(round_row(2), [lease_row(4, "a", round=2)])
    store.updates.save(update_row("a", "lease-4", round=2), None, "lease-4")
    assert store.updates.counts("r-1") == {1: 2}
    store.rounds.announce("r-1", 1, 2)
    assert store.updates.counts("r-1") == {1: 2}
    assert store.updates.counts("other") == {}


def test_the_servers_evaluation_is_one_more(store: Store) -> None:
    """Without an update or a lease; repeated, it replaces the first."""
    _with_update(store)
    store.evaluations.save(evaluation_row(SERVER, num_correct=1))
    store.evaluations.save(evaluation_row(SERVER, num_correct=2))
    assert [(row.device, row.num_correct) for row in store.evaluations.all("r-1")] == [(SERVER, 2), ("a", 7)]


def test_models_and_rounds_belong_to_a_run(store: Store) -> None:
    """One that nobody started has none; nothing of the call stays."""
    with pytest.raises(sqlite3.IntegrityError):
        store.runs.start(model_row(0), digest("settings"), 8)
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.open(round_row(), [lease_row(1)])
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.commit(1, 1, model_row(1))
    _with_run(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.runs.add(run_row("r-1"))
    assert (store.models.all("r-1"), store.rounds.all("r-1"), store.leases.get("lease-1")) == ([model_row(0)], [], None)


def test_what_is_not_a_number_is_not_stored(store: Store) -> None:
    """A score that is none is as one that was never given."""
    _with_round(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row(norm=math.nan), None, "lease-1")
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row(), evaluation_row(loss_sum=math.nan), "lease-1")
    assert store.updates.of_attempt("r-1", 1, 1) == []
    store.models.save_score("r-1", 0, math.nan, 0)
    assert store.models.scores("r-1") == {}


def test_what_nobody_has_is_changed_without_an_error(store: Store) -> None:
    """As `UPDATE` does: whoever asks after a restart may know more than the store."""
    before = _dump(_with_update(store))
    store.runs.set_state("nobody", "stopped")
    store.runs.fail("nobody", "why")
    store.leases.set_state("nobody", "declined")
    store.rounds.save_deadline("r-1", 7, 1, remaining_s=1.0, extended=True, elapsed_s=1.0)
    store.rounds.freeze("r-1", 7, 1, "hash")
    store.rounds.announce("r-1", 7, 1)
    store.rounds.abandon("r-1", 7, 1, "few")
    store.models.save_score("nobody", 0, 1.0, 0)
    store.updates.drop(update_row("z", "nobody"))
    assert _dump(store) == before


def test_nobody_shares_a_map_with_the_store(store: Store) -> None:
    """Changed after it was written, or after it was read."""
    labels, info, log = {"line": "a"}, {"cores": [1]}, ["x"]
    store.devices.add(device_row("d", labels=labels))
    _with_round(store).runs.save_device_info("r-1", "d", info)
    store.leases.set_state("lease-1", "declined", log=log)
    before = _dump(store)
    labels["line"] = "b"
    info["cores"].append(2)
    log.append("y")
    run = store.runs.get("r-1")
    assert run is not None
    maps: tuple[object, ...] = (run.file, store.devices.all()[0].labels, store.runs.device_info("r-1")["d"])
    for shared in maps:
        assert isinstance(shared, dict)
        shared["new"] = 1
    assert _dump(store) == before


def test_a_backup_is_a_database_that_says_the_same(store: Store, tmp_path: Path) -> None:
    """Whatever the state of a run, with the store going on; a file that is there is not touched."""
    store.settings.federation("fed")
    store.settings.set("k", "v")
    store.settings.next_epoch(7)
    store.devices.add(device_row("a", labels={"site": "north"}))
    _with_update(store).traffic.add("r-1", {"a": (1, 2)})
    store.runs.save_device_info("r-1", "a", {"cpu": "arm"})
    store.rounds.commit(1, 1, model_row(1, set_hash="hash"))
    store.models.save_score("r-1", 1, 0.5, 1)
    store.rounds.open(round_row(2, elapsed_s=3.0), [lease_row(5, "b", round=2, plan=PLAN, log=("x",))])
    store.runs.set_state("r-1", "stopped", "why")
    store.runs.add(run_row("r-2", environment={"python": "3"}))
    store.deployments.add([deployment_row(1, "a"), deployment_row(1, "b")])
    store.deployments.add([deployment_row(2, "b")])
    store.backup(tmp_path / "copy.db")
    expected = _dump(store)
    store.settings.set("k", "later")
    with pytest.raises(MachineError, match="File exists"):
        store.backup(tmp_path / "copy.db")
    again = SqliteStore(tmp_path / "copy.db")
    try:
        assert _dump(again) == expected
        assert again.leases.of_attempt("r-1", 2, 1) == store.leases.of_attempt("r-1", 2, 1)
        assert (again.settings.federation("other"), again.settings.next_epoch(0)) == ("fed", 8)
    finally:
        again.close()
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600


def test_the_newest_counted_lease_and_the_newest_plan_are_known(store: Store) -> None:
    """Whatever the order in which rounds were written; a plan of a round that never counted is one, too."""
    _with_run(store)
    plans = {number: replace(PLAN, microbatch=number) for number in (1, 2, 3)}
    for number in (2, 1, 3):
        store.rounds.open(round_row(number), [lease_row(number, round=number)])
        update = update_row(lease=f"lease-{number}", round=number, report=report(plan=plans[number]))
        store.updates.save(update, None, f"lease-{number}")
    for number in (1, 2):
        store.rounds.commit(number, 1, model_row(number))
    assert store.updates.last_counted_lease("r-1", "a") == "lease-2"
    assert store.updates.last_plans("r-1") == {"a": plans[3]}


def test_a_round_that_is_announced_keeps_what_had_travelled(store: Store) -> None:
    """5 + 1 up and 7 + 2 down by then; what comes later belongs to the next round."""
    _with_round(store)
    store.traffic.add("r-1", {"a": (5, 7), "b": (1, 2)})
    store.rounds.commit(1, 1, model_row(1))
    assert store.rounds.all("r-1")[0].bytes_up is None
    store.rounds.announce("r-1", 1, 1)
    store.traffic.add("r-1", {"a": (100, 100)})
    (row,) = store.rounds.all("r-1")
    assert (row.state, row.bytes_up, row.bytes_down) == ("ANNOUNCED", 6, 9)


def test_parts_are_of_the_newest_version_and_needed_while_the_run_trains(store: Store) -> None:
    """The first part of version 1 sends those of version 0 away; a run that has ended needs none."""
    _with_run(store)
    assert store.models.add_part(part_row(0, "full")) == []
    assert store.models.add_part(part_row(0, "width:1/2")) == []
    assert store.models.parts("r-1") == [part_row(0, "full"), part_row(0, "width:1/2")]
    store.rounds.commit(1, 1, model_row(1))
    assert store.models.add_part(part_row(1, "full")) == [part_row(0, "full"), part_row(0, "width:1/2")]
    assert store.models.parts("r-1") == [part_row(1, "full")]
    assert store.blob_references.is_needed(part_row(1, "full").sha256, 1)
    store.runs.set_state("r-1", "finished")
    assert not store.blob_references.is_needed(part_row(1, "full").sha256, 1)


def test_a_version_is_judged_slice_by_slice(store: Store) -> None:
    """One row for each architecture; the same one again replaces its row."""
    _with_run(store)
    for correct, cut in ((1, "full"), (2, "width:1/2"), (3, "full")):
        store.evaluations.save(evaluation_row(SERVER, num_correct=correct, slice=cut))
    assert [(row.slice, row.num_correct) for row in store.evaluations.all("r-1")] == [("full", 3), ("width:1/2", 2)]


def test_a_newer_deployment_takes_the_place_of_a_pending_one(store: Store) -> None:
    """On its devices only; a blob is needed while a device is to use it or does, and not longer."""
    first, second = [deployment_row(1, "a"), deployment_row(1, "b")], [deployment_row(2, "b")]
    assert store.deployments.next_issue() == 1
    assert store.deployments.add(first) == []
    assert store.deployments.add(second) == [first[1]]
    assert store.deployments.next_issue() == 3
    assert store.deployments.all("r-1") == [first[0], replace(first[1], state="superseded"), second[0]]
    assert store.deployments.all("r-2") == []
    assert store.deployments.wanted() == [first[0], second[0]]
    assert store.blob_references.needed(1) == {first[0].sha256, second[0].sha256}
    assert store.deployments.set_state("deployment-1", "a", "rolled_back", code="self_test", detail="why") == []
    assert store.deployments.all()[0] == replace(first[0], state="rolled_back", code="self_test", detail="why")
    assert not store.blob_references.is_needed(first[0].sha256, 1)
    with pytest.raises(sqlite3.IntegrityError):
        store.deployments.add(second)
    assert store.deployments.wanted() == second


def test_an_active_deployment_stays_until_another_one_is_active(store: Store) -> None:
    """A newer one that is pending, refused or rolled back leaves it; so does one of another device."""
    rows = [deployment_row(1, "a"), deployment_row(2, "a"), deployment_row(3, "a"), deployment_row(3, "b")]
    first = replace(rows[0], state="active")
    store.deployments.add(rows[:1])
    assert store.deployments.set_state("deployment-1", "a", "active") == []
    assert store.deployments.add(rows[1:2]) == []
    assert store.deployments.wanted() == [first, rows[1]]
    assert store.deployments.set_state("deployment-2", "a", "refused", code="forbidden") == []
    assert store.deployments.wanted() == [first]
    assert store.deployments.add(rows[2:]) == []
    assert store.deployments.set_state("deployment-3", "b", "active") == []
    assert store.blob_references.is_needed(first.sha256, 1)
    assert store.deployments.set_state("deployment-3", "a", "active") == [first]
    assert store.deployments.all()[0] == replace(first, state="superseded")
    assert not store.blob_references.is_needed(first.sha256, 1)
    assert store.deployments.set_state("deployment-3", "a", "pending") == []
    assert [row.state for row in store.deployments.wanted()] == ["pending", "active"]


def test_a_removed_device_takes_its_deployments_with_it(store: Store) -> None:
    """Their blob is not needed for it any more."""
    store.devices.add(device_row("a"), device_row("b"))
    store.deployments.add([deployment_row(1, "a"), deployment_row(1, "b", sha256=digest("half"))])
    store.devices.remove("a")
    assert store.blob_references.needed(1) == {digest("half")}


def test_the_slice_that_a_device_trained_last_is_known(store: Store) -> None:
    """Of leases that brought an update, and not of those that only judged or failed."""
    _with_run(store)
    leases = [lease_row(1, "a", slice="full"), lease_row(2, "b", train=False), lease_row(3, "c")]
    store.rounds.open(round_row(), leases)
    store.rounds.open(round_row(2), [lease_row(4, "a", round=2, slice="width:1/2"), lease_row(5, "a", round=2)])
    for lease in ("lease-1", "lease-2", "lease-4"):
        store.leases.set_state(lease, "stored")
    assert store.leases.trained_slices("r-1") == {"a": "width:1/2"}
    assert store.leases.trained_slices("r-2") == {}


def test_a_database_without_deployments_is_brought_up_to_date(tmp_path: Path) -> None:
    """Layout 5: there were none."""
    _with_update(SqliteStore(tmp_path / "state.db")).close()
    old = sqlite3.connect(tmp_path / "state.db")
    old.execute("DROP TABLE deployment")
    old.execute("DROP TABLE left_out")
    old.execute("PRAGMA user_version = 5")
    old.commit()
    old.close()
    store = SqliteStore(tmp_path / "state.db")
    assert store.deployments.all() == []
    store.deployments.add([deployment_row()])
    assert store.deployments.all() == [deployment_row()]
    store.close()


def test_what_a_run_could_not_use_is_kept_once_for_each_device_and_code(store: Store) -> None:
    """A later round's word replaces the one before; other codes and runs stay; with the run all of it goes."""
    _with_run(store).runs.add(run_row("r-2"))
    store.rounds.commit(1, 1, model_row(1), [left_out_row("b"), left_out_row("a"), left_out_row("", "no_public")])
    store.rounds.commit(2, 1, model_row(2), [left_out_row("a", round=2, detail="else"), left_out_row("a", "signature")])
    store.rounds.commit(1, 1, model_row(1, "r-2"), [left_out_row("c", run="r-2")])
    told = [(row.device, row.code, row.round, row.detail) for row in store.rounds.left_out("r-1")]
    first, second = ("", "no_public", 1, "why"), ("a", "signature", 1, "why")
    assert told == [first, second, ("a", "silent", 2, "else"), ("b", "silent", 1, "why")]
    store.runs.remove("r-1")
    assert store.rounds.left_out("r-1") == []
    assert len(store.rounds.left_out("r-2")) == 1


def test_a_database_that_knows_nothing_of_knowledge_is_brought_up_to_date(tmp_path: Path) -> None:
    """Layout 6: nothing was noted; from now on it is."""
    store = _with_run(SqliteStore(tmp_path / "state.db"))
    store.close()
    old = sqlite3.connect(tmp_path / "state.db")
    old.execute("DROP TABLE left_out")
    old.execute("PRAGMA user_version = 6")
    old.commit()
    old.close()
    store = SqliteStore(tmp_path / "state.db")
    assert store.rounds.left_out("r-1") == []
    store.rounds.commit(1, 1, model_row(1), [left_out_row()])
    assert store.rounds.left_out("r-1") == [left_out_row()]
    store.close()


def _without_slices(database: sqlite3.Connection) -> None:
    """As layout 4 was."""
    database.execute("DROP TABLE deployment")
    database.execute("ALTER TABLE lease DROP COLUMN slice")
    database.execute("DROP TABLE part")
    database.execute("DROP TABLE left_out")
    database.execute("ALTER TABLE evaluation RENAME TO newer")
    columns = "run, version, device, num_samples, num_correct, loss_sum, confusion"
    database.execute(f"CREATE TABLE evaluation AS SELECT {columns} FROM newer")
    database.execute("DROP TABLE newer")


def test_a_database_without_slices_is_brought_up_to_date(tmp_path: Path) -> None:
    """What devices trained and judged before there were slices was the whole model."""
    store = _with_update(SqliteStore(tmp_path / "state.db"))
    store.close()
    old = sqlite3.connect(tmp_path / "state.db")
    _without_slices(old)
    old.execute("PRAGMA user_version = 4")
    old.commit()
    old.close()
    store = SqliteStore(tmp_path / "state.db")
    assert [lease.slice for lease in store.leases.of_attempt("r-1", 1, 1)] == ["full", "full"]
    assert store.evaluations.all("r-1") == [evaluation_row()]
    store.close()


def test_a_database_of_the_layout_before_is_brought_up_to_date(tmp_path: Path) -> None:
    """Rounds of then do not tell what travelled; those of now do."""
    store = _with_round(SqliteStore(tmp_path / "state.db"))
    store.close()
    old = sqlite3.connect(tmp_path / "state.db")
    for column in ("bytes_up", "bytes_down", "num_available"):
        old.execute(f"ALTER TABLE round DROP COLUMN {column}")
    _without_slices(old)
    old.execute("PRAGMA user_version = 2")
    old.commit()
    old.close()
    store = SqliteStore(tmp_path / "state.db")
    assert store.rounds.all("r-1") == [round_row()]
    store.rounds.announce("r-1", 1, 1)
    assert store.rounds.all("r-1")[0].bytes_down == 0
    store.close()
