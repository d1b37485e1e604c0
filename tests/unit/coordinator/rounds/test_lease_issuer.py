"""The rows of new leases: who trains what, under which number, with which plan."""

from __future__ import annotations

from itertools import count

from rows import PLAN, round_row, run_file, slice_choice

from coordinator.rounds.events import Snapshot
from coordinator.rounds.lease_issuer import LeaseIssuer


def _issuer(**tables: object) -> LeaseIssuer:
    file = run_file(**tables)
    ids, issues = count(1), count(100)
    return LeaseIssuer(
        Snapshot(run="r-1", file=file, epoch=7, version=0),
        slices=slice_choice(file),
        new_id=lambda: f"lease-{next(ids)}",
        new_issue=lambda: next(issues),
    )


def test_a_round_has_a_lease_for_every_trainer_and_every_other_device() -> None:
    """a and b train, c only evaluates; b keeps its results. Ids and issues grow in that order."""
    leases = _issuer().issue_all(round_row(number=3), ["a", "b"], ["c"], version=2, evaluators={"a", "c"})
    assert [(x.id, x.issue, x.device, x.train, x.evaluate) for x in leases] == [
        ("lease-1", 100, "a", True, True),
        ("lease-2", 101, "b", True, False),
        ("lease-3", 102, "c", False, True),
    ]
    assert {(x.run, x.round, x.epoch, x.version, x.slice, x.state) for x in leases} == {
        ("r-1", 3, 7, 2, "full", "offered")
    }


def test_the_plan_of_the_last_update_is_suggested_again() -> None:
    """A device that never trained has none."""
    issuer = _issuer()
    issuer.remember_plan("a", PLAN)
    first, second = issuer.issue_all(round_row(), ["a", "b"], [], version=0, evaluators=set())
    assert (first.plan, second.plan) == (PLAN, None)
    assert issuer.plans == {"a": PLAN}


def test_a_device_gets_a_smaller_slice_while_there_is_one() -> None:
    """Two slices: after the first did not fit, the second one; after that, nothing."""
    issuer = _issuer(slices=["full", "width:1/2"])
    lease = issuer.issue(round_row(), "a", version=0, train=True, evaluate=False)
    assert lease.slice == "full"
    assert issuer.has_smaller_slice(lease)
    smaller = issuer.issue(round_row(), "a", version=0, train=True, evaluate=False)
    assert smaller.slice == "width:1/2"
    assert not issuer.has_smaller_slice(smaller)
