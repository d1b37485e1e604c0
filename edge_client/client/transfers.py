"""The transfers of a device: the parts that it fetches from the coordinator and the update that it serves to it.

    fetch  ──> pull, window by window ──> chunks on the device's own topic or on the shared one ──> PartReady
    serve  ──> chunks of the update, as fast as the transport takes them

`ClientTransfers` carries out a session's instructions for the daemon and for every device of a simulation: the two
differ in where parts are stored (`PartStore`), in the clock, and in how far chunks are sent ahead of the network.

Covers: which chunk is asked for, stored and sent when. Does not cover: windows and missing chunks (`wire.reassembly`),
files (`transport.blobs`), what is to be fetched or served (`session`, `deploying`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_client import durable, faults
from edge_client.client.events import Event, Finished, PartReady
from edge_client.client.parts import IncomingPart, PartStore
from edge_client.client.worker_outcome import finished_update
from edge_client.errors import DiskFullError, PayloadError
from edge_client.records import PartRef
from edge_client.transport.base import LossCode, Transport
from edge_client.transport.blobs import Outgoing
from edge_client.wire.chunks import CHUNK_BYTES, num_chunks, parse_chunk, peek_chunk, transfer_id
from edge_client.wire.messages import Message, Pull, Share
from edge_client.wire.reassembly import Range, expand
from edge_client.wire.topics import Topics

__all__ = ["ClientTransfers"]

log = logging.getLogger(__name__)

_SEND_AHEAD_BYTES = 4 * CHUNK_BYTES  # published before the transport has written them


@dataclass(frozen=True, slots=True)
class _Download:
    """A part that is being fetched; `disk_full` takes the error of a full disk, which is raised otherwise."""

    part: IncomingPart
    disk_full: Callable[[DiskFullError], None] | None


class ClientTransfers:
    """All transfers of one device; see the module's docstring."""

    def __init__(
        self,
        *,
        device: str,
        topics: Topics,
        transport: Transport,
        store: PartStore,
        send: Callable[[Message], None],
        is_online: Callable[[], bool],
        on_event: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
        send_ahead_bytes: int = _SEND_AHEAD_BYTES,
    ) -> None:
        """`send` sends a message to the coordinator, `is_online` tells whether it would listen; `on_event` hears of
        every part that has arrived.
        """
        self._device_topic, self._shared_topic = topics.device(device, "down"), topics.shared_down
        self._update_topic = topics.device(device, "data")
        self._transport = transport
        self._store = store
        self._send = send
        self._is_online = is_online
        self._on_event = on_event
        self._clock = clock
        self._send_ahead_bytes = send_ahead_bytes
        self._downloads: dict[bytes, _Download] = {}
        self._shared_sha256 = ""  # the part for which this device listens on the shared topic
        self._may_listen = True
        self._outgoing: Outgoing | None = None
        self._granted: dict[int, None] = {}  # chunks of the update that are still to be sent, in this order

    @property
    def is_sending(self) -> bool:
        """Whether chunks of the update wait to be sent."""
        return bool(self._granted)

    def is_fetching(self, sha256: str) -> bool:
        """Whether a part is on its way."""
        return transfer_id(sha256) in self._downloads

    def turn(self) -> None:
        """Ask for the chunks that are due, and send those that the transport has room for."""
        self._pull()
        self._send_chunks()

    # fetching

    def fetch(
        self,
        part: PartRef,
        *,
        point: str,
        disk_full: Callable[[DiskFullError], None] | None = None,
    ) -> None:
        """Fetch a part unless it is here; `PartReady` follows in both cases.

        `point` names its fault points; `disk_full` is called instead of raising `DiskFullError`.
        """
        if self._store.has(part.sha256):
            self._on_event(PartReady(part.sha256))
            return
        if self.is_fetching(part.sha256):
            return  # two parts with the same bytes
        with _storing(disk_full):
            incoming = self._store.receive(part, point=point)
            self._downloads[incoming.chunks.transfer] = _Download(incoming, disk_full)
            if incoming.chunks.complete:  # every chunk arrived before a restart, but the part was not named yet
                try:
                    self._finish(incoming)
                except PayloadError as error:
                    log.warning("part %s begins again: %s", part.key, error)

    def abandon(self, sha256: str) -> None:
        """Stop fetching a part; the chunks that are here stay."""
        download = self._downloads.pop(transfer_id(sha256), None)
        if download is not None:
            download.part.close()
        if self._shared_sha256 == sha256:
            self._leave_shared_topic()

    def receive(self, topic: str, payload: bytes) -> bool:
        """Take a payload; False if its topic carries no chunks. Raises `PayloadError` for a wrong chunk."""
        if topic == self._device_topic:
            self._receive_chunk(payload)
        elif topic == self._shared_topic:
            self._receive_shared(payload)
        else:
            return False
        return True

    def _receive_shared(self, payload: bytes) -> None:
        """Take a shared chunk after a look at its header: only other devices may need it, or it may be here already."""
        header = peek_chunk(payload)
        download = self._downloads.get(header[0]) if header is not None else None
        if header is not None and download is not None and download.part.chunks.note_shared_chunk(header[1]):
            self._receive_chunk(payload)

    def _receive_chunk(self, payload: bytes) -> None:
        chunk = parse_chunk(payload)
        download = self._downloads.get(chunk.transfer)
        if download is None:
            return  # a late one of a part that is here already
        with _storing(download.disk_full):
            download.part.add(chunk, self._clock())
            if download.part.chunks.complete:
                self._finish(download.part)

    def _finish(self, part: IncomingPart) -> None:
        part.finish()  # a wrong hash raises PayloadError, and the part begins again
        part.close()
        del self._downloads[part.chunks.transfer]
        self._leave_shared_topic()
        self._on_event(PartReady(part.chunks.sha256))

    def _pull(self) -> None:
        if not self._is_online():
            return
        for download in self._downloads.values():
            chunks = download.part.chunks
            ranges = chunks.pull(self._clock())
            if ranges is not None:
                self._send(Pull(sha256=chunks.sha256, ranges=ranges, heard=chunks.heard))
            break  # one part at a time: the window bounds this process's memory

    # the shared topic

    def share(self, share: Share) -> None:
        """Begin or stop to listen on the shared topic; the answer is in the next pull, or is sent now."""
        download = self._downloads.get(transfer_id(share.sha256))
        if share.listen and download is not None and self._may_listen:
            self._shared_sha256 = share.sha256
            self._transport.subscribe((self._shared_topic,))
            download.part.chunks.listen()
        else:
            self._stop_listening()
            self._send(Pull(sha256=share.sha256, ranges=()))

    def _stop_listening(self) -> str:
        """Unsubscribe from the shared topic; returns the part for which this device listened."""
        sha256, self._shared_sha256 = self._shared_sha256, ""
        if sha256:
            self._transport.unsubscribe((self._shared_topic,))
        for download in self._downloads.values():
            download.part.chunks.unlisten()
        return sha256

    def _leave_shared_topic(self) -> None:
        """Stop listening and tell the coordinator, which until then publishes no more than this device can read."""
        sha256 = self._stop_listening()
        if sha256 and self._is_online():
            self._send(Pull(sha256=sha256, ranges=()))

    # serving the update

    def serve(self, update: Finished, folder: Path, ranges: tuple[Range, ...]) -> bool:
        """Send these chunks of the finished update in `folder`; False if it is not there, or not whole."""
        if self._outgoing is None or self._outgoing.sha256 != update.sha256:
            self.close_update()
            if finished_update(folder) != update:
                return False
            with durable.disk_errors("cannot read the update"):
                self._outgoing = Outgoing(folder / "update.bin", update.sha256, update.length)
        try:
            self._granted.update(dict.fromkeys(expand(ranges, num_chunks(update.length))))
        except PayloadError as error:
            log.warning("dropped a grant: %s", error)
        return True

    def _send_chunks(self) -> None:
        while self._granted and self._outgoing and self._transport.queued_bytes < self._send_ahead_bytes:
            index = next(iter(self._granted))
            del self._granted[index]
            with durable.disk_errors("cannot read the update"):
                chunk = self._outgoing.chunk(index)
            self._transport.publish(self._update_topic, chunk)
            faults.point("daemon.sent.chunk")

    # connections and their ends

    def begin_session(self) -> None:
        """Forget requests and grants of the session before: they will not be answered."""
        self._granted.clear()
        for download in self._downloads.values():
            download.part.chunks.lost_connection()

    def lost_connection(self, code: LossCode) -> None:
        """Ask for everything again on the next connection, on this device's own topic."""
        if code == "subscription" and self._shared_sha256:  # a broker of somebody else that has no shared topic
            self._may_listen = False
        self.begin_session()
        self._stop_listening()

    def close_downloads(self) -> None:
        """Stop fetching; the chunks that are here stay."""
        self._leave_shared_topic()
        for download in self._downloads.values():
            download.part.close()
        self._downloads.clear()

    def close_update(self) -> None:
        """Stop serving the update."""
        self._granted.clear()
        if self._outgoing is not None:
            self._outgoing.close()
            self._outgoing = None

    def close(self) -> None:
        """Close all files."""
        self.close_update()
        self.close_downloads()


@contextmanager
def _storing(disk_full: Callable[[DiskFullError], None] | None) -> Iterator[None]:
    """The errors of the disk while a part is stored."""
    try:
        with durable.disk_errors("cannot store a part"):
            yield
    except DiskFullError as error:
        if disk_full is None:
            raise
        disk_full(error)
