"""Predicted peak memory of a worker process: an upper bound from shapes alone, without running or tracing anything.

    peak <= base + parameters x copies + (activations + input) x microbatch x 3 + scratch + samples held in memory

Does not cover: groups of units, recomputation, slices; those candidates of the planner bring their own terms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_client.models.contract import Model

__all__ = ["WORKER_BASE_BYTES", "Workload", "predict"]

# RSS of a worker with torch, numpy and a model loaded, after a warm-up step: 232 to 247 MB measured on x86_64 with
# torch 2.13 (CPU), Python 3.11, one thread; rounded up by 5 % for what other builds load.
WORKER_BASE_BYTES = 260 * 10**6

_FLOAT = 4
# An activation, its gradient, and one more for the copies that backward kernels make of their inputs (dispatcher traces
# miss them: one hidden activation per convolution was measured).
_ACTIVATION_COPIES = 3
_SCRATCH_BYTES = 4 * 2**20  # allocator slack, indices, logits, Python objects of a step
_OPTIMIZER_COPIES = {"sgd": 0, "momentum": 1, "adam": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What decides the memory of training beside the model."""

    batch: int
    optimizer: str = "sgd"
    momentum: float = 0.0
    held_bytes: int = 0  # samples that the data source keeps in memory


def predict(model: Model, workload: Workload, *, microbatch: int) -> int:
    """Upper bound of the peak RSS, in bytes, of a worker that trains the full model."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    sizes += [buffer.numel() for buffer in model.buffers()]
    kind = "momentum" if workload.optimizer == "sgd" and workload.momentum else workload.optimizer
    copies = 1 + 1 + 1 + _OPTIMIZER_COPIES[kind]  # weights, gradients, received weights
    per_sample = math.prod(model.input_shape) + sum(unit.num_activations for unit in model.units)
    return (
        WORKER_BASE_BYTES
        + _FLOAT * copies * sum(sizes)
        + _FLOAT * _ACTIVATION_COPIES * per_sample * microbatch
        + _FLOAT * 3 * max(sizes, default=0)  # the optimizer's temporaries, a kernel's reordered weight
        + _SCRATCH_BYTES
        + workload.held_bytes
    )
