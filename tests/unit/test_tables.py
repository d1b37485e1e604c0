"""Tables for people."""

from __future__ import annotations

from typing import Any

from coordinator import tables

LABELS = ["line=a", "site=b"]

def _device(**changes: Any) -> dict[str, Any]:
    row = {"id": "jetson-1", "online": True, "seen_s_ago": 3.2, "budget_bytes": 1_500_000_000, "client": "0.1"}
    return row | {"labels": {}, "state": "working", "phase": "train", "step": 3, "total": 8} | changes


def _run(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"run": "r-1", "state": "running", "reason": "", "round": 1, "rounds": 3, "progress": None}
    row |= {"metric": "accuracy", "best_score": None, "best_version": None, "file": {"classes": ["no", "yes"]}}
    row |= {"evaluations": [], "device_evaluations": [], "devices": [], "failures": [], "round_rows": []}
    return row | changes


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Text to the left, numbers to the right, no blanks at the end of a line."""
    text = tables.align(["name", "n"], [["a", 1], ["long-name", 100]], right=(1,))
    assert text.splitlines() == ["name         n", "---------  ---", "a            1", "long-name  100"]


def test_what_a_device_says_cannot_move_the_cursor_or_break_a_line() -> None:
    """Escape sequences, bells, carriage returns and line ends become harmless in every table."""
    evil = "ok\x1b[2J\x1b]0;title\x07\r\nfake  row\x9b1m"
    lease = {"device": "a", "state": "declined", "round": 1, "code": "crashed", "detail": evil, "log": [evil]}
    abandoned = {"state": "ABANDONED", "number": 1, "attempt": 2, "reason": evil}
    text = tables.run(_run(failures=[lease], round_rows=[abandoned], reason=evil))
    text += tables.devices([_device(client=evil, labels={"line": evil})])
    assert not {c for c in text if not c.isprintable() and c != "\n"}
    assert "ok?[2J?]0;title? fake row?1m" in text


def test_a_device_is_described_in_one_line() -> None:
    """What it does, if it says; its labels, sorted; not seen yet; no budget yet."""
    unseen = _device(id="pi", online=False, seen_s_ago=None, budget_bytes=None, phase="")
    text = tables.devices([_device(labels={"site": "b", "line": "a"}), unseen])
    _, _, first, second = text.splitlines()
    assert first.split() == ["jetson-1", "online", "3", "s", "ago", "1.5", "GB", "0.1", "train", "3/8", *LABELS]
    assert second.split() == ["pi", "offline", "not", "yet", "-", "0.1", "working", "-"]


def test_empty_lists_say_what_to_do() -> None:
    """The command that makes the first one."""
    assert "coordinator device add" in tables.devices([])
    assert "coordinator run start" in tables.runs([])


def test_a_run_without_a_model_is_shown() -> None:
    """It failed before its first version."""
    assert tables.run(_run(state="failed", reason="input: no such model", round=0)) == (
        "r-1: failed (input: no such model), round 0 of 3"
    )


def test_a_run_shows_results_devices_and_problems() -> None:
    """One block each; the best version in the first line, and the recall of a class that nobody has as a dash."""
    evaluation = {"version": 1, "accuracy": 0.75, "balanced_accuracy": 0.7, "macro_f1": 0.71, "loss": 0.5}
    evaluation |= {"num_samples": 20, "num_devices": 2, "recall": [0.625, None]}
    own = {"version": 1, "device": "a", "num_samples": 10, "accuracy": 0.8125}
    device = {"id": "a", "budget_bytes": 10**9, "plan": "full, microbatch 8", "predicted_bytes": 10**8}
    device |= {"peak_bytes": 2 * 10**8, "num_samples": 10, "bytes_up": 1000, "bytes_down": 2000}
    lease = {"device": "b", "state": "declined", "round": 1, "code": "over_budget", "detail": "3 GB", "log": ["line 1"]}
    found = {"evaluations": [evaluation], "device_evaluations": [own], "devices": [device], "failures": [lease]}
    text = tables.run(_run(best_score=0.75, best_version=1, **found))
    assert text.splitlines()[0] == "r-1: running, round 1 of 3; best accuracy 0.7500 (round 1)"
    for piece in ("0.7100", "full, microbatch 8", "no     ", "0.6250", "0.8125"):
        assert piece in text
    assert "b declined in round 1: over_budget: 3 GB\n    line 1" in text


def test_runs_are_listed_with_their_rounds() -> None:
    """1/3, the best version so far; a run that waits says for whom."""
    row = {"run": "r-1", "state": "running", "round": 1, "rounds": 3, "method": "fedavg", "model": "mlp", "reason": ""}
    row |= {"metric": "macro-f1", "best_score": 0.5, "best_version": 1, "waits_for": ""}
    waits = row | {"run": "r-2", "state": "queued", "best_score": None, "waits_for": "r-1"}
    _, _, first, second = tables.runs([row, waits]).splitlines()
    assert "1/3" in first
    assert "macro-f1 0.5000 (round 1)" in first
    assert second.endswith("waits for r-1")
