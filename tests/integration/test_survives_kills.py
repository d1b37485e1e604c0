"""Whatever is killed with -9, at whatever named point, the run goes on and every round gives the same model.

Each point strikes once. The points of one process are dealt out to few rounds, those of a round far apart in it; a slow
test strikes at one point per round only. The reference is an undisturbed run. A point that was never hit leaves no line
in the fault log, and fails the test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fleet import Fleet, Undisturbed, hashes, mlp_run

from coordinator.store.sqlite import SqliteStore

# What is told at the end of one round and at the beginning of the next may wait for one commit: a kill in between
# leaves out the later points of that queue, which are therefore in rounds of their own.
COORDINATOR_POINTS = (
    "turn.committed",
    "turn.commit",
    "turn.told",
    "store.open.committed",
    "store.open.commit",
    "coordinator.sent.assign",
    "store.lease.commit",
    "store.lease.committed",
    "coordinator.sent.chunk",
    "coordinator.offer",
    "coordinator.sent.grant",
    "upload.chunk",
    "upload.sync",
    "upload.rename",
    "upload.done",
    "aggregator.check",
    "coordinator.checked",
    "store.update.commit",
    "store.update.committed",
    "coordinator.sent.receipt",
    "store.freeze.commit",
    "store.freeze.committed",
    "aggregator.fold.begin",
    "aggregator.fold.middle",
    "aggregator.fold.written",
    "model.sync",
    "model.rename",
    "model.done",
    "store.round.commit",
    "store.round.committed",
    "coordinator.announced",
    "store.traffic.commit",
    "store.announce.commit",
    "store.announce.committed",
)
DAEMON_POINTS = (
    "daemon.assign.rename",
    "daemon.assign.done",
    "daemon.sent.accept",
    "daemon.part.chunk",
    "daemon.part.rename",
    "daemon.part.done",
    "daemon.worker.started",
    "daemon.worker.ended",
    "daemon.update.write",
    "daemon.update.rename",
    "daemon.update.done",
    "daemon.sent.offer",
    "daemon.sent.chunk",
    "daemon.forget.rename",
    "daemon.forget.done",
)
WORKER_POINTS = (
    "worker.start",
    "worker.loaded",
    "worker.train.begin",
    "worker.train.step",
    "worker.trained",
    "worker.update.sync",
    "worker.update.rename",
    "worker.manifest.rename",
    "worker.manifest.done",
)
BROKER_POINTS = (
    "coordinator.sent.assign",
    "coordinator.sent.chunk",
    "coordinator.sent.grant",
    "upload.chunk",
    "coordinator.sent.receipt",
    "coordinator.announced",
)
SMALL_UPDATE_POINTS = ("small-update.rename", "small-update.done", "store.update.committed", "turn.committed")
LARGE, SMALL = 256, 16  # hidden units: updates of 77 kB, which are files that are synced, and of 5 kB, which are rows
ROUNDS = 6  # of the longest test that is not slow
SECONDS_PER_POINT = 30


def _faults(rounds: int, log: Path, **points: Sequence[str]) -> dict[str, str]:
    """Kinds of faults and their points, which are in the order of a round, dealt out to the rounds like cards."""
    plan = [
        f"{kind.replace('_', '-')}:{point}@{1 + index % rounds}"
        for kind, names in points.items()
        for index, point in enumerate(names)
    ]
    return {"FEDFIT_FAULT": ",".join(plan), "FEDFIT_FAULT_LOG": str(log)}


def _assert_survived(
    folder: Path,
    undisturbed: Undisturbed,
    rounds: int,
    environments: Mapping[str, Mapping[str, str]],
    *,
    hidden: int = LARGE,
) -> None:
    """A run of two devices with these faults makes the models of an undisturbed one, and all faults have struck."""
    faults = [fault for environment in environments.values() for fault in environment["FEDFIT_FAULT"].split(",")]
    with Fleet(folder) as fleet:
        fleet.start_coordinator(environments.get("coordinator"))
        fleet.add_devices("a", "b")
        for device in ("a", "b"):
            fleet.start_device(device, environments.get(device))
        shown = fleet.wait_finished(
            fleet.start_run(mlp_run(rounds=rounds, model={"hidden": [hidden]})), len(faults) * SECONDS_PER_POINT
        )
        assert shown["state"] == "finished", shown["reason"]
    assert hashes(shown) == undisturbed.hashes(rounds=max(rounds, ROUNDS), hidden=hidden)[: rounds + 1]
    _assert_counted_once(fleet, rounds)
    struck = [line for path in folder.glob("*.faults") for line in path.read_text().split()]
    assert sorted(struck) == sorted(faults)
    assert fleet.unexpected == []


def _assert_counted_once(fleet: Fleet, rounds: int) -> None:
    """Each round's model has exactly one update of each device, and no update with a receipt is missing."""
    store = SqliteStore(fleet.state_dir / "state.db")
    try:
        rows = {(row.number, row.attempt): row.state for row in store.rounds.all("test-1")}
        updates = store.updates.recent("test-1", 10_000)
    finally:
        store.close()
    committed = [(u.round, u.device) for u in updates if rows[u.round, u.attempt] == "ANNOUNCED"]
    assert sorted(committed) == [(number, device) for number in range(1, rounds + 1) for device in ("a", "b")]
    stored = {update.lease for update in updates}
    logs = fleet.log("a") + fleet.log("b")
    receipted = set(re.findall(r"lease (\w+) is over \(accepted", logs))
    assert len(receipted) >= rounds  # a device that died before it logged a receipt leaves no line
    assert receipted <= stored


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(len(COORDINATOR_POINTS), marks=pytest.mark.slow)])
def test_a_killed_coordinator_or_aggregator_changes_no_model(
    tmp_path: Path, undisturbed: Undisturbed, rounds: int
) -> None:
    """34 points of the coordinator and its aggregator: five or six per round, or one."""
    faults = _faults(rounds, tmp_path / "coordinator.faults", kill=COORDINATOR_POINTS)
    _assert_survived(tmp_path, undisturbed, rounds, {"coordinator": faults})


@pytest.mark.parametrize("rounds", [3, pytest.param(len(BROKER_POINTS), marks=pytest.mark.slow)])
def test_a_killed_broker_changes_no_model(tmp_path: Path, undisturbed: Undisturbed, rounds: int) -> None:
    """Six moments of a round at which the broker dies: two per round, or one."""
    faults = _faults(rounds, tmp_path / "coordinator.faults", kill_broker=BROKER_POINTS)
    faults["FEDFIT_FAULT_PIDFILE"] = str(tmp_path / "coordinator" / "broker" / "nats.pid")
    _assert_survived(tmp_path, undisturbed, rounds, {"coordinator": faults})


@pytest.mark.parametrize("rounds", [5, pytest.param(len(DAEMON_POINTS), marks=pytest.mark.slow)])
def test_a_killed_daemon_or_worker_changes_no_model(tmp_path: Path, undisturbed: Undisturbed, rounds: int) -> None:
    """15 points of a's daemon and nine of b's worker: three and two per round, or one of each.

    Their updates are small; the coordinator is killed at the points of those, too.
    """
    faults = {
        "coordinator": _faults(rounds, tmp_path / "coordinator.faults", kill=SMALL_UPDATE_POINTS),
        "a": _faults(rounds, tmp_path / "a.faults", kill=DAEMON_POINTS),
        "b": _faults(rounds, tmp_path / "b.faults", kill=WORKER_POINTS),
    }
    _assert_survived(tmp_path, undisturbed, rounds, faults, hidden=SMALL)
