"""One attempt of a round: what becomes of its leases and which answers are still expected."""

from __future__ import annotations

from typing import Any

from rows import digest, evaluation_row, lease_row, report, round_row, update_row

from coordinator.rounds.attempt import Attempt
from coordinator.rounds.events import Refused, Stored
from coordinator.rounds.instructions import CloseLease, SendCancel, SendReceipt
from edge_client.records import Evaluation


def _attempt(*leases: Any, goal: int = 2, quorum: int = 2, **more: Any) -> Attempt:
    return Attempt(round_row(goal=goal, quorum=quorum), leases, **more)


def _stored(lease: str, text: str = "update", **changes: Any) -> Stored:
    fields: dict[str, Any] = {"lease": lease, "sha256": digest(text), "length": 9, "norm": 1.0, "report": report()}
    return Stored(**fields | changes)


def test_a_lease_is_accepted_once() -> None:
    """The second acceptance writes nothing, and neither does one of an unknown lease."""
    attempt = _attempt(lease_row(1))
    assert attempt.accept("lease-1") == [CloseLease("lease-1", "accepted")]
    assert attempt.accept("lease-1") == []
    assert attempt.accept("lease-9") == []
    assert attempt.leases["lease-1"].state == "accepted"


def test_a_device_that_holds_another_lease_is_offered_its_own_again() -> None:
    """It accepted lease-1 and reports nothing, or another lease; while it reports lease-1, all is well."""
    attempt = _attempt(lease_row(1, state="accepted"), lease_row(2, "b", state="accepted"))
    assert attempt.offer_again("a", "lease-1") == []
    assert attempt.offer_again("a", None) == ["lease-1"]
    assert attempt.leases["lease-1"].state == "offered"
    assert attempt.leases["lease-2"].state == "accepted"


def test_an_update_of_a_training_device_becomes_a_row_and_a_receipt() -> None:
    """One update of two: half of the goal; its evaluation is kept under the architecture of the slice."""
    attempt = _attempt(lease_row(1, slice="width:1/2:o3"), lease_row(2, "b"))
    evaluated = report(evaluation=Evaluation(num_samples=10, num_correct=7, loss_sum=3.0))
    saved, receipt = attempt.store(attempt.leases["lease-1"], _stored("lease-1", report=evaluated, confusion=(7, 3)))
    assert saved.update is not None
    assert (saved.update.device, saved.update.lease, saved.update.num_samples) == ("a", "lease-1", 10)
    assert saved.evaluation is not None
    assert (saved.evaluation.slice, saved.evaluation.confusion) == ("width:1/2", (7, 3))
    assert (receipt.status, receipt.code) == ("accepted", "ok")
    assert (attempt.num_missing, attempt.is_complete, attempt.has_quorum) == (1, False, False)
    assert attempt.evaluations == [saved.evaluation]


def test_a_device_that_does_not_train_counts_only_in_a_dry_run() -> None:
    """Its report is the answer of a dry run; otherwise only its evaluation matters."""
    for dry in (False, True):
        attempt = _attempt(lease_row(1, train=False), dry=dry)
        saved, _ = attempt.store(attempt.leases["lease-1"], _stored("lease-1"))
        assert (saved.update is not None, len(attempt.updates)) == (dry, int(dry))


def test_a_repeated_update_gets_the_answer_of_the_first_time() -> None:
    """The same bytes: accepted; other bytes: equivocation; an expired lease: late."""
    attempt = _attempt(lease_row(1), lease_row(2, "b", state="expired"))
    attempt.store(attempt.leases["lease-1"], _stored("lease-1", "first"))
    lease, expired = attempt.leases["lease-1"], attempt.leases["lease-2"]
    assert attempt.repeat_receipt(lease, digest("first")).status == "accepted"
    assert attempt.repeat_receipt(lease, digest("other")).code == "equivocation"
    assert attempt.repeat_receipt(expired, digest("first")).code == "late"


def test_an_update_is_refused_while_its_lease_is_open() -> None:
    """Closed and answered; the second refusal changes nothing."""
    attempt = _attempt(lease_row(1))
    refused = Refused(lease="lease-1", sha256=digest("bad"), code="norm", detail="too far")
    closed, receipt = attempt.refuse(refused)
    assert closed == CloseLease("lease-1", "refused", "norm", "too far")
    assert isinstance(receipt, SendReceipt)
    assert (receipt.status, receipt.code, receipt.detail) == ("refused", "norm", "too far")
    assert attempt.refuse(refused) == []


def test_open_leases_are_cancelled_and_their_devices_informed() -> None:
    """Two of three are open; the stored one stays."""
    leases = (lease_row(1), lease_row(2, "b", state="accepted"), lease_row(3, "c", state="stored"))
    attempt = _attempt(*leases)
    instructions = attempt.cancel_all(state="expired", code="late", detail="over")
    assert instructions == [
        CloseLease("lease-1", "expired", "late", "over"),
        SendCancel("a", "lease-1"),
        CloseLease("lease-2", "expired", "late", "over"),
        SendCancel("b", "lease-2"),
    ]
    assert attempt.open_leases() == []
    assert attempt.leases["lease-3"].state == "stored"


def test_only_the_leases_of_a_removed_device_end() -> None:
    """a is removed; b goes on."""
    attempt = _attempt(lease_row(1), lease_row(2, "b"))
    assert attempt.remove("a")[-1] == SendCancel("a", "lease-1")
    assert [lease.device for lease in attempt.open_leases()] == ["b"]


def test_who_is_still_expected() -> None:
    """a trains and has declined, b only evaluates: no update is expected, an evaluation is; with goal 0, b counts."""
    leases = (lease_row(1, state="declined", code="crashed"), lease_row(2, "b", train=False))
    attempt = _attempt(*leases)
    assert (attempt.is_expecting(), attempt.is_expecting_evaluators()) == (False, True)
    assert attempt.devices_asked_to_train() == {"a"}
    assert attempt.busy_devices() == {"b"}
    assert _attempt(*leases, goal=0, quorum=0).is_expecting()


def test_the_quorum_leaves_out_devices_that_can_never_take_part() -> None:
    """Of five, nothing fits on two: 80 % of three, rounded down, are 2; a crash is no lasting reason: 80 % of five."""
    for code, quorum in (("nothing_fits", 2), ("crashed", 4)):
        declined = [lease_row(i, name, state="declined", code=code) for i, name in enumerate("ab")]
        others = [lease_row(i, name) for i, name in enumerate("cde", start=2)]
        attempt = _attempt(*declined, *others, goal=5, quorum=4)
        assert attempt.quorum_of_the_able(1) == quorum
    assert _attempt(*declined, *others, goal=5, quorum=4).quorum_of_the_able(5) == 5


def test_a_failure_names_every_reason_once() -> None:
    """In alphabetical order; without any reason it was the deadline."""
    leases = [lease_row(1, "b", state="declined", code="crashed"), lease_row(2, "a", state="expired", code="away")]
    assert _attempt(*leases).reason_of_failure() == "0 of 2 needed updates (a: away; b: crashed)"
    attempt = _attempt(lease_row(1), updates=[update_row("b")])
    assert attempt.reason_of_failure() == "1 of 2 needed updates (deadline)"


def test_a_restored_attempt_has_what_was_stored() -> None:
    """One update and one evaluation from before the restart."""
    attempt = _attempt(lease_row(1, state="stored"), updates=[update_row()], evaluations=[evaluation_row()])
    assert list(attempt.updates) == ["a"]
    assert attempt.reaches_quorum_with(1)
    assert not attempt.reaches_quorum_with(0)
    assert attempt.evaluations == [evaluation_row()]
