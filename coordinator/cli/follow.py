"""Watching a run until it ends: results and problems as lines, and on a terminal what each device does right now.

Only watches: whoever stops looking does not stop the run. Progress goes to standard error.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from coordinator import columns, control
from coordinator.cli import tables
from coordinator.control_messages import DeviceList, ListDevices, Request, ShowRun
from coordinator.run_check import guessing_warning
from coordinator.run_details import RunDetails, RunLine, VersionResult
from edge_client.config.quantities import format_bytes
from edge_client.errors import MachineError, RunFailedError

__all__ = ["ask", "check_model", "follow", "is_over"]

_POLL_S = 0.5
_SHOWN_EVALUATIONS = 1000
_SHOWN_DEVICES = 50  # as many as fit on a screen, by name
_PATIENCE_S = 120.0  # a coordinator that is started again comes back within this time
_BAR = 20

A = TypeVar("A")


def is_over(data: RunLine) -> bool:
    """Whether a run has ended, however."""
    return data.state not in ("queued", "running")


def check_model(data: RunLine) -> None:
    """Raise `RunFailedError` if an ended run has no trained model."""
    if data.state == "failed" or data.round == 0:
        where = f"after round {data.round}, whose model is kept" if data.round else "without a model"
        raise RunFailedError(f"run {data.run} {data.state} {where}: {data.reason}")


def follow(state_dir: Path, run: str, *, check: Callable[[RunDetails], None] = lambda data: None) -> RunDetails:
    """Show progress until `run` has ended; returns its last details. `check` sees every answer and may raise."""
    console = Console(stderr=True)
    progress = _Progress(console)
    live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
    with live or contextlib.nullcontext():
        while True:
            data = _look(state_dir, run, progress)
            check(data)
            progress.show(data)
            if is_over(data):
                return data
            if live is not None:
                live.update(_now(data, ask(state_dir, ListDevices(limit=_SHOWN_DEVICES), console=console)))
            time.sleep(_POLL_S)


def ask(state_dir: Path, request: Request[A], *, console: Console | None = None) -> A:
    """The coordinator's answer; waits for one that is killed meanwhile, or being started again."""
    until, is_announced = time.monotonic() + _PATIENCE_S, False
    console = console or Console(stderr=True)
    while True:
        try:
            return control.ask(state_dir, request)
        except MachineError:
            if time.monotonic() > until:
                raise
            if not is_announced:
                console.print("the coordinator does not answer; waiting for it to come back", highlight=False)
            is_announced = True
            time.sleep(_POLL_S)


def _look(state_dir: Path, run: str, progress: _Progress) -> RunDetails:
    """What is new about the run; all of it when it is over."""
    data = ask(state_dir, ShowRun(run=run, after=progress.version), console=progress.console)
    if is_over(data):
        data = ask(state_dir, ShowRun(run=run, newest=_SHOWN_EVALUATIONS), console=progress.console)
    return data


class _Progress:
    """Prints what is new about a run since it was last shown."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.version = -1  # the newest whose score was shown
        self._versions: set[int] = set()
        self._failures: set[tuple[str, int, int]] = set()
        self._waiting = ""
        self._has_warned = False
        self._first: tuple[float, int] | None = None  # when and at which version the watching began

    def show(self, data: RunDetails) -> None:
        """Print what is new."""
        if self._first is None:
            self._first = (time.monotonic(), data.round)
        scored = {model.version for model in data.models if model.score is not None}
        for result in data.evaluations:
            if result.version in scored - self._versions:
                self._versions.add(result.version)
                self.version = max(self.version, result.version)
                self._print(self._result(result, data))
        for failure in reversed(data.failures):
            key = (failure.device, failure.round, failure.attempt)
            if key not in self._failures:
                self._failures.add(key)
                self._print(tables.failure(failure))
        self._warn(data)
        waiting = self._waits(data)
        if waiting and waiting != self._waiting:
            self._print(waiting)
        self._waiting = waiting

    def _warn(self, data: RunDetails) -> None:
        """Once, after five results that are hardly better than guessing."""
        scores = [model.score for model in data.models if model.score is not None and model.version > 0]
        warning = guessing_warning(scores, len(data.file.classes), data.file.stop.metric)
        if warning and not self._has_warned:
            self._has_warned = True
            self._print(f"warning: {warning}")

    def _print(self, line: str) -> None:
        self.console.print(escape(line), highlight=False, soft_wrap=True)

    def _result(self, result: VersionResult, data: RunDetails) -> str:
        version = result.version
        name = "before round 1" if version == 0 else f"after round {version}"
        values = f"accuracy {result.accuracy:.4f}, macro-F1 {result.macro_f1:.4f}, loss {result.loss:.4f}"
        left = self._time_left(data)
        by_server = data.file.evaluate.on != "devices"
        judges = "on the server" if by_server else f"{result.num_devices} devices"
        return f"{name:>15}: {values} ({judges}, {result.num_samples} samples){left}"

    def _time_left(self, data: RunDetails) -> str:
        """From the pace since the watching began; nothing is promised before a whole round was seen."""
        assert self._first is not None
        begun, version = self._first
        done, left = data.round - version, data.rounds - data.round
        if done < 1 or left < 1:
            return ""
        return f", at most {columns.duration((time.monotonic() - begun) / done * left)} left"

    @staticmethod
    def _waits(data: RunDetails) -> str:
        if data.state == "queued" and data.waits_for:
            return f"{data.run} waits for {data.waits_for}, which is not over yet"
        progress = data.progress
        if not progress or not progress.waiting:
            return ""
        barred = [f"{c.id}: {c.detail or c.code}" for c in progress.candidates if c.code]
        return f"{data.run} {progress.waiting}" + (f" ({'; '.join(barred)})" if barred else "")


def _now(data: RunDetails, listed: DeviceList) -> Table:
    """What each device does."""
    progress = data.progress
    phase = f", {progress.phase.lower()}" if progress else ""
    number = min(data.round + 1, data.rounds)
    table = Table(title=f"round {number} of {data.rounds}{phase}", title_justify="left")
    for name in ("device", "budget", "doing", "progress", "loss"):
        table.add_column(name)
    for row in listed.devices:
        share = row.step / row.total if row.total else 0.0
        budget = format_bytes(row.budget_bytes) if row.budget_bytes else ""
        loss = f"{row.loss:.3f}" if row.phase == "train" and row.loss is not None else ""
        doing = row.phase or row.state or ("joins" if row.online else "offline")
        table.add_row(row.id, budget, escape(doing), f"{'█' * round(_BAR * share):<{_BAR}}", loss)
    if listed.next:
        states = ", ".join(f"{count} {state}" for state, count in sorted(listed.counts.items()))
        table.caption = f"the first {len(listed.devices)} of {listed.num_matching} devices: {states}"
    return table
