"""The life of a run: which round, who works on it, when it ends. Events in, instructions out; no I/O, no clock.

    SELECTING ──enough devices──> RUNNING ──set complete, or deadline with quorum──> FROZEN ──folded──> COMMITTED
        ^                            └──too few──> ABANDONED ──after a pause──┐                            │
        └─────────────────────────────────────────────────────────────────────┴──── ANNOUNCED <────────────┘
    after the last round: EVALUATING, then the run is finished. A dry run has one EVALUATING round that asks for plans.

Rules
  R1  An update counts once: one row per (run, round, attempt, device), written before its receipt is sent.
  R2  What is folded is the frozen set, sorted by device, and nothing else; what comes later is late.
  R3  A round ends with all it asked for, or at its deadline with a quorum; it is prolonged once, then abandoned.
  R4  A round that is tried again uses the same seeds: with the same devices it gives the same model.
  R5  The service carries instructions out in their order; each is durable before the next begins.
  R6  A device that cannot take part (nothing fits, no data, ...) is not asked again until it has started anew; one on
      which its slice does not fit is asked at once for a smaller one, if the run has one. Where nobody else can be
      asked, the round's quorum is that of the devices that can.
  R7  The run ends by the first of its stop rules; the last model is judged before, unless somebody stopped the run.
  R8  In a simulation nobody drops out and nobody is late: exactly the cohort is asked, and all of it is waited for, so
      that no result depends on who answered first.

Training and judging share one assignment: in round r a device first evaluates the model it receives (version r - 1) on
its own test data, then trains it; devices that do not train in this round only evaluate. A round whose updates are
complete waits for those, but not longer than half the time it has taken. With test data on the server, each version is
judged there between two rounds.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from coordinator.rounds import evaluation, selection
from coordinator.rounds.stopping import Scoreboard, score_of
from coordinator.store.rows import OPEN_LEASE, EvaluationRow, LeaseRow, ModelRow, RoundRow, UpdateRow
from edge_client.config.run_file import RunFile
from edge_client.methods.slices import architecture
from edge_client.records import Report, TrainingPlan

__all__ = [
    "Abandon",
    "Accepted",
    "AddLeases",
    "Announce",
    "CloseLease",
    "Commit",
    "Declined",
    "Event",
    "Finish",
    "Fold",
    "Folded",
    "Freeze",
    "Holding",
    "Instruction",
    "Judge",
    "Judged",
    "OpenRound",
    "Refused",
    "Removed",
    "Returned",
    "RunMachine",
    "SaveDeadline",
    "SaveScore",
    "SaveUpdate",
    "SendAssign",
    "SendCancel",
    "SendReceipt",
    "Slices",
    "Snapshot",
    "StopAsked",
    "Stored",
    "Tick",
    "counted_samples",
    "seed_of",
]

_ASSIGN_AGAIN_S = 3.0
_ANSWER_S = 15.0  # a device that does not accept in this time is counted out
_AWAY_S = 60.0  # a device that was chosen, did not accept and is gone for so long is counted out too
_SETTLE_S = 2.0  # more devices may be about to say hello
_SAVE_DEADLINE_S = 5.0
_EXTENSION = 0.5
_RETURN_S = 10.0  # after a restart of ours the devices come back one by one
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 60.0
_EVALUATORS_SHARE = 0.5  # of the time a round took: so long it waits for devices that only evaluate
_DRY_S = 300.0  # a plan needs a worker's start and a look at the data
_PATIENT_S = 366 * 86400.0  # the deadline of a simulated round: how long it takes here says nothing of devices
# reasons that stay until the device's owner changes something
_LASTING = frozenset(
    {
        "nothing_fits",
        "no_data",
        "bad_data",
        "unknown_class",
        "bad_model",
        "unknown_model",
        "bad_method",
        "unknown_method",
        "bad_task",
        "task_missing",
        "task_differs",
    }
)


def seed_of(seed: int, round_: int, device: str) -> int:
    """The seed of a device's work in a round: the same on every try."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{round_}/{device}".encode()).digest()[:8], "big") >> 1


def counted_samples(updates: Sequence[UpdateRow], max_weight_ratio: int) -> list[int]:
    """The weight of each update of a frozen set: its samples, but not more than the ratio times their lower median.

    The number of samples is the device's own word; without a bound one lie would make its update the whole model.
    """
    most = max_weight_ratio * statistics.median_low([update.num_samples for update in updates])
    return [min(update.num_samples, most) for update in updates]


# events


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; these devices are there and may be asked, of so many that could be."""

    online: frozenset[str]
    num_enrolled: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """A device took its lease."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """A device will not do its lease."""

    lease: str
    code: str
    detail: str = ""
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Holding:
    """A device said what it has in hand."""

    device: str
    lease: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An update is on disk and passed every check; `confusion` belongs to the report's evaluation, if it has one."""

    lease: str
    sha256: str
    length: int
    norm: float
    report: Report
    confusion: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An update failed a check; nothing of it is kept."""

    lease: str
    sha256: str
    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Removed:
    """A device is not enrolled any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A device has started anew: what it could not do before, it may do now."""

    device: str


@dataclass(frozen=True, slots=True)
class Judged:
    """The server's own test data were used on a version: on each slice that the devices train."""

    evaluations: Sequence[EvaluationRow]


@dataclass(frozen=True, slots=True)
class Folded:
    """The next version is on disk."""

    model: ModelRow


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the run to end: after this round, or now."""

    now: bool


Event: TypeAlias = (
    Tick | Accepted | Declined | Holding | Stored | Refused | Removed | Returned | Folded | Judged | StopAsked
)


# instructions


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Write the round and its leases."""

    round: RoundRow
    leases: tuple[LeaseRow, ...]


@dataclass(frozen=True, slots=True)
class AddLeases:
    """Write substitutes' leases."""

    leases: tuple[LeaseRow, ...]


@dataclass(frozen=True, slots=True)
class SendAssign:
    """Offer a lease to its device."""

    lease: LeaseRow
    deadline_s: float


@dataclass(frozen=True, slots=True)
class CloseLease:
    """Write how a lease ended (or that it was accepted)."""

    lease: str
    state: str
    code: str = ""
    detail: str = ""
    log: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Tell a device to stop."""

    device: str
    lease: str


@dataclass(frozen=True, slots=True)
class SaveUpdate:
    """Write the update's row, its evaluation and its lease's end."""

    lease: str
    update: UpdateRow | None
    evaluation: EvaluationRow | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendReceipt:
    """Tell a device what became of its update."""

    device: str
    lease: str
    sha256: str
    status: str
    code: str = "ok"
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Freeze:
    """Write that the set is final."""

    round: RoundRow
    set_hash: str


@dataclass(frozen=True, slots=True)
class Fold:
    """Make the next version from the frozen set; answer with `Folded`."""

    round: RoundRow
    updates: tuple[UpdateRow, ...]
    set_hash: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Write the new version and the round's end."""

    round: RoundRow
    model: ModelRow


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell everybody, delete the round's updates, and write that it is done."""

    round: RoundRow
    version: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """Write that the attempt brought nothing."""

    round: RoundRow
    reason: str


@dataclass(frozen=True, slots=True)
class SaveScore:
    """Write what the run's metric says of a version, and which one is best."""

    version: int
    score: float
    best_version: int


@dataclass(frozen=True, slots=True)
class Judge:
    """Use the server's own test data on a version; answer with `Judged`."""

    version: int


@dataclass(frozen=True, slots=True)
class SaveDeadline:
    """Write how much time the round has left."""

    round: RoundRow


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""

    state: str
    reason: str


Instruction: TypeAlias = (
    OpenRound
    | AddLeases
    | SendAssign
    | CloseLease
    | SendCancel
    | SaveUpdate
    | SendReceipt
    | Freeze
    | Fold
    | Commit
    | Announce
    | Abandon
    | SaveDeadline
    | SaveScore
    | Judge
    | Finish
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the store knows of a run: enough to go on after a restart."""

    run: str
    file: RunFile
    epoch: int
    version: int
    round: RoundRow | None = None
    leases: Sequence[LeaseRow] = ()
    updates: Sequence[UpdateRow] = ()
    plans: Mapping[str, TrainingPlan] = field(default_factory=dict)
    drop_rate: float = 0.0
    scores: Mapping[int, float] = field(default_factory=dict)
    evaluations: Sequence[EvaluationRow] = ()  # of the version that is sent in the open round
    dry: bool = False
    simulated: bool = False


class Slices(Protocol):
    """Who trains how much of the model."""

    def of(self, device: str, *, round_: int, seed: int) -> str:
        """The slice of a device in a round."""

    def give_less(self, device: str, cut: str) -> bool:
        """A slice did not fit on a device: whether there is a smaller one for it."""


class RunMachine:
    """One run; see the module's docstring for its rules."""

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        slices: Slices,
        new_id: Callable[[], str],
        new_issue: Callable[[], int],
        now: float,
    ) -> None:
        self.run = snapshot.run
        self.file = snapshot.file
        self.version = snapshot.version
        self._epoch = snapshot.epoch
        self._slices = slices
        self._new_id = new_id
        self._new_issue = new_issue
        self._plans = dict(snapshot.plans)
        self.drop_rate = snapshot.drop_rate  # kept up to date by the service
        self.round: RoundRow | None = None  # the open one
        self.leases: dict[str, LeaseRow] = {}
        self.updates: dict[str, UpdateRow] = {}
        self._asked_at: dict[str, float] = {}
        self._first_asked_at: dict[str, float] = {}
        self._away_since: dict[str, float] = {}
        self._online: frozenset[str] = frozenset()
        self._deadline = 0.0
        self._saved_at = now
        self._not_before = now
        self._enough_since: float | None = None
        self._attempt = 1
        self._stopping = False
        self.finished = False
        self.dry = snapshot.dry
        self._simulated = snapshot.simulated
        self.excluded: dict[str, str] = {}  # device -> why it is not asked any more
        self._unjudged: set[str] = set()  # devices that train but do not tell their results
        self._scores = Scoreboard(snapshot.file, snapshot.scores)
        self._evaluations = {row.device: row for row in snapshot.evaluations}
        self._judging = False
        self._ending = ""  # why the run ends, once a rule has said so
        self._ending_at = now
        self._began = now - (snapshot.round.elapsed_s if snapshot.round else 0.0)
        self._opened_at = now
        self._complete_at: float | None = None
        self._patient_until = now
        self._resume: list[Instruction] = list(self._restore(snapshot, now))

    @property
    def plans(self) -> Mapping[str, TrainingPlan]:
        """How each device trained last in this run."""
        return self._plans

    def _restore(self, snapshot: Snapshot, now: float) -> Iterator[Instruction]:
        round_ = snapshot.round
        if round_ is None:
            yield from self._judge_here()
        elif round_.state in ("COMMITTED", "ANNOUNCED"):
            if round_.state == "COMMITTED":
                yield Announce(round_, snapshot.version)
            yield from self._after_commit(now, evaluated=round_.goal == 0)
        elif round_.state == "ABANDONED":
            self._attempt = round_.attempt + 1
        else:
            self._open(round_, snapshot.leases, now)
            self._patient_until = now + _RETURN_S
            self.updates = {update.device: update for update in snapshot.updates}
            if round_.state == "FROZEN":
                yield self._fold()

    def begin(self) -> list[Instruction]:
        """What a restart left to do."""
        resume, self._resume = self._resume, []
        return resume

    @property
    def phase(self) -> str:
        """One word for people."""
        if self.finished:
            return "FINISHED"
        if self.round is None:
            return "EVALUATING" if self._judging else "SELECTING"
        return "EVALUATING" if self.round.goal == 0 else self.round.state

    @property
    def number(self) -> int:
        """The round that is under way or comes next."""
        return self.round.number if self.round else self.version + 1

    @property
    def attempt(self) -> int:
        """How often that round was begun; 1 unless it was abandoned before."""
        return self._attempt if self.round is None else self.round.attempt

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """The only way in."""
        return list(self._react(event, now)) if not self.finished else []

    def _react(self, event: Event, now: float) -> Iterator[Instruction]:
        match event:
            case Tick():
                self._online = event.online
                yield from self._tick(event, now)
            case Accepted():
                yield from self._accepted(event.lease)
            case Declined():
                yield from self._declined(event, now)
                yield from self._advance(now)
            case Holding():
                self._holding(event, now)
            case Stored():
                yield from self._stored(event)
                yield from self._advance(now)
            case Refused():
                yield from self._refused(event)
                yield from self._advance(now)
            case Removed():
                yield from self._removed(event.device)
                yield from self._advance(now)
            case Returned():
                self.excluded.pop(event.device, None)
                self._unjudged.discard(event.device)
            case Judged():
                yield from self._judged(event.evaluations, now)
            case Folded():
                yield from self._folded(event, now)
            case StopAsked():
                yield from self._stop(event.now)

    # selecting

    def _tick(self, tick: Tick, now: float) -> Iterator[Instruction]:
        if self.round is None:
            yield from self._select(tick, now)
        elif self.round.state == "RUNNING":
            yield from self._remind(now)
            yield from self._advance(now)
            yield from self._keep_deadline(now)

    def _select(self, tick: Tick, now: float) -> Iterator[Instruction]:
        if not self.dry:
            yield from self._end_or_go_on(now)
        available = sorted(tick.online - self.excluded.keys())
        if self.finished or self._judging or len(available) < self._num_needed(now) or now < self._not_before:
            self._enough_since = None
            return
        if self._enough_since is None:
            self._enough_since = now
        if len(tick.online) < tick.num_enrolled and now - self._enough_since < _SETTLE_S:
            return
        number = self.version + 1
        if self._ending or self.dry:  # only the last model is still to be judged, or only plans are wanted
            yield from self._open_round(number, 0, 0, (), available, now)
            yield from self._advance(now)
            return
        section = self.file.devices
        goal, quorum = selection.goal_and_quorum(len(available), fraction=section.fraction, minimum=section.min)
        num = goal
        if not self._simulated:
            num = selection.num_to_ask(goal, quorum, drop_rate=self.drop_rate, available=len(available))
        cohort = selection.choose(available, num, seed=seed_of(self.file.seed, number, "cohort"))
        yield from self._open_round(number, goal, quorum, cohort, available, now)

    def _num_needed(self, now: float) -> int:
        """Devices that must be there; the last evaluation does not wait for ever, and a dry run takes who is there."""
        waited_enough = bool(self._ending) and now - self._ending_at > _AWAY_S
        return 0 if self.dry or waited_enough else self.file.devices.min

    def _open_round(
        self, number: int, goal: int, quorum: int, cohort: Sequence[str], available: Sequence[str], now: float
    ) -> Iterator[Instruction]:
        evaluate = self._devices_judge(self.version)
        deadline = _PATIENT_S if self._simulated else self.file.rounds.deadline
        round_ = RoundRow(
            run=self.run,
            number=number,
            attempt=self._attempt,
            goal=goal,
            quorum=quorum,
            remaining_s=min(deadline, _DRY_S) if self.dry else deadline,
            elapsed_s=now - self._began,
            num_available=len(available),
        )
        others = [name for name in available if name not in cohort and name not in self._unjudged]
        leases = [
            self._lease(round_, name, train=True, evaluate=evaluate and name not in self._unjudged) for name in cohort
        ]
        if evaluate or self.dry:
            leases += [self._lease(round_, name, train=False, evaluate=evaluate) for name in others]
        self._evaluations = {}
        self._open(round_, leases, now)
        yield OpenRound(round_, tuple(leases))
        yield from self._remind(now)

    def _open(self, round_: RoundRow, leases: Sequence[LeaseRow], now: float) -> None:
        self.round = round_
        self.leases = {lease.id: lease for lease in leases}
        self.updates = {}
        self._asked_at = {}
        self._first_asked_at = {}
        self._away_since = {}
        self._enough_since = None
        self._deadline = now + round_.remaining_s
        self._opened_at = now
        self._complete_at = None

    def _lease(self, round_: RoundRow, device: str, *, train: bool, evaluate: bool) -> LeaseRow:
        return LeaseRow(
            id=self._new_id(),
            issue=self._new_issue(),
            epoch=self._epoch,
            run=self.run,
            round=round_.number,
            attempt=round_.attempt,
            device=device,
            train=train,
            evaluate=evaluate,
            version=self.version,
            slice=self._slices.of(
                device, round_=round_.number, seed=seed_of(self.file.seed, round_.number, f"slice/{device}")
            ),
            plan=self._plans.get(device),
        )

    def _wants_score(self, version: int) -> bool:
        """Whether this version is to be judged; the last one always is, unless nothing is judged at all."""
        if self.dry or self.file.evaluate.every == 0:
            return False
        return self._scores.is_due(version) or bool(self._ending)

    def _devices_judge(self, version: int) -> bool:
        return self.file.evaluate.on == "devices" and self._wants_score(version)

    def _judge_here(self) -> Iterator[Instruction]:
        """Let the server judge the newest version, if it should and has not."""
        due = self.file.evaluate.on != "devices" and self._wants_score(self.version)
        if due and not self._scores.is_scored(self.version) and not self._judging:
            self._judging = True
            yield Judge(self.version)

    def _judged(self, rows: Sequence[EvaluationRow], now: float) -> Iterator[Instruction]:
        if not self._judging or any(row.version != self.version for row in rows):
            return
        self._judging = False
        yield from self._score(self.version, rows)
        self._scores.skip(self.version)
        yield from self._end_or_go_on(now)

    def _score(self, version: int, rows: Sequence[EvaluationRow]) -> Iterator[Instruction]:
        result = evaluation.summarize(version, rows, len(self.file.classes))
        if result is None or self._scores.is_scored(version):
            return
        score = score_of(result, self.file.stop.metric)
        self._scores.add(version, score)
        assert self._scores.best_version is not None
        yield SaveScore(version, score, self._scores.best_version)

    # running

    def _remind(self, now: float) -> Iterator[Instruction]:
        """Offer what is not accepted yet, again and again; a device that stays silent is counted out."""
        for lease in list(self.leases.values()):
            if lease.state != "offered":
                continue
            if lease.device not in self._online:  # its time to answer begins again when it is back
                self._asked_at.pop(lease.id, None)
                self._first_asked_at.pop(lease.id, None)
                if now - self._away_since.setdefault(lease.id, now) > _AWAY_S:
                    yield from self._close(lease.id, "expired", "away", f"not there for {_AWAY_S:.0f} s")
                continue
            self._away_since.pop(lease.id, None)
            first = self._first_asked_at.setdefault(lease.id, now)
            if now - first > _ANSWER_S:
                yield from self._close(lease.id, "expired", "no_answer", f"no answer for {_ANSWER_S:.0f} s")
            elif now - self._asked_at.get(lease.id, -1e9) >= _ASSIGN_AGAIN_S:
                self._asked_at[lease.id] = now
                yield SendAssign(lease, max(0.0, self._deadline - now))

    def not_asked_yet(self, lease_id: str) -> None:
        """What a lease is about has yet to be made: its device's time to answer has not begun."""
        self._asked_at.pop(lease_id, None)
        self._first_asked_at.pop(lease_id, None)

    def _accepted(self, lease_id: str) -> Iterator[Instruction]:
        lease = self.leases.get(lease_id)
        if lease is not None and lease.state == "offered":
            self.leases[lease_id] = replace(lease, state="accepted")
            yield CloseLease(lease_id, "accepted")

    def _declined(self, event: Declined, now: float) -> Iterator[Instruction]:
        lease = self.leases.get(event.lease)
        if lease is None or lease.state not in OPEN_LEASE:
            return
        yield from self._close(lease.id, "declined", event.code, event.detail, event.log)
        if event.code == "nothing_fits" and self._slices.give_less(lease.device, lease.slice):
            yield from self._ask_for_less(lease, now)
            return
        if event.code in _LASTING:
            self.excluded[lease.device] = event.code
        elif event.code == "not_shared":
            self._unjudged.add(lease.device)
        if event.code == "nothing_fits" and self.file.devices.misfit == "fail" and not self.dry:
            yield from self._drop_round(f"{lease.device}: nothing fits")
            yield from self._finish("failed", f"nothing_fits: {lease.device}: {event.detail}"[:500])

    def _ask_for_less(self, lease: LeaseRow, now: float) -> Iterator[Instruction]:
        if self.round is not None and self.round.state == "RUNNING":
            smaller = self._lease(self.round, lease.device, train=lease.train, evaluate=lease.evaluate)
            self.leases[smaller.id] = smaller
            yield AddLeases((smaller,))
            yield from self._remind(now)

    def _holding(self, event: Holding, now: float) -> None:
        """A device that lost its lease (a new disk, an old backup) gets it again."""
        for lease in self.leases.values():
            if lease.device == event.device and lease.state == "accepted" and event.lease != lease.id:
                self.leases[lease.id] = replace(lease, state="offered")
                self.not_asked_yet(lease.id)

    def _close(
        self, lease_id: str, state: str, code: str = "", detail: str = "", log: Sequence[str] = ()
    ) -> Iterator[Instruction]:
        lease = self.leases.get(lease_id)
        if lease is not None and lease.state in OPEN_LEASE:
            self.leases[lease_id] = replace(lease, state=state, code=code, detail=detail, log=log)
            yield CloseLease(lease_id, state, code, detail, log)

    def _stored(self, stored: Stored) -> Iterator[Instruction]:
        lease = self.leases.get(stored.lease)
        if lease is None or lease.state not in OPEN_LEASE or self.round is None or self.round.state != "RUNNING":
            if lease is not None:
                yield self._again(lease, stored.sha256)
            return
        update = self._update_row(lease, stored) if lease.train or self.dry else None
        judged = self._evaluation_row(lease, stored)
        self.leases[lease.id] = replace(lease, state="stored")
        if judged is not None:
            self._evaluations[lease.device] = judged
        if update is not None:
            self.updates[lease.device] = update
            if stored.report.plan is not None:
                self._plans[lease.device] = stored.report.plan
        yield SaveUpdate(lease.id, update, judged)
        yield _receipt(lease, stored.sha256, "accepted")

    def _again(self, lease: LeaseRow, sha256: str) -> SendReceipt:
        """What to say of an update whose lease is closed: the same as the first time."""
        if lease.state != "stored":
            return _receipt(lease, sha256, "late", "late", "the round was over")
        counted = self.updates.get(lease.device)
        if counted is not None and counted.lease == lease.id and counted.sha256 != sha256:
            return _receipt(lease, sha256, "refused", "equivocation", "another update was stored")
        return _receipt(lease, sha256, "accepted")

    def _update_row(self, lease: LeaseRow, stored: Stored) -> UpdateRow:
        return UpdateRow(
            run=lease.run,
            round=lease.round,
            attempt=lease.attempt,
            device=lease.device,
            lease=lease.id,
            sha256=stored.sha256,
            length=stored.length,
            num_samples=stored.report.num_samples,
            norm=stored.norm,
            report=stored.report,
        )

    def _evaluation_row(self, lease: LeaseRow, stored: Stored) -> EvaluationRow | None:
        found = stored.report.evaluation
        if found is None:
            return None
        return EvaluationRow(
            run=lease.run,
            version=lease.version,
            device=lease.device,
            num_samples=found.num_samples,
            num_correct=found.num_correct,
            loss_sum=found.loss_sum,
            slice=architecture(lease.slice),
            confusion=stored.confusion,
        )

    def _refused(self, refused: Refused) -> Iterator[Instruction]:
        lease = self.leases.get(refused.lease)
        if lease is None or lease.state not in OPEN_LEASE:
            return  # said already; the device asks again if it was lost
        yield from self._close(lease.id, "refused", refused.code, refused.detail)
        yield _receipt(lease, refused.sha256, "refused", refused.code, refused.detail)

    def _removed(self, device: str) -> Iterator[Instruction]:
        self._online -= {device}
        for lease in [lease for lease in self.leases.values() if lease.device == device and lease.state in OPEN_LEASE]:
            yield from self._close(lease.id, "cancelled", "removed", "the device was removed")
            yield SendCancel(device, lease.id)

    def _advance(self, now: float) -> Iterator[Instruction]:
        """End the round if it can end."""
        if self.round is None or self.round.state != "RUNNING":
            return
        training = [lease for lease in self.leases.values() if lease.train or self.round.goal == 0]
        still_open = any(lease.state in OPEN_LEASE for lease in training)
        overdue = now >= self._deadline
        if self.round.goal == 0:
            if overdue or not still_open:
                yield from self._finish_evaluation(now)
        elif len(self.updates) >= self.round.goal or (
            len(self.updates) >= self.round.quorum and (overdue or not still_open)
        ):
            if overdue or not self._waits_for_evaluators(now):
                yield from self._freeze(overdue=overdue)
        elif overdue and not self.round.extended:
            self._deadline = now + _EXTENSION * self.file.rounds.deadline
            self.round = replace(self.round, extended=True)
            yield from self._keep_deadline(now, always=True)
        elif overdue or not still_open:
            substitutes = self._substitutes() if not overdue else ()
            if substitutes:
                yield AddLeases(substitutes)
                yield from self._remind(now)
            elif overdue or (now >= self._patient_until and not self._evaluators_may_help()):
                yield from self._end_without_quorum(now, overdue=overdue)

    def _end_without_quorum(self, now: float, *, overdue: bool) -> Iterator[Instruction]:
        """Nobody else can be asked: the round counts if those who could never take part are all that it lacks."""
        if len(self.updates) < self._quorum_of_the_able():
            yield from self._abandon(now)
        elif overdue or not self._waits_for_evaluators(now):
            yield from self._freeze(overdue=overdue)

    def _quorum_of_the_able(self) -> int:
        """The quorum that the round would have without the devices that gave a lasting reason, as the next try has."""
        assert self.round is not None
        able = {
            lease.device
            for lease in self.leases.values()
            if lease.train and not (lease.state == "declined" and lease.code in _LASTING)
        }
        minimum = self.file.devices.min
        _, quorum = selection.goal_and_quorum(min(self.round.goal, len(able)), fraction=1.0, minimum=minimum)
        return max(minimum, quorum)

    def _waits_for_evaluators(self, now: float) -> bool:
        """Whether devices that only evaluate get some more time; their counts make the fleet's result exact."""
        if not any(lease.state in OPEN_LEASE and not lease.train for lease in self.leases.values()):
            return False
        if self._simulated:
            return True
        if self._complete_at is None:
            self._complete_at = now
        return now - self._complete_at < _EVALUATORS_SHARE * (self._complete_at - self._opened_at)

    def _substitutes(self) -> tuple[LeaseRow, ...]:
        """Leases for devices that were not asked in this attempt."""
        assert self.round is not None
        asked = {lease.device for lease in self.leases.values() if lease.train or lease.state in OPEN_LEASE}
        spare = sorted(self._online - asked - self.excluded.keys())[: self.round.goal - len(self.updates)]
        if len(self.updates) + len(spare) < self.round.quorum:
            return ()
        leases = tuple(self._lease(self.round, name, train=True, evaluate=False) for name in spare)
        self.leases.update({lease.id: lease for lease in leases})
        return leases

    def _evaluators_may_help(self) -> bool:
        """Whether devices that still evaluate could train afterwards; a retry would ask the same cohort again."""
        assert self.round is not None
        trained = {lease.device for lease in self.leases.values() if lease.train}
        busy = {lease.device for lease in self.leases.values() if lease.state in OPEN_LEASE}
        candidates = self._online - trained - self.excluded.keys()
        return bool(candidates & busy) and len(self.updates) + len(candidates) >= self.round.quorum

    def _keep_deadline(self, now: float, *, always: bool = False) -> Iterator[Instruction]:
        if (
            self.round is not None
            and self.round.state == "RUNNING"
            and (always or now - self._saved_at >= _SAVE_DEADLINE_S)
        ):
            self._saved_at = now
            remaining_s = max(0.0, self._deadline - now)
            self.round = replace(self.round, remaining_s=remaining_s, elapsed_s=now - self._began)
            yield SaveDeadline(self.round)

    # ending

    def _freeze(self, *, overdue: bool) -> Iterator[Instruction]:
        assert self.round is not None
        state = "expired" if overdue else "cancelled"  # asked for as a spare: not the device's failure
        for lease in list(self.leases.values()):
            if lease.state in OPEN_LEASE:
                yield from self._close(lease.id, state, "late", "the round ended without it")
                yield SendCancel(lease.device, lease.id)
        yield from self._score(self.version, list(self._evaluations.values()))
        self.round = replace(self.round, state="FROZEN")
        fold = self._fold()
        yield Freeze(self.round, fold.set_hash)
        yield fold

    def _fold(self) -> Fold:
        assert self.round is not None
        frozen = tuple(self.updates[device] for device in sorted(self.updates))
        lines = "".join(f"{u.device} {u.sha256} {u.num_samples}\n" for u in frozen)
        return Fold(self.round, frozen, hashlib.sha256(lines.encode()).hexdigest())

    def _folded(self, folded: Folded, now: float) -> Iterator[Instruction]:
        if self.round is None or self.round.state != "FROZEN" or folded.model.version != self.version + 1:
            return
        yield Commit(self.round, folded.model)
        self.version = folded.model.version
        yield Announce(self.round, self.version)
        yield from self._after_commit(now, evaluated=False)

    def _after_commit(self, now: float, *, evaluated: bool) -> Iterator[Instruction]:
        self.round = None
        self.leases = {}
        self._attempt = 1
        if self._stopping:
            yield from self._finish("stopped", "stopped on request")
        elif self.dry:
            yield from self._finish("finished", "dry run")
        else:
            yield from self._end_or_go_on(now, evaluated=evaluated)

    def _end_or_go_on(self, now: float, *, evaluated: bool = False) -> Iterator[Instruction]:
        """End the run if a rule says so and nothing is left to judge; else the next tick goes on."""
        if not self._ending:
            self._ending, self._ending_at = self._scores.end(self.version, now - self._began), now
        yield from self._judge_here()
        if self._ending and (evaluated or self._scores.is_scored(self.version) or not self._wants_score(self.version)):
            yield from self._finish("finished", self._ending)

    def _abandon(self, now: float) -> Iterator[Instruction]:
        assert self.round is not None
        reasons = sorted({f"{lease.device}: {lease.code}" for lease in self.leases.values() if lease.code})
        text = f"{len(self.updates)} of {self.round.quorum} needed updates ({'; '.join(reasons) or 'deadline'})"
        yield from self._drop_round(text)
        if self._stopping:
            yield from self._finish("stopped", "stopped on request")
        doublings = min(self._attempt - 2, 10)  # a run may wait for weeks
        self._not_before = now + min(_FIRST_PAUSE_S * 2**doublings, _LONGEST_PAUSE_S)

    def _drop_round(self, reason: str) -> Iterator[Instruction]:
        assert self.round is not None
        for lease in list(self.leases.values()):
            if lease.state in OPEN_LEASE:
                yield from self._close(lease.id, "cancelled", "abandoned", reason)
                yield SendCancel(lease.device, lease.id)
        yield Abandon(self.round, reason)
        self._attempt = self.round.attempt + 1
        self.round = None
        self.leases = {}
        self.updates = {}

    def _stop(self, at_once: bool) -> Iterator[Instruction]:
        self._stopping = True
        frozen = self.round is not None and self.round.state == "FROZEN"
        if frozen or (self.round is not None and not at_once and self.round.goal > 0):
            return  # after this round
        if self.round is not None:
            yield from self._drop_round("stopped on request")
        yield from self._finish("stopped", "stopped on request")

    def _finish_evaluation(self, now: float) -> Iterator[Instruction]:
        assert self.round is not None
        for lease in list(self.leases.values()):
            if lease.state in OPEN_LEASE:
                yield from self._close(lease.id, "expired", "late", "the evaluation ended without it")
                yield SendCancel(lease.device, lease.id)
        yield from self._score(self.version, list(self._evaluations.values()))
        yield Announce(self.round, self.version)
        yield from self._after_commit(now, evaluated=True)

    def _finish(self, state: str, reason: str) -> Iterator[Instruction]:
        self.finished = True
        yield Finish(state, reason)


def _receipt(lease: LeaseRow, sha256: str, status: str, code: str = "ok", detail: str = "") -> SendReceipt:
    return SendReceipt(device=lease.device, lease=lease.id, sha256=sha256, status=status, code=code, detail=detail)
