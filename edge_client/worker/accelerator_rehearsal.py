"""Rehearses a plan on the accelerator, in the worker itself, before anything depends on it.

The real loop and the method's client half take the steps of the plan on this device's own samples, with a learning
rate of 0 and under the accelerator's hard limit; afterwards all of that memory is given back, and the model gets its
weights. What was measured for a plan is remembered as long as nothing that decides it changes.
Covers: the accelerator's memory. Does not cover: the steps (`measuring.rehearsal`), the choice (`accelerator_plan`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace

from edge_client import durable
from edge_client.measuring import rehearsed
from edge_client.measuring.rehearsal import Rehearsal, rehearse
from edge_client.planning.cost import evaluation_batch
from edge_client.records import TrainingPlan, to_map
from edge_client.training.contract import Client
from edge_client.worker.accelerator_plan import Measured
from edge_client.worker.loading import Loaded, loop_settings
from edge_client.worker.order_files import Assignment

__all__ = ["AcceleratorRehearsal"]

_log = logging.getLogger(__name__)


class AcceleratorRehearsal:
    """Measures plans for one warm worker; the model's weights are loaded after it."""

    def __init__(self, assignment: Assignment, loaded: Loaded, begin: Callable[[TrainingPlan], Client]) -> None:
        self._assignment, self._loaded, self._begin = assignment, loaded, begin

    def __call__(self, plan: TrainingPlan, room_bytes: int) -> Measured:
        """The peak of what torch reserves; `over` where that is more than `room_bytes`."""
        loaded = self._loaded
        shapes = self._shapes(plan)
        key = rehearsed.key_of(self._model_key(), plan, shapes)
        known = rehearsed.find(durable.cache_dir(), key)
        if known is None or (known.over and known.accelerator_bytes < room_bytes):
            known = self._measure(plan, shapes, key, room_bytes)
            rehearsed.keep(durable.cache_dir(), known)
        loaded.model.recompute = None
        return Measured(peak_bytes=known.accelerator_bytes, over=known.over or known.accelerator_bytes > room_bytes)

    def _model_key(self) -> str:
        """Of everything beside plan and shapes that decides what is reserved."""
        train, method = self._assignment.run.train, self._assignment.run.method
        identity = [
            self._loaded.memory_key,  # model, method, optimizer, accelerator
            len(self._assignment.run.classes),
            train.weight_decay > 0,
            self._assignment.order.round > 1,  # a method's state and knowledge are there from the second round on
            to_map(method),
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def _shapes(self, plan: TrainingPlan) -> rehearsed.Shapes:
        loaded, batch = self._loaded, self._assignment.run.train.batch
        evaluated: tuple[int, ...] = ()
        if self._assignment.order.evaluate and len(loaded.data.test):
            piece = evaluation_batch(loaded.rows, plan.training_bytes, plan.microbatch)
            evaluated = rehearsed.pieces_met(len(loaded.data.test), piece)
        return rehearsed.shapes_of(plan, batch, len(loaded.data.train), evaluated=evaluated)

    def _measure(self, plan: TrainingPlan, shapes: rehearsed.Shapes, key: str, room_bytes: int) -> rehearsed.Rehearsed:
        loaded, device = self._loaded, self._loaded.device
        loaded.model.recompute = plan.recompute
        settings = loop_settings(self._assignment, plan, channels_last=loaded.rows.channels_last)
        device.free()
        device.limit(room_bytes)
        try:
            result = rehearse(
                Rehearsal(
                    model=loaded.model,
                    begin=lambda: self._begin(plan),
                    data=loaded.data.train,
                    test=loaded.data.test,
                    settings=replace(settings, learning_rate=0.0),
                    num_classes=len(self._assignment.run.classes),
                ),
                shapes,
                key=key,
                accelerator=device,
            )
        finally:
            device.limit(None)
            loaded.model.zero_grad(set_to_none=True)
            device.free()
        if result.over:
            _log.info("rehearsed on the accelerator: %s does not fit", plan.describe())
            return replace(result, accelerator_bytes=room_bytes)
        return result
