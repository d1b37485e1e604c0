"""What a device is sent for its lease, and what it may fetch."""

from __future__ import annotations

from collections.abc import Callable

from conductor_bench import EPOCH, Bench
from rows import PLAN, digest, lease_row, model_row, round_row, update_row

from coordinator.conductor.assignments import Assignments
from coordinator.rounds.instructions import SendAssign
from coordinator.rounds.selection import seed_of
from edge_client.wire.messages import Assign

SLICED = {"slices": ["full", "width:1/2"]}


def _assignments(bench: Bench, delayed: list[str]) -> Assignments:
    return Assignments(store=bench.store, parts=bench.parts, send=bench.send, delayed=delayed.append, epoch=EPOCH)


def test_a_lease_becomes_a_message(make_bench: Callable[..., Bench]) -> None:
    """Seed, rate and parts follow from the run; the epoch is this process's, not the lease's."""
    bench = make_bench()
    bench.add_run(seed=5, train={"lr": 0.25}, stop={"rounds": 3})
    lease = lease_row(1, plan=PLAN)
    run, delayed = bench.active_run(round_row(), lease), list[str]()
    _assignments(bench, delayed).offer(run, SendAssign(lease, 40.0))
    ((device, message),) = bench.sent
    assert device == "a"
    assert isinstance(message, Assign)
    assert (message.lease, message.epoch, message.issue, message.num_rounds) == ("lease-1", EPOCH, 1, 3)
    assert (message.seed, message.learning_rate, message.deadline_s) == (seed_of(5, 1, "a"), 0.25, 40.0)
    assert (message.plan, message.counted) == (PLAN, None)
    assert [part.key for part in message.parts] == ["run", "model"]
    assert delayed == []


def test_an_assignment_names_the_last_update_that_counted(make_bench: Callable[..., Bench]) -> None:
    """The device's method may keep state from that one on."""
    bench = make_bench()
    bench.add_run()
    bench.store.rounds.open(round_row(), [lease_row(1)])
    bench.store.updates.save(update_row(), None, "lease-1")
    bench.store.rounds.freeze("r-1", 1, 1, "hash")
    bench.store.rounds.commit(1, 1, model_row(1))
    _assignments(bench, []).offer(bench.active_run(), SendAssign(lease_row(2, round=2, version=1), 40.0))
    ((_, message),) = bench.sent
    assert isinstance(message, Assign)
    assert message.counted == "lease-1"


def test_leases_that_need_the_same_slice_wait_for_one_job(make_bench: Callable[..., Bench]) -> None:
    """Both are delayed, and both are sent when it is there; one that was closed meanwhile is not."""
    bench = make_bench(encode={"write": "slice"})
    bench.add_run(**SLICED)
    leases = [lease_row(number, name, slice="width:1/2") for number, name in enumerate("ab", 1)]
    closed = lease_row(3, "a", slice="width:1/2", state="expired")
    run, delayed = bench.active_run(round_row(), *leases, closed), list[str]()
    assignments = _assignments(bench, delayed)
    for lease in (*leases, closed):
        assignments.offer(run, SendAssign(lease, 40.0))
    assert delayed == ["lease-1", "lease-2", "lease-3"]
    assert bench.sent == []
    bench.answer_jobs()
    assert len(bench.asked_jobs()) == 1
    assert [device for device, _ in bench.sent] == ["a", "b"]
    assert run.waiting == {}


def test_a_device_may_fetch_the_parts_of_its_open_lease_only(make_bench: Callable[..., Bench]) -> None:
    """a's lease is open, b's has expired; a blob that no lease names is nobody's."""
    bench = make_bench()
    bench.add_run()
    run = bench.active_run(round_row(), lease_row(1), lease_row(2, "b", state="expired"))
    assignments = _assignments(bench, [])
    assert assignments.may_pull(run, "a", digest("model")) == 5
    assert assignments.may_pull(run, "a", digest("{}")) == 2
    assert assignments.may_pull(run, "a", digest("other")) is None
    assert assignments.may_pull(run, "b", digest("model")) is None


def test_lost_parts_of_accepted_leases_are_made_again(make_bench: Callable[..., Bench]) -> None:
    """After a restart: the accepted lease lacks its slice; the offered one is offered anyway by the next tick."""
    bench = make_bench(encode={"write": "slice"})
    bench.add_run(**SLICED)
    accepted = lease_row(1, slice="width:1/2", state="accepted")
    run = bench.active_run(round_row(remaining_s=12.0), accepted, lease_row(2, "b", slice="width:1/2"))
    assignments = _assignments(bench, [])
    assert assignments.may_pull(run, "a", digest("slice")) is None
    assignments.repair(run)
    bench.answer_jobs()
    ((device, message),) = bench.sent
    assert isinstance(message, Assign)
    assert (device, message.deadline_s) == ("a", 12.0)
    assert assignments.may_pull(run, "a", digest("slice")) == 5
