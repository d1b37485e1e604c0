"""What can happen to a session: its connection, its parts, its worker; and every message of the coordinator.

See also `edge_client.client.session`, which answers an event with `edge_client.client.instructions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from edge_client.records import Ceiling, Count, Hash
from edge_client.wire.messages import Message

__all__ = [
    "Event",
    "Finished",
    "LinkDown",
    "LinkUp",
    "PartReady",
    "Tick",
    "UpdateLost",
    "WorkerDone",
    "WorkerFailed",
    "WorkerProgress",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A trained update that waits for its receipt."""

    sha256: Hash
    length: Count
    num_samples: int


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The transport is connected."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The transport is not connected any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class PartReady:
    """A part is on disk and was checked."""

    sha256: str


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """What the worker is doing, for the heartbeat."""

    phase: str
    step: int
    total: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class WorkerDone:
    """The worker wrote its update, durably."""

    lease: str
    update: Finished


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """The worker ended without an update; `final`: another attempt would end the same.

    `exceeded`: it went over its budget with a plan that was to take so much; a smaller one may do.
    """

    lease: str
    code: str
    detail: str = ""
    log: tuple[str, ...] = ()
    final: bool = False
    exceeded: Ceiling | None = None


@dataclass(frozen=True, slots=True)
class UpdateLost:
    """The file of the finished update is missing or incomplete although it was saved, as after a power cut."""

    lease: str


Event: TypeAlias = (
    LinkUp | LinkDown | Tick | PartReady | WorkerProgress | WorkerDone | WorkerFailed | UpdateLost | Message
)
