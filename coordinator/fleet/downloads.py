"""Models and settings on their way to the devices: devices ask for chunks, and get them in turns.

What several devices fetch at the same time is published once, on the shared topic (`coordinator.fleet.shared_topic`);
a device asks again for what it missed there, and gets it on its own topic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from coordinator.fleet.chunk_reader import ChunkReader
from coordinator.fleet.shared_topic import SharedTopic
from edge_client.transport.blobs import BlobStore
from edge_client.wire.chunks import CHUNK_BYTES, num_chunks
from edge_client.wire.flow_control import PULL_WINDOW_BYTES
from edge_client.wire.messages import Share
from edge_client.wire.reassembly import Range, expand

__all__ = ["Downloads"]

_SEND_AHEAD_BYTES = 2 << 20
_WORTH_SHARING = 16  # chunks of a blob
_KEEPS_UP_S = 1.0  # a device whose requests follow one another within this time may share
_SAME_TIME_S = 2.0  # another one asked for the same blob so lately
_INVITE_AGAIN_S = 2.0


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
        self._reader = ChunkReader(blobs)
        self._shares = shares
        self._queues: dict[str, _Queue] = {}
        self._waiting: OrderedDict[str, _Queue] = OrderedDict()  # those with chunks, in the order of their turns
        self._shared = SharedTopic()
        self._held = False  # all that waits is for the shared topic, and a listener has no room

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
            self._shared.note_heard(device, sha256, heard)
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
            elif (chunk := self._reader.chunk(queue.sha256, index)) is None:
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

    def blob_removed(self, sha256: str) -> None:
        """Forget a blob, so that its bytes belong to the disk again."""
        self._reader.forget(sha256)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()
