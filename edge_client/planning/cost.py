"""Predicted peak memory of a worker process: an upper bound from shapes alone, without running or tracing anything.

    peak <= base + parameters x copies + (activations + input) x microbatch x 2 + scratch + samples held in memory

Does not cover: groups of units, recomputation, slices; those candidates of the planner bring their own terms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_client.models.contract import Model

__all__ = ["WORKER_BASE_BYTES", "Workload", "predict", "predict_fixed"]

# RSS of a worker that trained small-cnn one sample at a time, less the model: 263 MB on x86_64 with torch 2.13 (CPU),
# Python 3.11 and one thread (torch 228, our modules and numpy 4, warmed-up kernels 26, data and evaluation 5).
WORKER_BASE_BYTES = 265 * 10**6

_FLOAT = 4
# Once for the outputs that backward needs (1.0 measured for small-cnn), once more for gradients, for the copies that
# backward kernels make of their inputs, and for functions inside a unit that are no modules and hence not counted.
_ACTIVATION_COPIES = 2
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
    sizes = [tensor.numel() for tensor in (*model.parameters(), *model.buffers())]
    per_sample = math.prod(model.input_shape) + sum(unit.num_activations for unit in model.units)
    return predict_fixed(sizes, workload) + _FLOAT * _ACTIVATION_COPIES * per_sample * microbatch


def predict_fixed(sizes: Sequence[int], workload: Workload) -> int:
    """The part of the prediction that no microbatch changes, from the sizes of parameters and buffers alone."""
    kind = "momentum" if workload.optimizer == "sgd" and workload.momentum else workload.optimizer
    copies = 1 + 1 + 1 + _OPTIMIZER_COPIES[kind]  # weights, gradients, received weights
    return (
        WORKER_BASE_BYTES
        + _FLOAT * copies * sum(sizes)
        + _FLOAT * 2 * max(sizes, default=0)  # the optimizer's temporaries, a kernel's reordered weight
        + _SCRATCH_BYTES
        + workload.held_bytes
    )
