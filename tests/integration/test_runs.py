"""Runs on one small fleet of real processes: dry, by labels, queued, stopped, continued, judged here and there."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_requests
from fleet import Fleet, hashes, mlp_run
from page import Page
from typed import typed

from coordinator.cli import runs as cli_runs
from edge_client.config.device_file import DataSection, load_device_file
from edge_client.config.run_file import RunFile
from edge_client.data.sources import open_data
from edge_client.onnx.file import OnnxModel

pytestmark = pytest.mark.broker

CLASSES = [str(digit) for digit in range(10)]
RUN = """
name = "digits"
model = {{ name = "mlp", input = [1, 8, 8], hidden = [16] }}
classes = {classes}
train = {{ batch = 16, max-steps = 1, lr = 0.1 }}
devices = {{ min = {minimum} }}
stop = {{ rounds = 2 }}
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Devices a and b can train, tiny cannot hold anything, away is enrolled and never there."""
    with Fleet(tmp_path_factory.mktemp("runs")) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a", "b", "tiny", "away")
        fleet.start_device("a")
        fleet.start_device("b")
        fleet.start_device("tiny", memory="100MB")
        wait_online(fleet, "a", "b", "tiny")
        for name in ("a", "b"):
            raw_requests.request(fleet.state_dir, "device-label", name=name, put={"size": "large"})
        yield fleet


def wait_online(fleet: Fleet, *names: str) -> None:
    fleet.wait_until(lambda: {*names} <= {*(fleet.ask("status") or {}).get("online", ())}, 60, f"{names} are there")


def type_command(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    return typed("coordinator", *arguments, "--state-dir", fleet.state_dir)


def large(rounds: int, **changes: Any) -> RunFile:
    """A run of the two devices that can train."""
    return mlp_run(rounds=rounds, where=["size=large"], **changes)


def own_test_data(section: DataSection) -> tuple[Any, Any]:
    """A device's test samples as arrays."""
    _, test = open_data(section, CLASSES, (1, 8, 8))
    x, y = test.batch(range(len(test)))
    return x.numpy(), y.numpy()


def finished(fleet: Fleet, run: str) -> dict[str, Any]:
    shown = fleet.wait_finished(run, 240)
    assert shown["state"] == "finished", shown["reason"]
    return shown


@pytest.fixture(scope="module")
def judged(fleet: Fleet) -> dict[str, Any]:
    """Two rounds on a and b; every version is judged on their own test data."""
    return finished(fleet, fleet.start_run(large(2, name="labels", evaluate={"every": 1})))


def test_a_dry_run_tells_of_every_device_what_it_would_train_or_why_it_cannot(fleet: Fleet, tmp_path: Path) -> None:
    """a and b hold 449 or 450 of 1,797 digits, 359 or 360 of them for training; tiny and away cannot: exit code 6."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(classes=CLASSES, minimum=3))
    done = type_command(fleet, "run", "start", str(path), "--dry-run", "--format", "json")
    assert done.returncode == 6, done.stderr
    *progress, problem = done.stderr.splitlines()
    assert problem == "coordinator: 3 devices are needed (devices.min), 2 can train; see why above"
    assert {*progress} <= {f"{num_answers} of 3 devices answered" for num_answers in range(4)}  # `away` is not asked
    told = json.loads(done.stdout)
    rows = {row["id"]: row for row in told["devices"]}
    assert told["num_able"] == 2
    assert {name: row["code"] for name, row in rows.items()} == {
        "a": "",
        "b": "",
        "tiny": "nothing_fits",
        "away": "offline",
    }
    assert "100000000" in rows["tiny"]["detail"] or "100 MB" in rows["tiny"]["detail"]
    for name in ("a", "b"):
        row = rows[name]
        assert row["num_samples"] in (359, 360)
        assert row["num_test"] in (89, 90)
        assert 0 < row["predicted_bytes"] <= row["budget_bytes"] == 2 * 10**9
        assert row["bytes_down"] > 4 * (64 * 16 + 16 + 16 * 10 + 10)  # the parameters, and a header
    shown = type_command(fleet, "run", "list", "-q")
    assert shown.stdout == ""  # nothing was started


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ('slices = ["full", "depth:9"]', "run.toml: slice 'depth:9': "),
        ('method = "fedin"', "run.toml: method 'fedin' trains what is between"),
        ('method = "draftfed"', "run.toml: method 'draftfed' needs shared samples"),
    ],
)
def test_what_only_the_model_shows_is_told_before_a_run_starts(
    fleet: Fleet, tmp_path: Path, wrong: str, told: str
) -> None:
    """Exit code 3, one line, and no run."""
    path = tmp_path / "run.toml"
    path.write_text(f"{wrong}\n" + RUN.format(classes=CLASSES, minimum=1))
    before = type_command(fleet, "run", "list", "-q").stdout
    done = type_command(fleet, "run", "start", str(path))
    assert done.returncode == 3, done.stdout
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert type_command(fleet, "run", "list", "-q").stdout == before


def test_shared_samples_are_those_of_the_folder_in_which_a_run_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator runs in another one; a whole path, and a source without one, stay as they are."""
    monkeypatch.chdir(tmp_path)
    plain = mlp_run(rounds=1)
    for told, meant in [("npz:a.npz", f"npz:{tmp_path}/a.npz"), ("npz:/b.npz", "npz:/b.npz"), ("digits", "digits")]:
        file = replace(plain, method=replace(plain.method, name="fedmd", parameters={"public": told}))
        assert cli_runs._with_whole_paths(file).method.parameters["public"] == meant
    assert cli_runs._with_whole_paths(plain) == plain


def dry_rows(fleet: Fleet, path: Path, method: str, more: str = "") -> dict[str, Any]:
    """What a dry run of a method tells of each device."""
    deeper = RUN.replace("[16]", "[16, 16]").format(classes=CLASSES, minimum=1)
    path.write_text(f'method = "{method}"\n{more}{deeper}')
    done = type_command(fleet, "run", "start", str(path), "--dry-run", "--format", "json")
    assert done.returncode in (0, 6), done.stderr
    return {row["id"]: row for row in json.loads(done.stdout)["devices"]}


def test_a_dry_run_of_slices_and_knowledge_tells_bytes_and_what_is_not_shared(fleet: Fleet, tmp_path: Path) -> None:
    """b is told to train the half: 8 of 16 units in both hidden layers, and the class means of 8 features.

    No owner here lets features of single samples out, which FedIN needs.
    """
    path = tmp_path / "run.toml"
    raw_requests.request(fleet.state_dir, "device-label", name="b", put={"slice": "width:1/2"})
    try:
        rows = dry_rows(fleet, path, "felo", 'slices = ["full", "width:1/2"]\n')
    finally:
        raw_requests.request(fleet.state_dir, "device-label", name="b", put={}, drop=["slice"])
    means = {"a": 10 * (16 + 10 + 1), "b": 10 * (8 + 10 + 1)}
    weights = {"a": 64 * 16 + 16 + 16 * 16 + 16 + 16 * 10 + 10, "b": 64 * 8 + 8 + 8 * 8 + 8 + 8 * 10 + 10}
    for name in ("a", "b"):
        for way in ("bytes_down", "bytes_up"):
            assert 0 < rows[name][way] - 4 * (weights[name] + means[name]) < 2_000  # names, shapes, the report
    assert [rows[name]["plan"].split(",")[0] for name in ("a", "b")] == ["full", "width:1/2"]
    refused = dry_rows(fleet, path, "fedin")
    assert [refused[name]["code"] for name in ("a", "b")] == ["not_shared", "not_shared"]


def test_a_run_asks_only_devices_with_its_labels_and_keeps_its_best_version(judged: dict[str, Any]) -> None:
    """Two rounds on a and b alone; versions 0, 1 and 2 have a score, and the best of them is named."""
    assert [device["id"] for device in judged["devices"]] == ["a", "b"]
    scores = {model["version"]: model["score"] for model in judged["models"]}
    assert scores == {result["version"]: result["accuracy"] for result in judged["evaluations"]}
    assert scores.keys() == {0, 1, 2}
    assert judged["best_score"] == max(scores.values())
    assert scores[judged["best_version"]] == judged["best_score"]
    assert {device["versions"]["torch"] != "" for device in judged["devices"]} == {True}
    assert judged["environment"]["fedfit"]
    assert judged["environment"]["cores"] > 0


def test_a_timeline_shows_where_the_time_of_each_round_went(fleet: Fleet, judged: dict[str, Any]) -> None:
    """Spans of a device follow one another without gaps, inside of its round; the last round only evaluates."""
    shown = json.loads(type_command(fleet, "run", "show", judged["run"], "--timeline", "--format", "json").stdout)
    *trained, last = shown["rounds"]
    assert [(row["round"], row["only_evaluates"]) for row in shown["rounds"]] == [(1, False), (2, False), (3, True)]
    for row in trained:
        assert [span["name"] for span in row["spans"]][:2] == ["devices", "fold"]
    for device in [device for row in shown["rounds"] for device in row["devices"]]:
        names = [span["name"] for span in device["spans"]]
        assert [name for name in names if name in ("load", "write", "upload")] == ["load", "write", "upload"]
        ends = [span["ends_s"] for span in device["spans"]]
        assert [span["begins_s"] for span in device["spans"]][1:] == ends[:-1]
        assert ends[-1] <= max(span["ends_s"] for row in shown["rounds"] for span in row["spans"])
    text = type_command(fleet, "run", "show", judged["run"], "--timeline", "--round", "3").stdout
    assert text.startswith("last evaluation: ")
    assert len(last["devices"]) == text.count("stored, evaluates")


def test_a_running_coordinator_gives_a_model_away_as_onnx(fleet: Fleet, judged: dict[str, Any], tmp_path: Path) -> None:
    """The best version, by the hash that the run shows; a run, a version or a best one that is not there is told."""
    out, run = str(tmp_path / "m.onnx"), judged["run"]
    done = type_command(fleet, "run", "export", run, "--version", "best", "--onnx", out, "--format", "json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["run"], told["version"]) == (run, judged["best_version"])
    assert told["weights_sha256"] == hashes(judged)[judged["best_version"]]
    assert told["max_difference"] <= 1e-4
    assert OnnxModel(Path(out)).facts.classes == tuple(CLASSES)
    wrong = {("nobody", "last"): (7, run), (run, "9"): (3, "no version 9"), (run, "x"): (3, "a number, best or last")}
    for (name, version), (code, said) in wrong.items():
        refused = type_command(fleet, "run", "export", name, "--version", version, "--onnx", f"{out}.not.onnx")
        assert (refused.returncode, said in refused.stderr) == (code, True), refused.stderr
        assert refused.stderr.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.onnx"]


def test_a_run_that_was_stopped_goes_on_by_init(fleet: Fleet) -> None:
    """Version 0 of the new run is the last model of the old one, to the bit; a run that is not there is refused."""
    long = fleet.start_run(large(1000, name="long"))
    queued = fleet.start_run(large(1, name="next"))
    fleet.wait_until(lambda: fleet.show(long)["round"] >= 1, 120, "a round was committed")
    assert fleet.show(queued)["waits_for"] == long
    assert type_command(fleet, "run", "stop", long).returncode == 0
    stopped = fleet.wait_finished(long, 120)
    assert stopped["state"] == "stopped"
    finished(fleet, queued)
    model = {"name": "mlp", "input": [1, 8, 8], "hidden": [16], "init": f"run:{long}"}
    continued = finished(fleet, fleet.start_run(large(1, name="continued", model=model)))
    assert hashes(continued)[0] == hashes(stopped)[-1]
    assert hashes(continued)[1] != hashes(continued)[0]


def test_a_run_cannot_go_on_from_a_model_of_another_shape(fleet: Fleet, judged: dict[str, Any]) -> None:
    """hidden = [8] instead of [16]: the run fails and says which tensor differs."""
    model = {"name": "mlp", "input": [1, 8, 8], "hidden": [8], "init": f"run:{judged['run']}"}
    other = fleet.wait_finished(fleet.start_run(large(1, name="other", model=model)), 240)
    assert other["state"] == "failed"
    assert "[16, 64]" in other["reason"]
    assert "[8, 64]" in other["reason"]


def test_the_fleets_result_is_that_of_the_pooled_data(fleet: Fleet, judged: dict[str, Any], tmp_path: Path) -> None:
    """The same versions judged on the devices and, in one file, on the server: counts are equal, not close."""
    parts = [load_device_file(fleet.folder / name / "device.toml").data for name in ("a", "b")]
    pooled = [own_test_data(part) for part in parts if part is not None]
    path = tmp_path / "test.npz"
    np.savez(path, x=np.concatenate([x for x, _ in pooled]), y=np.concatenate([y for _, y in pooled]))
    here = {"every": 1, "on": f"npz:{path}"}
    on_server = finished(fleet, fleet.start_run(large(2, name="here", evaluate=here)))
    assert hashes(judged) == hashes(on_server)
    for there, server in zip(judged["evaluations"], on_server["evaluations"], strict=True):
        assert there["num_samples"] == server["num_samples"] == sum(len(y) for _, y in pooled)
        for metric in ("accuracy", "balanced_accuracy", "macro_f1", "recall"):
            assert there[metric] == server[metric]
        assert there["loss"] == pytest.approx(server["loss"], rel=1e-6)  # sums of other batches
    assert [row["device"] for row in on_server["device_evaluations"]] == ["server"] * 3
    assert [found["per_architecture"] for found in on_server["evaluations"]] == [
        {"full": found["accuracy"]} for found in judged["evaluations"]
    ]
    _check_report(fleet, on_server, judged, tmp_path)


def _check_report(fleet: Fleet, on_server: dict[str, Any], judged: dict[str, Any], folder: Path) -> None:
    """The devices' models were compared in both rounds, where the server has test data; else the page says why not.

    FedAvg of the whole model: 2 rounds of 2 devices, each way, 1,040 + 170 numbers and the table of four tensors.
    """
    pages = {}
    for shown in (on_server, judged):
        out = folder / f"{shown['run']}.html"
        done = type_command(fleet, "run", "report", shown["run"], "--out", str(out))
        assert done.returncode == 0, done.stderr
        pages[shown["run"]] = Page(out.read_text(encoding="utf-8"))
    compared = pages[on_server["run"]]
    assert {f"similarity of the devices' stages after round {number}" for number in (1, 2)} <= set(compared.images())
    assert "t-SNE of features after round 2" in compared.images()
    size = raw_requests.request(fleet.state_dir, "run-show", run=on_server["run"], report=True)["whole_model_bytes"]
    assert 4 * 1210 < size < 4 * 1210 + 400
    assert "4 trainings that counted x 2 x" in compared.text
    assert "no test data to compare them on" in pages[judged["run"]].text


def test_a_target_ends_a_run_early_and_follow_shows_it(fleet: Fleet, tmp_path: Path) -> None:
    """An accuracy of 0.0 is reached by version 0: one round, then the end; --follow prints both versions."""
    path = tmp_path / "run.toml"
    text = RUN.format(classes=CLASSES, minimum=2).replace("min = 2", 'min = 2, where = ["size=large"]')
    path.write_text(text.replace("rounds = 2", "rounds = 50, target = 0.0"))
    done = type_command(fleet, "run", "start", str(path), "--follow", "--format", "json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["round"] == 1
    assert shown["reason"].startswith("target reached: accuracy ")
    lines = [line for line in done.stderr.splitlines() if "accuracy" in line]
    assert [line.split(":")[0].strip() for line in lines] == ["before round 1", "after round 1"]


def test_a_run_that_fails_is_told_by_its_exit_code(fleet: Fleet, tmp_path: Path) -> None:
    """misfit = "fail" and a device on which nothing fits: 9, with the reason; no model was trained."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(classes=CLASSES, minimum=3).replace("min = 3", 'min = 3, misfit = "fail"'))
    done = type_command(fleet, "run", "start", str(path), "--follow")
    assert done.returncode == 9, done.stderr
    assert "nothing_fits: tiny" in done.stderr.splitlines()[-1]
