"""Group commit: what a turn of the loop writes is one transaction, and nobody is told anything before it is durable.

    with commits.turn():
        ...                      writing methods of the store share one transaction, which begins at the first of them
        commits.after(tell)      messages, announcements and removals of files wait in a queue
    # here the transaction is committed, durably, and the queue has been worked off, in the order of its entries

Outside of a turn each writing method is a transaction of its own, and `after` calls its action at once.

An error in a turn, also one at the commit, rolls back everything that the turn wrote, drops its queue, and is raised:
memory is ahead of the store then, so whoever runs the loop starts over from the store. A writing method that fails
inside a turn spoils the turn: nothing can be written any more, and the turn ends with an error, even if somebody caught
that of the method. No store waits for anything else while a transaction is open.

Fault points: `store.<point>.commit` when a writing method has done its statements; `turn.commit` before the commit of a
turn, `turn.committed` after it, `turn.told` when the queue is empty; `store.<point>.committed` after the commit, at its
place in the queue.
Covers: when to commit and what comes after, for any engine. Does not cover: statements, and how an engine commits
(`database` for SQLite).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from edge_client import faults
from edge_client.errors import MachineError

__all__ = ["GroupCommit"]


class GroupCommit:
    """The transactions of one connection, used by one thread."""

    def __init__(
        self,
        *,
        commit: Callable[[], None],
        rollback: Callable[[], None],
        errors: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """`commit` makes durable what was written since the last call, or does nothing; `rollback` undoes it.

        `errors`, given what is being saved, turns the engine's errors into those of fedfit while its context is open.
        """
        self._commit = commit
        self._rollback = rollback
        self._errors = errors
        self._is_in_turn = self._is_telling = self._has_written = False
        self._is_spoiled = False  # a writing method of this turn failed
        self._queue: deque[Callable[[], None]] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Commit what is written inside, then do what was to come after it; turns are not nested."""
        if self._is_in_turn:
            raise RuntimeError("a turn is open already")
        self._is_in_turn, self._has_written = True, False
        is_durable = False
        try:
            yield
            self._check()
            if self._has_written:
                with self._errors("turn"):
                    faults.point("turn.commit")
                    self._commit()
            is_durable = True
        finally:
            self._is_in_turn = self._is_spoiled = False
            if not is_durable:
                self._queue.clear()
                self._rollback()
        if self._has_written:
            faults.point("turn.committed")
        self._work_off()
        if self._has_written:
            faults.point("turn.told")

    def after(self, action: Callable[[], None]) -> None:
        """Do this once all that was written so far is durable: at once outside of a turn, otherwise after its commit.

        Actions keep their order. One that raises drops those behind it.
        """
        if self._is_in_turn or self._is_telling:
            self._queue.append(faults.bound(action))
        else:
            action()

    @contextmanager
    def write(self, point: str) -> Iterator[None]:
        """Around the statements of one writing method: all of them take effect, or none."""
        self._check()
        is_done = False
        try:
            with self._errors(point):
                yield
                faults.point(f"store.{point}.commit")
                if not self._is_in_turn:
                    self._commit()
            is_done = True
        finally:
            self._is_spoiled = self._is_in_turn and not is_done
            if not is_done and not self._is_in_turn:
                self._rollback()
        self._has_written = True
        self.after(functools.partial(faults.point, f"store.{point}.committed"))

    def _check(self) -> None:
        if self._is_spoiled:
            raise MachineError("a write of this turn failed, so that nothing of it can be saved")

    def _work_off(self) -> None:
        """Actions may write, which is a transaction of its own now, and may queue further actions."""
        self._is_telling = True
        try:
            while self._queue:
                self._queue.popleft()()
        finally:
            self._queue.clear()
            self._is_telling = False
