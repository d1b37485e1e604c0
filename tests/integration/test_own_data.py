"""A task of one's own on image folders with different class sets, and devices that come, go and differ in mid-run."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fleet import Fleet
from PIL import Image
from typed import ok, typed

pytestmark = pytest.mark.broker

TASK = """
from torch import nn
from edge_client import Task, image_folder

def model(num_classes):
    return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8), nn.Tanh()), nn.Linear(8, num_classes))

def train_data(device):
    return image_folder(device.data["train"], size=8)

def test_data(device):
    return image_folder(device.data["test"], size=8)

task = Task(model=model, train_data=train_data, test_data=test_data)
"""
RUN = """
name = "defects"
task = "defects"
classes = ["ok", "scratch", "dent"]
train = {{ batch = 8, lr = 0.1, epochs = 4 }}
stop = {{ rounds = {rounds} }}
devices = {{ min = {minimum} }}
"""
COLOURS = {"ok": (200, 50, 50), "scratch": (50, 200, 50), "dent": (50, 50, 200)}  # names differ between sites
NAMES = {"kratzer": "scratch"}


def write_images(folder: Path, classes: tuple[str, ...], *, num: int, seed: int) -> None:
    """Noisy squares, one colour per class."""
    rng = np.random.Generator(np.random.PCG64(seed))
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(num):
            pixels = np.clip(rng.normal(COLOURS[NAMES.get(name, name)], 10, (8, 8, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def make_device(fleet: Fleet, name: str, classes: tuple[str, ...], *, rename: str = "", task: str = TASK) -> None:
    """A device with its own images, its own copy of the task and its own device.toml."""
    home = fleet.folder / name
    home.mkdir()
    for number, part in enumerate(("train", "test")):
        write_images(home / part, classes, num=16 if part == "train" else 6, seed=number)
    (home / "defects.py").write_text(task)
    (home / "device.toml").write_text(
        f'data = {{ source = "image-folder", train = "{home}/train", test = "{home}/test" }}\n'
        f'{rename}\nlimits = {{ memory = "2GB" }}\ntasks = {{ defects = "{home}/defects.py:task" }}\n'
    )
    (home / "device.join").write_text((fleet.folder / f"{name}.join").read_text())
    (home / "device.join").chmod(0o600)
    fleet.start_device(name)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """left and right have different classes; german lacks a rename; other has another version of the task."""
    with Fleet(tmp_path_factory.mktemp("own-data")) as fleet:
        fleet.start_coordinator()
        for name in ("left", "right", "german", "other", "late"):
            fleet.write_bundle(name)
        make_device(fleet, "left", ("ok", "scratch"))
        make_device(fleet, "right", ("dent", "kratzer", "ok"), rename='rename = { kratzer = "scratch" }')
        make_device(fleet, "german", ("kratzer", "ok"))
        make_device(fleet, "other", ("ok", "scratch"), task=TASK + "\n# another comment\n")
        wait_online(fleet, "left", "right", "german", "other")
        yield fleet


def wait_online(fleet: Fleet, *names: str) -> None:
    fleet.wait_until(lambda: {*names} <= {*(fleet.ask("status") or {}).get("online", ())}, 60, f"{names} are there")


def run_folder(tmp_path: Path, *, rounds: int, minimum: int) -> Path:
    (tmp_path / "defects.py").write_text(TASK)
    (tmp_path / "run.toml").write_text(RUN.format(rounds=rounds, minimum=minimum))
    return tmp_path / "run.toml"


def start(fleet: Fleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    return typed("coordinator", "run", "start", *arguments, "--state-dir", fleet.state_dir)


def test_devices_that_cannot_take_part_say_why_before_anything_is_trained(fleet: Fleet, tmp_path: Path) -> None:
    """german prints the line that mends it; other is left out with both hashes; late is not there."""
    done = start(fleet, str(run_folder(tmp_path, rounds=2, minimum=2)), "--dry-run", "--format", "json")
    assert done.returncode == 0, done.stderr
    rows = {row["id"]: row for row in json.loads(done.stdout)["devices"]}
    codes = {"left": "", "right": "", "german": "unknown_class", "other": "task_differs", "late": "offline"}
    assert {name: row["code"] for name, row in rows.items()} == codes
    assert 'rename = { "kratzer" = "scratch" }' in rows["german"]["detail"].replace("kratzer =", '"kratzer" =')
    for text in (TASK, TASK + "\n# another comment\n"):
        assert hashlib.sha256(text.encode()).hexdigest()[:12] in rows["other"]["detail"]
    assert (rows["left"]["num_samples"], rows["right"]["num_samples"]) == (32, 48)


def test_classes_are_mapped_by_name_and_the_model_learns_all_of_them(fleet: Fleet, tmp_path: Path) -> None:
    """`ok` is class 0 on left and 2 on right; trained together, all three colours are told apart on every device.

    A mapping by position would teach `dent` (right's first folder) as `ok` (left's first): accuracy near one half.
    """
    done = start(fleet, str(run_folder(tmp_path, rounds=3, minimum=2)), "--follow", "--format", "json")
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    last = shown["evaluations"][-1]
    assert last["num_samples"] == 2 * 6 + 3 * 6
    assert last["accuracy"] == 1.0, shown["evaluations"]
    assert [device["id"] for device in shown["devices"]] == ["left", "right"]
    assert shown["file"]["task"]["sha256"] == hashlib.sha256(TASK.encode()).hexdigest()


def test_devices_come_and_go_during_a_run(fleet: Fleet, tmp_path: Path) -> None:
    """late joins after round 1 and trains; right is removed in mid-round, is cut, and the run goes on to its end."""
    done = start(fleet, str(run_folder(tmp_path, rounds=1000, minimum=1)), "--format", "json")
    run = json.loads(done.stdout)["run"]
    fleet.wait_until(lambda: fleet.show(run)["round"] >= 1, 120, "round 1 is committed")
    make_device(fleet, "late", ("dent", "ok"))

    def trained(name: str) -> bool:
        return name in {device["id"] for device in fleet.show(run)["devices"]}

    fleet.wait_until(lambda: trained("late"), 120, "late has trained")

    def holds_a_lease() -> bool:
        return any(x["device"] == "right" and x["state"] == "accepted" for x in fleet.show(run)["leases"])

    fleet.wait_until(holds_a_lease, 60, "right is at work")
    ok("coordinator", "device", "remove", "right", "--state-dir", fleet.state_dir)
    before = fleet.show(run)["round"]
    fleet.wait_until(lambda: fleet.show(run)["round"] >= before + 2, 120, "two more rounds")
    assert fleet.ask("run-stop", run=run, now=False) is not None
    shown = fleet.wait_finished(run, 120)
    assert shown["state"] == "stopped"
    assert [x["device"] for x in shown["leases"] if x["state"] == "stored" and x["train"]] == ["late", "left"]
    assert "right" not in {row["id"] for row in (fleet.ask("device-list") or {})["devices"]}
