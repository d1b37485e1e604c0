"""A deployed model on its way: fetched, tested and used beside a device's other work."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from device_world import CONTENT, OWN_DOWN, PART, SLEEPS, WORK, World
from rows import digest

from edge_client import faults
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, transfer_id
from edge_client.wire.messages import (
    Cancel,
    Deploy,
    Deployed,
    Hello,
    Pull,
)

MODEL = b"an ONNX file" * 20_000  # two chunks
DEPLOY = Deploy(
    deployment="deployment-1",
    run="r-1",
    version=3,
    input=(1, 2, 2),
    classes_sha256=digest("classes"),
    sha256=hashlib.sha256(MODEL).hexdigest(),
    length=len(MODEL),
)


def _model_chunk(index: int) -> bytes:
    return make_chunk(transfer_id(DEPLOY.sha256), index, MODEL[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


@pytest.fixture
def deployed_to(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A device that is asked to use a model; its self-test is a program that the test ends."""
    monkeypatch.setattr("edge_client.client.deploying.has_runtime", lambda: True)
    monkeypatch.setattr("edge_client.client.self_test_process.COMMAND", (sys.executable, "-c", SLEEPS))
    world.start()
    world.welcome()
    world.say(DEPLOY)
    return world


def _states(world: World) -> list[str]:
    return [said.state for said in world.messages(Deployed) if isinstance(said, Deployed)]


def _let_test_pass(world: World) -> None:
    """The program in its place says that all is well."""
    assert world.daemon is not None
    assert world.daemon._delivery._deploying is not None
    test = world.daemon._delivery._deploying._test
    assert test is not None
    test._process.kill()
    test._process.wait()
    test._process.returncode = 0
    world.turn()


def test_a_deployed_model_is_pulled_tested_and_put_into_its_place(deployed_to: World) -> None:
    """The hello says that this client knows how; without a lease the device is idle all the time."""
    (hello,) = deployed_to.messages(Hello)
    assert isinstance(hello, Hello)
    assert hello.deploys
    assert deployed_to.messages(Pull) == [Pull(sha256=DEPLOY.sha256, ranges=((0, 2),))]
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    _let_test_pass(deployed_to)
    assert _states(deployed_to) == ["fetching", "testing", "active"]
    assert (deployed_to.folder / "deployed/current.onnx").read_bytes() == MODEL


def test_a_restarted_daemon_asks_for_the_chunks_that_are_missing(deployed_to: World) -> None:
    """One of two has arrived; a lease that came between does not cost it."""
    deployed_to.publish(OWN_DOWN, _model_chunk(1))
    assert deployed_to.daemon is not None
    deployed_to.say(WORK)
    deployed_to.say(Cancel(lease=WORK.lease))
    deployed_to.daemon.shut_down()
    deployed_to.heard.clear()
    deployed_to.start()
    deployed_to.welcome()
    assert deployed_to.messages(Pull) == [Pull(sha256=DEPLOY.sha256, ranges=((0, 1),))]


def test_a_disk_that_is_full_while_a_model_is_fetched_does_not_end_other_work(
    deployed_to: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model waits, the client works on; a minute later the missing chunk is asked for."""
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:deployed.part.chunk:2")])
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    said = deployed_to.messages(Deployed)[-1]
    assert isinstance(said, Deployed)
    assert (said.state, said.code) == ("fetching", "disk_full")
    assert said.detail.startswith("cannot store a part: No space left on device")
    before = len(deployed_to.messages(Pull))
    deployed_to.say(WORK)
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert deployed_to.messages(Pull)[before:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    assert deployed_to.daemon is not None
    assert deployed_to.daemon._delivery._deploying is not None
    deployed_to.daemon._delivery._deploying._again_at = 0.0  # a minute is over
    deployed_to.turn()
    deployed_to.turn()
    assert deployed_to.messages(Pull)[-1] == Pull(sha256=DEPLOY.sha256, ranges=((1, 1),))


def test_a_client_that_starts_over_has_not_failed_a_self_test(deployed_to: World) -> None:
    """The disk is full for other work: the test that runs is stopped, and counts for nothing."""
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    daemon = deployed_to.daemon
    assert daemon is not None
    assert daemon._delivery._deploying is not None
    assert daemon._delivery._deploying.is_testing
    daemon.shut_down()  # as `run` does, whatever ends it
    assert json.loads((deployed_to.folder / "deployed/record.json").read_text())["attempts"] == 0


def test_a_newer_model_takes_the_place_of_one_that_is_being_fetched(deployed_to: World) -> None:
    """The rest of the old one is not asked for any more, and nothing of it stays; the same one again goes on."""
    deployed_to.publish(OWN_DOWN, _model_chunk(0))
    deployed_to.say(replace(DEPLOY, deployment="deployment-2"))
    assert len(deployed_to.messages(Pull)) == 1
    deployed_to.say(replace(DEPLOY, deployment="deployment-3", sha256=PART.sha256, length=PART.length))
    assert deployed_to.messages(Pull)[1:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    deployed_to.publish(OWN_DOWN, _model_chunk(1))
    assert [entry.name for entry in (deployed_to.folder / "tmp").glob(f"{DEPLOY.sha256}*")] == []
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    _let_test_pass(deployed_to)
    assert (deployed_to.folder / "deployed/current.onnx").read_bytes() == CONTENT


def test_a_model_that_is_cancelled_is_not_fetched_any_more(deployed_to: World) -> None:
    """Nor does it keep a lease's part waiting."""
    deployed_to.say(Cancel(lease=DEPLOY.deployment))
    before = len(deployed_to.messages(Pull))
    deployed_to.say(WORK)
    assert deployed_to.messages(Pull)[before:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert len(deployed_to.messages(Pull)) == before + 1


def test_work_is_fetched_before_a_model(deployed_to: World) -> None:
    """A round has a deadline: its part is asked for first, the model's rest when that is here."""
    before = len(deployed_to.messages(Pull))
    deployed_to.say(WORK)
    assert deployed_to.messages(Pull)[before:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert deployed_to.messages(Pull)[-1] == Pull(sha256=DEPLOY.sha256, ranges=((0, 2),))


def test_a_worker_waits_for_a_self_test_and_a_self_test_for_a_worker(deployed_to: World) -> None:
    """Never both: the device's memory is for one of them."""
    daemon = deployed_to.daemon
    assert daemon is not None
    assert daemon._delivery._deploying is not None
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    assert daemon._delivery._deploying.is_testing
    deployed_to.say(WORK)
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert daemon._worker._worker is None
    _let_test_pass(deployed_to)
    assert daemon._worker._worker is not None
    deployed_to.say(replace(DEPLOY, deployment="deployment-2", sha256=PART.sha256, length=PART.length))
    assert not daemon._delivery._deploying.is_testing
    deployed_to.say(Cancel(lease=WORK.lease))
    if daemon._worker._worker is not None:  # it may have been quick to end
        deployed_to.worker_ends()
    assert daemon._delivery._deploying.is_testing


def test_work_that_is_cancelled_while_a_test_runs_is_not_begun(deployed_to: World) -> None:
    """Nobody wants it any more when the test ends."""
    daemon = deployed_to.daemon
    assert daemon is not None
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    deployed_to.say(WORK)
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    deployed_to.say(Cancel(lease=WORK.lease))
    _let_test_pass(deployed_to)
    assert daemon._worker._worker is None


def test_an_owner_who_forbids_it_gets_no_model(world: World) -> None:
    """`limits.deploy = false`: one word to the coordinator, nothing is pulled, nothing is kept."""
    world.device_table["limits"] = {"memory": "1GB", "deploy": False}
    world.start()
    world.welcome()
    world.say(DEPLOY)
    (said,) = world.messages(Deployed)
    assert isinstance(said, Deployed)
    assert (said.state, said.code) == ("refused", "forbidden")
    assert world.messages(Pull) == []
    assert not (world.folder / "deployed").exists()


def test_a_device_without_a_deployment_does_not_load_what_serves_it() -> None:
    """The daemon of a device that only trains stays as small as it was."""
    code = "import sys, edge_client.cli.main, edge_client.client.daemon; "
    code += "print([m for m in sys.modules if 'deploy' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
