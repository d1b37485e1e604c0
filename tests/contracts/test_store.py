"""Contract of every store: each write is one transaction, and the store shares nothing with its caller."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

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
    round_row,
    run_row,
    update_row,
)
from stores import everything_in, with_round, with_run, with_update

from coordinator.store import sqlite
from coordinator.store.base import Store
from coordinator.store.rows import SERVER, PageTokenRow
from coordinator.store.sqlite import SqliteStore
from edge_client import faults
from edge_client.errors import DiskFullError, MachineError

WRITES: dict[str, Callable[[Store], object]] = {
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
    "update": lambda s: s.updates.save(
        None, evaluation_row("b"), "lease-2", moments={"offer": 1.5}, phases={"load": 0.5}
    ),
    "freeze": lambda s: s.rounds.freeze("r-1", 1, 1, "hash"),
    "round": lambda s: s.rounds.commit(1, 1, model_row(1), [left_out_row()]),
    "announce": lambda s: s.rounds.announce("r-1", 1, 1, {"freeze": 2.5}),
    "abandon": lambda s: s.rounds.abandon("r-1", 1, 1, "few"),
    "open": lambda s: s.rounds.open(round_row(2), [lease_row(4, round=2)]),
    "traffic": lambda s: s.traffic.add("r-1", {"a": (1, 2)}),
    "deployment": lambda s: s.deployments.add([deployment_row(2, "b")]),
    "page-access": lambda s: s.page_access.add_token(
        PageTokenRow(name="t", sha256=digest("t"), role="read", created_s=1)
    ),
    "deployed": lambda s: s.deployments.set_state("deployment-1", "b", "active"),
}


def test_every_transaction_of_the_store_is_among_the_writes() -> None:
    """All fault points are in `WRITES`, except those of a start, whose values no read returns."""
    sources = [path.read_text(encoding="utf-8") for path in Path(sqlite.__file__).parent.glob("*.py")]
    points = {point for source in sources for point in re.findall(r'\.transaction\("([a-z-]+)"\)', source)}
    assert points - set(WRITES) == {"epoch", "federation"}


@pytest.mark.parametrize("point", sorted(WRITES))
def test_a_full_disk_at_the_commit_leaves_the_state_unchanged(
    store: Store, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """For every write: it raises, nothing has changed, and the next try succeeds."""
    with_update(store).devices.add(device_row("known"))
    store.runs.add(run_row("r-0"))
    store.deployments.add([deployment_row(1, "b")])
    before = everything_in(store)
    other_points = {"failed": "run-state", "lost": "update", "labels": "device", "removed device": "device"}
    place = (other_points | {"removed run": "run"}).get(point, point)
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"enospc:store.{place}.commit")])
    with pytest.raises(DiskFullError, match="cannot save"):
        WRITES[point](store)
    assert everything_in(store) == before
    WRITES[point](store)
    assert everything_in(store) != before


def test_a_turn_takes_effect_as_a_whole_and_tells_afterwards(store: Store) -> None:
    """Two writes in a turn are read at once; what waits is done at its end, in order; a failed turn leaves nothing."""
    with_update(store)
    done: list[int] = []
    with store.turn():
        store.after_commit(lambda: done.append(len(store.devices.all())))
        store.devices.add(device_row("x"))
        store.devices.add(device_row("y"))
        store.after_commit(lambda: done.append(0))
        assert (len(store.devices.all()), done) == (2, [])
    assert done == [2, 0]

    def fail() -> None:
        with store.turn():
            for name, step in WRITES.items():
                if not name.startswith("removed") and name != "device":  # x is there already
                    step(store)
            store.after_commit(lambda: done.append(1))
            raise MachineError("why")

    store.runs.add(run_row("r-0"))
    store.deployments.add([deployment_row(1, "b")])
    store.devices.add(device_row("known"))
    before = everything_in(store)
    with pytest.raises(MachineError, match="why"):
        fail()
    assert (everything_in(store), done) == (before, [2, 0])
    store.after_commit(lambda: done.append(3))  # outside of a turn: at once
    assert done == [2, 0, 3]


def test_everything_survives_a_restart(tmp_path: Path) -> None:
    """After every write the store is closed and opened again: each row is the same."""
    store = SqliteStore(tmp_path / "state.db")
    with_update(store).devices.add(device_row("known"))
    store.runs.add(run_row("r-0"))
    store.deployments.add([deployment_row(1, "b")])
    for name, step in WRITES.items():
        if not name.startswith("removed"):
            step(store)
    before = everything_in(store)
    store.close()
    reopened = SqliteStore(tmp_path / "state.db")
    assert everything_in(reopened) == before
    reopened.close()


def test_rows_come_back_as_they_were_written(store: Store) -> None:
    """Flags, plans, reports, logs and confusion matrices are equal after a round trip."""
    with_run(store)
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


def test_nan_is_refused(store: Store) -> None:
    """A norm or a loss that is NaN breaks a constraint; a score that is NaN is stored as no score."""
    with_round(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row(norm=math.nan), None, "lease-1")
    with pytest.raises(sqlite3.IntegrityError):
        store.updates.save(update_row(), evaluation_row(loss_sum=math.nan), "lease-1")
    assert store.updates.of_attempt("r-1", 1, 1) == []
    store.models.save_score("r-1", 0, math.nan, 0)
    assert store.models.scores("r-1") == {}


def test_changing_a_row_that_does_not_exist_changes_nothing(store: Store) -> None:
    """As with SQL's `UPDATE`: after a restart the caller may know rows that an older copy does not have."""
    before = everything_in(with_update(store))
    store.runs.set_state("nobody", "stopped")
    store.runs.fail("nobody", "why")
    store.leases.set_state("nobody", "declined")
    store.rounds.save_deadline("r-1", 7, 1, remaining_s=1.0, extended=True, elapsed_s=1.0)
    store.rounds.freeze("r-1", 7, 1, "hash")
    store.rounds.announce("r-1", 7, 1)
    store.rounds.abandon("r-1", 7, 1, "few")
    store.models.save_score("nobody", 0, 1.0, 0)
    store.updates.drop(update_row("z", "nobody"))
    assert everything_in(store) == before


def test_the_store_shares_no_map_with_its_caller(store: Store) -> None:
    """The caller changes maps after writing them and after reading them; the store still returns the same rows."""
    labels, info, log = {"line": "a"}, {"cores": [1]}, ["x"]
    store.devices.add(device_row("d", labels=labels))
    with_round(store).runs.save_device_info("r-1", "d", info)
    store.leases.set_state("lease-1", "declined", log=log)
    before = everything_in(store)
    labels["line"] = "b"
    info["cores"].append(2)
    log.append("y")
    run = store.runs.get("r-1")
    assert run is not None
    maps: tuple[object, ...] = (run.file, store.devices.all()[0].labels, store.runs.device_info("r-1")["d"])
    for shared in maps:
        assert isinstance(shared, dict)
        shared["new"] = 1
    assert everything_in(store) == before


def test_a_backup_holds_the_same_rows(store: Store, tmp_path: Path) -> None:
    """It is taken while the store is in use; a file that exists is not overwritten."""
    store.settings.federation("fed")
    store.settings.set("k", "v")
    store.settings.next_epoch(7)
    store.devices.add(device_row("a", labels={"site": "north"}))
    with_update(store).traffic.add("r-1", {"a": (1, 2)})
    store.runs.save_device_info("r-1", "a", {"cpu": "arm"})
    store.rounds.commit(1, 1, model_row(1, set_hash="hash"))
    store.models.save_score("r-1", 1, 0.5, 1)
    store.rounds.open(round_row(2, elapsed_s=3.0), [lease_row(5, "b", round=2, plan=PLAN, log=("x",))])
    store.runs.set_state("r-1", "stopped", "why")
    store.runs.add(run_row("r-2", environment={"python": "3"}))
    store.deployments.add([deployment_row(1, "a"), deployment_row(1, "b")])
    store.deployments.add([deployment_row(2, "b")])
    store.backup(tmp_path / "copy.db")
    expected = everything_in(store)
    store.settings.set("k", "later")
    with pytest.raises(MachineError, match="File exists"):
        store.backup(tmp_path / "copy.db")
    reopened = SqliteStore(tmp_path / "copy.db")
    try:
        assert everything_in(reopened) == expected
        assert reopened.leases.of_attempt("r-1", 2, 1) == store.leases.of_attempt("r-1", 2, 1)
        assert (reopened.settings.federation("other"), reopened.settings.next_epoch(0)) == ("fed", 8)
    finally:
        reopened.close()
    assert (tmp_path / "copy.db").stat().st_mode & 0o777 == 0o600


def test_models_and_rounds_belong_to_a_run(store: Store) -> None:
    """Without a run, neither a model nor a round can be added, and a refused call leaves nothing behind."""
    with pytest.raises(sqlite3.IntegrityError):
        store.runs.start(model_row(0), digest("settings"), 8)
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.open(round_row(), [lease_row(1)])
    with pytest.raises(sqlite3.IntegrityError):
        store.rounds.commit(1, 1, model_row(1))
    with_run(store)
    with pytest.raises(sqlite3.IntegrityError):
        store.runs.add(run_row("r-1"))
    assert (store.models.all("r-1"), store.rounds.all("r-1"), store.leases.get("lease-1")) == ([model_row(0)], [], None)
