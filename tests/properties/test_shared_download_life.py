"""Devices of any speed over a lossy broker, on a fake clock: all get the blob, and none has too much waiting for it."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.fleet.downloads import Downloads
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import CHUNK_BYTES, parse_chunk, peek_chunk
from edge_client.wire.flow_control import SHARED_WINDOW_CHUNKS
from edge_client.wire.messages import Share
from edge_client.wire.reassembly import Reassembly

NUM_CHUNKS = 100
LENGTH = NUM_CHUNKS * CHUNK_BYTES - 1
STEP_S = 0.05
MAX_ASKED = 18  # chunks that a device may have asked for


class _Device:
    """The client's rules for one download, and what the broker holds for it."""

    def __init__(self, sha256: str, rng: random.Random, loss: float) -> None:
        self.chunks = Reassembly(sha256=sha256, length=LENGTH, max_window_bytes=2 << 20)
        self.per_step = rng.choice([0.1, 0.3, 1.0, 5.0, 50.0])  # 2 to 1,000 chunks a second
        self.begins = rng.choice([0.0, 0.0, 0.0, 0.3, 3.0])
        self.inbox: deque[tuple[bool, bytes | Share]] = deque()  # (on the shared topic, what)
        self.most_waiting = 0
        self._rng, self._loss = rng, loss
        self._budget = 0.0

    def deliver(self, shared: bool, what: bytes | Share) -> None:
        if self._rng.random() >= self._loss:
            self.inbox.append((shared, what))
            self.most_waiting = max(self.most_waiting, len(self.inbox))

    def read(self, now: float) -> Iterator[tuple[tuple[tuple[int, int], ...], int | None]]:
        """Take what its link carries in a step; yields its pulls."""
        self._budget = min(self._budget + self.per_step, max(1.0, self.per_step))
        while self.inbox and self._budget >= 1.0:
            self._budget -= 1.0
            shared, what = self.inbox.popleft()
            if isinstance(what, Share):
                if what.listen and not self.chunks.complete:
                    self.chunks.listen()
                else:
                    self.chunks.unlisten()
                    yield (), None
            else:
                place = peek_chunk(what)
                assert place is not None
                if not shared or self.chunks.note_shared_chunk(place[1]):
                    self._take(what, now)
                if self.chunks.complete and self.chunks.heard is not None:
                    self.chunks.unlisten()
                    yield (), None
        ranges = None if self.chunks.complete else self.chunks.pull(now)
        if ranges is not None:
            yield ranges, self.chunks.heard

    def _take(self, payload: bytes, now: float) -> None:
        chunk = parse_chunk(payload)
        if not self.chunks.has(chunk.index):
            self.chunks.accept(chunk, now)


class _World:
    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        data = self.rng.randbytes(LENGTH)
        self.sha256 = hashlib.sha256(data).hexdigest()
        blobs = BlobStore(folder / "blobs", folder / "tmp")
        blobs.write(data, self.sha256, point="test")
        self.sender = Downloads(blobs)
        self.loss = self.rng.choice([0.0, 0.0, 0.01, 0.05])
        num = self.rng.randrange(2, 7)
        self.devices = {f"d{i}": _Device(self.sha256, self.rng, self.loss) for i in range(num)}
        self.num_shared = 0

    def step(self, now: float) -> None:
        for name, device in self.devices.items():
            for ranges, heard in device.read(now) if now >= device.begins else ():
                if self.rng.random() >= self.loss:
                    share = self.sender.ask(name, self.sha256, LENGTH, ranges, heard=heard, now=now)
                    if share is not None:
                        device.deliver(False, share)
        for name, share in self.sender.tick(frozenset(self.devices), now):
            self.devices[name].deliver(False, share)
        self.sender.send(lambda: 0, lambda name, chunk: self.devices[name].deliver(False, chunk), self._share, now)

    def _share(self, names: tuple[str, ...], chunk: bytes) -> None:
        self.num_shared += 1
        for device in self.devices.values():
            if device.chunks.heard is not None:
                device.deliver(True, chunk)


@pytest.mark.parametrize("seed", range(12))
def test_all_devices_get_the_blob_and_none_is_flooded(tmp_path: Path, seed: int) -> None:
    """The broker holds at most a window, two requests, and the words of the coordinator; 64 MB would be 524 chunks."""
    world = _World(tmp_path, seed)
    now, fastest = 0.0, None
    while not all(device.chunks.complete for device in world.devices.values()):
        now += STEP_S
        world.step(now)
        assert now < 600.0, [device.chunks.num_missing for device in world.devices.values()]
        if fastest is None and any(device.chunks.complete for device in world.devices.values()):
            fastest = now
    world.sender.close()
    for device in world.devices.values():
        assert device.most_waiting <= SHARED_WINDOW_CHUNKS + 2 * MAX_ASKED + 20
    quick = [device for device in world.devices.values() if device.per_step == 50.0 and device.begins == 0.0]
    if quick and world.loss == 0.0:  # alone it needs a second; slow ones may cost two pauses of two seconds
        assert fastest is not None
        assert fastest < 10.0
