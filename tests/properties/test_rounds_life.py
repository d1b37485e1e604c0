"""A run under random devices, clocks and crashes: nothing acknowledged is lost, nothing counts twice, and it ends.

The world below carries instructions out as the service does, against a real store in memory, and may die between any
two of them; the next machine knows only what the store knows. Its clock starts anywhere: no monotonic clock survives.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rows import digest, model_row, report, run_file, run_row, slice_choice

from coordinator.rounds import events
from coordinator.rounds.events import Snapshot
from coordinator.rounds.instructions import (
    Abandon,
    AddLeases,
    Announce,
    CloseLease,
    Commit,
    Finish,
    Fold,
    Freeze,
    Instruction,
    OpenRound,
    SaveDeadline,
    SaveUpdate,
    SendAssign,
    SendReceipt,
)
from coordinator.rounds.machine import RunMachine
from coordinator.store.rows import OPEN_LEASE, LeaseRow
from coordinator.store.sqlite import SqliteStore
from edge_client.records import Evaluation

DEVICES = ("a", "b", "c", "d", "e")
RUN = "r-1"
NUM_ROUNDS = 3


class _Died(Exception):
    """The process is gone."""


class World:
    """The service's half: a store, what was sent, and the invariants that hold at every instruction."""

    def __init__(self, *, fraction: float, minimum: int, every: int) -> None:
        self.file = run_file(
            devices={"min": minimum, "fraction": fraction},
            stop={"rounds": NUM_ROUNDS},
            rounds={"deadline": "60s"},
            evaluate={"every": every},
        )
        self.store = SqliteStore()
        self.store.runs.add(run_row(RUN, self.file))
        self.store.runs.start(model_row(0), digest("settings"), 8)
        self.now = 1000.0
        self.online: frozenset[str] = frozenset()
        self.epoch = 0
        self.num_ids = 0
        self.offered: list[LeaseRow] = []  # every assignment that was sent
        self.accepted: dict[str, str] = {}  # lease -> hash, of every `accepted` receipt
        self.frozen: dict[tuple[int, int], tuple[str, ...]] = {}  # attempt -> leases of its set
        self.folding: Fold | None = None
        self.stop_asked: bool | None = None
        self.finish: Finish | None = None
        self.start()

    def start(self) -> None:
        """A new process: everything comes from the store."""
        self.epoch += 1
        self.folding = None
        self.issue = self.store.leases.next_issue()
        last = self.store.rounds.last(RUN)
        model = self.store.models.last(RUN)
        assert model is not None
        snapshot = Snapshot(
            run=RUN,
            file=self.file,
            epoch=self.epoch,
            version=model.version,
            round=last,
            leases=self.store.leases.of_attempt(RUN, last.number, last.attempt) if last else (),
            updates=self.store.updates.of_attempt(RUN, last.number, last.attempt) if last else (),
            plans={
                name: update.report.plan
                for name, update in self.store.updates.newest(RUN).items()
                if update.report.plan is not None
            },
            drop_rate=self.store.leases.drop_rate(RUN, 100),
        )
        self.machine = RunMachine(
            snapshot, slices=slice_choice(self.file), new_id=self._new_id, new_issue=self._new_issue, now=self.now
        )
        self.carry_out(self.machine.handle(events.Resumed(), self.now), None)
        if self.stop_asked is not None:
            self.carry_out(self.machine.handle(events.StopAsked(self.stop_asked), self.now), None)

    def _new_id(self) -> str:
        self.num_ids += 1
        return f"lease-{self.num_ids}"

    def _new_issue(self) -> int:
        self.issue += 1
        return self.issue - 1

    def handle(self, event: events.Event, die_after: int | None = None) -> None:
        """One event, its instructions, and perhaps a crash before the `die_after`-th of them."""
        try:
            self.carry_out(self.machine.handle(event, self.now), die_after)
        except _Died:
            self.start()

    def carry_out(self, instructions: list[Instruction], die_after: int | None) -> None:
        for number, instruction in enumerate(instructions):
            if number == die_after:
                raise _Died
            self._do(instruction)

    def _do(self, instruction: Instruction) -> None:
        store = self.store
        match instruction:
            case OpenRound(round_, leases):
                store.rounds.open(round_, leases)
            case AddLeases(leases):
                store.leases.add(leases)
            case SendAssign(lease, deadline_s):
                assert deadline_s >= 0
                assert store.leases.get(lease.id) is not None, "a lease is written before it is offered"
                self.offered.append(lease)
            case CloseLease(lease_id, state, code, detail, log):
                store.leases.set_state(lease_id, state, code=code, detail=detail, log=log)
            case SaveUpdate(lease_id, update, evaluation):
                store.updates.save(update, evaluation, lease_id)
            case SendReceipt():
                self._receipt(instruction)
            case Freeze(round_, set_hash):
                store.rounds.freeze(RUN, round_.number, round_.attempt, set_hash)
            case Fold():
                self._fold(instruction)
            case Commit(round_, model):
                newest = store.models.last(RUN)
                assert newest is not None
                assert model.version == newest.version + 1, "I3: no gap"
                store.rounds.commit(round_.number, round_.attempt, model)
            case Announce(round_, _):
                store.rounds.announce(RUN, round_.number, round_.attempt)
            case Abandon(round_, reason):
                store.rounds.abandon(RUN, round_.number, round_.attempt, reason)
            case SaveDeadline(round_):
                store.rounds.save_deadline(
                    RUN,
                    round_.number,
                    round_.attempt,
                    remaining_s=round_.remaining_s,
                    extended=round_.extended,
                    elapsed_s=round_.elapsed_s,
                )
            case Finish(state, reason):
                store.runs.set_state(RUN, state, reason)
                self.finish = instruction

    def _receipt(self, receipt: SendReceipt) -> None:
        lease = self.store.leases.get(receipt.lease)
        assert lease is not None
        assert lease.device == receipt.device
        if receipt.status != "accepted":
            assert receipt.lease not in self.accepted or receipt.code == "equivocation", "no word is taken back"
            return
        assert lease.state == "stored", "R1: the row is written before the receipt"
        if lease.train:
            update = self.store.updates.of_lease(lease.id)
            assert update is not None
            assert update.sha256 == receipt.sha256
        self.accepted[receipt.lease] = receipt.sha256

    def _fold(self, fold: Fold) -> None:
        key = (fold.round.number, fold.round.attempt)
        row = self.store.rounds.last(RUN)
        assert row is not None
        assert (row.number, row.attempt, row.state) == (*key, "FROZEN"), "R2: frozen on disk before it is folded"
        assert list(fold.updates) == self.store.updates.of_attempt(RUN, *key), (
            "R2: the set is the rows, sorted by device"
        )
        leases = tuple(update.lease for update in fold.updates)
        assert self.frozen.setdefault(key, leases) == leases, "R2: a set never changes"
        self.folding = fold

    def answer_fold(self, die_after: int | None) -> None:
        if self.folding is None:
            return
        fold, self.folding = self.folding, None
        model = model_row(self.machine.version + 1, set_hash=fold.set_hash)
        self.handle(events.Folded(model), die_after)

    def store_update(self, lease: LeaseRow, text: str, die_after: int | None) -> None:
        """An update arrives that passed every check."""
        evaluation = Evaluation(num_samples=4, num_correct=3, loss_sum=1.0) if lease.evaluate else None
        told = report(evaluation=evaluation, num_samples=10 if lease.train else 0)
        stored = events.Stored(lease=lease.id, sha256=digest(text), length=9, norm=1.0, report=told)
        self.handle(stored, die_after)

    def check(self) -> None:
        store = self.store
        attempts = store.rounds.all(RUN)
        by_state = {(r.number, r.attempt): r.state for r in attempts}
        versions = [model.version for model in store.models.all(RUN)]
        assert versions == list(range(len(versions))), "I3: no gap, no fork"
        counted = [lease for leases in self.frozen.values() for lease in leases]
        assert len(counted) == len(set(counted)), "I1: an update is in at most one frozen set"
        for number in {r.number for r in attempts}:
            ended = [r.state for r in attempts if r.number == number and r.state != "ABANDONED"]
            assert len(ended) <= 1, "one attempt of a round counts"
        for lease_id in self.accepted:
            lease = store.leases.get(lease_id)
            assert lease is not None
            place = (lease.round, lease.attempt)
            if lease.train and by_state[place] in ("FROZEN", "COMMITTED", "ANNOUNCED"):
                assert lease_id in self.frozen[place], "I2: what was receipted counts"
        self._check_memory()

    def _check_memory(self) -> None:
        """The machine knows what the store knows."""
        machine, round_ = self.machine, self.machine.round
        if round_ is None:
            return
        rows = {lease.id: lease for lease in self.store.leases.of_attempt(RUN, round_.number, round_.attempt)}
        assert rows.keys() == machine.leases.keys()
        for lease_id, lease in machine.leases.items():
            lost_by_device = (lease.state, rows[lease_id].state) == ("offered", "accepted")
            assert lost_by_device or lease.state == rows[lease_id].state
        assert [machine.updates[d] for d in sorted(machine.updates)] == self.store.updates.of_attempt(
            RUN, round_.number, round_.attempt
        )

    def finish_with_good_devices(self) -> Iterator[None]:
        """Everybody is there and does its work from now on: the run must end."""
        self.online = frozenset(DEVICES)
        for _ in range(400):
            if self.machine.finished:
                return
            self.now += 1.0
            self.handle(events.Tick(self.online, len(DEVICES)))
            for lease in [x for x in self.machine.leases.values() if x.state in OPEN_LEASE]:
                self.handle(events.Accepted(lease.id))
                self.store_update(lease, f"good {lease.id}", None)
            self.answer_fold(None)
            self.check()
            yield
        raise AssertionError(f"the run hangs in {self.machine.phase} with {self.machine.leases}")


deaths = st.one_of(st.none(), st.none(), st.integers(0, 6))


class RoundsMachine(RuleBasedStateMachine):
    """Random devices and crashes."""

    @initialize(
        fraction=st.sampled_from([0.2, 0.4, 0.6, 1.0]), minimum=st.integers(1, 3), every=st.sampled_from([0, 1, 2])
    )
    def begin(self, fraction: float, minimum: int, every: int) -> None:
        self.world = World(fraction=fraction, minimum=minimum, every=every)

    def _leases(self) -> list[LeaseRow]:
        return self.world.offered

    @rule(online=st.frozensets(st.sampled_from(DEVICES), min_size=1))
    def devices_come_and_go(self, online: frozenset[str]) -> None:
        self.world.online = online

    @rule(seconds=st.sampled_from([0.3, 2.5, 4.0, 16.0, 61.0]), die_after=deaths)
    def time_passes(self, seconds: float, die_after: int | None) -> None:
        self.world.now += seconds
        self.world.handle(events.Tick(self.world.online, len(DEVICES)), die_after)

    @rule(die_after=deaths)
    def a_round_is_due(self, die_after: int | None) -> None:
        """Two ticks: enough devices, and the time in which more may come."""
        self.time_passes(61.0, None)
        self.time_passes(2.5, die_after)

    @rule(data=st.data(), die_after=deaths)
    def a_device_accepts(self, data: st.DataObject, die_after: int | None) -> None:
        if self._leases():
            lease = data.draw(st.sampled_from(self._leases()[-8:]))
            self.world.handle(events.Accepted(lease.id), die_after)

    @rule(data=st.data(), die_after=deaths)
    def a_device_declines(self, data: st.DataObject, die_after: int | None) -> None:
        if self._leases():
            lease = data.draw(st.sampled_from(self._leases()[-8:]))
            self.world.handle(events.Declined(lease=lease.id, code="crashed"), die_after)

    @rule(data=st.data(), other=st.booleans(), die_after=deaths)
    def an_update_is_stored(self, data: st.DataObject, other: bool, die_after: int | None) -> None:
        """Also for leases that are over, and twice, and with other bytes than before."""
        if self._leases():
            lease = data.draw(st.sampled_from(self._leases()[-12:]))
            self.world.store_update(lease, f"{lease.id} {other}", die_after)

    @rule(die_after=deaths)
    def all_that_are_asked_answer(self, die_after: int | None) -> None:
        for lease in list(self.world.machine.leases.values()):
            if lease.state in OPEN_LEASE:
                self.world.store_update(lease, f"{lease.id} False", die_after)
                die_after = None

    @rule(data=st.data(), die_after=deaths)
    def an_update_is_refused(self, data: st.DataObject, die_after: int | None) -> None:
        if self._leases():
            lease = data.draw(st.sampled_from(self._leases()[-8:]))
            refused = events.Refused(lease=lease.id, sha256=digest("bad"), code="norm", detail="too far")
            self.world.handle(refused, die_after)

    @rule(device=st.sampled_from(DEVICES), data=st.data())
    def a_device_tells_what_it_holds(self, device: str, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from([None, *(x.id for x in self._leases()[-8:])]))
        self.world.handle(events.Holding(device, held))

    @rule(device=st.sampled_from(DEVICES), die_after=deaths)
    def a_device_is_removed(self, device: str, die_after: int | None) -> None:
        self.world.online -= {device}
        self.world.handle(events.Removed(device), die_after)

    @rule(die_after=deaths)
    def the_fold_is_done(self, die_after: int | None) -> None:
        self.world.answer_fold(die_after)

    @rule(elsewhere=st.floats(0, 1e6))
    def the_coordinator_is_killed(self, elsewhere: float) -> None:
        self.world.now = elsewhere
        if not self.world.machine.finished:
            self.world.start()

    @rule(at_once=st.booleans(), really=st.integers(0, 9))
    def somebody_stops_the_run(self, at_once: bool, really: int) -> None:
        if really == 0 and self.world.stop_asked is None:
            self.world.stop_asked = at_once
            self.world.handle(events.StopAsked(at_once))

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in world.finish_with_good_devices():
            pass
        world.check()
        assert world.finish is not None
        if world.stop_asked is None:
            assert world.finish.state == "finished"
            assert len(world.store.models.all(RUN)) == NUM_ROUNDS + 1
        world.store.close()


_SETTINGS = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))


def test_a_run_survives_random_devices_and_crashes() -> None:
    """60 runs of 40 steps; afterwards good devices bring every one of them to its end."""
    run_state_machine_as_test(RoundsMachine, settings=_SETTINGS)


@pytest.mark.slow
def test_a_run_survives_many_random_devices_and_crashes() -> None:
    """The same, 1,000 runs of 60 steps."""
    run_state_machine_as_test(RoundsMachine, settings=settings(_SETTINGS, max_examples=1000, stateful_step_count=60))
