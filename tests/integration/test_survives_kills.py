"""Whatever is killed with -9, at whatever named point, the run goes on and every round gives the same model.

One run per kind of process; in round k the process dies at point k. The reference is one undisturbed run. A point that
was never hit leaves no line in the fault log, and fails the test.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from coordinator.store.sqlite import SqliteStore
from tests.fleet import Fleet, hashes, mlp_run

COORDINATOR_POINTS = (
    "store.open.commit",
    "store.open.committed",
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
ROUNDS = max(len(points) for points in (COORDINATOR_POINTS, DAEMON_POINTS, WORKER_POINTS, BROKER_POINTS))
SECONDS_PER_ROUND = 30


def _faults(kind: str, points: tuple[str, ...], log: Path) -> dict[str, str]:
    plan = ",".join(f"{kind}:{point}@{number}" for number, point in enumerate(points, start=1))
    return {"FEDFIT_FAULT": plan, "FEDFIT_FAULT_LOG": str(log)}


def _run(folder: Path, rounds: int, *, coordinator: dict[str, str], device: dict[str, str]) -> tuple[list[str], Fleet]:
    """A run of two devices with these faults; the model's hash after every round."""
    with Fleet(folder) as fleet:
        fleet.start_coordinator(coordinator)
        fleet.add_devices("a", "b")
        fleet.start_device("a", device)
        fleet.start_device("b")
        shown = fleet.wait_finished(fleet.start_run(mlp_run(rounds=rounds)), rounds * SECONDS_PER_ROUND)
        assert shown["state"] == "finished", shown["reason"]
        return hashes(shown), fleet


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The model's hash after every round of a run that nobody disturbs."""
    return _run(tmp_path_factory.mktemp("undisturbed"), ROUNDS, coordinator={}, device={})[0]


def _assert_survived(
    undisturbed: list[str], disturbed: list[str], fleet: Fleet, log: Path, points: tuple[str, ...]
) -> None:
    assert disturbed == undisturbed[: len(points) + 1]
    _assert_counted_once(fleet, len(points))
    hit = [line.split(":", 1)[1] for line in log.read_text().split()]
    assert hit == [f"{point}@{number}" for number, point in enumerate(points, start=1)]
    assert fleet.unexpected == []


def _assert_counted_once(fleet: Fleet, rounds: int) -> None:
    """Each round's model has exactly one update of each device, and no update with a receipt is missing."""
    store = SqliteStore(fleet.state_dir / "state.db")
    try:
        rows = {(row.number, row.attempt): row.state for row in store.rounds("test-1")}
        updates = store.recent_updates("test-1", 10_000)
    finally:
        store.close()
    committed = [(u.round, u.device) for u in updates if rows[u.round, u.attempt] == "ANNOUNCED"]
    assert sorted(committed) == [(number, device) for number in range(1, rounds + 1) for device in ("a", "b")]
    stored = {update.lease for update in updates}
    logs = fleet.log("a") + fleet.log("b")
    receipted = set(re.findall(r"lease (\w+) is over \(accepted", logs))
    assert len(receipted) >= rounds  # a device that died before it logged a receipt leaves no line
    assert receipted <= stored


def test_a_killed_coordinator_or_aggregator_changes_no_model(undisturbed: list[str], tmp_path: Path) -> None:
    """31 points of the coordinator and its aggregator, one per round."""
    log = tmp_path / "faults"
    faults = _faults("kill", COORDINATOR_POINTS, log)
    disturbed, fleet = _run(tmp_path, len(COORDINATOR_POINTS), coordinator=faults, device={})
    _assert_survived(undisturbed, disturbed, fleet, log, COORDINATOR_POINTS)


def test_a_killed_daemon_changes_no_model(undisturbed: list[str], tmp_path: Path) -> None:
    """15 points of a device's daemon, one per round."""
    log = tmp_path / "faults"
    disturbed, fleet = _run(
        tmp_path, len(DAEMON_POINTS), coordinator={}, device=_faults("kill", DAEMON_POINTS, log)
    )
    _assert_survived(undisturbed, disturbed, fleet, log, DAEMON_POINTS)


def test_a_killed_worker_changes_no_model(undisturbed: list[str], tmp_path: Path) -> None:
    """Nine points of a device's worker, one per round."""
    log = tmp_path / "faults"
    disturbed, fleet = _run(
        tmp_path, len(WORKER_POINTS), coordinator={}, device=_faults("kill", WORKER_POINTS, log)
    )
    _assert_survived(undisturbed, disturbed, fleet, log, WORKER_POINTS)


def test_a_killed_broker_changes_no_model(undisturbed: list[str], tmp_path: Path) -> None:
    """Six moments of a round at which the broker dies."""
    log = tmp_path / "faults"
    faults = _faults("kill-broker", BROKER_POINTS, log)
    faults["FEDFIT_FAULT_PIDFILE"] = str(tmp_path / "coordinator" / "broker" / "nats.pid")
    disturbed, fleet = _run(tmp_path, len(BROKER_POINTS), coordinator=faults, device={})
    _assert_survived(undisturbed, disturbed, fleet, log, BROKER_POINTS)
