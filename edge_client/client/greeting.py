"""Repeats the hello until the coordinator answers: numbers the hellos, and decides which answer counts.

Any hello of this connection may be the one that is answered: a coordinator that is behind answers the first one when
the second is already on its way. Hellos of an earlier connection, or from before the coordinator refused the session,
do not count any more.

Covers: hellos and welcomes. Does not cover: what follows a welcome (`session`).
"""

from __future__ import annotations

from edge_client.client.pace import Pace
from edge_client.wire.messages import Welcome

__all__ = ["Greeting"]

_PAUSE_S = 10.0  # a coordinator that has lost no hello answers within this time, however many devices come at once
_LONGEST_PAUSE_S = 30.0


class Greeting:
    """The hellos of one process on a device."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.due_at = 0.0  # when to say hello again, unless it is answered
        self._pace = pace or Pace(_PAUSE_S, _LONGEST_PAUSE_S)
        self._newest = 0
        self._oldest = 1  # that may still be answered
        self._taken: Welcome | None = None

    def restart(self) -> None:
        """Forget the hellos so far: an answer to them would not be for this connection."""
        self._oldest = self._newest + 1
        self._taken = None
        self._pace.restart()

    def count_hello(self, now: float) -> int:
        """Count a hello that is sent now; returns its number."""
        self._newest += 1
        self.due_at = now + self._pace.next_s()
        return self._newest

    def accepts(self, welcome: Welcome) -> bool:
        """Whether a welcome begins a session; the answer to a repeated hello belongs to the session that has begun.

        A coordinator of an earlier version begins another session for every hello: then the newest counts.
        """
        if not self._oldest <= welcome.hello <= self._newest:
            return False
        taken = self._taken
        if taken is not None and (welcome.session == taken.session or welcome.hello <= taken.hello):
            return False
        self._taken = welcome
        self._pace.restart()
        return True
