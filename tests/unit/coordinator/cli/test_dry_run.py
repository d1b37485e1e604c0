"""What each device would train, or why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from answers import device_line, failed_lease, run_details, run_device
from rows import PLAN, run_file

from coordinator.cli import dry_run
from coordinator.cli.methods import SliceTraffic
from coordinator.control_messages import DeviceLine
from coordinator.run_details import Candidate


def _dry(devices: Sequence[DeviceLine], **changes: Any) -> dry_run.DryRun:
    planned = run_device(
        budget_bytes=300_000_000, predicted_bytes=271_000_000, num_samples=480, num_test=119, plan_details=PLAN
    )
    traffic = {"full": SliceTraffic(slice="full", bytes_down=85_800, bytes_up=86_000, bytes_once=21_000)}
    details = run_details(file=run_file(name="r"), devices=(planned,), **changes)
    return dry_run.evaluate(details, devices, traffic)


def test_a_dry_run_shows_plans_and_what_stands_in_the_way() -> None:
    """a can; b declined; c is barred; d came too late; e is not there. One of five."""
    declined = failed_lease(device="b", code="unknown_class", detail="kratzer", log=("line",))
    barred = Candidate(id="c", code="label", detail="the run wants line=a")
    offline = Candidate(id="e", code="offline", detail="gone")
    devices = [device_line(id=name, online=name != "e") for name in "abcde"]
    result = _dry(devices, failures=(declined,), barred=(barred, offline))
    assert [row.code for row in result.devices] == ["", "unknown_class", "label", "not_asked", "offline"]
    assert (result.run, result.num_able) == ("r", 1)
    assert dry_run.describe(result).splitlines() == [
        "device  budget  plan                predicted peak  samples  test  down/round  up/round",
        "------  ------  ------------------  --------------  -------  ----  ----------  --------",
        "a       300 MB  full, microbatch 8          271 MB      480   119     85.8 kB   86.0 kB",
        "",
        "once, to each device, on top: 21.0 kB down",
        "",
        "b cannot: unknown_class: kratzer",
        "c cannot: label: the run wants line=a",
        "d cannot: not_asked: it came when the others had been asked already; try again",
        "e cannot: offline: gone",
        "",
        "1 of 5 devices can train; nothing was trained",
    ]


def test_a_dry_run_in_which_nobody_can_train_has_no_table() -> None:
    """Only the reason and the count; without any device, the command that adds one."""
    nobody = _dry([device_line(id="b", online=False)])
    assert dry_run.describe(nobody).splitlines() == [
        "b cannot: offline: not connected",
        "",
        "0 of 1 devices can train; nothing was trained",
    ]
    assert "coordinator device add" in dry_run.describe(_dry([]))
