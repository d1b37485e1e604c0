"""Downloads of many devices in turns, and once for several of them, from real files."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.fleet.downloads import Downloads
from edge_client.errors import PayloadError
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import CHUNK_BYTES, chunk_length, parse_chunk
from edge_client.wire.flow_control import SHARED_WINDOW_CHUNKS
from edge_client.wire.messages import Share


def _data(seed: int, length: int = 3 * CHUNK_BYTES + 17) -> bytes:
    return random.Random(seed).randbytes(length)


def _to_nobody(devices: tuple[str, ...], payload: bytes) -> None:
    pytest.fail(f"shared with {devices}")


@pytest.fixture
def downloads(tmp_path: Path) -> Iterator[tuple[Downloads, str, bytes]]:
    blobs = BlobStore(tmp_path / "blobs", tmp_path / "tmp")
    data = _data(20, 30 * CHUNK_BYTES + 5)
    sha256 = hashlib.sha256(data).hexdigest()
    blobs.write(data, sha256, point="test")
    made = Downloads(blobs)
    yield made, sha256, data
    made.close()


def test_devices_are_served_in_turns(downloads: tuple[Downloads, str, bytes]) -> None:
    """One chunk each; a and b ask for three, c for one."""
    sender, sha256, data = downloads
    for device, count in (("a", 3), ("b", 3), ("c", 1)):
        sender.ask(device, sha256, len(data), ((0, count),))
    sent: list[tuple[str, int]] = []
    sender.send(lambda: 0, lambda device, payload: sent.append((device, parse_chunk(payload).index)), _to_nobody)
    assert sent == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert not sender.busy


def test_a_chunk_is_the_blobs_bytes(downloads: tuple[Downloads, str, bytes]) -> None:
    """The last one is short."""
    sender, sha256, data = downloads
    sender.ask("a", sha256, len(data), ((30, 1),))
    sent: list[bytes] = []
    sender.send(lambda: 0, lambda _, payload: sent.append(payload), _to_nobody)
    assert bytes(parse_chunk(sent[0]).body) == data[-5:]
    assert chunk_length(len(data), 30) == 5


def test_a_device_has_at_most_two_mebibytes_waiting(downloads: tuple[Downloads, str, bytes]) -> None:
    """18 chunks reach 2 MiB; repeated and overlapping requests do not queue a chunk twice."""
    sender, sha256, data = downloads
    for ranges in (((0, 4),), ((2, 4),), ((0, 31),), ((0, 31),)):
        sender.ask("a", sha256, len(data), ranges)
    sent: list[int] = []
    sender.send(lambda: 0, lambda _, payload: sent.append(parse_chunk(payload).index), _to_nobody)
    assert sent == list(range(18))


def test_nothing_is_sent_while_the_transport_is_full(downloads: tuple[Downloads, str, bytes]) -> None:
    """2 MiB wait there already."""
    sender, sha256, data = downloads
    sender.ask("a", sha256, len(data), ((0, 1),))
    sender.send(lambda: 2 << 20, lambda *_: pytest.fail("sent"), _to_nobody)
    assert sender.busy
    sender.forget("a")
    assert not sender.busy


def test_a_request_outside_the_blob_is_refused(downloads: tuple[Downloads, str, bytes]) -> None:
    """Behind the end, empty, and huge."""
    sender, sha256, data = downloads
    for ranges in (((31, 1),), ((0, 0),), ((0, 2**52),)):
        with pytest.raises(PayloadError, match="range"):
            sender.ask("a", sha256, len(data), ranges)


def test_a_blob_that_is_gone_ends_its_requests(downloads: tuple[Downloads, str, bytes]) -> None:
    """An old model was cleaned up between the request and its turn."""
    sender, sha256, data = downloads
    gone = hashlib.sha256(b"gone").hexdigest()
    sender.ask("a", gone, len(data), ((0, 3),))
    sender.ask("b", sha256, len(data), ((0, 1),))
    sent: list[str] = []
    sender.send(lambda: 0, lambda device, _: sent.append(device), _to_nobody)
    assert sent == ["b"]
    assert not sender.busy


class Fleet:
    """Devices that fetch one blob: what the sender publishes to each of them, and to all."""

    def __init__(self, sender: Downloads, sha256: str, length: int) -> None:
        self.sender, self.sha256, self.length = sender, sha256, length
        self.own: list[tuple[str, int]] = []
        self.shared: list[tuple[tuple[str, ...], int]] = []

    def ask(self, device: str, *ranges: tuple[int, int], heard: int | None = None, now: float = 0.0) -> Share | None:
        return self.sender.ask(device, self.sha256, self.length, ranges, heard=heard, now=now)

    def send(self, now: float = 0.0) -> None:
        self.sender.send(
            lambda: 0,
            lambda device, payload: self.own.append((device, parse_chunk(payload).index)),
            lambda devices, payload: self.shared.append((devices, parse_chunk(payload).index)),
            now,
        )


@pytest.fixture
def fleet(downloads: tuple[Downloads, str, bytes]) -> Fleet:
    sender, sha256, data = downloads
    return Fleet(sender, sha256, len(data))


def test_devices_that_fetch_the_same_blob_and_keep_up_are_invited_to_share(fleet: Fleet) -> None:
    """a alone is not; b at its second request is, and so is a then; c, whose requests are 2 s apart, is not."""
    invitation = Share(sha256=fleet.sha256, listen=True)
    assert fleet.ask("a", (0, 4)) is None
    assert fleet.ask("a", (4, 4), now=0.1) is None
    assert fleet.ask("b", (0, 4), now=0.2) is None
    assert fleet.ask("c", (0, 4), now=0.2) is None
    assert fleet.ask("b", (4, 4), now=0.3) == invitation
    assert fleet.ask("b", (8, 4), now=0.4) is None  # just invited
    assert fleet.ask("a", (8, 4), now=0.5) == invitation
    assert fleet.ask("c", (4, 4), now=2.3) is None


def test_nobody_is_invited_where_nothing_is_shared(tmp_path: Path) -> None:
    """In memory one publication for all would save nothing."""
    sender = Downloads(BlobStore(tmp_path / "blobs", tmp_path / "tmp"), shares=False)
    for now in (0.0, 0.1):
        for device in ("a", "b"):
            assert sender.ask(device, "0" * 64, 99 * CHUNK_BYTES, ((0, 4),), now=now) is None


def test_a_small_blob_is_not_shared(tmp_path: Path) -> None:
    """Fifteen chunks: it is through before anybody listens."""
    sender = Downloads(BlobStore(tmp_path / "blobs", tmp_path / "tmp"))
    for now in (0.0, 0.1):
        for device in ("a", "b"):
            assert sender.ask(device, "0" * 64, 15 * CHUNK_BYTES, ((0, 4),), now=now) is None


def test_a_chunk_that_listeners_ask_for_is_published_once(fleet: Fleet) -> None:
    """a and b listen and ask for 0-3, a also for 4; c does not listen and gets its own."""
    fleet.ask("a", (0, 5), heard=0)
    fleet.ask("b", (0, 4), heard=0)
    fleet.ask("c", (0, 2))
    fleet.send()
    assert fleet.shared == [(("a", "b"), index) for index in range(5)]
    assert fleet.own == [("c", 0), ("c", 1)]
    fleet.ask("b", (4, 2), heard=4)  # 4 is under way to it
    fleet.send()
    assert fleet.shared[5:] == [(("a", "b"), 5)]


def test_a_single_listener_is_served_on_its_own_topic(fleet: Fleet) -> None:
    """There is nobody to share with."""
    fleet.ask("a", (0, 2), heard=0)
    fleet.send()
    assert (fleet.own, fleet.shared) == ([("a", 0), ("a", 1)], [])


def test_what_one_listener_missed_it_gets_on_its_own_topic(fleet: Fleet) -> None:
    """b lost 1 and c came later: each gets alone what only it asks for; what both ask for again goes to all."""
    fleet.ask("a", (0, 4), heard=0)
    fleet.ask("b", (0, 4), heard=0)
    fleet.send()
    fleet.shared.clear()
    fleet.ask("b", (1, 1), heard=4)
    fleet.send()
    fleet.ask("c", (2, 2), heard=0)
    fleet.send()
    assert fleet.own == [("b", 1), ("c", 2), ("c", 3)]
    assert fleet.shared == []
    fleet.ask("b", (3, 1), heard=4)
    fleet.ask("c", (3, 1), heard=0)
    fleet.send()
    assert [index for _, index in fleet.shared] == [3]


def test_a_listener_without_room_holds_the_shared_topic_for_two_seconds_only(tmp_path: Path) -> None:
    """b stays silent: a window goes out and no more; after 2 s b is told to leave and a is served on its own topic."""
    blobs = BlobStore(tmp_path / "blobs", tmp_path / "tmp")
    data = _data(21, 60 * CHUNK_BYTES)
    sha256 = hashlib.sha256(data).hexdigest()
    blobs.write(data, sha256, point="test")
    sender = Downloads(blobs)
    fleet = Fleet(sender, sha256, len(data))
    fleet.ask("b", (0, 1), heard=0)
    for first in range(0, 48, 12):
        fleet.ask("a", (first, 12), heard=first)
        fleet.send()
    assert [index for _, index in fleet.shared] == list(range(SHARED_WINDOW_CHUNKS))
    assert not sender.busy  # nothing can be sent until somebody says something
    online = frozenset({"a", "b"})
    assert list(sender.tick(online, 1.9)) == []
    fleet.ask("a", heard=SHARED_WINDOW_CHUNKS, now=1.9)
    assert list(sender.tick(online, 2.0)) == [("b", Share(sha256=sha256, listen=False))]
    fleet.send(2.0)
    assert fleet.own == [("a", index) for index in range(SHARED_WINDOW_CHUNKS, 48)]
    assert fleet.ask("b", (1, 4), heard=5, now=2.1) is None  # said before it heard that it must leave
    fleet.send(2.1)
    assert fleet.own[-4:] == [("b", index) for index in range(1, 5)]
    sender.left("b")
    fleet.ask("c", (48, 2), heard=0, now=2.2)
    fleet.ask("a", (48, 2), heard=SHARED_WINDOW_CHUNKS, now=2.2)
    fleet.send(2.2)
    assert fleet.shared[SHARED_WINDOW_CHUNKS:] == [(("a", "c"), 48), (("a", "c"), 49)]
    assert fleet.ask("b", (5, 4), now=2.3) is None  # not invited again
    sender.close()


def test_a_device_that_says_hello_again_does_not_listen(fleet: Fleet) -> None:
    """Its connection is new; b alone is left, with nobody to share with."""
    fleet.ask("a", (0, 1), heard=0)
    fleet.ask("b", (0, 1), heard=0)
    fleet.sender.forget("a")
    fleet.send()
    assert (fleet.own, fleet.shared) == ([("b", 0)], [])
