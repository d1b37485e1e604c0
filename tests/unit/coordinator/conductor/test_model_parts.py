"""Which parts of the newest version a lease needs, and how they are made."""

from __future__ import annotations

from collections.abc import Callable

from conductor_bench import Bench
from rows import digest, lease_row, model_row, part_row, round_row

from coordinator.conductor.active_run import ActiveRun

HALF = lease_row(1, slice="width:1/2")
SLICED = {"slices": ["full", "width:1/2"]}


def _run(bench: Bench, **tables: object) -> ActiveRun:
    bench.add_run(**tables)
    return bench.active_run(round_row(), HALF)


def test_a_run_without_slices_sends_the_version_itself(make_bench: Callable[..., Bench]) -> None:
    """Settings and model; nothing has to be made."""
    bench = make_bench()
    run, lease = _run(bench), lease_row(2)
    assert bench.parts.missing(run, lease) == []
    assert [(ref.key, ref.sha256) for ref in bench.parts.refs(run, lease)] == [
        ("run", digest("{}")),
        ("model", digest("model")),
    ]


def test_a_slice_is_made_once_and_replaces_that_of_the_version_before(make_bench: Callable[..., Bench]) -> None:
    """A part of version 0 is there when version 1 is the newest: it is dropped when the new one is there."""
    bench = make_bench(encode={"write": "slice"})
    run = _run(bench, **SLICED)
    old = part_row(0)
    bench.store.models.add_part(old)
    run.model = model_row(1, sha256=digest("model"))
    assert bench.parts.missing(run, HALF) == ["width:1/2"]
    calls: list[bool] = []
    bench.parts.make(run, "width:1/2", HALF, calls.append)
    bench.answer_jobs()
    assert calls == [True]
    assert bench.parts.missing(run, HALF) == []
    assert bench.parts.model_ref(run, HALF).sha256 == digest("slice")
    assert bench.parts.refs(run, HALF)[1].key == "slice:width:1/2"
    assert [part.version for part in bench.store.models.parts("r-1")] == [1]


def test_a_slice_of_a_version_that_is_not_the_newest_any_more_is_ignored(make_bench: Callable[..., Bench]) -> None:
    """The next version was committed while it was made: nothing is stored, not even a failure counts."""
    for answers in ({"encode": {"write": "slice"}}, {}):
        bench = make_bench(**answers)
        run = _run(bench, **SLICED)
        calls: list[bool] = []
        bench.parts.make(run, "width:1/2", HALF, calls.append)
        run.model = model_row(1)
        bench.answer_jobs()
        assert (calls, run.parts, bench.failed) == ([False], {}, [])


def test_a_slice_that_cannot_be_made_ends_the_run(make_bench: Callable[..., Bench]) -> None:
    """The aggregator refuses the job."""
    bench = make_bench()
    run = _run(bench, **SLICED)
    calls: list[bool] = []
    bench.parts.make(run, "width:1/2", HALF, calls.append)
    bench.answer_jobs()
    assert (calls, bench.failed) == ([], [("r-1", "input: no")])


def test_a_dry_run_needs_the_settings_alone(make_bench: Callable[..., Bench]) -> None:
    """Its devices only plan."""
    bench = make_bench()
    bench.add_run(dry=True, **SLICED)
    run = bench.active_run()
    assert bench.parts.missing(run, HALF) == []
    assert [ref.key for ref in bench.parts.refs(run, HALF)] == ["run"]
    assert bench.parts.model_ref(run, HALF).sha256 == digest("model")


def test_devices_that_exchange_knowledge_get_it_beside_their_slice(make_bench: Callable[..., Bench]) -> None:
    """fedgkt sends features back to each device: one file for each, made for the device's slice."""
    bench = make_bench(encode={"write": "slice"}, tell={"write": "features"})
    run = _run(bench, method={"name": "fedgkt"}, slices=None)
    lease = lease_row(2, slice=run.machine.leases["lease-1"].slice)
    names = bench.parts.missing(run, lease)
    assert names[0] == lease.slice
    assert len(names) >= 2
    for name in names:
        bench.parts.make(run, name, lease, lambda is_current: None)
    bench.answer_jobs()
    assert bench.parts.missing(run, lease) == []
    assert [ref.key for ref in bench.parts.refs(run, lease)][2:] == names[1:]
    assert [job["job"] for job in bench.asked_jobs()] == ["encode", *["tell"] * (len(names) - 1)]
