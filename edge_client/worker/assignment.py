"""What a worker does, step by step: load, plan, warm up, evaluate, train, write. Imports torch.

Covers: the order of the steps. Does not cover: the steps, each a module of this folder; the process around them
(`process`). The tensors of an update depend on this order alone, bit for bit; its report also holds measurements,
which vary.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from edge_client import durable, faults
from edge_client.device import guard
from edge_client.measuring.row_sources import CalibrationNeededError
from edge_client.records import TrainingPlan, WorkOrder
from edge_client.task.run_model import load_weights
from edge_client.training.warmup import warm_up
from edge_client.wire.container import EXTRA_PREFIX
from edge_client.worker.accelerator_plan import AcceleratorPlanner
from edge_client.worker.accelerator_rehearsal import AcceleratorRehearsal
from edge_client.worker.allowance import Allowance
from edge_client.worker.declined import DeclinedError, declines, declines_user_method
from edge_client.worker.input_sums import report_sums
from edge_client.worker.loading import Loaded, load, loop_settings
from edge_client.worker.local_training import LocalTraining, begin_client, evaluate_received_model, train_locally
from edge_client.worker.method_state import write_state
from edge_client.worker.model_building import seed_generators
from edge_client.worker.order_files import Assignment, model_path, part_path, read_assignment
from edge_client.worker.plan_in_force import PlanInForce
from edge_client.worker.process_cache import ProcessCache
from edge_client.worker.progress import Progress
from edge_client.worker.rehearsing import Rehearsing
from edge_client.worker.spare_memory import with_spare
from edge_client.worker.state_folder import write_last_model
from edge_client.worker.stored_tensors import StoredTensors
from edge_client.worker.update import Results, make_report, update_tensors, write_manifest, write_update

__all__ = ["CalibrationNeededError", "DeclinedError", "carry_out"]


def carry_out(
    order: WorkOrder, workdir: Path, cache: ProcessCache | None = None, *, template: int | None = None
) -> None:
    """Carry out `order` and leave `update.bin` and `update.json` in `workdir`; raises `DeclinedError`.

    `cache`: of a process that does more than one; `template`: the process that this one was forked from.
    """
    progress, started = Progress.of(order), time.monotonic()
    is_shared = cache is not None  # others ran here before: what they left hides what a plan takes
    if is_shared:
        guard.return_freed_memory()  # of the assignment before
    cache = cache or ProcessCache()
    _use_threads(order.threads if is_shared else 1)
    assignment = read_assignment(order, workdir, cache)
    allowance = Allowance(order.budget_bytes, workdir, template=template)
    with declines_user_method(assignment.run.method.name):
        if assignment.only_sums:
            report_sums(assignment, workdir, allowance, cache, progress, started)
            return
        progress.report("load", 0, 1)
        loaded = load(assignment, allowance, cache)
        _rehearse_on_accelerator(assignment, loaded)
        with declines("nothing_fits"):
            plan = loaded.planner.first_plan(order.plan, allowance.budget_bytes)
        rehearsing = Rehearsing(assignment, loaded, allowance, progress, can_fork=not is_shared)
        with declines("nothing_fits"):
            plan = rehearsing.tried(plan)
        if order.train or order.evaluate:
            if not is_shared:
                _use_more_threads(assignment, loaded)
            plan = plan if plan.accelerator else with_spare(plan, allowance.budget_bytes)
            results = _evaluate_and_train(assignment, loaded, plan, allowance, progress, rehearsing)
        else:  # a dry run
            progress.report("load", 1, 1)
            results = Results(plan=plan)
        progress.report("write", 0, 1)
        with durable.disk_errors(f"writing the update in {workdir}"):
            _write(assignment, loaded, results, allowance, progress, started)
        progress.report("write", 1, 1)


def _rehearse_on_accelerator(assignment: Assignment, loaded: Loaded) -> None:
    """Let the planner try its plans on the accelerator, where there is one and the model has come."""
    order = assignment.order
    if not isinstance(loaded.planner, AcceleratorPlanner) or not order.train:
        return
    extra = StoredTensors(model_path(order), EXTRA_PREFIX, device=loaded.device)
    loaded.planner.rehearse = AcceleratorRehearsal(
        assignment, loaded, lambda plan: begin_client(assignment, loaded, plan, extra)
    )


def _use_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    if torch.get_num_interop_threads() != 1:  # it can be set once in a process
        torch.set_num_interop_threads(1)


def _use_more_threads(assignment: Assignment, loaded: Loaded) -> None:
    """Until here one thread did all: a process with more cannot be forked."""
    if assignment.order.threads == 1:
        return
    _use_threads(assignment.order.threads)
    if loaded.device.kind == "cpu":
        warm_up(loaded.model, loop_settings(assignment, channels_last=loaded.rows.channels_last))


def _evaluate_and_train(
    assignment: Assignment,
    loaded: Loaded,
    plan: TrainingPlan,
    allowance: Allowance,
    progress: Progress,
    rehearsing: Rehearsing,
) -> Results:
    order = assignment.order
    in_force = PlanInForce(
        plan,
        planner=loaded.planner,
        allowance=allowance,
        model=loaded.model,
        memory_key=loaded.memory_key,
        workdir=assignment.workdir,
        num_replans=order.replans,
        memory=loaded.memory,
        rehearsed=rehearsing.rehearsed,
    )
    in_force.begin()
    load_weights(loaded.model, model_path(order))
    extra = StoredTensors(model_path(order), EXTRA_PREFIX, device=loaded.device)
    client = begin_client(assignment, loaded, plan, extra)
    seed_generators(order.seed)  # what the client half has drawn or built changes nothing that follows
    progress.report("load", 1, 1)
    evaluation = evaluate_received_model(assignment, loaded, client, plan, progress)
    loaded.device.free()  # or the segments of the evaluation stay reserved beside those of the training
    training = LocalTraining()
    if order.train:
        with rehearsing.learns_from(in_force):
            training = train_locally(assignment, loaded, client, in_force, progress)
            allowance.check()
        faults.point("worker.trained")
    return Results(
        plan=in_force.plan, num_replans=in_force.num_replans, evaluation=evaluation, training=training, extra=extra
    )


def _write(
    assignment: Assignment,
    loaded: Loaded,
    results: Results,
    allowance: Allowance,
    progress: Progress,
    started: float,
) -> None:
    """Method state, then the update, then its manifest: a manifest means that all is there."""
    order, codec, training = assignment.order, assignment.run.rounds.codec, results.training
    if order.train and order.method_state:
        write_state(Path(order.method_state), training.outcome.state, order.slice)
    if order.method_state and (order.train or order.evaluate):
        write_last_model(order, part_path(order, "run"), model_path(order))
    report = make_report(
        results,
        loaded.data,
        codec=codec,
        memory=allowance.measured(loaded.warm_bytes),
        accelerator=(loaded.memory.peak_bytes(), loaded.memory.base_bytes) if loaded.memory is not None else (0, 0),
        seconds=time.monotonic() - started,
        phases=progress.durations(),
    )
    model_file = model_path(order) if order.train else None
    rules = loaded.setup.method.plans
    manifest = write_update(
        assignment.workdir,
        report,
        update_tensors(results, loaded.model, rules, model_file) if model_file is not None else [],
        codec=codec,
        confusion=results.evaluation.confusion if results.evaluation is not None else None,
        withheld=training.withheld,
        model_file=model_file,
    )
    write_manifest(assignment.workdir, manifest)
