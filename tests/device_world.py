"""A daemon in memory, and a coordinator that says what the test wants: for tests of the daemon and its parts."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TypeVar

from rows import assign, digest

from edge_client.client import identity
from edge_client.client.daemon import Daemon
from edge_client.client.events import Finished
from edge_client.client.spool import Saved, Spool
from edge_client.client.workers import WorkerProcess
from edge_client.config.device_file import DeviceFile
from edge_client.config.tables import parse_table
from edge_client.records import PartRef, WorkOrder, from_map
from edge_client.transport.base import Event, Received
from edge_client.transport.inproc import Hub
from edge_client.wire.messages import (
    Assign,
    Hello,
    Message,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)
from edge_client.wire.topics import Topics

KEY = digest("key")
BUNDLE = identity.Bundle(federation="fed", device="d", brokers=("mqtt://h",), password="p" * 20, key=KEY)
CONTENT = b"a part of some work"
PART = PartRef(key="run", sha256=hashlib.sha256(CONTENT).hexdigest(), length=len(CONTENT))
WORK = assign(parts=(PART,))
UPDATE = Finished(sha256=digest("u"), length=3, num_samples=1)
SLEEPS = "import time; time.sleep(60)"
OWN_DOWN = "fl/v1/fed/dev/d/down"

M = TypeVar("M")


class World:
    """A daemon, and a coordinator that welcomes it and says what the test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.device_table: dict[str, object] = {"limits": {"memory": "1GB"}}
        self.worker_code = SLEEPS
        self.template_command: tuple[str, ...] = ()
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
            template_command=self.template_command,
            root=self.root,
        )
        self.daemon = daemon
        daemon.start()
        self.turn()
        return daemon

    def turn(self) -> None:
        """A few turns of the loop: every message has its answer then."""
        assert self.daemon is not None
        for _ in range(5):
            self.daemon.turn()
            self._hub.poll()

    def worker_ends(self) -> None:
        """Wait for it, and let the daemon see it."""
        self.worker_process().wait(20)
        self.turn()

    def worker_process(self) -> WorkerProcess:
        """The worker that runs."""
        assert self.daemon is not None
        worker = self.daemon._worker._worker
        assert worker is not None
        return worker._process

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
        """The coordinator's hint that it has connected just now."""
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
        hello = self.messages(Hello)[-1]
        self.say(Welcome(boot=hello.boot, hello=hello.hello, session="s", epoch=1, heartbeat_s=60.0), session="")

    def messages(self, kind: type[M]) -> list[M]:
        """What the device said, of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def saved(self) -> Saved:
        """What a restart would find."""
        return Spool(self.folder / "state.json").load()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Received):
            sealed = open_message(event.payload, key=bytes.fromhex(KEY), context=context_up("fed", "d"))
            self.heard.append(sealed.message)


def leave(folder: Path, work: Assign, update: Finished | None = None) -> None:
    """What the process before saved."""
    Spool(folder / "state.json").save(work, update, 1)
