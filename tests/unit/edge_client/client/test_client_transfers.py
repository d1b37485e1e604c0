"""Transfers of a device: parts that arrive in pieces, twice, over the shared topic or not at all; and the update."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from device_world import CONTENT, PART, WORK, World, leave
from rows import assign

from edge_client.client.events import Finished
from edge_client.client.parts import PartsOnDisk
from edge_client.client.transfers import ClientTransfers
from edge_client.records import PartRef, to_map
from edge_client.transport.base import Event, Received
from edge_client.transport.blobs import BlobStore
from edge_client.transport.inproc import Hub
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, parse_chunk, transfer_id
from edge_client.wire.messages import (
    Cancel,
    Pull,
    Share,
)
from edge_client.wire.topics import Topics


def test_a_part_that_lies_on_disk_is_fetched_again(world: World) -> None:
    """The map says that all of it arrived before the restart; its bytes are others."""
    leave(world.folder, WORK)
    (world.folder / "tmp").mkdir()
    (world.folder / "tmp" / f"{PART.sha256}.part").write_bytes(b"x" * PART.length)
    (world.folder / "tmp" / f"{PART.sha256}.map").write_bytes(b"\1")
    world.start()
    world.welcome()
    assert world.messages(Pull) == [Pull(sha256=PART.sha256, ranges=((0, 1),))]


@pytest.mark.parametrize(("content", "pulls"), [(CONTENT, 0), (CONTENT[:-1], 1), (b"", 1)])
def test_a_blob_is_used_after_a_restart_only_if_its_hash_is_right(world: World, content: bytes, pulls: int) -> None:
    """Blobs are not synced: a power cut may cut them short under their final name."""
    leave(world.folder, WORK)
    path = world.folder / "blobs" / PART.sha256[:2] / PART.sha256
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    daemon = world.start()
    world.welcome()
    assert len(world.messages(Pull)) == pulls
    assert (daemon._worker._worker is None) == bool(pulls)


def test_two_parts_with_the_same_bytes_are_fetched_once(world: World) -> None:
    """One transfer serves both."""
    world.start()
    world.welcome()
    world.say(assign(parts=(PART, PartRef(key="model", sha256=PART.sha256, length=PART.length))))
    assert len(world.messages(Pull)) == 1


def test_an_idle_device_asks_for_nothing(world: World) -> None:
    """Cancelled while it fetched: it does not go on, not even after a new connection."""
    daemon = world.start()
    world.welcome()
    world.say(WORK)
    assert len(world.messages(Pull)) == 1
    world.say(Cancel(lease=WORK.lease))
    daemon._transport.drop()
    world.turn()
    world.welcome()
    assert len(world.messages(Pull)) == 1


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
    assert world.messages(Pull) == [Pull(sha256=LARGE_PART.sha256, ranges=((0, 4),))]  # it does not listen unasked
    world.say(Share(sha256=LARGE_PART.sha256, listen=True))
    assert world.messages(Pull)[1:] == [Pull(sha256=LARGE_PART.sha256, ranges=(), heard=0)]
    return world


def test_a_part_arrives_over_the_shared_topic(listener: World) -> None:
    """Two chunks on its own topic, the others on the shared one, once more each; then it leaves, and says so."""
    own = "fl/v1/fed/dev/d/down"
    for index in range(20):
        for _ in range(2):
            listener.publish(own if index in (3, 7) else SHARED_DOWN, _chunk(index))
    assert listener.daemon is not None
    assert listener.daemon._files.blobs.path(LARGE_PART.sha256).read_bytes() == LARGE
    heard = [pull.heard for pull in listener.messages(Pull) if isinstance(pull, Pull)]
    assert heard[-1] is None
    assert [number for number in heard[1:-1] if number is not None] == sorted(number or 0 for number in heard[1:-1])
    before = len(listener.messages(Pull))
    listener.publish(SHARED_DOWN, _chunk(0))
    assert len(listener.messages(Pull)) == before
    assert listener.daemon._transport._topics.keys() == set(Topics("fed").device_subscribes("d"))


def test_what_is_heard_is_said_after_eight_chunks_that_were_not_needed(listener: World) -> None:
    """The coordinator waits for it, although this device wants nothing."""
    listener.publish(SHARED_DOWN, _chunk(0))
    before = len(listener.messages(Pull))
    for _ in range(8):
        listener.publish(SHARED_DOWN, _chunk(0))
    assert listener.messages(Pull)[before:] == [Pull(sha256=LARGE_PART.sha256, ranges=(), heard=1)]


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
    assert listener.messages(Pull)[2:] == [Pull(sha256=LARGE_PART.sha256, ranges=())]
    listener.publish(SHARED_DOWN, _chunk(0))
    assert len(listener.messages(Pull)) == 3
    listener.say(told)
    assert listener.messages(Pull)[3:] == [Pull(sha256=LARGE_PART.sha256, ranges=())]  # the first word may be lost


def test_a_new_connection_does_not_listen(listener: World) -> None:
    """It asks again on its own topic, until it is invited again."""
    assert listener.daemon is not None
    listener.daemon._transport.drop()
    listener.turn()
    listener.welcome()
    assert listener.messages(Pull)[2:] == [Pull(sha256=LARGE_PART.sha256, ranges=((0, 4),))]
    listener.say(Share(sha256=LARGE_PART.sha256, listen=True))
    assert listener.messages(Pull)[3:] == [Pull(sha256=LARGE_PART.sha256, ranges=(), heard=0)]


LARGE_UPDATE = Finished(sha256=LARGE_PART.sha256, length=len(LARGE), num_samples=1)


def write_update(folder: Path) -> None:
    """As a worker leaves it."""
    folder.mkdir()
    (folder / "update.bin").write_bytes(LARGE)
    (folder / "update.json").write_text(json.dumps(to_map(LARGE_UPDATE)))


@pytest.fixture
def sent() -> list[int]:
    """The indices of the chunks that the coordinator was sent."""
    return []


@pytest.fixture
def hub(sent: list[int]) -> Hub:
    """With a coordinator that listens to the data of device d."""

    def hear(event: Event) -> None:
        if isinstance(event, Received):
            sent.append(parse_chunk(event.payload).index)

    hub = Hub()
    coordinator = hub.transport("coordinator", hear)
    coordinator.subscribe((Topics("fed").device("d", "data"),))
    coordinator.connect()
    hub.poll()
    return hub


@pytest.fixture
def transfers(hub: Hub, tmp_path: Path) -> Iterator[ClientTransfers]:
    """Of device d, which is connected and has nothing to fetch; its update lies in `work`."""
    transport = hub.transport("d", lambda event: None)
    transport.connect()
    hub.poll()
    transfers = ClientTransfers(
        device="d",
        topics=Topics("fed"),
        transport=transport,
        store=PartsOnDisk(BlobStore(tmp_path / "blobs", tmp_path / "tmp")),
        send=lambda message: pytest.fail(f"sent {message}"),
        is_online=lambda: True,
        on_event=lambda event: pytest.fail(f"said {event}"),
    )
    write_update(tmp_path / "work")
    yield transfers
    transfers.close()


def test_the_update_is_sent_as_fast_as_the_transport_takes_it(
    transfers: ClientTransfers, hub: Hub, sent: list[int], tmp_path: Path
) -> None:
    """Chunks 3 to 8 are granted, and 5 to 9 while they wait: four go out a turn, each of the seven once."""
    assert transfers.serve(LARGE_UPDATE, tmp_path / "work", ((3, 6),))
    assert transfers.serve(LARGE_UPDATE, tmp_path / "work", ((5, 5),))
    transfers.turn()
    transfers.turn()
    hub.poll()
    assert sent == [3, 4, 5, 6]
    assert transfers.is_sending
    transfers.turn()
    hub.poll()
    assert sent == [3, 4, 5, 6, 7, 8, 9]
    assert not transfers.is_sending


def test_a_grant_of_what_is_not_there_is_dropped(
    transfers: ClientTransfers, hub: Hub, sent: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunk 20 of 20 does not exist; an update that is not the one on disk is lost."""
    assert transfers.serve(LARGE_UPDATE, tmp_path / "work", ((0, 1), (20, 1)))
    assert "dropped a grant" in caplog.text
    assert not transfers.is_sending
    assert not transfers.serve(replace(LARGE_UPDATE, sha256="ab" * 32), tmp_path / "work", ((0, 1),))
    assert not transfers.serve(LARGE_UPDATE, tmp_path / "none", ((0, 1),))


def test_what_was_granted_in_another_session_is_not_sent(
    transfers: ClientTransfers, hub: Hub, sent: list[int], tmp_path: Path
) -> None:
    """The coordinator asks again; the file stays open meanwhile."""
    assert transfers.serve(LARGE_UPDATE, tmp_path / "work", ((0, 2),))
    transfers.begin_session()
    transfers.turn()
    hub.poll()
    assert sent == []
    assert transfers.serve(LARGE_UPDATE, tmp_path / "work", ((0, 2),))
    transfers.turn()
    hub.poll()
    assert sent == [0, 1]
