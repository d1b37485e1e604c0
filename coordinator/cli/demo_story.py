"""The demo's lines in a terminal: plans, rounds, the device that is killed and comes back; at most 24 of 80 columns.

Covers: the text, and when each line is printed. Does not cover: the processes (`demo`). Lines go to standard error, in
colour where that is a terminal; standard output has the result alone.
"""

from __future__ import annotations

import contextlib
import os
import time
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status

from coordinator.cli import follow
from coordinator.control_messages import DeviceLine, ListDevices, ShowRun
from coordinator.run_details import RunDetails, RunDevice
from edge_client.config.quantities import format_bytes
from edge_client.errors import RunFailedError
from edge_client.records import TrainingPlan

__all__ = ["Interruption", "Story", "plan_in_words"]

_POLL_S = 0.2
_MAX_ABANDONED = 3
_INDENT = " " * 2


class Interruption:
    """One device is killed while it trains, and started again after a while."""

    def __init__(
        self, device: str, *, round: int, pause_s: float, kill: Callable[[], None], start: Callable[[], None]
    ) -> None:
        """The device is killed in `round`, or in a later one if it was never seen training there."""
        self.device = device
        self._round = round
        self._pause_s = pause_s
        self._kill = kill
        self._start = start
        self._killed_at: float | None = None
        self._is_started = False
        self._is_back = False

    def step(self, round_: int, line: DeviceLine | None, story: Story) -> None:
        """Do what is due: kill it, start it, or notice that it is back at work."""
        now = time.monotonic()
        if self._killed_at is None:
            if round_ >= self._round and line is not None and line.phase == "train":
                self._kill()
                self._killed_at = now
                story.event(f"{self.device} killed (kill -9) while it trained", "red")
        elif not self._is_started:
            if now - self._killed_at >= self._pause_s:
                self._start()
                self._is_started = True
        elif not self._is_back and line is not None and line.online and line.phase:
            self._is_back = True
            story.event(f"{self.device} is back and continues round {round_}", "green")

    @property
    def is_complete(self) -> bool:
        """Whether it was killed and has come back."""
        return self._is_back


class Story:
    """Tells what happens, as it happens."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._began = time.monotonic()
        self._told: set[int] = set()
        self._has_plans = False

    def title(self) -> None:
        """The first line."""
        self._print("fedfit demo: four devices with four memory budgets train one model.", "bold")

    def page(self, url: str) -> None:
        """The address of the live page, which opens by itself where somebody sits before a screen."""
        self._print(f"Live page: {url}")
        self._print("")
        has_screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
        if self._console.is_terminal and has_screen:
            webbrowser.open(url)

    def stay_open(self, check_processes: Callable[[], None]) -> None:
        """Wait until somebody has seen enough of the live page."""
        self._print("")
        self._print("The live page stays open; Ctrl-C ends the demo.")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                check_processes()
                time.sleep(_POLL_S)

    def waiting(self, text: str) -> Status:
        """A line that stands below the others until something happens; only on a terminal."""
        return self._console.status(text, spinner="dots")

    def event(self, text: str, style: str = "") -> None:
        """A line with the seconds since the beginning."""
        seconds = time.monotonic() - self._began
        self._print(f"{seconds:4.0f} s  {text}", style)

    def follow(
        self,
        state_dir: Path,
        run: str,
        *,
        interruption: Interruption | None,
        check_processes: Callable[[], None],
        lacks: Callable[[], frozenset[str]],
    ) -> RunDetails:
        """Print each round until the run has ended; `lacks` names the devices that are down on purpose."""
        with self.waiting("four devices measure their memory and plan") as status:
            while True:
                check_processes()
                data = follow.ask(state_dir, ShowRun(run=run, newest=1000))
                _check_rounds(data)
                self._show(data)
                if follow.is_over(data):
                    return data
                lines = {line.id: line for line in follow.ask(state_dir, ListDevices()).devices}
                status.update(_now(data, lines, lacks()))
                if interruption is not None and data.progress is not None:
                    interruption.step(data.progress.round, lines.get(interruption.device), self)
                time.sleep(_POLL_S)

    def _show(self, data: RunDetails) -> None:
        updates = [device for device in data.devices if device.plan_details is not None]
        if not self._has_plans and data.round >= 1 and updates:
            self._has_plans = True
            self._plans(updates)
        scored = {model.version for model in data.models if model.score is not None}
        for result in data.evaluations:
            if result.version in scored - self._told and result.version > 0:
                self._told.add(result.version)
                devices = f"{result.num_devices} of {len(data.devices)} devices"
                self.event(f"round {result.version} of {data.rounds}   accuracy {result.accuracy:.2f}   {devices}")

    def _plans(self, devices: Sequence[RunDevice]) -> None:
        """The plan of each device, the largest budget first."""
        self._print(f"{_INDENT}{'device':<13}{'budget':<8}{'plan':<39}{'predicted':>9}", "bold")
        for device in sorted(devices, key=lambda device: -device.budget_bytes):
            assert device.plan_details is not None
            plan = plan_in_words(device.plan_details)
            budget, predicted = format_bytes(device.budget_bytes), format_bytes(device.predicted_bytes)
            self._print(f"{_INDENT}{device.id:<13}{budget:<8}{plan:<39}{predicted:>9}")
        self._print("")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)


def plan_in_words(plan: TrainingPlan) -> str:
    """A plan as a newcomer reads it."""
    if plan.groups:
        words = f"{len(plan.groups)} groups of blocks, in turn"
    elif plan.recompute:
        words = "whole model, recomputed activations"
    else:
        words = "whole model"
    return words


def _now(data: RunDetails, lines: Mapping[str, DeviceLine], lacking: frozenset[str]) -> str:
    """What each device does, in one line."""
    doing = []
    for name in sorted(lines):
        line = lines[name]
        share = f" {100 * line.step // line.total} %" if line.total and line.phase == "train" else ""
        doing.append(f"{name} {'down' if name in lacking else (line.phase or line.state or 'joins') + share}")
    return f"round {min(data.round + 1, data.rounds)}: {', '.join(doing)}"[:78]


def _check_rounds(data: RunDetails) -> None:
    """A fleet tries again and again; a demo gives up and reports why."""
    abandoned = [row for row in data.round_rows if row.state == "ABANDONED"]
    if len(abandoned) > _MAX_ABANDONED:
        last = abandoned[-1]
        raise RunFailedError(f"round {last.number} was abandoned again and again: {last.reason}")
