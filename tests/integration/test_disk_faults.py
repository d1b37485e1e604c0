"""A full or a dying disk at every durable write: a clear state, no model changed, and recovery alone.

One run for a full disk (ENOSPC) and one for a dying one (EIO); several writes of each process fail in every round.
Weights travel as fp16, so that the encoded model is a file of its own; the devices' method keeps a state, which counts
the rounds that counted; the server judges every version.
After ENOSPC the same process goes on; after EIO it may end with code 4 and one line, because a sync that failed once
cannot be trusted to succeed the second time; the supervisor starts it again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from fleet import Fleet, Undisturbed, hashes, mlp_run

from coordinator.store.rows import OPEN_LEASE
from edge_client.worker.method_state import read_state

ROOT = Path(__file__).parents[2]
Points = Mapping[int, Sequence[str]]  # round -> the writes that fail in it; 0: whichever round does them first

COORDINATOR: Points = {
    0: (
        "aggregator.write",
        "settings.write",
        "settings.sync",
        "settings.rename",
        "sent.sync",
        "store.initial.commit",
        "store.run-state.commit",
    ),
    1: ("store.open.commit", "store.lease.commit", "upload.chunk", "store.run-device.commit", "store.announce.commit"),
    2: ("upload.sync", "upload.rename", "store.update.commit", "store.freeze.commit", "store.evaluation.commit"),
    3: ("aggregator.check", "aggregator.fold.middle", "model.sync", "model.rename", "sent.rename"),
    4: ("store.score.commit", "store.round.commit", "turn.commit"),
    5: ("store.traffic.commit",),  # alone: a restart forgets what is not counted yet
}
SMALL_UPDATES: Points = {  # the same, where updates are rows
    **COORDINATOR,
    1: ("store.open.commit", "store.lease.commit", "store.run-device.commit", "store.announce.commit"),
    2: (
        *("small-update.write", "store.freeze.commit", "small-update.rename", "store.evaluation.commit"),
        "store.update.commit",
    ),
}
DAEMON: Points = {
    1: ("daemon.assign.write", "daemon.part.chunk", "daemon.update.write"),
    2: ("daemon.assign.sync", "daemon.update.sync", "daemon.state.sync"),
    3: ("daemon.assign.rename", "daemon.part.rename", "daemon.update.rename", "daemon.forget.sync"),
    4: ("daemon.forget.write", "daemon.state.rename", "daemon.counted.sync"),
    5: ("daemon.forget.rename", "daemon.counted.rename"),
}
WORKER: Points = {
    1: ("worker.state.write", "worker.update.write", "worker.error.write"),
    2: ("worker.state.sync", "worker.update.sync", "worker.error.sync"),
    3: ("worker.state.rename", "worker.update.rename", "worker.error.rename"),
    4: ("worker.manifest.sync", "worker.manifest.rename"),
    5: ("worker.manifest.write",),
}
# Loaded by every process of a device before anything else: FedAvg whose clients count in their state.
COUNTING = """
from edge_client.methods import base

def end(self):
    import torch
    return base.Outcome(state={"rounds": 1 + self.job.state.get("rounds", torch.zeros(1))})

base.PlainClient.end = end
"""
ROUNDS = max(number for points in (COORDINATOR, DAEMON, WORKER) for number in points)
SECONDS = 600
LARGE, SMALL = 512, 16  # hidden units: updates of 77 kB, which are files that are synced, and of 3 kB, which are rows


def _faults(kind: str, points: Points, log: Path) -> dict[str, str]:
    at = {number: f"@{number}" if number else "" for number in points}
    plan = [f"{kind}:{point}{at[number]}" for number, names in points.items() for point in names]
    return {"FEDFIT_FAULT": ",".join(plan), "FEDFIT_FAULT_LOG": str(log)}


def _thinned(points: Points, step: int) -> Points:
    return {number: names[::step] for number, names in points.items()}


def _disturbed(folder: Path, kind: str, expected: Sequence[str], points: Points, hidden: int, step: int = 1) -> Fleet:
    """A run in which the disks of the coordinator, of a's daemon and of b's workers fail; ends the fleet.

    Of the points in each list, every `step`-th.
    """
    (folder / "sitecustomize.py").write_text(COUNTING)
    counting = {"PYTHONPATH": f"{folder}:{ROOT}"}
    environments = {
        "coordinator": _faults(kind, _thinned(points, step), folder / "coordinator.faults"),
        "a": _faults(kind, _thinned(DAEMON, step), folder / "a.faults") | counting,
        "b": _faults(kind, _thinned(WORKER, step), folder / "b.faults") | counting,
    }
    with Fleet(folder) as fleet:
        fleet.start_coordinator(environments["coordinator"])
        fleet.add_devices("a", "b")
        np.savez(folder / "test.npz", x=np.zeros((2, 1, 8, 8), np.uint8), y=np.arange(2))
        judged = {"every": 1, "on": f"npz:{folder / 'test.npz'}"}
        run = fleet.start_run(mlp_run(rounds=ROUNDS, codec="fp16", evaluate=judged, model={"hidden": [hidden]}))
        if "store.initial.commit" in environments["coordinator"]["FEDFIT_FAULT"]:
            _wait_for(fleet, folder / "coordinator.faults", "store.initial.commit")  # devices would only learn to wait
        fleet.start_device("a", environments["a"])
        fleet.start_device("b", environments["b"])
        shown = fleet.wait_finished(run, SECONDS)
        assert shown["state"] == "finished", shown["reason"]
        assert hashes(shown) == expected
    for name, environment in environments.items():
        hit = (folder / f"{name}.faults").read_text().split()
        assert sorted(hit) == sorted(environment["FEDFIT_FAULT"].split(",")), f"{name}: not all points were reached"
    for name in ("a", "b"):
        assert read_state(folder / name / "state/method-state/test-1")["rounds"].tolist() == [ROUNDS]
        assert not list((folder / name / "state").rglob("*.tmp"))
    return fleet


def test_a_full_disk_is_waited_out_by_the_same_processes(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Every durable write of a round fails once with ENOSPC, and a commit: nobody ends, and no model differs."""
    expected = undisturbed.hashes(rounds=ROUNDS, codec="fp16", hidden=LARGE)
    fleet = _disturbed(tmp_path, "enospc", expected, COORDINATOR, LARGE)
    assert fleet.unexpected == []
    assert fleet.num_restarts == {}
    for name in ("coordinator", "a"):
        assert "disk_full: " in fleet.log(name)
        assert "Traceback" not in fleet.log(name)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_dying_disk_ends_a_process_with_one_line_and_a_restart_goes_on(
    tmp_path: Path, undisturbed: Undisturbed, step: int
) -> None:
    """The same with EIO, at every fourth write or at all: whoever ends does so with code 4 and says what failed."""
    expected = undisturbed.hashes(rounds=ROUNDS, codec="fp16", hidden=SMALL)
    fleet = _disturbed(tmp_path, "eio", expected, SMALL_UPDATES, SMALL, step)
    for ended in fleet.unexpected:
        assert " ended with 4: " in ended
        last = ended.strip().splitlines()[-1]
        assert last.startswith(("coordinator: ", "edge-client: "))
        assert "Input/output error" in last
    assert "Traceback" not in fleet.log("coordinator") + fleet.log("a") + fleet.log("b")
    assert fleet.num_restarts["a"] == sum(len(names) for names in _thinned(DAEMON, step).values())
    assert "b" not in fleet.num_restarts  # its worker's disk failed, not the daemon's


TOO_FEW = ("store.deadline.commit", "store.abandon.commit", "store.leases.commit")


@pytest.mark.parametrize("kind", ["enospc", pytest.param("eio", marks=pytest.mark.slow)])
def test_a_disk_that_fails_while_a_round_lacks_devices_costs_no_model(
    tmp_path: Path, kind: str, undisturbed: Undisturbed
) -> None:
    """Device x has no data and declines, b comes later as its substitute; a and b make the undisturbed model of both.

    While x is silent the round's remaining time is saved. When it declines, nobody can take its place: the round is
    abandoned. In the next attempt b is there when x declines, and gets a lease. None of it can be written at first.
    """
    environment = _faults(kind, {0: TOO_FEW}, tmp_path / "faults")
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator(environment)
        fleet.add_devices("a", "b")
        fleet.start_device("a")
        fleet.add_devices("x")
        fleet.write_home("b", 'data = { source = "digits", partition = "iid", part = [1, 2] }\nlimits.memory = "2GB"\n')
        fleet.write_home("x", 'limits.memory = "2GB"\n')
        fleet.start_device("x")
        run = fleet.start_run(mlp_run(rounds=1, codec="fp16"))
        fleet.wait_until(lambda: "assigned" in fleet.log("x"), 240, "x has a lease")
        with _silent(fleet.pid("x")):
            _wait_for(fleet, tmp_path / "faults", TOO_FEW[0])
        _wait_for(fleet, tmp_path / "faults", TOO_FEW[1])
        fleet.wait_until(lambda: _asked_again(fleet, run, "x"), 240, "x has a lease of the next attempt")
        with _silent(fleet.pid("x")):
            fleet.start_device("b")
            fleet.wait_until(lambda: "let us in" in fleet.log("b"), 240, "the substitute is there")
        _wait_for(fleet, tmp_path / "faults", TOO_FEW[2])
        fleet.wait_until(lambda: fleet.ask("device-remove", names=["x"]) is not None, 240, "x is removed")
        shown = fleet.wait_finished(run, SECONDS)
    assert shown["state"] == "finished", shown["reason"]
    assert hashes(shown) == undisturbed.hashes(rounds=ROUNDS, codec="fp16")[:2]
    assert (tmp_path / "faults").read_text().split() == environment["FEDFIT_FAULT"].split(",")
    assert "Traceback" not in fleet.log("coordinator")
    assert all(" ended with 4: " in ended for ended in fleet.unexpected)
    assert len(fleet.unexpected) == (len(TOO_FEW) if kind == "eio" else 0)


CUTTING = ("part.sync", "part.rename", "store.part.commit")


@pytest.mark.parametrize("kind", ["enospc", pytest.param("eio", marks=pytest.mark.slow)])
def test_a_disk_that_fails_while_a_slice_is_cut_costs_no_round(tmp_path: Path, kind: str) -> None:
    """One device with half of the model: its slice cannot be kept three times, then the round goes on."""
    environment = _faults(kind, {0: CUTTING}, tmp_path / "faults")
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator(environment)
        fleet.add_devices("a")
        fleet.start_device("a")
        run = fleet.start_run(mlp_run(rounds=1, devices=1, slices=["width:1/2"]))
        shown = fleet.wait_finished(run, SECONDS)
    assert shown["state"] == "finished", shown["reason"]
    assert [row["attempt"] for row in shown["round_rows"]] == [1]
    assert sorted((tmp_path / "faults").read_text().split()) == sorted(environment["FEDFIT_FAULT"].split(","))
    assert "Traceback" not in fleet.log("coordinator")
    assert len(fleet.unexpected) == (len(CUTTING) if kind == "eio" else 0)


def _asked_again(fleet: Fleet, run: str, device: str) -> bool:
    shown = fleet.ask("run-show", run=run)
    leases = shown["leases"] if shown is not None else []
    return any(x["device"] == device and x["attempt"] > 1 and x["state"] in OPEN_LEASE for x in leases)


@contextlib.contextmanager
def _silent(pid: int) -> Iterator[None]:
    """A process that does nothing for a while."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _wait_for(fleet: Fleet, log: Path, point: str) -> None:
    fleet.wait_until(lambda: log.exists() and f":{point}\n" in log.read_text(), 240, f"{point} fails")


# all in one coordinator, one after the other; :4: start, add, undo, add
