"""How a device takes a deployed model: what it refuses, tests, uses and remembers. Tests are processes of a line."""

from __future__ import annotations

import hashlib
import select
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rows import digest

from edge_client import faults
from edge_client.client import deploying, self_test_process
from edge_client.client.deploying import Deploying
from edge_client.device import watch
from edge_client.errors import DiskFullError
from edge_client.transport.blobs import BlobStore
from edge_client.wire.messages import Deploy, Deployed

MODELS = {name: f"the bytes of model {name}".encode() for name in ("one", "two")}
PASSES = "pass"
FAILS = "import sys; open(sys.argv[2], 'w').write('{\"error\": \"it differs\"}'); sys.exit(3)"


def deploy(name: str, deployment: str) -> Deploy:
    """Of one of the models."""
    content = MODELS[name]
    about = {"run": f"run-{name}", "version": 3, "input": (1, 2, 2), "classes_sha256": digest("classes")}
    return Deploy(deployment=deployment, sha256=hashlib.sha256(content).hexdigest(), length=len(content), **about)


ONE, TWO = deploy("one", "d1"), deploy("two", "d2")


class Device:
    """A state directory and what the coordinator hears from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.heard: list[Deployed] = []
        self.code = PASSES
        self.is_allowed = True
        self.free_bytes = 10**9
        self.budget_bytes = 10**9
        self.start()

    def start(self) -> None:
        """As after a restart of the client."""
        self.blobs = BlobStore(self.folder / "blobs", self.folder / "tmp")
        self.deploying = Deploying(
            state_dir=self.folder,
            blobs=self.blobs,
            is_allowed=self.is_allowed,
            send=self.heard.append,
            budget_bytes=lambda: self.budget_bytes,
            usual_bytes=lambda: 10**9,
            free_bytes=lambda: self.free_bytes,
            command=(sys.executable, "-c", self.code),
        )

    def fetch(self, name: str) -> None:
        """What the daemon does with what is wanted."""
        wanted = self.deploying.wanted
        assert wanted is not None
        assert wanted.length == len(MODELS[name])
        self.blobs.write(MODELS[name], wanted.sha256, point="test")

    def let_test(self) -> None:
        """Begin the test that is due and wait for its end."""
        self.deploying.tick(0.0, may_test=True)
        self.see_the_end(1.0)

    def see_the_end(self, now: float) -> None:
        fds = self.deploying.fds
        assert select.select(fds, [], [], 30)[0] == fds
        self.deploying.test_ended(now)

    def crash(self) -> None:
        """The client is killed, and its test with it."""
        test = self.deploying._test
        assert test is not None
        test.kill()
        test.result()

    def current(self) -> bytes | None:
        path = self.folder / "deployed/current.onnx"
        return path.read_bytes() if path.exists() else None

    def told(self) -> list[tuple[str, str, str]]:
        """Deployment, state and code, in the order in which they were said."""
        return [(said.deployment, said.state, said.code) for said in self.heard]


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    monkeypatch.setattr(deploying, "has_runtime", lambda: True)
    made = Device(tmp_path)
    yield made
    made.deploying.close()


def use_one(device: Device) -> None:
    """The first model is in use."""
    device.deploying.asked(ONE)
    device.fetch("one")
    device.let_test()
    assert device.current() == MODELS["one"]


def test_a_model_is_fetched_tested_and_used(device: Device) -> None:
    """And told at each step; the blob has become the model."""
    device.deploying.asked(ONE)
    device.fetch("one")
    device.let_test()
    assert device.current() == MODELS["one"]
    states = ("fetching", "testing", "active")
    assert device.told() == [("d1", state, "ok") for state in states]
    assert list(device.blobs.names()) == []
    assert device.deploying.wanted is None


def test_a_model_that_fails_its_test_leaves_the_old_one(device: Device) -> None:
    """With the reason and what stays in use, in one line; nothing of it is kept."""
    device.deploying.asked(ONE)
    device.fetch("one")
    device.let_test()
    device.code = FAILS
    device.start()
    device.deploying.asked(TWO)
    device.fetch("two")
    device.let_test()
    assert device.current() == MODELS["one"]
    assert device.told()[-1] == ("d1", "active", "ok")
    last = device.heard[-2]
    assert (last.deployment, last.state, last.code) == ("d2", "rolled_back", "self_test")
    assert last.detail == "it differs; run run-one version 3 stays in use"
    assert list(device.blobs.names()) == []


@pytest.mark.parametrize(
    ("exit_code", "state", "code"), [(75, "rolled_back", "over_budget"), (69, "refused", "no_runtime")]
)
def test_the_way_in_which_a_test_ends_is_told(device: Device, exit_code: int, state: str, code: str) -> None:
    """Too much memory, and a runtime that was removed between."""
    device.code = f"import sys; sys.exit({exit_code})"
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    device.let_test()
    assert device.told()[-1] == ("d1", state, code)
    assert device.current() is None


@pytest.mark.parametrize("restarts", [False, True])
def test_a_test_that_crashes_is_repeated_and_then_given_up(device: Device, restarts: bool) -> None:
    """Three times, also if the client dies with it each time: a model may make a small board reboot."""
    device.code = "import os; os.kill(os.getpid(), 9)"
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    for _ in range(3):
        assert device.deploying.wanted is not None
        if restarts:
            device.deploying.tick(0.0, may_test=True)
            device.crash()
            device.start()
        else:
            device.let_test()
    device.deploying.tick(2.0, may_test=True)
    assert device.deploying.wanted is None
    assert device.told()[-1] == ("d1", "rolled_back", "crashed")


def test_a_test_that_does_not_end_is_ended(device: Device) -> None:
    """180 seconds after it was first looked at, not before; it counts as a crash."""
    device.code = "import time; time.sleep(600)"
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    for now in (0.0, 10.0, 189.9):
        device.deploying.tick(now, may_test=True)
    assert device.deploying.is_testing
    assert select.select(device.deploying.fds, [], [], 0)[0] == []
    device.deploying.tick(190.0, may_test=True)
    device.see_the_end(190.1)
    assert not device.deploying.is_testing
    assert device.deploying.wanted is not None


def test_a_client_that_is_stopped_on_purpose_has_not_crashed(device: Device) -> None:
    """Four times in the middle of a test; the fifth comes to its end."""
    device.code = "import time; time.sleep(600)"
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    for _ in range(4):
        device.deploying.tick(0.0, may_test=True)
        device.deploying.close()
        device.start()
    device.code = PASSES
    device.start()
    device.let_test()
    assert device.current() == MODELS["one"]


def test_no_test_runs_beside_a_worker(device: Device) -> None:
    """The device's memory is for one of them."""
    device.deploying.asked(ONE)
    device.fetch("one")
    device.deploying.tick(0.0, may_test=False)
    assert not device.deploying.is_testing


def test_what_cannot_be_taken_is_refused_before_anything_is_fetched(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No onnxruntime; an owner who forbids it; nothing is kept of either."""
    monkeypatch.setattr(deploying, "has_runtime", lambda: False)
    device.deploying.asked(ONE)
    device.is_allowed = False
    device.start()
    device.deploying.asked(TWO)
    assert device.told() == [("d1", "refused", "no_runtime"), ("d2", "refused", "forbidden")]
    assert [said.detail for said in device.heard] == [
        "onnxruntime is not installed there; type: pip install 'fedfit[infer]'; none is in use",
        "the owner of this device forbids it: limits.deploy = false in device.toml; none is in use",
    ]
    assert not (device.folder / "deployed").exists()


def test_a_newer_deployment_that_is_refused_ends_one_under_way(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator wants neither any more: nothing is fetched, and the model in use stays; also after a restart."""
    use_one(device)
    device.deploying.asked(TWO)
    device.fetch("two")
    monkeypatch.setattr(deploying, "has_runtime", lambda: False)
    device.deploying.asked(replace(TWO, deployment="d3"))
    assert device.deploying.wanted is None
    assert not device.blobs.has(TWO.sha256)
    assert device.heard[-2].detail.endswith("; run run-one version 3 stays in use")
    device.start()
    device.heard.clear()
    device.deploying.greeted()
    assert device.told() == [("d3", "refused", "no_runtime"), ("d1", "active", "ok")]
    assert device.current() == MODELS["one"]


def test_what_is_in_use_is_told_although_something_else_ended_later(device: Device) -> None:
    """An owner who forbids more keeps what is there; the coordinator may ask for it by its own deployment."""
    use_one(device)
    device.is_allowed = False
    device.start()
    device.heard.clear()
    device.deploying.asked(TWO)
    device.deploying.asked(ONE)
    assert device.told() == [("d2", "refused", "forbidden"), ("d1", "active", "ok")]


def test_a_model_waits_for_space_before_it_is_fetched(device: Device) -> None:
    """43 bytes are free, twice 22 are needed; told once, looked at again a minute later, and then it goes on."""
    device.free_bytes = 2 * ONE.length - 1
    device.deploying.asked(ONE)
    for now in (0.0, 1.0, 59.9, 60.9):
        device.deploying.tick(now, may_test=True)
        assert device.deploying.fetched is None
    assert device.told() == [("d1", "fetching", "ok"), ("d1", "fetching", "disk_full")]
    assert device.heard[-1].detail == "44 B are needed on disk and 43 B are free"
    device.free_bytes += 1
    device.deploying.tick(61.0, may_test=True)
    assert device.deploying.fetched == device.deploying.wanted
    assert device.told()[2:] == [("d1", "fetching", "ok")]
    device.fetch("one")
    device.let_test()
    assert device.current() == MODELS["one"]


def test_what_has_arrived_needs_no_space_any_more(device: Device) -> None:
    """A part of 4,096 bytes on disk counts, and twice 22 bytes are less."""
    device.deploying.asked(ONE)
    device.free_bytes = 0
    device.blobs.temporary_path(f"{ONE.sha256}.part").write_bytes(bytes(8192))
    device.deploying.tick(0.0, may_test=True)
    assert device.deploying.fetched is not None


def test_a_disk_that_fills_while_a_model_is_fetched_is_waited_for(device: Device) -> None:
    """A minute, with what has arrived; the client goes on with all else."""
    device.deploying.asked(ONE)
    device.deploying.tick(0.0, may_test=True)
    device.deploying.disk_is_full(DiskFullError("cannot store a part: No space left on device"))
    for now, may_fetch in ((1.0, False), (60.9, False), (61.0, True)):
        device.deploying.tick(now, may_test=True)
        assert (device.deploying.fetched is not None) == may_fetch
    assert device.told()[1:] == [("d1", "fetching", "disk_full"), ("d1", "fetching", "ok")]


FULL = {  # a write that fails once -> how far the deployment is then
    "deployed.record.write": "fetching",  # when it is taken
    "deployed.record.write:2": "fetching",  # before the test begins
    "deployed.record.rename:2": "fetching",
    "deployed.record.write:3": "testing",  # it has passed
    "deployed.name.sync": "testing",
    "deployed.current.rename": "testing",
    "deployed.record.write:4": "testing",  # it is in its place
}


@pytest.mark.parametrize("point", FULL)
def test_a_full_disk_is_no_failure_wherever_it_happens(
    device: Device, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """Each write once without space: told, tried again a minute later, and the model is in use. One test is enough."""
    use_one(device)
    device.heard.clear()
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"enospc:{point}")])
    device.deploying.asked(TWO)
    device.deploying.asked(TWO)  # as the coordinator does, every 20 s
    device.fetch("two")
    for now in (0.0, 10.0, 70.0, 80.0, 140.0):
        if device.deploying.is_testing:
            device.see_the_end(now)
        device.deploying.tick(now, may_test=True)
    assert device.current() == MODELS["two"]
    assert (device.folder / "deployed/previous.onnx").read_bytes() == MODELS["one"]
    assert [state for _, state, code in device.told() if code == "disk_full"] == [FULL[point]]
    assert device.told()[-1] == ("d2", "active", "ok")
    assert device.told().count(("d2", "testing", "ok")) == 1
    assert {state for _, state, _ in device.told()} == {"fetching", "testing", "active"}


def test_a_test_whose_result_finds_no_space_does_not_count(device: Device) -> None:
    """Five times exit code 74, a minute apart, then it passes."""
    device.code = "import sys; sys.exit(74)"
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    for number in range(5):
        device.deploying.tick(100.0 * number, may_test=True)
        device.see_the_end(100.0 * number + 1)
        device.deploying.tick(100.0 * number + 2, may_test=True)
        assert not device.deploying.is_testing
        assert device.told()[-1] == ("d1", "testing", "disk_full")
    device.code = PASSES
    device.start()
    device.let_test()
    assert device.current() == MODELS["one"]


def test_what_became_of_a_model_is_written_when_there_is_space(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that failed on a full disk is not run again: the result is kept, and told a minute later."""
    device.code = FAILS
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    device.deploying.tick(0.0, may_test=True)
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:deployed.record.write")])
    device.see_the_end(1.0)
    assert device.told()[-1] == ("d1", "testing", "disk_full")
    for now in (2.0, 62.0):
        device.deploying.tick(now, may_test=True)
    assert device.told()[-1] == ("d1", "rolled_back", "self_test")
    assert device.deploying.wanted is None


@pytest.mark.parametrize("killed", [False, True])
def test_a_test_that_lacks_memory_is_repeated_and_then_given_up(
    device: Device, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Other programs use it, or the kernel ends the test: a minute apart, three times, with a code of its own."""
    device.code = "import os; os.kill(os.getpid(), 9)" if killed else "import sys; sys.exit(75)"
    device.budget_bytes = 10**9 if killed else 4 * 10**8
    kills = iter(range(10))
    monkeypatch.setattr(self_test_process, "count_oom_kills", lambda: -1)
    monkeypatch.setattr(watch, "count_oom_kills", lambda root: next(kills))
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    for number in range(3):
        device.deploying.tick(100.0 * number, may_test=True)
        device.see_the_end(100.0 * number + 1)
        device.deploying.tick(100.0 * number + 2, may_test=True)
        assert not device.deploying.is_testing
    assert device.told()[2:] == [
        *[("d1", "testing", "low_memory"), ("d1", "testing", "ok")] * 2,
        ("d1", "rolled_back", "low_memory"),
    ]
    because = "the kernel ended the self-test" if killed else "usually the budget is 1.0 GB"
    assert because in device.heard[-1].detail


def test_an_owner_who_forbids_it_meanwhile_is_obeyed(device: Device) -> None:
    """What was on its way is dropped at the next start."""
    device.deploying.asked(ONE)
    device.is_allowed = False
    device.start()
    assert device.deploying.wanted is None
    assert device.told()[-1] == ("d1", "refused", "forbidden")


def test_what_became_of_the_newest_deployment_is_said_whenever_asked(device: Device) -> None:
    """Also by the next process, and at every welcome: the coordinator may not have heard it."""
    device.deploying.asked(ONE)
    device.deploying.asked(ONE)
    assert device.told() == [("d1", "fetching", "ok")] * 2
    device.fetch("one")
    device.let_test()
    device.start()
    device.heard.clear()
    device.deploying.asked(ONE)
    device.deploying.greeted()
    assert device.told() == [("d1", "active", "ok")] * 2


def test_a_restart_goes_on(device: Device) -> None:
    """Without a word from the coordinator: what is wanted is on disk, and so is what has arrived."""
    device.deploying.asked(ONE)
    device.start()
    device.fetch("one")
    device.start()
    device.deploying.greeted()
    device.let_test()
    assert device.current() == MODELS["one"]
    assert device.told() == [("d1", state, "ok") for state in ("fetching", "fetching", "testing", "active")]


def test_a_newer_deployment_takes_the_place_of_one_under_way(device: Device) -> None:
    """Even of one that is being tested; its file is dropped."""
    device.code = "import time; time.sleep(600)"
    device.start()
    device.deploying.asked(ONE)
    device.fetch("one")
    device.deploying.tick(0.0, may_test=True)
    device.deploying.asked(TWO)
    assert not device.deploying.is_testing
    assert not device.blobs.has(ONE.sha256)
    wanted = device.deploying.wanted
    assert wanted is not None
    assert wanted.sha256 == TWO.sha256


def test_a_deployment_that_nobody_wants_any_more_is_dropped(device: Device) -> None:
    """Only the one that is named."""
    device.deploying.asked(ONE)
    device.deploying.cancelled("d2")
    assert device.deploying.wanted is not None
    device.deploying.cancelled("d1")
    assert device.deploying.wanted is None


def test_the_model_in_use_is_not_fetched_again(device: Device) -> None:
    """Another deployment of the same file is active at once."""
    device.deploying.asked(ONE)
    device.fetch("one")
    device.let_test()
    device.deploying.asked(replace(ONE, deployment="d7"))
    assert device.deploying.wanted is None
    assert device.told()[-1] == ("d7", "active", "ok")


def test_a_runtime_that_is_not_installed_is_noticed_without_loading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name alone; the process of the client never has it."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert not deploying.has_runtime()
