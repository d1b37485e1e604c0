"""Which blobs stay on the coordinator's disk: the last ten models, the best one, settings; updates go at commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conductor_bench import Bench
from rows import digest, lease_row, model_row, part_row, round_row, run_file, run_row, update_row

from coordinator.conductor.server_evaluations import ServerEvaluations
from coordinator.rounds.instructions import SaveScore
from coordinator.state import RETAINED_MODELS
from coordinator.store.rows import ModelRow
from edge_client.wire.messages import Offer


def _model(bench: Bench, version: int) -> ModelRow:
    """Each version has a form that travels and one that stays."""
    return model_row(version, sha256=bench.put(f"model {version}"), sent_sha256=bench.put(f"sent {version}"))


def _start(bench: Bench) -> None:
    bench.store.runs.add(run_row("r-1", run_file()))
    bench.store.runs.start(_model(bench, 0), bench.put("{}"), 2)


def _run_round(bench: Bench, number: int) -> None:
    """One update comes, is folded into the next version, and everybody is told."""
    round_, lease = round_row(number), lease_row(number, round=number)
    update = update_row(lease=lease.id, round=number, sha256=bench.put(f"update {number}"))
    bench.store.rounds.open(round_, [lease])
    bench.store.updates.save(update, None, lease.id)
    bench.retention.drop(update.sha256)
    assert bench.blobs.has(update.sha256)
    bench.store.rounds.freeze("r-1", number, 1, "hash")
    bench.store.rounds.commit(number, 1, _model(bench, number))
    bench.retention.round_announced(round_, number)
    bench.store.rounds.announce("r-1", number, 1)


def _judge(bench: Bench, version: int, best: int) -> None:
    evaluations = ServerEvaluations(
        store=bench.store,
        blobs=bench.blobs,
        jobs=bench.jobs,
        models=bench.models,
        retention=bench.retention,
        handle=bench.handle,
    )
    evaluations.save_score(bench.active_run(), SaveScore(version, 0.5, best))


def _versions(bench: Bench) -> list[int]:
    """Those whose two blobs are here; never only one of them. Beside them only the settings are."""
    rows = bench.store.models.all("r-1")
    present = [row for row in rows if bench.blobs.has(row.sha256)]
    assert present == [row for row in rows if bench.blobs.has(row.sent_sha256)]
    named = {name for row in present for name in (row.sha256, row.sent_sha256)} | {digest("{}")}
    assert set(bench.blobs.names()) == named
    assert bench.store.blob_references.needed(RETAINED_MODELS) == named
    assert all(bench.store.blob_references.is_needed(name, RETAINED_MODELS) for name in named)
    return [row.version for row in present]


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A run of fifteen rounds whose version 3 was the best."""
    made = make_bench()
    _start(made)
    for number in range(1, 16):
        _run_round(made, number)
        if number == 3:
            _judge(made, 3, best=3)
    return made


def test_the_best_version_survives_fifteen_rounds_and_an_older_one_goes(bench: Bench) -> None:
    """Ten newest of 15 are 6 to 15; version 3 is the best; 0 to 2, 4, 5 and all updates are gone."""
    assert _versions(bench) == [3, *range(6, 16)]


def test_a_best_version_that_is_beaten_goes_at_once(bench: Bench) -> None:
    """Version 3 was kept for being the best only; a former best among the newest ten stays."""
    _judge(bench, 12, best=12)
    assert _versions(bench) == list(range(6, 16))
    _judge(bench, 15, best=15)
    assert _versions(bench) == list(range(6, 16))


def test_a_restart_keeps_the_same(bench: Bench) -> None:
    """What the clean-up at a start leaves is what was there; a stray blob goes."""
    bench.put("stray")
    bench.retention.clean_up(bench.store.runs.get("r-1"))
    assert _versions(bench) == [3, *range(6, 16)]


def test_a_clean_up_keeps_what_has_come_of_the_open_rounds_uploads(make_bench: Callable[..., Bench]) -> None:
    """An unfinished upload is named after its lease: lease-1 is of the open round, lease-9 of nobody."""
    bench = make_bench()
    bench.add_run()
    bench.store.rounds.open(round_row(), [lease_row(1)])
    for name in ("lease-1", "lease-9"):
        bench.blobs.temporary_path(f"{name}.part").write_bytes(b"half")
    bench.retention.clean_up(bench.store.runs.get("r-1"))
    assert [bench.blobs.temporary_path(f"{name}.part").exists() for name in ("lease-1", "lease-9")] == [True, False]


def test_an_update_stays_while_it_is_checked_or_expected(make_bench: Callable[..., Bench]) -> None:
    """a's is being checked, b sends the same bytes: dropped only when both are over."""
    bench = make_bench()
    sha256 = bench.put("update")
    bench.retention.hold("lease-1", sha256)
    offer = Offer(lease="lease-2", run="r-1", round=1, sha256=sha256, length=6, num_samples=5)
    bench.uploads.expect("b", offer)
    bench.retention.drop(sha256)
    assert bench.blobs.has(sha256)
    bench.retention.release("lease-1")
    bench.retention.drop(sha256)
    assert bench.blobs.has(sha256)
    bench.uploads.drop("b")
    bench.retention.drop(sha256)
    assert not bench.blobs.has(sha256)


def test_updates_that_nobody_checks_any_more_are_dropped(make_bench: Callable[..., Bench]) -> None:
    """The run is over: two leases sent the same bytes, which go all the same."""
    bench = make_bench()
    sha256 = bench.put("update")
    for lease in ("lease-1", "lease-2"):
        bench.retention.hold(lease, sha256)
    bench.retention.drop_held()
    assert not bench.blobs.has(sha256)
    assert not bench.retention.is_held("lease-1")


def test_a_forgotten_run_takes_its_blobs_with_it(make_bench: Callable[..., Bench]) -> None:
    """A dry run that ended: its rows, model and settings go."""
    bench = make_bench()
    bench.add_run(dry=True)
    bench.store.runs.set_state("r-1", "finished", "dry run")
    run = bench.store.runs.get("r-1")
    assert run is not None
    bench.retention.forget_run(run)
    assert bench.store.runs.get("r-1") is None
    assert list(bench.blobs.names()) == []


def test_the_parts_of_an_ended_run_are_dropped(make_bench: Callable[..., Bench]) -> None:
    """Its model stays."""
    bench = make_bench()
    bench.add_run()
    fields: dict[str, Any] = {"sha256": bench.put("slice"), "length": 5}
    part = part_row(0)
    bench.store.models.add_part(type(part)(run="r-1", version=0, slice=part.slice, **fields))
    bench.store.runs.set_state("r-1", "finished", "1 rounds")
    bench.retention.drop_parts("r-1")
    assert not bench.blobs.has(digest("slice"))
    assert bench.blobs.has(digest("model"))
