"""What people see of a simulation: a header, a line per round and how long it will take, a table at the end.

Progress goes to standard error, and only to a terminal; results go to standard output.
"""

from __future__ import annotations

import contextlib
import itertools
import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from coordinator import columns
from coordinator.results.training_budgets import budgets_of
from coordinator.simulation.simulation import Setup
from edge_client.config.quantities import format_bytes
from edge_client.config.recommended import TRAINING, training_in_words
from edge_client.config.run_file import RunFile

__all__ = ["Progress", "grid", "header", "result"]

Json = dict[str, Any]

_BAR = 24
_EVERY_S = 0.1


class Progress:
    """Shows a run's progress on a terminal, and nothing elsewhere."""

    def __init__(self, file: RunFile) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, refresh_per_second=8, auto_refresh=False)
        self._num_rounds = file.stop.rounds
        self._pace = Pace(file.stop.rounds)
        self._shown_at = 0.0

    @contextlib.contextmanager
    def watching(self, lines: Sequence[str]) -> Iterator[None]:
        """Show progress during the run; `lines` are its header."""
        if not self._console.is_terminal:
            yield
            return
        self._print(*lines)
        with self._live:
            yield

    def moved(self, round_: int, done: int, asked: int) -> None:
        """Update the line at the bottom."""
        now = time.monotonic()
        self._pace.moved(round_, done, asked, now)
        if not self._console.is_terminal or now - self._shown_at < _EVERY_S:
            return
        self._shown_at = now
        filled = round(_BAR * done / asked) if asked else 0
        left = self._pace.left_s(now)
        time_left = f", about {columns.duration(left)} left" if left is not None else ""
        bar = "█" * filled + "·" * (_BAR - filled)
        text = f"round {round_} of {self._num_rounds} {bar} {done}/{asked} devices{time_left}"
        self._live.update(Text(text), refresh=True)

    def round_done(self, line: Json) -> None:
        """Print a line that stays."""
        if not self._console.is_terminal:
            return
        judged = "not judged" if line["accuracy"] is None else f"accuracy {line['accuracy']:.4f}"
        moved = f"{format_bytes(line['bytes_up'])} up, {format_bytes(line['bytes_down'])} down"
        left = self._pace.left_s(time.monotonic())
        time_left = f", about {columns.duration(left)} left" if left else ""
        self._print(f"round {line['round']:>4}: {judged}, {len(line['devices'])} devices, {moved}{time_left}")
        for failed in line["failures"]:
            self._print(f"            {failed['device']} took no part: {failed['code']}: {failed['detail']}")

    def _print(self, *lines: str) -> None:
        for line in lines:
            self._console.print(escape(line), highlight=False, soft_wrap=True)


class Pace:
    """Estimates the time left, from the assignments that were done since the first began."""

    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._began: tuple[float, int, int] | None = None  # when, round, assignments done in it by then
        self._num_done = 0
        self._round, self._done, self._asked = 0, 0, 0

    def moved(self, round_: int, done: int, asked: int, now: float) -> None:
        """Note how many assignments of a round are done."""
        if self._began is None:
            self._began = (now, round_, done)
        if round_ != self._round and self._round:
            self._num_done += self._asked
        self._round, self._done, self._asked = round_, done, asked

    def left_s(self, now: float) -> float | None:
        """Seconds until the end; None before any assignment was done."""
        if self._began is None:
            return None
        began, _, before = self._began
        num_done = self._num_done + self._done - before
        num_left = self._asked - self._done + (self._num_rounds - self._round) * self._asked
        return (now - began) / num_done * num_left if num_done > 0 else None


def header(setup: Setup, num_workers: int) -> list[str]:
    """The lines above a run: method, data, devices and budgets, folder."""
    file = setup.file
    section = file.simulate
    assert section is not None
    goal = max(file.devices.min, int(file.devices.fraction * section.devices + 1e-9))
    lines = [f"{file.method.name} on {file.what}: {file.stop.rounds} rounds, seed {file.seed}, {num_workers} workers"]
    if setup.data is not None:
        sizes = setup.data.sizes
        lines.append(
            f"{section.data}: {sum(sizes)} training samples over {section.devices} devices by {section.partition}, "
            f"{min(sizes)} to {max(sizes)} each; {setup.data.num_test} test samples"
        )
    lines.append(f"{goal} devices per round; training budgets: {_budgets(file)}")
    lines += textwrap.wrap(f"train: {training_in_words(_training(file))}", 100, subsequent_indent="  ")
    return [*lines, f"in {setup.folder}"]


def _training(file: RunFile) -> dict[str, object]:
    """The settings that decide how well the devices learn, whether the file named them or not."""
    section = file.train
    values = {key: getattr(section, key.replace("-", "_")) for key in TRAINING}
    return {**values, "epochs": "auto" if section.epochs is None else section.epochs}


def _budgets(file: RunFile) -> str:
    assert file.simulate is not None
    groups = itertools.groupby(sorted(budgets_of(file.simulate), key=lambda budget: budget or 0))
    counted = [(budget, len(list(same))) for budget, same in groups]
    return ", ".join(f"{num} x {format_bytes(budget)}" if budget is not None else "no limit" for budget, num in counted)


def result(data: Json) -> str:
    """`coordinator simulate` of one run."""
    accuracies = [data["accuracy_before"], *data["accuracy_per_round"]]
    shown = "  ".join("-" if value is None else f"{value:.4f}" for value in accuracies)
    pieces = [
        f"{data['method']} on {data['model']}, seed {data['seed']}, {data['devices']} devices: {_outcome(data)}",
        f"accuracy before round 1 and after each round:\n  {shown}",
        _groups(data["per_device"]),
        f"{format_bytes(data['bytes_up'])} up, {format_bytes(data['bytes_down'])} down, "
        f"{columns.duration(data['seconds'])}; model {data['model_sha256'][:16]}; in {data['out']}",
    ]
    return "\n\n".join(pieces)


def _outcome(data: Json) -> str:
    if data["accuracy"] is None:
        return f"{data['rounds']} rounds, not judged"
    return f"accuracy {data['accuracy']:.4f} after {data['rounds']} rounds (best {data['best_accuracy']:.4f})"


def _groups(devices: Sequence[Json]) -> str:
    """Devices with one budget and one plan are one row."""

    def same(row: Json) -> tuple[int, str]:
        return row["budget"] or 0, row["plan"] or row["failure"] or "never asked"

    rows = []
    for (budget, plan), members in itertools.groupby(sorted(devices, key=same), key=same):
        group = list(members)
        samples = [row["samples"] for row in group if row["samples"] is not None]
        peaks = [row["training_peak"] for row in group if row["training_peak"] is not None]
        rows.append(
            [
                len(group),
                format_bytes(budget) if budget else "no limit",
                plan,
                format_bytes(max(peaks)) if peaks else "-",
                f"{min(samples)} to {max(samples)}" if samples else "-",
                sum(row["rounds"] for row in group),
            ]
        )
    names = ["devices", "training budget", "plan", "training peak", "samples", "assignments"]
    return columns.align(names, rows, right=(0, 1, 3, 4, 5))


def grid(data: Json) -> str:
    """`coordinator simulate` of several methods or seeds."""
    rows = [
        [
            row["method"],
            row["seed"],
            "-" if row["accuracy"] is None else f"{row['accuracy']:.4f}",
            "-" if row["best_accuracy"] is None else f"{row['best_accuracy']:.4f}",
            row["rounds"],
            format_bytes(row["bytes_up"]),
            format_bytes(row["bytes_down"]),
            columns.duration(row["seconds"]),
            row["out"],
        ]
        for row in data["runs"]
    ]
    names = ["method", "seed", "accuracy", "best", "rounds", "up", "down", "time", "in"]
    return columns.align(names, rows, right=(1, 2, 3, 4, 5, 6, 7))
