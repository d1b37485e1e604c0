"""Which memory layout a model's images have; channels last spares copies that kernels would make."""

from __future__ import annotations

import torch
from torch import nn

from edge_client.models.contract import Model

__all__ = ["allows_channels_last", "to_channels_last"]


def allows_channels_last(model: Model) -> bool:
    """Whether all channels behind the first convolution are multiples of 8: others corrupt memory in torch 2.13."""
    convs = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    channels = [conv.out_channels for conv in convs] + [conv.in_channels for conv in convs[1:]]
    return bool(convs) and all(count % 8 == 0 for count in channels)


def to_channels_last(model: Model) -> None:
    """Lay out the weights so; activations follow."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
