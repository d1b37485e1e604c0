"""What `coordinator new` writes starts on a device that has the data, with the built-in model and with the task."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import raw_requests
from fleet import Fleet
from PIL import Image

from coordinator.cli import main as cli
from edge_client.client import identity

pytestmark = pytest.mark.broker

CLASSES = ("ok", "scratch", "dent")


def _images(folder: Path) -> None:
    """Four images of each class, of one colour each."""
    for number, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True)
        for copy in range(4):
            Image.new("RGB", (20, 20), (100 * number, 20 * copy, 0)).save(folder / name / f"{copy}.png")


def _device(fleet: Fleet, made: Path, data: Path) -> None:
    """The example of a device's file, with the paths of this device and its line for the task."""
    home = fleet.folder / "a"
    home.mkdir()
    identity.write_bundle(home / "device.join", fleet.bundle("a"))
    text = (made / "device.toml").read_text(encoding="utf-8")
    text = text.replace("/data/defects", str(data)).replace("/opt/fedfit/tasks", str(made))
    text = text.replace("# tasks = ", "tasks = ").replace('# memory = "auto"', 'memory = "2GB"')
    (home / "device.toml").write_text(text, encoding="utf-8")


def test_the_files_of_a_new_folder_train_as_they_stand(tmp_path: Path) -> None:
    """One round each; the second run is the same file with [model] removed and the # taken away from `task`."""
    made, data = tmp_path / "defects", tmp_path / "data"
    assert cli.main(["new", str(made), "--input", "3x16x16", "--all"]) == 0
    _images(data / "train")
    _images(data / "test")
    run = made / "run.toml"
    run.write_text(run.read_text(encoding="utf-8").replace("\nrounds = 10", "\nrounds = 1 "), encoding="utf-8")
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a")
        _device(fleet, made, data)
        fleet.start_device("a")
        here = ["--state-dir", str(fleet.state_dir)]
        assert cli.main(["run", "start", str(run), *here]) == 0
        assert fleet.wait_finished("defects-1", 120)["state"] == "finished"
        task = re.sub(r"^\[model\].*?^\n", "", run.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        run.write_text(task.replace('# task = "defects"\n', 'task = "defects"\n'), encoding="utf-8")
        assert cli.main(["run", "start", str(run), *here]) == 0
        shown = fleet.wait_finished("defects-2", 120)
        assert (shown["state"], shown["model"]) == ("finished", "task defects"), shown
        assert shown["evaluations"][-1]["num_samples"] == 12
        assert raw_requests.request(fleet.state_dir, "run-list")["runs"][0]["state"] == "finished"
        assert fleet.unexpected == []
