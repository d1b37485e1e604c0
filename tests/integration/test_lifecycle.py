"""Starting, stopping and joining at any time: SIGTERM in every state, late devices, stopped and queued runs, demo."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fleet import Fleet, Json, Undisturbed, hashes, mlp_run
from proxy import Link, Proxy
from typed import ok

from edge_client.client.status import read_status
from edge_client.errors import ConflictError
from edge_client.transport.base import parse_broker_url

HIDDEN = 1024  # a model of 303 kB: three chunks
SECONDS = 240  # one of these waits may cover a calibration on a busy machine


def _state(fleet: Fleet, name: str) -> str | None:
    """What a device says of itself in its status file, while it is connected: heartbeats wait behind its uploads."""
    status = read_status(fleet.folder / name / "state/status.json")
    is_here = status is not None and (status.pid, status.link) == (fleet.pid(name), "let_in")
    return status.state if status is not None and is_here else None


def _is(fleet: Fleet, name: str, state: str) -> Callable[[], bool]:
    return lambda: _state(fleet, name) == state


def test_sigterm_ends_client_and_coordinator_in_every_state_and_the_run_goes_on(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Idle, fetching, working, offering, and a coordinator in mid-round: code 0 within 10 s, and the same models.

    A warm worker trains this model in less time than lies between two states of a device, so the one of a that works
    stops before its first step: it is seen at work, and does not react to the SIGTERM that its daemon passes on.
    """
    fired = tmp_path / "faults.txt"
    hangs = {"FEDFIT_FAULT": "stop:worker.train.begin", "FEDFIT_FAULT_LOG": str(fired)}
    with Proxy() as proxy, Fleet(tmp_path, reroute=proxy.address) as fleet:
        fleet.start_coordinator()
        status = fleet.ask("status")
        assert status is not None
        proxy.target = ("127.0.0.1", parse_broker_url(status["brokers"][0]).port)
        fleet.add_devices("a", "b")
        fleet.start_device("b")
        run = ""
        for state in ("idle", "fetching", "working", "offering"):
            proxy.link = Link(bytes_per_s=60_000 if state in ("fetching", "offering") else None)
            fleet.start_device("a", hangs if state == "working" else {})
            if state == "working":
                fleet.wait_until(fired.exists, SECONDS, "a's worker is about to train")
            fleet.wait_until(_is(fleet, "a", state), SECONDS, f"a is {state}")
            assert fleet.stop("a", within_s=10) == 0, f"while {state}\n{fleet.tail()}"
            run = run or fleet.start_run(mlp_run(rounds=2, model={"hidden": [HIDDEN]}))
        fleet.start_device("a", {})
        fleet.wait_until(lambda: len(fleet.show(run)["models"]) == 2, SECONDS, "round 1 is committed")
        fleet.wait_until(lambda: _state(fleet, "b") in ("fetching", "working"), SECONDS, "round 2 is under way")
        assert fleet.stop("coordinator", within_s=10) == 0
        proxy.link = Link()
        fleet.start_coordinator()
        assert hashes(fleet.wait_finished(run, SECONDS)) == undisturbed.hashes(rounds=2, hidden=HIDDEN)
        assert fleet.unexpected == []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator and the device a."""
    with Fleet(tmp_path_factory.mktemp("lifecycle")) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a")
        fleet.start_device("a")
        yield fleet


LONG = {"max-steps": 4000, "epochs": 1000}  # a round of seconds: a command reaches it before it ends


def _stop(fleet: Fleet, run: str, *options: str) -> str:
    return ok("coordinator", "run", "stop", run, *options, "--state-dir", fleet.state_dir)


def test_a_run_ends_after_its_round_or_now_and_the_next_in_the_queue_begins(fleet: Fleet) -> None:
    """Three runs: the first is stopped now, the second before it began, the third after its round."""
    first, second = (fleet.start_run(mlp_run(rounds=100, devices=1)) for _ in range(2))
    third = fleet.start_run(mlp_run(rounds=100, devices=1, train=LONG))
    fleet.wait_until(lambda: len(fleet.show(first)["models"]) > 1, SECONDS, "the first trains")
    assert [fleet.show(run)["state"] for run in (first, second, third)] == ["running", "queued", "queued"]
    _stop(fleet, second)
    assert (fleet.show(second)["state"], fleet.show(second)["models"]) == ("stopped", [])
    assert "now" in _stop(fleet, first, "--now")
    fleet.wait_until(lambda: fleet.show(first)["state"] == "stopped", SECONDS, "the first ends")
    assert len(fleet.show(first)["models"]) > 1  # what was committed stays
    fleet.wait_until(lambda: bool(fleet.show(third)["leases"]), SECONDS, "the third is in its first round")
    assert "after its round" in _stop(fleet, third)
    shown = fleet.wait_finished(third, SECONDS)
    assert (shown["state"], len(shown["models"])) == ("stopped", 2)
    _stop(fleet, third)  # again: nothing happens
    assert fleet.show(third)["state"] == "stopped"


def test_a_stop_is_not_forgotten_when_the_coordinator_dies(fleet: Fleet) -> None:
    """Asked to end after its round, killed, started again: it ends after that round."""
    run = fleet.start_run(mlp_run(rounds=100, devices=1, train=LONG))
    fleet.wait_until(lambda: bool(fleet.show(run)["leases"]), SECONDS, "it is in its first round")
    _stop(fleet, run)
    fleet.kill("coordinator")
    fleet.wait_until(lambda: fleet.ask("status") is not None, SECONDS, "the coordinator is back")
    shown = fleet.wait_finished(run, SECONDS)
    assert (shown["state"], len(shown["models"])) == ("stopped", 2)


def test_a_device_that_joins_during_a_run_takes_part_and_disturbs_nobody(fleet: Fleet) -> None:
    """It gets a lease in a later round; the other's connection is not touched, nor when its name is added again."""
    run = fleet.start_run(mlp_run(rounds=10_000, devices=1))
    fleet.wait_until(lambda: len(fleet.show(run)["models"]) > 1, SECONDS, "the run is under way")
    before = fleet.log("a").count("connected to the broker")
    fleet.add_devices("late")
    fleet.start_device("late")
    fleet.wait_until(
        lambda: any(d["id"] == "late" for d in fleet.show(run)["devices"]), SECONDS, "the late one's update counts"
    )
    with pytest.raises(ConflictError):
        fleet.add_devices("another", "a")
    assert fleet.log("a").count("connected to the broker") == before
    _stop(fleet, run, "--now")
    fleet.wait_until(lambda: fleet.show(run)["state"] == "stopped", SECONDS, "the run ends")


DEMO_KEYS = [
    "rounds",
    "accuracy",
    "accuracy_before",
    "accuracy_per_round",
    "bytes_up",
    "bytes_down",
    "devices",
    "model_sha256",
]


def _demo(*options: str, rounds: int = 2) -> Json:
    command = [sys.executable, "-m", "coordinator", "demo", "--rounds", str(rounds), "--format", "json", *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert result.returncode == 0, result.stderr
    printed: Json = json.loads(result.stdout)
    return printed


def test_the_demo_prints_what_is_documented(tmp_path: Path) -> None:
    """Exactly the documented keys; an accuracy after each round; four devices; the page that a fleet has."""
    printed = _demo("--seed", "3", "--keep", str(tmp_path), rounds=1)
    assert list(printed) == [*DEMO_KEYS, "report"]
    page = Path(printed["report"]).read_text(encoding="utf-8")
    for piece in ("4 trainings that counted x 2 x", "of what FedAvg would move", "the coordinator has no test data"):
        assert piece in page
    assert printed["rounds"] == 1
    assert len(printed["accuracy_per_round"]) == 1
    assert printed["accuracy"] == printed["accuracy_per_round"][-1]
    assert len(printed["devices"]) == 4


@pytest.mark.slow
def test_a_seed_gives_the_same_demo_twice() -> None:
    """Two demos with seed 3 end with the same model; one with seed 4 does not."""
    first, second, other = _demo("--seed", "3"), _demo("--seed", "3"), _demo("--seed", "4")
    assert first["model_sha256"] == second["model_sha256"]
    assert first["accuracy_per_round"] == second["accuracy_per_round"]
    assert first["model_sha256"] != other["model_sha256"]
