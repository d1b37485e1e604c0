"""What the page reads from the store is what `coordinator run show` says."""

from __future__ import annotations

from pathlib import Path

import pytest
from rows import digest, evaluation_row, lease_row, model_row, report, round_row, run_file, run_row, update_row

from coordinator.dashboard.history import History
from coordinator.rounds import evaluation
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import MachineError
from edge_client.records import TrainingPlan


def _report(peak: int, budget: int) -> object:
    plan = TrainingPlan(microbatch=8, budget_bytes=budget, predicted_bytes=budget - 1)
    return report(plan=plan, peak_bytes=peak)


def _filled(path: Path) -> SqliteStore:
    store = SqliteStore(path)
    store.runs.add(run_row("r-1", run_file(stop={"rounds": 5})))
    store.runs.start(model_row(0), digest("settings"), 8)
    for number in (1, 2):
        leases = [lease_row(2 * number + place, name, round=number) for place, name in enumerate("ab")]
        store.rounds.open(round_row(number), leases)
        for place, name in enumerate("ab"):
            update = update_row(name, leases[place].id, round=number, report=_report(60 + 10 * number, 100 * number))
            judged = evaluation_row(
                name,
                version=number,
                num_samples=10,
                num_correct=5 + place + number,
                confusion=(3, 2, 3 - place, 2 + place),
            )
            store.updates.save(update, judged, leases[place].id)
        store.rounds.commit(number, 1, model_row(number))
        store.rounds.announce("r-1", number, 1, {"announce": 2.5})
    return store


def test_results_are_those_of_the_summary_of_a_run(tmp_path: Path) -> None:
    """Accuracy, loss, macro-F1 and recall of each version, added up inside of SQLite, against `rounds.evaluation`."""
    store = _filled(tmp_path / "state.db")
    history = History(tmp_path / "state.db")
    run = history.run("r-1")
    assert run is not None
    points = history.curve(run)
    assert [point.version for point in points] == [1, 2]
    for point in points:
        expected = evaluation.summarize(point.version, store.evaluations.all("r-1", point.version), 2)
        assert expected is not None
        assert (point.accuracy, point.loss) == (expected.accuracy, expected.loss)
        assert point.macro_f1 == pytest.approx(expected.macro_f1)
        assert run.judged[point.version].recall == expected.recall
    # 6 and 7 of 10 in round 1: a tenth of the way between them is 0.61
    assert points[0].p10 == pytest.approx(0.61)
    assert points[0].seconds == 2.5
    history.close()
    store.close()


def test_memory_is_that_of_the_round_nearest_to_the_budget(tmp_path: Path) -> None:
    """70 of 100 in round 1 is nearer than 80 of 200 in round 2."""
    _filled(tmp_path / "state.db").close()
    history = History(tmp_path / "state.db")
    run = history.run("r-1")
    assert run is not None
    figures = run.figures["a"]
    assert (figures.peak_bytes, figures.budget_bytes, figures.predicted_bytes, figures.round) == (70, 100, 99, 2)
    history.close()


def test_what_comes_later_is_seen_and_nothing_can_be_written(tmp_path: Path) -> None:
    """The second question knows the evaluation that came between; the connection refuses to write."""
    store = _filled(tmp_path / "state.db")
    history = History(tmp_path / "state.db")
    first = history.run("r-1")
    assert first is not None
    before = first.judged[2].accuracy
    store.evaluations.save(evaluation_row("c", version=2, num_samples=10, num_correct=0, confusion=(0, 5, 5, 0)))
    second = history.run("r-1")
    assert second is not None
    assert second.judged[2].accuracy == pytest.approx(before * 20 / 30)
    with pytest.raises(MachineError, match="readonly"):
        history.store.page_access.end_session("x")
    assert history.run("none") is None
    history.close()
    store.close()


def test_runs_are_listed_newest_first_in_pages(tmp_path: Path) -> None:
    """Three runs in pages of two; dry ones are left out."""
    store = SqliteStore(tmp_path / "state.db")
    for number in (1, 2, 3):
        store.runs.add(run_row(f"r-{number}"))
    store.runs.add(run_row("r-dry-1", dry=True))
    history = History(tmp_path / "state.db")
    first, after = history.runs(None, 2)
    second, end = history.runs(after, 2)
    assert [row.run for row in (*first, *second)] == ["r-3", "r-2", "r-1"]
    assert end is None
    history.close()
    store.close()
