"""Updates on their way from the devices, under one limit for all and one for each.

Uploads are pulled by grants: at most 4 MiB under way per device and 12 MiB in all, because a broker cuts a consumer
that falls 64 MB behind, and because uploads that end one after the other are hashed, synced and checked while the next
ones come. Those that have ended meanwhile are synced together; small ones (`small_uploads`) need no sync. First come,
first served: a fast device takes a full window, a slow one has a small window by itself and keeps nobody waiting.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from coordinator.fleet.small_uploads import SMALL_UPDATE_BYTES, SmallIncoming
from edge_client import durable
from edge_client.errors import DiskFullError, MachineError, PayloadError
from edge_client.transport.blobs import BlobStore, Incoming
from edge_client.wire.chunks import CHUNK_BYTES, parse_chunk
from edge_client.wire.messages import Grant, Offer

__all__ = ["FinishedUpload", "Uploads"]

_PER_DEVICE_BYTES = 4 << 20
_TOTAL_BYTES = 12 << 20
_MAX_OPEN = 256  # uploads with open files; the others wait for their turn
_PARK_AFTER_S = 60.0  # an upload that was asked for and brings nothing waits again, if others do
_MAX_MISMATCHES = 5
_BATCH_BYTES = 8 << 20  # what is synced together: the first of a batch waits for the last
_REVIEW_EVERY_S = 0.25  # how often to look whether devices fell silent


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedUpload:
    """An upload that ended: stored under its hash, or given up with a reason."""

    device: str
    offer: Offer
    path: Path | None
    error: PayloadError | MachineError | None = None


@dataclass(slots=True)
class _Upload:
    device: str
    offer: Offer
    turn: int  # who has the smallest is asked first
    incoming: Incoming | SmallIncoming | None = None
    finishing: bool = False
    outstanding_bytes: int = 0  # as they are in the total
    silent_since: float | None = None  # it was asked then, and nothing came since
    num_mismatches: int = 0  # before it was parked


class Uploads:
    """All updates on their way in, by device; a device has one at a time."""

    def __init__(self, blobs: BlobStore, *, arrived: Callable[[FinishedUpload], None], steady: bool = False) -> None:
        """`arrived` is called from another thread.

        `steady`: links that lose nothing and always keep up, as those in memory. Their windows follow from the length
        of an update alone, so that the number of grants, and of bytes, is the same whatever else this machine does.
        """
        self._blobs = blobs
        self._arrived = arrived
        self._steady = steady
        self._uploads: dict[str, _Upload] = {}
        self._open: dict[str, _Upload] = {}  # those that have their files open
        self._waiting: dict[str, _Upload] = {}  # the others, in the order in which they get theirs
        self._wanting: dict[str, _Upload] = {}  # open ones that could ask for more
        self._num_expecting: Counter[str] = Counter()  # hash -> uploads that bring it
        self._outstanding_bytes = 0
        self._num_turns = 0
        self._review_at = float("-inf")
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
        self._uploads[device] = self._waiting[device] = _Upload(device, offer, self._next_turn())
        self._num_expecting[offer.sha256] += 1

    def _next_turn(self) -> int:
        self._num_turns += 1
        return self._num_turns

    def is_open(self, device: str, offer: Offer) -> bool:
        """Whether this update is on its way in, or another one of its lease is just being finished."""
        held = self._uploads.get(device)
        return held is not None and (held.offer == offer or (held.offer.lease == offer.lease and held.finishing))

    def expects(self, sha256: str) -> bool:
        """Whether some device's update with this hash is on its way in."""
        return sha256 in self._num_expecting

    def chunk(self, device: str, payload: bytes, now: float) -> None:
        """Take a chunk; raises `PayloadError` for what does not belong here, `MachineError` for a failing disk."""
        chunk = parse_chunk(payload)
        upload = self._uploads.get(device)
        if upload is None or upload.incoming is None or upload.finishing:
            raise PayloadError("unasked", f"a chunk of {device!r}, which has no open upload")
        try:
            with durable.disk_errors(f"cannot store the update of {device!r}"):
                if upload.incoming.add(chunk, self._time_of_links(now)):
                    upload.silent_since = None
        finally:
            self._note_asked(upload)
        if upload.incoming.chunks.complete:
            self._finish(upload)

    def grants(self, now: float) -> Iterator[tuple[str, Grant]]:
        """What to ask of whom now, within the limits; who came first is asked first."""
        if now >= self._review_at:
            self._review_at = now + _REVIEW_EVERY_S
            self._review(now)
        self._open_some()
        for upload in sorted(self._wanting.values(), key=lambda upload: upload.turn):
            left = _TOTAL_BYTES - self._outstanding_bytes
            if left < CHUNK_BYTES:
                return
            assert upload.incoming is not None
            ranges = upload.incoming.chunks.request(self._time_of_links(now), allowance_bytes=left, whole=self._steady)
            self._note_asked(upload)
            if ranges:
                upload.silent_since = now if upload.silent_since is None else upload.silent_since
                yield upload.device, Grant(lease=upload.offer.lease, sha256=upload.offer.sha256, ranges=ranges)

    def _time_of_links(self, now: float) -> float:
        return 0.0 if self._steady else now

    @property
    def outstanding_bytes(self) -> int:
        """Asked for and not here yet, of all devices: what the disk must still take."""
        return self._outstanding_bytes

    def _note_asked(self, upload: _Upload) -> None:
        """After every change of what is asked of a device: keep the total and the list of those that want more."""
        chunks = upload.incoming.chunks if upload.incoming is not None else None
        outstanding_bytes = chunks.outstanding_bytes if chunks is not None else 0
        self._outstanding_bytes += outstanding_bytes - upload.outstanding_bytes
        upload.outstanding_bytes = outstanding_bytes
        if chunks is not None and not upload.finishing and chunks.wants_more:
            self._wanting[upload.device] = upload
        else:
            self._wanting.pop(upload.device, None)

    def _review(self, now: float) -> None:
        """Look for devices that fell silent: they give back what they held of the limits, and wait."""
        for upload in list(self._open.values()):
            assert upload.incoming is not None
            if self._waiting and self._is_silent(upload, now):
                self._park(upload)
            elif upload.incoming.chunks.stalled(self._time_of_links(now)):
                upload.turn = self._next_turn()
                self._note_asked(upload)

    def _is_silent(self, upload: _Upload, now: float) -> bool:
        silent_s = 0.0 if upload.silent_since is None else now - upload.silent_since
        return not upload.finishing and silent_s >= _PARK_AFTER_S

    def _park(self, upload: _Upload) -> None:
        """What has come stays on disk; the place goes to those who wait."""
        assert upload.incoming is not None
        upload.num_mismatches = upload.incoming.num_mismatches
        upload.incoming.close()
        upload.incoming = None
        upload.turn = self._next_turn()
        del self._open[upload.device]
        self._waiting[upload.device] = upload
        self._note_asked(upload)

    def _open_some(self) -> None:
        while self._waiting and len(self._open) < _MAX_OPEN:
            self._open_files(next(iter(self._waiting.values())))

    def _open_files(self, upload: _Upload) -> None:
        with durable.disk_errors(f"cannot store the update of {upload.device!r}"):
            upload.incoming = self._incoming(upload.offer)
        upload.incoming.num_mismatches = upload.num_mismatches
        upload.silent_since = None
        del self._waiting[upload.device]
        self._open[upload.device] = upload
        if upload.incoming.chunks.complete:  # all of it came before a restart
            self._finish(upload)
        else:
            self._note_asked(upload)

    def _incoming(self, offer: Offer) -> Incoming | SmallIncoming:
        whole: dict[str, Any] = {
            "sha256": offer.sha256,
            "length": offer.length,
            "max_window_bytes": _PER_DEVICE_BYTES,
        }
        if offer.length <= SMALL_UPDATE_BYTES:
            return SmallIncoming(self._blobs, **whole)
        return Incoming(self._blobs, offer.lease, point="upload", **whole)

    def _finish(self, upload: _Upload) -> None:
        upload.finishing = True
        self._note_asked(upload)
        if isinstance(upload.incoming, SmallIncoming):
            self._finish_small(upload, upload.incoming)
        else:
            self._to_finish.put(upload)

    def _finish_small(self, upload: _Upload, incoming: SmallIncoming) -> None:
        path, error = None, None
        try:
            path = incoming.finish()
        except (PayloadError, MachineError) as problem:
            error = problem
        self._arrived(FinishedUpload(device=upload.device, offer=upload.offer, path=path, error=error))

    def lost_connection(self, device: str | None = None) -> None:
        """Nothing that was asked for will come; None: of nobody."""
        names = list(self._open) if device is None else [device]
        for upload in [self._open[name] for name in names if name in self._open]:
            assert upload.incoming is not None
            upload.incoming.chunks.lost_connection()
            self._note_asked(upload)

    def drop(self, device: str) -> None:
        """Nobody waits for a device's update any more: forget it and what has come of it."""
        upload = self._remove(device)
        if upload is None:
            return
        if upload.finishing:
            self._dropped.append(upload)  # the thread has it: `settle` ends it
        else:
            self._end(upload)

    def _remove(self, device: str) -> _Upload | None:
        upload = self._uploads.pop(device, None)
        for group in (self._open, self._waiting, self._wanting):
            group.pop(device, None)
        if upload is not None:
            self._outstanding_bytes -= upload.outstanding_bytes
            self._num_expecting[upload.offer.sha256] -= 1
            if not self._num_expecting[upload.offer.sha256]:
                del self._num_expecting[upload.offer.sha256]
        return upload

    def _end(self, upload: _Upload) -> None:
        if upload.incoming is not None:
            upload.incoming.close()
        if upload.offer.length > SMALL_UPDATE_BYTES:
            self._blobs.discard(upload.offer.lease)

    def _finish_all(self) -> None:
        """Hashing and syncing 45 MB takes a tenth of a second: beside the loop, what waits in one batch."""
        is_over = False
        while not is_over and (upload := self._to_finish.get()):
            batch = [upload]
            while sum(upload.offer.length for upload in batch) < _BATCH_BYTES and not self._to_finish.empty():
                following = self._to_finish.get()
                if following is None:
                    is_over = True
                    break
                batch.append(following)
            self._finish_batch(batch)

    def _finish_batch(self, batch: Sequence[_Upload]) -> None:
        errors: dict[int, PayloadError | MachineError] = {}
        right: dict[str, Path] = {}
        for number, upload in enumerate(batch):
            assert isinstance(upload.incoming, Incoming)
            try:
                with durable.disk_errors(f"cannot store the update of {upload.device!r}"):
                    upload.incoming.check()
                right[upload.offer.sha256] = upload.incoming.part
            except (PayloadError, MachineError) as problem:
                errors[number] = problem
        try:
            self._blobs.adopt_all(right, point="upload")
        except MachineError as problem:
            errors = {number: errors.get(number, problem) for number in range(len(batch))}
        for number, upload in enumerate(batch):
            assert isinstance(upload.incoming, Incoming)
            error = errors.get(number)
            if error is None:
                upload.incoming.discard_map()
                upload.incoming.close()
            path = self._blobs.path(upload.offer.sha256) if error is None else None
            self._arrived(FinishedUpload(device=upload.device, offer=upload.offer, path=path, error=error))

    def settle(self, arrived: FinishedUpload) -> bool:
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
            self._note_asked(upload)
            return False
        if isinstance(arrived.error, DiskFullError):
            raise arrived.error
        self._remove(arrived.device)
        self._end(upload)
        return True

    def close(self) -> None:
        """End the thread and let go of all files."""
        self._to_finish.put(None)
        self._thread.join()
        for upload in (*self._uploads.values(), *self._dropped):
            if upload.incoming is not None:
                upload.incoming.close()  # what has arrived stays, for the next start
        for group in (self._uploads, self._open, self._waiting, self._wanting, self._num_expecting):
            group.clear()
        self._dropped.clear()
        self._outstanding_bytes = 0
