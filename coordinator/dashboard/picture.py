"""What only the coordinator's loop knows of its devices and the open run, copied out while somebody watches.

The loop calls `look` in every turn. Up to 200 devices are looked at together, at most every 250 ms; a larger fleet in
slices, so that a turn stays short, and once a second. A look compares with the one before and hands on what has
changed, as tuples that no thread changes.

Covers: presence, heartbeats, leases and the open round. Does not cover: what the store knows (`history`), what a viewer
gets (`live`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from coordinator.conductor.round_clock import RoundClock
from coordinator.store.rows import LeaseRow
from edge_client.config.run_file import RunFile

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["SMALL_FLEET", "WATCH_S", "Change", "DeviceFacts", "Picture", "RunFacts"]

SMALL_FLEET = 200  # devices
WATCH_S = 30.0  # after the last question nobody looks any more
_FAST_S = 0.25
_SLOW_S = 1.0
_SLICE = 250  # devices in a turn


class DeviceFacts(NamedTuple):
    """A device as the loop sees it. Times are of this machine's monotonic clock."""

    name: str
    online: bool
    suspended: bool
    client: str
    kind: str
    budget_bytes: int | None
    labels: tuple[tuple[str, str], ...]
    doing: str  # the heartbeat's state and phase
    phase: str
    step: int
    total: int
    loss: float | None
    plan: str
    predicted_bytes: int
    lease: str  # of the open round; empty if it has none
    lease_state: str
    trains: bool
    code: str  # why the lease failed, or why the run does not ask the device
    detail: str
    moments: tuple[tuple[str, float], ...]  # of the lease, in seconds since the round began
    phases: tuple[tuple[str, float], ...]  # seconds of each, as the device reports them with its update


class RunFacts(NamedTuple):
    """The open run, and how the coordinator stands. `run` is empty while none is open."""

    run: str = ""
    dry: bool = False
    number: int = 0
    attempt: int = 0
    phase: str = ""
    version: int = 0
    only_evaluates: bool = False
    began_at: float | None = None  # monotonic; None if this process did not see it
    ends_at: float | None = None  # the deadline
    paused: str = ""
    connected: bool = False
    bytes_up: int = 0  # that the store does not know yet
    bytes_down: int = 0
    file: RunFile | None = None


class Change(NamedTuple):
    """What has changed since the last look; `names` are all enrolled devices, None if they are the same."""

    names: tuple[str, ...] | None
    devices: tuple[DeviceFacts, ...]
    seen_at: Mapping[str, float]
    run: RunFacts | None
    at: float


class Picture:
    """Looks at the coordinator, a slice at a time, and hands on what has changed."""

    def __init__(self, service: Service, hand_on: Callable[[Change], None]) -> None:
        self._service = service
        self._hand_on = hand_on
        self._known: dict[str, DeviceFacts] = {}
        self._names: tuple[str, ...] | None = None
        self._run: RunFacts | None = None
        self._left: Sequence[str] = ()  # of the sweep that is under way
        self._leases: Mapping[str, LeaseRow] = {}
        self._due = 0.0

    def begin_anew(self) -> None:
        """Hand on everything again: nobody has watched for a while."""
        self._names, self._known, self._left, self._run, self._due = None, {}, (), None, 0.0

    @property
    def is_under_way(self) -> bool:
        """Whether the devices of this sweep have not all been looked at."""
        return bool(self._left)

    def look(self, now: float) -> None:
        """Go on with the sweep that is under way, or begin one if it is due."""
        if not self._left:
            if now < self._due:
                return
            self._begin(now)
        total = len(self._names or ())
        size = total if total <= SMALL_FLEET else max(_SLICE, math.ceil(total / 4))
        names, self._left = self._left[:size], self._left[size:]
        online, suspended = self._service.roster.online(now), self._service.roster.suspended(now)
        changed, seen_at = [], {}
        for name in names:
            facts = self._device(name, online, suspended)
            present = self._service.roster.presence(name)
            if present is not None:
                seen_at[name] = present.last_seen
            if self._known.get(name) != facts:
                self._known[name] = facts
                changed.append(facts)
        run = self._look_at_run(now)
        new_run = run if run != self._run else None
        self._run = run
        self._hand_on(Change(names=None, devices=tuple(changed), seen_at=seen_at, run=new_run, at=now))

    def _begin(self, now: float) -> None:
        names = tuple(self._service.roster.names())
        self._due = now + (_FAST_S if len(names) <= SMALL_FLEET else _SLOW_S)
        if names != self._names:
            self._known = {name: facts for name, facts in self._known.items() if name in set(names)}
            self._names = names
            self._hand_on(Change(names=names, devices=(), seen_at={}, run=None, at=now))
        machine = self._service.conductor.machine
        self._leases = {lease.device: lease for lease in machine.leases.values()} if machine is not None else {}
        self._left = names

    def _device(self, name: str, online: frozenset[str], suspended: frozenset[str]) -> DeviceFacts:
        service = self._service
        present, row, lease = service.roster.presence(name), service.roster.row(name), self._leases.get(name)
        beat = present.heartbeat if present is not None else None
        plan = service.conductor.plan_of(name)
        machine, clock = service.conductor.machine, self._clock()
        code, detail = (lease.code, lease.detail) if lease is not None else ("", "")
        moments: Mapping[str, float] = {}
        phases: Mapping[str, float] = {}
        if clock is not None and lease is not None:
            moments, phases = clock.of_lease(lease.id)
        elif machine is not None and name in online:
            obstacle = service.conductor.obstacle(machine.file, name)
            code, detail = obstacle if obstacle is not None else (machine.excluded.get(name, ""), "")
        labels = {**(present.labels if present else {}), **(row.labels if row else {})}
        return DeviceFacts(
            name,
            name in online,
            name in suspended,
            present.client if present is not None else "",
            present.profile.kind if present is not None else "",
            (present.profile.private_budget_bytes or present.profile.budget_bytes) if present is not None else None,
            tuple(sorted(labels.items())),
            beat.state if beat is not None else "",
            beat.phase if beat is not None else "",
            beat.step if beat is not None else 0,
            beat.total if beat is not None else 0,
            beat.loss if beat is not None else None,
            plan.describe() if plan is not None else "",
            (plan.private_predicted_bytes or plan.predicted_bytes) if plan is not None else 0,
            lease.id if lease is not None else "",
            lease.state if lease is not None else "",
            lease.train if lease is not None else False,
            code,
            detail,
            tuple(moments.items()),
            tuple(phases.items()),
        )

    def _look_at_run(self, now: float) -> RunFacts:
        service = self._service
        row, machine, clock = service.conductor.run, service.conductor.machine, self._clock()
        moved = service.traffic.moved.values() if row is not None else ()
        if row is None or machine is None or clock is None:
            return RunFacts(paused=service.paused, connected=service.connected)
        began_s, round_ = clock.elapsed_s(), machine.round
        return RunFacts(
            run=row.id,
            dry=row.dry,
            number=machine.number,
            attempt=machine.attempt,
            phase=machine.phase,
            version=machine.version,
            only_evaluates=round_ is not None and round_.goal == 0,
            began_at=self._steady(now - began_s, "began_at") if began_s is not None else None,
            ends_at=self._steady(now + round_.remaining_s, "ends_at") if round_ is not None else None,
            paused=service.paused,
            connected=service.connected,
            bytes_up=sum(up for up, _ in moved),
            bytes_down=sum(down for _, down in moved),
            file=machine.file,
        )

    def _clock(self) -> RoundClock | None:
        """The times of the open run."""
        conductor = self._service.conductor
        return conductor.shown.clock if conductor.run is not None and conductor.shown is not None else None

    def _steady(self, at: float, name: str) -> float:
        """A time that was computed again is the same one, or the run would seem to change with every look."""
        before = getattr(self._run, name, None)
        return before if before is not None and abs(before - at) < _FAST_S else round(at, 3)
