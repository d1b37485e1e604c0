"""The rules of a device's session, one by one, with a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rows import PROFILE, assign, digest

from edge_client.client.events import (
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
from edge_client.client.session import Session
from edge_client.records import Ceiling
from edge_client.wire.messages import (
    Accept,
    Cancel,
    Decline,
    Goodbye,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Receipt,
    Refuse,
    Welcome,
)

FAR = 10**9  # bytes of a plan for training
UPDATE = Finished(sha256=digest("update"), length=30, num_samples=10)


def _session(**saved: Any) -> Session:
    session = Session(boot="boot", profile=PROFILE, labels={}, client="test", **saved)
    session.free_bytes = 10**9
    return session


def _online(now: float = 0.0, **saved: Any) -> Session:
    session = _session(**saved)
    session.begin()
    session.handle(LinkUp(), now)
    session.handle(_welcome(), now)
    return session


def _welcome(hello: int = 1, heartbeat_s: float = 10.0) -> Welcome:
    return Welcome(boot="boot", hello=hello, session="s1", epoch=1, heartbeat_s=heartbeat_s)


def _sent(instructions: list[Instruction]) -> list[Message]:
    return [instruction.message for instruction in instructions if isinstance(instruction, Send)]


def _fetch_all(session: Session, now: float = 1.0) -> list[Instruction]:
    assert session.assign is not None
    result: list[Instruction] = []
    for part in session.assign.parts:
        result = session.handle(PartReady(part.sha256), now)
    return result


def _failed(**changes: Any) -> WorkerFailed:
    return WorkerFailed(**{"lease": "lease-1", "code": "crashed"} | changes)


def _over(training_bytes: int, **changes: Any) -> WorkerFailed:
    return _failed(code="over_budget", detail="3 GB", exceeded=_ceiling(training_bytes), **changes)


def _ceiling(training_bytes: int) -> Ceiling:
    return Ceiling(key=digest("model"), training_bytes=training_bytes, budget_bytes=7)


def test_the_way_of_an_assignment() -> None:
    """Saved, accepted, fetched; started when both parts are here; saved, offered; forgotten on the receipt."""
    session = _online()
    work = assign()
    taken = session.handle(work, 1.0)
    assert taken == [Save(work, None), Send(Accept(lease="lease-1")), *(Fetch(part) for part in work.parts)]
    assert session.state == "fetching"
    assert session.handle(PartReady(work.parts[0].sha256), 2.0) == []
    assert session.handle(PartReady(work.parts[1].sha256), 2.0) == [Start(work)]
    assert session.state == "working"
    save, send = session.handle(WorkerDone("lease-1", UPDATE), 3.0)
    assert save == Save(work, UPDATE)
    offer = Offer(lease="lease-1", run="r-1", round=1, sha256=UPDATE.sha256, length=30, num_samples=10)
    assert send == Send(offer)
    granted = session.handle(Grant(lease="lease-1", sha256=UPDATE.sha256, ranges=((0, 1),)), 4.0)
    assert granted == [Serve(UPDATE, ((0, 1),))]
    ended = session.handle(Receipt(lease="lease-1", sha256=UPDATE.sha256, status="accepted"), 5.0)
    assert ended == [Stop("lease-1"), Forget("lease-1", True)]
    assert session.state == "idle"


@pytest.mark.parametrize(("epoch", "issue"), [(1, 5), (1, 4), (0, 9)])
def test_r1_an_older_assignment_is_not_taken(epoch: int, issue: int) -> None:
    """(1, 5) was seen before: the same pair, a lower issue and a lower epoch are declined."""
    session = _online(highest=(1, 5))
    (message,) = _sent(session.handle(assign(issue, epoch=epoch), 1.0))
    assert isinstance(message, Decline)
    assert message.code == "forgotten"
    assert session.state == "idle"


def test_r1_a_newer_assignment_replaces_the_one_in_hand() -> None:
    """One lease at a time: the old one is stopped and forgotten before the new one is saved."""
    session = _online()
    session.handle(assign(1), 1.0)
    newer = assign(1, epoch=2, lease="other")
    taken = session.handle(newer, 2.0)
    assert taken[:3] == [Stop("lease-1"), Forget("lease-1", False), Save(newer, None)]


def test_r1_a_higher_epoch_wins_over_a_higher_issue() -> None:
    """After a restore from a backup the coordinator counts its issues again, in a higher epoch."""
    session = _online(highest=(1, 500))
    assert isinstance(session.handle(assign(1, epoch=2), 1.0)[0], Save)


def test_r2_saved_before_said() -> None:
    """Both times the save is the first instruction."""
    session = _online()
    assert isinstance(session.handle(assign(), 1.0)[0], Save)
    _fetch_all(session)
    assert isinstance(session.handle(WorkerDone("lease-1", UPDATE), 3.0)[0], Save)


def test_r3_a_finished_update_is_not_trained_again_after_a_restart() -> None:
    """It is offered at the welcome; nothing is fetched or started."""
    session = _session(assign=assign(), update=UPDATE, highest=(1, 1))
    assert session.begin() == []
    session.handle(LinkUp(), 0.0)
    begun = session.handle(_welcome(), 0.5)
    assert begun[0] == BeginSession("s1")
    assert [type(message) for message in _sent(begun)] == [Offer]
    assert session.handle(PartReady(assign().parts[0].sha256), 1.0) == []


def test_r3_a_receipt_for_something_else_deletes_nothing() -> None:
    """Another hash, another lease, or before anything is finished."""
    session = _online(assign=assign(), update=UPDATE, highest=(1, 1))
    for lease, sha256 in (("lease-1", digest("other")), ("lease-2", UPDATE.sha256)):
        assert session.handle(Receipt(lease=lease, sha256=sha256, status="accepted"), 1.0) == []
    assert session.state == "offering"
    working = _online(assign=assign(), highest=(1, 1))
    assert working.handle(Receipt(lease="lease-1", sha256=UPDATE.sha256, status="late"), 1.0) == []


@pytest.mark.parametrize("status", ["late", "refused"])
def test_r3_an_update_that_did_not_count_drops_the_methods_next_state(status: str) -> None:
    """Only `accepted` promotes it."""
    session = _online(assign=assign(), update=UPDATE, highest=(1, 1))
    ended = session.handle(Receipt(lease="lease-1", sha256=UPDATE.sha256, status=status), 1.0)
    assert ended[-1] == Forget("lease-1", False)


def test_r4_hello_is_repeated_ever_slower_until_welcomed() -> None:
    """At 0, after 10 to 20 s, after 15 to 30 s more; each has the next number."""
    session, now, waits = _session(), 0.0, []
    (said,) = _sent(session.handle(LinkUp(), now))
    for number in (1, 2, 3):
        assert isinstance(said, Hello)
        assert said.hello == number
        waits.append(session.next_due() - now)
        assert session.handle(Tick(), session.next_due() - 0.1) == []
        now = session.next_due()
        (said,) = _sent(session.handle(Tick(), now))
    assert [low <= wait <= 2 * low for low, wait in zip((10.0, 15.0, 22.5), waits, strict=True)] == [True] * 3
    assert session.handle(_welcome(hello=4), now) == [BeginSession("s1")]
    assert session.online


@pytest.mark.parametrize("answered", [1, 2])
def test_r4_any_hello_of_the_connection_may_be_the_one_that_is_answered(answered: int) -> None:
    """A coordinator that is behind answers the first when the second is under way; the other answer changes nothing."""
    session = _session()
    session.handle(LinkUp(), 0.0)
    session.handle(Tick(), 20.0)
    assert session.handle(_welcome(hello=answered), 20.1) == [BeginSession("s1")]
    assert session.handle(_welcome(hello=3 - answered), 20.2) == []
    assert session.online


def test_r4_a_coordinator_of_before_begins_a_session_for_every_hello_and_the_newest_counts() -> None:
    """s1 answers the first hello, s2 the second; an answer that comes out of order does not go back."""
    session = _session()
    session.handle(LinkUp(), 0.0)
    session.handle(Tick(), 20.0)
    assert session.handle(_welcome(hello=1), 20.1) == [BeginSession("s1")]
    assert session.handle(replace(_welcome(hello=2), session="s2"), 20.2) == [BeginSession("s2")]
    assert session.handle(_welcome(hello=1), 20.3) == []


def test_r4_answers_to_hellos_of_before_do_not_count() -> None:
    """Of the connection before, of a hello that is still to be said, and of a session that the coordinator refused."""
    session = _session()
    session.handle(LinkUp(), 0.0)
    session.handle(LinkDown(), 1.0)
    session.handle(LinkUp(), 2.0)
    assert session.handle(_welcome(hello=1), 2.1) == []
    assert session.handle(_welcome(hello=3), 2.1) == []
    assert session.handle(_welcome(hello=2), 2.1) == [BeginSession("s1")]
    session.handle(Refuse(boot="any", code="session", retry_s=0.0), 3.0)
    session.handle(Tick(), 3.0)
    assert session.handle(_welcome(hello=2), 3.1) == []
    assert session.handle(replace(_welcome(hello=3), session="s2"), 3.1) == [BeginSession("s2")]


def test_a_session_that_is_refused_twice_brings_one_hello() -> None:
    """Both refusals answer messages that were under way when the coordinator restarted."""
    session = _online()
    session.handle(Refuse(boot="any", code="session", retry_s=0.0), 1.0)
    assert len(_sent(session.handle(Tick(), 1.0))) == 1
    session.handle(Refuse(boot="any", code="session", retry_s=0.0), 1.1)
    assert session.handle(Tick(), 2.0) == []


def test_r4_a_new_connection_says_hello_at_the_first_pace() -> None:
    """Twenty connections that broke before a welcome do not slow the next one down."""
    session = _session()
    for now in range(20):
        session.handle(LinkUp(), float(now))
        session.handle(LinkDown(), now + 0.5)
    session.handle(LinkUp(), 100.0)
    assert 110.0 <= session.next_due() <= 120.0


def test_r4_an_offer_is_repeated_until_it_is_granted_and_again_if_the_grants_end() -> None:
    """After 3 to 6 s, then after 4.5 to 9 s; 10 to 20 s after a grant. Heartbeats come every 1,000 s here."""
    session = _session(assign=assign(), update=UPDATE, highest=(1, 1))
    session.begin()
    session.handle(LinkUp(), 0.0)
    session.handle(_welcome(heartbeat_s=1000.0), 0.0)
    now = 0.0
    for low, high in ((3.0, 6.0), (4.5, 9.0)):
        assert low <= session.next_due() - now <= high
        now = session.next_due()
        assert [m for m in _sent(session.handle(Tick(), now)) if isinstance(m, Offer)]
    session.handle(Grant(lease="lease-1", sha256=UPDATE.sha256, ranges=((0, 1),)), 40.0)
    assert 50.0 <= session.next_due() <= 60.0
    assert not _sent(session.handle(Tick(), 49.9))
    assert [m for m in _sent(session.handle(Tick(), 60.0)) if isinstance(m, Offer)]


def test_r4_a_decline_that_was_lost_is_said_again() -> None:
    """The coordinator offers the lease again, because the device holds nothing; the reason is the same."""
    session = _online()
    session.handle(assign(), 1.0)
    _fetch_all(session)
    ended = session.handle(_failed(code="over_budget", detail="3 GB", final=True), 2.0)
    (declined,) = _sent(ended)
    assert ended[1:] == [Stop("lease-1"), Forget("lease-1", False)]
    assert _sent(session.handle(assign(), 5.0)) == [declined]


def test_r4_a_declined_lease_stays_declined_in_a_later_epoch() -> None:
    """A coordinator that starts anew offers its open leases with its new epoch; the answer is the first one."""
    session = _online()
    session.handle(assign(1), 1.0)
    _fetch_all(session)
    (first,) = _sent(session.handle(_failed(code="over_budget", final=True), 2.0))
    assert _sent(session.handle(assign(1, epoch=2), 3.0)) == [first]
    assert session.state == "idle"


def test_r1_a_lease_of_the_past_is_taken_again_from_a_restored_coordinator() -> None:
    """It knows less than the device: lease 1 was done, 4 is the newest seen; the higher epoch is what counts."""
    session = _online(highest=(1, 4))
    sent = _sent(session.handle(assign(1, epoch=2), 1.0))
    assert [type(message).__name__ for message in sent] == ["Accept"]
    assert session.state == "fetching"


def test_r5_a_crashed_worker_is_started_again_three_times() -> None:
    """After 1, 2 and 4 s; the fourth crash is declined."""
    session = _online()
    session.handle(assign(), 0.0)
    assert _fetch_all(session, 0.0) == [Start(assign())]
    now = 0.0
    for pause in (1.0, 2.0, 4.0):
        assert session.handle(_failed(), now) == []
        assert Start(assign()) not in session.handle(Tick(), now + pause - 0.1)
        now += pause
        assert Start(assign()) in session.handle(Tick(), now)
    (declined,) = _sent(session.handle(_failed(), now))
    assert isinstance(declined, Decline)
    assert declined.code == "crashed"
    assert session.state == "idle"


def test_r5_a_worker_is_started_again_while_the_link_is_down() -> None:
    """Training needs no network; the due time is known even though nothing else is due."""
    session = _online()
    session.handle(assign(), 0.0)
    _fetch_all(session, 0.0)
    session.handle(LinkDown(), 0.0)
    assert session.next_due() == float("inf")
    session.handle(_failed(), 10.0)
    assert session.next_due() == 11.0
    assert session.handle(Tick(), 11.0) == [Save(assign(), None, 2), Start(assign())]
    assert session.handle(WorkerDone("lease-1", UPDATE), 12.0) == [Save(assign(), UPDATE, 2)]  # offered at the welcome


def test_r5_a_worker_that_takes_the_client_with_it_is_not_started_for_ever() -> None:
    """Saved as 1 with the assignment; each restart saves the next number before it starts, the fifth declines."""
    work = assign(parts=())
    for attempts in (1, 2, 3):
        begun = _session(assign=work, attempts=attempts, highest=(1, 1)).begin()
        assert begun == [Save(work, None, attempts + 1), Start(work)]
    session = _session(assign=work, attempts=4, highest=(1, 1))
    declined, *rest = session.begin()
    assert rest == [Stop("lease-1"), Forget("lease-1", False)]
    session.handle(LinkUp(), 0.0)
    session.handle(_welcome(), 0.0)
    (again,) = _sent(session.handle(work, 1.0))  # the first was said before anybody listened
    assert declined == Send(again)
    assert isinstance(again, Decline)
    assert again.code == "crashed"


def test_r5_a_worker_that_was_stopped_on_purpose_did_not_crash() -> None:
    """Whoever is switched off every evening may go on every morning."""
    work = assign(parts=())
    session = _session(assign=work, attempts=3, highest=(1, 1))
    session.begin()
    assert session.goodbye() == [Save(work, None, 3)]
    assert _online().goodbye() == [Send(Goodbye())]


def test_r3_an_update_that_the_disk_lost_is_trained_again() -> None:
    """From its parts on; words about another lease change nothing."""
    work = assign()
    session = _online(assign=work, update=UPDATE, attempts=1, highest=(1, 1))
    assert session.handle(UpdateLost("lease-2"), 1.0) == []
    assert session.handle(UpdateLost("lease-1"), 1.0) == [Save(work, None), *(Fetch(part) for part in work.parts)]
    assert session.state == "fetching"
    assert _fetch_all(session) == [Save(work, None, 2), Start(work)]
    assert session.handle(UpdateLost("lease-1"), 2.0) == []


def test_r5_a_cancel_ends_the_wait_for_the_next_try() -> None:
    """Nothing is started for a lease that is over."""
    session = _online()
    session.handle(assign(), 0.0)
    _fetch_all(session, 0.0)
    session.handle(_failed(), 1.0)
    assert session.handle(Cancel(lease="lease-1"), 1.5) == [Stop("lease-1"), Forget("lease-1", False)]
    assert not [i for i in session.handle(Tick(), 60.0) if isinstance(i, Start)]


def test_r6_a_worker_over_its_budget_is_followed_at_once_by_one_with_a_smaller_plan() -> None:
    """Twice below what failed, then below 3/4 of it; saved and remembered before the start; no crash is counted."""
    session = _online()
    session.handle(assign(), 0.0)
    _fetch_all(session, 0.0)
    for number, (failed, ceiling) in enumerate([(1000, 1000), (800, 800), (600, 450), (400, 300)], start=1):
        assert session.handle(_over(failed), 1.0) == [
            Remember(_ceiling(ceiling)),
            Save(assign(), None, 1, number),
            Start(assign(), ceiling, number),
        ]
    assert session.handle(WorkerDone("lease-1", UPDATE), 2.0)[0] == Save(assign(), UPDATE, 1, 4)


def test_r6_a_ceiling_never_rises() -> None:
    """A worker that planned more than it was allowed to does not lift it."""
    session = _online()
    session.handle(assign(), 0.0)
    _fetch_all(session, 0.0)
    session.handle(_over(1000), 1.0)
    assert session.handle(_over(FAR), 1.0)[-1] == Start(assign(), 1000, 2)


def test_r6_when_nothing_smaller_is_left_the_reason_tells_what_was_tried() -> None:
    """The planner finds nothing below 1,000 bytes; the next lease begins without a ceiling of its own."""
    session = _online()
    session.handle(assign(), 0.0)
    _fetch_all(session, 0.0)
    session.handle(_over(1000), 1.0)
    (declined,) = _sent(session.handle(_failed(code="nothing_fits", detail="one sample", final=True), 2.0))
    assert isinstance(declined, Decline)
    assert (declined.code, declined.detail) == (
        "nothing_fits",
        "one sample; before, 1 of its plans went over the budget, and less than 1.0 kB was to be planned",
    )
    session.handle(assign(2), 3.0)
    assert _fetch_all(session, 3.0) == [Start(assign(2))]


def test_r6_smaller_plans_are_tried_eight_times_and_crashes_are_counted_apart() -> None:
    """Eight plans and, after them, three crashes; the ninth plan that is too large is declined."""
    session = _online()
    session.handle(assign(), 0.0)
    _fetch_all(session, 0.0)
    for number in range(8):
        assert isinstance(session.handle(_over(FAR - number), 1.0)[-1], Start)
    for now in (10.0, 20.0, 30.0):
        session.handle(_failed(), now)
        assert isinstance(session.handle(Tick(), now + 9.0)[1], Start)
    (declined,) = _sent(session.handle(_over(5), 40.0))
    assert isinstance(declined, Decline)
    assert declined.code == "over_budget"
    assert session.state == "idle"


def test_r6_the_count_survives_a_restart() -> None:
    """Seven before: one more plan is tried, after the parts are here again."""
    session = _session(assign=assign(), attempts=1, replans=7, highest=(1, 1))
    failed = session.handle(_over(1000), 0.0)
    assert failed == [Remember(_ceiling(750))]
    session.begin()
    assert _fetch_all(session) == [Save(assign(), None, 1, 8), Start(assign(), 750, 8)]
    assert isinstance(_sent(session.handle(_over(500), 1.0))[0], Decline)


def test_words_about_another_lease_change_nothing() -> None:
    """A worker or a coordinator that speaks of the past."""
    session = _online()
    session.handle(assign(2), 1.0)
    for event in (_failed(), WorkerDone("lease-1", UPDATE), Cancel(lease="lease-1")):
        assert session.handle(event, 2.0) == []
    assert session.state == "fetching"


def test_an_assignment_that_does_not_fit_the_disk_is_declined_but_not_forgotten() -> None:
    """Three times 30 bytes are needed; with 89 it is declined, with 90 it is taken when it comes again."""
    session = _online()
    session.free_bytes = 89
    (message,) = _sent(session.handle(assign(), 1.0))
    assert isinstance(message, Decline)
    assert message.code == "disk_full"
    session.free_bytes = 90
    assert isinstance(session.handle(assign(), 2.0)[0], Save)


def test_an_assignment_in_hand_is_accepted_again() -> None:
    """The acceptance was lost; nothing is saved or fetched twice."""
    session = _online()
    session.handle(assign(), 1.0)
    assert session.handle(assign(), 4.0) == [Send(Accept(lease="lease-1"))]


def test_an_assignment_without_parts_starts_at_once() -> None:
    """There is nothing to wait for, now or after a restart."""
    session = _online()
    work = assign(parts=())
    assert session.handle(work, 1.0)[-1] == Start(work)
    assert _session(assign=work, highest=(1, 1)).begin() == [Start(work)]


def test_a_restart_fetches_what_is_missing_and_goes_on() -> None:
    """The lease was saved; whether the parts are here the daemon knows."""
    work = assign()
    session = _session(assign=work, highest=(1, 1))
    assert session.begin() == [Fetch(part) for part in work.parts]
    assert _fetch_all(session) == [Start(work)]


def test_a_refused_device_is_silent_until_it_may_try_again() -> None:
    """60 s; a refusal for another boot of this identity is not ours."""
    session = _online()
    other = Refuse(boot="other", code="duplicate_identity")
    session.handle(other, 1.0)
    assert session.online
    session.handle(Refuse(boot="boot", code="duplicate_identity", detail="two", retry_s=60.0), 1.0)
    assert not session.online
    assert session.refusal == "duplicate_identity: two"
    assert session.handle(Tick(), 60.9) == []
    assert len(_sent(session.handle(Tick(), 61.0))) == 1


def test_a_coordinator_that_does_not_know_the_session_gets_a_hello_at_once() -> None:
    """It has restarted; `any` is only believed for that reason."""
    session = _online()
    session.handle(Refuse(boot="any", code="duplicate_identity"), 1.0)
    assert session.online
    session.handle(Refuse(boot="any", code="session", retry_s=0.0), 1.0)
    (hello,) = _sent(session.handle(Tick(), 1.0))
    assert isinstance(hello, Hello)


def test_the_heartbeat_tells_what_the_worker_does() -> None:
    """At once when it begins to train, then every 5 s as the welcome said, with the newest progress."""
    session = _session()
    session.handle(LinkUp(), 0.0)
    session.handle(_welcome(heartbeat_s=5.0), 0.0)
    session.handle(assign(), 1.0)
    _fetch_all(session)
    session.handle(WorkerProgress("train", 1, 8, 0.7), 2.0)
    assert len(_sent(session.handle(Tick(), 2.0))) == 1
    session.handle(WorkerProgress("train", 3, 8, 0.5), 3.0)
    assert session.handle(Tick(), 6.9) == []
    (beat,) = _sent(session.handle(Tick(), 7.0))
    assert beat == Heartbeat(
        state="working", lease="lease-1", phase="train", step=3, total=8, loss=0.5, free_bytes=10**9
    )
    assert session.next_due() == 12.0


def test_a_goodbye_is_said_only_to_who_knows_us() -> None:
    """Not before the welcome."""
    assert _session().goodbye() == []
    assert len(_online().goodbye()) == 1


def test_hello_tells_what_is_in_hand() -> None:
    """So that the coordinator can cancel what nobody wants."""
    session = _session(assign=assign(), update=UPDATE, highest=(1, 1))
    (hello,) = _sent(session.handle(LinkUp(), 0.0))
    assert isinstance(hello, Hello)
    assert (hello.held, hello.finished) == ("lease-1", True)
    assert session.say_hello(3.0) != []
    session.handle(LinkDown(), 4.0)
    assert session.say_hello(5.0) == []


def test_a_refused_device_says_hello_when_the_coordinator_starts_anew() -> None:
    """It need not wait for the hour that the one before asked for."""
    session = _session()
    session.handle(LinkUp(), 0.0)
    session.handle(Refuse(boot="boot", code="upgrade_required", retry_s=3600.0), 0.5)
    assert len(_sent(session.say_hello(10.0))) == 1


@pytest.mark.parametrize(("counted", "accepted"), [("lease-1", True), (None, False)])
def test_a_newer_assignment_tells_whether_the_last_update_counted(counted: str | None, accepted: bool) -> None:
    """The receipt of lease-1 was lost: the next assignment says whether lease-1 went into a model."""
    session = _online(assign=assign(1), update=UPDATE, highest=(1, 1))
    forgotten = session.handle(assign(2, counted=counted), 5.0)
    assert [i for i in forgotten if isinstance(i, Forget)] == [Forget("lease-1", accepted)]
