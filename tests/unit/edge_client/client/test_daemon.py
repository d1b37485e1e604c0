"""The daemon step by step, over the hub in memory, with what a power cut or a lie may leave on its disk."""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rows import PLAN, assign, digest

from coordinator.broker.certificates import ensure_pki
from edge_client import faults
from edge_client.client import daemon as daemon_module
from edge_client.client import identity
from edge_client.client.daemon import Daemon
from edge_client.client.session import Finished
from edge_client.client.spool import Saved, Spool
from edge_client.client.status import read_status
from edge_client.config.files import DeviceFile, parse_table
from edge_client.records import Ceiling, PartRef, WorkOrder, from_map, to_map
from edge_client.transport.base import Connected, Disconnected, Event, Received
from edge_client.transport.inproc import Hub
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, transfer_id
from edge_client.wire.messages import (
    Assign,
    Cancel,
    Decline,
    Deploy,
    Deployed,
    Grant,
    Hello,
    Message,
    Offer,
    Pull,
    Receipt,
    Share,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)
from edge_client.wire.topics import Topics
from edge_client.worker.live_files import Trial, write_trial

KEY = digest("key")
BUNDLE = identity.Bundle(federation="fed", device="d", brokers=("mqtt://h",), password="p" * 20, key=KEY)
CONTENT = b"a part of some work"
PART = PartRef(key="run", sha256=hashlib.sha256(CONTENT).hexdigest(), length=len(CONTENT))
WORK = assign(parts=(PART,))
UPDATE = Finished(sha256=digest("u"), length=3, num_samples=1)
SLEEPS = "import time; time.sleep(60)"


class World:
    """A daemon, and a coordinator that welcomes it and says what the test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device_table: dict[str, object] = {"limits": {"memory": "1GB"}}
        self.worker_code = SLEEPS
        self.root = Path("/")
        self.heard: list[Message] = []
        self._hub = Hub()
        self._topics = Topics("fed")
        self._seq = 0
        self._coordinator = self._hub.transport("coordinator", self._on_event)
        self._coordinator.subscribe((self._topics.device("d", "up"),))
        self._coordinator.connect()
        self._hub.poll()
        self.daemon: Daemon | None = None

    def start(self) -> Daemon:
        """Start on what is in the folder; its workers sleep, unless the test has other code for them."""
        daemon = Daemon(
            bundle=BUNDLE,
            device_file=parse_table(DeviceFile, self.device_table, source="test"),
            state_dir=self.folder,
            connect=lambda on_event, boot: self._hub.transport("d", on_event),
            worker_command=(sys.executable, "-c", self.worker_code),
            root=self.root,
        )
        self.daemon = daemon
        daemon._carry_out(daemon._resume())
        daemon._transport.connect()
        self.turn()
        return daemon

    def turn(self) -> None:
        """A few turns of the loop: every message has its answer then."""
        assert self.daemon is not None
        for _ in range(5):
            self.daemon._turn()
            self._hub.poll()

    def worker_ends(self) -> None:
        """Wait for it, and let the daemon see it."""
        assert self.daemon is not None
        assert self.daemon._worker is not None
        self.daemon._worker._process.wait(20)
        self.turn()

    def order(self, lease: str = "lease-1") -> WorkOrder:
        """What the newest worker was told."""
        return from_map(WorkOrder, json.loads((self.folder / "work" / lease / "order.json").read_text()))

    def say(self, message: Message, session: str = "s") -> None:
        """To the device, and let it react."""
        self.send(message, session)
        self._hub.poll()
        self.turn()

    def send(self, message: Message, session: str) -> None:
        """To the device, which reads it with whatever else is on its way."""
        context = context_down("fed", "d")
        data = seal_message(message, session=session, seq=self._seq, key=bytes.fromhex(KEY), context=context)
        self._seq += 1
        self._coordinator.publish(self._topics.device("d", "cmd"), data)

    def announce(self) -> None:
        """The coordinator's hint that it is there."""
        self._coordinator.publish(self._topics.coordinator_state, b"online 7", retain=True)
        self._hub.poll()
        self.turn()

    def publish(self, topic: str, payload: bytes) -> None:
        """To whoever listens there, and let the device react."""
        self._coordinator.publish(topic, payload)
        self._hub.poll()
        self.turn()

    def welcome(self) -> None:
        """Answer the newest hello."""
        hello = self.told(Hello)[-1]
        assert isinstance(hello, Hello)
        self.say(Welcome(boot=hello.boot, hello=hello.hello, session="s", epoch=1, heartbeat_s=60.0), session="")

    def told(self, kind: type[Message]) -> list[Message]:
        """What the device said, of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def saved(self) -> Saved:
        """What a restart would find."""
        return Spool(self.folder / "state.json").load()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Received):
            sealed = open_message(event.payload, key=bytes.fromhex(KEY), context=context_up("fed", "d"))
            self.heard.append(sealed.message)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A device's state directory and its coordinator; no turn waits."""
    monkeypatch.setattr("edge_client.client.daemon._IDLE_S", 0.0)
    made = World(tmp_path)
    yield made
    if made.daemon is not None:
        made.daemon._shut_down()


def _leave(folder: Path, work: Assign, update: Finished | None = None) -> None:
    """What the process before saved."""
    Spool(folder / "state.json").save(work, update, 1)


def test_a_part_that_lies_on_disk_is_fetched_again(world: World) -> None:
    """The map says that all of it arrived before the restart; its bytes are others."""
    _leave(world.folder, WORK)
    (world.folder / "tmp").mkdir()
    (world.folder / "tmp" / f"{PART.sha256}.part").write_bytes(b"x" * PART.length)
    (world.folder / "tmp" / f"{PART.sha256}.map").write_bytes(b"\1")
    world.start()
    world.welcome()
    assert world.told(Pull) == [Pull(sha256=PART.sha256, ranges=((0, 1),))]


@pytest.mark.parametrize(("content", "pulls"), [(CONTENT, 0), (CONTENT[:-1], 1), (b"", 1)])
def test_a_blob_is_used_after_a_restart_only_if_its_hash_is_right(world: World, content: bytes, pulls: int) -> None:
    """Blobs are not synced: a power cut may cut them short under their final name."""
    _leave(world.folder, WORK)
    path = world.folder / "blobs" / PART.sha256[:2] / PART.sha256
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    daemon = world.start()
    world.welcome()
    assert len(world.told(Pull)) == pulls
    assert (daemon._worker is None) == bool(pulls)


def test_two_parts_with_the_same_bytes_are_fetched_once(world: World) -> None:
    """One transfer serves both."""
    world.start()
    world.welcome()
    world.say(assign(parts=(PART, PartRef(key="model", sha256=PART.sha256, length=PART.length))))
    assert len(world.told(Pull)) == 1


def test_an_idle_device_asks_for_nothing(world: World) -> None:
    """Cancelled while it fetched: it does not go on, not even after a new connection."""
    daemon = world.start()
    world.welcome()
    world.say(WORK)
    assert len(world.told(Pull)) == 1
    world.say(Cancel(lease=WORK.lease))
    daemon._transport.drop()
    world.turn()
    world.welcome()
    assert len(world.told(Pull)) == 1


LARGE = bytes(range(256)) * (20 * CHUNK_BYTES // 256)
LARGE_PART = PartRef(key="model", sha256=hashlib.sha256(LARGE).hexdigest(), length=len(LARGE))
SHARED_DOWN = "fl/v1/fed/all/down"


def _chunk(index: int, sha256: str = LARGE_PART.sha256) -> bytes:
    return make_chunk(transfer_id(sha256), index, LARGE[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


@pytest.fixture
def listener(world: World) -> World:
    """A device that fetches 20 chunks, listens on the shared topic and has said so."""
    world.start()
    world.welcome()
    world.say(assign(parts=(LARGE_PART,)))
    world.publish(SHARED_DOWN, _chunk(0))
    assert world.told(Pull) == [Pull(sha256=LARGE_PART.sha256, ranges=((0, 4),))]  # it does not listen unasked
    world.say(Share(sha256=LARGE_PART.sha256, listen=True))
    assert world.told(Pull)[1:] == [Pull(sha256=LARGE_PART.sha256, ranges=(), heard=0)]
    return world


def test_a_part_arrives_over_the_shared_topic(listener: World) -> None:
    """Two chunks on its own topic, the others on the shared one, once more each; then it leaves, and says so."""
    own = "fl/v1/fed/dev/d/down"
    for index in range(20):
        for _ in range(2):
            listener.publish(own if index in (3, 7) else SHARED_DOWN, _chunk(index))
    assert listener.daemon is not None
    assert listener.daemon._blobs.path(LARGE_PART.sha256).read_bytes() == LARGE
    heard = [pull.heard for pull in listener.told(Pull) if isinstance(pull, Pull)]
    assert heard[-1] is None
    assert [number for number in heard[1:-1] if number is not None] == sorted(number or 0 for number in heard[1:-1])
    before = len(listener.told(Pull))
    listener.publish(SHARED_DOWN, _chunk(0))
    assert len(listener.told(Pull)) == before
    assert listener.daemon._transport._topics.keys() == set(Topics("fed").device_subscribes("d"))


def test_what_is_heard_is_said_after_eight_chunks_that_were_not_needed(listener: World) -> None:
    """The coordinator waits for it, although this device wants nothing."""
    listener.publish(SHARED_DOWN, _chunk(0))
    before = len(listener.told(Pull))
    for _ in range(8):
        listener.publish(SHARED_DOWN, _chunk(0))
    assert listener.told(Pull)[before:] == [Pull(sha256=LARGE_PART.sha256, ranges=(), heard=1)]


def test_chunks_on_the_shared_topic_that_are_not_wanted_are_ignored(
    listener: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another blob, behind the end, no chunk at all, empty: not even a line of log; a damaged one is dropped."""
    foreign = make_chunk(transfer_id("ab" * 32), 0, b"x")
    for payload in (foreign, make_chunk(transfer_id(LARGE_PART.sha256), 20, b"x"), b"FC", b"", b"x" * 1000):
        listener.publish(SHARED_DOWN, payload)
    assert "dropped" not in caplog.text
    damaged = bytearray(_chunk(0))
    damaged[-1] ^= 1
    listener.publish(SHARED_DOWN, bytes(damaged))
    assert "chunk checksum differs" in caplog.text


@pytest.mark.parametrize("how", ["told", "cancelled"])
def test_a_listener_leaves_when_it_is_told_or_has_nothing_to_fetch(listener: World, how: str) -> None:
    """It says so, and hears nothing more there."""
    told = Share(sha256=LARGE_PART.sha256, listen=False)
    listener.say(told if how == "told" else Cancel(lease=WORK.lease))
    assert listener.told(Pull)[2:] == [Pull(sha256=LARGE_PART.sha256, ranges=())]
    listener.publish(SHARED_DOWN, _chunk(0))
    assert len(listener.told(Pull)) == 3
    listener.say(told)
    assert listener.told(Pull)[3:] == [Pull(sha256=LARGE_PART.sha256, ranges=())]  # the first word may be lost


def test_a_new_connection_does_not_listen(listener: World) -> None:
    """It asks again on its own topic, until it is invited again."""
    assert listener.daemon is not None
    listener.daemon._transport.drop()
    listener.turn()
    listener.welcome()
    assert listener.told(Pull)[2:] == [Pull(sha256=LARGE_PART.sha256, ranges=((0, 4),))]
    listener.say(Share(sha256=LARGE_PART.sha256, listen=True))
    assert listener.told(Pull)[3:] == [Pull(sha256=LARGE_PART.sha256, ranges=(), heard=0)]


def _finished(folder: Path) -> None:
    work = folder / "work" / WORK.lease
    work.mkdir(parents=True)
    (work / "update.bin").write_bytes(b"abc")
    (work / "update.json").write_text(json.dumps({"sha256": UPDATE.sha256, "length": 3, "num_samples": 1}))


def test_an_update_that_is_gone_after_a_restart_is_trained_again(world: World) -> None:
    """The state says finished, the folder is not there: as after a power cut."""
    _leave(world.folder, WORK, UPDATE)
    world.start()
    world.welcome()
    assert world.saved() == Saved(assign=WORK, attempts=1, highest=(1, 1))
    assert world.told(Offer) == []
    assert len(world.told(Pull)) == 1


def test_an_update_that_is_gone_when_it_is_asked_for_is_trained_again(world: World) -> None:
    """A grant must not end the daemon again and again."""
    _leave(world.folder, WORK, UPDATE)
    _finished(world.folder)
    world.start()
    world.welcome()
    assert len(world.told(Offer)) == 1
    (world.folder / "work" / WORK.lease / "update.bin").unlink()
    world.say(Grant(lease=WORK.lease, sha256=UPDATE.sha256, ranges=((0, 1),)))
    assert world.saved().finished is None
    assert len(world.told(Pull)) == 1


def test_the_state_of_methods_goes_when_another_run_begins(world: World) -> None:
    """It stays between the rounds of its own run, and while the device is idle."""
    for run in ("r-0", "r-1"):
        (world.folder / "method-state" / run).mkdir(parents=True)
        (world.folder / "method-state" / run / "current").touch()
    world.start()
    world.welcome()
    assert len(list((world.folder / "method-state").iterdir())) == 2
    world.say(WORK)
    assert [entry.name for entry in (world.folder / "method-state").iterdir()] == ["r-1"]


# a method that adds an x to its state in every round
KEEPING = f"""
import json, pathlib, sys
here = pathlib.Path(sys.argv[1])
kept = pathlib.Path(json.loads((here / "order.json").read_text())["method_state"])
before = (kept / "current").read_text() if (kept / "current").exists() else ""
(kept / "next").write_text(before + "x")
(here / "update.bin").write_bytes(b"abc")
(here / "update.json").write_text(json.dumps({{"sha256": "{UPDATE.sha256}", "length": 3, "num_samples": 1}}))
"""


def test_the_state_of_a_method_counts_exactly_if_its_update_does(world: World) -> None:
    """Updates 1 and 2 are received, and their rounds abandoned; 3 goes into a model, 4 not, 5 does.

    The worker of 1, 2 and 3 begins with nothing, that of 4 and 5 with one x, that of 6 with two.
    """
    world.worker_code = KEEPING
    daemon = world.start()
    world.welcome()
    folder, begun = world.folder / "method-state/r-1", []
    for issue, counted in enumerate((None, None, None, "lease-3", "lease-3", "lease-5"), start=1):
        world.say(assign(issue, parts=(), counted=counted))
        world.worker_ends()
        begun.append(len((folder / "next").read_text()) - 1)
        world.say(Receipt(lease=f"lease-{issue}", sha256=UPDATE.sha256, status="accepted", code="ok"))
        assert world.saved().assign is None
        if issue in (2, 3):
            daemon._shut_down()
            daemon = world.start()
            world.welcome()
    assert begun == [0, 0, 0, 1, 1, 2]


def test_the_state_of_a_method_waits_while_its_update_is_in_hand(world: World) -> None:
    """The client died after the receipt, before it forgot the lease: the receipt comes again, the state is there."""
    _leave(world.folder, WORK, UPDATE)
    _finished(world.folder)
    folder = world.folder / "method-state" / WORK.run
    folder.mkdir(parents=True)
    (folder / f"stored-{WORK.lease}").touch()
    world.start()
    world.welcome()
    world.say(Receipt(lease=WORK.lease, sha256=UPDATE.sha256, status="accepted", code="ok"))
    assert [entry.name for entry in folder.iterdir()] == [f"stored-{WORK.lease}"]


def test_a_lease_that_was_lost_with_the_state_is_taken_again(world: World) -> None:
    """The coordinator offers it again; to decline it as an old one would lose the round."""
    _leave(world.folder, WORK)
    (world.folder / "state.json").write_bytes(b"\0" * 100)
    world.start()
    world.welcome()
    world.say(WORK)
    assert world.saved().assign == WORK


def test_a_device_that_waits_for_its_welcome_says_hello_when_the_coordinator_comes(world: World) -> None:
    """Also the first time that it hears of it; but not twice in a row, and not when it is in."""
    daemon = world.start()
    world.announce()
    assert len(world.told(Hello)) == 1  # said a moment ago
    daemon._session._hello_tries = 9  # it has tried for minutes
    world.announce()
    assert len(world.told(Hello)) == 2
    world.welcome()
    world.announce()
    assert len(world.told(Hello)) == 2


def _joined(folder: Path, broker: str, ca: str | None) -> list[str]:
    """The arguments of a script that runs a client: its bundle and its state directory, with work in hand."""
    fields = {"federation": "fed", "device": "d", "brokers": [broker], "password": "p" * 20, "key": KEY, "ca": ca}
    bundle = from_map(identity.Bundle, fields)
    identity.write_bundle(folder / "d.join", bundle)
    identity.join(folder / "state", bundle)
    _leave(folder / "state", assign(parts=()))
    return [str(folder / "d.join"), str(folder / "state")]


def _ends(process: subprocess.Popen[bytes], ready: Callable[[], object]) -> int:
    try:
        ready()
        process.terminate()
        return process.wait(10)
    finally:
        process.kill()
        process.wait()


_STUBBORN = """
import sys
from pathlib import Path
from edge_client.client import connection, daemon, identity
from edge_client.config.files import DeviceFile, LimitsSection

bundle = identity.read_bundle(Path(sys.argv[1]))
daemon.run_daemon(
    bundle=bundle,
    device_file=DeviceFile(limits=LimitsSection(memory=10**9)),
    state_dir=Path(sys.argv[2]),
    connect=lambda on_event, boot: connection.connect(bundle, on_event, boot),
    worker_command=(sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"),
)
"""


def test_sigterm_ends_a_client_whose_broker_does_not_answer_tls_and_whose_worker_does_not_end(tmp_path: Path) -> None:
    """The silent listener takes five seconds and the worker five, at the same time; a supervisor gives ten in all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        ca = ensure_pki(tmp_path / "pki", ["127.0.0.1"]).ca_pem
        arguments = _joined(tmp_path, f"mqtts://127.0.0.1:{listener.getsockname()[1]}", ca)
        accepted: list[socket.socket] = []
        process = subprocess.Popen([sys.executable, "-c", _STUBBORN, *arguments])
        assert _ends(process, lambda: accepted.append(listener.accept()[0])) == 0
        accepted[0].close()


_STUCK = """
import signal, sys, time
from pathlib import Path
from edge_client.client import daemon, identity
from edge_client.config.files import DeviceFile, LimitsSection

class Stuck:
    queued_bytes = 0
    def connect(self): pass
    def subscribe(self, topics): pass
    def unsubscribe(self, topics): pass
    def wake(self): pass
    def poll(self, timeout_s, extra_fds=()):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the signal ends no call of this thread
        print("stuck", flush=True)
        time.sleep(60)

daemon._LAST_RESORT_S = 0.5
bundle = identity.read_bundle(Path(sys.argv[1]))
file = DeviceFile(limits=LimitsSection(memory=10**9))
daemon.run_daemon(bundle=bundle, device_file=file, state_dir=Path(sys.argv[2]), connect=lambda *_: Stuck())
"""


def test_sigterm_ends_a_client_that_is_stuck_in_a_call(tmp_path: Path) -> None:
    """As in a name server's silence, which no signal ends; the exit code is that of an orderly end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, *_joined(tmp_path, "mqtt://h", None)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert _ends(process, out.readline) == 0


def test_a_worker_is_told_to_end_before_the_loop_is(world: World) -> None:
    """The loop may wait for the network; the worker's grace period begins at the signal."""
    _leave(world.folder, assign(parts=()))
    daemon = world.start()
    worker = daemon._worker
    assert worker is not None
    daemon.request_stop()
    assert worker._process.wait(10) == -15
    daemon._turn()  # its end is not taken for a crash
    assert daemon._session.state == "working"


def test_what_a_worker_died_of_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Its owner reads the log of the client; the work directory is gone by then. One line, whatever the text."""
    _leave(world.folder, assign(parts=()))
    daemon = world.start()
    assert daemon._worker is not None
    text = json.dumps({"code": "x", "detail": "two\nlines \x1b[31m"})
    (world.folder / "work" / "lease-1" / "error.json").write_text(text)
    daemon._worker._process.kill()
    daemon._worker._process.wait(10)
    world.turn()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the worker failed: crashed: two lines ?[31m"
    ]


def test_a_device_that_was_removed_says_so_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Refused three times after it was let in: one line; let in and refused again: one more."""
    daemon = world.start()
    world.welcome()
    refused = Disconnected(reason="h:1 does not accept the user or the password", code="credentials")
    for _ in range(3):
        daemon._on_transport(refused)
    assert caplog.text.count("does not let device 'd' in any more") == 1
    daemon._on_transport(Connected())
    world.turn()
    world.welcome()
    daemon._on_transport(refused)
    assert caplog.text.count("does not let device 'd' in any more") == 2
    assert caplog.text.count("not connected") == 0


def test_a_silent_coordinator_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker of somebody else goes on to let in a device that the coordinator has forgotten."""
    monkeypatch.setattr(daemon_module, "_SILENCE_S", 0.0)
    daemon = world.start()
    for _ in range(3):
        daemon._tell_silence()
    assert caplog.text.count("the coordinator does not answer") == 1


def test_the_status_follows_the_daemon(world: World) -> None:
    """Connected, let in, a lease with its run and round, its receipt, an error, the end."""
    daemon = world.start()
    assert daemon._snapshot().link == "connected"
    world.welcome()
    assert (daemon._snapshot().link, daemon._snapshot().state) == ("let_in", "idle")
    world.say(WORK)
    told = daemon._snapshot()
    assert (told.state, told.lease, told.run, told.round, told.phase) == ("fetching", "lease-1", "r-1", 1, "fetch")
    daemon._on_transport(Disconnected(reason="gone", code="network"))
    assert daemon._snapshot().link == "connecting"
    assert daemon._snapshot().error is not None
    daemon._shut_down()
    written = read_status(world.folder / "status.json")
    assert written is not None
    assert (written.link, written.run) == ("stopped", "r-1")


def test_every_hello_has_the_hashes_of_the_tasks_as_they_are_then(world: World) -> None:
    """A task that is replaced while the daemon runs, and one that is not there."""
    path = world.folder / "defects.py"
    path.write_bytes(b"first")
    world.device_table["tasks"] = {"defects": f"{path}:task", "gone": "/no/such/file.py:task"}
    daemon = world.start()
    path.write_bytes(b"second")
    daemon._session._hello_tries = 9
    world.announce()
    assert [hello.tasks for hello in world.told(Hello) if isinstance(hello, Hello)] == [
        {"defects": hashlib.sha256(b"first").hexdigest()},
        {"defects": hashlib.sha256(b"second").hexdigest()},
    ]


def test_a_task_that_is_replaced_is_said_as_soon_as_the_device_is_idle(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator would leave the device out for ever; a lease in hand is not disturbed."""
    monkeypatch.setattr("edge_client.client.status._EVERY_S", 0.0)
    path = world.folder / "defects.py"
    path.write_bytes(b"first")
    world.device_table["tasks"] = {"defects": f"{path}:task"}
    world.start()
    world.welcome()
    world.say(WORK)
    path.write_bytes(b"mended")
    world.turn()
    assert len(world.told(Hello)) == 1
    world.say(Cancel(lease=WORK.lease))
    world.turn()
    assert [hello.tasks for hello in world.told(Hello) if isinstance(hello, Hello)] == [
        {"defects": hashlib.sha256(b"first").hexdigest()},
        {"defects": hashlib.sha256(b"mended").hexdigest()},
    ]


def test_work_that_comes_right_behind_the_welcome_is_taken(world: World) -> None:
    """Both are read at once: the assignment belongs to the session that the welcome begins."""
    daemon = world.start()
    hello = world.told(Hello)[-1]
    assert isinstance(hello, Hello)
    welcome = Welcome(boot=hello.boot, hello=hello.hello, session="s", epoch=1, heartbeat_s=60.0)
    for message, session in ((welcome, ""), (WORK, "s")):
        world.send(message, session)
    world.turn()
    assert daemon._session.assign == WORK


TRIAL = Trial(key=digest("model"), budget_bytes=10**9, plan=replace(PLAN, training_bytes=500))
EXCEEDED = Ceiling(key=digest("model"), training_bytes=500, budget_bytes=10**9)
# over its budget, unless it is told that 500 bytes are too much
TRIES = f"""
import json, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
order = json.loads((here / "order.json").read_text())
if min([order["ceiling_bytes"] or 501, *order["ceilings"].values()]) > 500:
    (here / "plan.json").write_text({json.dumps(to_map(TRIAL))!r})
    sys.exit(75)
time.sleep(60)
"""


def test_a_worker_over_its_budget_is_followed_by_one_with_a_smaller_plan_also_in_later_work(world: World) -> None:
    """One failure in the lease; what was too much is on disk before the next one starts; the next lease knows it."""
    world.worker_code = TRIES
    world.start()
    world.welcome()
    world.say(assign(parts=()))
    world.worker_ends()
    order, saved = world.order(), world.saved()
    assert (order.ceiling_bytes, order.replans, order.ceilings) == (500, 1, {digest("model"): 500})
    assert (saved.attempts, saved.replans, saved.ceilings) == (1, 1, (EXCEEDED,))
    assert world.told(Decline) == []
    world.say(assign(2, run="r-2", parts=()))
    order, saved = world.order("lease-2"), world.saved()
    assert (order.ceiling_bytes, order.replans, order.ceilings) == (None, 0, {digest("model"): 500})
    assert (saved.replans, saved.ceilings) == (0, (EXCEEDED,))


def test_a_device_with_more_memory_than_then_forgets_what_was_too_much(world: World) -> None:
    """1 GB then, 2 GB now."""
    spool = Spool(world.folder / "state.json")
    spool.remember(EXCEEDED)
    spool.save(assign(parts=()), None, 1)
    world.device_table = {"limits": {"memory": "2GB"}}
    world.start()
    assert world.order().ceilings == {}


def test_a_worker_that_went_over_its_budget_before_the_daemon_was_killed_is_not_repeated(world: World) -> None:
    """It left what it tried and how that ended; the next one starts with the smaller plan at once."""
    work = world.folder / "work/lease-1"
    work.mkdir(parents=True)
    _leave(world.folder, assign(parts=()))
    write_trial(work, TRIAL)
    (work / "error.json").write_text('{"code": "over_budget", "detail": "3 GB"}')
    world.start()
    assert (world.order().ceiling_bytes, world.order().replans) == (500, 1)
    assert (world.saved().attempts, world.saved().replans) == (1, 1)
    assert not (work / "plan.json").exists()


def _meminfo(root: Path, available_mb: int) -> None:
    (root / "proc").mkdir(parents=True, exist_ok=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1000000 kB\nMemAvailable: {available_mb * 1000} kB\n")


def _told(world: World) -> int | None:
    """The budget that the worker was told after its start; the daemon looks again."""
    assert world.daemon is not None
    world.daemon._look_at = 0.0
    world.turn()
    note = world.folder / "work/lease-1/budget.json"
    return int(json.loads(note.read_text())["budget_bytes"]) if note.exists() else None


def test_a_worker_is_told_when_others_take_its_memory(world: World) -> None:
    """0.8 x (728.064 - 128) = 480.05 MB; 30 MB less is noise, 102.4 MB less is not, and neither is what follows it.

    The worker is a Python that sleeps: up to 30 MB of its own are added.
    """
    world.device_table, world.root = {}, world.folder / "root"
    _meminfo(world.root, 711)
    _leave(world.folder, assign(parts=()))
    world.start()
    assert world.order().budget_bytes == 480_051_200
    _meminfo(world.root, 682)
    assert _told(world) is None
    _meminfo(world.root, 572)
    told = _told(world)
    assert told is not None
    assert 0 <= told - 366_182_400 < 24_000_000  # 0.8 x (585.728 - 128)
    _meminfo(world.root, 711)
    assert _told(world) == told  # it may be needed again: only the next worker gets more


def test_a_device_that_has_little_memory_for_a_while_is_asked_again(world: World) -> None:
    """Nothing fits what others left: that is no lasting reason. With its usual memory it is."""
    world.worker_code = (
        "import pathlib, sys\nhere = pathlib.Path(sys.argv[1])\n"
        '(here / \'error.json\').write_text(\'{"code": "nothing_fits", "detail": "too large"}\')\nsys.exit(76)'
    )
    world.device_table, world.root = {}, world.folder / "root"
    _meminfo(world.root, 711)
    world.start()
    world.welcome()
    _meminfo(world.root, 400)
    world.say(assign(parts=()))
    assert world.order().budget_bytes == 225_280_000  # 0.8 x (409.6 - 128)
    world.worker_ends()
    _meminfo(world.root, 711)
    world.say(assign(2, parts=()))
    assert world.order("lease-2").budget_bytes == 480_051_200
    world.worker_ends()
    first, second = world.told(Decline)
    assert isinstance(first, Decline)
    assert isinstance(second, Decline)
    assert (first.code, second.code) == ("low_memory", "nothing_fits")
    assert first.detail == "too large; other programs use the memory: usually the budget is 480 MB"


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
OWN_DOWN = "fl/v1/fed/dev/d/down"


def _model_chunk(index: int) -> bytes:
    return make_chunk(transfer_id(DEPLOY.sha256), index, MODEL[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


@pytest.fixture
def deployed_to(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A device that is asked to use a model; its self-test is a program that the test ends."""
    monkeypatch.setattr("edge_client.client.deploying.has_runtime", lambda: True)
    monkeypatch.setattr("edge_client.client.deploying.COMMAND", (sys.executable, "-c", SLEEPS))
    world.start()
    world.welcome()
    world.say(DEPLOY)
    return world


def _states(world: World) -> list[str]:
    return [said.state for said in world.told(Deployed) if isinstance(said, Deployed)]


def _let_test_pass(world: World) -> None:
    """The program in its place says that all is well."""
    assert world.daemon is not None
    assert world.daemon._deploying is not None
    test = world.daemon._deploying._test
    assert test is not None
    test._process.kill()
    test._process.wait()
    test._process.returncode = 0
    world.turn()


def test_a_deployed_model_is_pulled_tested_and_put_into_its_place(deployed_to: World) -> None:
    """The hello says that this client knows how; without a lease the device is idle all the time."""
    (hello,) = deployed_to.told(Hello)
    assert isinstance(hello, Hello)
    assert hello.deploys
    assert deployed_to.told(Pull) == [Pull(sha256=DEPLOY.sha256, ranges=((0, 2),))]
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
    deployed_to.daemon._shut_down()
    deployed_to.heard.clear()
    deployed_to.start()
    deployed_to.welcome()
    assert deployed_to.told(Pull) == [Pull(sha256=DEPLOY.sha256, ranges=((0, 1),))]


def test_a_disk_that_is_full_while_a_model_is_fetched_does_not_end_other_work(
    deployed_to: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model waits, the client works on; a minute later the missing chunk is asked for."""
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:deployed.part.chunk:2")])
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    said = deployed_to.told(Deployed)[-1]
    assert isinstance(said, Deployed)
    assert (said.state, said.code) == ("fetching", "disk_full")
    assert said.detail.startswith("cannot store a part: No space left on device")
    before = len(deployed_to.told(Pull))
    deployed_to.say(WORK)
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert deployed_to.told(Pull)[before:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    assert deployed_to.daemon is not None
    assert deployed_to.daemon._deploying is not None
    deployed_to.daemon._deploying._again_at = 0.0  # a minute is over
    deployed_to.turn()
    deployed_to.turn()
    assert deployed_to.told(Pull)[-1] == Pull(sha256=DEPLOY.sha256, ranges=((1, 1),))


def test_a_client_that_starts_over_has_not_failed_a_self_test(deployed_to: World) -> None:
    """The disk is full for other work: the test that runs is stopped, and counts for nothing."""
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    daemon = deployed_to.daemon
    assert daemon is not None
    assert daemon._deploying is not None
    assert daemon._deploying.is_testing
    daemon._shut_down()  # as `run` does, whatever ends it
    assert json.loads((deployed_to.folder / "deployed/record.json").read_text())["attempts"] == 0


def test_a_newer_model_takes_the_place_of_one_that_is_being_fetched(deployed_to: World) -> None:
    """The rest of the old one is not asked for any more, and nothing of it stays; the same one again goes on."""
    deployed_to.publish(OWN_DOWN, _model_chunk(0))
    deployed_to.say(replace(DEPLOY, deployment="deployment-2"))
    assert len(deployed_to.told(Pull)) == 1
    deployed_to.say(replace(DEPLOY, deployment="deployment-3", sha256=PART.sha256, length=PART.length))
    assert deployed_to.told(Pull)[1:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    deployed_to.publish(OWN_DOWN, _model_chunk(1))
    assert [entry.name for entry in (deployed_to.folder / "tmp").glob(f"{DEPLOY.sha256}*")] == []
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    _let_test_pass(deployed_to)
    assert (deployed_to.folder / "deployed/current.onnx").read_bytes() == CONTENT


def test_a_model_that_is_cancelled_is_not_fetched_any_more(deployed_to: World) -> None:
    """Nor does it keep a lease's part waiting."""
    deployed_to.say(Cancel(lease=DEPLOY.deployment))
    before = len(deployed_to.told(Pull))
    deployed_to.say(WORK)
    assert deployed_to.told(Pull)[before:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert len(deployed_to.told(Pull)) == before + 1


def test_work_is_fetched_before_a_model(deployed_to: World) -> None:
    """A round has a deadline: its part is asked for first, the model's rest when that is here."""
    before = len(deployed_to.told(Pull))
    deployed_to.say(WORK)
    assert deployed_to.told(Pull)[before:] == [Pull(sha256=PART.sha256, ranges=((0, 1),))]
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert deployed_to.told(Pull)[-1] == Pull(sha256=DEPLOY.sha256, ranges=((0, 2),))


def test_a_worker_waits_for_a_self_test_and_a_self_test_for_a_worker(deployed_to: World) -> None:
    """Never both: the device's memory is for one of them."""
    daemon = deployed_to.daemon
    assert daemon is not None
    assert daemon._deploying is not None
    for index in (0, 1):
        deployed_to.publish(OWN_DOWN, _model_chunk(index))
    assert daemon._deploying.is_testing
    deployed_to.say(WORK)
    deployed_to.publish(OWN_DOWN, make_chunk(transfer_id(PART.sha256), 0, CONTENT))
    assert daemon._worker is None
    _let_test_pass(deployed_to)
    assert daemon._worker is not None
    deployed_to.say(replace(DEPLOY, deployment="deployment-2", sha256=PART.sha256, length=PART.length))
    assert not daemon._deploying.is_testing
    deployed_to.say(Cancel(lease=WORK.lease))
    if daemon._worker is not None:  # it may have been quick to end
        deployed_to.worker_ends()
    assert daemon._deploying.is_testing


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
    assert daemon._worker is None


def test_an_owner_who_forbids_it_gets_no_model(world: World) -> None:
    """`limits.deploy = false`: one word to the coordinator, nothing is pulled, nothing is kept."""
    world.device_table["limits"] = {"memory": "1GB", "deploy": False}
    world.start()
    world.welcome()
    world.say(DEPLOY)
    (said,) = world.told(Deployed)
    assert isinstance(said, Deployed)
    assert (said.state, said.code) == ("refused", "forbidden")
    assert world.told(Pull) == []
    assert not (world.folder / "deployed").exists()


def test_a_device_without_a_deployment_does_not_load_what_serves_it() -> None:
    """The daemon of a device that only trains stays as small as it was."""
    code = "import sys, edge_client.cli.main, edge_client.client.daemon; "
    code += "print([m for m in sys.modules if 'deploy' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
