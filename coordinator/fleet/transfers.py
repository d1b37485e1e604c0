"""Blobs on their way between the coordinator and its devices, under one limit for all and one for each.

Uploads are pulled by grants: at most 4 MiB under way per device and 12 MiB in all, because a broker cuts a consumer
that falls 64 MB behind, and because uploads that end one after the other are hashed, synced and checked while the next
ones come. First come, first served: a fast device takes a full window, a slow one has a small window by itself and
keeps nobody waiting. Downloads are asked for by devices and sent in turns, one chunk per device. What several devices
fetch at the same time is published once, on the shared topic (`coordinator.fleet.shared_topic`); what one of them
missed of
it, it asks for and gets on its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from coordinator.fleet.shared_topic import SharedTopic
from edge_client import durable
from edge_client.errors import DiskFullError, MachineError, PayloadError
from edge_client.transport.blobs import BlobStore, Incoming, Outgoing
from edge_client.wire.chunks import CHUNK_BYTES, num_chunks, parse_chunk
from edge_client.wire.flow_control import PULL_WINDOW_BYTES
from edge_client.wire.messages import Grant, Offer, Share
from edge_client.wire.reassembly import Range, expand

__all__ = ["Arrived", "Downloads", "Uploads"]

_PER_DEVICE_BYTES = 4 << 20
_TOTAL_BYTES = 12 << 20
_MAX_OPEN = 256  # uploads with open files; the others wait for their turn
_PARK_AFTER_S = 60.0  # an upload that was asked for and brings nothing waits again, if others do
_SEND_AHEAD_BYTES = 2 << 20
_MAX_OPEN_FILES = 4  # the settings and the newest models
_KEPT_CHUNKS = 64  # 8 MB: devices of a round ask for the same ones, nearly at the same time
_MAX_MISMATCHES = 5
_WORTH_SHARING = 16  # chunks of a blob
_KEEPS_UP_S = 1.0  # a device whose requests follow one another within this time may share
_SAME_TIME_S = 2.0  # another one asked for the same blob so lately
_INVITE_AGAIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """An upload that ended: stored under its hash, or given up with a reason."""

    device: str
    offer: Offer
    path: Path | None
    error: PayloadError | MachineError | None = None


@dataclass(slots=True)
class _Upload:
    device: str
    offer: Offer
    incoming: Incoming | None = None
    finishing: bool = False
    silent_since: float | None = None  # it was asked then, and nothing came since
    num_mismatches: int = 0  # before it was parked


class Uploads:
    """All updates on their way in, by device; a device has one at a time."""

    def __init__(self, blobs: BlobStore, *, arrived: Callable[[Arrived], None], steady: bool = False) -> None:
        """`arrived` is called from another thread.

        `steady`: links that lose nothing and always keep up, as those in memory. Their windows follow from the length
        of an update alone, so that the number of grants, and of bytes, is the same whatever else this machine does.
        """
        self._blobs = blobs
        self._arrived = arrived
        self._steady = steady
        self._uploads: OrderedDict[str, _Upload] = OrderedDict()
        self._dropped: list[_Upload] = []  # while the thread had them
        self._to_finish: SimpleQueue[_Upload | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._finish_all, name="finish-uploads", daemon=True)
        self._thread.start()

    def expect(self, device: str, offer: Offer) -> None:
        """A device offers an update that is wanted; repeated offers change nothing."""
        held = self._uploads.get(device)
        if held is not None and held.offer == offer:
            return
        self.drop(device)
        self._uploads[device] = _Upload(device, offer)

    def is_open(self, device: str, offer: Offer) -> bool:
        """Whether this update is on its way in, or another one of its lease is just being finished."""
        held = self._uploads.get(device)
        return held is not None and (held.offer == offer or (held.offer.lease == offer.lease and held.finishing))

    def expects(self, sha256: str) -> bool:
        """Whether some device's update with this hash is on its way in."""
        return any(upload.offer.sha256 == sha256 for upload in self._uploads.values())

    def chunk(self, device: str, payload: bytes, now: float) -> None:
        """Take a chunk; raises `PayloadError` for what does not belong here, `MachineError` for a failing disk."""
        chunk = parse_chunk(payload)
        upload = self._uploads.get(device)
        if upload is None or upload.incoming is None or upload.finishing:
            raise PayloadError("unasked", f"a chunk of {device!r}, which has no open upload")
        with durable.disk_errors(f"cannot store the update of {device!r}"):
            if upload.incoming.add(chunk, self._time_of_links(now)):
                upload.silent_since = None
        if upload.incoming.chunks.complete:
            upload.finishing = True
            self._to_finish.put(upload)

    def grants(self, now: float) -> Iterator[tuple[str, Grant]]:
        """What to ask of whom now, within the limits; who came first is asked first."""
        if len(self._uploads) > _MAX_OPEN:
            self._park_silent(now)
        self._open_some()
        for upload in list(self._uploads.values()):
            if upload.incoming is not None and upload.incoming.chunks.stalled(self._time_of_links(now)):
                self._uploads.move_to_end(upload.device)  # it gives back what it held of the limit, and waits
        left = _TOTAL_BYTES - self.outstanding_bytes
        for upload in list(self._uploads.values()):
            if upload.incoming is None or upload.finishing or left < CHUNK_BYTES:
                continue
            time_ = self._time_of_links(now)
            ranges = upload.incoming.chunks.request(time_, allowance_bytes=left, whole=self._steady)
            if ranges:
                left -= CHUNK_BYTES * sum(count for _, count in ranges)
                upload.silent_since = now if upload.silent_since is None else upload.silent_since
                yield upload.device, Grant(lease=upload.offer.lease, sha256=upload.offer.sha256, ranges=ranges)

    def _time_of_links(self, now: float) -> float:
        return 0.0 if self._steady else now

    @property
    def outstanding_bytes(self) -> int:
        """Asked for and not here yet, of all devices: what the disk must still take."""
        return sum(upload.incoming.chunks.outstanding_bytes for upload in self._uploads.values() if upload.incoming)

    def _open_some(self) -> None:
        num_open = sum(1 for upload in self._uploads.values() if upload.incoming)
        for upload in self._uploads.values():
            if num_open >= _MAX_OPEN:
                return
            if upload.incoming is None:
                num_open += 1
                self._open(upload)

    def _park_silent(self, now: float) -> None:
        """What has come stays on disk; the place goes to those who wait."""
        for upload in list(self._uploads.values()):
            silent_s = 0.0 if upload.silent_since is None else now - upload.silent_since
            if upload.incoming is not None and not upload.finishing and silent_s >= _PARK_AFTER_S:
                upload.num_mismatches = upload.incoming.num_mismatches
                upload.incoming.close()
                upload.incoming = None
                self._uploads.move_to_end(upload.device)

    def _open(self, upload: _Upload) -> None:
        with durable.disk_errors(f"cannot store the update of {upload.device!r}"):
            upload.incoming = Incoming(
                self._blobs,
                upload.offer.lease,
                sha256=upload.offer.sha256,
                length=upload.offer.length,
                max_window_bytes=_PER_DEVICE_BYTES,
                point="upload",
            )
        upload.incoming.num_mismatches = upload.num_mismatches
        upload.silent_since = None
        if upload.incoming.chunks.complete:  # all of it came before a restart
            upload.finishing = True
            self._to_finish.put(upload)

    def lost_connection(self, device: str | None = None) -> None:
        """Nothing that was asked for will come; None: of nobody."""
        for upload in self._uploads.values():
            if upload.incoming is not None and device in (None, upload.device):
                upload.incoming.chunks.lost_connection()

    def drop(self, device: str) -> None:
        """Nobody waits for a device's update any more: forget it and what has come of it."""
        upload = self._uploads.pop(device, None)
        if upload is None:
            return
        if upload.finishing:
            self._dropped.append(upload)  # the thread has it: `settle` ends it
        else:
            self._end(upload)

    def _end(self, upload: _Upload) -> None:
        if upload.incoming is not None:
            upload.incoming.close()
        self._blobs.discard(upload.offer.lease)

    def _finish_all(self) -> None:
        """Hashing and syncing 45 MB takes a tenth of a second: beside the loop, one after the other."""
        while upload := self._to_finish.get():
            assert upload.incoming is not None
            path, error = None, None
            try:
                with durable.disk_errors(f"cannot store the update of {upload.device!r}"):
                    path = upload.incoming.finish()
                upload.incoming.close()
            except (PayloadError, MachineError) as problem:
                error = problem
            self._arrived(Arrived(device=upload.device, offer=upload.offer, path=path, error=error))

    def settle(self, arrived: Arrived) -> bool:
        """Back in the loop: whether the upload has ended; a wrong hash is fetched again a few times."""
        upload = self._uploads.get(arrived.device)
        if upload is None or upload.offer != arrived.offer:
            for dropped in [u for u in self._dropped if (u.device, u.offer) == (arrived.device, arrived.offer)]:
                self._dropped.remove(dropped)
                self._end(dropped)
            return arrived.path is not None
        if (
            isinstance(arrived.error, PayloadError)
            and upload.incoming
            and upload.incoming.num_mismatches < _MAX_MISMATCHES
        ):
            upload.finishing = False
            return False
        if isinstance(arrived.error, DiskFullError):
            raise arrived.error
        del self._uploads[arrived.device]
        self._end(upload)
        return True

    def close(self) -> None:
        """End the thread and let go of all files."""
        self._to_finish.put(None)
        self._thread.join()
        for upload in (*self._uploads.values(), *self._dropped):
            if upload.incoming is not None:
                upload.incoming.close()  # what has arrived stays, for the next start
        self._uploads.clear()
        self._dropped.clear()


@dataclass(slots=True)
class _Queue:
    sha256: str
    chunks: dict[int, None] = field(default_factory=dict)  # an ordered set
    asked_at: float = -_SAME_TIME_S
    invited_at: float = -_INVITE_AGAIN_S
    sent_back: bool = False


class Downloads:
    """Chunks that devices asked for and that are not sent yet."""

    def __init__(self, blobs: BlobStore, *, shares: bool = True) -> None:
        """`shares`: whether what several fetch at a time may be published once."""
        self._blobs = blobs
        self._shares = shares
        self._queues: dict[str, _Queue] = {}
        self._waiting: OrderedDict[str, _Queue] = OrderedDict()  # those with chunks, in the order of their turns
        self._shared = SharedTopic()
        self._held = False  # all that waits is for the shared topic, and a listener has no room
        self._files: OrderedDict[str, Outgoing] = OrderedDict()
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def ask(
        self,
        device: str,
        sha256: str,
        length: int,
        ranges: tuple[Range, ...],
        *,
        heard: int | None = None,
        now: float = 0.0,
    ) -> Share | None:
        """Queue chunks for a device that may have them; what exceeds its limit is asked for again later.

        `heard` is what it says of the shared topic. The answer is an invitation to listen there, if that is worth it.
        """
        queue = self._queues.get(device)
        if queue is None or queue.sha256 != sha256:
            queue = self._queues[device] = _Queue(sha256)
        self._held = False
        if heard is None:
            self._shared.leave(device)
        elif not queue.sent_back:
            self._shared.hear(device, sha256, heard)
        for index in expand(ranges, num_chunks(length)):
            if len(queue.chunks) * CHUNK_BYTES >= PULL_WINDOW_BYTES:
                break
            if not self._shared.is_under_way(device, sha256, index, now):
                queue.chunks[index] = None
        if queue.chunks:
            self._waiting[device] = queue
        keeps_up, queue.asked_at = now - queue.asked_at < _KEEPS_UP_S, now
        invite = heard is None and bool(ranges) and keeps_up and self._is_worth_sharing(queue, length, now)
        if invite:
            queue.invited_at = now
        return Share(sha256=sha256, listen=True) if invite else None

    def _is_worth_sharing(self, queue: _Queue, length: int, now: float) -> bool:
        is_large = num_chunks(length) >= _WORTH_SHARING
        if not self._shares or not is_large or queue.sent_back or now - queue.invited_at < _INVITE_AGAIN_S:
            return False
        others = (other for other in self._queues.values() if other is not queue)
        return any(other.sha256 == queue.sha256 and now - other.asked_at < _SAME_TIME_S for other in others)

    def left(self, device: str) -> None:
        """A device does not listen on the shared topic any more."""
        self._shared.leave(device)
        self._held = False

    def forget(self, device: str) -> None:
        """The device is gone or has another assignment."""
        self.left(device)
        self._queues.pop(device, None)
        self._waiting.pop(device, None)

    def lost_connection(self) -> None:
        """What was on its way may never come: it is sent again to those who ask for it."""
        self._shared.lost_connection()

    def tick(self, online: frozenset[str], now: float) -> Iterator[tuple[str, Share]]:
        """Devices that are too slow for the shared topic and have to leave it."""
        for device, sha256 in self._shared.send_back(online, now):
            if device in self._queues:
                self._queues[device].sent_back = True
            yield device, Share(sha256=sha256, listen=False)
        self._held = False

    @property
    def busy(self) -> bool:
        """Whether something waits to be sent that could be."""
        return bool(self._waiting) and not self._held

    def send(
        self,
        queued_bytes: Callable[[], int],
        publish: Callable[[str, bytes], None],
        share: Callable[[tuple[str, ...], bytes], None],
        now: float = 0.0,
    ) -> None:
        """Publish chunks in turns while the transport keeps up: to one device, or to all that listen."""
        num_held = 0
        while num_held < len(self._waiting) and queued_bytes() < _SEND_AHEAD_BYTES:
            device, queue = next(iter(self._waiting.items()))
            if not queue.chunks:
                del self._waiting[device]
                continue
            self._waiting.move_to_end(device)
            index = next(iter(queue.chunks))
            shared = self._is_for_all(device, queue.sha256, index)
            if shared and not self._shared.has_room:
                num_held += 1
            elif (chunk := self._read(queue.sha256, index)) is None:
                queue.chunks.clear()
            elif shared:
                num_held = 0
                self._share(queue.sha256, index, now)
                share(self._shared.listeners, chunk)
            else:
                num_held = 0
                del queue.chunks[index]
                publish(device, chunk)
        self._held = 0 < len(self._waiting) == num_held

    def _is_for_all(self, device: str, sha256: str, index: int) -> bool:
        """Whether others want this chunk: it was not published yet, or another listener asks for it again."""
        if self._shared.closed:
            return False
        members = self._shared.members(sha256)
        if device not in members or len(members) < 2:
            return False
        if not self._shared.was_published(sha256, index):
            return True
        return any(index in self._queues[other].chunks for other in members if other != device)

    def _share(self, sha256: str, index: int, now: float) -> None:
        for member in self._shared.members(sha256):
            self._queues[member].chunks.pop(index, None)
        self._shared.publish(sha256, index, now)

    def _read(self, sha256: str, index: int) -> bytes | None:
        """A chunk; None of an old model that was cleaned up meanwhile: nobody may ask for it any more."""
        with durable.disk_errors(f"cannot read {self._blobs.path(sha256)}"):
            try:
                return self._chunk(sha256, index)
            except FileNotFoundError:
                return None

    def _chunk(self, sha256: str, index: int) -> bytes:
        chunk = self._kept.pop((sha256, index), None) or self._file(sha256).chunk(index)
        self._kept[sha256, index] = chunk
        if len(self._kept) > _KEPT_CHUNKS:
            self._kept.popitem(last=False)
        return chunk

    def _file(self, sha256: str) -> Outgoing:
        outgoing = self._files.get(sha256)
        if outgoing is None:
            path = self._blobs.path(sha256)
            outgoing = self._files[sha256] = Outgoing(path, sha256, path.stat().st_size)
            if len(self._files) > _MAX_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
        self._files.move_to_end(sha256)
        return outgoing

    def blob_removed(self, sha256: str) -> None:
        """A blob is gone: its bytes belong to the disk again when nobody has it open."""
        outgoing = self._files.pop(sha256, None)
        if outgoing is not None:
            outgoing.close()
        for key in [key for key in self._kept if key[0] == sha256]:
            del self._kept[key]

    def close(self) -> None:
        """Let go of all files."""
        for outgoing in self._files.values():
            outgoing.close()
        self._files.clear()
        self._kept.clear()
