"""Folders of simulations as others read them: which are found, what they tell, and what is wrong with broken ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from folders import line, write_run

from coordinator.results.run_folders import find_runs, holds_runs, read_run
from coordinator.results.run_record import DeviceRecord, FailureRecord, LeftOutRecord
from edge_client.errors import InputError, NoSuchNameError


def test_runs_are_found_in_folders_of_folders_each_once(tmp_path: Path) -> None:
    """Two levels below, in the order in which people count; what is named twice, or by a link, is one run."""
    for name in ("grid/a-seed-10", "grid/a-seed-2", "other/b"):
        write_run(tmp_path / name, [line(1, 0.5)])
    (tmp_path / "link").symlink_to(tmp_path / "other/b")
    found = find_runs([tmp_path / "grid", tmp_path / "link", tmp_path])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["grid/a-seed-2", "grid/a-seed-10", "link"]


def test_a_run_that_has_only_begun_is_found_and_another_run_file_is_not(tmp_path: Path) -> None:
    """A simulation leaves its state beside run.toml; what `coordinator new` made has none."""
    write_run(tmp_path / "begun", [], finished=False, rounds="3")
    (tmp_path / "begun/rounds.jsonl").unlink()
    (tmp_path / "begun/state").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new/run.toml").write_text("name = 'x'")
    assert find_runs([tmp_path]) == [tmp_path / "begun"]
    run = read_run(tmp_path / "begun")
    assert (run.state, run.num_rounds, run.rounds, run.best) == ("unfinished", 0, [], None)
    assert [device.num_rounds for device in run.devices] == [0, 0]


def test_a_folder_without_runs_says_what_was_looked_for(tmp_path: Path) -> None:
    """Also one that is not there, and one that is deeper than anybody looks."""
    write_run(tmp_path / "1/2/3/4/5", [line(1, 0.5)])
    assert not holds_runs(tmp_path)
    assert holds_runs(tmp_path / "1")
    with pytest.raises(NoSuchNameError, match=r"no simulation in .* looked for folders with run.toml and rounds.jsonl"):
        find_runs([tmp_path])
    assert not holds_runs(tmp_path / "nowhere")
    with pytest.raises(NoSuchNameError, match="nowhere is no folder; expected a simulation"):
        find_runs([tmp_path / "nowhere"])


def test_a_run_is_read_with_its_rounds_and_devices(tmp_path: Path) -> None:
    """Best is round 1 (0.75); peaks are above the base: 4 and 12 MB, in round 2 one of 11 MB, which is too much."""
    over = {"device": "d0001", "plan": "full", "predicted_training": 9_000_000, "samples": 8}
    over |= {"peak": 111_000_000, "base": 100_000_000}
    failed = {"device": "d0002", "code": "nothing_fits", "detail": "why"}
    own = {"d0001": 0.25, "d0002": 0.75}
    second = line(2, 0.5, devices=[over], failures=[failed], accuracy_per_device=own, macro_f1=0.125)
    run = read_run(write_run(tmp_path / "r", [line(1, 0.75), second]))
    assert (run.name, run.state, run.reason, run.num_rounds, run.best) == ("r", "finished", "2 rounds", 2, 1)
    assert [(found.number, found.accuracy, found.bytes_down) for found in run.rounds] == [
        (0, 0.25, None),
        (1, 0.75, 20),
        (2, 0.5, 20),
    ]
    assert (run.rounds[2].per_device, run.rounds[2].macro_f1) == (own, 0.125)
    assert run.failures == [FailureRecord(device="d0002", round=2, code="nothing_fits", detail="why")]
    known = {"name": "d0001", "budget_bytes": 10_000_000, "plan": "full", "predicted_bytes": 9_000_000}
    known |= {"peak_bytes": 11_000_000, "num_samples": 8, "bytes_up": 4, "bytes_down": 8}
    less = {"name": "d0002", "budget_bytes": 20_000_000, "plan": "full", "peak_bytes": 12_000_000, "num_samples": 9}
    assert run.devices == [
        DeviceRecord(**known, inside_budget=False, replans=0, num_rounds=2),
        DeviceRecord(**less, inside_budget=True, replans=0, num_rounds=1),
    ]


def test_what_a_run_could_not_use_is_read(tmp_path: Path) -> None:
    """Of all devices and of one; a result of a version that did not tell has nothing."""
    folder = write_run(tmp_path / "r", [line(1, 0.5)])
    assert read_run(folder).left_out == []
    result = json.loads((folder / "result.json").read_text())
    found = [{"device": None, "round": 1, "code": "no_class", "detail": "why"}, {"device": "d0001", "round": 1}]
    (folder / "result.json").write_text(json.dumps(result | {"left_out": found[:1]}))
    assert read_run(folder).left_out == [LeftOutRecord(round=1, code="no_class", detail="why")]
    (folder / "result.json").write_text(json.dumps(result | {"left_out": found}))
    with pytest.raises(InputError, match=r"result\.json.*code"):
        read_run(folder)


def test_a_device_on_which_nothing_fits_says_so(tmp_path: Path) -> None:
    """It failed in every round; the other one trained in one of them."""
    failures = [{"device": name, "code": "nothing_fits"} for name in ("d0001", "d0002")]
    trained = [{"device": "d0002", "plan": "full", "peak": 5}]
    lines = [line(1, 0.5, devices=trained), line(2, 0.5, devices=[], failures=failures)]
    run = read_run(write_run(tmp_path / "r", lines))
    assert [(device.plan, device.failure) for device in run.devices] == [("", "nothing_fits"), ("full", "")]


def test_a_run_that_goes_on_is_read_as_far_as_it_is(tmp_path: Path) -> None:
    """The third line is being written; a loss that is no number counts as not known."""
    folder = write_run(tmp_path / "r", [line(1, 0.5, loss=float("nan")), line(2, None)], finished=False)
    with open(folder / "rounds.jsonl", "a") as file:
        file.write('{"round": 3, "accu')
    run = read_run(folder)
    assert (run.state, run.num_rounds, len(run.judged)) == ("unfinished", 2, 1)
    assert run.rounds[0].loss is None
    assert (folder / "rounds.jsonl").read_text().endswith("accu")


BROKEN: dict[str, tuple[str, str, str]] = {
    "no JSON": ("rounds.jsonl", "{\n", r"rounds.jsonl, line 1: expected JSON"),
    "bytes": ("rounds.jsonl", "\0\n", r"rounds.jsonl, line 1: expected JSON"),
    "a list": ("rounds.jsonl", "[]\n", r"rounds.jsonl, line 1: expected a map, got list"),
    "no bytes": ("rounds.jsonl", '{"round": 1}\n', r"rounds.jsonl, line 1: missing bytes_up, bytes_down"),
    "percent": (
        "rounds.jsonl",
        '{"round": 1, "bytes_up": 1, "bytes_down": 1, "accuracy": 71}\n',
        r"rounds.jsonl, line 1.accuracy: expected 0 to 1, got 71",
    ),
    "a lost round": ("rounds.jsonl", '{"round": 2, "bytes_up": 1, "bytes_down": 1}\n', "expected round 1, got 2"),
    "fewer rounds": ("rounds.jsonl", "", r"result.json tells of 1 rounds, .*rounds.jsonl has 0"),
    "no result": ("result.json", "", r"result.json: expected JSON"),
    "half a result": ("result.json", "{}", r"result.json: missing rounds"),
    "no TOML": ("run.toml", "name = ", r"run.toml is not valid TOML"),
    "no run": ("run.toml", "name = 'x'", r"run.toml: classes is missing"),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_file_is_named(tmp_path: Path, what: str) -> None:
    """With the line, and what was expected."""
    name, content, told = BROKEN[what]
    folder = write_run(tmp_path / "r", [line(1, 0.5)])
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=told):
        read_run(folder)


def test_a_lost_run_file_is_named(tmp_path: Path) -> None:
    """The rounds alone do not tell what was trained."""
    folder = write_run(tmp_path / "r", [line(1, 0.5)])
    (folder / "run.toml").unlink()
    assert find_runs([tmp_path]) == [folder]
    with pytest.raises(InputError, match=r"cannot read .*run.toml"):
        read_run(folder)


def test_keys_of_a_newer_version_are_left_alone(tmp_path: Path) -> None:
    """In a line, in a device and in the result."""
    more: dict[str, Any] = {"tomorrow": [1]}
    trained = {"device": "d0001", "peak": 5, "tomorrow": 1}
    run = read_run(write_run(tmp_path / "r", [line(1, 0.5, devices=[trained]) | more]))
    assert run.devices[0].peak_bytes == 5
