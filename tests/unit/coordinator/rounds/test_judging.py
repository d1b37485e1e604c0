"""Which versions are judged, by whom, and what score they get."""

from __future__ import annotations

from typing import Any

import pytest
from rows import evaluation_row, run_file

from coordinator.rounds.instructions import Judge, SaveScore
from coordinator.rounds.judging import Judging
from coordinator.rounds.stopping import Scoreboard

ON_SERVER = {"on": "npz:/srv/test.npz"}


def _judging(*, dry: bool = False, **evaluate: Any) -> Judging:
    file = run_file(evaluate=evaluate)
    return Judging(file, Scoreboard(file, {}), dry=dry)


@pytest.mark.parametrize(
    ("every", "dry", "wanted"),
    [
        (1, False, [True, True, True]),
        (2, False, [True, False, True]),  # versions 0 and 2; and 1 if it is the last one
        (0, False, [False, False, False]),
        (1, True, [False, False, False]),
    ],
)
def test_which_versions_are_judged(every: int, dry: bool, wanted: list[bool]) -> None:
    """Every n-th one and the last one; none in a dry run or if the file says never."""
    judging = _judging(every=every, dry=dry)
    assert [judging.is_wanted(version, is_last=False) for version in (0, 1, 2)] == wanted
    assert judging.is_wanted(1, is_last=True) == (every > 0 and not dry)


def test_devices_judge_unless_the_server_has_test_data() -> None:
    """Never both."""
    for evaluate, by_devices in (({}, True), (ON_SERVER, False)):
        judging = _judging(**evaluate)
        assert judging.is_wanted_of_devices(0, is_last=False) is by_devices
        assert (judging.ask_server(0, is_last=False) == []) is by_devices


def test_the_server_is_asked_once_and_its_answer_is_the_score() -> None:
    """7 of 10 right; meanwhile no second job, and an answer about another version or a second one is ignored."""
    judging = _judging(**ON_SERVER)
    assert judging.ask_server(0, is_last=False) == [Judge(0)]
    assert judging.is_under_way
    assert judging.ask_server(0, is_last=False) == []
    assert judging.answered(0, [evaluation_row("@server", 1)]) is None
    assert judging.answered(0, [evaluation_row("@server", 0)]) == [SaveScore(0, 0.7, 0)]
    assert not judging.is_under_way
    assert judging.answered(0, [evaluation_row("@server", 0)]) is None
    assert judging.ask_server(0, is_last=False) == []


def test_a_version_without_test_samples_is_settled_without_a_score() -> None:
    """The server's test data is empty: nothing is saved, and nothing is asked again."""
    judging = _judging(**ON_SERVER)
    judging.ask_server(0, is_last=False)
    assert not judging.is_settled(0, is_last=False)
    empty = evaluation_row("@server", 0, num_samples=0, num_correct=0, confusion=(0, 0, 0, 0))
    assert judging.answered(0, [empty]) == []
    assert judging.is_settled(0, is_last=False)


def test_a_version_is_scored_once_and_the_best_one_is_named() -> None:
    """Version 0 has 0.7, version 1 only 0.5; a second evaluation of version 1 changes nothing."""
    judging = _judging()
    assert judging.score(0, [evaluation_row("a", 0)]) == [SaveScore(0, 0.7, 0)]
    assert judging.score(1, [evaluation_row("a", 1, num_correct=5)]) == [SaveScore(1, 0.5, 0)]
    assert judging.score(1, [evaluation_row("a", 1, num_correct=9)]) == []
    assert judging.score(2, []) == []
