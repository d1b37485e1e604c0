"""When the parts of a round happened: of each device, from its assignment to its checked update, and of the round.

    send      the assignment, until the device has accepted it
    fetch     the model and what else the assignment names
    wait      for a worker: another one to end, or the template of workers to load
    start     the worker's process
    load      data, model, plan
    evaluate, train
    write     the update, until its offer is here
    upload, check

The coordinator's own clock says when something was sent or came. A device says how long its phases took and never when:
they are laid one after the other from its acceptance on, and what is left until its offer is called `write`.
Covers: the records, and how a device's phases become spans of time. Does not cover: taking the times (`conductor`),
showing them (`cli`, `report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "DEVICE_SPANS",
    "ROUND_SPANS",
    "WORKER_PHASES",
    "DeviceTimeline",
    "RoundTimeline",
    "RunTimeline",
    "Span",
    "device_spans",
    "known_phases",
    "round_spans",
]

WORKER_PHASES = ("fetch", "wait", "start", "load", "evaluate", "train")  # as devices name them
DEVICE_SPANS = ("send", *WORKER_PHASES, "work", "write", "upload", "check")  # work: of a device that tells no phases
ROUND_SPANS = ("devices", "fold", "commit", "announce")

_LONGEST_S = 1e7  # four months


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time, in seconds since its round began."""

    name: str
    begins_s: float
    ends_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ends_s - self.begins_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimeline:
    """One assignment; a device that was asked twice in a round has two."""

    device: str
    train: bool
    state: str  # of its lease
    spans: tuple[Span, ...]

    def seconds(self, name: str) -> float | None:
        """How long it was at something in all; None if it was not."""
        took = [span.seconds for span in self.spans if span.name == name]
        return sum(took) if took else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTimeline:
    """One attempt of a round."""

    round: int
    attempt: int
    state: str
    only_evaluates: bool
    pause_s: float | None  # since the round before was announced; None: that was not seen
    spans: tuple[Span, ...]
    devices: tuple[DeviceTimeline, ...]

    @property
    def ends_s(self) -> float:
        """When its last span ends."""
        every = (self.spans, *(device.spans for device in self.devices))
        return max((span.ends_s for spans in every for span in spans), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTimeline:
    """The newest rounds of a run, oldest first."""

    run: str
    rounds: tuple[RoundTimeline, ...]


def known_phases(phases: Mapping[str, float] | None) -> dict[str, float]:
    """The phases that a device may name, with durations that can be; a device may say anything."""
    return {name: s for name, s in (phases or {}).items() if name in WORKER_PHASES and 0 <= s <= _LONGEST_S}


def device_spans(moments: Mapping[str, float], phases: Mapping[str, float]) -> tuple[Span, ...]:
    """The spans of an assignment.

    `moments` are the coordinator's: assign, accept, fetch (the last request for a part), offer, arrive, check; those
    that did not happen are absent. `phases` are the device's durations. Nothing ends after the offer that follows it.
    """
    spans: list[Span] = []
    accepted, offered = moments.get("accept"), moments.get("offer")
    if accepted is not None:
        _add(spans, "send", moments.get("assign"), accepted)
    if accepted is not None and offered is not None:
        at = accepted
        for name, seconds in phases.items() if phases else _seen_from_here(moments, accepted):
            end = min(at + seconds, offered)
            _add(spans, name, at, end)
            at = end
        _add(spans, "write" if phases else "work", at, offered)
    _add(spans, "upload", offered, moments.get("arrive"))
    _add(spans, "check", moments.get("arrive"), moments.get("check"))
    return tuple(spans)


def _seen_from_here(moments: Mapping[str, float], accepted: float) -> list[tuple[str, float]]:
    return [("fetch", moments["fetch"] - accepted)] if "fetch" in moments else []


def round_spans(moments: Mapping[str, float]) -> tuple[Span, ...]:
    """The spans of the round itself: its devices, then what the coordinator does (freeze, fold, commit, announce)."""
    spans: list[Span] = []
    ends = ("freeze", "fold", "commit", "announce")
    at: float | None = 0.0
    for name, end in zip(ROUND_SPANS, ends, strict=True):
        if "freeze" in moments:
            _add(spans, name, at, moments.get(end))
            at = moments.get(end)
    if not spans:  # a round that only evaluates
        _add(spans, "devices", 0.0, moments.get("announce"))
    return tuple(spans)


def _add(spans: list[Span], name: str, begins_s: float | None, ends_s: float | None) -> None:
    if begins_s is not None and ends_s is not None and ends_s > begins_s:
        spans.append(Span(name=name, begins_s=round(begins_s, 3), ends_s=round(ends_s, 3)))
