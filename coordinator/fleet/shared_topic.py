"""Who listens on the shared download topic, and how far each listener is: book-keeping without I/O.

What several devices want is published once. The broker keeps what a device has not read yet, and cuts a device for
which it keeps too much: so no more is published than the slowest listener has room for. One that needs more than two
seconds for a window is sent back to its own topic. Until it says that it has left, nothing is published on the shared
one, and the others are served on their own topics too: a slow device neither stops the others nor is it cut.

Covers: listeners, their windows, what was published. Does not cover: queues and chunks (`coordinator.fleet.downloads`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from edge_client.wire.flow_control import ASK_AGAIN_AFTER_S, SHARED_WINDOW_CHUNKS

__all__ = ["SharedTopic"]

_BEHIND_S = 2.0
_SEND_AGAIN_S = 2.0
_GIVE_UP_S = 30.0  # a listener that was sent back, is online and still listens has only itself to blame
_UNDER_WAY_S = ASK_AGAIN_AFTER_S - 1.0  # when a device asks again, it was lost


@dataclass(slots=True)
class _Listener:
    sha256: str
    position: int  # of the newest chunk that it has heard
    sent_back_at: float | None = None
    sent_again_at: float = 0.0


class SharedTopic:
    """The topic `all/down` as the coordinator sees it; chunks have positions in the order of their publication."""

    def __init__(self) -> None:
        self._position = 0
        self._listeners: dict[str, _Listener] = {}
        self._published: dict[tuple[str, int], tuple[int, float]] = {}  # (blob, index) -> position, when
        self._published_at = [0.0] * SHARED_WINDOW_CHUNKS  # by position, modulo the window

    @property
    def listeners(self) -> tuple[str, ...]:
        """Everybody who gets what is published."""
        return tuple(self._listeners)

    def members(self, sha256: str) -> tuple[str, ...]:
        """Listeners that fetch this blob and may go on listening."""
        listeners = self._listeners.items()
        return tuple(name for name, one in listeners if one.sha256 == sha256 and one.sent_back_at is None)

    def note_heard(self, device: str, sha256: str, heard: int) -> None:
        """Note that a device listens, and that the last chunk of this blob that reached it was number `heard` - 1."""
        listener = self._listeners.setdefault(device, _Listener(sha256, self._position))
        listener.sha256 = sha256
        position, _ = self._published.get((sha256, heard - 1), (0, 0.0))
        listener.position = max(listener.position, position)

    def leave(self, device: str) -> None:
        """A device does not listen any more, or is gone."""
        listener = self._listeners.pop(device, None)
        if listener is not None and not any(other.sha256 == listener.sha256 for other in self._listeners.values()):
            for key in [key for key in self._published if key[0] == listener.sha256]:
                del self._published[key]

    def lost_connection(self) -> None:
        """What was under way to the listeners may never come."""
        self._published.clear()

    @property
    def closed(self) -> bool:
        """Whether somebody was sent back and has not left yet."""
        return any(listener.sent_back_at is not None for listener in self._listeners.values())

    @property
    def has_room(self) -> bool:
        """Whether every listener has room for one more chunk."""
        return all(self._position - listener.position < SHARED_WINDOW_CHUNKS for listener in self._listeners.values())

    def publish(self, sha256: str, index: int, now: float) -> None:
        """A chunk goes out."""
        self._position += 1
        self._published[sha256, index] = (self._position, now)
        self._published_at[self._position % SHARED_WINDOW_CHUNKS] = now

    def was_published(self, sha256: str, index: int) -> bool:
        """Whether a chunk went out to those who listened then."""
        return (sha256, index) in self._published

    def is_under_way(self, device: str, sha256: str, index: int, now: float) -> bool:
        """Whether a chunk that a device asks for will come without being sent again."""
        listener = self._listeners.get(device)
        if listener is None or listener.sent_back_at is not None:
            return False
        position, when = self._published.get((sha256, index), (0, 0.0))
        return position > listener.position and now - when < _UNDER_WAY_S

    def send_back(self, online: frozenset[str], now: float) -> Iterator[tuple[str, str]]:
        """Listeners that are to leave now, and the blob that they fetch; again until they have left or are gone."""
        for name, listener in list(self._listeners.items()):
            if name not in online or (listener.sent_back_at is not None and now - listener.sent_back_at > _GIVE_UP_S):
                self.leave(name)
                continue
            if listener.sent_back_at is None and self._is_too_slow(listener, now):
                listener.sent_back_at = now
            if listener.sent_back_at is not None and now - listener.sent_again_at >= _SEND_AGAIN_S:
                listener.sent_again_at = now
                yield name, listener.sha256

    def _is_too_slow(self, listener: _Listener, now: float) -> bool:
        if self._position - listener.position < SHARED_WINDOW_CHUNKS:
            return False
        return now - self._published_at[(listener.position + 1) % SHARED_WINDOW_CHUNKS] >= _BEHIND_S
