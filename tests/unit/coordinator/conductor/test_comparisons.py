"""Comparing the devices' models of a round: when, on which data, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conductor_bench import Bench
from rows import lease_row, model_row, round_row, update_row

from coordinator.conductor.comparisons import Comparisons
from coordinator.results import similarity_record
from coordinator.results.similarity_record import Similarity
from coordinator.rounds.instructions import Fold

ON_SERVER = {"evaluate": {"on": "npz:/good.npz"}}
FINDINGS = {"comparison": {"round": 1, "num_samples": 3, "devices": [{"device": "a", "slice": "full"}]}}


def _compare(bench: Bench, number: int = 1, **options: Any) -> list[str]:
    """Compare round `number` of one update; returns what came after it."""
    run = bench.active_run(round_row(number), lease_row(1, round=number))
    fold = Fold(round_row(number), (update_row(),), "hash")
    comparisons = Comparisons(store=bench.store, blobs=bench.blobs, jobs=bench.jobs, models=bench.models, **options)
    calls: list[str] = []
    comparisons.compare(run, fold, model_row(1), then=lambda: calls.append("next"))
    bench.answer_jobs()
    return calls


def _record(bench: Bench) -> Similarity:
    return similarity_record.parse(bench.store.settings.get(similarity_record.setting_of("r-1")))


def test_the_answer_is_kept_and_the_round_goes_on(make_bench: Callable[..., Bench]) -> None:
    """Round 1 is always compared if there is test data."""
    bench = make_bench(probe=FINDINGS)
    bench.add_run(**ON_SERVER)
    assert _compare(bench) == ["next"]
    last = _record(bench).last
    assert last is not None
    assert last.num_samples == 3
    (job,) = bench.asked_jobs()
    assert (job["data"], [(u["device"], u["method_state"]) for u in job["updates"]]) == ("/good.npz", [("a", None)])


def test_a_comparison_that_failed_is_recorded_and_the_round_goes_on(
    make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
) -> None:
    """The run does not end; its report says why there is no comparison."""
    bench = make_bench()
    bench.add_run(**ON_SERVER)
    assert _compare(bench) == ["next"]
    assert _record(bench).problem == "round 1: no"
    assert bench.failed == []
    assert "the devices' models could not be compared: input: no" in caplog.text


@pytest.mark.parametrize(
    ("tables", "number"),
    [({}, 1), ({"evaluate": {"on": "npz:/good.npz", "similarity": 0}}, 1), (ON_SERVER, 2)],
)
def test_a_round_that_is_not_due_goes_on_at_once(
    make_bench: Callable[..., Bench], tables: dict[str, Any], number: int
) -> None:
    """Without test data, switched off, or in a round between two that are compared."""
    bench = make_bench()
    bench.add_run(stop={"rounds": 9}, **tables)
    assert _compare(bench, number) == ["next"]
    assert bench.asked_jobs() == []


def test_a_simulation_reads_the_tensors_that_its_devices_never_send(
    make_bench: Callable[..., Bench], tmp_path: Path
) -> None:
    """fedper has no global model: each virtual device's folder holds the rest of it."""
    bench = make_bench(probe=FINDINGS)
    bench.add_run(method={"name": "fedper"})
    assert _compare(bench, simulated=True, simulated_data="/set.npz", device_folders=tmp_path / "devices") == ["next"]
    (job,) = bench.asked_jobs()
    assert job["data"] == "/set.npz"
    assert [u["method_state"] for u in job["updates"]] == [str(tmp_path / "devices" / "a" / "method-state" / "r-1")]
