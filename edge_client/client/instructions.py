"""The instructions of a session, which the daemon carries out in their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from edge_client.client.events import Finished
from edge_client.records import Ceiling, PartRef
from edge_client.wire.messages import Assign, Message
from edge_client.wire.reassembly import Range

__all__ = ["BeginSession", "Fetch", "Forget", "Instruction", "Remember", "Save", "Send", "Serve", "Start", "Stop"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the coordinator."""

    message: Message


@dataclass(frozen=True, slots=True)
class BeginSession:
    """From now on messages belong to this session."""

    session: str


@dataclass(frozen=True, slots=True)
class Save:
    """Write the lease and its state to disk, durably, with what is to be remembered.

    `attempts` counts the worker that is about to start, too; `replans` those that went over their budget.
    """

    assign: Assign
    update: Finished | None
    attempts: int = 1
    replans: int = 0


@dataclass(frozen=True, slots=True)
class Remember:
    """Record a plan that needs too much memory for this device; stored with the next `Save` or `Forget`."""

    ceiling: Ceiling


@dataclass(frozen=True, slots=True)
class Fetch:
    """Pull a part, if it is not here; answer with `PartReady`."""

    part: PartRef


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker for this assignment; its plan must need less than `ceiling_bytes` for training."""

    assign: Assign
    ceiling_bytes: int | None = None
    replans: int = 0


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker of this lease, if it runs."""

    lease: str


@dataclass(frozen=True, slots=True)
class Serve:
    """Send these chunks of the finished update."""

    update: Finished
    ranges: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the lease and its files; if `accepted`, the method's state stays until it is known whether it counts."""

    lease: str
    accepted: bool


Instruction: TypeAlias = Send | BeginSession | Save | Remember | Fetch | Start | Stop | Serve | Forget
