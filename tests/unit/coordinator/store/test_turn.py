"""A turn is one durable commit, and what waits for it comes after it, in order, or never."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rows import device_row

from coordinator.store.sqlite import SqliteStore
from coordinator.store.turn import GroupCommit
from edge_client import faults
from edge_client.errors import DiskFullError, MachineError


class Engine:
    """What a store gives to `GroupCommit`; it notes what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.commits = GroupCommit(
            commit=lambda: self.log.append("commit"),
            rollback=lambda: self.log.append("rollback"),
            errors=self._errors,
        )

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DiskFullError(f"cannot save ({what}): {error.strerror}") from error

    def write(self, name: str) -> None:
        with self.commits.write(name):
            self.log.append(name)

    def tell(self, what: str) -> None:
        self.commits.after(lambda: self.log.append(what))

    def turn(self, *steps: Callable[[], None]) -> None:
        with self.commits.turn():
            for step in steps:
                step()

    def writes(self, name: str) -> Callable[[], None]:
        return lambda: self.write(name)

    def tells(self, what: str) -> Callable[[], None]:
        return lambda: self.tell(what)


def test_outside_of_a_turn_each_write_is_durable_at_once() -> None:
    """Two writes, two commits; what is told is told at once."""
    engine = Engine()
    engine.write("a")
    engine.tell("receipt of a")
    engine.write("b")
    assert engine.log == ["a", "commit", "receipt of a", "b", "commit"]


def test_a_turn_commits_once_and_tells_afterwards_in_order() -> None:
    """Three writes and two messages between them: one commit, then the messages."""
    engine = Engine()
    with engine.commits.turn():
        engine.write("a")
        engine.tell("receipt of a")
        engine.write("b")
        engine.tell("receipt of b")
        engine.write("c")
        assert engine.log == ["a", "b", "c"]
    assert engine.log == ["a", "b", "c", "commit", "receipt of a", "receipt of b"]


def test_a_turn_that_writes_nothing_commits_nothing() -> None:
    """A message alone goes out at the end of the turn."""
    engine = Engine()
    with engine.commits.turn():
        engine.tell("welcome")
        assert engine.log == []
    assert engine.log == ["welcome"]


def test_an_error_rolls_back_and_drops_what_waits() -> None:
    """Of an error in the turn nothing is told; the next turn begins with an empty queue."""
    engine = Engine()
    with pytest.raises(ZeroDivisionError):
        engine.turn(engine.writes("a"), engine.tells("receipt of a"), lambda: print(1 / 0))
    assert engine.log == ["a", "rollback"]
    with engine.commits.turn():
        engine.write("b")
    assert engine.log == ["a", "rollback", "b", "commit"]


def test_a_failed_commit_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full at the commit of the turn: all is rolled back."""
    engine = Engine()
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:turn.commit")])
    with pytest.raises(DiskFullError, match=r"cannot save \(turn\)"):
        engine.turn(engine.writes("a"), engine.tells("receipt of a"))
    assert engine.log == ["a", "rollback"]


def test_a_write_that_fails_spoils_the_turn_even_if_it_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """b fails half-way: neither a nor c may be durable, because memory and store differ now."""
    engine = Engine()
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:store.b.commit")])

    def caught(name: str, kind: type[MachineError]) -> None:
        with pytest.raises(kind):
            engine.write(name)

    with pytest.raises(MachineError, match="a write of this turn failed"):
        engine.turn(
            engine.writes("a"),
            lambda: caught("b", DiskFullError),
            lambda: caught("c", MachineError),
            engine.tells("receipt of a"),
        )
    assert engine.log == ["a", "b", "rollback"]
    engine.write("d")
    assert engine.log == ["a", "b", "rollback", "d", "commit"]


def test_what_is_told_may_write_and_tell_more() -> None:
    """A write while the queue is worked off is a transaction of its own; what it tells comes last, in order."""
    engine = Engine()

    def first() -> None:
        engine.log.append("first")
        engine.write("w")
        engine.tell("third")

    with engine.commits.turn():
        engine.write("a")
        engine.commits.after(first)
        engine.tell("second")
    assert engine.log == ["a", "commit", "first", "w", "commit", "second", "third"]


def test_turns_are_not_nested() -> None:
    """The second one is a bug of ours, and spoils the first."""
    engine = Engine()
    with pytest.raises(RuntimeError, match="open already"), engine.commits.turn(), engine.commits.turn():
        pass
    assert engine.log == ["rollback"]


def test_points_strike_at_their_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a durable write in a turn is not told when the process ends right after that write.

    Both writes are durable by then: a's receipt went out, b's did not.
    """
    engine = Engine()
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:store.b.committed")])
    steps = (engine.writes("a"), engine.tells("receipt of a"), engine.writes("b"), engine.tells("receipt of b"))
    with pytest.raises(OSError, match="injected"):
        engine.turn(*steps)
    assert engine.log == ["a", "b", "commit", "receipt of a"]


def test_points_in_the_queue_are_of_the_round_in_which_they_were_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round 2 opens in the turn in which round 1 was announced."""
    engine = Engine()
    monkeypatch.setattr(faults, "_round", None)
    monkeypatch.setattr(faults, "_faults", [faults._parse("eio:store.announce.committed@1")])
    steps = (lambda: faults.in_round(1), engine.writes("announce"), lambda: faults.in_round(2), engine.writes("open"))
    with pytest.raises(OSError, match="injected"):
        engine.turn(*steps)
    assert engine.log == ["announce", "open", "commit"]


def test_others_see_a_turn_as_a_whole(tmp_path: Path) -> None:
    """Inside a turn the store reads what it wrote; a second connection sees it after the turn, or never."""
    store, other = SqliteStore(tmp_path / "state.db"), SqliteStore(tmp_path / "state.db")
    with store.turn():
        store.devices.add(device_row("a"))
        store.devices.add(device_row("b"))
        assert len(store.devices.all()) == 2
        assert other.devices.all() == []
    assert len(other.devices.all()) == 2

    def fail() -> None:
        with store.turn():
            store.devices.add(device_row("c"))
            raise MachineError("why")

    with pytest.raises(MachineError, match="why"):
        fail()
    assert len(store.devices.all()) == len(other.devices.all()) == 2
    store.close()
    other.close()
