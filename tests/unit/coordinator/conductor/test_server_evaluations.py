"""Judging a version on the server's test data, and writing scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conductor_bench import Bench
from rows import run_file

from coordinator.conductor.server_evaluations import ServerEvaluations, server_data_path
from coordinator.rounds.events import Judged
from coordinator.rounds.instructions import SaveScore
from coordinator.store.rows import SERVER

ON_SERVER = {"evaluate": {"on": "npz:/test.npz"}}
RESULT = {"slice": "full", "num_samples": 10, "num_correct": 7, "loss_sum": 3.5, "confusion": [4, 1, 2, 3]}


def _evaluations(bench: Bench) -> ServerEvaluations:
    return ServerEvaluations(
        store=bench.store,
        blobs=bench.blobs,
        jobs=bench.jobs,
        models=bench.models,
        retention=bench.retention,
        handle=bench.handle,
    )


@pytest.mark.parametrize(
    ("where", "simulated", "path"),
    [("npz:/a.npz", "", "/a.npz"), ("devices", "/set.npz", "/set.npz"), ("devices", "", "")],
)
def test_where_the_test_data_is(where: str, simulated: str, path: str) -> None:
    """The run's file wins over the test set of a simulation."""
    assert server_data_path(run_file(evaluate={"on": where}), simulated) == path


def test_the_results_of_all_slices_become_rows(make_bench: Callable[..., Bench]) -> None:
    """Written before the machine learns of them."""
    bench = make_bench(evaluate={"results": [RESULT, {**RESULT, "slice": "width:1/2", "num_correct": 5}]})
    bench.add_run(**ON_SERVER)
    _evaluations(bench).judge(bench.active_run(), 0)
    bench.answer_jobs()
    rows = bench.store.evaluations.all("r-1", 0)
    assert [(row.device, row.slice, row.num_correct) for row in rows] == [
        (SERVER, "full", 7),
        (SERVER, "width:1/2", 5),
    ]
    (judged,) = bench.events
    assert isinstance(judged, Judged)
    assert list(judged.evaluations) == rows
    (job,) = bench.asked_jobs()
    assert (job["job"], job["data"]) == ("evaluate", "/test.npz")


def test_test_data_without_samples_is_logged_once(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """It is the same for every version."""
    empty: dict[str, Any] = {**RESULT, "num_samples": 0, "num_correct": 0, "loss_sum": 0.0, "confusion": [0, 0, 0, 0]}
    bench = make_bench(evaluate={"results": [empty]})
    bench.add_run(**ON_SERVER)
    for _ in range(2):
        _evaluations(bench).judge(bench.active_run(), 0)
        bench.answer_jobs()
    assert caplog.text.count("no_test_data") == 1
    assert len(bench.events) == 2


def test_a_judgement_that_fails_ends_the_run(make_bench: Callable[..., Bench]) -> None:
    """The file is not there, for example."""
    bench = make_bench()
    bench.add_run(**ON_SERVER)
    _evaluations(bench).judge(bench.active_run(), 0)
    bench.answer_jobs()
    assert (bench.events, bench.failed) == ([], [("r-1", "input: no")])


def test_a_score_names_the_best_version(make_bench: Callable[..., Bench]) -> None:
    """Written to the version and to the run."""
    bench = make_bench()
    bench.add_run()
    _evaluations(bench).save_score(bench.active_run(), SaveScore(0, 0.7, 0))
    run = bench.store.runs.get("r-1")
    assert run is not None
    assert run.best_version == 0
    assert bench.store.models.scores("r-1") == {0: 0.7}
