"""The received model on this device: evaluated as it came, then trained with the method's client half.

Covers: what the client half and the batch loop are given. Does not cover: the loop (`training`), what is learnt
(`methods`), the memory meanwhile (`plan_in_force`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from edge_client import faults
from edge_client.methods.base import Client, Job, Outcome
from edge_client.methods.coverage import never_returned
from edge_client.planning.cost import evaluation_batch
from edge_client.records import TrainingPlan
from edge_client.training import optimizers
from edge_client.training.evaluate import Result, evaluate
from edge_client.training.loop import Trained, generator, train
from edge_client.training.optimizers import Optimizer
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX, read_header
from edge_client.worker.declined import declines
from edge_client.worker.knowledge_release import release
from edge_client.worker.loading import Loaded, loop_settings
from edge_client.worker.method_state import read_state
from edge_client.worker.model_building import ModelBuilder
from edge_client.worker.order_files import Assignment, knowledge_paths, model_path
from edge_client.worker.plan_in_force import PlanInForce
from edge_client.worker.progress import Progress
from edge_client.worker.stored_tensors import StoredKnowledge, StoredTensors

__all__ = ["LocalTraining", "begin_client", "evaluate_received_model", "train_locally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTraining:
    """What training brought; nothing if the order asks for none."""

    trained: Trained | None = None
    outcome: Outcome = field(default_factory=Outcome)
    withheld: tuple[str, ...] = ()  # knowledge that stays here: why


def begin_client(assignment: Assignment, loaded: Loaded, plan: TrainingPlan, extra: Mapping[str, Tensor]) -> Client:
    """The method's client half, begun with everything that it may use; raises `DeclinedError`."""
    order, run, gate = assignment.order, assignment.run, assignment.gate
    model_file, device = model_path(order), loaded.device
    builder = ModelBuilder(
        model=loaded.model, setup=loaded.setup, channels_last=loaded.rows.channels_last, seed=order.seed
    )

    def optimizer() -> Optimizer:
        section = run.train
        return optimizers.make(section.optimizer, momentum=section.momentum, weight_decay=section.weight_decay)

    client = loaded.setup.method.client()
    with declines("bad_method", unknown="unknown_method"):
        client.begin(
            Job(
                model=loaded.model,
                round=order.round,
                num_rounds=order.num_rounds,
                epochs=run.train.epochs_of(len(loaded.data.train)),
                learning_rate=order.learning_rate,
                class_counts=loaded.data.train.class_counts(len(run.classes)),
                slice=order.slice,
                plan=plan,
                rng=lambda purpose: generator(order.seed, "method", purpose),
                state=read_state(Path(order.method_state), order.slice, device) if order.method_state else {},
                extra=extra,
                kept=never_returned(read_header(model_file).meta),
                received=StoredTensors(model_file, MODEL_PREFIX, also=EXTRA_PREFIX, device=device),
                build=builder.build,
                data=loaded.data.train,
                knowledge=StoredKnowledge(knowledge_paths(order), codec=run.rounds.codec, classes=len(run.classes)),
                class_min_count=gate.class_min_count,
                clip_norm=gate.clip_norm,
                optimizer=optimizer,
            )
        )
    return client


def evaluate_received_model(
    assignment: Assignment, loaded: Loaded, client: Client, plan: TrainingPlan, progress: Progress
) -> Result | None:
    """The received model on this device's test samples; None if nobody asks, there are none, or the owner keeps it."""
    if not assignment.order.evaluate or not assignment.device.share.metrics or len(loaded.data.test) == 0:
        return None
    with declines("bad_data"), loaded.setup.recipe.user_code("evaluation"):
        result = evaluate(
            loaded.model,
            client.predict,
            loaded.data.test,
            num_classes=len(assignment.run.classes),
            microbatch=evaluation_batch(loaded.rows, plan.training_bytes, plan.microbatch),
            channels_last=plan.channels_last,
            dtype=plan.dtype,
            progress=lambda step, total, loss: progress.report("evaluate", step, total, loss),
        )
    faults.point("worker.evaluated")
    return result


def train_locally(
    assignment: Assignment, loaded: Loaded, client: Client, in_force: PlanInForce, progress: Progress
) -> LocalTraining:
    """Train by the plan in force, end the client half, and decide which of its knowledge leaves the device."""
    faults.point("worker.train.begin")

    def on_step(step: int, total: int, loss: float) -> None:
        faults.point("worker.train.step")
        progress.report("train", step, total, loss)

    settings = loop_settings(assignment, in_force.plan, channels_last=loaded.rows.channels_last)
    with declines("bad_data"), loaded.setup.recipe.user_code("training"):
        trained = train(
            loaded.model,
            client,
            loaded.data.train,
            settings,
            progress=on_step,
            replan=in_force.replan,
            in_force=in_force.adopt,
        )
        outcome = client.end()
    released = release(outcome.knowledge, assignment)
    outcome = replace(outcome, knowledge=released.items)
    return LocalTraining(trained=trained, outcome=outcome, withheld=released.withheld)
