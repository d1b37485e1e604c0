"""Random models, batches, methods and budgets on an accelerator: is a prediction above what is reserved, and close?

Each plan is found as a worker finds it: a search, the replay of recorded allocations, a rehearsal under the budget as a
hard limit. Then it trains two epochs with a smaller last batch on other samples, under the same limit. Predictions are
of what torch reserves, of tensors alone: context and libraries' workspaces are constants, and stand beside them.
FEDFIT_TEST_ACCELERATOR names a GPU; otherwise the tests' accelerator is measured, which counts as CUDA's does.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.memory_cases import MODELS, OPTIMIZERS, Case, run_of
from edge_client.device.accelerator import Accelerator, choose
from edge_client.errors import NothingFitsError
from edge_client.measuring import allocation_recording, calibration, rehearsed
from edge_client.measuring.plan_search import PlanSearch
from edge_client.measuring.prepared_training import PreparedTraining, prepare
from edge_client.measuring.rehearsal import Rehearsal, rehearse
from edge_client.methods import registry as methods
from edge_client.planning.allocation_sequence import AllocationSequence, Sizes, reserved
from edge_client.planning.rows import ModelRows
from edge_client.records import TrainingPlan
from edge_client.worker.accelerator_memory import AcceleratorMemory
from edge_client.worker.accelerator_plan import AcceleratorPlanner, Measured, without_hidden

__all__ = ["measure"]

_SEED = 1
_MODELS = {
    "narrow-resnet10": {"name": "resnet10", "input": [3, 32, 32], "base-width": 16, "small-stem": True},
    "small-cnn-32": {"name": "small-cnn", "input": [3, 32, 32]},
    "mlp": MODELS["mlp"],
    "har-cnn": {"name": "har-cnn", "input": [9, 128]},
}
_METHODS = ("fedavg", "fedprox", "fedepth")
_BATCHES = (8, 16, 24, 32, 50, 64)
_ABOVE_FULL = 1.2  # of what the whole batch at once reserves: the largest budget


@dataclass(frozen=True, slots=True)
class _Result:
    """Bytes that were reserved, and predicted, of one plan."""

    budget_bytes: int
    replayed_bytes: int
    promised_bytes: int
    peak_bytes: int


class _Bench:
    """One device, and what is the same for many draws."""

    def __init__(self, device: Accelerator, folder: Path) -> None:
        self.device, self._folder = device, folder
        self._rows: dict[tuple[str, str], ModelRows] = {}
        self._sequences: dict[str, AllocationSequence] = {}

    def rows(self, case: Case) -> ModelRows:
        """Measured here on the CPU."""
        key = (case.model, case.method)
        if key not in self._rows:
            run = run_of(replace(case, optimizer="sgd"))
            assert run.model is not None
            rules = methods.plan_rules(run.method.name, run.method.parameters)
            job = calibration.job_for(run, rules, run.model.input)
            self._rows[key] = without_hidden(calibration.calibrated(job, self._folder))
        return self._rows[key]

    def sequence(self, case: Case, plan: TrainingPlan) -> AllocationSequence:
        """Recorded here on the CPU."""
        run = run_of(case)
        assert run.model is not None
        job = allocation_recording.job_for(run, str(case.model), run.model.input, plan)
        if job.key not in self._sequences:
            prepared = prepare(run, run.model.input)
            prepared.model.recompute = plan.recompute
            self._sequences[job.key] = allocation_recording.record(prepared, job)
        return self._sequences[job.key]

    def tried(self, case: Case, room: float) -> _Result | None:
        """A plan for a budget between the least and more than enough (`room` from 0 to 1); None if nothing fits."""
        run = run_of(case)
        assert run.model is not None
        prepared = prepare(run, run.model.input)
        sizes = [tensor.nbytes for tensor in prepared.model.state_dict().values()]
        num_samples = 2 * case.batch + case.batch // 2 + 1
        rules = methods.plan_rules(run.method.name, run.method.parameters)
        search = PlanSearch(run=run, rules=rules, rows=self.rows(case), num_samples=num_samples)
        whole = self.sequence(case, TrainingPlan(microbatch=case.batch, budget_bytes=0, predicted_bytes=0))
        most = _ABOVE_FULL * reserved(whole, Sizes(microbatch=case.batch)).peak_reserved_bytes
        there = replace(prepared, model=self.device.move(prepared.model))
        least = sum(sizes) * 2.5 + 2**21
        budget_bytes = int(least * (max(most, least) / least) ** room)
        memory = AcceleratorMemory(self.device, self._folder, limit_bytes=budget_bytes)
        memory.warm()
        planner = AcceleratorPlanner(
            search=search,
            memory=memory,
            fingerprint=self.device.fingerprint(),
            host_bytes=0,
            batch_bytes=0,
            largest_bytes=0,
            weight_bytes=sum(sizes),
            sequences=lambda plan: self.sequence(case, plan),
            rehearse=lambda plan, room_bytes: self._rehearsed(there, case, plan, num_samples, room_bytes),
        )
        try:
            plan = planner.new_plan(2**40)
        except NothingFitsError:
            return None
        memory.begin(planner.limit_bytes(plan))
        self._train(there, case, plan, num_samples + 3)
        sizes_of_plan = Sizes.of(batch=case.batch, microbatch=plan.microbatch, num_samples=num_samples)
        result = _Result(
            budget_bytes=budget_bytes - memory.context_bytes,
            replayed_bytes=reserved(self.sequence(case, plan), sizes_of_plan).peak_reserved_bytes,
            promised_bytes=plan.accelerator_predicted_bytes - memory.context_bytes,
            peak_bytes=self.device.peak_reserved_bytes(),
        )
        told = " ".join(
            f"{number / 2**20:7.1f}"
            for number in (result.budget_bytes, result.replayed_bytes, result.promised_bytes, result.peak_bytes)
        )
        print(f"   {case!s:<40} {plan.describe():<60} {told} MiB", flush=True)
        return result

    def _rehearsed(
        self, there: PreparedTraining, case: Case, plan: TrainingPlan, num_samples: int, room_bytes: int
    ) -> Measured:
        there.model.recompute = plan.recompute
        self.device.free()
        self.device.limit(room_bytes)
        result = rehearse(
            Rehearsal(
                model=there.model,
                begin=lambda: there.client(plan, epochs=3),
                data=there.samples(num_samples),
                test=there.samples(1),
                settings=there.settings(case.batch, plan, self._folder),
                num_classes=10,
            ),
            rehearsed.shapes_of(plan, case.batch, num_samples),
            key="0" * 64,
            accelerator=self.device,
        )
        there.model.zero_grad(set_to_none=True)
        self.device.limit(None)
        self.device.free()
        return Measured(peak_bytes=result.accelerator_bytes, over=result.over)

    def _train(self, there: PreparedTraining, case: Case, plan: TrainingPlan, num_samples: int) -> None:
        from edge_client.training.loop import train

        there.model.recompute = plan.recompute
        client = there.client(plan, epochs=2)
        train(there.model, client, there.samples(num_samples), there.settings(case.batch, plan, self._folder))
        client.end()
        there.model.zero_grad(set_to_none=True)


def _device() -> Accelerator:
    named = os.environ.get("FEDFIT_TEST_ACCELERATOR", "")
    if named:
        return choose(named).accelerator
    sys.path.append(str(Path(__file__).parents[1] / "tests/accelerator"))
    from fedtest import register

    register()
    return choose("fedtest:0").accelerator


def _draws(count: int) -> Iterator[tuple[Case, float]]:
    rng = random.Random(_SEED)
    for _ in range(count):
        case = Case(
            model=rng.choice(list(_MODELS)),
            batch=rng.choice(_BATCHES),
            optimizer=rng.choice(list(OPTIMIZERS)),
            method=rng.choice(_METHODS),
        )
        yield case, rng.random()


def measure(*, quick: bool) -> list[Figure]:
    """Plans above their prediction or budget, and how much is predicted too much."""
    import torch

    MODELS.update(_MODELS)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fedfit-accelerator-") as folder:
        device = _device()
        device.take()
        bench = _Bench(device, Path(folder))
        results = [result for case, room in _draws(40 if quick else 200) if (result := bench.tried(case, room))]
    over = sum(one.peak_bytes > min(one.promised_bytes, one.budget_bytes) for one in results)
    below = sum(one.replayed_bytes < one.peak_bytes for one in results)
    replayed = [one.replayed_bytes / one.peak_bytes - 1 for one in results]
    promised = [one.promised_bytes / one.peak_bytes - 1 for one in results]
    return [
        Figure(name="plans above prediction or budget", unit="of all", values=(over,), at_most=0),
        Figure(name="mean excess after the rehearsal", unit="ratio", values=(statistics.mean(promised),), at_most=0.06),
        Figure(name="replays below what is reserved", unit="of all", values=(below,), at_most=0),
        Figure(name="mean excess of the replay", unit="ratio", values=(statistics.mean(replayed),), at_most=0.25),
        Figure(name="largest excess of the replay", unit="ratio", values=(max(replayed),)),
        Figure(name="plans", unit="", values=(len(results),)),
    ]
