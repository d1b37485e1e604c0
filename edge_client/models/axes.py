"""Which axes of a model's tensors are channels, as its architecture says: what a slice of its width goes by.

Unless an architecture says otherwise, the first two axes of a tensor are channels and all others are whole.
Read without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CHANNELS", "WHOLE", "Axes", "Axis", "inner_axes"]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of channels: groups that lie side by side, each sliced by itself."""

    groups: tuple[int, ...] = ()  # channels of each group; none: the whole axis is one
    repeat: int = 1  # neighbouring elements that belong to one channel, such as the pixels of a flattened map


CHANNELS = Axis()
WHOLE = None  # an axis that is never sliced: classes, the input's channels, pixels of a kernel
Axes = Mapping[str, tuple[Axis | None, ...]]  # tensor -> its axes; those behind the last one named are whole


def inner_axes(*, inputs: str, outputs: str) -> dict[str, tuple[Axis | None, ...]]:
    """The usual exceptions: the module `inputs` reads the input, the linear layer `outputs` puts out the classes."""
    return {
        f"{inputs}.weight": (CHANNELS, WHOLE),
        f"{outputs}.weight": (WHOLE, CHANNELS),
        f"{outputs}.bias": (WHOLE,),
    }
