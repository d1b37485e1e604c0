"""The life of a run: which round, who works on it, when it ends. Events in, instructions out; no I/O, no clock.

    SELECTING ──enough devices──> RUNNING ──set complete, or deadline with quorum──> FROZEN ──folded──> COMMITTED
        ^                            └──too few──> ABANDONED ──after a pause──┐                            │
        └─────────────────────────────────────────────────────────────────────┴──── ANNOUNCED <────────────┘
    after the last round: EVALUATING, then the run is finished. A dry run has one EVALUATING round that asks for plans.
    with train.normalise, before the first round: round 0, EVALUATING until the devices have reported the sums of their
    inputs, then FROZEN and COMMITTED as others; its model takes the place of version 0.

Rules
  R1  An update counts once: one row per (run, round, attempt, device), written before its receipt is sent.
  R2  What is folded is the frozen set, sorted by device, and nothing else; what comes later is late.
  R3  A round ends when every device that it asked has answered, or at its deadline with a quorum; it is extended once,
      then abandoned.
  R4  A round that is tried again uses the same seeds: with the same devices it gives the same model.
  R5  The conductor carries instructions out in their order; each is durable before the next begins.
  R6  A device that cannot take part (nothing fits, no data, ...) is not asked again until it has restarted; one on
      which its slice does not fit is asked at once for a smaller one, if the run has one. Where nobody else can be
      asked, the round's quorum is that of the devices that can take part.
  R7  The run ends by the first of its stop rules; the last model is judged before, unless somebody stopped the run.
  R8  In a simulation nobody drops out and nobody is late: exactly the cohort is asked, and all of it is awaited, so
      that no result depends on who answered first.

What the instructions of an event are, by the state in which it comes; anything else is ignored
  SELECTING     Tick              nothing, or OpenRound and SendAssign ..., or Finish              -> RUNNING
                Judged            SaveScore, then perhaps Finish
  RUNNING       Tick              SendAssign again, or CloseLease of a silent device; SaveDeadline
                Accepted          CloseLease "accepted"
                Stored            SaveUpdate, SendReceipt
                Declined, Refused CloseLease, and SendReceipt of a refused update
                Removed           CloseLease, SendCancel
    and, once   complete          CloseLease and SendCancel of the others, SaveScore, Freeze, Fold -> FROZEN
                short of devices  AddLeases and SendAssign of substitutes, or Abandon              -> SELECTING
                overdue           SaveDeadline the first time, then as for complete or Abandon
  FROZEN        Folded            Commit, Announce, then perhaps Judge or Finish                   -> SELECTING
                Stored            SendReceipt: late, or as the first time
  EVALUATING    as RUNNING, and at its end SaveScore, Announce, Finish
  any           StopAsked         Finish at once, or after the round; Abandon before it if the round is cut short
                Resumed           after a restart: Fold of a frozen set, Announce of a committed one, Judge, Finish

Training and judging share one assignment: in round r a device first evaluates the model it receives (version r - 1) on
its own test data, then trains it; devices that do not train in this round only evaluate. A round whose updates are
complete waits for those, but not longer than half the time it has taken. With test data on the server, each version is
judged there between two rounds.

Each part of the state has a class of its own, as free of I/O as this one: `Attempt` (leases and updates), `Offers`
(asking and reminding), `RoundTimer` (the deadline), `Candidates` (who may be asked), `LeaseIssuer`, `NextAttempt`
(pauses), `Judging` (scores), `Ending` (stop rules); `progress` decides whether an attempt can end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from coordinator.rounds import events
from coordinator.rounds.attempt import Attempt
from coordinator.rounds.candidates import Candidates, Cohort
from coordinator.rounds.ending import Ending
from coordinator.rounds.events import Event, Snapshot
from coordinator.rounds.frozen_set import fold_of
from coordinator.rounds.instructions import (
    Abandon,
    AddLeases,
    Announce,
    CloseLease,
    Commit,
    Finish,
    Freeze,
    Instruction,
    OpenRound,
    SaveDeadline,
    SendAssign,
)
from coordinator.rounds.judging import Judging
from coordinator.rounds.lease_issuer import LeaseIssuer, Slices
from coordinator.rounds.next_attempt import NextAttempt
from coordinator.rounds.offers import Offers
from coordinator.rounds.progress import Move, next_move, substitutes
from coordinator.rounds.selection import seed_of
from coordinator.rounds.stopping import Scoreboard
from coordinator.rounds.timer import RoundTimer
from coordinator.store.rows import LeaseRow, RoundRow, UpdateRow
from edge_client.data.input_sums import SUMS_ROUND
from edge_client.records import TrainingPlan

__all__ = ["RunMachine"]

_EXTENSION = 0.5  # of the deadline
_STOPPED = "stopped on request"


class RunMachine:
    """One run; see the module's docstring for its rules. Everything but `handle` only reads."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        slices: Slices,
        new_id: Callable[[], str],
        new_issue: Callable[[], int],
        now: float,
    ) -> None:
        self.run: Final = snapshot.run
        self.file: Final = snapshot.file
        self._dry = snapshot.dry
        self._version = snapshot.version
        self._finished = False
        self._open: Attempt | None = None
        scores = Scoreboard(snapshot.file, snapshot.scores)
        self._candidates = Candidates(drop_rate=snapshot.drop_rate, asks_spares=not snapshot.simulated)
        self._issuer = LeaseIssuer(snapshot, slices=slices, new_id=new_id, new_issue=new_issue)
        self._offers = Offers()
        self._timer = RoundTimer(now, is_patient=snapshot.simulated)
        self._next = NextAttempt(now)
        self._judging = Judging(snapshot.file, scores, dry=snapshot.dry, awaits_sums=_lacks_sums(snapshot))
        self._ending = Ending(scores, elapsed_s=snapshot.round.elapsed_s if snapshot.round else 0.0, now=now)
        self._unfinished_work = list(self._restore(snapshot, now))

    def _restore(self, snapshot: Snapshot, now: float) -> Iterator[Instruction]:
        row = snapshot.round
        if row is None:
            yield from self._judging.ask_server(self._version, is_last=self._ending.is_decided)
        elif row.state in ("COMMITTED", "ANNOUNCED"):
            if row.state == "COMMITTED":
                yield Announce(row, snapshot.version)
            yield from self._after_round(now, evaluated=row.goal == 0)
        elif row.state == "ABANDONED":
            self._next.after_failure(row.attempt)
        else:
            attempt = Attempt.restored(row, snapshot)
            self._begin_attempt(attempt, now)
            self._timer.wait_for_reconnects(now)
            if row.state == "FROZEN":
                yield fold_of(row, attempt.updates.values())

    # what people and the conductor read

    @property
    def version(self) -> int:
        """The newest version of the model."""
        return self._version

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return self._finished

    @property
    def round(self) -> RoundRow | None:
        """The open round, or None between two rounds."""
        return self._open.row if self._open is not None else None

    @property
    def leases(self) -> Mapping[str, LeaseRow]:
        """The leases of the open round, by id."""
        return self._open.leases if self._open is not None else {}

    def open_leases_of(self, device: str) -> list[LeaseRow]:
        """The leases of a device that have not ended, in the open round."""
        return self._open.open_leases_of(device) if self._open is not None else []

    @property
    def updates(self) -> Mapping[str, UpdateRow]:
        """The updates of the open round, by device."""
        return self._open.updates if self._open is not None else {}

    @property
    def plans(self) -> Mapping[str, TrainingPlan]:
        """How each device trained last in this run."""
        return self._issuer.plans

    @property
    def excluded(self) -> Mapping[str, str]:
        """Device -> why it is not asked any more."""
        return self._candidates.excluded

    @property
    def phase(self) -> str:
        """One word for people."""
        if self._finished:
            return "FINISHED"
        if self._open is None:
            return "EVALUATING" if self._judging.is_under_way else "SELECTING"
        return "EVALUATING" if self._open.only_evaluates else self._open.row.state

    @property
    def number(self) -> int:
        """The round that is under way or comes next."""
        next_one = SUMS_ROUND if self._judging.awaits_sums else self._version + 1
        return self._open.row.number if self._open is not None else next_one

    @property
    def attempt(self) -> int:
        """How often that round was begun; 1 unless it was abandoned before."""
        return self._open.row.attempt if self._open is not None else self._next.number

    # events

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """The only way in; what it returns is the only way out."""
        if isinstance(event, events.Resumed):
            unfinished_work, self._unfinished_work = self._unfinished_work, []
            return unfinished_work
        if self._finished:
            return []
        instructions = [*self._react(event, now)]
        if isinstance(event, (events.Declined, events.Stored, events.Refused, events.Removed)):
            instructions += self._advance(now)
        return instructions

    def _react(self, event: Event, now: float) -> Iterable[Instruction]:
        """What an event brings by itself; whether the round ends with it is for `_advance` to say."""
        attempt = self._open
        match event:
            case events.Tick():
                return self._tick(event, now)
            case events.Declined():
                return self._decline(event, now)
            case events.Stored():
                return self._store(event)
            case events.Removed():
                self._candidates.removed(event.device)
                return attempt.remove(event.device) if attempt is not None else ()
            case events.Judged():
                return self._judged(event, now)
            case events.Folded():
                return self._commit(event, now)
            case events.StopAsked():
                return self._stop(at_once=event.now)
            case events.Accepted() if attempt is not None:
                return attempt.accept(event.lease)
            case events.Refused() if attempt is not None:
                return attempt.refuse(event)
            case events.Holding() if attempt is not None:
                for lease in attempt.offer_again(event.device, event.lease):
                    self._offers.postpone(lease)
            case events.AssignmentDelayed():
                self._offers.postpone(event.lease)
            case events.Returned():
                self._candidates.returned(event.device)
            case events.DropRateObserved():
                self._candidates.drop_rate = event.drop_rate
        return ()

    # selecting

    def _tick(self, tick: events.Tick, now: float) -> Iterator[Instruction]:
        self._candidates.online = tick.online
        if self._open is None:
            yield from self._select(tick, now)
        elif self._open.is_running:
            yield from self._offer(self._open, now)
            yield from self._advance(now)
            if self._open is not None and self._open.is_running and self._timer.is_save_due(now):
                yield self._save_deadline(self._open, now)

    def _select(self, tick: events.Tick, now: float) -> Iterator[Instruction]:
        if not self._dry:
            yield from self._end_or_go_on(now)
        available = self._candidates.available()
        # a dry run takes the devices that are connected, and so does the last evaluation after a minute
        num_needed = 0 if self._dry or self._ending.has_awaited_fleet(now) else self.file.devices.min
        is_free = not self._finished and not self._judging.is_under_way
        has_enough = is_free and len(available) >= num_needed
        is_fleet_complete = len(tick.online) >= tick.num_enrolled
        if not self._next.may_begin(has_enough=has_enough, is_fleet_complete=is_fleet_complete, now=now):
            return
        if (
            self._judging.awaits_sums or self._ending.is_decided or self._dry
        ):  # nobody trains: the last model is still to be judged, or only plans are wanted
            yield from self._open_round(Cohort(goal=0, quorum=0), available, now)
            yield from self._advance(now)
        else:
            seed = seed_of(self.file.seed, self.number, "cohort")
            yield from self._open_round(self._candidates.cohort(self.file.devices, seed=seed), available, now)

    def _open_round(self, cohort: Cohort, available: Sequence[str], now: float) -> Iterator[Instruction]:
        row = RoundRow(
            run=self.run,
            number=self.number,
            attempt=self._next.number,
            goal=cohort.goal,
            quorum=cohort.quorum,
            remaining_s=self._timer.allowed_s(self.file.rounds.deadline, dry=self._dry),
            elapsed_s=self._ending.elapsed_s(now),
            num_available=len(available),
        )
        # the cohort trains; the other devices evaluate if that is due, or plan in a dry run
        is_judged = self._judging.is_wanted_of_devices(self._version, is_last=self._ending.is_decided)
        sharing = set(filter(self._candidates.shares_results, available))
        others = (
            sorted(sharing.difference(cohort.devices)) if is_judged or self._dry or self._judging.awaits_sums else ()
        )
        evaluators = sharing if is_judged else set[str]()
        leases = self._issuer.issue_all(row, cohort.devices, others, version=self._version, evaluators=evaluators)
        attempt = Attempt(row, leases, dry=self._dry)
        self._begin_attempt(attempt, now)
        yield OpenRound(row, leases)
        yield from self._offer(attempt, now)

    def _lease(self, row: RoundRow, device: str, *, train: bool, evaluate: bool) -> LeaseRow:
        return self._issuer.issue(row, device, version=self._version, train=train, evaluate=evaluate)

    def _begin_attempt(self, attempt: Attempt, now: float) -> None:
        self._open = attempt
        self._offers = Offers()
        self._timer.start(attempt.row.remaining_s, now)
        self._next.begun()

    # running

    def _offer(self, attempt: Attempt, now: float) -> list[SendAssign | CloseLease]:
        return self._offers.review(attempt, self._candidates.online, remaining_s=self._timer.remaining_s(now), now=now)

    def _add_leases(self, attempt: Attempt, leases: Sequence[LeaseRow], now: float) -> Iterator[Instruction]:
        attempt.add(leases)
        yield AddLeases(tuple(leases))
        yield from self._offer(attempt, now)

    def _decline(self, declined: events.Declined, now: float) -> Iterator[Instruction]:
        attempt = self._open
        lease = attempt.open_lease(declined.lease) if attempt is not None else None
        if attempt is None or lease is None:
            return
        yield attempt.close(lease, "declined", declined.code, declined.detail, declined.log)
        if declined.code == "nothing_fits" and self._issuer.has_smaller_slice(lease):
            if attempt.is_running:
                smaller = self._lease(attempt.row, lease.device, train=lease.train, evaluate=lease.evaluate)
                yield from self._add_leases(attempt, [smaller], now)
            return
        self._candidates.declined(lease.device, declined.code)
        if declined.code == "nothing_fits" and self.file.devices.misfit == "fail" and not self._dry:
            yield from self._drop_round(attempt, f"{lease.device}: nothing fits")
            yield self._finish("failed", f"nothing_fits: {lease.device}: {declined.detail}"[:500])

    def _store(self, stored: events.Stored) -> Iterator[Instruction]:
        attempt = self._open
        lease = attempt.leases.get(stored.lease) if attempt is not None else None
        if attempt is None or lease is None:
            return
        if not attempt.is_running or attempt.open_lease(lease.id) is None:
            yield attempt.repeat_receipt(lease, stored.sha256)
            return
        saved, receipt = attempt.store(lease, stored)
        if saved.update is not None and stored.report.plan is not None:
            self._issuer.remember_plan(lease.device, stored.report.plan)
        yield saved
        yield receipt

    def _advance(self, now: float) -> Iterator[Instruction]:
        """End the round if it can end, and do what it needs otherwise."""
        attempt = self._open
        if attempt is None or not attempt.is_running:
            return
        move = next_move(attempt, self._timer, self._candidates, minimum=self.file.devices.min, now=now)
        if move is Move.EXTEND:
            self._timer.extend(_EXTENSION * self.file.rounds.deadline, now)
            attempt.row = replace(attempt.row, extended=True)
            yield self._save_deadline(attempt, now)
        elif move is Move.SUBSTITUTE:
            devices = substitutes(attempt, self._candidates)
            leases = [self._lease(attempt.row, device, train=True, evaluate=False) for device in devices]
            yield from self._add_leases(attempt, leases, now)
        elif move is Move.END:
            yield from self._end_round(attempt, now)
        elif move is Move.ABANDON:
            yield from self._drop_round(attempt, attempt.reason_of_failure())
            if self._ending.is_stop_asked:
                yield self._finish("stopped", _STOPPED)
            self._next.pause(now)

    def _save_deadline(self, attempt: Attempt, now: float) -> SaveDeadline:
        self._timer.was_saved(now)
        remaining_s, elapsed_s = self._timer.remaining_s(now), self._ending.elapsed_s(now)
        attempt.row = replace(attempt.row, remaining_s=remaining_s, elapsed_s=elapsed_s)
        return SaveDeadline(attempt.row)

    # ending

    def _end_round(self, attempt: Attempt, now: float) -> Iterator[Instruction]:
        # a device that is still at work is late, or it was asked as a spare, which is no failure
        state = "expired" if attempt.only_evaluates or self._timer.is_overdue(now) else "cancelled"
        yield from attempt.cancel_all(state=state, code="late", detail=f"the {attempt.kind} ended without it")
        yield from self._judging.score(self._version, attempt.evaluations)
        if attempt.only_evaluates and not attempt.adds_sums:
            yield Announce(attempt.row, self._version)
            yield from self._after_round(now, evaluated=True)
            return
        yield from _fold(attempt)

    def _commit(self, folded: events.Folded, now: float) -> Iterator[Instruction]:
        attempt = self._open
        if attempt is None or attempt.row.state != "FROZEN" or folded.model.version != attempt.row.number:
            return
        yield Commit(attempt.row, folded.model)
        self._version = folded.model.version
        self._judging.awaits_sums = False
        yield Announce(attempt.row, self._version)
        yield from self._after_round(now, evaluated=False)

    def _after_round(self, now: float, *, evaluated: bool) -> Iterator[Instruction]:
        self._open = None
        self._next.after_success()
        if self._ending.is_stop_asked:
            yield self._finish("stopped", _STOPPED)
        elif self._dry:
            yield self._finish("finished", "dry run")
        else:
            yield from self._end_or_go_on(now, evaluated=evaluated)

    def _end_or_go_on(self, now: float, *, evaluated: bool = False) -> Iterator[Instruction]:
        """End the run if a rule says so and nothing is left to judge; else the next tick goes on."""
        self._ending.check(self._version, now)
        yield from self._judging.ask_server(self._version, is_last=self._ending.is_decided)
        if self._ending.is_decided and (evaluated or self._judging.is_settled(self._version, is_last=True)):
            yield self._finish("finished", self._ending.reason)

    def _judged(self, judged: events.Judged, now: float) -> Iterator[Instruction]:
        saved = self._judging.answered(self._version, judged.evaluations)
        if saved is not None:
            yield from saved
            yield from self._end_or_go_on(now)

    def _drop_round(self, attempt: Attempt, reason: str) -> Iterator[Instruction]:
        yield from attempt.cancel_all(state="cancelled", code="abandoned", detail=reason)
        yield Abandon(attempt.row, reason)
        self._next.after_failure(attempt.row.attempt)
        self._open = None

    def _stop(self, *, at_once: bool) -> Iterator[Instruction]:
        self._ending.is_stop_asked = True
        if self._open is not None:
            if self._open.row.state == "FROZEN" or (not at_once and not self._open.only_evaluates):
                return  # after this round
            yield from self._drop_round(self._open, _STOPPED)
        yield self._finish("stopped", _STOPPED)

    def _finish(self, state: str, reason: str) -> Finish:
        self._finished = True
        return Finish(state, reason)


def _fold(attempt: Attempt) -> Iterator[Instruction]:
    attempt.row = replace(attempt.row, state="FROZEN")
    fold = fold_of(attempt.row, attempt.updates.values())
    yield Freeze(attempt.row, fold.set_hash)
    yield fold


def _lacks_sums(snapshot: Snapshot) -> bool:
    """Whether the run normalises its inputs and its devices have not reported their sums yet.

    A run that starts from another one goes on with the numbers of that, to which its weights belong.
    """
    if not snapshot.file.train.normalise or snapshot.file.init.startswith("run:") or snapshot.dry:
        return False
    row = snapshot.round
    return row is None or (row.number == SUMS_ROUND and row.state not in ("COMMITTED", "ANNOUNCED"))
