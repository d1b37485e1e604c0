"""Stop rules, the best version and the learning rate, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rows import evaluation_row, run_file

from coordinator.rounds.evaluation import summarize
from coordinator.rounds.stopping import Scoreboard, learning_rate, score_of


def _board(stop: dict[str, Any], *scores: float) -> Scoreboard:
    return Scoreboard(run_file(stop={"rounds": 100} | stop), dict(enumerate(scores)))


def test_no_rule_ends_a_run_before_its_rounds() -> None:
    """99 of 100 rounds go on, the 100th ends it."""
    board = _board({}, 0.1, 0.2)
    assert board.end(99, 1e9) == ""
    assert board.end(100, 0.0) == "100 rounds"


def test_a_target_ends_the_run_and_names_the_version() -> None:
    """0.95 is reached by version 2; equal is enough."""
    assert _board({"target": 0.95}, 0.1, 0.949).end(2, 0) == ""
    assert _board({"target": 0.95}, 0.1, 0.9, 0.95).end(3, 0) == "target reached: accuracy 0.95 at version 2"


def test_a_loss_is_better_when_it_is_lower() -> None:
    """Losses 2.0, 0.4, 0.9: version 1 is best and below the target of 0.5."""
    board = _board({"metric": "loss", "target": 0.5}, 2.0, 0.4, 0.9)
    assert board.best_version == 1
    assert board.end(3, 0) == "target reached: loss 0.4 at version 1"


def test_patience_counts_evaluations_without_a_better_value() -> None:
    """0.5, 0.7, then 0.7 (equal is not better) and 0.6: two evaluations without progress."""
    assert _board({"patience": 2}, 0.5, 0.7, 0.7).end(3, 0) == ""
    reason = _board({"patience": 2}, 0.5, 0.7, 0.7, 0.6).end(4, 0)
    assert reason == "no better accuracy in 2 evaluations; the best is 0.7 at version 1"


def test_hours_count_the_time_the_run_was_active() -> None:
    """Half an hour is 1,800 s."""
    board = _board({"hours": 0.5})
    assert board.end(7, 1799.9) == ""
    assert board.end(7, 1800.0) == "0.5 hours are over after 7 rounds"


def test_a_version_that_is_judged_again_counts_once() -> None:
    """A round that is tried again brings the same version's score again."""
    board = _board({"patience": 2}, 0.5)
    for _ in range(3):
        board.add(0, 0.5)
    assert board.end(1, 0) == ""
    assert board.is_scored(0)
    assert not board.is_scored(1)


@pytest.mark.parametrize(
    ("schedule", "round_", "expected"),
    [
        ("constant", 7, 0.8),
        ("cosine", 1, 0.8),
        ("cosine", 6, 0.4),  # half of the way: cos(pi / 2) = 0
        ("cosine", 10, 0.8 * 0.5 * (1 + math.cos(0.9 * math.pi))),
        ("exponential:0.5", 1, 0.8),
        ("exponential:0.5", 4, 0.1),  # 0.8 / 2 ** 3
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, round_: int, expected: float) -> None:
    """Ten rounds that begin at 0.8."""
    train = run_file(train={"lr": 0.8, "schedule": schedule}).train
    assert learning_rate(train, round_, 10) == pytest.approx(expected, abs=1e-15)


def test_a_score_is_the_metric_over_the_whole_fleet() -> None:
    """Matrix (4, 1, 2, 3) twice: recalls 4/5 and 3/5; F1 8/11 and 6/9; accuracy 7/10; loss 0.35."""
    result = summarize(0, [evaluation_row("a"), evaluation_row("b")], 2)
    assert result is not None
    scores = {name: score_of(result, name) for name in ("accuracy", "balanced-accuracy", "macro-f1", "loss")}
    expected = {"accuracy": 0.7, "balanced-accuracy": 0.7, "macro-f1": (8 / 11 + 6 / 9) / 2, "loss": 0.35}
    assert scores == pytest.approx(expected)
