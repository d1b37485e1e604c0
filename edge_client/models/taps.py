"""Activations on the way to the logits, with their gradients: one pass gives both.

A tap is a unit's output, or that of a part inside a unit. Units may be made again in backward (`recompute`); what is
inside of such a unit then has no gradient in the first pass, and is refused.
Does not cover: activations that are only looked at (`Phase.taps`, the loop hooks them).
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from edge_client.device.accelerator import device_of
from edge_client.errors import NoSuchNameError
from edge_client.models.contract import Model

__all__ = ["flat_width", "tapped"]


def tapped(model: Model, taps: Collection[str], x: Tensor, *, start: str = "") -> tuple[dict[str, Tensor], Tensor]:
    """The outputs at `taps` and the logits, for an input of the model, or of its unit `start`."""
    unknown = [tap for tap in taps if tap not in model.taps]
    if unknown:
        raise NoSuchNameError.of("tap", unknown[0], list(model.taps))
    units = model.order[model.order.index(start) if start else 0 :]
    seen: dict[str, Tensor] = {}
    inside = [tap for tap in taps if model.taps[tap] not in model.order]
    handles = [_keep(model, tap, seen) for tap in inside]
    try:
        for number, unit in enumerate(units):
            x = model.run_units([unit], x)
            mine = [tap for tap in taps if model.taps[tap] == unit]
            overwritten = number + 1 < len(units) and model.overwrites(units[number + 1])
            seen |= dict.fromkeys(mine, x.clone() if overwritten and mine else x)
    finally:
        for handle in handles:
            handle.remove()
    return seen, x


def _keep(model: Model, tap: str, seen: dict[str, Tensor]) -> torch.utils.hooks.RemovableHandle:
    place = model.taps[tap]
    unit = next(name for name in model.order if place.startswith(f"{name}."))
    if model.recompute == "units" and unit != model.order[-1] and torch.is_grad_enabled():
        raise ValueError(f"the tap {tap!r} is inside {unit!r}, which is made again in backward; set recompute to None")

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        seen[tap] = output

    return model.get_submodule(place).register_forward_hook(keep)


def flat_width(model: Model, tap: str) -> int:
    """Numbers that the tap puts out for one sample."""
    was_training = model.training
    model.eval()  # one sample has no batch statistics
    with torch.no_grad():
        seen, _ = tapped(model, [tap], device_of(model).move(torch.zeros(1, *model.input_shape)))
    model.train(was_training)
    return seen[tap].numel()
