"""Tables for people."""

from __future__ import annotations

from typing import Any

from coordinator import tables


def _device(**changes: Any) -> dict[str, Any]:
    row = {"id": "jetson-1", "online": True, "seen_s_ago": 3.2, "budget_bytes": 1_500_000_000, "client": "0.1"}
    return row | {"state": "working", "phase": "train", "step": 3, "total": 8} | changes


def _run(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"run": "r-1", "state": "running", "reason": "", "rounds": 3, "models": [{"version": 1}]}
    return row | {"evaluations": [], "devices": [], "leases": [], "round_rows": []} | changes


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Text to the left, numbers to the right, no blanks at the end of a line."""
    text = tables.align(["name", "n"], [["a", 1], ["long-name", 100]], right=(1,))
    assert text.splitlines() == ["name         n", "---------  ---", "a            1", "long-name  100"]


def test_what_a_device_says_cannot_move_the_cursor_or_break_a_line() -> None:
    """Escape sequences, bells, carriage returns and line ends become harmless in every table."""
    evil = "ok\x1b[2J\x1b]0;title\x07\r\nfake  row\x9b1m"
    lease = {"device": "a", "state": "declined", "code": "crashed", "detail": evil, "log": [evil]}
    abandoned = {"state": "ABANDONED", "number": 1, "attempt": 2, "reason": evil}
    text = tables.run(_run(leases=[lease], round_rows=[abandoned], reason=evil))
    text += tables.devices([_device(client=evil)])
    assert not {c for c in text if not c.isprintable() and c != "\n"}
    assert "ok?[2J?]0;title? fake row?1m" in text


def test_a_device_is_described_in_one_line() -> None:
    """What it does, if it says; never seen; no budget yet."""
    text = tables.devices([_device(), _device(id="pi", online=False, seen_s_ago=None, budget_bytes=None, phase="")])
    _, _, first, second = text.splitlines()
    assert first.split() == ["jetson-1", "online", "3", "s", "ago", "1.5", "GB", "0.1", "train", "3/8"]
    assert second.split() == ["pi", "offline", "never", "-", "0.1", "working"]


def test_empty_lists_say_what_to_do() -> None:
    """The command that makes the first one."""
    assert "coordinator device add" in tables.devices([])
    assert "coordinator run start" in tables.runs([])


def test_a_run_without_a_model_is_shown() -> None:
    """It failed before its first version."""
    assert tables.run(_run(state="failed", reason="input: no such model", models=[])) == (
        "r-1: failed (input: no such model), round 0 of 3"
    )


def test_a_run_shows_results_devices_and_problems() -> None:
    """One block each."""
    evaluation = {"version": 1, "accuracy": 0.75, "balanced_accuracy": 0.7, "macro_f1": 0.71, "loss": 0.5}
    evaluation |= {"num_samples": 20, "num_devices": 2}
    device = {"id": "a", "budget_bytes": 10**9, "plan": "full, microbatch 8", "predicted_bytes": 10**8}
    device |= {"peak_bytes": 2 * 10**8, "num_samples": 10, "bytes_up": 1000, "bytes_down": 2000}
    lease = {"device": "b", "state": "declined", "code": "over_budget", "detail": "3 GB", "log": ["line 1"]}
    text = tables.run(_run(evaluations=[evaluation], devices=[device], leases=[lease]))
    for piece in ("round 1 of 3", "0.7500", "full, microbatch 8", "over_budget", "b: line 1"):
        assert piece in text


def test_runs_are_listed_with_their_rounds() -> None:
    """1/3."""
    row = {"run": "r-1", "state": "running", "round": 1, "rounds": 3, "method": "fedavg", "model": "mlp", "reason": ""}
    assert "1/3" in tables.runs([row])
