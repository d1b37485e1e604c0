"""The active run, built from what the store knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conductor_bench import Bench
from rows import digest, evaluation_row, lease_row, part_row, round_row, run_file, update_row

from coordinator.conductor.active_run import travels_in_parts
from coordinator.rounds.events import Tick
from coordinator.store.rows import PartRow


@pytest.mark.parametrize(
    ("tables", "in_parts"),
    [({}, False), ({"slices": ["full", "width:1/2"]}, True), ({"method": {"name": "fedgkt"}}, True)],
)
def test_a_run_travels_in_parts_where_devices_get_different_ones(tables: dict[str, object], in_parts: bool) -> None:
    """Slices of several sizes, or a method whose server keeps more than the devices get."""
    assert travels_in_parts(run_file(**tables)) is in_parts


def test_an_open_round_is_loaded_with_its_leases_and_updates(make_bench: Callable[..., Bench]) -> None:
    """a's update is stored; b's lease is open, and nobody else's."""
    bench = make_bench()
    bench.add_run()
    bench.store.rounds.open(round_row(), [lease_row(1), lease_row(2, "b")])
    bench.store.updates.save(update_row(sha256=bench.put("update")), evaluation_row(), "lease-1")
    run = bench.active_run()
    assert run.id == "r-1"
    assert list(run.machine.updates) == ["a"]
    assert run.machine.phase == "RUNNING"
    assert run.open_lease("b", "lease-2") is not None
    assert run.open_lease("a", "lease-2") is None
    assert run.open_lease("a", "lease-1") is None
    assert run.slice_name("lease-1") == "full"


def test_parts_that_are_lost_are_not_loaded(make_bench: Callable[..., Bench]) -> None:
    """Of two slices, the file of one is there."""
    bench = make_bench()
    bench.add_run(slices=["full", "width:1/2"])
    whole = PartRow(run="r-1", version=0, slice="full", sha256=bench.put("slice"), length=5)
    for part in (whole, part_row(0)):
        bench.store.models.add_part(part)
    assert bench.active_run().parts == {"full": whole}
    assert bench.blobs.has(digest("slice"))


def test_numbers_of_leases_go_on_where_the_store_ends(make_bench: Callable[..., Bench]) -> None:
    """Lease 7 was the last one in the store: the lease of the next round has number 8."""
    bench = make_bench()
    bench.add_run()
    bench.store.rounds.open(round_row(), [lease_row(7)])
    bench.store.rounds.abandon("r-1", 1, 1, "why")
    run = bench.active_run()
    run.machine.handle(Tick(frozenset("a"), 1), 0.0)
    assert [lease.issue for lease in run.machine.leases.values()] == [8]
