"""Timelines as text in aligned columns."""

from __future__ import annotations

from coordinator.cli.timeline_text import text
from coordinator.timeline import DeviceTimeline, RoundTimeline, RunTimeline, Span


def _span(name: str, begins_s: float, ends_s: float) -> Span:
    return Span(name=name, begins_s=begins_s, ends_s=ends_s)


def test_each_device_has_a_row_and_each_span_a_column() -> None:
    """b was checked at 2 s and waits a second for a; spans that nobody has get no column."""
    a = DeviceTimeline(
        device="a", train=True, state="stored", spans=(_span("train", 0.0, 2.5), _span("check", 2.5, 3.0))
    )
    b = DeviceTimeline(device="b", train=False, state="stored", spans=(_span("evaluate", 0.0, 2.0),))
    late = DeviceTimeline(device="c", train=True, state="expired", spans=())
    round_ = RoundTimeline(
        round=4,
        attempt=2,
        state="ANNOUNCED",
        only_evaluates=False,
        pause_s=0.02,
        spans=(_span("devices", 0.0, 3.0), _span("fold", 3.0, 3.5)),
        devices=(a, b, late),
    )
    assert text(RunTimeline(run="r-1", rounds=(round_,))) == "\n".join(
        [
            "round 4, try 2: 3.500 s, begun 0.020 s after the one before",
            "seconds  evaluate  train  check  waits  ended",
            "-------  --------  -----  -----  -----  -----------------",
            "a               -  2.500  0.500  0.000  stored",
            "b           2.000      -      -  1.000  stored, evaluates",
            "c               -      -      -      -  expired",
            "then: fold 0.500 s",
        ]
    )


def test_a_round_without_times_says_so() -> None:
    """Such as one that is under way; a run without rounds has no timeline."""
    empty = RoundTimeline(round=1, attempt=1, state="RUNNING", only_evaluates=True, pause_s=None, spans=(), devices=())
    assert text(RunTimeline(run="r-1", rounds=(empty,))).startswith("last evaluation: no times (it is under way")
    assert text(RunTimeline(run="r-1", rounds=())) == "r-1 has no rounds yet"
