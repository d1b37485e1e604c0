"""A device's side of the sealed exchange with the coordinator: its session, its counters, the numbers it received.

Covers: sealing and opening control messages in their order. Does not cover: what they mean (`session`), the
coordinator's side (`coordinator/fleet/roster.py`).
"""

from __future__ import annotations

from edge_client.errors import PayloadError
from edge_client.wire.messages import (
    Hello,
    Message,
    Refuse,
    ReplayWindow,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)

__all__ = ["Conversation"]


class Conversation:
    """All sessions of one device, one after the other."""

    def __init__(self, *, federation: str, device: str, key: bytes) -> None:
        self._key = key
        self._up, self._down = context_up(federation, device), context_down(federation, device)
        self.begin("")

    def begin(self, session: str) -> None:
        """From now on messages belong to this session."""
        self._session, self._seq, self._window = session, 0, ReplayWindow()

    def seal(self, message: Message) -> bytes:
        """The bytes of the next message; a hello belongs to no session yet."""
        session = "" if isinstance(message, Hello) else self._session
        data = seal_message(message, session=session, seq=self._seq, key=self._key, context=self._up)
        self._seq += 1
        return data

    def open(self, payload: bytes) -> Message:
        """A proven message that is new in this session, or begins one; raises `PayloadError`."""
        sealed = open_message(payload, key=self._key, context=self._down)
        if not isinstance(sealed.message, (Welcome, Refuse)):
            if sealed.session != self._session:
                raise PayloadError("session", "a message of another session")
            if not self._window.take(sealed.seq):
                raise PayloadError("replayed", f"message {sealed.seq} came twice")
        return sealed.message
