"""A device that lies, falls silent or speaks for others is refused and told, and the round goes on without it.

The honest devices h1 and h3 answer with models that hold 1 and 3 everywhere, from equally many samples: whenever their
updates alone count, every value of the next model is exactly 2.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, Json, mlp_run
from hostile import Make, Script, ScriptedDevice, Sent, container, honest
from typed import ok

from edge_client.client.identity import Bundle
from edge_client.wire.messages import Decline, Goodbye
from edge_client.wire.tensors import ContainerReader

SECONDS = 60


class Scene:
    """A coordinator, two honest devices and a hostile one, all polled by the test."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self.folder = folder
        fleet.start_coordinator()
        fleet.add_devices("h1", "h3", "evil")
        self.h1 = self.device("h1", Script(make=honest(1.0)))
        self.h3 = self.device("h3", Script(make=honest(3.0)))
        self.evil = self.device("evil", Script(make=honest(100.0)))
        self.devices = [self.h1, self.h3, self.evil]
        self.pump(lambda: all(device.num_sessions for device in self.devices), "all are let in")

    def device(self, name: str, script: Script, bundle: Bundle | None = None) -> ScriptedDevice:
        return ScriptedDevice(bundle or self.fleet.bundle(name), self.folder / f"{name}.device", script)

    def pump(self, done: Callable[[], bool], what: str) -> None:
        until, beat = time.monotonic() + SECONDS, 0.0
        while not done():
            assert time.monotonic() < until, f"waited {SECONDS} s until {what}\n{self.fleet.tail()}"
            assert self.fleet.exit_code("coordinator") is None, self.fleet.tail()
            if time.monotonic() > beat:
                beat = time.monotonic() + 0.5
                for device in self.devices:
                    device.heartbeat()
            for device in self.devices:
                device.poll()

    def run(self, make: Make | None = None, *, rounds: int = 1, **changes: Any) -> Json:
        """A run in which the hostile device answers with `make`; what the coordinator knows afterwards."""
        self.evil.script = replace(self.evil.script, make=make or self.evil.script.make)
        file = mlp_run(rounds=rounds, devices=2, **changes)
        # a model of ones or threes is far from the first one, whose weights are small: 40 * (3 + 1) is enough for it
        file = replace(file, rounds=replace(file.rounds, max_norm_ratio=40.0))
        name = self.fleet.start_run(file)
        self.pump(lambda: self.fleet.show(name)["state"] not in ("queued", "running"), f"{name} ends")
        for _ in range(20):  # receipts of the last round may still be on their way
            for device in self.devices:
                device.poll()
        return self.fleet.show(name)

    def lease(self, shown: Json, device: str = "evil") -> Json:
        found: list[Json] = [lease for lease in shown["leases"] if lease["device"] == device]
        (lease,) = found
        return lease

    def values(self, shown: Json) -> set[float]:
        """All values of the run's last model."""
        sha256 = shown["models"][-1]["sha256"]
        with ContainerReader(self.fleet.state_dir / "blobs" / sha256[:2] / sha256) as reader:
            return {value for name in reader.names() for value in reader.tensor(name).flatten().tolist()}

    def close(self) -> None:
        for device in self.devices:
            device.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One federation for all tests of this file."""
    folder = tmp_path_factory.mktemp("hostile")
    with Fleet(folder) as fleet:
        scene = Scene(fleet, folder)
        yield scene
        scene.close()


@pytest.fixture
def scene(shared: Scene) -> Scene:
    """The federation with a hostile device that has not done anything yet."""
    shared.evil.script = Script(make=honest(100.0))
    shared.evil.receipts.clear()
    return shared


def _lying(num_samples: int, announced: int | None = None) -> Make:
    """A count in the report and one in the offer."""
    said = num_samples if announced is None else announced
    return lambda base, out: Sent(data=container(base, out, num_samples=num_samples), num_samples=said)


REFUSED: dict[str, tuple[Make, str]] = {
    "nan": (honest(math.nan), "not_finite"),
    "infinity": (honest(math.inf), "not_finite"),
    "another shape": (lambda base, out: Sent(data=container(base, out, longer=1), num_samples=10), "shape"),
    "another dtype": (lambda base, out: Sent(data=container(base, out, codec="fp16"), num_samples=10), "dtype"),
    "a tensor missing": (lambda base, out: Sent(data=container(base, out, drop=1), num_samples=10), "names"),
    "too many samples": (_lying(10**12), "sample_count"),
    "no samples": (_lying(0), "sample_count"),
    "fewer than none": (_lying(10, -1), "sample_count"),
    # the same bytes as the update of h1: refusing one must not drop the other
    "another count in the report": (_lying(10, 9), "sample_count"),
    "another hash": (
        lambda base, out: Sent(data=container(base, out), num_samples=10, sha256=hashlib.sha256(b"x").hexdigest()),
        "hash",
    ),
    "a model far from the first one": (honest(1e4), "norm"),
    "no container": (lambda base, out: Sent(data=b"x" * 5000, num_samples=10), "malformed"),
    "a gigabyte": (lambda base, out: Sent(data=b"x", num_samples=10, length=10**9), "too_large"),
}


@pytest.mark.parametrize("lie", list(REFUSED))
def test_a_lie_is_refused_and_told_and_the_round_goes_on(scene: Scene, lie: str) -> None:
    """`run show` has the reason, the device got the same one, and the honest mean is exactly (1 + 3) / 2."""
    make, code = REFUSED[lie]
    shown = scene.run(make)
    assert shown["state"] == "finished"
    assert (scene.lease(shown)["state"], scene.lease(shown)["code"]) == ("refused", code)
    receipt = scene.evil.receipts[-1]
    assert (receipt.status, receipt.code) == ("refused", code)
    assert receipt.detail
    assert scene.values(shown) == {2.0}


def test_people_see_who_was_refused_and_why(scene: Scene) -> None:
    """`coordinator run show` names the device, the code and the detail."""
    scene.run(honest(math.nan))
    printed = ok("coordinator", "run", "show", "latest", "--state-dir", scene.fleet.state_dir)
    (line,) = [line for line in printed.splitlines() if "not_finite" in line]
    assert "evil" in line
    assert "values that are not finite" in printed


def test_an_update_that_moves_the_model_too_far_is_refused_once_there_is_a_usual(scene: Scene) -> None:
    """Round 1 sets the measure (values of 1, 2 and 3); in round 2 a million everywhere is more than 40 times that."""
    values = iter([2.0, 1e6])
    shown = scene.run(lambda base, out: honest(next(values))(base, out), rounds=2)
    assert (scene.lease(shown)["state"], scene.lease(shown)["code"]) == ("refused", "norm")
    assert scene.evil.receipts[-1].code == "norm"
    assert scene.values(shown) == {2.0}


@pytest.mark.parametrize("accepts", [True, False], ids=["accepts and falls silent", "never answers"])
def test_a_device_that_never_delivers_is_waited_for_until_the_deadline_only(scene: Scene, accepts: bool) -> None:
    """The round ends at its deadline with two of three."""
    scene.evil.script = Script(accepts=accepts, delivers=False)
    shown = scene.run(deadline="3s")
    assert (scene.lease(shown)["state"], scene.lease(shown)["code"]) == ("expired", "late")
    assert scene.values(shown) == {2.0}


def test_a_lease_takes_one_update_and_repeats_its_answer(scene: Scene) -> None:
    """The same offer again: accepted again. Another one for the same lease: refused, and the first one counts."""
    shown = scene.run(honest(2.0))
    assert scene.values(shown) == {2.0}
    first = scene.evil.receipts[-1]
    assert first.status == "accepted"
    assign = scene.evil.assigns[-1]
    scene.evil.offer(assign, Sent(data=b"", num_samples=10, sha256=first.sha256))
    scene.evil.offer(assign, Sent(data=b"another", num_samples=10))
    scene.pump(lambda: len(scene.evil.receipts) >= 3, "both are answered")
    assert [(r.status, r.code) for r in scene.evil.receipts[-2:]] == [("accepted", "ok"), ("refused", "equivocation")]


def test_nobody_speaks_for_another_device(scene: Scene) -> None:
    """An offer and a decline for the lease of h1, under evil's own name: nothing happens to h1's lease."""

    def meddle(base: Path, out: Path) -> Sent:
        scene.pump(lambda: bool(scene.h1.assigns), "h1 is asked")
        scene.evil.offer(scene.h1.assigns[-1], Sent(data=b"mine", num_samples=10))
        scene.evil.say(Decline(lease=scene.h1.assigns[-1].lease, code="no"))
        return honest(2.0)(base, out)

    shown = scene.run(meddle)
    assert scene.lease(shown, "h1")["state"] == "stored"
    assert scene.values(shown) == {2.0}
    assert ("late", "unknown_lease") in [(r.status, r.code) for r in scene.evil.receipts]


def test_garbage_replays_and_other_devices_topics_are_dropped(scene: Scene) -> None:
    """Bytes without sense, a message twice, an old goodbye, and h1's topics, which the broker does not open."""
    goodbye = scene.evil.say(Goodbye())
    scene.evil.hello()
    scene.pump(lambda: scene.evil.num_sessions >= 2, "it is let in again")

    def noise(base: Path, out: Path) -> Sent:
        for payload in (b"", b"FF", bytes(300), goodbye, b"FC" + bytes(120_000)):
            scene.evil.publish("up", payload)
            scene.evil.publish("data", payload)
        scene.evil.publish("up", goodbye, device="h1")
        return honest(2.0)(base, out)

    shown = scene.run(noise)
    assert {scene.lease(shown, name)["state"] for name in ("h1", "h3")} == {"stored"}
    assert scene.values(shown) == {2.0}
    assert "Traceback" not in scene.fleet.log("coordinator")


def test_a_device_with_another_key_is_never_let_in(scene: Scene) -> None:
    """It has the password of evil's bundle but not its key: the broker lets it in, the coordinator does not hear it.

    Its chunks are evil's: they have no key, and with others the update would be refused for its hash.
    """
    bundle = scene.fleet.bundle("evil")
    impostor = ScriptedDevice(bundle, scene.folder / "impostor", Script(make=honest(2.0)), key=bytes(32))
    try:
        before = scene.evil.num_sessions
        scene.devices.append(impostor)
        shown = scene.run(honest(2.0))
    finally:
        scene.devices.remove(impostor)
        impostor.close()
    assert (scene.evil.num_sessions, impostor.assigns) == (before, scene.evil.assigns[-1:])
    assert scene.lease(shown)["state"] == "stored"
    assert scene.values(shown) == {2.0}


@pytest.mark.parametrize("payload", [bytes(120_000), b"junk"], ids=["large", "small"])
def test_a_device_that_floods_is_cut_and_the_others_train(tmp_path: Path, payload: bytes) -> None:
    """It is suspended and shown as such, the log stays short, and the honest mean is (1 + 3) / 2."""
    with Fleet(tmp_path) as fleet:
        scene = Scene(fleet, tmp_path)
        scene.evil.script = Script(accepts=False)

        def suspended() -> bool:
            if scene.evil.transport.queued_bytes < 8 << 20:
                for _ in range(200):
                    scene.evil.publish("data", payload)
            rows = {row["id"]: row for row in fleet.ask("device-list")["devices"]}  # type: ignore[index]
            return bool(rows["evil"]["state"] == "suspended: flooding")

        scene.pump(suspended, "it is suspended")
        scene.devices.remove(scene.evil)
        shown = scene.run(honest(100.0))
        scene.evil.close()
        assert scene.values(shown) == {2.0}
        assert len(fleet.log("coordinator").splitlines()) < 60
        assert "not connected" not in fleet.log("coordinator")
        scene.close()
