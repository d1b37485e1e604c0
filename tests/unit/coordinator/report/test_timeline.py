"""Bars of a run's newest rounds in its report page."""

from __future__ import annotations

import re

from coordinator.report.timeline import MAX_ROUNDS, section
from coordinator.timeline import DeviceTimeline, RoundTimeline, Span


def _device(name: str, *spans: tuple[str, float, float]) -> DeviceTimeline:
    return DeviceTimeline(device=name, train=True, state="stored", spans=_spans(*spans))


def _spans(*items: tuple[str, float, float]) -> tuple[Span, ...]:
    return tuple(Span(name=name, begins_s=begin, ends_s=end) for name, begin, end in items)


def _round(number: int, *devices: DeviceTimeline) -> RoundTimeline:
    return RoundTimeline(
        round=number,
        attempt=1,
        state="ANNOUNCED",
        only_evaluates=False,
        pause_s=None,
        spans=_spans(("devices", 0.0, 3.0), ("fold", 3.0, 4.0)),
        devices=devices,
    )


def test_each_span_is_a_bar_of_its_share_of_the_longest_round() -> None:
    """Of 4 s: train begins at 0.5 (12.5 %) and takes 2 (50 %); fold is the coordinator's last quarter."""
    shown = section([_round(3, _device("a<b>", ("train", 0.5, 2.5)), _device("c"))])
    bars = re.findall(r'title="(\w+ [\d.]+ s)" style="left:([\d.]+)%;width:([\d.]+)%', shown)
    assert bars == [("train 2.000 s", "12.50", "50.00"), ("fold 1.000 s", "75.00", "25.00")]
    assert "<b>a&lt;b&gt;</b>" in shown
    assert "<b>c</b>" not in shown  # nothing is known of it
    assert "round 3: 4.00 s" in shown


def test_the_newest_rounds_with_times_are_shown_and_without_any_there_is_no_section() -> None:
    """A round that is under way has none yet."""
    rows = [_round(number, _device("a", ("train", 0.0, 1.0))) for number in range(1, 9)]
    shown = section([*rows, _round(9)])
    titles = re.findall(r"<h3>round (\d+):", shown)
    assert titles == [*map(str, range(9 - MAX_ROUNDS, 9))] * 2  # bars, then numbers
    assert section([_round(9)]) == ""


def test_of_many_devices_those_that_ended_last_are_shown() -> None:
    """Of 50 the first ten were done first: 40 stay, in their order."""
    devices = [_device(f"d{i:02}", ("train", 0.0, 1.0 + i / 100)) for i in range(50)]
    shown = section([_round(1, *devices)])
    assert re.findall(r"<b>(\w+)</b>", shown) == [*(f"d{i:02}" for i in range(10, 50)), "coordinator"]
    assert "and 10 more devices" in shown
