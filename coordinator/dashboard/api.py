"""The JSON API below /api/v1: what each address answers.

Covers: the routes and their answers. Does not cover: who may ask (`server`), the parts of the answers
(`live`, `history`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from coordinator.columns import plain
from coordinator.dashboard import openapi
from coordinator.dashboard.answers import (
    ActionLine,
    CompareAnswer,
    ComparedRun,
    Curve,
    DeviceAnswer,
    DeviceFailureAnswer,
    DevicePage,
    DeviceRound,
    DeviceRounds,
    DeviceRow,
    Live,
    LogLineAnswer,
    LogPage,
    RoundLease,
    RoundPage,
    RunAnswer,
    RunPage,
    SettingsAnswer,
    Span,
)
from coordinator.dashboard.events import MAX_STREAMS, Events
from coordinator.dashboard.history import History, RunHistory
from coordinator.dashboard.http import HttpError, HttpResponse
from coordinator.dashboard.live import STATES, LiveModel
from coordinator.dashboard.log_ring import LogRing
from coordinator.dashboard.picture import WATCH_S
from coordinator.dashboard.routes import Call, Param, Route
from coordinator.store.rows import LeaseRow
from coordinator.timeline import device_spans

__all__ = ["Api", "known_run"]

T = TypeVar("T")

_SORTS = (
    "name",
    "-name",
    "state",
    "-state",
    "memory",
    "-memory",
    "accuracy",
    "-accuracy",
    "seen",
    "-seen",
    "budget",
    "-budget",
)
_STATE_ORDER = {state: number for number, state in enumerate(("failed", "rests", "offline", *STATES[:8]))}
_AFTER = Param(name="after", about="the `next` of the page before", low=0, high=10_000_000, default=0)


class Api:
    """Answers what is asked of the API; used in the loop of the page's thread."""

    def __init__(
        self,
        *,
        live: LiveModel,
        history: History,
        events: Events,
        logs: LogRing,
        brokers: tuple[str, ...],
        watch: Callable[[], None],
        is_valid: Callable[[Call], bool],
        addresses: tuple[str, ...],
    ) -> None:
        """`watch` keeps the picture fresh for a while; `is_valid` tells whether a viewer may still look."""
        self._live = live
        self._history = history
        self._events = events
        self._logs = logs
        self._brokers = brokers
        self._watch = watch
        self._is_valid = is_valid
        self._addresses = addresses
        self.routes = self._routes()
        self.documented = self.routes  # the server adds those of others

    def _routes(self) -> tuple[Route, ...]:
        limit = Param(name="limit", about="how many at most", low=1, high=200, default=50)
        return (
            Route(method="GET", path="live", handle=self.live, answer=Live),
            Route(
                method="GET",
                path="devices",
                handle=self.devices,
                answer=DevicePage,
                params=(
                    _AFTER,
                    limit,
                    Param(name="state", about="only devices in this state", choices=STATES),
                    Param(name="label", about="only devices with this label, KEY=VALUE"),
                    Param(name="q", about="only devices whose name contains this"),
                    Param(name="sort", about="the order; - turns it round", choices=_SORTS, default="name"),
                ),
            ),
            Route(method="GET", path="devices/{name}", handle=self.device, answer=DeviceAnswer),
            Route(
                method="GET",
                path="devices/{name}/rounds",
                handle=self.device_rounds,
                answer=DeviceRounds,
                params=(Param(name="run", about="default: the newest run"), limit),
            ),
            Route(
                method="GET",
                path="runs",
                handle=self.runs,
                answer=RunPage,
                params=(Param(name="before", about="the `next` of the page before", low=0, high=1 << 60), limit),
            ),
            Route(method="GET", path="runs/{run}", handle=self.run, answer=RunAnswer),
            Route(method="GET", path="runs/{run}/curve", handle=self.curve, answer=Curve),
            Route(
                method="GET",
                path="runs/{run}/rounds/{number}",
                handle=self.round,
                answer=RoundPage,
                params=(_AFTER, limit),
            ),
            Route(
                method="GET",
                path="compare",
                handle=self.compare,
                answer=CompareAnswer,
                params=(Param(name="run", about="up to 8 runs", repeats=True, high=8),),
            ),
            Route(
                method="GET",
                path="logs",
                handle=self.logs,
                answer=LogPage,
                params=(
                    Param(name="before", about="only older lines than this number", low=1, high=1 << 60),
                    Param(
                        name="source",
                        about="of the coordinator, or shared by devices with their failures",
                        choices=("coordinator", "devices"),
                        default="coordinator",
                    ),
                    Param(name="device", about="only lines about this device"),
                    Param(
                        name="level", about="this level and above", choices=("info", "warning", "error"), default="info"
                    ),
                    Param(name="limit", about="how many at most", low=1, high=500, default=100),
                ),
            ),
            Route(method="GET", path="settings", handle=self.settings, answer=SettingsAnswer),
            Route(
                method="GET",
                path="events",
                handle=self.events,
                answer=None,
                kind="text/event-stream",
                params=(Param(name="since", about="the number of the last event that was seen", low=0, high=1 << 60),),
            ),
            Route(method="GET", path="schema", handle=self.schema, answer=dict),
        )

    # looking

    async def _fresh(self) -> None:
        """Wait for a whole picture; it stays fresh while somebody asks."""
        self._live.forget_if_old(WATCH_S)
        self._watch()
        try:
            await asyncio.wait_for(self._live.ready.wait(), 20)
        except (TimeoutError, asyncio.TimeoutError):
            raise HttpError(503, "busy", "the coordinator is busy; try again in a moment") from None

    async def live(self, call: Call) -> Live:
        """How things stand: the run, the fleet, the round, what needs somebody."""
        await self._fresh()
        return self._live.live()

    async def devices(self, call: Call) -> DevicePage:
        """Devices that match, a page at a time."""
        await self._fresh()
        everything = list(self._live.rows())
        text, label = (call.query["q"] or "").lower(), call.query["label"]
        key, _, value = (label or "").partition("=")
        chosen = [
            row
            for row in everything
            if (not text or text in row.name.lower())
            and (call.query["state"] in (None, row.state))
            and (not label or row.labels.get(key) == value)
        ]
        _sort(chosen, str(call.query["sort"]))
        begin, end = call.query["after"], call.query["after"] + call.query["limit"]
        labels = Counter(f"{key}={value}" for row in everything for key, value in row.labels.items())
        return DevicePage(
            items=tuple(chosen[begin:end]),
            next=end if end < len(chosen) else None,
            total=len(chosen),
            all=len(everything),
            labels=tuple(label for label, _ in sorted(labels.most_common(50))),
        )

    async def device(self, call: Call) -> DeviceAnswer:
        """A device with its last failures and its part of the open round."""
        await self._fresh()
        row, facts = self._live.row(call.path["name"]), self._live.device_facts(call.path["name"])
        if row is None or facts is None:
            raise HttpError(404, "unknown_device", f"there is no device {call.path['name']!r}")
        run, failures = self._live.run, self._history.store.leases.device_failures(row.name, 5)
        spans, elapsed = self._live.round_of(row.name)
        return DeviceAnswer(
            row=row,
            client=plain(facts.client),
            kind=facts.kind,
            samples=run.figures[row.name].num_samples if run is not None and row.name in run.figures else 0,
            failures=tuple(_failure(lease) for lease in failures),
            spans=tuple(span for span in spans if isinstance(span, Span)),
            round_elapsed_s=elapsed,
        )

    async def device_rounds(self, call: Call) -> DeviceRounds:
        """A device's updates in a run: prediction, peak and budget."""
        run_id = call.query["run"] or self._history.newest_run()
        rows = self._history.device_rounds(run_id, call.path["name"], call.query["limit"])
        items = (
            DeviceRound(round=number, predicted_bytes=predicted, peak_bytes=peak, budget_bytes=budget, seconds=seconds)
            for number, predicted, peak, budget, seconds in rows
        )
        return DeviceRounds(run=run_id, device=call.path["name"], items=tuple(items))

    async def runs(self, call: Call) -> RunPage:
        """Runs, newest first."""
        items, more = self._history.runs(call.query["before"], call.query["limit"])
        return RunPage(items=items, next=more)

    async def run(self, call: Call) -> RunAnswer:
        """A run: how it stands, its results, its file, what failed."""
        run = self._known_run(call)
        view = self._live.view_of(run)
        failures = self._history.store.leases.run_failures(run.row.id, 20)
        return RunAnswer(
            view=view,
            curve=self._history.curve(run),
            file=run.row.file,
            created_s=run.row.created_s,
            num_models=run.version + 1,
            failures=tuple(_failure(lease) for lease in failures),
            failed_devices=tuple(lease.device for lease in failures),
        )

    async def curve(self, call: Call) -> Curve:
        """A run's results by version."""
        run = self._known_run(call)
        return Curve(run=run.row.id, points=self._history.curve(run))

    async def round(self, call: Call) -> RoundPage:
        """The assignments of a round's newest attempt, and where their time went."""
        run, number = self._known_run(call), int(call.path["number"]) if call.path["number"].isdigit() else -1
        attempts = [row for row in self._history.rounds(run.row.id, 100_000) if row.number == number]
        if not attempts:
            raise HttpError(404, "unknown_round", f"run {run.row.id!r} has no round {call.path['number']!r}")
        row = attempts[-1]
        after, limit = call.query["after"], call.query["limit"]
        leases = self._history.leases(row.run, row.number, row.attempt, after, limit + 1)
        return RoundPage(
            run=row.run,
            number=row.number,
            attempt=row.attempt,
            state=row.state,
            items=tuple(_round_lease(lease) for lease in leases[:limit]),
            next=leases[limit - 1].issue if len(leases) > limit else None,
        )

    async def compare(self, call: Call) -> CompareAnswer:
        """Runs side by side: their curves, their bytes, their highest peaks."""
        rows = {row.run: row for row in self._history.runs(None, 1000)[0]}
        compared = []
        for run_id in dict.fromkeys(call.query["run"]):
            run = self._history.run(run_id)
            if run is None or run_id not in rows:
                raise HttpError(404, "unknown_run", f"there is no run {run_id!r}")
            shares = [f.peak_bytes / f.budget_bytes for f in run.figures.values() if f.budget_bytes and f.peak_bytes]
            peaks = [f.peak_bytes for f in run.figures.values() if f.peak_bytes]
            compared.append(
                ComparedRun(
                    row=rows[run_id],
                    points=self._history.curve(run),
                    bytes_up=run.bytes_up,
                    bytes_down=run.bytes_down,
                    highest_share=max(shares, default=None),
                    highest_peak_bytes=max(peaks, default=None),
                )
            )
        return CompareAnswer(runs=tuple(compared))

    async def logs(self, call: Call) -> LogPage:
        """Log lines, newest first."""
        limit, before = call.query["limit"], call.query["before"]
        device = call.query["device"]
        if call.query["source"] == "devices":
            return self._shared_logs(before or 1 << 60, limit, device)
        levels = {"info": ("info", "warning", "error", "critical"), "warning": ("warning", "error", "critical")}
        allowed, now = levels.get(call.query["level"], ("error", "critical")), time.time()
        lines = [
            line
            for line in reversed(self._logs.lines())
            if (before is None or line.number < before) and line.level in allowed and device in (None, line.device)
        ]
        items = tuple(
            LogLineAnswer(
                number=line.number,
                age_s=round(max(0.0, now - line.at_s), 1),
                level=line.level,
                device=line.device,
                run=line.run,
                round=line.round,
                text=plain(line.text),
            )
            for line in lines[:limit]
        )
        return LogPage(items=items, next=items[-1].number if len(lines) > limit else None)

    def _shared_logs(self, before: int, limit: int, device: str | None) -> LogPage:
        items: list[LogLineAnswer] = []
        leases = [lease for lease in self._history.shared_logs(before, limit) if device in (None, lease.device)]
        for lease in leases:
            items += [
                LogLineAnswer(
                    number=lease.issue,
                    age_s=None,
                    level="error",
                    device=lease.device,
                    run=lease.run,
                    round=lease.round,
                    text=plain(line)[:1000],
                )
                for line in lease.log
            ]
        return LogPage(items=tuple(items[:limit]), next=leases[-1].issue if len(leases) == limit else None)

    async def settings(self, call: Call) -> SettingsAnswer:
        """Who may look, what was done, and where the coordinator is."""
        access, now = self._history.store.page_access, time.time()
        tokens = (
            {"name": row.name, "role": row.role, "used_s": round(now - row.used_s) if row.used_s else None}
            for row in access.tokens()
        )
        actions = (
            ActionLine(age_s=round(max(0.0, now - row.at_s)), name=row.name, action=row.action, detail=row.detail)
            for row in access.actions(50)
        )
        return SettingsAnswer(
            tokens=tuple(tokens),
            actions=tuple(actions),
            viewers=self._events.num_viewers,
            addresses=self._addresses,
            brokers=self._brokers,
        )

    async def events(self, call: Call) -> HttpResponse:
        """Server-sent events: run, round, fleet, devices, evaluation, alerts, log, job, resync, bye."""
        if self._events.num_viewers >= MAX_STREAMS:
            raise HttpError(503, "too_many_viewers", f"{MAX_STREAMS} streams are open already; close a tab")
        await self._fresh()
        last = call.request.header("last-event-id")
        since = int(last) if last.isdigit() and len(last) < 19 else call.query["since"]

        def still_valid() -> bool:
            self._watch()
            return self._is_valid(call)

        return HttpResponse(content_type="text/event-stream", stream=self._watched(since, still_valid))

    async def _watched(self, since: int | None, still_valid: Callable[[], bool]) -> AsyncIterator[bytes]:
        stream = self._events.stream(since, still_valid)
        try:
            async for piece in stream:
                self._watch()
                yield piece
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def schema(self, call: Call) -> dict[str, Any]:
        """This API as an OpenAPI document."""
        return openapi.document(self.documented)

    # helpers

    def _known_run(self, call: Call) -> RunHistory:
        return known_run(self._history, call.path["run"])


def known_run(history: History, run_id: str) -> RunHistory:
    """A run, or the newest one as `latest`; raises `HttpError` 404."""
    run = history.run(history.newest_run() if run_id == "latest" else run_id)
    if run is None:
        raise HttpError(404, "unknown_run", f"there is no run {run_id!r}")
    return run


def _failure(lease: LeaseRow) -> DeviceFailureAnswer:
    return DeviceFailureAnswer(
        run=lease.run,
        round=lease.round,
        state=lease.state,
        code=lease.code,
        detail=plain(lease.detail),
        log=tuple(plain(line) for line in lease.log),
    )


def _round_lease(lease: LeaseRow) -> RoundLease:
    spans = device_spans(lease.moments, lease.phases)
    return RoundLease(
        device=lease.device,
        state=lease.state,
        code=lease.code,
        detail=plain(lease.detail),
        spans=tuple(Span(name=span.name, begins_s=span.begins_s, ends_s=span.ends_s) for span in spans),
    )


def _sort(rows: list[DeviceRow], by: str) -> None:
    key, is_reversed = by.lstrip("-"), by.startswith("-")
    nothing = float("inf") if not is_reversed else float("-inf")  # what is not known comes last, either way

    def number(value: float | None) -> float:
        return nothing if value is None else value

    def share(row: DeviceRow) -> float | None:
        return row.peak_bytes / row.budget_bytes if row.peak_bytes and row.budget_bytes else None

    keys: dict[str, Callable[[DeviceRow], Any]] = {
        "name": lambda row: row.name,
        "state": lambda row: _STATE_ORDER.get(row.state, 99),
        "memory": lambda row: number(share(row)),
        "accuracy": lambda row: number(row.accuracy),
        "seen": lambda row: number(row.seen_s),
        "budget": lambda row: number(row.budget_bytes),
    }
    rows.sort(key=lambda row: row.name)
    rows.sort(key=keys[key], reverse=is_reversed)
