"""A coordinator is lost, and its devices go on with what was restored from a backup."""

from __future__ import annotations

from pathlib import Path

import pytest
from fleet import Fleet, hashes, mlp_run

from coordinator.cli import main as cli

pytestmark = pytest.mark.broker


def test_the_same_devices_go_on_with_an_older_copy(tmp_path: Path) -> None:
    """Backup in mid-run, two more rounds, everything of the coordinator is killed and gone; the copy, which knows
    less than its devices, takes them back to its round, and the run ends with the very models that were lost.
    """
    backup = tmp_path / "fleet.backup"
    with Fleet(tmp_path, start_options=("--tls",)) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a", "b")
        fleet.start_device("a")
        fleet.start_device("b")
        run = fleet.start_run(mlp_run(rounds=5, evaluate={"every": 1}))
        fleet.wait_until(lambda: len(hashes(fleet.show(run))) >= 2, 120, "a round is committed")
        assert cli.main(["backup", str(backup), "--state-dir", str(fleet.state_dir)]) == 0
        at_backup = len(hashes(fleet.show(run)))
        fleet.wait_until(lambda: len(hashes(fleet.show(run))) >= at_backup + 2, 120, "two rounds more")
        lost = hashes(fleet.show(run))
        fleet.kill("coordinator")
        fleet.state_dir = tmp_path / "restored"
        assert cli.main(["restore", str(backup), "--state-dir", str(fleet.state_dir)]) == 0
        fleet.start_coordinator()
        assert len(hashes(fleet.show(run))) <= at_backup
        shown = fleet.wait_finished(run, 240)
        assert (shown["state"], len(hashes(shown))) == ("finished", 6)
        assert hashes(shown)[: len(lost)] == lost
        assert [row["state"] for row in shown["round_rows"] if row["state"] == "ABANDONED"] == []
        assert fleet.unexpected == []
        page = tmp_path / "report.html"
        assert cli.main(["run", "report", run, "--out", str(page), "--state-dir", str(fleet.state_dir)]) == 0
        assert "Ended after 5 of 5 rounds" in page.read_text(encoding="utf-8")
