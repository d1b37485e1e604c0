"""Where the time of a run's newest rounds went, as bars: a line for each device, one for the coordinator.

Covers: the section of a report page, in plain HTML. Does not cover: what the spans mean (`coordinator.timeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordinator.report import html as page
from coordinator.timeline import DEVICE_SPANS, ROUND_SPANS, DeviceTimeline, RoundTimeline, Span

__all__ = ["MAX_ROUNDS", "section"]

MAX_ROUNDS = 5
_MAX_DEVICES = 40  # of a round; those that took longest
_COLOURS = {
    "send": "#94a3b8",
    "fetch": "#38bdf8",
    "wait": "#cbd5e1",
    "start": "#f59e0b",
    "load": "#eab308",
    "evaluate": "#a78bfa",
    "train": "#2563eb",
    "work": "#2563eb",
    "write": "#ea580c",
    "upload": "#0891b2",
    "check": "#be123c",
    "fold": "#059669",
    "commit": "#16a34a",
    "announce": "#84cc16",
}


def section(rounds: Sequence[RoundTimeline]) -> str:
    """The newest rounds that have times, newest last; empty if none has."""
    shown = [row for row in rounds if any(device.spans for device in row.devices)][-MAX_ROUNDS:]
    if not shown:
        return ""
    longest_s = max(row.ends_s for row in shown)
    names = [name for name in _COLOURS if any(name in _names(row) for row in shown)]
    legend = "".join(f'<span><i style="background:{_COLOURS[name]}"></i>{page.text(name)}</span>' for name in names)
    return page.section(
        "Where the time of the newest rounds went",
        f'<p class="legend">{legend}</p>',
        *(_round(row, longest_s) for row in shown),
        page.details("numbers", "".join(_numbers(row) for row in shown)),
    )


def _names(row: RoundTimeline) -> set[str]:
    return {span.name for spans in (row.spans, *(device.spans for device in row.devices)) for span in spans}


def _title(row: RoundTimeline) -> str:
    what = "last evaluation" if row.only_evaluates else f"round {row.round}"
    again = f", try {row.attempt}" if row.attempt > 1 else ""
    return f"{what}{again}: {row.ends_s:.2f} s"


def _round(row: RoundTimeline, longest_s: float) -> str:
    devices = _slowest(row.devices)
    lanes = [_lane(device.device, device.spans, longest_s) for device in devices]
    own = [span for span in row.spans if span.name in _COLOURS]
    if own:
        lanes.append(_lane("coordinator", own, longest_s))
    hidden = len(row.devices) - len(devices)
    more = page.note(f"and {hidden} more devices, which were done earlier") if hidden else ""
    return f"<h3>{page.text(_title(row))}</h3>{''.join(lanes)}{more}"


def _slowest(devices: Sequence[DeviceTimeline]) -> list[DeviceTimeline]:
    """At most so many as can be read, in the order of the round."""
    ends = {device: device.spans[-1].ends_s for device in devices if device.spans}
    latest = set(sorted(ends, key=lambda device: -ends[device])[:_MAX_DEVICES])
    return [device for device in devices if device in latest]


def _lane(name: str, spans: Iterable[Span], longest_s: float) -> str:
    bars = "".join(
        f'<i title="{page.text(span.name)} {span.seconds:.3f} s" style="left:{_percent(span.begins_s, longest_s)};'
        f'width:{_percent(span.seconds, longest_s)};background:{_COLOURS[span.name]}"></i>'
        for span in spans
    )
    return f'<div class="lane"><b>{page.text(name)}</b><span>{bars}</span></div>'


def _percent(seconds: float, longest_s: float) -> str:
    return f"{100 * seconds / longest_s:.2f}%"


def _numbers(row: RoundTimeline) -> str:
    """Seconds of each span of each device, and of the coordinator's."""
    names = [name for name in DEVICE_SPANS if any(device.seconds(name) is not None for device in row.devices)]
    rows = [
        [device.device, *(_seconds(device.seconds(name)) for name in names), device.state]
        for device in _slowest(row.devices)
    ]
    seconds = {span.name: span.seconds for span in row.spans}
    own = ", ".join(f"{name} {seconds[name]:.3f} s" for name in ROUND_SPANS if name in seconds)
    heads = ("seconds", *names, "ended")
    table = page.table(heads, rows, right=range(1, len(names) + 1))
    return f"<h3>{page.text(_title(row))}</h3>{table}{page.note(own) if own else ''}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
