"""What a daemon and the template of its workers say to each other: one JSON datagram each, descriptors beside it.

Covers: the messages and their form. Does not cover: when they are sent (`template`, `client.template`).
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edge_client.records import Count, Text, from_map, to_map

__all__ = ["Ended", "Fork", "Forked", "Message", "Prepare", "Ready", "Refused", "receive", "send"]

_LONGEST_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The template has loaded everything and forks at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """More assignments of a run may come: do once what each of its workers would do, then say `Ready` again."""

    run: str  # the run's settings, a file
    slice: str
    budget_bytes: Count  # of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Fork a worker for the assignment in a folder. Beside it: the pipe for its progress, and its log."""

    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """The worker runs. Beside it: a descriptor of the process (pidfd), for signals that reach no other."""

    pid: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The template cannot fork safely."""

    reason: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A worker has ended; `code` is its exit code, or minus the signal that ended it."""

    pid: Count
    code: int


Message: TypeAlias = Ready | Prepare | Fork | Forked | Refused | Ended

_KINDS: dict[str, type[Message]] = {cls.__name__.lower(): cls for cls in (Ready, Prepare, Fork, Forked, Refused, Ended)}


def send(control: socket.socket, message: Message, *, fds: Sequence[int] = ()) -> None:
    """Send a message, and descriptors with it."""
    data = json.dumps({type(message).__name__.lower(): to_map(message)}).encode()
    socket.send_fds(control, [data], fds)


def receive(control: socket.socket, *, num_fds: int = 1) -> tuple[Message | None, list[int]]:
    """The next message and what came with it; None at the end of the socket."""
    data, fds, _, _ = socket.recv_fds(control, _LONGEST_BYTES, num_fds)
    if not data:
        return None, fds
    ((kind, content),) = json.loads(data).items()
    return from_map(_KINDS[kind], content), fds
