"""The round before the first: devices are asked for sums; the run goes on whatever they answer, and after restarts."""

from __future__ import annotations

from typing import Any

from rows import digest, lease_row, model_row, report, round_row, run_file, slice_choice, update_row

from coordinator.rounds import events
from coordinator.rounds.events import Snapshot
from coordinator.rounds.instructions import Announce, Commit, Fold, Instruction, OpenRound
from coordinator.rounds.machine import RunMachine

NORMALISED = {"train": {"normalise": True}, "stop": {"rounds": 2}, "devices": {"min": 2}}


def _machine(file: dict[str, Any] | None = None, **snapshot: Any) -> RunMachine:
    ids, issues = iter(range(1, 10_000)), iter(range(100, 10_000))
    fields = {"run": "r-1", "file": run_file(**(NORMALISED | (file or {}))), "epoch": 7, "version": 0} | snapshot
    return RunMachine(
        Snapshot(**fields),
        slices=slice_choice(fields["file"]),
        new_id=lambda: f"lease-{next(ids)}",
        new_issue=lambda: next(issues),
        now=0.0,
    )


def _tick(machine: RunMachine, names: str, now: float) -> list[Instruction]:
    return machine.handle(events.Tick(frozenset(names), len(names)), now)


def _opened(instructions: list[Instruction]) -> OpenRound:
    (opened,) = [one for one in instructions if isinstance(one, OpenRound)]
    return opened


def _answer(machine: RunMachine, device: str) -> list[Instruction]:
    lease = next(lease.id for lease in machine.leases.values() if lease.device == device)
    stored = events.Stored(lease=lease, sha256=digest(device), length=9, norm=0.0, report=report())
    return machine.handle(stored, 1.0)


def test_sums_are_asked_for_once_and_their_model_takes_the_place_of_version_0() -> None:
    """Two devices answer round 0; its fold is version 0; the next round is the first, and trains."""
    machine = _machine()
    opened = _opened(_tick(machine, "ab", 0))
    assert (opened.round.number, opened.round.goal) == (0, 0)
    assert [(lease.train, lease.evaluate, lease.needs_no_model) for lease in opened.leases] == [
        (False, False, True)
    ] * 2
    _answer(machine, "a")
    (fold,) = [one for one in _answer(machine, "b") if isinstance(one, Fold)]
    assert [update.device for update in fold.updates] == ["a", "b"]
    done = machine.handle(events.Folded(model_row(version=0)), 2.0)
    assert [type(one) for one in done[:2]] == [Commit, Announce]
    first = _opened(_tick(machine, "ab", 3.0))
    assert first.round.number == 1
    assert all(lease.train for lease in first.leases)


def test_a_device_that_declines_stops_nobody() -> None:
    """b has no data: the sums are those of a."""
    machine = _machine()
    _tick(machine, "ab", 0)
    _answer(machine, "a")
    lease = next(lease.id for lease in machine.leases.values() if lease.device == "b")
    ended = machine.handle(events.Declined(lease=lease, code="no_data", detail="none", log=()), 1.0)
    (fold,) = [one for one in ended if isinstance(one, Fold)]
    assert [update.device for update in fold.updates] == ["a"]


def test_after_a_restart_the_round_goes_on_where_it_was() -> None:
    """Frozen: folded again. Announced: the first round. Abandoned, or nothing yet: asked again."""
    sums = update_row(round=0, device="a")
    frozen = _machine(
        round=round_row(number=0, state="FROZEN", goal=0),
        leases=[lease_row(1, round=0, train=False, evaluate=False)],
        updates=[sums],
    )
    (fold,) = [one for one in frozen.handle(events.Resumed(), 0.0) if isinstance(one, Fold)]
    assert [update.device for update in fold.updates] == ["a"]
    announced = _machine(round=round_row(number=0, state="ANNOUNCED", goal=0))
    announced.handle(events.Resumed(), 0.0)
    assert _opened(_tick(announced, "ab", 1.0)).round.number == 1
    abandoned = _machine(round=round_row(number=0, state="ABANDONED", goal=0))
    assert _opened(_tick(abandoned, "ab", 5.0)).round.number == 0


def test_no_sums_without_the_key_in_a_dry_run_or_with_the_weights_of_another_run() -> None:
    """Those weights belong to the numbers that they were trained with."""
    assert _opened(_tick(_machine({"train": {}}), "ab", 0)).round.number == 1
    assert _opened(_tick(_machine(dry=True), "ab", 0)).round.number == 1
    model = {"name": "small-cnn", "input": [1, 8, 8], "init": "run:other"}
    assert _opened(_tick(_machine({"model": model}), "ab", 0)).round.number == 1
