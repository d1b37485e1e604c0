"""A full or a dying disk at every durable write: a clear state, no model changed, and recovery alone.

One run for a full disk (ENOSPC) and one for a dying one (EIO); several writes of each process fail in every round.
Weights travel as fp16, so that the encoded model is a file of its own.
After ENOSPC the same process goes on; after EIO it may end with code 4 and one line, because a sync that failed once
cannot be trusted to succeed the second time; the supervisor starts it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.fleet import Fleet, hashes, mlp_run, undisturbed_hashes

Points = Mapping[int, Sequence[str]]  # round -> the writes that fail in it; 0: whichever round does them first

COORDINATOR: Points = {
    0: ("settings.sync", "settings.rename", "sent.sync", "store.initial.commit", "store.run-state.commit"),
    1: ("store.open.commit", "store.lease.commit", "upload.chunk", "store.announce.commit"),
    2: ("upload.sync", "upload.rename", "store.update.commit", "store.freeze.commit"),
    3: ("aggregator.check", "aggregator.fold.middle", "model.sync", "model.rename", "sent.rename"),
    4: ("store.round.commit",),
    5: ("store.traffic.commit",),  # alone: a restart forgets what is not counted yet
}
DAEMON: Points = {
    1: ("daemon.assign.write", "daemon.part.chunk"),
    2: ("daemon.assign.sync", "daemon.update.rename"),
    3: ("daemon.part.rename", "daemon.forget.sync"),
}
WORKER: Points = {
    1: ("worker.update.write",),
    2: ("worker.update.sync",),
    3: ("worker.update.rename", "worker.manifest.write"),
    4: ("worker.manifest.sync", "worker.manifest.rename"),
}
ROUNDS = 5
SECONDS = 240


def _faults(kind: str, points: Points, log: Path) -> dict[str, str]:
    at = {number: f"@{number}" if number else "" for number in points}
    plan = [f"{kind}:{point}{at[number]}" for number, names in points.items() for point in names]
    return {"FEDFIT_FAULT": ",".join(plan), "FEDFIT_FAULT_LOG": str(log)}


def _disturbed(folder: Path, kind: str, coordinator: Points, daemon: Points, worker: Points) -> Fleet:
    """A run in which the disks of the coordinator, of a's daemon and of b's workers fail; ends the fleet."""
    environments = {
        "coordinator": _faults(kind, coordinator, folder / "coordinator.faults"),
        "a": _faults(kind, daemon, folder / "a.faults"),
        "b": _faults(kind, worker, folder / "b.faults"),
    }
    with Fleet(folder) as fleet:
        fleet.start_coordinator(environments["coordinator"])
        fleet.add_devices("a", "b")
        fleet.start_device("a", environments["a"])
        fleet.start_device("b", environments["b"])
        rounds = max(max(points) for points in (coordinator, daemon, worker))
        shown = fleet.wait_finished(fleet.start_run(mlp_run(rounds=rounds, codec="fp16")), SECONDS)
        assert shown["state"] == "finished", shown["reason"]
        assert hashes(shown) == undisturbed_hashes(ROUNDS, 16, "fp16")[: rounds + 1]
    for name, environment in environments.items():
        hit = (folder / f"{name}.faults").read_text().split()
        assert sorted(hit) == sorted(environment["FEDFIT_FAULT"].split(",")), f"{name}: not all points were reached"
    return fleet


def test_a_full_disk_is_waited_out_by_the_same_processes(tmp_path: Path) -> None:
    """Every durable write of a round fails once with ENOSPC: nobody ends, and every model is the same."""
    fleet = _disturbed(tmp_path, "enospc", COORDINATOR, DAEMON, WORKER)
    assert fleet.unexpected == []
    assert fleet.num_restarts == {}
    for name in ("coordinator", "a"):
        assert "disk_full: " in fleet.log(name)
        assert "Traceback" not in fleet.log(name)


def test_a_dying_disk_ends_a_process_with_one_line_and_a_restart_goes_on(tmp_path: Path) -> None:
    """The same with EIO: whoever ends does so with code 4 and a line that says what failed."""
    fleet = _disturbed(tmp_path, "eio", COORDINATOR, DAEMON, WORKER)
    for ended in fleet.unexpected:
        assert " ended with 4: " in ended
        last = ended.strip().splitlines()[-1]
        assert last.startswith(("coordinator: ", "edge-client: "))
        assert "Input/output error" in last
    assert "Traceback" not in fleet.log("coordinator") + fleet.log("a") + fleet.log("b")
    assert fleet.num_restarts["a"] == sum(len(names) for names in DAEMON.values())
    assert "b" not in fleet.num_restarts  # its worker's disk failed, not the daemon's


STARTING = (
    "state.version.write",
    "state.version.rename",
    "store.federation.commit",
    "pki.ca.write",
    "broker.config.sync",
    "broker.config.rename",
    "broker.pid.write",
    "store.setting.commit",
    "store.epoch.commit",
)


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_disk_that_fails_at_the_start_leaves_nothing_that_stops_the_next_start(tmp_path: Path, kind: str) -> None:
    """All writes of a first start, one after the other: each start ends with 4 and one line, the last one serves."""
    faults = ",".join(f"{kind}:{point}" for point in STARTING)
    environment = {"FEDFIT_FAULT": faults, "FEDFIT_FAULT_LOG": str(tmp_path / "faults")}
    with Fleet(tmp_path, start_options=("--tls",)) as fleet:
        fleet.start_coordinator(environment)
        fleet.add_devices("a")
    assert sorted((tmp_path / "faults").read_text().split()) == sorted(faults.split(","))
    assert "Traceback" not in fleet.log("coordinator")
    assert all(" ended with 4: " in ended for ended in fleet.unexpected)


def test_a_command_that_meets_a_full_disk_changes_nothing_and_works_later(tmp_path: Path) -> None:
    """Adding devices (their rows, the broker's file) and starting a run: 4 and one line; then it works."""
    points = ("store.device.commit", "broker.config.sync:4", "store.run.commit")  # :4: start, add, undo, add
    faults = {"FEDFIT_FAULT": ",".join(f"enospc:{point}" for point in points)}
    run_file = tmp_path / "run.toml"
    run_file.write_text('name = "r"\nmodel = { name = "mlp", input = [1, 8, 8] }\nclasses = ["a", "b"]\n')
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator(faults)
        where = ["--state-dir", str(fleet.state_dir)]
        add = [sys.executable, "-m", "coordinator", "device", "add", "x", "y", "--out", str(tmp_path), *where]
        start = [sys.executable, "-m", "coordinator", "run", "start", str(run_file), *where]
        results = [_run(command, {}) for command in (add, add, start)]
        assert [result.returncode for result in results] == [4, 4, 4], [result.stderr for result in results]
        for result in results:
            assert len(result.stderr.splitlines()) == 1
            assert "No space left on device" in result.stderr
        assert not list(tmp_path.glob("*.join"))
        assert [_run(command, {}).returncode for command in (add, start)] == [0, 0]
        assert fleet.unexpected == []


@pytest.mark.parametrize("point", ["state.version.write", "bundle.write", "bundle.rename"])
def test_a_join_that_failed_can_be_repeated(tmp_path: Path, point: str) -> None:
    """The state directory is as before, and the second try joins."""
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        bundle = fleet.write_bundle("a")
        command = [sys.executable, "-m", "edge_client", "join", str(bundle), "--state-dir", str(tmp_path / "device")]
        first = _run(command, {"FEDFIT_FAULT": f"enospc:{point}"})
        second = _run(command, {})
    assert first.returncode == 4
    assert first.stderr.startswith("edge-client: ")
    assert "No space left on device" in first.stderr
    assert len(first.stderr.splitlines()) == 1
    assert second.returncode == 0


def _run(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=False, timeout=60
    )
