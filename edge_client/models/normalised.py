"""A model that normalises its own inputs: x becomes (x - mean) * scale, with one mean and scale per channel or feature.

The numbers are two buffers of the first unit. So they travel with the weights, and whoever runs the model (training,
evaluation, an exported file) normalises in the same way. They come from the sums of all devices' inputs
(`data.input_sums`) and never change afterwards.
Does not cover: whether a run wants this (`train.normalise`), adding up the sums.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from edge_client.data.input_sums import MAX_CHANNELS, MEAN, SCALE
from edge_client.errors import InputError
from edge_client.models.axes import WHOLE
from edge_client.models.contract import Model
from edge_client.models.found_units.model import FoundModel

__all__ = ["normalise_inputs", "number_names"]


def normalise_inputs(model: Model) -> Model:
    """Make a model normalise its inputs, at first with mean 0 and scale 1; raises `InputError` if it cannot."""
    first = model.order[0]
    stem = model.module if isinstance(model, FoundModel) else model.get_submodule(first)
    num_channels = model.input_shape[0]
    if num_channels > MAX_CHANNELS:
        raise InputError(f"train.normalise: expected at most {MAX_CHANNELS} channels or features, got {num_channels}")
    others = () if isinstance(model, FoundModel) else model.order[1:]
    if any(model.get_submodule(name) is stem for name in others):
        raise InputError(
            f"train.normalise: the first unit {first!r} stands in the model more than once; give it a module of its own"
        )
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    stem.register_buffer(MEAN, torch.zeros(num_channels, device=device))
    stem.register_buffer(SCALE, torch.ones(num_channels, device=device))
    stem.register_forward_pre_hook(_normalise)
    names = number_names(model)
    if isinstance(model, FoundModel):
        model.give_to_first_unit(names)
    unit = model.units[0]
    model.units = (replace(unit, buffers=(*unit.buffers, *names)), *model.units[1:])
    if model.channel_axes is not None:  # the channels of the input are never sliced
        model.channel_axes = {**model.channel_axes, **dict.fromkeys(names, (WHOLE,))}
    return model


def number_names(model: Model) -> tuple[str, str]:
    """The names of mean and scale among the model's tensors."""
    if isinstance(model, FoundModel):  # its units are parts of one forward(), which gets the numbers itself
        return MEAN, SCALE
    return f"{model.order[0]}.{MEAN}", f"{model.order[0]}.{SCALE}"


def _normalise(stem: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, *others = inputs
    shape = (1, -1, *(1,) * (x.dim() - 2))
    mean, scale = stem.get_buffer(MEAN), stem.get_buffer(SCALE)
    return ((x - mean.view(shape)) * scale.view(shape), *others)
