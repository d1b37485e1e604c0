"""What people see of a simulation."""

from __future__ import annotations

from coordinator.cli.simulation_report import Pace, grid, result

DEVICE = {"rounds": 2, "samples": 10, "plan": "full, microbatch 32", "budget": None, "training_peak": 3_000_000}
DEVICE |= {"failure": ""}
IDLE = {"rounds": 0, "samples": None, "plan": "", "budget": 1_000_000, "training_peak": None, "failure": ""}
RESULT = {
    "method": "fedavg",
    "model": "mlp",
    "seed": 1,
    "devices": 3,
    "rounds": 2,
    "accuracy": 0.75,
    "best_accuracy": 0.8,
    "accuracy_before": 0.1,
    "accuracy_per_round": [None, 0.75],
    "bytes_up": 1_500_000,
    "bytes_down": 2_000_000,
    "seconds": 12.4,
    "model_sha256": "ab" * 32,
    "out": "simulations/x",
    "per_device": [DEVICE, {**DEVICE, "samples": 30}, {**DEVICE, "budget": 40_000_000, "training_peak": 5_000_000}],
}


def test_time_left_follows_from_the_assignments_that_were_done() -> None:
    """4 rounds of 10: after 10 s 5 are done, 35 are left: 70 s. After 30 s 15 are done, 25 are left: 50 s."""
    pace = Pace(4)
    assert pace.left_s(0.0) is None
    pace.moved(1, 0, 10, now=0.0)
    assert pace.left_s(5.0) is None
    pace.moved(1, 5, 10, now=10.0)
    assert pace.left_s(10.0) == 70.0
    pace.moved(2, 5, 10, now=30.0)
    assert pace.left_s(30.0) == 50.0


def test_what_was_done_before_a_restart_tells_nothing_of_the_pace() -> None:
    """Resumed in round 3 of 4 with 4 of 10 done: 2 more in 6 s; 4 + 10 are left: 42 s."""
    pace = Pace(4)
    pace.moved(3, 4, 10, now=0.0)
    pace.moved(3, 6, 10, now=6.0)
    assert pace.left_s(6.0) == 42.0


def test_devices_with_one_budget_and_one_plan_are_one_row() -> None:
    """Two without a limit, 10 to 30 samples, four assignments; one of 40 MB whose training took 5 MB."""
    shown = result(RESULT)
    assert "accuracy 0.7500 after 2 rounds (best 0.8000)" in shown
    assert "0.1000  -  0.7500" in shown
    rows = [line.split() for line in shown.splitlines() if "microbatch" in line]
    assert rows[0] == ["2", "no", "limit", "full,", "microbatch", "32", "3.0", "MB", "10", "to", "30", "4"]
    assert rows[1] == ["1", "40.0", "MB", "full,", "microbatch", "32", "5.0", "MB", "10", "to", "10", "2"]
    assert "1.5 MB up, 2.0 MB down, 12 s; model abababababababab; in simulations/x" in shown


def test_devices_that_took_no_part_are_told_with_the_reason() -> None:
    """One on which nothing fitted, one that was never drawn."""
    shown = result({**RESULT, "per_device": [IDLE, {**IDLE, "failure": "nothing_fits"}]})
    assert [line.split()[3:] for line in shown.splitlines() if "1.0 MB" in line] == [
        ["never", "asked", "-", "-", "0"],
        ["nothing_fits", "-", "-", "0"],
    ]


def test_a_grid_has_a_row_per_run() -> None:
    """A run that was not judged has no accuracy."""
    *_, first, second = grid({"runs": [RESULT, {**RESULT, "accuracy": None, "best_accuracy": None}]}).splitlines()
    assert first.split()[:4] == ["fedavg", "1", "0.7500", "0.8000"]
    assert second.split()[:4] == ["fedavg", "1", "-", "-"]
