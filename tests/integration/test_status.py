"""`coordinator status` and `stop`: how a running coordinator stands, and that it ends by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fleet import Fleet

from coordinator.cli import main as cli

pytestmark = pytest.mark.broker


def test_a_coordinator_says_how_it_stands_and_stops_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody is online and no run is active; after `stop` nobody answers, which is one line."""
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("kitchen")
        here = ["--state-dir", str(fleet.state_dir)]
        capsys.readouterr()
        assert cli.main(["status", *here]) == 0
        text = capsys.readouterr().out
        assert "0 of 1 devices are online" in text
        assert "no run is active; start one with: coordinator run start FILE.toml" in text
        assert cli.main(["status", "--format", "json", *here]) == 0
        assert json.loads(capsys.readouterr().out)["enrolled"] == 1
        assert cli.main(["stop", *here]) == 0
        assert capsys.readouterr().out == "the coordinator stops\n"
        assert fleet.wait_ended("coordinator", 60) == 0
        assert cli.main(["status", *here]) != 0
        assert capsys.readouterr().err.count("\n") == 1
