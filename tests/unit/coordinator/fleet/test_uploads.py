"""Uploads of many devices under shared limits, on real files."""

from __future__ import annotations

import hashlib
import os
import queue
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.fleet.uploads import FinishedUpload, Uploads
from edge_client import durable, faults
from edge_client.errors import DiskFullError, PayloadError
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, num_chunks, transfer_id
from edge_client.wire.messages import Grant, Offer

TOTAL = 12 << 20
PER_DEVICE = 4 << 20


class Site:
    """Uploads with what arrived, and devices that answer grants."""

    def __init__(self, tmp_path: Path, *, steady: bool = False) -> None:
        self.blobs = BlobStore(tmp_path / "blobs", tmp_path / "tmp")
        self.ended: queue.SimpleQueue[FinishedUpload] = queue.SimpleQueue()
        self.uploads = Uploads(self.blobs, arrived=self.ended.put, steady=steady)

    def answer(self, device: str, data: bytes, grant: Grant, now: float) -> None:
        for first, count in grant.ranges:
            for index in range(first, first + count):
                self.uploads.chunk(device, _chunk(data, index, grant.sha256), now)

    def finish(self) -> tuple[FinishedUpload, bool]:
        arrived = self.ended.get(timeout=20)
        return arrived, self.uploads.settle(arrived)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.uploads.close()


def _chunk(data: bytes, index: int, sha256: str) -> bytes:
    return make_chunk(transfer_id(sha256), index, data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


def _offer(data: bytes, lease: str = "lease-1", *, sha256: str | None = None) -> Offer:
    sha256 = sha256 or hashlib.sha256(data).hexdigest()
    return Offer(lease=lease, run="r-1", round=1, sha256=sha256, length=len(data), num_samples=1)


def _data(seed: int, length: int = 3 * CHUNK_BYTES + 17) -> bytes:
    return random.Random(seed).randbytes(length)


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def _all_of(site: Site, devices: dict[str, bytes], now: float = 0.0) -> None:
    """Every device answers every grant until nobody is asked any more."""
    while granted := list(site.uploads.grants(now)):
        for device, grant in granted:
            site.answer(device, devices[device], grant, now)
        now += 0.01


def test_an_upload_becomes_a_blob_with_its_hash(site: Site) -> None:
    """Granted, sent, finished beside the loop; afterwards the device has no upload and no unfinished file."""
    data = _data(1)
    site.uploads.expect("a", _offer(data))
    _all_of(site, {"a": data})
    arrived, over = site.finish()
    assert over
    assert arrived.path is not None
    assert arrived.path.read_bytes() == data
    assert not site.uploads.is_open("a", _offer(data))
    assert list(site.blobs.temporary_path("x").parent.iterdir()) == []


def test_two_devices_may_send_the_same_bytes(site: Site) -> None:
    """Their parts lie apart; the blob is one, whole."""
    data = _data(2)
    site.uploads.expect("a", _offer(data, "lease-a"))
    site.uploads.expect("b", _offer(data, "lease-b"))
    _all_of(site, {"a": data, "b": data})
    ended = [site.finish() for _ in range(2)]
    assert {arrived.device for arrived, _ in ended} == {"a", "b"}
    assert all(over and arrived.path and arrived.path.read_bytes() == data for arrived, over in ended)


def test_grants_stay_within_both_limits(site: Site) -> None:
    """Sixteen devices of 8 MiB, answered at once while it lasts: never more than 4 MiB of one and 32 MiB of all."""
    data = _data(3, 8 << 20)
    for number in range(16):
        site.uploads.expect(f"d{number}", _offer(data, f"lease-{number}"))
    under_way: dict[str, int] = {}
    for _ in range(6):
        granted = list(site.uploads.grants(0.0))
        for device, grant in granted:
            under_way[device] = under_way.get(device, 0) + CHUNK_BYTES * sum(count for _, count in grant.ranges)
        assert sum(under_way.values()) <= TOTAL
        assert max(under_way.values()) <= PER_DEVICE
        for device, grant in granted[::2]:
            site.answer(device, data, grant, 0.0)
            under_way[device] -= CHUNK_BYTES * sum(count for _, count in grant.ranges)


@pytest.mark.parametrize("turn_s", [0.0, 30.0])
def test_steady_links_get_the_same_grants_at_any_load(tmp_path: Path, turn_s: float) -> None:
    """52 chunks come in windows of 4, 8, 16 and the 24 left of 32, however slow this machine and many the others are.

    Five at a time of the last kind do not fit into 102 chunks: four are asked, one waits for all of its own.
    """
    site = Site(tmp_path, steady=True)
    data = {f"d{number}": _data(number, 52 * CHUNK_BYTES) for number in range(5)}
    for number, (device, own) in enumerate(data.items()):
        site.uploads.expect(device, _offer(own, f"lease-{number}"))
    sizes: dict[str, list[int]] = {device: [] for device in data}
    turns, now = 0, 0.0
    while granted := list(site.uploads.grants(now)):
        for device, grant in granted:
            sizes[device].append(sum(count for _, count in grant.ranges))
            site.answer(device, data[device], grant, now + turn_s / 2)
        turns, now = turns + 1, now + turn_s
    assert sizes == {device: [4, 8, 16, 24] for device in data}
    assert turns == 5
    site.uploads.close()


def test_devices_that_vanish_do_not_starve_the_others(site: Site) -> None:
    """26 of 70 devices were asked for 102 chunks, all of the 12 MiB, and are gone: 4 s later the next are asked."""
    data = _data(4, 4 * CHUNK_BYTES)
    for number in range(70):
        site.uploads.expect(f"d{number}", _offer(data, f"lease-{number}"))
    asked = sum(count for _, grant in site.uploads.grants(0.0) for _, count in grant.ranges)
    assert asked == TOTAL // CHUNK_BYTES == 102
    site.uploads.expect("late", _offer(data, "lease-late"))
    assert list(site.uploads.grants(1.0)) == []
    waves = [[device for device, _ in site.uploads.grants(now)] for now in (4.0, 8.0)]
    assert len(waves[0]) == 26
    assert waves[1][:19] == [*(f"d{number}" for number in range(52, 70)), "late"]  # before those that stalled


def test_a_wrong_hash_is_fetched_again_and_then_given_up(site: Site) -> None:
    """Four times from the beginning; the fifth mismatch ends it, and its files are closed and gone."""
    before = _open_fds()
    data = _data(6)
    offer = _offer(data, sha256=hashlib.sha256(b"something else").hexdigest())
    site.uploads.expect("liar", offer)
    for tries in range(5):
        _all_of(site, {"liar": data}, now=float(tries))
        arrived, over = site.finish()
        assert isinstance(arrived.error, PayloadError)
        assert over == (tries == 4)
    assert not site.uploads.is_open("liar", offer)
    assert _open_fds() == before
    assert list(site.blobs.names()) == []


def test_a_repeated_offer_changes_nothing_and_another_one_begins_anew(site: Site) -> None:
    """A device that trained again offers other bytes under its lease: the old part is not mixed with the new one."""
    old, new = _data(7), _data(8)
    site.uploads.expect("a", _offer(old))
    (grant,) = [grant for _, grant in site.uploads.grants(0.0)]
    site.uploads.chunk("a", _chunk(old, 0, grant.sha256), 0.0)
    site.uploads.expect("a", _offer(old))
    assert site.uploads.is_open("a", _offer(old))
    assert not site.uploads.is_open("a", _offer(new))
    site.uploads.expect("a", _offer(new))
    _all_of(site, {"a": new})
    arrived, over = site.finish()
    assert over
    assert arrived.error is None
    assert arrived.path is not None
    assert arrived.path.read_bytes() == new


def test_an_upload_that_is_dropped_while_it_is_finished_ends_quietly(site: Site) -> None:
    """The blob is there and reported; nothing stays open, nothing is left unfinished."""
    before = _open_fds()
    data = _data(9)
    offer = _offer(data)
    site.uploads.expect("a", offer)
    _all_of(site, {"a": data})
    assert site.uploads.is_open("a", _offer(_data(1)))  # finishing: whatever this lease offers must wait
    site.uploads.drop("a")
    arrived, over = site.finish()
    assert over  # the service asks whether anybody still wants it
    assert arrived.path is not None
    assert _open_fds() == before


def test_dropping_removes_what_has_come_and_closing_keeps_it(site: Site, tmp_path: Path) -> None:
    """A cancelled lease leaves no file; a restart goes on from what is there."""
    data = _data(10)
    for device in ("a", "b"):
        site.uploads.expect(device, _offer(data, f"lease-{device}"))
    granted = dict(site.uploads.grants(0.0))
    for device in ("a", "b"):
        site.uploads.chunk(device, _chunk(data, 1, granted[device].sha256), 0.0)
    site.uploads.drop("a")
    site.uploads.close()
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == ["lease-b.map", "lease-b.part"]
    again = Site(tmp_path)
    again.uploads.expect("b", _offer(data, "lease-b"))
    (grant,) = [grant for _, grant in again.uploads.grants(0.0)]
    assert grant.ranges == ((0, 1), (2, 2))
    again.uploads.close()


def test_an_upload_that_was_complete_before_a_restart_is_finished_without_a_grant(site: Site, tmp_path: Path) -> None:
    """All chunks are in the part; the process died before the blob had its name."""
    data = _data(11)
    (tmp_path / "tmp" / "lease-1.part").write_bytes(data)
    (tmp_path / "tmp" / "lease-1.map").write_bytes(b"\1" * num_chunks(len(data)))
    site.uploads.expect("a", _offer(data))
    assert list(site.uploads.grants(0.0)) == []
    arrived, over = site.finish()
    assert over
    assert arrived.path is not None


def test_a_full_disk_is_raised_in_the_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a chunk is stored, and while the blob gets its name in the other thread."""
    data = _data(12)
    site.uploads.expect("a", _offer(data))
    (grant,) = [grant for _, grant in site.uploads.grants(0.0)]
    struck = [faults._parse(text) for text in ("enospc:upload.chunk", "enospc:upload.rename")]
    monkeypatch.setattr(faults, "_faults", struck)
    with pytest.raises(DiskFullError):
        site.uploads.chunk("a", _chunk(data, 0, grant.sha256), 0.0)
    site.answer("a", data, grant, 0.0)
    arrived = site.ended.get(timeout=20)
    assert isinstance(arrived.error, DiskFullError)
    with pytest.raises(DiskFullError):
        site.uploads.settle(arrived)


def test_chunks_that_nobody_asked_for_are_refused(site: Site) -> None:
    """Of a device without an upload, damaged ones, and those of another transfer."""
    data = _data(13)
    chunk = _chunk(data, 0, hashlib.sha256(data).hexdigest())
    with pytest.raises(PayloadError, match="unasked"):
        site.uploads.chunk("nobody", chunk, 0.0)
    with pytest.raises(PayloadError, match="damaged"):
        site.uploads.chunk("nobody", chunk[:-1] + bytes([chunk[-1] ^ 1]), 0.0)
    site.uploads.expect("a", _offer(data))
    list(site.uploads.grants(0.0))
    with pytest.raises(PayloadError, match="transfer"):
        site.uploads.chunk("a", make_chunk(bytes(16), 0, b"x"), 0.0)


def test_an_upload_that_brings_nothing_gives_its_place_to_those_who_wait(site: Site, tmp_path: Path) -> None:
    """256 silent devices hold all places; 61 s after they were asked the one that waits is served, and they wait.

    What came of one of them stays, so that it goes on from there when it speaks again.
    """
    data = _data(14)
    for number in range(256):
        site.uploads.expect(f"d{number}", _offer(data, f"lease-{number}"))
    now, began = 0.0, {}
    while len(began) < 256:  # the shared limit lets only some be asked at a time
        for device, _ in site.uploads.grants(now):
            began.setdefault(device, now)
        now += 4.1
    site.uploads.chunk("d0", _chunk(data, 1, hashlib.sha256(data).hexdigest()), now)
    site.uploads.expect("late", _offer(data, "lease-late"))
    asked: list[str] = []
    until = now + 61.0
    while now < until and "late" not in asked:
        asked += [device for device, _ in site.uploads.grants(now)]
        now += 4.1
    assert "late" in asked
    assert (tmp_path / "tmp" / "lease-0.map").read_bytes() == b"\0\1\0\0"
    assert _open_fds() < 2 * 256 + 64


def test_uploads_that_wait_for_their_turn_are_not_parked(site: Site) -> None:
    """300 devices; only those that were asked and stay silent lose their place: nobody is, while nothing is granted."""
    data = _data(15)
    for number in range(300):
        site.uploads.expect(f"d{number}", _offer(data, f"lease-{number}"))
    first = [device for device, _ in site.uploads.grants(0.0)]
    for device in first:
        site.uploads.drop(device)
    second = [device for device, _ in site.uploads.grants(100.0)]
    assert second == [f"d{number}" for number in range(len(first), 2 * len(first))]


def test_what_is_under_way_is_known(site: Site) -> None:
    """Four chunks are asked for first; one comes."""
    data = _data(16, 10 * CHUNK_BYTES)
    site.uploads.expect("a", _offer(data))
    (grant,) = [grant for _, grant in site.uploads.grants(0.0)]
    assert site.uploads.outstanding_bytes == 4 * CHUNK_BYTES
    site.uploads.chunk("a", _chunk(data, 0, grant.sha256), 0.0)
    assert site.uploads.outstanding_bytes == 3 * CHUNK_BYTES


def test_a_small_update_ends_in_the_loop_and_leaves_no_unfinished_file(site: Site, tmp_path: Path) -> None:
    """64 KiB is small, a byte more is not: that one is finished beside the loop, with a part and a map meanwhile."""
    small, large = _data(20, 65_536), _data(21, 65_537)
    for device, data in (("a", small), ("b", large)):
        site.uploads.expect(device, _offer(data, f"lease-{device}"))
    granted = dict(site.uploads.grants(0.0))
    assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == ["lease-b.map", "lease-b.part"]
    site.answer("a", small, granted["a"], 0.0)
    arrived = site.ended.get_nowait()
    assert site.uploads.settle(arrived)
    assert arrived.path is not None
    assert arrived.path.read_bytes() == small
    site.answer("b", large, granted["b"], 0.0)
    arrived, over = site.finish()
    assert (over, arrived.device) == (True, "b")
    assert site.blobs.path(hashlib.sha256(large).hexdigest()).read_bytes() == large
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_small_update_with_a_wrong_hash_is_asked_for_again(site: Site) -> None:
    """What came is not what was offered: the second grant brings it."""
    data, wrong = _data(22, 1000), _data(23, 1000)
    sha256 = hashlib.sha256(data).hexdigest()
    site.uploads.expect("a", _offer(data))
    ((_, grant),) = list(site.uploads.grants(0.0))
    site.uploads.chunk("a", _chunk(wrong, 0, sha256), 0.0)
    arrived, over = site.finish()
    assert isinstance(arrived.error, PayloadError)
    assert not over
    ((_, grant),) = list(site.uploads.grants(1.0))
    site.answer("a", data, grant, 1.0)
    arrived, over = site.finish()
    assert over
    assert arrived.path == site.blobs.path(sha256)


def test_updates_that_end_together_are_synced_together(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five in one batch, two of them the same bytes: a sync for each of the four files, one for each of their folders.

    One more has a wrong hash and keeps the others from nothing. The first sync of a folder below `blobs` is that of
    `blobs` itself, once.
    """
    synced: list[Path] = []
    monkeypatch.setattr(durable, "_sync", lambda path, flags: synced.append(path))
    datas = {name: _data(30 + number, 70_000) for number, name in enumerate("abcd")}
    datas["e"] = datas["a"]
    batch = []
    for name, data in datas.items():
        site.uploads.expect(name, _offer(data, f"lease-{name}"))
    wrong = _data(40, 70_000)
    site.uploads.expect("wrong", _offer(wrong, "lease-wrong", sha256="0" * 64))
    granted = dict(site.uploads.grants(0.0))
    monkeypatch.setattr(site.uploads, "_to_finish", type("Held", (), {"put": batch.append})())
    for name, data in (*datas.items(), ("wrong", wrong)):
        site.answer(name, data, granted[name], 0.0)
    assert [upload.device for upload in batch] == [*datas, "wrong"]
    monkeypatch.undo()
    monkeypatch.setattr(durable, "_sync", lambda path, flags: synced.append(path))
    site.uploads._finish_batch(batch)
    ended = {arrived.device: arrived for arrived in (site.ended.get_nowait() for _ in batch)}
    assert isinstance(ended.pop("wrong").error, PayloadError)
    paths = {site.blobs.path(hashlib.sha256(data).hexdigest()) for data in datas.values()}
    assert {arrived.path for arrived in ended.values()} == paths
    assert all(path.exists() for path in paths)
    folders = {path.parent for path in paths}
    assert sorted(synced[1:]) == sorted([*(path for path in synced if path.suffix == ".part"), *folders])
    assert len([path for path in synced if path.suffix == ".part"]) == len(paths)
    for arrived in ended.values():
        site.uploads.settle(arrived)
