"""A step on zeros, unit by unit: it loads the libraries' pages and kernels and starts their threads.

What a process takes for them it keeps; training memory is counted from there. One unit at a time, so that the warm-up of a
model that is trained by groups needs no more than its largest unit.
"""

from __future__ import annotations

import torch

from edge_client.models.contract import Model
from edge_client.training.objectives import cross_entropy
from edge_client.training.optimizers import Optimizer

__all__ = ["warm_up"]

_BATCH = 2


def warm_up(model: Model, optimizer: Optimizer | None = None, *, channels_last: bool = False) -> None:
    """Forward, backward and a step of size 0 for every unit; buffers change, so weights are loaded after it."""
    model.train()
    x = torch.zeros(_BATCH, *model.input_shape)
    if channels_last and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    for unit in model.units:
        out = model.run_units([unit.name], x)
        if out.requires_grad:
            loss = cross_entropy(out, torch.zeros(_BATCH, dtype=torch.int64)).sum() if unit.kind == "head" else out.sum()
            loss.backward()  # type: ignore[no-untyped-call]
        for name in unit.parameters:
            param = model.get_parameter(name)
            if param.grad is not None and optimizer is not None:
                optimizer.step(name, param, param.grad, 0.0)
                optimizer.state.clear()
            param.grad = None
        x = out.detach()
