"""Random models, batches, methods and budgets for which there is a plan: does training stay inside the budget?

Each plan is carried out in a process of its own: evaluation, then training with a smaller last batch. The budget is
that of training: what the process may take on top of what it has before it trains, warmed up.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from benchmarks.figures import Figure
from benchmarks.memory_cases import MODELS, OPTIMIZERS, Case, cache, fitting_of, rows_of, trial
from edge_client.errors import NothingFitsError
from edge_client.measuring.plan_search import PlanSearch
from edge_client.planning.cost import Shape, training_bytes
from edge_client.planning.rows import ModelRows

__all__ = ["measure"]

_SEED = 1
_MODELS = {
    "preresnet20": MODELS["preresnet20"],
    "preresnet20-rs": MODELS["preresnet20-rs"],
    "narrow-resnet10": {"name": "resnet10", "input": [3, 32, 32], "base-width": 16, "small-stem": True},
    "small-vit": {"name": "vit-t-16", "input": [3, 32, 32], "patch": 8, "width": 96, "depth": 6},
    "mlp": MODELS["mlp"],
    "small-cnn": MODELS["small-cnn"],
    "har-cnn": {"name": "har-cnn", "input": [9, 128]},
}
_METHODS = ("fedavg", "fedprox", "fedepth", "m-fedepth")
_BATCHES = (8, 16, 24, 32, 50, 64, 100, 128)
_DISK_BYTES = 10**9  # for activations
_ABOVE_FULL = 1.1  # of what full training needs: the largest budget


@dataclass(frozen=True, slots=True)
class _Draw:
    """A budget, and what is to be trained inside of it."""

    case: Case
    fitting: PlanSearch
    budget_bytes: int

    def used(self) -> float:
        """The measured peak as a share of the budget."""
        plan = self.fitting.choose(0, self.budget_bytes).plan
        peak = trial(self.case, plan, self.fitting.rows).peak_bytes
        share = peak / self.budget_bytes
        told = f"{peak / 1e6:6.1f} of {self.budget_bytes / 1e6:6.1f} MB, predicted {plan.training_bytes / 1e6:6.1f}"
        print(f"   {self.case!s:<40} {plan.describe():<42} {told}{'' if share <= 1 else '  OVER'}", flush=True)
        return share


def measure(*, quick: bool) -> list[Figure]:
    """How much of its budget each plan used."""
    MODELS.update(_MODELS)
    kinds = [Case(model=model, batch=8, method=method) for model in _MODELS for method in _METHODS]
    with cache() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda kind: rows_of(kind, folder), kinds)
        rows = {(kind.model, kind.method): one for kind, one in zip(kinds, found, strict=True)}
        used = list(pool.map(_Draw.used, _draws(rows, 40 if quick else 200)))
    inside = sum(share <= 1 for share in used)
    return [
        Figure(name="plans inside their budget", unit="of all", values=(inside / len(used),), at_least=1),
        Figure(name="largest share of the budget", unit="ratio", values=(max(used),), at_most=1),
        Figure(name="median share of the budget", unit="ratio", values=(statistics.median(used),)),
        Figure(name="plans", unit="", values=(len(used),)),
    ]


def _draws(rows: Mapping[tuple[str, str], ModelRows], count: int) -> Iterator[_Draw]:
    """Budgets from the smallest that fits to what full training needs, even on a logarithmic scale."""
    rng = random.Random(_SEED)
    for _ in range(count):
        case = Case(
            model=rng.choice(list(_MODELS)),
            batch=rng.choice(_BATCHES),
            optimizer=rng.choice(list(OPTIMIZERS)),
            method=rng.choice(_METHODS),
        )
        known = rows[case.model, case.method]
        fitting = fitting_of(case, known, num_samples=2 * case.batch, disk_bytes=_DISK_BYTES)
        least = _least(fitting)
        most = _ABOVE_FULL * training_bytes(known, fitting.workload(), Shape(microbatch=case.batch))
        yield _Draw(case, fitting, int(least * (most / least) ** rng.random()))


def _least(fitting: PlanSearch) -> int:
    """The smallest budget that has a plan: what the planner tells when there is none."""
    try:
        return fitting.choose(0, 0).chosen.training_bytes
    except NothingFitsError as error:
        return error.least_bytes or 1
