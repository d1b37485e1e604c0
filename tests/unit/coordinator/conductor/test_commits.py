"""How a frozen set becomes a version: folded, committed, announced."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from conductor_bench import Bench
from rows import digest, lease_row, model_row, part_row, round_row, update_row

from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.commits import ANNOUNCEMENT, Commits
from coordinator.conductor.comparisons import Comparisons
from coordinator.rounds.events import Folded
from coordinator.rounds.frozen_set import fold_of
from coordinator.rounds.instructions import Announce, Commit, Fold
from coordinator.store.rows import LeftOutRow


def _commits(bench: Bench, announced: list[str] | None = None) -> Commits:
    return Commits(
        store=bench.store,
        blobs=bench.blobs,
        jobs=bench.jobs,
        models=bench.models,
        comparisons=Comparisons(store=bench.store, blobs=bench.blobs, jobs=bench.jobs, models=bench.models),
        retention=bench.retention,
        announce=[].append if announced is None else announced.append,
        save_traffic=lambda: bench.store.traffic.add("r-1", {"a": (1, 2)}),
        handle=bench.handle,
    )


def _frozen(bench: Bench, **tables: Any) -> tuple[ActiveRun, Fold]:
    """Round 1 with the updates of a (10 samples) and b (10,000)."""
    bench.add_run(**tables)
    bench.store.rounds.open(round_row(num_available=3), [lease_row(1), lease_row(2, "b")])
    for number, (name, samples) in enumerate((("a", 10), ("b", 10_000)), 1):
        row = update_row(name, f"lease-{number}", sha256=bench.put(f"update of {name}"), num_samples=samples)
        bench.store.updates.save(row, None, row.lease)
    bench.store.rounds.freeze("r-1", 1, 1, "hash")
    run = bench.active_run()
    assert run.machine.round is not None
    return run, fold_of(run.machine.round, run.machine.updates.values())


def test_a_fold_asks_for_the_next_version_and_reports_it(make_bench: Callable[..., Bench]) -> None:
    """b's claim counts for ten medians: 100 samples; three devices could have taken part."""
    bench = make_bench(fold={"write": "next"})
    run, fold = _frozen(bench)
    _commits(bench).fold(run, fold)
    bench.answer_jobs()
    (job,) = bench.asked_jobs()
    assert [(u["device"], u["num_samples"], u["slice"]) for u in job["updates"]] == [
        ("a", 10, "full"),
        ("b", 100, "full"),
    ]
    assert job["num_devices"] == 3
    (folded,) = bench.events
    assert isinstance(folded, Folded)
    assert (folded.model.version, folded.model.sha256, folded.model.set_hash) == (1, digest("next"), fold.set_hash)
    assert bench.blobs.has(digest("next"))


def test_a_fold_that_fails_ends_the_run(make_bench: Callable[..., Bench]) -> None:
    """No version, no event."""
    bench = make_bench()
    run, fold = _frozen(bench)
    _commits(bench).fold(run, fold)
    bench.answer_jobs()
    assert (bench.events, bench.failed) == ([], [("r-1", "input: no")])


def test_knowledge_that_could_not_be_used_is_stored_with_the_version(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged when it is new, and not again in the next round."""
    left = {"device": "a", "code": "silent", "detail": "why"}
    bench = make_bench(fold={"write": "next", "left_out": [left]})
    run, fold = _frozen(bench)
    commits = _commits(bench)
    commits.fold(run, fold)
    bench.answer_jobs()
    assert run.left_out == [LeftOutRow(run="r-1", round=1, **left)]
    commits.commit(run, Commit(fold.round, model_row(1)))
    assert bench.store.rounds.left_out("r-1") == run.left_out
    assert caplog.text.count("a: silent: why") == 1
    run.left_out = [replace(run.left_out[0], round=2)]
    commits.commit(run, Commit(round_row(2), model_row(2)))
    assert caplog.text.count("a: silent: why") == 1


def test_a_committed_version_is_the_one_that_travels(make_bench: Callable[..., Bench]) -> None:
    """Parts of the version before are forgotten; the row is written."""
    bench = make_bench()
    run, fold = _frozen(bench)
    run.parts = {"width:1/2": part_row(0)}
    _commits(bench).commit(run, Commit(fold.round, model_row(1)))
    assert (run.model, run.parts) == (model_row(1), {})
    assert bench.store.models.last("r-1") == model_row(1)
    assert [row.state for row in bench.store.rounds.all("r-1")] == ["COMMITTED"]


def test_an_announcement_deletes_the_updates_and_writes_that_the_round_is_over(
    make_bench: Callable[..., Bench],
) -> None:
    """All devices are told the version; what travelled is written before the round is."""
    bench, announced = make_bench(), list[str]()
    run, fold = _frozen(bench)
    commits = _commits(bench, announced)
    commits.commit(run, Commit(fold.round, model_row(1)))
    commits.announce(run, Announce(fold.round, 1))
    (news,) = announced
    assert json.loads(news) == {"run": "r-1", "round": 1, "version": 1, "sha256": model_row(1).sha256}
    assert bench.store.settings.get(ANNOUNCEMENT) == news
    assert not bench.blobs.has(digest("update of a"))
    (row,) = bench.store.rounds.all("r-1")
    assert (row.state, row.bytes_up, row.bytes_down) == ("ANNOUNCED", 1, 2)


def test_a_dry_run_announces_nothing_to_devices(make_bench: Callable[..., Bench]) -> None:
    """Its round is written as over all the same."""
    bench, announced = make_bench(), list[str]()
    bench.add_run(dry=True)
    run = bench.active_run(round_row(goal=0, quorum=0), lease_row(1, train=False))
    assert run.machine.round is not None
    _commits(bench, announced).announce(run, Announce(run.machine.round, 0))
    assert announced == []
    assert [row.state for row in bench.store.rounds.all("r-1")] == ["ANNOUNCED"]


def test_a_study_is_asked_for_where_the_method_has_one(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """Not for fedavg. The time that a study took is logged with the fold that waited for it."""
    study = {"began_s": 5.0, "ended_s": 7.5, "waited_s": 0.5}
    bench = make_bench(fold={"write": "next", "study": study})
    run, fold = _frozen(bench)
    commits = _commits(bench)
    commits.study(run)
    with caplog.at_level(logging.INFO):
        commits.fold(run, fold)
        bench.answer_jobs()
    assert [job["job"] for job in bench.asked_jobs()] == ["fold"]
    assert "run r-1 round 1: a study beside it took 2.500 s from 5.000 on, its fold waited 0.500 s" in caplog.text
