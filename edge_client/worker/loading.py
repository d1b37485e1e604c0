"""From an assignment to a warm process with a model and data in memory: loaded, laid out, measured.

The order matters. What can be declined without memory is declined first; data and model are made under the kernel's
limit, the warm-up is not, because the threads and libraries that it loads are not the model's. The base memory is
measured last, so that everything after it is training.
Covers: the order of loading. Does not cover: each step (`run_setup`, `device_data`, `plan`, `model_building`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.device import guard
from edge_client.device.accelerator import Accelerator
from edge_client.measuring.plan_search import PlanSearch
from edge_client.models.contract import Model
from edge_client.models.layout import allows_bf16, to_channels_last
from edge_client.planning.base_memory import base_bytes
from edge_client.planning.rows import ModelRows
from edge_client.records import TrainingPlan
from edge_client.training.loop import Settings
from edge_client.training.warmup import warm_up
from edge_client.worker.accelerator_loading import accelerator_memory, accelerator_planner, choose_free
from edge_client.worker.accelerator_memory import AcceleratorMemory
from edge_client.worker.accelerator_plan import AcceleratorPlanner
from edge_client.worker.allowance import LIMIT_SLACK_BYTES, Allowance
from edge_client.worker.declined import DeclinedError, declines
from edge_client.worker.device_data import DeviceData, open_device_data
from edge_client.worker.model_building import build_model, check_weights_fit, must_fit, seed_generators
from edge_client.worker.order_files import Assignment, knowledge_paths
from edge_client.worker.plan import CostRows, Planner, cost_rows, knowledge_bytes, lowest_ceiling, memory_key
from edge_client.worker.process_cache import ProcessCache
from edge_client.worker.run_setup import RunSetup, set_up

_log = logging.getLogger(__name__)

__all__ = ["Loaded", "load", "loop_settings"]

_STACK_BYTES = 8 * 2**20  # of a thread, counted as a whole and hardly used


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a warm worker has in memory, and what its plans are made with."""

    setup: RunSetup
    data: DeviceData
    model: Model  # with random weights, where it is trained
    device: Accelerator
    memory: AcceleratorMemory | None  # of the device; None on the CPU
    planner: Planner | AcceleratorPlanner
    warm_bytes: int  # private memory, measured; the planner's base memory is in steps
    memory_key: str

    @property
    def rows(self) -> ModelRows:
        """What the model's units cost, in the layout that it has."""
        return self.planner.search.rows


def load(assignment: Assignment, allowance: Allowance, cache: ProcessCache) -> Loaded:
    """Load everything that a plan needs; raises `DeclinedError`, `CalibrationNeededError` or `MemoryError`."""
    order, run = assignment.order, assignment.run
    setup = set_up(assignment, cache)
    device = _device(assignment)
    limit_slack_bytes = LIMIT_SLACK_BYTES + order.threads * _STACK_BYTES
    allowance.limit(limit_slack_bytes)  # bounds the unpacking of compressed data, and what a task returns
    with declines("bad_data"), must_fit("its data", order.budget_bytes):
        data = open_device_data(assignment, setup.recipe, cache)
    with declines("nothing_fits"):
        check_weights_fit(setup, allowance.budget_bytes)
    shape = data.train.shape
    rows = cost_rows(assignment, setup, shape, budget_bytes=allowance.budget_bytes, cache=cache, device=device)
    allowance.limit(limit_slack_bytes)  # building runs one sample: bounded, too
    with declines("bad_model", unknown="unknown_model"):
        model = build_model(setup, shape, order.budget_bytes)
    guard.lift_limit()
    search = _lay_out(assignment, setup, data, model, rows)
    model = device.move(model)  # before anything holds its parameters: some devices replace them
    settings = loop_settings(assignment, channels_last=search.rows.channels_last)
    with declines("bad_model"), setup.recipe.user_code("a first step on zeros"):
        cache.once("warm", setup.cache_key, lambda: warm_up(model, settings))
    seed_generators(order.seed)  # the first time in a process, this loads libraries of 2 MB, which are no training's
    warm_bytes = allowance.used_bytes()
    worker_bytes = base_bytes(
        rows.fp32,
        warm_bytes=warm_bytes,
        data_bytes=data.held_bytes,
        knowledge_bytes=knowledge_bytes(sum(path.stat().st_size for path in knowledge_paths(order)), run.rounds.codec),
    )
    memory = accelerator_memory(assignment, device)
    if order.training_budget_bytes is not None and memory is None:
        allowance.budget_bytes = worker_bytes + order.training_budget_bytes
    _check_process_fits(worker_bytes, allowance.budget_bytes)
    key = memory_key(run, setup.architecture, device.fingerprint() if memory is not None else "")
    planner: Planner | AcceleratorPlanner
    if memory is None:
        planner = Planner(
            search=search,
            base_bytes=worker_bytes,
            ceiling_bytes=lowest_ceiling(assignment, key),
            of_training=order.training_budget_bytes is not None,
        )
    else:
        planner = accelerator_planner(
            assignment, setup, model, search=search, memory=memory, host_bytes=worker_bytes, key=key, cache=cache
        )
    return Loaded(
        setup=setup,
        data=data,
        model=model,
        device=device,
        memory=memory,
        planner=planner,
        warm_bytes=warm_bytes,
        memory_key=key,
    )


def _device(assignment: Assignment) -> Accelerator:
    """Where this device's owner wants it to train, with a context; a named accelerator that is not there declines."""
    limits = assignment.device.limits
    with declines("no_accelerator"):
        choice = choose_free(limits.accelerator, workers=limits.workers)
    if choice.reason:
        _log.warning("training on the CPU: %s", choice.reason)
    device = choice.accelerator
    device.limit(None)  # of an earlier assignment of this process
    device.free()
    device.use_deterministic_kernels(assignment.run.train.deterministic)
    return device


def loop_settings(assignment: Assignment, plan: TrainingPlan | None = None, *, channels_last: bool) -> Settings:
    """How the loop trains by a plan; without one: how it warms up."""
    order, section = assignment.order, assignment.run.train
    return Settings(
        batch=section.batch,
        microbatch=plan.microbatch if plan is not None else section.batch,
        learning_rate=order.learning_rate,
        seed=order.seed,
        optimizer=section.optimizer,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        max_steps=section.max_steps,
        buffered=plan is not None and plan.buffered,
        folder=assignment.workdir,
        channels_last=channels_last,
        dtype=plan.dtype if plan is not None else "fp32",
        warm_up=section.warm_up and order.round == 1,
    )


def _lay_out(assignment: Assignment, setup: RunSetup, data: DeviceData, model: Model, rows: CostRows) -> PlanSearch:
    """Give the model the layout that its rows were measured in."""
    search = PlanSearch.of(
        assignment.run,
        setup.method.plans,
        model,
        slice_name=setup.architecture,
        rows=rows.fp32,
        half=rows.half if rows.half is not None and allows_bf16(model) else None,
        num_samples=len(data.train),
        disk_bytes=min(durable.free_bytes(assignment.workdir) // 2, assignment.device.limits.disk),
        sample_bytes=setup.method.knowledge.sample_bytes(model),
    )
    if search.rows.channels_last:
        to_channels_last(model)
    return search


def _check_process_fits(worker_bytes: int, budget_bytes: int) -> None:
    """No plan helps if the process itself is too large."""
    if worker_bytes > budget_bytes:
        used, budget = format_bytes(worker_bytes), format_bytes(budget_bytes)
        detail = f"a worker uses {used} before it trains, the budget is {budget}; see limits.memory"
        raise DeclinedError("nothing_fits", detail)
