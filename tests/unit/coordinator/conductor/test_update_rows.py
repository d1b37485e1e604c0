"""Stored updates: the bytes of small ones are in the store, and their files come back from there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conductor_bench import Bench
from rows import lease_row, round_row, update_row

from coordinator.conductor.update_rows import UpdateRows, has_update
from coordinator.fleet.small_uploads import SMALL_UPDATE_BYTES
from coordinator.fleet.traffic import TrafficMeter
from coordinator.rounds.instructions import SaveUpdate


@pytest.mark.parametrize("lost", ["missing", "damaged"])
def test_the_file_of_a_small_update_comes_back_from_its_row(make_bench: Callable[..., Bench], lost: str) -> None:
    """A power cut took the file, which was not synced; an update without a row of bytes stays lost."""
    bench = make_bench()
    bench.add_run()
    bench.store.rounds.open(round_row(), [lease_row(1, "a"), lease_row(2, "b")])
    small = update_row("a", "lease-1", sha256=bench.put("update of a"))
    large = update_row("b", "lease-2", sha256=bench.put("update of b"))
    bench.store.updates.save(small, None, "lease-1", body=b"update of a")
    bench.store.updates.save(large, None, "lease-2")
    for update in (small, large):
        bench.damage(update.sha256)
        if lost == "missing":
            bench.blobs.path(update.sha256).unlink()
    assert has_update(bench.store, bench.blobs, small)
    assert bench.blobs.path(small.sha256).read_bytes() == b"update of a"
    assert not has_update(bench.store, bench.blobs, large)


@pytest.mark.parametrize(("length", "is_row"), [(SMALL_UPDATE_BYTES, True), (SMALL_UPDATE_BYTES + 1, False)])
def test_the_bytes_of_an_update_up_to_64_kib_are_saved_with_its_row(
    make_bench: Callable[..., Bench], length: int, is_row: bool
) -> None:
    """A byte more, and the blob is all that there is; what travelled is counted in the same write."""
    bench, traffic = make_bench(), TrafficMeter()
    bench.add_run()
    run = bench.active_run(round_row(), lease_row(1, "a"))
    data = bytes(length)
    row = update_row("a", "lease-1", sha256=bench.put(data), length=length)
    traffic.count("a", up=length)
    rows = UpdateRows(store=bench.store, blobs=bench.blobs, roster=bench.roster, traffic=traffic)
    rows.save(run, SaveUpdate("lease-1", row, None))
    assert bench.store.updates.body("lease-1") == (data if is_row else None)
    assert bench.store.traffic.by_device("r-1") == {"a": (length, 0)}
    work = run.work.of("a")
    assert work is not None
    assert (work.lease, work.reported_in) == ("stored", 1)
