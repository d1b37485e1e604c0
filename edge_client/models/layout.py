"""How images lie in memory, and in which type activations are computed; both are part of a result's bits.

channels_last: the channels of a pixel lie together. torch's convolutions work in that layout; in the other one they
copy what they get, which costs time and, in backward, an activation's worth of memory.
bf16: convolutions and matrix products take and give bfloat16, half the bytes; weights, their gradients and statistics
stay float32. Only worth it on a processor that has it (`device.probe.native_bf16`): others are 7 to 16 times slower.
Does not cover: which of them is used (`planning`), computing in a type (`device.accelerator`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from edge_client.device.accelerator import device_of, same_randomness
from edge_client.models.contract import Model

__all__ = ["allows_bf16", "allows_channels_last", "arranged", "to_channels_last"]

# torch 2.13 on processors with AVX2 and no more writes beyond its memory in backward of a 1x1 convolution with a stride
# in this layout, unless all its channels are multiples of 8 ("free(): invalid pointer", or worse: nothing).
_MULTIPLE = 8


def allows_channels_last(model: Model) -> bool:
    """Whether the model can be trained in this layout without harm, and takes images at all."""
    return _is_harmless(model) and _runs(model)


def _is_harmless(model: Model) -> bool:
    """2-D convolutions of multiples of 8 channels; the first one may take as many as the image has."""
    convs = [part for part in model.modules() if isinstance(part, _ConvNd)]
    if len(model.input_shape) != 3 or not convs:
        return False
    first, *others = convs
    takes_the_image = first.in_channels == model.input_shape[0] and (
        max(first.kernel_size) > 1 or max(first.stride) == 1
    )
    channels = [first.out_channels // first.groups, *([] if takes_the_image else [first.in_channels // first.groups])]
    channels += [count // conv.groups for conv in others for count in (conv.in_channels, conv.out_channels)]
    return all(isinstance(conv, nn.Conv2d) for conv in convs) and all(count % _MULTIPLE == 0 for count in channels)


def _runs(model: Model) -> bool:
    """Whether it gets through: `x.view(len(x), -1)` in a user's code refuses images that lie in another order."""
    try:
        _run(model, arranged(torch.zeros(1, *model.input_shape)))
    except RuntimeError:
        return False
    return True


@torch.no_grad()
def _run(model: Model, x: Tensor) -> None:
    """Without a trace."""
    modes, device = [(part, part.training) for part in model.modules()], device_of(model)
    model.eval()
    try:
        with same_randomness(device):
            model(device.move(x))
    finally:
        for part, mode in modes:
            part.training = mode


def allows_bf16(model: Model) -> bool:
    """Whether gradients can be trusted: torch 2.13 leaves parts of some weights' unset in bfloat16.

    They are those of convolutions with a stride beyond the width of their images, which only small images get to.
    """
    harmed = []

    def note(conv: _ConvNd, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        harmed.extend([conv] if inputs[0].shape[-1] < conv.stride[-1] and max(conv.kernel_size) > 1 else [])

    convs = [part for part in model.modules() if isinstance(part, _ConvNd)]
    handles = [conv.register_forward_hook(note) for conv in convs]
    try:
        _run(model, torch.zeros(1, *model.input_shape))
    finally:
        for handle in handles:
            handle.remove()
    return not harmed


def to_channels_last(model: Model) -> None:
    """Lay the weights of convolutions out anew; raises `ValueError` for a model that this would harm."""
    if not _is_harmless(model):
        raise ValueError("expected a model whose 2-D convolutions have multiples of 8 channels for channels_last")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def arranged(x: Tensor) -> Tensor:
    """A batch of images in channels_last; any other batch as it is."""
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x
