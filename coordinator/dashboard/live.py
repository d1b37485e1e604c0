"""How things stand, from the loop's picture and the store: the sections of the overview and the rows of all devices.

One instance in the page's thread serves all viewers. Each change of the picture makes the sections anew; only those
that differ are published.

Covers: joining the two sources, what a device's state is called. Does not cover: taking the picture (`picture`),
queries (`history`), the timeline of the round (`round_view`), who gets the events (`events`).
"""

from __future__ import annotations

import asyncio
import heapq
import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from coordinator.columns import plain
from coordinator.dashboard import reasons
from coordinator.dashboard.answers import Alert, Curve, DeviceRow, FleetAnswer, Live, RunView, Why
from coordinator.dashboard.events import Events, encode
from coordinator.dashboard.history import DeviceFigures, History, RunHistory
from coordinator.dashboard.picture import SMALL_FLEET, Change, DeviceFacts, RunFacts
from coordinator.dashboard.round_view import RoundView
from coordinator.store.rows import OPEN_LEASE, LeaseRow
from edge_client import __version__

__all__ = ["STATES", "LiveModel"]

STATES = ("train", "evaluate", "upload", "fetch", "start", "wait", "done", "idle", "rests", "offline", "failed")
_WORKING = {
    "fetching": "fetch",
    "offering": "upload",
}
_PHASES = {"fetch": "fetch", "wait": "start", "start": "start", "load": "start", "evaluate": "evaluate"}
_BINS = 40
_NEAREST = 6
_FIRST_ROWS = 50
_PAUSE = 10  # times as long as it took: this thread may have a tenth of a core for it, however large the fleet is
_STEADY_S = 5.0  # ages are sent again so often, though nothing else has changed


class LiveModel:
    """The newest picture, joined with the store. Used in the loop of the page's thread."""

    def __init__(self, federation: str, history: History, events: Events) -> None:
        self._federation = federation
        self._history = history
        self._events = events
        self._names: tuple[str, ...] | None = None
        self._devices: dict[str, DeviceFacts] = {}
        self._seen_at: dict[str, float] = {}
        self._since: dict[str, tuple[str, float]] = {}  # device -> its state, and since when
        self._facts = RunFacts()
        self._round = RoundView()
        self._run: RunHistory | None = None
        self._failures: Mapping[str, LeaseRow] = {}
        self._published: dict[str, bytes] = {}
        self._published_at = 0.0
        self._taken_at = 0.0
        self._pause_s = 0.0  # until the sections may be made again
        self._pending: set[str] = set()  # devices that have changed since they were made
        self._is_news = False
        self._rows: dict[str, DeviceRow] = {}
        self._live: tuple[int, Live] | None = None
        self.ready = asyncio.Event()  # a whole picture is there

    # what comes in

    def take(self, change: Change) -> None:
        """A look of the loop has found this."""
        self._taken_at = change.at
        if change.names is not None:
            self._names = change.names
            if not self.ready.is_set():
                self._devices, self._rows = {}, {}
            gone = set(self._devices) - set(change.names)
            for name in gone:
                del self._devices[name]
                self._rows.pop(name, None)
        if change.run is not None:
            self._facts = change.run
            self._round.begin(change.run)
        self._seen_at.update(change.seen_at)
        for facts in change.devices:
            self._devices[facts.name] = facts
            self._round.note(facts, change.at)
        was_ready = self.ready.is_set()
        if (
            not was_ready
            and self._names is not None
            and len(self._devices) >= len(self._names)
            and change.names is None
        ):
            self.ready.set()
        self._pending.update(facts.name for facts in change.devices)
        self._is_news |= bool(change.devices or change.run is not None or change.names is not None)
        age = change.at - self._published_at
        is_due = age > _STEADY_S or (self._run is not None and self._run.has_more)
        if self.ready.is_set() and (not was_ready or ((self._is_news or is_due) and age >= self._pause_s)):
            began = time.thread_time()
            names, self._pending, self._is_news = self._pending, set(), False
            self.publish(names, change.at)
            self._pause_s = _PAUSE * (time.thread_time() - began)

    def publish(self, changed: Collection[str], now: float) -> None:
        """Make the sections anew, and send those that differ."""
        self._published_at = now
        run_id = self._facts.run if self._facts.run and not self._facts.dry else self._history.newest_run()
        before = self._run
        self._run = self._history.run(run_id) if run_id else None
        if self._run is not None and (changed or before is not self._run):
            self._failures = self._history.failure_details(run_id)
        differing = self._remake_rows(changed, is_other_run=before is not self._run, now=now)
        self._live = None
        live = self.live(now)
        sections: list[tuple[str, object, object]] = [
            ("run", live.run, _still_run(live.run)),
            ("fleet", live.fleet, replace(live.fleet, nearest=tuple(_still(row) for row in live.fleet.nearest))),
            ("evaluation", live.curve, live.curve),
            ("alerts", live.alerts, tuple(replace(alert, since_s=None) for alert in live.alerts)),
            ("round", live.round, self._round.key()),
        ]
        for kind, section, still in sections:
            key = encode(still)
            if self._published.get(kind) != key:
                self._published[kind] = key
                self._events.publish(kind, encode({kind: section}))
        if differing:
            small = len(self._devices) <= SMALL_FLEET
            self._events.publish("devices", encode({"changed": len(differing), "items": differing if small else []}))

    def _remake_rows(self, changed: Collection[str], *, is_other_run: bool, now: float) -> list[DeviceRow]:
        """Make the rows of the devices anew of which something is new; returns those that differ."""
        names = set(changed) | (self._run.take_touched() if self._run is not None else set())
        if is_other_run or len(self._rows) != len(self._devices):
            names = set(self._devices)
        differing = []
        for name in sorted(names & self._devices.keys()):
            row = self._row(name, now)
            if row != self._rows.get(name):
                differing.append(row)
                self._rows[name] = row
        return differing

    # what is asked

    def forget_if_old(self, age_s: float) -> None:
        """Nobody has watched for a while: what is known is not how things stand."""
        if time.monotonic() - self._taken_at > age_s:
            self.ready.clear()

    def view_of(self, run: RunHistory) -> RunView:
        """How a run stands."""
        return self._run_view(run, time.monotonic())

    @property
    def federation(self) -> str:
        """The federation's id."""
        return self._federation

    @property
    def facts(self) -> RunFacts:
        """The open run as the loop sees it."""
        return self._facts

    @property
    def run(self) -> RunHistory | None:
        """The run that is shown: the open one, or the newest."""
        return self._run

    def live(self, now: float | None = None) -> Live:
        """Everything that the overview shows."""
        if self._live is not None and self._live[0] == self._events.number and now is None:
            return self._live[1]
        at = time.monotonic() if now is None else now
        rows = list(self._rows.values())
        first = heapq.nsmallest(_FIRST_ROWS, rows, key=lambda row: row.name)
        fleet = _fleet(rows)
        live = Live(
            federation=self._federation,
            version=__version__,
            seq=self._events.number,
            run=self._run_view(self._run, at) if self._run is not None else None,
            curve=Curve(run=self._run.row.id, points=self._history.curve(self._run)) if self._run else None,
            fleet=replace(fleet, nearest=tuple(self._aged(row, at) for row in fleet.nearest)),
            round=self._round.answer(self._devices, self._seen_at, at),
            alerts=self._alerts(rows, at),
            devices=tuple(self._aged(row, at) for row in first),
        )
        self._live = (self._events.number, live)
        return live

    def rows(self) -> Iterable[DeviceRow]:
        """All devices, with the ages of now."""
        now = time.monotonic()
        return [self._aged(row, now) for row in self._rows.values()]

    def row(self, name: str) -> DeviceRow | None:
        """One device."""
        row = self._rows.get(name)
        return self._aged(row, time.monotonic()) if row is not None else None

    def device_facts(self, name: str) -> DeviceFacts | None:
        """One device as the loop sees it."""
        return self._devices.get(name)

    def round_of(self, name: str) -> tuple[tuple[object, ...], float | None]:
        """The spans of a device in the open round, and how old the round is."""
        facts, now = self._devices.get(name), time.monotonic()
        if facts is None:
            return (), None
        return self._round.spans(facts, self._seen_at.get(name), now), self._round.elapsed_s(now)

    # parts

    def _row(self, name: str, now: float) -> DeviceRow:
        facts = self._devices[name]
        figures = self._run.figures.get(name, DeviceFigures()) if self._run is not None else DeviceFigures()
        state, code, detail = self._state(facts)
        if self._since.get(name, ("", 0.0))[0] != state:
            self._since[name] = (state, self._seen_at.get(name, now) if state == "offline" else now)
        why = None
        if code:
            text = reasons.sentence(plain(detail)[:400]) if detail else reasons.text_of(code)
            why = Why(code=code, text=text, mend=reasons.mend_of(code))
        works = state in ("train", "evaluate", "upload", "fetch", "start")
        return DeviceRow(
            name=name,
            state=state,
            phase=facts.phase if works else "",
            step=facts.step if works else 0,
            total=facts.total if works else 0,
            loss=facts.loss if state == "train" else None,
            seen_s=None,
            labels={plain(key): plain(value) for key, value in facts.labels},
            plan=facts.plan,
            budget_bytes=figures.budget_bytes or facts.budget_bytes,
            predicted_bytes=figures.predicted_bytes or facts.predicted_bytes or None,
            peak_bytes=figures.peak_bytes or None,
            accelerator=facts.kind,
            accuracy=figures.accuracy,
            why=why,
        )

    def _state(self, facts: DeviceFacts) -> tuple[str, str, str]:
        """The state of a device, and the code and the details of what is wrong; empty if nothing is."""
        is_open = facts.lease_state in OPEN_LEASE
        if facts.suspended:
            return "failed", "suspended", ""
        if not facts.online:
            if not facts.client:
                return "offline", "not_seen", ""
            did = {"train": "training", "evaluate": "evaluating"}.get(facts.phase, "at work")
            return "offline", "offline", f"Not connected; it was {did} when it was last heard." if is_open else ""
        if is_open:
            return _doing(facts), "", ""
        if facts.lease_state == "stored":
            return "done", "", ""
        has_failed = facts.lease_state in ("declined", "refused", "expired")
        code, detail = facts.code or (facts.lease_state if has_failed else ""), facts.detail
        if not code:
            return "idle", "", ""
        if reasons.is_of_the_run(code):
            return "idle", "", ""
        if not detail and facts.name in self._failures and self._failures[facts.name].code == code:
            detail = self._failures[facts.name].detail
        return ("failed" if reasons.is_failure(code) else "rests"), code, detail

    def _aged(self, row: DeviceRow, now: float) -> DeviceRow:
        seen_at = self._seen_at.get(row.name)
        return replace(row, seen_s=round(now - seen_at, 1)) if seen_at is not None else row

    def _run_view(self, run: RunHistory, now: float) -> RunView:
        facts = self._facts
        row, file = run.row, run.file
        is_open = facts.run == row.id
        scored = max(run.scores, default=None)
        recalled = max((version for version, judged in run.judged.items() if judged.recall), default=None)
        median = statistics.median(run.round_seconds.values()) if run.round_seconds else None
        elapsed = self._round.elapsed_s(now) if is_open else None
        left = None
        if is_open and median is not None:
            left = max(0.0, median * (file.stop.rounds - run.version) - (elapsed or 0.0))
        able = sum(1 for name in self._devices if self._devices[name].online and not self._devices[name].code)
        waiting = facts.paused
        if is_open and facts.phase == "SELECTING" and able < file.devices.min:
            waiting = f"waits for devices: {file.devices.min} are needed, {able} can take part"
        return RunView(
            run=row.id,
            state=row.state,
            reason=row.reason,
            method=file.method.name,
            model=file.what,
            metric=file.stop.metric,
            target=file.stop.target,
            round=min(facts.number, file.stop.rounds) if is_open else run.version,
            rounds=file.stop.rounds,
            version=run.version,
            phase=facts.phase if is_open else "",
            waiting=waiting if is_open else "",
            best_version=row.best_version,
            best_score=run.scores.get(row.best_version) if row.best_version is not None else None,
            score=run.scores[scored] if scored is not None else None,
            score_version=scored,
            time_left_s=round(left, 1) if left is not None else None,
            round_elapsed_s=round(elapsed, 1) if elapsed is not None else None,
            round_left_s=round(facts.ends_at - now, 1) if is_open and facts.ends_at is not None else None,
            median_round_s=median,
            bytes_up=run.bytes_up + (facts.bytes_up if is_open else 0),
            bytes_down=run.bytes_down + (facts.bytes_down if is_open else 0),
            classes=tuple(plain(name) for name in file.classes),
            recall=run.judged[recalled].recall if recalled is not None else (),
            recall_version=recalled,
            connected=facts.connected,
            paused=facts.paused,
        )

    def _alerts(self, rows: Sequence[DeviceRow], now: float) -> tuple[Alert, ...]:
        """Devices that need somebody, by reason; the most serious first."""
        groups: dict[tuple[str, str], list[DeviceRow]] = {}
        for row in rows:
            if row.why is not None and row.state in ("rests", "offline", "failed"):
                groups.setdefault((row.state, row.why.code), []).append(row)
        alerts = []
        for (state, code), members in groups.items():
            first = members[0].why
            assert first is not None
            since = min(self._since.get(row.name, ("", now))[1] for row in members)
            members.sort(key=lambda row: row.name)
            alerts.append(
                Alert(
                    code=code,
                    state=state,
                    count=len(members),
                    devices=tuple(row.name for row in members[:3]),
                    text=first.text if len(members) == 1 else _common_text(members, code),
                    mend=first.mend,
                    since_s=round(now - since, 1),
                )
            )
        order = {"failed": 0, "rests": 1, "offline": 2}
        return tuple(sorted(alerts, key=lambda alert: (order[alert.state], -alert.count, alert.code)))


def _doing(facts: DeviceFacts) -> str:
    """What a device with an open assignment does, by its last heartbeat."""
    if facts.doing in _WORKING:
        return _WORKING[facts.doing]
    if facts.doing != "working":
        return "wait"
    return _PHASES.get(facts.phase, "train" if facts.phase else "start")


def _common_text(members: Sequence[DeviceRow], code: str) -> str:
    texts = Counter(row.why.text for row in members if row.why is not None)
    text, count = texts.most_common(1)[0]
    return text if count == len(members) or count > len(members) // 2 else reasons.text_of(code)


def _fleet(rows: Sequence[DeviceRow]) -> FleetAnswer:
    counts = Counter(row.state for row in rows)
    measured = [(row.peak_bytes / row.budget_bytes, row) for row in rows if row.peak_bytes and row.budget_bytes]
    histogram = [0] * _BINS
    for share, _ in measured:
        histogram[min(_BINS - 1, int(share * (_BINS - 1)))] += 1
    nearest = heapq.nsmallest(_NEAREST, measured, key=lambda pair: (-pair[0], pair[1].name))
    return FleetAnswer(
        total=len(rows),
        counts={state: counts[state] for state in STATES if counts[state]},
        histogram=tuple(histogram),
        num_measured=len(measured),
        num_over=sum(share > 1 for share, _ in measured),
        nearest=tuple(row for _, row in nearest),
    )


def _still(row: DeviceRow) -> DeviceRow:
    """A device without what changes with the clock alone."""
    return replace(row, seen_s=None)


def _still_run(view: RunView | None) -> RunView | None:
    """A run without what changes with the clock alone."""
    if view is None:
        return None
    return replace(view, time_left_s=None, round_elapsed_s=None, round_left_s=None)
