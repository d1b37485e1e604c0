"""`coordinator run deploy` over real processes: two devices, kills on the way, a self-test that fails, bad input.

One device trains one round; the other two are members only. The model has three chunks, so that a download can be cut
short. The tests of this file follow one another on one fleet: each begins with what the one before deployed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, mlp_run
from typed import ok, typed

from edge_client import durable

KILLS = (
    "deployed.wanted",
    "deployed.part.chunk:2",
    "deployed.testing",
    "deployed.tested",
    "deployed.current.rename",
    "deployed.current.done",
)
SECONDS = 120


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The run test-1 has ended, with a model of 303 kB; a trained it, b is there, c never was."""
    with Fleet(tmp_path_factory.mktemp("fleet")) as made:
        made.start_coordinator()
        made.add_devices("a", "b", "c")
        made.start_device("a")
        shown = made.wait_finished(made.start_run(mlp_run(rounds=1, devices=1, model={"hidden": [1024]})), SECONDS)
        assert shown["state"] == "finished", shown["reason"]
        assert made.stop("a") == 0
        yield made


def states(fleet: Fleet) -> dict[str, tuple[str, str]]:
    """Device -> state and code."""
    shown = fleet.ask("deploy-show", run="test-1") or {"devices": []}
    return {row["device"]: (row["state"], row["code"]) for row in shown["devices"]}


def wait_for(fleet: Fleet, expected: dict[str, tuple[str, str]]) -> None:
    fleet.wait_until(lambda: expected.items() <= states(fleet).items(), SECONDS, f"{expected}")


def current(fleet: Fleet, device: str) -> Path:
    return fleet.folder / device / "state/deployed/current.onnx"


def deploy(fleet: Fleet, *words: object) -> Any:
    return typed("coordinator", "run", "deploy", *words, "--state-dir", fleet.state_dir)


def test_a_device_that_is_killed_at_every_step_has_the_model_in_the_end(fleet: Fleet) -> None:
    """a dies six times between the first word and the swap, in the middle of a download too; b does not; c waits."""
    faults = ",".join(f"kill:{point}" for point in KILLS)
    fleet.start_device("a", {"FEDFIT_FAULT": faults, "FEDFIT_FAULT_LOG": str(fleet.folder / "a.faults")})
    fleet.start_device("b")
    done = deploy(fleet, "latest", "--no-wait")
    assert done.returncode == 0, done.stderr
    wait_for(fleet, {"a": ("active", ""), "b": ("active", ""), "c": ("pending", "")})
    fleet.wait_until(lambda: fleet.num_restarts.get("a") == len(KILLS), SECONDS, "a was killed at each point")
    assert sorted((fleet.folder / "a.faults").read_text().split()) == sorted(faults.split(","))
    assert fleet.unexpected == []
    rows = json.loads(deploy(fleet, "test-1", "--status", "--format", "json").stdout)["devices"]
    hashes = {row["device"]: row["sha256"] for row in rows}
    assert {durable.sha256_file(current(fleet, name)) for name in "ab"} == {hashes["a"], hashes["b"]} == {hashes["c"]}
    blobs = [path for name in "ab" for path in (fleet.folder / name / "state").rglob(hashes["a"])]
    assert blobs == []  # it is the model now
    assert "test-1 version 1 (full, fp32): active" in ok(
        "coordinator", "device", "show", "a", "--state-dir", fleet.state_dir
    )


def test_a_device_whose_self_test_fails_keeps_the_old_model(fleet: Fleet) -> None:
    """b computes half of what it should: rolled back with a line, exit code 9; a uses the new one, b the old one."""
    before = current(fleet, "b").read_bytes()
    assert fleet.stop("b") == 0
    fleet.start_device("b", {"FEDFIT_FAULT": "halve:deployed.probe"})
    fleet.wait_until(lambda: fleet.log("b").count("let us in") == 2, SECONDS, "b is back")
    done = deploy(fleet, "latest", "--device", "a", "--device", "b", "--int8")
    assert done.returncode == 9, done.stderr
    assert done.stderr.splitlines()[-1] == "coordinator: 1 of 2 devices did not take the model; see why above"
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert lines["a"].endswith("  active")
    assert "rolled back (self_test: it does not say to known samples what it said when it was made" in lines["b"]
    assert lines["b"].endswith("run test-1 version 1 stays in use)")
    assert current(fleet, "b").read_bytes() == before
    assert len(current(fleet, "a").read_bytes()) < len(before) / 2
    at = ("--state-dir", fleet.folder / "b/state")
    assert str(current(fleet, "b")) in ok("edge_client", "status", *at)
    assert "1797 samples, accuracy" in ok("edge_client", "infer", "--deployed", "--data", "digits", *at)


@pytest.mark.slow
def test_a_device_that_lost_its_disk_has_its_model_again(fleet: Fleet) -> None:
    """b joins again with its bundle on an empty disk: it gets what it used, not the newer one that it rolled back.

    The coordinator notices after 20 s that it says nothing.
    """
    before = current(fleet, "b").read_bytes()
    assert fleet.stop("b") == 0
    shutil.rmtree(fleet.folder / "b/state")
    fleet.start_device("b", {"FEDFIT_FAULT": ""})
    fleet.wait_until(lambda: current(fleet, "b").exists(), SECONDS, "b has a model again")
    assert current(fleet, "b").read_bytes() == before
    assert states(fleet)["b"] == ("rolled_back", "self_test")


def test_a_killed_coordinator_goes_on_with_what_it_recorded(fleet: Fleet) -> None:
    """It dies when the row is stored and nobody was told: the command says so, and the devices get it all the same."""
    assert fleet.stop("coordinator") == 0
    log = fleet.folder / "coordinator.faults"
    faults = {"FEDFIT_FAULT": "kill:store.deployment.committed", "FEDFIT_FAULT_LOG": str(log)}
    fleet.start_coordinator(faults)
    assert states(fleet)["a"] == ("active", "")
    done = deploy(fleet, "latest", "--device", "a")
    assert (done.returncode, done.stderr.count("\n")) == (4, 2), done.stderr  # the first says which version
    wait_for(fleet, {"a": ("active", "")})
    assert log.read_text() == "kill:store.deployment.committed\n"
    assert current(fleet, "a").read_bytes() == current(fleet, "b").read_bytes()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nobody"], 7, "unknown run 'nobody'; known: "),
        (["test-2"], 3, "edge-client export test-2 --onnx mine.onnx"),
        (["test-3"], 3, "run 'test-3' has no trained model yet"),
        (["test-1", "--version", "7"], 3, "--version: run 'test-1' has no version 7"),
        (["test-1", "--device", "x"], 7, "unknown device 'x'; known: a, b, c"),
        (["test-1", "--label", "line=a"], 7, "there is no device with line=a"),
        (["test-1", "--label", "line"], 3, "label 'line': expected KEY=VALUE"),
        (["test-1", "--architecture", "width:1/2"], 7, "unknown architecture 'width:1/2' of this run; it has: full"),
        (["test-1", "--data", "digits"], 3, "--data: only with --int8"),
        (["test-1", "--input", "3y4"], 3, "--input: expected a shape such as 3x96x96"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_deployed_is_told_in_a_line(fleet: Fleet, words: list[str], code: int, said: str) -> None:
    """With the exit code of its kind; nothing is recorded, no file is left. test-2 and test-3 wait for devices."""
    while len(runs := (fleet.ask("run-list") or {"runs": []})["runs"]) < 3:
        method = {"name": "local"} if len(runs) == 1 else {"name": "fedavg"}
        fleet.start_run(mlp_run(rounds=1, devices=3, method=method))
    before = states(fleet)
    done = deploy(fleet, *words)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert said in done.stderr
    assert states(fleet) == before
    assert list((fleet.state_dir / "tmp").glob("deploy-*")) == []
