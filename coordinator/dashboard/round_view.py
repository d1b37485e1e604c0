"""The open round, device by device: what each is at, and how many were in which phase at what time.

A device that is done has the times that the coordinator took and the durations that it reported. Of one at work we have
the times so far, and what its heartbeats said, which come with every change of phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from coordinator.dashboard.answers import DeviceSpans, PhaseArea, RoundAnswer, Span
from coordinator.dashboard.picture import DeviceFacts, RunFacts
from coordinator.store.rows import OPEN_LEASE
from coordinator.timeline import device_spans

__all__ = ["RoundView", "shown_phase"]

_ALL_ROWS = 60  # devices; of more, the slowest are listed
_SLOWEST = 10
_COLUMNS = 60
AREA_PHASES = ("fetch", "start", "train", "evaluate", "upload", "lost", "done")
_SHOWN = {
    "send": "wait",
    "fetch": "fetch",
    "wait": "start",
    "start": "start",
    "load": "start",
    "work": "train",
    "write": "upload",
    "upload": "upload",
    "check": "upload",
}


def shown_phase(name: str) -> str:
    """The phase of the page's legend to which a span belongs."""
    return _SHOWN.get(name, name)


class RoundView:
    """What was seen of the open round."""

    def __init__(self) -> None:
        self._facts = RunFacts()
        self._observed: dict[str, list[tuple[str, float]]] = {}  # device -> phases and when they began
        self._changes = 0

    def begin(self, facts: RunFacts) -> None:
        """The run stands so now; another attempt of a round begins anew."""
        before = self._facts
        if (before.run, before.number, before.attempt) != (facts.run, facts.number, facts.attempt):
            self._observed = {}
        before_it, after_it = ((known.run, known.number, known.attempt, known.phase) for known in (before, facts))
        self._changes += before_it != after_it
        self._facts = facts

    def note(self, facts: DeviceFacts, at: float) -> None:
        """A device has changed."""
        began = self._facts.began_at
        self._changes += 1
        if began is None or facts.lease_state not in OPEN_LEASE or not facts.online:
            return
        phase = _live_phase(facts)
        seen = self._observed.setdefault(facts.lease, [])
        if phase and (not seen or seen[-1][0] != phase):
            seen.append((phase, max(0.0, at - began)))

    def key(self) -> object:
        """Differs when the answer differs by more than the time."""
        return [self._facts.run, self._facts.number, self._facts.attempt, self._changes]

    def elapsed_s(self, now: float) -> float | None:
        """How old the round is; None if none is open, or its beginning was not seen."""
        return max(0.0, now - self._facts.began_at) if self._facts.began_at is not None else None

    def answer(
        self, devices: Mapping[str, DeviceFacts], seen_at: Mapping[str, float], now: float
    ) -> RoundAnswer | None:
        """The open round; None if there is none."""
        facts, elapsed = self._facts, self.elapsed_s(now)
        asked = [device for device in devices.values() if device.lease]
        if elapsed is None or facts.only_evaluates or facts.dry or not asked:
            return None
        rows = [
            DeviceSpans(
                name=device.name, state=device.lease_state, spans=self.spans(device, seen_at.get(device.name), now)
            )
            for device in asked
        ]
        rows.sort(key=_slowness)
        is_complete = len(rows) <= _ALL_ROWS
        return RoundAnswer(
            run=facts.run,
            number=facts.number,
            elapsed_s=round(elapsed, 2),
            left_s=round(max(0.0, facts.ends_at - now), 1) if facts.ends_at is not None else None,
            num_devices=len(rows),
            num_done=sum(device.lease_state == "stored" for device in asked),
            is_complete=is_complete,
            devices=tuple(rows if is_complete else rows[:_SLOWEST]),
            area=None if is_complete else _area(rows, elapsed),
        )

    def spans(self, device: DeviceFacts, seen_at: float | None, now: float) -> tuple[Span, ...]:
        """Where a device's time went; the last span of one at work ends now."""
        if device.lease_state not in OPEN_LEASE:
            return _done_spans(device.moments, device.phases)
        began = self._facts.began_at
        if began is None:
            return ()
        at, moments = now - began, dict(device.moments)
        assigned, accepted = moments.get("assign", 0.0), moments.get("accept")
        if accepted is None:
            return (_span("wait", assigned, at),) if device.online else (_span("lost", assigned, at),)
        spans = [_span("wait", assigned, accepted)]
        observed = [entry for entry in self._observed.get(device.lease, []) if entry[0] != "wait"]
        until = at if device.online or seen_at is None else max(accepted, seen_at - began)
        for number, (phase, begins) in enumerate(observed):
            begins = accepted if number == 0 else max(begins, accepted)
            ends = observed[number + 1][1] if number + 1 < len(observed) else until
            spans.append(_span(phase, begins, max(begins, ends)))
        if not observed:
            spans.append(_span("fetch", accepted, until))
        if until < at:
            spans.append(_span("lost", until, at))
        return tuple(span for span in spans if span.ends_s > span.begins_s)


@lru_cache(maxsize=4096)
def _done_spans(moments: tuple[tuple[str, float], ...], phases: tuple[tuple[str, float], ...]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for span in device_spans(dict(moments), dict(phases)):
        name = shown_phase(span.name)
        if merged and merged[-1].name == name:
            merged[-1] = _span(name, merged[-1].begins_s, span.ends_s)
        else:
            merged.append(_span(name, span.begins_s, span.ends_s))
    return tuple(merged)


def _span(name: str, begins_s: float, ends_s: float) -> Span:
    return Span(name=name, begins_s=round(begins_s, 2), ends_s=round(ends_s, 2))


def _live_phase(facts: DeviceFacts) -> str:
    if facts.doing == "fetching":
        return "fetch"
    if facts.doing == "offering":
        return "upload"
    return shown_phase(facts.phase) if facts.doing == "working" and facts.phase else "wait"


def _slowness(row: DeviceSpans) -> tuple[bool, float, str]:
    """Those at work first, by the time of their last step; then those that are done, the last first."""
    is_open = row.state in OPEN_LEASE
    end = row.spans[-1].ends_s if row.spans else 0.0
    begun = row.spans[-1].begins_s if row.spans else 0.0
    return not is_open, begun if is_open else -end, row.name


def _area(rows: Sequence[DeviceSpans], elapsed: float) -> PhaseArea:
    """How many devices were in each phase, at 60 times of the round."""
    step = max(elapsed, 1e-3) / (_COLUMNS - 1)
    changes = {phase: [0] * (_COLUMNS + 1) for phase in AREA_PHASES}
    for row in rows:
        for span in row.spans:
            if span.name in changes:
                first, last = _column(span.begins_s, step), _column(span.ends_s, step)
                changes[span.name][first] += 1
                is_going_on = span is row.spans[-1] and row.state in OPEN_LEASE
                changes[span.name][_COLUMNS if is_going_on else last] -= 1
        if row.state == "stored" and row.spans:
            changes["done"][_column(row.spans[-1].ends_s, step)] += 1
    phases = {}
    for phase, steps in changes.items():
        total, counts = 0, []
        for change in steps[:_COLUMNS]:
            total += change
            counts.append(total)
        if phase in ("train", "done") or any(counts):
            phases[phase] = tuple(counts)
    return PhaseArea(times_s=tuple(round(step * column, 2) for column in range(_COLUMNS)), phases=phases)


def _column(at_s: float, step: float) -> int:
    return min(_COLUMNS, max(0, -int(-at_s // step)))
