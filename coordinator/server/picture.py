"""One picture of the federation per second, which everybody who looks shares, and which nobody pays for who does not.

A `Picture` is an immutable record: the federation, the open run, a row for each enrolled device, counts of devices by
state, and a histogram of memory. `Pictures` takes them in the loop's thread:

    pictures.newest(service, now)  in the loop's thread: the newest picture, taken now if the newest is a second old, or
                                   devices were enrolled, removed or labelled, or a run has begun or ended
    pictures.of_now(service, now)  in the loop's thread: a new picture, for those who do not look again and again
    pictures.latest                in any thread: the newest picture, or None; says that somebody looks
    pictures.wait_for(number, s)   in any thread: the first picture after `number`, or None after `s` seconds
    pictures.look(service, now)    called by the loop several times a second: takes a picture when one is due and
                                   somebody looked within the last seconds; without viewers it returns at once

Pictures are numbered. A row says in which picture it last changed (`PicturedDevice.changed_in`), so a viewer that has
picture 7 needs only `picture.changed_since(7)`. When devices were enrolled or removed after it
(`picture.names_changed_in > 7`), it takes all rows. `seen_s` alone changes no row's number: a heartbeat that says
nothing new is no change. Rows of devices about which nothing is new are the same objects as before.

The cost is that of the devices that changed, and of copying a dictionary; the store is asked for two rows by key.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from coordinator.conductor.work_log import DeviceWork
from coordinator.rounds.machine import RunMachine

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["MEMORY_BINS", "Picture", "PicturedDevice", "PicturedRun", "Pictures", "memory_bin"]

MEMORY_BINS = 40  # each is 2.5 % of a budget; one more counts the devices whose peak was above it
_EVERY_S = 1.0
_WATCHED_S = 5.0  # a viewer that did not look for so long has gone
_NOTHING = DeviceWork()


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturedDevice:
    """What is known of one enrolled device."""

    name: str
    changed_in: int  # the number of the picture in which something other than `seen_s` changed last
    state: str  # "suspended", "offline", or what it reported last: idle, fetching, working, offering
    is_online: bool
    seen_s: float | None  # Unix time of its last message; None: none since this coordinator was started
    reported: str | None = None  # the state in its last heartbeat; None: none in this session, or it is offline
    phase: str = ""  # of its worker, such as "train"
    step: int = 0  # of `total`
    total: int = 0
    loss: float | None = None
    client: str | None = None  # the version of its software
    kind: str = ""  # of its hardware, such as "raspberry-pi-5"
    labels: Mapping[str, str] = field(default_factory=dict)
    plan: str = ""  # how it trains, in short; empty as long as it has no plan
    budget_bytes: int | None = None  # what it may use
    predicted_bytes: int | None = None  # peak of its newest update as its plan predicted it; before that, of its plan
    peak_bytes: int | None = None  # the same as it was measured
    peak_budget_bytes: int | None = None  # the budget that held for that update
    accuracy: float | None = None  # of the last version that it evaluated on its own test data
    reported_in: int | None = None  # the round of its newest update
    lease: str = (
        ""  # its newest assignment in the run: offered, accepted, stored, declined, refused, expired, cancelled
    )
    round: int | None = None  # of that assignment
    why: str = ""  # why it takes no part in the open run, or brought nothing in its newest assignment
    excluded: str = ""  # the code of a lasting reason for which the open run does not ask it any more
    tasks: Mapping[str, str] = field(default_factory=dict)  # what its owner allows: name -> hash of the file


_facts = attrgetter(*(f.name for f in fields(PicturedDevice) if f.name not in ("changed_in", "seen_s")))


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturedRun:
    """The open run, or the one that was open last since this coordinator was started."""

    run: str
    state: str
    reason: str
    method: str
    model: str
    metric: str
    version: int  # rounds that were committed
    rounds: int  # at most
    best_version: int | None
    best_score: float | None
    target: float | None  # of the metric, at which the run ends
    phase: str = ""  # what the open run does now, such as SELECTING or RUNNING; empty of a run that is over
    round: int | None = None  # the round that is open or comes next
    attempt: int | None = None
    goal: int | None = None  # updates that the open round wants; None between two rounds
    quorum: int | None = None
    num_updates: int | None = None  # that have come
    remaining_s: float | None = None  # until its deadline, as it was some seconds ago
    bytes_up: int = 0  # on their way: what travelled and is not yet written to the store
    bytes_down: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The federation at one moment."""

    number: int  # grows with every picture of this process
    names_changed_in: int  # the number of the picture before which devices were last enrolled or removed
    taken_s: float  # Unix time
    federation: str
    epoch: int  # of this coordinator: it grows with every start
    brokers: tuple[str, ...]
    is_connected: bool  # to its broker
    paused: str  # why runs pause; empty if they do not
    run: PicturedRun | None
    devices: Mapping[str, PicturedDevice]  # all that are enrolled, sorted by name
    num_online: int
    counts: Mapping[str, int]  # state -> devices; states that no device is in are left out
    memory: tuple[int, ...]  # devices by peak / budget, in `MEMORY_BINS` equal steps; the last: above the budget

    def changed_since(self, number: int) -> list[PicturedDevice]:
        """The rows that changed after the picture with this number, sorted by name."""
        return [device for device in self.devices.values() if device.changed_in > number]


class Pictures:
    """Takes pictures of one coordinator."""

    def __init__(self) -> None:
        self._picture: Picture | None = None
        self._is_new = threading.Condition()
        self._taken_at = self._wanted_at = float("-inf")
        self._devices: dict[str, PicturedDevice] = {}
        self._names_changed_in = 0
        self._online: frozenset[str] = frozenset()
        self._suspended: frozenset[str] = frozenset()
        self._counts: Counter[str] = Counter()
        self._memory = [0] * (MEMORY_BINS + 1)
        self._run: PicturedRun | None = None

    # any thread

    @property
    def latest(self) -> Picture | None:
        """The newest picture; None until the first one is taken, soon after the first call."""
        self._wanted_at = time.monotonic()
        return self._picture

    def wait_for(self, number: int, timeout_s: float) -> Picture | None:
        """The newest picture as soon as its number is higher than `number`; None if that takes too long."""
        until = time.monotonic() + timeout_s
        with self._is_new:
            while (picture := self.latest) is None or picture.number <= number:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return None
                self._is_new.wait(min(left_s, _EVERY_S))
        return picture

    # the loop's thread

    def look(self, service: Service, now: float) -> None:
        """Take a picture if one is due and somebody looks."""
        if now - self._taken_at >= _EVERY_S and now - self._wanted_at < _WATCHED_S:
            self._take(service, now)

    def newest(self, service: Service, now: float) -> Picture:
        """The newest picture: at most a second old, and as new as the enrolled devices and the open run."""
        if self._picture is None or now - self._taken_at >= _EVERY_S or service.roster.changes.may_be_all:
            return self._take(service, now)
        return self._picture

    def of_now(self, service: Service, now: float) -> Picture:
        """A picture of this moment, for those who do not look again and again."""
        return self._take(service, now)

    def start_over(self) -> None:
        """Everything may be different: the coordinator has started over from its store."""
        self._devices = {}
        self._taken_at = float("-inf")

    def _take(self, service: Service, now: float) -> Picture:
        number = self._picture.number + 1 if self._picture is not None else 1
        self._taken_at = now
        self._update_rows(service, number, now)
        self._run = _run(service, self._run)
        picture = Picture(
            number=number,
            names_changed_in=self._names_changed_in,
            taken_s=time.time(),
            federation=service.federation,
            epoch=service.epoch,
            brokers=service.brokers,
            is_connected=service.connected,
            paused=service.paused,
            run=self._run,
            devices=MappingProxyType(self._devices),
            num_online=len(self._online),
            counts=MappingProxyType({state: num for state, num in sorted(self._counts.items()) if num}),
            memory=tuple(self._memory),
        )
        with self._is_new:
            self._picture = picture
            self._is_new.notify_all()
        return picture

    def _update_rows(self, service: Service, number: int, now: float) -> None:
        """Make new rows of the devices that changed, in a new dictionary: the one before belongs to its picture."""
        roster = service.roster
        changed = roster.changes.take()
        online, suspended = roster.online(now), roster.suspended(now)
        if changed is None or not self._devices:
            names = roster.names()
            if list(self._devices) != names:
                self._names_changed_in = number
            rows = {name: self._devices.get(name) for name in names}
            for name in self._devices.keys() - rows.keys():
                self._count(self._devices[name], -1)
            changed = set(names)
        else:
            rows = dict(self._devices)
            changed |= (online ^ self._online) | (suspended ^ self._suspended)
            changed &= rows.keys()
        self._online, self._suspended = online, suspended
        clock = time.time() - now
        for name in changed:
            before = rows[name]
            after = _device(service, name, number, clock, online=online, suspended=suspended)
            if before is not None:
                if _facts(after) == _facts(before):
                    after = replace(after, changed_in=before.changed_in)
                self._count(before, -1)
            self._count(after, 1)
            rows[name] = after
        self._devices = {name: row for name, row in rows.items() if row is not None}

    def _count(self, device: PicturedDevice, by: int) -> None:
        self._counts[device.state] += by
        if device.peak_bytes and device.peak_budget_bytes:
            self._memory[memory_bin(device.peak_bytes, device.peak_budget_bytes)] += by


def memory_bin(peak_bytes: int, budget_bytes: int) -> int:
    """The place of a device in `Picture.memory`; a peak that is exactly its budget is inside it."""
    if peak_bytes > budget_bytes:
        return MEMORY_BINS
    return min(MEMORY_BINS - 1, MEMORY_BINS * peak_bytes // budget_bytes)


def _device(
    service: Service, name: str, number: int, clock: float, *, online: frozenset[str], suspended: frozenset[str]
) -> PicturedDevice:
    roster, conductor = service.roster, service.conductor
    shown, present, plan = conductor.shown, roster.presence(name), conductor.plan_of(name)
    work = (shown.work.of(name) if shown is not None else None) or _NOTHING
    beat = present.heartbeat if present is not None and name in online else None
    is_reported = work.reported_in > 0
    return PicturedDevice(
        name=name,
        changed_in=number,
        state="suspended" if name in suspended else _state(beat.state if beat else "", is_online=name in online),
        is_online=name in online,
        seen_s=round(clock + present.last_seen, 1) if present is not None else None,
        reported=beat.state if beat else None,
        phase=beat.phase if beat else "",
        step=beat.step if beat else 0,
        total=beat.total if beat else 0,
        loss=beat.loss if beat else None,
        client=present.client if present is not None else None,
        kind=present.profile.kind if present is not None else "",
        labels=roster.labels_of(name),
        plan=plan.describe() if plan is not None else "",
        budget_bytes=present.profile.budget_bytes if present is not None else None,
        predicted_bytes=work.predicted_bytes or (plan.predicted_bytes or None if plan is not None else None),
        peak_bytes=work.peak_bytes or None,
        peak_budget_bytes=work.budget_bytes or None,
        accuracy=work.accuracy,
        reported_in=work.reported_in if is_reported else None,
        lease=work.lease,
        round=work.round or None,
        why=_why(service, name, work, is_known=present is not None),
        excluded=conductor.machine.excluded.get(name, "") if conductor.machine is not None else "",
        tasks=present.tasks if present is not None else {},
    )


def _state(reported: str, *, is_online: bool) -> str:
    """A device that has just connected has reported nothing yet."""
    return (reported or "idle") if is_online else "offline"


def _why(service: Service, name: str, work: DeviceWork, *, is_known: bool) -> str:
    """Why a device takes no part; one that never connected could not say what it is."""
    machine = service.conductor.machine
    if machine is None or not is_known:
        return work.why
    barred = service.conductor.obstacle(machine.file, name)
    if barred is not None:
        return f"{barred.code}: {barred.detail}"
    return work.why or machine.excluded.get(name, "")


def _run(service: Service, before: PicturedRun | None) -> PicturedRun | None:
    """The open run, or the last one; a run that is over is read once."""
    machine, shown, store = service.conductor.machine, service.conductor.shown, service.store
    if shown is None or (machine is None and before is not None and before.run == shown.id and not before.phase):
        return before
    run_id = shown.id
    row, model = store.runs.get(run_id), store.models.last(run_id)
    if row is None:
        return None
    best = store.models.get(run_id, row.best_version) if row.best_version is not None else None
    file = shown.file
    return PicturedRun(
        run=row.id,
        state=row.state,
        reason=row.reason,
        method=file.method.name,
        model=file.what,
        metric=file.stop.metric,
        version=model.version if model is not None else 0,
        rounds=file.stop.rounds,
        best_version=row.best_version,
        best_score=best.score if best is not None else None,
        target=file.stop.target,
        **(_open_round(service, machine) if machine is not None else {}),
    )


def _open_round(service: Service, machine: RunMachine) -> dict[str, Any]:
    """What `PicturedRun` has of an open run alone."""
    moved, row = service.traffic.moved.values(), machine.round
    return {
        "phase": machine.phase,
        "round": machine.number,
        "attempt": machine.attempt,
        "goal": row.goal if row is not None else None,
        "quorum": row.quorum if row is not None else None,
        "num_updates": len(machine.updates) if row is not None else None,
        "remaining_s": row.remaining_s if row is not None else None,
        "bytes_up": sum(up for up, _ in moved),
        "bytes_down": sum(down for _, down in moved),
    }
