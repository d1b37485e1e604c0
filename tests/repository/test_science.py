"""docs/explanation/science.md says what the measured files say, and verdicts follow from signs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import science_data, science_table
from benchmarks.science_groups import GROUPS, Relation


@pytest.mark.parametrize("name", science_table.BLOCKS)
def test_the_page_has_the_tables_and_pictures_of_the_measured_files(name: str) -> None:
    """Whoever measures anew runs `python -m benchmarks.science_table`."""
    made = science_table.BLOCKS[name]()
    page = science_table.PAGE.read_text(encoding="utf-8")
    assert f"<!-- {name} -->\n{made}\n<!-- end -->" in page, "run python -m benchmarks.science_table"


def test_every_picture_is_there() -> None:
    """A group that was measured has been drawn."""
    shown = re.findall(r"\]\(\.\./pictures/(\S+\.png)\)", science_table.PAGE.read_text(encoding="utf-8"))
    assert shown
    for name in shown:
        assert (science_table.PICTURES / name).stat().st_size > 0


def test_every_relation_is_between_runs_of_its_group() -> None:
    """So that both sides have been measured when a group has."""
    for group in GROUPS.values():
        assert {name for r in group.relations for name in (r.better, r.worse)} <= set(group.runs)


@pytest.mark.parametrize(
    ("gains", "about", "wanted"),
    [
        ([0.1, 0.2, 0.001], False, "reproduced"),
        ([-0.1, -0.2, -0.001], False, "contradicted"),
        ([0.3, 0.2, -0.001], False, "not at this scale"),
        ([0.1, 0.2], False, "open"),
        ([0.02, -0.02, 0.03], True, "reproduced"),  # 0.01 in the mean
        ([0.02, 0.02, 0.02], True, "not at this scale"),
        ([-0.02, -0.02, -0.02], True, "not at this scale"),
    ],
)
def test_a_verdict_needs_the_same_sign_in_three_seeds(gains: list[float], about: bool, wanted: str) -> None:
    """About equal: at most 0.015 in the mean, whatever the signs."""
    assert science_table.judge(gains, about=about) == wanted


def test_differences_and_rounds_are_taken_seed_by_seed() -> None:
    """Gains 0.2 and 0.1: mean 0.15, deviation 0.1/sqrt(2); 2 and 4 rounds to 0.5 and 0.6, the worse one's ends."""
    runs = {
        "new": [
            {"accuracy": 0.7, "accuracy_per_round": [None, 0.5, None, 0.7]},
            {"accuracy": 0.7, "accuracy_per_round": [None, 0.5, None, 0.7]},
        ],
        "old": [
            {"accuracy": 0.5, "accuracy_per_round": [None, 0.4, None, 0.5]},
            {"accuracy": 0.6, "accuracy_per_round": [None, 0.4, None, 0.6]},
        ],
    }
    told = science_table.verdict(Relation(better="new", worse="old", source=""), runs)
    assert told["mean"] == pytest.approx(0.15)
    assert told["spread"] == pytest.approx(0.1 / 2**0.5)
    assert told["rounds"] == [3, 4]
    never = science_table.verdict(Relation(better="old", worse="new", source=""), runs)
    assert never["rounds"] == [None, 4]


def test_whole_models_are_compared_as_they_are_in_the_end() -> None:
    """0.6 of the server's model against 0.5 of one small size; the means over sizes are the other way round."""
    runs = {
        "sliced": [{"accuracy": 0.4, "accuracy_per_architecture": {"full": 0.6, "width:1/4": 0.2}}],
        "small": [{"accuracy": 0.45, "accuracy_per_architecture": {"width:1/4": 0.5}}],
    }
    told = science_table.verdict(Relation(better="sliced", worse="small", source="", whole=True), runs)
    assert told["gains"] == [pytest.approx(0.1)]


def test_recorded_runs_are_those_of_the_same_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of two groups with one setting; a third one has fewer rounds."""
    setting = GROUPS["fedin"].setting
    monkeypatch.setattr(science_table, "RESULTS", tmp_path)
    for name, rounds, runs in [
        ("one", setting.rounds, {"FedIN": [{"seed": 1}, {"seed": 2}]}),
        ("two", setting.rounds, {"FedIN": [{"seed": 3}], "FedAvg": [{"seed": 1}]}),
        ("less", setting.rounds - 1, {"FedIN": [{"seed": 4}]}),
    ]:
        results = {"setting": setting.to_map() | {"rounds": rounds}, "runs": runs}
        (tmp_path / f"science-{name}.json").write_text(json.dumps(results), encoding="utf-8")
    found = science_table.recorded(setting)
    assert {run: sorted(seeds) for run, seeds in found.items()} == {"FedIN": [1, 2, 3], "FedAvg": [1]}


def test_planes_of_differences_become_colours() -> None:
    """One image of 2x2: G = [[1, 2], [3, 4]], R - G = 5 everywhere, B - G = -1 everywhere, as wrapping differences."""
    differences = np.zeros((3, 1, 2, 2), dtype=np.uint8)
    differences[0, 0] = [[1, 1], [2, 0]]
    differences[1, 0, 0, 0], differences[2, 0, 0, 0] = 5, 255
    red, green, blue = science_data._planes(differences)[0]
    assert green.tolist() == [[1, 2], [3, 4]]
    assert red.tolist() == [[6, 7], [8, 9]]
    assert blue.tolist() == [[0, 1], [2, 3]]
