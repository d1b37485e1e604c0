"""`coordinator run show --timeline` as text: a row for each device, a column for each span of time."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.columns import align
from coordinator.timeline import DEVICE_SPANS, DeviceTimeline, RoundTimeline, RunTimeline

__all__ = ["text"]


def text(data: RunTimeline) -> str:
    """All rounds, oldest first."""
    if not data.rounds:
        return f"{data.run} has no rounds yet"
    return "\n\n".join(_round(row) for row in data.rounds)


def _round(row: RoundTimeline) -> str:
    again = f", try {row.attempt}" if row.attempt > 1 else ""
    what = "last evaluation" if row.only_evaluates else f"round {row.round}"
    if not row.spans and not any(device.spans for device in row.devices):
        return f"{what}{again}: no times (it is under way, or the coordinator was started again meanwhile)"
    pause = f", begun {row.pause_s:.3f} s after the one before" if row.pause_s is not None else ""
    pieces = [f"{what}{again}: {row.ends_s:.3f} s{pause}", _devices(row.devices, _devices_end(row))]
    own = [f"{span.name} {span.seconds:.3f} s" for span in row.spans if span.name != "devices"]
    if own:
        pieces.append(f"then: {', '.join(own)}")
    return "\n".join(pieces)


def _devices_end(row: RoundTimeline) -> float | None:
    return next((span.ends_s for span in row.spans if span.name == "devices"), None)


def _devices(devices: Sequence[DeviceTimeline], end_s: float | None) -> str:
    """Seconds of each span; `waits` is from the checked update to the end of the devices' part of the round."""
    shown = [name for name in DEVICE_SPANS if any(device.seconds(name) is not None for device in devices)]
    rows = [
        [
            device.device,
            *(_seconds(device.seconds(name)) for name in shown),
            _seconds(_waits(device, end_s)),
            _end(device),
        ]
        for device in devices
    ]
    return align(["seconds", *shown, "waits", "ended"], rows, right=range(1, len(shown) + 2))


def _waits(device: DeviceTimeline, end_s: float | None) -> float | None:
    return max(0.0, end_s - device.spans[-1].ends_s) if end_s is not None and device.spans else None


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _end(device: DeviceTimeline) -> str:
    return device.state if device.train else f"{device.state}, evaluates"
