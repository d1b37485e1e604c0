"""The state machine of the client, which decides what a device does next, without I/O.

    idle ──Assign──> fetching ──all parts here──> working ──worker done──> offering ──Receipt──> idle
           any state ──Cancel, newer Assign, Decline──> idle

Rules
  R1  One lease at a time. Only an assignment newer than all seen before, by (epoch, issue), is taken.
  R2  Save first: a lease is on disk before it is accepted, a finished update before it is offered.
  R3  A finished update is never trained again, unless the disk lost it, and deleted only on its receipt (or a cancel).
  R4  What may be lost on the way is repeated, less and less often: hello until welcomed, offer until granted or
      receipted.
  R5  A crashed worker starts its assignment again, a few times, also if it takes the client with it; a declining one
      does not.
  R6  A worker that went over its budget is followed at once by one with a smaller plan, a few times; what was too much
      is remembered before that one starts.

`Session.handle(event, now)` takes events and returns instructions for the daemon to carry out in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge_client.client.events import (
    Event,
    Finished,
    LinkDown,
    LinkUp,
    PartReady,
    Tick,
    UpdateLost,
    WorkerDone,
    WorkerFailed,
    WorkerProgress,
)
from edge_client.client.greeting import Greeting
from edge_client.client.instructions import (
    BeginSession,
    Fetch,
    Forget,
    Instruction,
    Remember,
    Save,
    Send,
    Serve,
    Start,
    Stop,
)
from edge_client.client.pace import Pace
from edge_client.config.quantities import format_bytes
from edge_client.records import Ceiling, DeviceProfile
from edge_client.wire.messages import (
    Accept,
    Assign,
    Cancel,
    Decline,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Offer,
    Receipt,
    Refuse,
    Welcome,
)

__all__ = ["Session"]

_OFFER_AGAIN_S = 3.0
_GRANTED_AGAIN_S = 10.0  # after a grant the coordinator asks; if it falls silent, offer again
_LONGEST_OFFER_PAUSE_S = 30.0
_MAX_ATTEMPTS = 4
_MAX_REPLANS = 8
_RETRY_S = 1.0


class Session:
    """The state of one client; see the module's docstring for its rules."""

    def __init__(
        self,
        *,
        boot: str,
        profile: DeviceProfile,
        labels: dict[str, str],
        client: str,
        assign: Assign | None = None,
        update: Finished | None = None,
        attempts: int = 0,
        replans: int = 0,
        highest: tuple[int, int] = (0, 0),
    ) -> None:
        """`assign`, `update`, `attempts`, `replans` and `highest` are what was saved before a restart."""
        self._boot = boot
        self._profile = profile
        self._labels = labels
        self._client = client
        self.assign = assign
        self.update = update
        self._highest = highest
        self._missing = {part.sha256 for part in assign.parts} if assign else set()
        self._working = False
        self._attempts = attempts
        self._replans = replans
        self._ceiling: int | None = None
        self._retry_at: float | None = None
        self._declined: Decline | None = None
        self._linked = False
        self._welcomed = False
        self._greeting = Greeting()
        self._heartbeat_at = 0.0
        self._heartbeat_s = 10.0
        self._offer_at = 0.0
        self._offers_pace = Pace(_OFFER_AGAIN_S, _LONGEST_OFFER_PAUSE_S)
        self._granted_pace = Pace(_GRANTED_AGAIN_S, _LONGEST_OFFER_PAUSE_S)
        self._progress = WorkerProgress("", 0, 0, None)
        self.free_bytes = 0
        self.refusal = ""

    @property
    def state(self) -> str:
        """One word for people and for the heartbeat."""
        if self.assign is None:
            return "idle"
        if self.update is not None:
            return "offering"
        return "working" if not self._missing else "fetching"

    @property
    def online(self) -> bool:
        """Whether the coordinator has accepted this device."""
        return self._welcomed

    @property
    def progress(self) -> WorkerProgress:
        """What the worker last reported for the lease."""
        return self._progress

    @property
    def budget_bytes(self) -> int:
        """What a worker may use."""
        return self._profile.budget_bytes

    def next_due(self) -> float:
        """When `Tick` is wanted at the latest."""
        if not self._linked:
            return self._retry_at if self._retry_at is not None else float("inf")
        due = [self._heartbeat_at if self._welcomed else self._greeting.due_at]
        if self.update is not None and self._welcomed:
            due.append(self._offer_at)
        if self._retry_at is not None:
            due.append(self._retry_at)
        return min(due)

    def begin(self) -> list[Instruction]:
        """What to do right after a start: continue the lease that was saved."""
        if self.assign is None or self.update is not None:
            return []
        return [*(Fetch(part) for part in self.assign.parts), *self._work()]

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """The only way in; see the module's docstring."""
        return list(self._react(event, now))

    def _react(self, event: Event, now: float) -> Iterator[Instruction]:
        match event:
            case LinkUp():
                self._linked = True
                self._greeting.restart()  # a new connection: the reason for slow ones is over
                yield from self._hello(now)
            case LinkDown():
                self._linked = self._welcomed = False
            case Tick():
                yield from self._tick(now)
            case Welcome():
                yield from self._welcome(event, now)
            case Refuse():
                self._refused(event, now)
            case Assign():
                yield from self._assigned(event, now)
            case Cancel():
                if self.assign and self.assign.lease == event.lease:
                    yield from self._drop(accepted=False)
            case Grant():
                if self._offers(event.lease, event.sha256) and self.update:
                    self._granted_pace.restart()
                    self._offer_at = now + self._granted_pace.next_s()
                    yield Serve(self.update, event.ranges)
            case Receipt():
                if self._offers(event.lease, event.sha256):
                    yield from self._drop(accepted=event.status == "accepted")
            case PartReady():
                self._missing.discard(event.sha256)
                yield from self._work()
            case WorkerProgress():
                if event.phase != self._progress.phase:
                    self._heartbeat_at = now  # people who watch see each phase, not only every tenth second
                self._progress = event
            case WorkerDone():
                yield from self._worker_done(event, now)
            case WorkerFailed():
                yield from self._worker_failed(event, now)
            case UpdateLost():
                yield from self._update_lost(event)
            case _:
                pass  # a message that travels the other way: the link refuses it before it comes here

    def _hello(self, now: float) -> Iterator[Instruction]:
        self._welcomed = False
        yield Send(
            Hello(
                boot=self._boot,
                hello=self._greeting.count_hello(now),
                client=self._client,
                profile=self._profile,
                labels=self._labels,
                free_bytes=self.free_bytes,
                held=self.assign.lease if self.assign else None,
                finished=self.update is not None,
            )
        )

    def say_hello(self, now: float) -> list[Instruction]:
        """Say hello again, because the coordinator may have restarted or lost the last hello."""
        if not self._linked:
            return []
        if self._welcomed:  # otherwise any of the hellos so far may still be answered
            self._greeting.restart()
        return list(self._hello(now))

    def goodbye(self) -> list[Instruction]:
        """Announce that the client stops on purpose; a worker that ends with it has not failed."""
        leave: list[Instruction] = [Send(Goodbye())] if self._welcomed else []
        if self.assign and self._working and self._attempts > 1:
            leave.append(Save(self.assign, None, self._attempts - 1, self._replans))
        return leave

    def _welcome(self, welcome: Welcome, now: float) -> Iterator[Instruction]:
        if welcome.boot != self._boot or not self._linked or not self._greeting.accepts(welcome):
            return
        self._welcomed = True
        self.refusal = ""
        self._heartbeat_s = welcome.heartbeat_s
        self._heartbeat_at = now + self._heartbeat_s
        yield BeginSession(welcome.session)
        if self.update is not None:
            self._offers_pace.restart()
            yield from self._offer(now)

    def _refused(self, refuse: Refuse, now: float) -> None:
        if refuse.boot != self._boot and not (refuse.boot == "any" and refuse.code == "session"):
            return
        if refuse.boot == "any" and not self._welcomed:
            return  # about a session that is over for us already: the hello for the next one is on its way
        self._welcomed = False
        self.refusal = f"{refuse.code}: {refuse.detail}"
        self._greeting.restart()
        self._greeting.due_at = now + refuse.retry_s

    def _tick(self, now: float) -> Iterator[Instruction]:
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            yield from self._work()
        if not self._linked:
            return
        if not self._welcomed:
            if now >= self._greeting.due_at:
                yield from self._hello(now)
            return
        if self.update is not None and now >= self._offer_at:
            yield from self._offer(now)
        if now >= self._heartbeat_at:
            self._heartbeat_at = now + self._heartbeat_s
            yield Send(self._heartbeat())

    def _heartbeat(self) -> Heartbeat:
        progress = self._progress
        return Heartbeat(
            state=self.state,
            lease=self.assign.lease if self.assign else None,
            phase=progress.phase,
            step=progress.step,
            total=progress.total,
            loss=progress.loss,
            free_bytes=self.free_bytes,
        )

    def _assigned(self, assign: Assign, now: float) -> Iterator[Instruction]:
        if self.assign and self.assign.lease == assign.lease:
            yield Send(Accept(lease=assign.lease))
            return
        declined = self._declined is not None and self._declined.lease == assign.lease
        if declined or (assign.epoch, assign.issue) <= self._highest:
            yield Send(self._declined_as(assign.lease))  # R1; again, in case the first one was lost
            return
        needed = 3 * sum(part.length for part in assign.parts)
        if self.free_bytes < needed:
            detail = f"{needed} bytes are needed on disk and {self.free_bytes} are free"
            yield Send(Decline(lease=assign.lease, code="disk_full", detail=detail))
            return
        if self.assign:
            yield from self._drop(accepted=self.assign.lease == assign.counted)
        self._highest = (assign.epoch, assign.issue)
        self.assign = assign
        self._missing = {part.sha256 for part in assign.parts}
        self._attempts = self._replans = 0
        self._ceiling = None
        self._progress = WorkerProgress("fetch", 0, 0, None)
        yield Save(assign, None)
        yield Send(Accept(lease=assign.lease))
        for part in assign.parts:
            yield Fetch(part)
        yield from self._work()  # at once, if there is nothing to fetch

    def _declined_as(self, lease: str) -> Decline:
        if self._declined and self._declined.lease == lease:
            return self._declined
        return Decline(lease=lease, code="forgotten", detail="this assignment is older than what the device has seen")

    def _work(self) -> Iterator[Instruction]:
        waiting = self._working or self._missing or self._retry_at is not None
        if self.assign is None or self.update is not None or waiting:
            return
        if self._attempts >= _MAX_ATTEMPTS:
            detail = f"{self._attempts} workers began, and this client ended before the last of them did"
            yield from self._decline(WorkerFailed(lease=self.assign.lease, code="crashed", detail=detail))
            return
        self._working = True
        self._attempts += 1
        if self._attempts > 1 or self._replans:  # the first is saved with the assignment, to spare a sync
            yield Save(self.assign, None, self._attempts, self._replans)
        self._progress = WorkerProgress("load", 0, 0, None)
        yield Start(self.assign, self._ceiling, self._replans)

    def _worker_done(self, done: WorkerDone, now: float) -> Iterator[Instruction]:
        if self.assign is None or self.assign.lease != done.lease:
            return
        self._working = False
        self.update = done.update
        yield Save(self.assign, done.update, self._attempts, self._replans)
        self._offers_pace.restart()
        if self._welcomed:
            yield from self._offer(now)

    def _update_lost(self, lost: UpdateLost) -> Iterator[Instruction]:
        if self.assign is None or self.update is None or self.assign.lease != lost.lease:
            return
        self.update = None
        self._missing = {part.sha256 for part in self.assign.parts}
        yield Save(self.assign, None, self._attempts, self._replans)
        yield from self.begin()

    def _offer(self, now: float) -> Iterator[Instruction]:
        self._offer_at = now + self._offers_pace.next_s()
        if self.assign and self.update:
            yield Send(
                Offer(
                    lease=self.assign.lease,
                    run=self.assign.run,
                    round=self.assign.round,
                    sha256=self.update.sha256,
                    length=self.update.length,
                    num_samples=self.update.num_samples,
                )
            )

    def _worker_failed(self, failed: WorkerFailed, now: float) -> Iterator[Instruction]:
        if self.assign is None or self.assign.lease != failed.lease:
            return
        self._working = False
        if failed.exceeded is not None and self._replans < _MAX_REPLANS:
            yield from self._plan_less(failed.exceeded)
        elif failed.final or failed.exceeded is not None or self._attempts >= _MAX_ATTEMPTS:
            yield from self._decline(failed)
        else:
            self._retry_at = now + _RETRY_S * 2 ** (self._attempts - 1)

    def _plan_less(self, exceeded: Ceiling) -> Iterator[Instruction]:
        """The next smaller plan; from the third on larger steps, because the predictions are far off."""
        most = exceeded.training_bytes if self._replans < 2 else max(1, exceeded.training_bytes * 3 // 4)
        self._ceiling = min(most, self._ceiling or most)
        self._replans += 1
        self._attempts = max(0, self._attempts - 1)  # it did not crash
        yield Remember(replace(exceeded, training_bytes=self._ceiling))
        yield from self._work()

    def _decline(self, failed: WorkerFailed) -> Iterator[Instruction]:
        detail = failed.detail
        if self._ceiling is not None:
            tried = f"{self._replans} of its plans went over the budget"
            detail = f"{detail[:1800]}; before, {tried}, and less than {format_bytes(self._ceiling)} was to be planned"
        self._declined = Decline(lease=failed.lease, code=failed.code, detail=detail, log=failed.log)
        yield Send(self._declined)
        yield from self._drop(accepted=False)

    def _offers(self, lease: str, sha256: str) -> bool:
        return bool(self.assign and self.update and self.assign.lease == lease and self.update.sha256 == sha256)

    def _drop(self, *, accepted: bool) -> Iterator[Instruction]:
        if self.assign is None:
            return
        lease = self.assign.lease
        self.assign = self.update = self._retry_at = None
        self._working = False
        self._missing = set()
        self._progress = WorkerProgress("", 0, 0, None)
        yield Stop(lease)
        yield Forget(lease, accepted)
