"""Runs outside their rounds: prepared, begun, recovered, ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conductor_bench import Bench
from rows import digest, lease_row, part_row, round_row, run_file, run_row, update_row

from coordinator.conductor.lifecycle import Lifecycle
from coordinator.store.rows import RunRow


class Steps:
    """A lifecycle on a bench, and the runs that it begins and ends."""

    def __init__(self, bench: Bench) -> None:
        self.begun: list[RunRow] = []
        self.num_ended = 0
        self.lifecycle = Lifecycle(
            store=bench.store,
            blobs=bench.blobs,
            jobs=bench.jobs,
            models=bench.models,
            retention=bench.retention,
            begin=self.begun.append,
            ended=self._ended,
        )

    def _ended(self) -> None:
        self.num_ended += 1


PREPARED: dict[str, Any] = {"calibrate": {"rows": {}}, "init": {"write": "first"}}


def test_a_queued_run_gets_its_first_model_and_begins(make_bench: Callable[..., Bench]) -> None:
    """Costs first, then the model; settings are the file and the costs. A second tick starts no second run."""
    bench = make_bench(**PREPARED)
    steps = Steps(bench)
    bench.store.runs.add(run_row("r-1"))
    bench.store.runs.add(run_row("r-2"))
    steps.lifecycle.prepare_next()
    steps.lifecycle.prepare_next()
    bench.answer_jobs()
    assert [job["job"] for job in bench.asked_jobs()] == ["calibrate", "init"]
    (run,) = steps.begun
    assert (run.id, run.state) == ("r-1", "running")
    settings = json.loads(bench.blobs.path(run.settings_sha256).read_bytes())
    assert settings == {**run.file, "x-rows": {}}
    model = bench.store.models.last("r-1")
    assert model is not None
    assert (model.version, model.sha256) == (0, digest("first"))


@pytest.mark.parametrize(("answers", "num_jobs"), [({}, 1), ({"calibrate": {"rows": {}}}, 2)])
def test_a_first_model_that_cannot_be_made_fails_the_run(
    make_bench: Callable[..., Bench], answers: dict[str, Any], num_jobs: int
) -> None:
    """At either step; the run is never begun."""
    bench = make_bench(**answers)
    steps = Steps(bench)
    bench.store.runs.add(run_row("r-1"))
    steps.lifecycle.prepare_next()
    bench.answer_jobs()
    assert bench.failed == [("r-1", "input: no")]
    assert len(bench.asked_jobs()) == num_jobs
    assert steps.begun == []


def test_a_run_goes_on_from_a_version_of_another(make_bench: Callable[..., Bench]) -> None:
    """Its file and its run are part of the job; without that version the run fails with the reason."""
    bench = make_bench(**PREPARED)
    bench.add_run()
    bench.store.runs.set_state("r-1", "finished", "1 rounds")
    steps, model = Steps(bench), {"name": "mlp", "input": [1, 2, 2], "init": "run:r-1"}
    bench.store.runs.add(run_row("r-2", run_file(model=model)))
    steps.lifecycle.prepare_next()
    bench.answer_jobs()
    job = bench.asked_jobs()[-1]
    assert job["start"] == str(bench.blobs.path(digest("model")))
    assert job["start_run"]["name"] == "r"
    bench.blobs.remove(digest("model"))
    bench.store.runs.add(run_row("r-3", run_file(model=model)))
    steps.lifecycle.prepare_next()
    run = bench.store.runs.get("r-3")
    assert run is not None
    assert run.state == "failed"
    assert run.reason.startswith("input: init: version 0 of run 'r-1'")
    assert steps.num_ended == 1


def test_a_run_is_cancelled_before_it_begins(make_bench: Callable[..., Bench]) -> None:
    """From the queue; while its first model is made, that work is ended, too, and the next run can be prepared."""
    bench = make_bench(**PREPARED)
    steps = Steps(bench)
    for name in ("r-1", "r-2", "r-3"):
        bench.store.runs.add(run_row(name))
    steps.lifecycle.prepare_next()
    steps.lifecycle.cancel("r-2")
    assert steps.num_ended == 0
    steps.lifecycle.cancel("r-1")
    assert steps.num_ended == 1
    assert [run.state for run in bench.store.runs.all()] == ["stopped", "stopped", "queued"]
    bench.jobs.forget()
    steps.lifecycle.prepare_next()
    bench.answer_jobs()
    assert [run.id for run in steps.begun] == ["r-3"]


def _with_update(bench: Bench) -> None:
    """A run in round 1, in which a's update is stored."""
    bench.add_run()
    bench.store.rounds.open(round_row(), [lease_row(1)])
    bench.store.updates.save(update_row(sha256=bench.put("update")), None, "lease-1")


def test_a_whole_run_is_recovered(make_bench: Callable[..., Bench]) -> None:
    """Its blobs stay, a stray one goes."""
    bench = make_bench()
    _with_update(bench)
    bench.put("stray")
    run = Steps(bench).lifecycle.recover()
    assert run is not None
    assert run.id == "r-1"
    assert set(bench.blobs.names()) == {digest("model"), digest("{}"), digest("update")}


def test_a_lost_update_is_asked_for_again(make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    """Its row goes, and its lease is offered again."""
    bench = make_bench()
    _with_update(bench)
    bench.blobs.remove(digest("update"))
    assert Steps(bench).lifecycle.recover() is not None
    assert bench.store.updates.of_attempt("r-1", 1, 1) == []
    assert [lease.state for lease in bench.store.leases.of_attempt("r-1", 1, 1)] == ["offered"]
    assert "the update of a is missing or damaged on disk: asking for it again" in caplog.text


@pytest.mark.parametrize("lost", ["model", "{}"])
def test_a_lost_model_or_settings_file_ends_the_run(make_bench: Callable[..., Bench], lost: str) -> None:
    """Failed with what to do; its round is abandoned and its update dropped."""
    bench = make_bench()
    _with_update(bench)
    bench.damage(digest(lost))
    steps = Steps(bench)
    assert steps.lifecycle.recover() is None
    run = bench.store.runs.get("r-1")
    assert run is not None
    assert run.state == "failed"
    assert run.reason.endswith("of version 0 is missing or damaged; restore a backup of the state directory")
    assert [row.state for row in bench.store.rounds.all("r-1")] == ["ABANDONED"]
    assert not bench.blobs.has(digest("update"))
    assert steps.num_ended == 1


def test_a_lost_slice_does_not_end_the_run(make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    """It is made again from the model."""
    bench = make_bench()
    _with_update(bench)
    bench.store.models.add_part(part_row(0))
    assert Steps(bench).lifecycle.recover() is not None
    assert "width:1/2 of version 0 is missing or damaged on disk: making it again" in caplog.text


def test_a_finished_run_has_its_state_and_reason(make_bench: Callable[..., Bench]) -> None:
    """As its machine said."""
    bench = make_bench()
    bench.add_run()
    steps = Steps(bench)
    steps.lifecycle.finish("r-1", "finished", "3 rounds")
    run = bench.store.runs.get("r-1")
    assert run is not None
    assert (run.state, run.reason, steps.num_ended) == ("finished", "3 rounds", 1)
