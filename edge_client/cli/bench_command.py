"""`edge-client bench`: memory and time of training a model on this device inside several budgets.

Training everything at once is measured first: its time is the reference for the other plans. Each plan is tried in a
process of its own (`trial`); one that needs more than this device has is reported and not tried.
Covers: budgets, trials, table, JSON. Does not cover: the picture (`bench_plot`), the plans (`planning`).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.device import report
from edge_client.errors import NothingFitsError
from edge_client.measuring.plan_from_options import Subject, parse_size, read_subject
from edge_client.measuring.plan_search import PlanSearch
from edge_client.measuring.trial import Trial, TrialResult, run_trial
from edge_client.planning.cost import Shape, evaluation_batch, training_bytes
from edge_client.records import TrainingPlan, to_map

__all__ = ["Bench", "BudgetResult", "describe", "run", "to_json", "write"]

_SHARES = (2, 4, 8)  # of full training's memory
_REPEATS = 3
_NUM_SAMPLES = 1000  # that a device is thought to have, for the file of activations


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetResult:
    """One budget, its plan, and what that took."""

    budget_bytes: int
    plan: TrainingPlan | None  # None: nothing fits
    measured: TrialResult | None = None
    whole_seconds: float | None = None  # per sample, of training everything at once
    note: str = ""  # why there is no plan, or no measurement

    @property
    def seconds(self) -> float | None:
        """Seconds per sample and epoch: the shortest measurement, because nothing makes a machine faster than it is."""
        return min(self.measured.seconds) if self.measured is not None else None

    @property
    def relative_time(self) -> float | None:
        """The time relative to training everything at once."""
        return self.seconds / self.whole_seconds if self.seconds and self.whole_seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The results of a bench on one device."""

    what: Subject
    device: str
    device_bytes: int  # that a worker may use here
    base_bytes: int  # of a worker before it trains
    results: tuple[BudgetResult, ...]  # the first: everything at once


def run(options: argparse.Namespace) -> Bench:
    """Run the measurements that the options ask for; raises `InputError`, `MachineError`."""
    what = read_subject(options)
    typed = [parse_size("--budgets", text) for text in options.budgets.split(",")] if options.budgets else None
    show = _Progress()
    show(f"measuring the units of {what.run.what}, once for this kind of machine")
    fitting = what.search(num_samples=_NUM_SAMPLES, disk_bytes=durable.free_bytes(Path.cwd()) // 2)
    device = report.report_system(Path("/"), None)
    bench = _Bencher(what, fitting, device.budget_bytes, show)
    results = bench.measure(typed)
    show("")
    return Bench(
        what=what,
        device=device.model or platform.machine(),
        device_bytes=device.budget_bytes,
        base_bytes=next(
            (result.measured.base_bytes for result in results if result.measured), fitting.rows.worker_bytes
        ),
        results=results,
    )


class _Progress:
    """Shows progress in one line that is overwritten, on a terminal only."""

    def __init__(self) -> None:
        self._shown = 0

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r" + text.ljust(self._shown) + ("" if text else "\r"))
            sys.stderr.flush()
            self._shown = len(text)


class _Bencher:
    """Measures one budget after the other; equal plans are measured once."""

    def __init__(self, what: Subject, fitting: PlanSearch, device_bytes: int, show: _Progress) -> None:
        self._what, self._fitting, self._device_bytes, self._show = what, fitting, device_bytes, show
        self._known: dict[TrainingPlan, tuple[TrialResult | None, str]] = {}

    def measure(self, typed: Sequence[int] | None) -> tuple[BudgetResult, ...]:
        """Measure training everything at once, then each budget from the largest to the smallest."""
        workload = self._fitting.workload()
        whole = training_bytes(self._fitting.rows, workload, Shape(microbatch=workload.batch))
        budgets = sorted(set(typed if typed is not None else self._ladder(whole)), reverse=True)
        results = []
        for number, budget in enumerate([whole, *budgets]):
            self._show(f"[{number}/{len(budgets)}] training inside {format_bytes(budget)}")
            results.append(self._result(budget))
        reference = results[0].seconds
        return tuple(replace(result, whole_seconds=reference) for result in results)

    def _ladder(self, whole: int) -> Iterator[int]:
        """The budgets to measure: shares of full training's memory, and last the smallest budget that has a plan."""
        least = self._least()
        yield from (budget for share in _SHARES if (budget := whole // share) > least)
        yield least

    def _least(self) -> int:
        try:
            return self._fitting.choose(0, 0).chosen.training_bytes
        except NothingFitsError as error:
            if error.least_bytes is None:
                raise
            return error.least_bytes

    def _result(self, budget_bytes: int) -> BudgetResult:
        try:
            plan = self._fitting.choose(self._fitting.rows.worker_bytes, budget_bytes).plan
        except NothingFitsError:
            least = format_bytes(self._least())
            return BudgetResult(
                budget_bytes=budget_bytes, plan=None, note=f"nothing fits: training needs {least} at least"
            )
        key = replace(plan, budget_bytes=0, predicted_bytes=0, training_bytes=0)
        if key not in self._known:
            self._known[key] = self._tried(plan)
        measured, note = self._known[key]
        return BudgetResult(budget_bytes=budget_bytes, plan=plan, measured=measured, note=note)

    def _tried(self, plan: TrainingPlan) -> tuple[TrialResult | None, str]:
        """The memory and time of a plan, or the reason why it was not tried."""
        room = self._device_bytes - plan.predicted_bytes
        if room < 0:
            return None, f"not tried: {format_bytes(plan.predicted_bytes)} with the process, more than this device has"
        trial = Trial(
            run=self._what.run,
            input_shape=self._what.input_shape,
            task=self._what.task,
            plan=plan,
            evaluated=evaluation_batch(self._fitting.rows, plan.training_bytes, plan.microbatch),
            repeats=_REPEATS,
        )
        try:
            return run_trial(trial), ""
        except MemoryError as error:
            return None, f"ran out of memory: {error}"


def to_json(bench: Bench) -> dict[str, Any]:
    """The results as `--format json` prints them and `bench.json` stores them."""
    run = bench.what.run
    return {
        "model": run.what,
        "input": list(bench.what.input_shape),
        "classes": len(run.classes),
        "method": run.method.name,
        "train": {"batch": run.train.batch, "optimizer": run.train.optimizer, "momentum": run.train.momentum},
        "device": {"model": bench.device, "budget_bytes": bench.device_bytes},
        "base_bytes": bench.base_bytes,
        "plans": [_to_map(result) for result in bench.results],
    }


def _to_map(result: BudgetResult) -> dict[str, Any]:
    return {
        "budget_bytes": result.budget_bytes,
        "plan": to_map(result.plan) if result.plan is not None else None,
        "predicted_bytes": result.plan.training_bytes if result.plan is not None else None,
        "measured_bytes": result.measured.peak_bytes if result.measured is not None else None,
        "seconds_per_sample": result.seconds,
        "seconds_per_epoch_of_1000": round(1000 * result.seconds, 3) if result.seconds else None,
        "relative_time": result.relative_time,
        "note": result.note,
    }


def describe(bench: Bench) -> str:
    """The results as a table."""
    run = bench.what.run
    rows: list[tuple[str, ...]] = [("budget", "plan", "predicted", "measured", "of budget", "time", "")]
    rows += [_row(result) for result in bench.results]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = (1, 6)
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    head = f"{run.what}, batch {run.train.batch}, {run.method.name}, on {bench.device}"
    seconds = bench.results[0].seconds if bench.results else None
    first = f", which takes {1000 * seconds:.2g} s for 1,000 samples" if seconds else ""
    subtitle = f"what training adds to a worker of {format_bytes(bench.base_bytes)}; time of an epoch against the first"
    subtitle += first
    return "\n".join([head, subtitle, *(line.rstrip() for line in lines)])


def _row(result: BudgetResult) -> tuple[str, ...]:
    plan, measured, time = result.plan, result.measured, result.relative_time
    return (
        format_bytes(result.budget_bytes),
        plan.describe() if plan is not None else "-",
        format_bytes(plan.training_bytes) if plan is not None else "-",
        format_bytes(measured.peak_bytes) if measured is not None else "-",
        f"{100 * measured.peak_bytes / result.budget_bytes:.0f} %" if measured is not None else "-",
        f"{time:.2f}" if time is not None else "-",
        result.note,
    )


def write(bench: Bench, folder: Path) -> list[str]:
    """Write `bench.json` and `bench.png`; returns messages about them. Raises `MachineError`."""
    with durable.disk_errors(f"writing into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(to_json(bench), indent=1) + "\n", encoding="utf-8")
        try:
            from edge_client.cli import bench_plot  # matplotlib
        except ModuleNotFoundError:
            hint = "no picture: matplotlib is missing; pip install 'fedfit[coordinator]'"
            return [f"wrote {folder / 'bench.json'}", hint]
        (folder / "bench.png").write_bytes(bench_plot.draw(bench))
    return [f"wrote {folder / 'bench.json'} and bench.png"]
