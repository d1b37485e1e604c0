"""Ways to train a few known models: what each is predicted to take, and what it takes in a process of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.measuring.calibration import calibrated, job_for
from edge_client.measuring.plan_search import PlanSearch
from edge_client.measuring.trial import Trial, TrialResult, run_trial
from edge_client.methods import registry as methods
from edge_client.planning.cost import Shape, evaluation_batch, training_bytes
from edge_client.planning.rows import ModelRows
from edge_client.records import TrainingPlan

__all__ = ["MODELS", "OPTIMIZERS", "Case", "cache", "fitting_of", "plan_of", "predicted", "rows_of", "run_of", "trial"]

Json = dict[str, Any]

# what a run file says of each
MODELS: dict[str, Json] = {
    "preresnet20": {"name": "preresnet20", "input": [3, 32, 32]},
    "preresnet20-rs": {"name": "preresnet20", "input": [3, 32, 32], "track-running-stats": True},
    "resnet18": {"name": "resnet18", "input": [3, 32, 32], "small-stem": True},
    "vit": {"name": "vit-t-16", "input": [3, 32, 32], "patch": 4},
    "mlp": {"name": "mlp", "input": [3, 32, 32], "hidden": [1024, 1024, 1024]},
    "small-cnn": {"name": "small-cnn", "input": [1, 28, 28]},
}
OPTIMIZERS: dict[str, Json] = {
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9},
    "adam": {"optimizer": "adam"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train; `groups` are sizes of consecutive groups of blocks, the last one repeated to the end."""

    model: str
    batch: int
    optimizer: str = "sgd"
    method: str = "fedavg"
    microbatch: int | None = None
    groups: tuple[int, ...] = ()
    skipped: int = 0
    recompute: str | None = None
    slice: str = "full"
    buffered: bool = False
    num_models: int = 1

    def __str__(self) -> str:
        parts = [self.model if self.slice == "full" else f"{self.model} {self.slice}", f"{self.batch} {self.optimizer}"]
        parts += [self.method] if self.method != "fedavg" else []
        parts += [f"groups {'.'.join(map(str, self.groups))}"] if self.groups else []
        parts += [f"skips {self.skipped}"] if self.skipped else []
        parts += [f"micro {self.microbatch}"] if self.microbatch else []
        parts += [self.recompute] if self.recompute else []
        parts += ["buffered"] if self.buffered else []
        parts += [f"{self.num_models} models"] if self.num_models > 1 else []
        return ", ".join(parts)


@contextmanager
def cache() -> Iterator[Path]:
    """Where rows are kept meanwhile: measured anew every time, unless the environment names a folder."""
    if named := os.environ.get("FEDFIT_CACHE_DIR"):
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="fedfit-rows-") as folder:
        yield Path(folder)


def run_of(case: Case, parameters: Mapping[str, Any] = {}) -> RunFile:
    """As a run file would say it; `parameters` are the method's."""
    table = {
        "name": "bench",
        "model": MODELS[case.model],
        "classes": [str(number) for number in range(10)],
        "method": {"name": case.method, **({"mutual": case.num_models} if case.num_models > 1 else {}), **parameters},
        "train": {"batch": case.batch, **OPTIMIZERS[case.optimizer]},
    }
    return parse_table(RunFile, table, source="benchmark")


def rows_of(case: Case, folder: Path, parameters: Mapping[str, Any] = {}) -> ModelRows:
    """Calibrated here, or found in the folder."""
    run = run_of(case, parameters)
    rules = methods.plan_rules(run.method.name, run.method.parameters)
    assert run.model is not None
    return calibrated(job_for(run, rules, run.model.input, slice_name=case.slice), folder)


def fitting_of(case: Case, rows: ModelRows, parameters: Mapping[str, Any] = {}, **room: int) -> PlanSearch:
    """For plans."""
    run = run_of(case, parameters)
    return PlanSearch(run=run, rules=methods.plan_rules(run.method.name, run.method.parameters), rows=rows, **room)


def shape_of(case: Case, rows: ModelRows) -> Shape:
    """The part of the plan that decides its memory."""
    blocks = [unit.name for unit in rows.modes["plain"] if unit.kind == "block"]
    skipped, left = blocks[: case.skipped], blocks[case.skipped :]
    groups: list[tuple[str, ...]] = []
    while case.groups and left:
        count = case.groups[min(len(groups), len(case.groups) - 1)]
        groups.append(tuple(left[:count]))
        left = left[count:]
    return Shape(
        microbatch=case.microbatch or case.batch,
        groups=tuple(groups),
        skipped=tuple(skipped),
        recompute=case.recompute,
        buffered=case.buffered,
        num_models=case.num_models,
    )


def predicted(case: Case, rows: ModelRows, parameters: Mapping[str, Any] = {}, **room: int) -> int:
    """What training adds at most."""
    return training_bytes(rows, fitting_of(case, rows, parameters, **room).workload(), shape_of(case, rows))


def plan_of(case: Case, rows: ModelRows, parameters: Mapping[str, Any] = {}) -> TrainingPlan:
    """The case as a worker gets it."""
    shape = shape_of(case, rows)
    return TrainingPlan(
        slice=case.slice,
        groups=shape.groups,
        skipped=shape.skipped,
        microbatch=shape.microbatch,
        recompute=shape.recompute,
        channels_last=rows.channels_last,
        dtype=rows.dtype,
        buffered=shape.buffered,
        num_models=shape.num_models,
        budget_bytes=0,
        predicted_bytes=0,
        training_bytes=predicted(case, rows, parameters),
    )


def trial(case: Case, plan: TrainingPlan, rows: ModelRows, **settings: int) -> TrialResult:
    """The case in a process of its own, evaluated first as a worker does."""
    run = run_of(case)
    assert run.model is not None
    evaluated = evaluation_batch(rows, plan.training_bytes, plan.microbatch)
    return run_trial(Trial(run=run, input_shape=run.model.input, plan=plan, evaluated=evaluated, **settings))
