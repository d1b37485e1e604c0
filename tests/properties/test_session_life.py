"""A device under random messages, worker ends and crashes: it saves before it says, and never repeats finished work.

A crash comes between any two instructions; the next session knows only what was saved, as the daemon's spool keeps it.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rows import PROFILE, assign, digest

from edge_client.client import events
from edge_client.client import instructions as wanted
from edge_client.client.session import Session
from edge_client.records import Ceiling
from edge_client.wire.messages import Accept, Assign, Cancel, Grant, Offer, Receipt, Refuse, Welcome

deaths = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 4))
epochs = st.integers(1, 3)
issues = st.integers(1, 6)


class SessionMachine(RuleBasedStateMachine):
    """The daemon's half: a spool, a folder of updates, and the promises that hold at every instruction."""

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.saved: tuple[Assign | None, events.Finished | None] = (None, None)
        self.highest = (0, 0)
        self.attempts = 0
        self.replans = 0
        self.remembered: int | None = None  # since the last save
        self.started: dict[str, int] = {}  # lease -> workers
        self.files: dict[str, events.Finished] = {}  # lease -> the update its worker wrote
        self.taken: list[tuple[int, int]] = []
        self.running: str | None = None
        self.boot = 0
        self.start()

    def start(self) -> None:
        self.boot += 1
        self.running = self.remembered = None
        held, update = self.saved
        self.session = Session(
            boot=f"boot-{self.boot}",
            profile=PROFILE,
            labels={},
            client="",
            assign=held,
            update=update,
            attempts=self.attempts,
            replans=self.replans,
            highest=self.highest,
        )
        self.session.free_bytes = 10**9
        if held is not None and update is None and held.lease in self.files:
            instructions = self.session.handle(events.WorkerDone(held.lease, self.files[held.lease]), self.now)
        else:
            instructions = self.session.begin()
        self.carry_out(instructions, None)

    def give(self, event: events.Event, die_after: int | None = None) -> None:
        self.carry_out(self.session.handle(event, self.now), die_after)

    def carry_out(self, instructions: list[wanted.Instruction], die_after: int | None) -> None:
        for number, instruction in enumerate(instructions):
            if number == die_after:
                self.start()
                return
            self.do(instruction)

    def do(self, instruction: wanted.Instruction) -> None:
        match instruction:
            case wanted.Save(work, update, attempts, replans):
                if update is None and work != self.saved[0]:
                    assert (work.epoch, work.issue) > self.highest, "R1: only newer ones are taken"
                self.saved, self.highest = (work, update), (work.epoch, work.issue)
                self.attempts, self.replans, self.remembered = attempts, replans, None
            case wanted.Remember(ceiling):
                self.remembered = ceiling.training_bytes
            case wanted.Send(Accept(lease=lease)):
                assert self.saved[0] is not None
                assert self.saved[0].lease == lease, "R2: saved before accepted"
            case wanted.Send(Offer() as offer):
                held, update = self.saved
                assert held is not None
                assert update is not None, "R2: saved before offered"
                assert (offer.lease, offer.sha256) == (held.lease, update.sha256)
            case wanted.Start(work, ceiling, replans):
                assert self.running is None, "never two workers"
                assert work.lease not in self.files, "R3: a finished update is never trained again"
                assert self.saved == (work, None)
                self.started[work.lease] = self.started.get(work.lease, 0) + 1
                most = min(self.attempts, 4) + min(self.replans, 8)
                assert self.started[work.lease] <= most, "R5: counted before it starts, whoever dies"
                assert replans == self.replans
                assert self.remembered is None, "R6: what was too much is saved before the next one starts"
                assert ceiling is None or self.tried is None or ceiling <= self.tried, "R6: less than before"
                self.running = work.lease
            case wanted.Serve(update, _):
                assert update == self.saved[1]
            case wanted.Stop(lease):
                self.running = None if self.running == lease else self.running
            case wanted.Forget(lease, accepted):
                assert self.saved[0] is not None
                assert self.saved[0].lease == lease
                assert not accepted or self.receipted == lease, "R3: only a receipt says that it counted"
                self.saved = (None, None)
            case _:
                pass

    receipted = ""
    tried: int | None = None  # what the last worker of the lease in hand was to take, if that was too much

    @rule(up=st.booleans())
    def the_link_changes(self, up: bool) -> None:
        self.give(events.LinkUp() if up else events.LinkDown())

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0]), die_after=deaths)
    def time_passes(self, seconds: float, die_after: int | None) -> None:
        self.now += seconds
        self.give(events.Tick(), die_after)

    @rule(hello=st.integers(1, 4), die_after=deaths)
    def the_coordinator_welcomes(self, hello: int, die_after: int | None) -> None:
        boot = f"boot-{self.boot}"
        self.give(Welcome(boot=boot, hello=hello, session="s", epoch=1, heartbeat_s=10.0), die_after)

    @rule(code=st.sampled_from(["session", "duplicate_identity"]))
    def the_coordinator_refuses(self, code: str) -> None:
        self.give(Refuse(boot="any", code=code, retry_s=1.0))

    @rule(epoch=epochs, issue=issues, die_after=deaths)
    def work_is_assigned(self, epoch: int, issue: int, die_after: int | None) -> None:
        self.give(assign(issue, epoch=epoch, lease=f"lease-{epoch}-{issue}"), die_after)

    @rule(die_after=deaths)
    def all_parts_arrive(self, die_after: int | None) -> None:
        for part in assign().parts:
            self.give(events.PartReady(part.sha256), die_after)

    @rule(die_after=deaths, noticed=st.booleans())
    def the_worker_finishes(self, die_after: int | None, noticed: bool) -> None:
        """Its file is there before the daemon knows, and the daemon may die before it does."""
        if self.running is not None:
            lease, self.running = self.running, None
            update = events.Finished(sha256=digest(lease), length=5, num_samples=1)
            self.files[lease] = update
            if noticed:
                self.give(events.WorkerDone(lease, update), die_after)
            else:
                self.start()

    @rule(final=st.booleans(), die_after=deaths)
    def the_worker_fails(self, final: bool, die_after: int | None) -> None:
        if self.running is not None:
            lease, self.running = self.running, None
            self.give(events.WorkerFailed(lease=lease, code="crashed", final=final), die_after)

    @rule(training_bytes=st.integers(1, 1000), die_after=deaths, noticed=st.booleans())
    def the_worker_goes_over_its_budget(self, training_bytes: int, die_after: int | None, noticed: bool) -> None:
        """The lease goes on at once with a smaller plan, or after a restart, until eight have failed."""
        if self.running is not None:
            lease, self.running = self.running, None
            before, self.tried = self.replans, training_bytes
            exceeded = Ceiling(key=digest("model"), training_bytes=training_bytes, budget_bytes=1)
            failed = events.WorkerFailed(lease=lease, code="over_budget", exceeded=exceeded)
            if not noticed:
                self.start()
            self.give(failed, die_after if noticed else None)
            if noticed and die_after is None:
                assert self.running == (lease if before < 8 else None), "the same lease, with a smaller plan"
            self.tried = None

    @rule(epoch=epochs, issue=issues, die_after=deaths)
    def some_work_is_cancelled(self, epoch: int, issue: int, die_after: int | None) -> None:
        self.give(Cancel(lease=f"lease-{epoch}-{issue}"), die_after)

    @rule(right=st.booleans())
    def chunks_are_asked_for(self, right: bool) -> None:
        held, update = self.saved
        if held is not None:
            sha256 = update.sha256 if update and right else digest("other")
            self.give(Grant(lease=held.lease, sha256=sha256, ranges=((0, 1),)))

    @rule(status=st.sampled_from(["accepted", "late", "refused"]), right=st.booleans(), die_after=deaths)
    def a_receipt_comes(self, status: str, right: bool, die_after: int | None) -> None:
        held, update = self.saved
        if held is not None:
            sha256 = update.sha256 if update and right else digest("other")
            self.receipted = held.lease if update and right and status == "accepted" else ""
            self.give(Receipt(lease=held.lease, sha256=sha256, status=status), die_after)
            self.receipted = ""

    @rule()
    def the_device_is_killed(self) -> None:
        self.start()

    @invariant()
    def the_session_knows_what_is_saved(self) -> None:
        if hasattr(self, "session"):
            assert (self.session.assign, self.session.update) == self.saved


_SETTINGS = settings(max_examples=80, stateful_step_count=40, suppress_health_check=list(HealthCheck))


def test_a_device_keeps_its_promises_over_random_messages_and_crashes() -> None:
    """80 lives of 40 steps."""
    run_state_machine_as_test(SessionMachine, settings=_SETTINGS)


@pytest.mark.slow
def test_a_device_keeps_its_promises_over_many_random_messages_and_crashes() -> None:
    """2,000 lives of 60 steps."""
    run_state_machine_as_test(SessionMachine, settings=settings(_SETTINGS, max_examples=2000, stateful_step_count=60))
