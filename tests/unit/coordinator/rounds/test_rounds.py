"""The rules of a run's life, one by one, with a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from rows import (
    PLAN,
    digest,
    evaluation_row,
    lease_row,
    model_row,
    report,
    round_row,
    run_file,
    slice_choice,
    update_row,
)

from coordinator.rounds import events
from coordinator.rounds.events import Snapshot
from coordinator.rounds.instructions import (
    AddLeases,
    Announce,
    CloseLease,
    Finish,
    Fold,
    Freeze,
    Instruction,
    Judge,
    OpenRound,
    SaveDeadline,
    SaveScore,
    SaveUpdate,
    SendAssign,
)
from coordinator.rounds.machine import RunMachine
from coordinator.rounds.selection import seed_of
from edge_client.records import Evaluation, Report


def _machine(*, now: float = 0.0, file: dict[str, Any] | None = None, **snapshot: Any) -> RunMachine:
    tables = {"rounds": {"deadline": "60s"}, "evaluate": {"every": 0}, "stop": {"rounds": 2}} | (file or {})
    ids, issues = iter(range(1, 10_000)), iter(range(100, 10_000))
    fields = {"run": "r-1", "file": run_file(**tables), "epoch": 7, "version": 0} | snapshot
    return RunMachine(
        Snapshot(**fields),
        slices=slice_choice(fields["file"]),
        new_id=lambda: f"lease-{next(ids)}",
        new_issue=lambda: next(issues),
        now=now,
    )


def _tick(machine: RunMachine, names: str, now: float, enrolled: int | None = None) -> list[Instruction]:
    online = frozenset(names)
    return machine.handle(events.Tick(online, len(online) if enrolled is None else enrolled), now)


def _kinds(instructions: list[Instruction]) -> list[str]:
    return [type(instruction).__name__ for instruction in instructions]


def _lease_of(machine: RunMachine, device: str) -> str:
    return next(lease.id for lease in machine.leases.values() if lease.device == device)


def _store(machine: RunMachine, device: str, now: float = 1.0, **changes: Any) -> list[Instruction]:
    fields = {"lease": _lease_of(machine, device), "sha256": digest(device), "length": 9, "norm": 1.0}
    return machine.handle(events.Stored(**fields | {"report": report()} | changes), now)


def _of(instructions: list[Instruction], kind: type) -> list[Any]:
    return [instruction for instruction in instructions if isinstance(instruction, kind)]


def test_r1_the_row_comes_before_the_receipt_and_a_repeat_writes_no_second_row() -> None:
    """The same update again gets the same answer; other bytes under the same lease are refused."""
    machine = _machine()
    _tick(machine, "ab", 0)
    assert _kinds(_store(machine, "a")) == ["SaveUpdate", "SendReceipt"]
    (again,) = _store(machine, "a")
    assert (again.status, again.sha256) == ("accepted", digest("a"))
    (other,) = _store(machine, "a", sha256=digest("other"))
    assert (other.status, other.code) == ("refused", "equivocation")


def test_r1_a_refusal_does_not_take_back_a_receipt() -> None:
    """An update that counts is not refused afterwards."""
    machine = _machine()
    _tick(machine, "ab", 0)
    _store(machine, "a")
    refused = events.Refused(lease=_lease_of(machine, "a"), sha256=digest("a"), code="norm", detail="")
    assert machine.handle(refused, 1.0) == []


def test_r2_the_frozen_set_is_sorted_and_what_comes_later_is_late() -> None:
    """b answers before a; the set is (a, b), frozen before it is folded."""
    machine = _machine(file={"devices": {"min": 2, "fraction": 0.5}})
    _tick(machine, "abcd", 0)
    assert len(machine.leases) == 4  # goal and quorum 2; P[Bin(3, 0.9) >= 2] = 0.972 is not enough
    _store(machine, "b")
    ended = _store(machine, "a")
    assert _kinds(ended) == ["SaveUpdate", "SendReceipt", *["CloseLease", "SendCancel"] * 2, "Freeze", "Fold"]
    (fold,) = _of(ended, Fold)
    assert [update.device for update in fold.updates] == ["a", "b"]
    assert fold.round.num_available == 4  # chosen or not
    (late,) = _store(machine, "c")
    assert (late.status, late.code) == ("late", "late")


def test_spares_that_are_not_needed_are_not_counted_as_failures() -> None:
    """Cut off because the goal was reached: cancelled; cut off by the deadline: expired. Only the latter is a drop."""
    machine = _machine(file={"devices": {"min": 2, "fraction": 0.5}})
    _tick(machine, "abcd", 0)
    _store(machine, "a")
    ended = _store(machine, "b")
    assert {close.state for close in _of(ended, CloseLease)} == {"cancelled"}
    machine = _machine(file={"devices": {"min": 1, "fraction": 1.0}})
    _tick(machine, "abcde", 0)
    for device in "abcd":
        _store(machine, device)
    ended = _tick(machine, "abcde", 60.0)
    assert {close.state for close in _of(ended, CloseLease)} == {"expired"}
    assert "Freeze" in _kinds(ended)  # 4 of 5 is the quorum


def test_r3_a_round_is_prolonged_once_and_then_abandoned() -> None:
    """Deadline 60 s, then half of it again, then the end of the attempt; the next one begins after a pause of 2 s."""
    machine = _machine(file={"devices": {"min": 2}})
    _tick(machine, "ab", 0)
    for lease in list(machine.leases):
        machine.handle(events.Accepted(lease), 1.0)
    (saved,) = _of(_tick(machine, "ab", 60.0), SaveDeadline)
    assert saved.round.extended
    assert saved.round.remaining_s == 30.0
    assert "Abandon" not in _kinds(_tick(machine, "ab", 89.9))
    ended = _tick(machine, "ab", 90.0)
    assert _kinds(ended)[-1] == "Abandon"
    assert [close.state for close in _of(ended, CloseLease)] == ["cancelled"] * 2
    assert _tick(machine, "ab", 91.9) == []
    (opened,) = _of(_tick(machine, "ab", 92.1), OpenRound)
    assert (opened.round.number, opened.round.attempt) == (1, 2)


def test_r3_an_abandoned_round_waits_longer_every_time_and_never_breaks() -> None:
    """2 s, 4 s, ... 60 s; after 2,000 attempts the pause is still 60 s."""
    machine = _machine(round=round_row(attempt=2000, state="ABANDONED"))
    _tick(machine, "a", 0)
    assert machine.round is not None
    assert machine.round.attempt == 2001
    lease = _lease_of(machine, "a")
    assert _kinds(machine.handle(events.Declined(lease=lease, code="crashed"), 1.0)) == ["CloseLease", "Abandon"]
    assert _tick(machine, "a", 60.9) == []
    assert _of(_tick(machine, "a", 61.1), OpenRound)


def test_r4_another_attempt_has_the_same_cohort_and_seeds() -> None:
    """Half of eight devices, chosen by the seed of run and round, not by the attempt."""
    file = {"devices": {"min": 1, "fraction": 0.25}}
    first = _machine(file=file)
    second = _machine(file=file, round=round_row(attempt=1, state="ABANDONED"))
    for machine in (first, second):
        _tick(machine, "abcdefgh", 0)
    assert [x.device for x in first.leases.values()] == [x.device for x in second.leases.values()]
    assert 2 <= len(first.leases) < 8
    assert seed_of(1, 2, "a") == seed_of(1, 2, "a") != seed_of(1, 3, "a")
    assert 0 <= seed_of(1, 2, "a") < 2**63


def test_r5_a_restart_goes_on_at_every_state() -> None:
    """RUNNING: the remaining time; FROZEN: the same fold; COMMITTED: announced; ABANDONED: the next attempt."""
    leases = [lease_row(1, "a"), lease_row(2, "b", state="stored")]
    updates = [update_row("b", "lease-2")]
    running = _machine(now=500.0, round=round_row(remaining_s=20.0), leases=leases, updates=updates)
    (sent,) = _of(_tick(running, "ab", 500.0), SendAssign)
    assert (sent.lease.id, sent.deadline_s) == ("lease-1", 20.0)
    frozen = _machine(round=round_row(state="FROZEN"), leases=leases, updates=updates)
    (fold,) = frozen.handle(events.Resumed(), 0.0)
    assert isinstance(fold, Fold)
    assert fold.updates == tuple(updates)
    assert frozen.handle(events.Resumed(), 0.0) == []
    committed = _machine(round=round_row(state="COMMITTED"), version=1)
    (announce,) = committed.handle(events.Resumed(), 0.0)
    assert isinstance(announce, Announce)
    assert announce.version == 1
    abandoned = _machine(round=round_row(state="ABANDONED", attempt=3))
    _tick(abandoned, "ab", 0)
    assert abandoned.round is not None
    assert abandoned.round.attempt == 4


def test_the_hash_of_the_set_is_that_of_its_lines() -> None:
    """Derived here: SHA-256 of `device hash samples` per line."""
    machine = _machine(round=round_row(state="FROZEN"), updates=[update_row("a", "x", num_samples=3)])
    (fold,) = machine.handle(events.Resumed(), 0.0)
    assert isinstance(fold, Fold)
    assert fold.set_hash == digest(f"a {digest('update a x')} 3\n")


def test_a_removed_device_ends_its_lease_and_the_round_goes_on() -> None:
    """b is removed: cancelled, which is no failure of a device, and a's update is the quorum."""
    machine = _machine(file={"devices": {"min": 1}})
    _tick(machine, "ab", 0)
    _store(machine, "a")
    done = machine.handle(events.Removed("b"), 2.0)
    assert [(close.state, close.code) for close in _of(done, CloseLease)] == [("cancelled", "removed")]
    assert _kinds(done) == ["CloseLease", "SendCancel", "Freeze", "Fold"]
    assert machine.handle(events.Removed("b"), 3.0) == []


def test_a_removed_device_is_not_asked_as_a_substitute() -> None:
    """Three of four are asked; one leaves for good, the others decline: the fourth one was removed meanwhile."""
    machine = _machine(file={"devices": {"min": 1, "fraction": 0.25}})
    _tick(machine, "abcd", 0)
    (spare,) = {*"abcd"} - {lease.device for lease in machine.leases.values()}
    machine.handle(events.Removed(spare), 1.0)
    instructions: list[Instruction] = []
    for lease in list(machine.leases):
        instructions = machine.handle(events.Declined(lease=lease, code="no"), 2.0)
    assert _kinds(instructions) == ["CloseLease", "Abandon"]


def test_the_time_that_is_left_is_saved_every_five_seconds() -> None:
    """At 5 s 55 are left; at 9 s nothing is written."""
    machine = _machine()
    _tick(machine, "ab", 0)
    (saved,) = _of(_tick(machine, "ab", 5.0), SaveDeadline)
    assert saved.round.remaining_s == 55.0
    assert _of(_tick(machine, "ab", 9.0), SaveDeadline) == []


def test_an_offer_is_repeated_and_a_silent_device_is_counted_out() -> None:
    """After 3 to 6 s; after 15 s without an answer the lease expires."""
    machine = _machine(file={"devices": {"min": 1}})
    assert len(_of(_tick(machine, "a", 0), SendAssign)) == 1
    assert _of(_tick(machine, "a", 2.9), SendAssign) == []
    assert len(_of(_tick(machine, "a", 6.0), SendAssign)) == 1
    (closed,) = _of(_tick(machine, "a", 15.1), CloseLease)
    assert (closed.state, closed.code) == ("expired", "no_answer")


def test_a_device_that_was_away_gets_its_time_to_answer_again() -> None:
    """Asked at 0, away from 1 to 40: asked again at 40 instead of being counted out."""
    machine = _machine(file={"devices": {"min": 1}})
    _tick(machine, "ab", 0)
    for now in (1.0, 20.0):
        _tick(machine, "b", now, enrolled=2)
    back = _tick(machine, "ab", 40.0)
    assert [sent.lease.device for sent in _of(back, SendAssign)] == ["a"]


def test_a_device_that_was_chosen_and_vanished_is_counted_out() -> None:
    """It is away from second 1; 60 s later the round goes on without it: the other one's update is the quorum."""
    machine = _machine(file={"devices": {"min": 1}})
    _tick(machine, "ab", 0.0)
    _store(machine, "a")
    _tick(machine, "a", 1.0)
    assert machine.phase == "RUNNING"
    done = _tick(machine, "a", 62.0)
    assert [(i.state, i.code) for i in _of(done, CloseLease)] == [("expired", "away")]
    assert machine.phase == "FROZEN"


def test_a_device_that_lost_its_lease_gets_it_again() -> None:
    """Accepted, then a new disk: it says that it holds nothing. The other one is asked again within 6 s."""
    machine = _machine()
    _tick(machine, "ab", 0)
    lease = _lease_of(machine, "a")
    machine.handle(events.Accepted(lease), 0.5)
    assert [x.lease.device for x in _of(_tick(machine, "ab", 6.0), SendAssign)] == ["b"]
    machine.handle(events.Holding("a", lease), 6.1)
    assert _of(_tick(machine, "ab", 6.2), SendAssign) == []
    machine.handle(events.Holding("a", None), 6.3)
    assert lease in [x.lease.id for x in _of(_tick(machine, "ab", 6.4), SendAssign)]


def test_substitutes_are_asked_when_the_cohort_fails() -> None:
    """One of four is wanted and three are asked; all three decline."""
    machine = _machine(file={"devices": {"min": 1, "fraction": 0.25}})
    _tick(machine, "abcd", 0)
    asked = [lease.device for lease in machine.leases.values()]
    assert len(asked) == 3  # 1 - 0.1**2 = 0.99 is too little, 1 - 0.1**3 = 0.999 is enough
    instructions: list[Instruction] = []
    for lease in list(machine.leases):
        instructions = machine.handle(events.Declined(lease=lease, code="nothing_fits"), 1.0)
    (added,) = _of(instructions, AddLeases)
    assert [(x.device, x.train, x.evaluate) for x in added.leases] == [(({*"abcd"} - {*asked}).pop(), True, False)]
    assert _kinds(instructions)[-1] == "SendAssign"


def test_devices_that_still_evaluate_are_waited_for_before_a_round_is_given_up() -> None:
    """Without that, a cohort that always fails would be chosen again and again while the others only evaluate."""
    machine = _machine(file={"devices": {"min": 1, "fraction": 0.25}, "evaluate": {"every": 1}})
    _tick(machine, "abcd", 0)
    (evaluator,) = [lease for lease in machine.leases.values() if not lease.train]
    instructions: list[Instruction] = []
    for lease in [lease for lease in machine.leases.values() if lease.train]:
        instructions = machine.handle(events.Declined(lease=lease.id, code="nothing_fits"), 1.0)
    assert "Abandon" not in _kinds(instructions)
    told = report(num_samples=0, payload="none", plan=None)
    stored = _store(machine, evaluator.device, report=told)
    (added,) = _of(stored, AddLeases)
    assert [lease.device for lease in added.leases] == [evaluator.device]
    (saved,) = _of(stored, SaveUpdate)
    assert saved.update is None


def test_a_device_trains_with_its_last_plan() -> None:
    """The plan of the first round is part of the second one's lease."""
    machine = _machine(file={"devices": {"min": 1}})
    _tick(machine, "a", 0)
    assert next(iter(machine.leases.values())).plan is None
    _store(machine, "a")
    machine.handle(events.Folded(model_row(1)), 2.0)
    _tick(machine, "a", 3.0)
    assert next(iter(machine.leases.values())).plan == PLAN


def test_more_devices_are_awaited_for_two_seconds() -> None:
    """One of two enrolled is there: it begins at 2 s; with both it begins at once; below the minimum never."""
    machine = _machine()
    assert _tick(machine, "a", 10.0, enrolled=2) == []
    assert _tick(machine, "a", 11.9, enrolled=2) == []
    assert _of(_tick(machine, "a", 12.0, enrolled=2), OpenRound)
    assert _of(_tick(_machine(), "ab", 0.0, enrolled=2), OpenRound)
    assert _tick(_machine(file={"devices": {"min": 3}}), "ab", 1e6, enrolled=2) == []


@pytest.mark.parametrize("at_once", [False, True])
def test_a_stop_before_a_round_ends_the_run(at_once: bool) -> None:
    """SELECTING: nothing is under way."""
    machine = _machine()
    (finish,) = machine.handle(events.StopAsked(at_once), 0.0)
    assert finish == Finish("stopped", "stopped on request")
    assert _tick(machine, "ab", 1.0) == []


def test_a_stop_waits_for_the_round_unless_it_is_urgent() -> None:
    """RUNNING: after the commit, or now with the leases cancelled; FROZEN: never before the commit."""
    patient = _machine(file={"devices": {"min": 1}})
    _tick(patient, "a", 0)
    assert patient.handle(events.StopAsked(False), 1.0) == []
    _store(patient, "a")
    assert patient.handle(events.StopAsked(True), 1.0) == []  # frozen by now
    assert _kinds(patient.handle(events.Folded(model_row(1)), 2.0)) == ["Commit", "Announce", "Finish"]
    urgent = _machine()
    _tick(urgent, "ab", 0)
    stopped = urgent.handle(events.StopAsked(True), 1.0)
    assert _kinds(stopped) == [*["CloseLease", "SendCancel"] * 2, "Abandon", "Finish"]


def test_a_stop_ends_a_run_whose_round_brings_nothing() -> None:
    """The round is abandoned: that is its end, too; it is not tried again."""
    machine = _machine(file={"devices": {"min": 1}})
    _tick(machine, "a", 0)
    assert machine.handle(events.StopAsked(False), 1.0) == []
    lease = _lease_of(machine, "a")
    ended = machine.handle(events.Declined(lease=lease, code="crashed"), 2.0)
    assert _kinds(ended) == ["CloseLease", "Abandon", "Finish"]
    assert ended[-1] == Finish("stopped", "stopped on request")


def test_the_last_model_is_judged_before_the_run_ends() -> None:
    """After the last of one rounds everybody evaluates version 1; a device that stays away cannot hold it up."""
    machine = _machine(file={"stop": {"rounds": 1}, "evaluate": {"every": 1}})
    _tick(machine, "ab", 0)
    for device in "ab":
        _store(machine, device)
    assert _kinds(machine.handle(events.Folded(model_row(1)), 2.0)) == ["Commit", "Announce"]
    (opened,) = _of(_tick(machine, "ab", 3.0), OpenRound)
    assert (opened.round.number, opened.round.goal) == (2, 0)
    assert [(x.train, x.evaluate, x.version) for x in opened.leases] == [(False, True, 1)] * 2
    _store(machine, "a", report=report(num_samples=0, payload="none"))
    ended = _tick(machine, "ab", 63.0)
    assert _kinds(ended)[-2:] == ["Announce", "Finish"]
    assert _of(ended, Finish)[0].state == "finished"


def test_a_finished_evaluation_is_not_repeated_after_a_restart() -> None:
    """The evaluation's round is ANNOUNCED and the run is still `running` in its row."""
    machine = _machine(
        file={"stop": {"rounds": 1}, "evaluate": {"every": 1}},
        version=1,
        round=round_row(number=2, goal=0, quorum=0, state="ANNOUNCED"),
    )
    (finish,) = machine.handle(events.Resumed(), 0.0)
    assert isinstance(finish, Finish)
    assert finish.state == "finished"


def test_a_fold_that_nobody_waits_for_changes_nothing() -> None:
    """A second answer, and one of another version."""
    machine = _machine(file={"devices": {"min": 1}})
    _tick(machine, "a", 0)
    assert machine.handle(events.Folded(model_row(1)), 1.0) == []
    _store(machine, "a")
    assert machine.handle(events.Folded(model_row(2)), 1.0) == []
    assert machine.handle(events.Folded(model_row(1)), 1.0) != []
    assert machine.handle(events.Folded(model_row(1)), 1.0) == []


def _judged(correct: int) -> Report:
    """An evaluation of ten samples, and nothing trained."""
    judged = Evaluation(num_samples=10, num_correct=correct, loss_sum=1.0)
    return report(num_samples=0, steps=0, payload="none", evaluation=judged)


def _matrix(correct: int) -> tuple[int, ...]:
    """`correct` of ten samples of class `no` right."""
    return (correct, 10 - correct, 0, 0)


def _fold(machine: RunMachine, now: float) -> list[Instruction]:
    return machine.handle(events.Folded(model_row(machine.version + 1)), now)


def test_r6_a_device_that_cannot_take_part_is_not_asked_until_it_has_started_anew() -> None:
    """b says that nothing fits; the next round asks a alone; after a new hello b is asked again."""
    machine = _machine(file={"stop": {"rounds": 3}})
    _tick(machine, "ab", 0)
    machine.handle(events.Declined(lease=_lease_of(machine, "b"), code="nothing_fits"), 1.0)
    _store(machine, "a")
    _fold(machine, 2.0)
    (opened,) = _of(_tick(machine, "ab", 3.0), OpenRound)
    assert [lease.device for lease in opened.leases] == ["a"]
    machine.handle(events.Returned("b"), 4.0)
    _store(machine, "a")
    _fold(machine, 5.0)
    (opened,) = _of(_tick(machine, "ab", 6.0), OpenRound)
    assert [lease.device for lease in opened.leases] == ["a", "b"]


def test_r6_a_round_counts_without_those_who_can_never_take_part() -> None:
    """Quorum of five: four. If nothing fits on two, 80 % of the other three are enough; a crash is no such reason."""
    for code, kind in (("nothing_fits", "Fold"), ("crashed", "Abandon")):
        machine = _machine(file={"devices": {"min": 2}})
        _tick(machine, "abcde", 0)
        for device in "ab":
            machine.handle(events.Declined(lease=_lease_of(machine, device), code=code), 1.0)
        ended = [_store(machine, device) for device in "cde"]
        assert [kind in _kinds(instructions) for instructions in ended] == [False, False, True]


def test_r6_a_round_never_counts_with_fewer_than_the_run_wants() -> None:
    """devices.min is 3: of five, two are left."""
    machine = _machine(file={"devices": {"min": 3}})
    _tick(machine, "abcde", 0)
    for device in "abc":
        machine.handle(events.Declined(lease=_lease_of(machine, device), code="nothing_fits"), 1.0)
    _store(machine, "d")
    assert "Abandon" in _kinds(_store(machine, "e"))


def test_r6_a_worker_that_crashed_is_asked_again() -> None:
    """Only reasons that stay until somebody changes something keep a device out."""
    machine = _machine()
    _tick(machine, "ab", 0)
    machine.handle(events.Declined(lease=_lease_of(machine, "b"), code="crashed"), 1.0)
    assert machine.excluded == {}


def test_a_run_that_must_fit_everywhere_fails_where_it_does_not() -> None:
    """misfit = "fail": the round is dropped and the run ends with the device's own words."""
    machine = _machine(file={"devices": {"misfit": "fail"}})
    _tick(machine, "ab", 0)
    told = events.Declined(lease=_lease_of(machine, "b"), code="nothing_fits", detail="needs 300 MB")
    ended = machine.handle(told, 1.0)
    assert _kinds(ended) == ["CloseLease", "CloseLease", "SendCancel", "Abandon", "Finish"]
    assert ended[-1] == Finish("failed", "nothing_fits: b: needs 300 MB")


def test_a_device_that_keeps_its_results_trains_and_is_not_asked_to_evaluate_again() -> None:
    """b trains in no round (fraction 1 of 2) and declines to evaluate: it gets no evaluation any more."""
    machine = _machine(file={"evaluate": {"every": 1}, "stop": {"rounds": 1}})
    _tick(machine, "ab", 0)
    for device in "ab":
        _store(machine, device)
    _fold(machine, 2.0)
    _tick(machine, "ab", 3.0)  # the last evaluation
    machine.handle(events.Declined(lease=_lease_of(machine, "b"), code="not_shared"), 4.0)
    assert machine.excluded == {}
    ended = _store(machine, "a", report=_judged(7), confusion=_matrix(7))
    assert _kinds(ended)[-2:] == ["Announce", "Finish"]


def test_r7_the_score_of_a_version_is_saved_before_its_round_is_frozen() -> None:
    """Version 0 is judged in round 1: 3 and 9 of 10 right are an accuracy of 0.6, the best so far."""
    machine = _machine(file={"evaluate": {"every": 1}})
    _tick(machine, "ab", 0)
    _store(machine, "a", report=report(evaluation=_judged(3).evaluation), confusion=_matrix(3))
    ended = _store(machine, "b", report=report(evaluation=_judged(9).evaluation), confusion=_matrix(9))
    assert _kinds(ended)[-3:] == ["SaveScore", "Freeze", "Fold"]
    assert _of(ended, SaveScore) == [SaveScore(0, 0.6, 0)]


def test_r7_a_target_ends_the_run_after_the_round_that_showed_it_and_the_last_model_is_judged() -> None:
    """Version 0 has 0.9 already: round 1 is committed, version 1 is judged, and the run ends with 99 rounds unused."""
    machine = _machine(file={"evaluate": {"every": 1}, "stop": {"rounds": 100, "target": 0.9}})
    _tick(machine, "a", 0)
    _store(machine, "a", report=report(evaluation=_judged(9).evaluation), confusion=_matrix(9))
    assert _kinds(_fold(machine, 2.0)) == ["Commit", "Announce"]
    (opened,) = _of(_tick(machine, "a", 3.0), OpenRound)
    assert [(x.train, x.evaluate, x.version) for x in opened.leases] == [(False, True, 1)]
    ended = _store(machine, "a", report=_judged(5), confusion=_matrix(5))
    assert ended[-1] == Finish("finished", "target reached: accuracy 0.9 at version 0")


def test_r7_hours_are_counted_over_restarts_and_end_a_run_that_waits() -> None:
    """0.1 h are 360 s; 300 s were used before the restart: after 60 s more the run ends though nobody is there."""
    machine = _machine(file={"stop": {"hours": 0.1}}, round=round_row(state="ANNOUNCED", elapsed_s=300.0), version=1)
    assert _tick(machine, "", 59.0) == []
    assert _tick(machine, "", 61.0) == [Finish("finished", "0.1 hours are over after 1 rounds")]


def test_the_last_evaluation_waits_a_minute_for_the_fleet_and_then_takes_who_is_there() -> None:
    """Two devices are needed for a round; after 60 s one may judge the last model alone."""
    machine = _machine(
        file={"stop": {"rounds": 1}, "evaluate": {"every": 1}, "devices": {"min": 2}},
        round=round_row(state="ANNOUNCED"),
        version=1,
    )
    assert _tick(machine, "a", 60.0, enrolled=2) == []
    assert _tick(machine, "a", 61.0, enrolled=2) == []  # enough now, but the other one may be about to come
    assert _of(_tick(machine, "a", 63.1, enrolled=2), OpenRound)


def test_a_server_judges_each_version_between_two_rounds() -> None:
    """No device evaluates; nothing is asked while version 0 is judged; after the last version the run ends."""
    on_server = {"evaluate": {"on": "npz:/srv/test.npz"}, "stop": {"rounds": 1}}
    machine = _machine(file=on_server)
    assert machine.handle(events.Resumed(), 0.0) == [Judge(0)]
    assert _tick(machine, "a", 1.0) == []
    judged = machine.handle(events.Judged([evaluation_row("@server", 0)]), 2.0)
    assert judged == [SaveScore(0, 0.7, 0)]
    (opened,) = _of(_tick(machine, "a", 3.0), OpenRound)
    assert [(x.train, x.evaluate) for x in opened.leases] == [(True, False)]
    _store(machine, "a")
    assert _kinds(_fold(machine, 5.0)) == ["Commit", "Announce", "Judge"]
    last = machine.handle(events.Judged([evaluation_row("@server", 1)]), 6.0)
    assert last == [SaveScore(1, 0.7, 0), Finish("finished", "1 rounds")]


def test_a_server_without_test_samples_holds_nothing_up() -> None:
    """Each version is judged once, on none; a target is never reached, and the run ends with its rounds."""
    rules = {"evaluate": {"on": "npz:/srv/test.npz"}, "stop": {"rounds": 1, "target": 0.5, "metric": "accuracy"}}
    machine, none = _machine(file=rules), {"num_samples": 0, "num_correct": 0, "confusion": (0, 0, 0, 0)}
    assert machine.handle(events.Resumed(), 0.0) == [Judge(0)]
    assert machine.handle(events.Judged([evaluation_row("@server", 0, **none)]), 2.0) == []
    assert _of(_tick(machine, "a", 3.0), OpenRound)
    _store(machine, "a")
    assert _kinds(_fold(machine, 5.0)) == ["Commit", "Announce", "Judge"]
    last = machine.handle(events.Judged([evaluation_row("@server", 1, **none)]), 6.0)
    assert last == [Finish("finished", "1 rounds")]


def test_a_restart_judges_again_what_was_not_written() -> None:
    """Version 1 is committed and has no score: the server judges it once more."""
    machine = _machine(
        file={"evaluate": {"on": "npz:/srv/test.npz"}},
        round=round_row(state="ANNOUNCED"),
        version=1,
        scores={0: 0.5},
    )
    assert machine.handle(events.Resumed(), 0.0) == [Judge(1)]


def test_a_round_waits_for_those_who_only_evaluate_half_as_long_as_it_took() -> None:
    """One of two trains and is done after 10 s; the other one still evaluates: it has until 15 s."""
    machine = _machine(file={"devices": {"min": 1, "fraction": 0.25}, "evaluate": {"every": 1}})
    _tick(machine, "abcd", 0)
    training = [lease for lease in machine.leases.values() if lease.train]
    for lease in list(machine.leases):
        machine.handle(events.Accepted(lease), 0.0)
    done = _store(machine, training[0].device, now=10.0, report=report(evaluation=_judged(5).evaluation))
    assert "Freeze" not in _kinds(done)
    assert "Freeze" not in _kinds(_tick(machine, "abcd", 14.9))
    assert "Freeze" in _kinds(_tick(machine, "abcd", 15.1))


def test_a_dry_run_asks_everybody_for_a_plan_once_and_keeps_the_answers() -> None:
    """Neither train nor evaluate; a decline is an answer; the reports become rows; nothing is folded."""
    machine = _machine(dry=True, file={"devices": {"min": 5}, "evaluate": {"every": 1}})
    (opened,) = _of(_tick(machine, "ab", 0), OpenRound)
    assert [(x.device, x.train, x.evaluate) for x in opened.leases] == [("a", False, False), ("b", False, False)]
    told = report(num_samples=0, steps=0, payload="none", num_held=42)
    (saved,) = _of(_store(machine, "a", report=told), SaveUpdate)
    assert saved.update is not None
    assert saved.update.report.num_held == 42
    ended = machine.handle(events.Declined(lease=_lease_of(machine, "b"), code="nothing_fits"), 1.0)
    assert _kinds(ended) == ["CloseLease", "Announce", "Finish"]
    assert ended[-1] == Finish("finished", "dry run")


def test_a_dry_run_without_devices_ends_after_a_moment() -> None:
    """Nobody is there of three that are enrolled: two seconds, then the end."""
    machine = _machine(dry=True)
    assert _tick(machine, "", 0, enrolled=3) == []
    assert _kinds(_tick(machine, "", 2.1, enrolled=3)) == ["OpenRound", "Announce", "Finish"]


def test_after_a_restart_a_failed_round_waits_for_substitutes_to_come_back() -> None:
    """a declined before the restart and b is not back yet: within 10 s b is asked instead; nothing is abandoned."""
    restored = {"round": round_row(goal=1, quorum=1), "leases": [lease_row(1, state="declined", code="crashed")]}
    machine = _machine(**restored)
    assert _tick(machine, "", 1.0, enrolled=2) == []
    (added,) = _of(_tick(machine, "b", 9.0, enrolled=2), AddLeases)
    assert [lease.device for lease in added.leases] == ["b"]
    machine = _machine(**restored)
    assert "Abandon" in _kinds(_tick(machine, "", 10.0, enrolled=2))


def test_r8_a_simulation_asks_exactly_its_cohort() -> None:
    """Half of ten devices: always the same five; of a fleet, which loses some, more would be asked."""
    half = {"devices": {"fraction": 0.5}}
    cohorts = []
    for simulated in (True, True, False):
        machine = _machine(file=half, simulated=simulated)
        _tick(machine, "abcdefghij", 0)
        cohorts.append({lease.device for lease in machine.leases.values()})
    assert len(cohorts[0]) == 5
    assert cohorts[0] == cohorts[1]
    assert len(cohorts[2]) > 5


def test_r8_a_simulated_round_has_no_deadline_and_waits_for_all_who_only_evaluate() -> None:
    """A run file's deadline is of devices: after a day nothing is late; the set is frozen when the last one judged."""
    file = {"devices": {"fraction": 0.5}, "evaluate": {"every": 1}}
    machine = _machine(file=file, simulated=True)
    _tick(machine, "ab", 0)
    trains, judges = sorted(machine.leases.values(), key=lambda lease: not lease.train)
    for lease in (trains, judges):
        machine.handle(events.Accepted(lease.id), 1)
    _store(machine, trains.device, now=80_000)
    assert _of(_tick(machine, "ab", 90_000), Freeze) == []
    told = report(num_samples=0, payload="none", evaluation=Evaluation(num_samples=10, num_correct=7, loss_sum=1.0))
    assert len(_of(_store(machine, judges.device, now=99_000, report=told), Freeze)) == 1


def test_a_machine_tells_how_often_its_round_was_begun() -> None:
    """Once; and a second time after all devices declined."""
    machine = _machine()
    assert machine.attempt == 1
    _tick(machine, "a", 0)
    machine.handle(events.Declined(lease=_lease_of(machine, "a"), code="crashed"), 1)
    assert (machine.round, machine.attempt) == (None, 2)


def test_a_device_on_which_its_slice_does_not_fit_is_asked_for_a_smaller_one() -> None:
    """In the same round; below the smallest one it is left out."""
    machine = _machine(file={"slices": ["full", "width:1/2"]})
    opened = _tick(machine, "ab", 1.0)
    lease = next(i.lease for i in opened if isinstance(i, SendAssign) and i.lease.device == "a")
    assert lease.slice == "full"
    again = machine.handle(events.Declined(lease=lease.id, code="nothing_fits", detail="too large"), 2.0)
    assert _kinds(again) == ["CloseLease", "AddLeases", "SendAssign"]
    (smaller,) = (i.lease for i in again if isinstance(i, SendAssign))
    assert (smaller.device, smaller.slice, smaller.train) == ("a", "width:1/2", True)
    machine.handle(events.Declined(lease=smaller.id, code="nothing_fits"), 3.0)
    assert machine.excluded == {"a": "nothing_fits"}


def test_the_time_to_answer_begins_when_the_device_was_asked() -> None:
    """Its part of the model takes 40 s to be made: it is offered again and again, and never counted out."""
    machine = _machine()
    _tick(machine, "a", 1.0)
    (lease,) = machine.leases.values()
    for now in range(2, 42):
        machine.handle(events.AssignmentDelayed(lease.id), float(now))
        assert "CloseLease" not in _kinds(_tick(machine, "a", float(now)))
    _tick(machine, "a", 45.0)
    assert "CloseLease" in _kinds(_tick(machine, "a", 62.0))
