"""Which weights of a stage have the shape of an earlier one: what InCo needs to know of a model.

    anchors(model)["stage1_block2.conv1.weight"] == "stage1_block1.conv2.weight"

An architecture may name its anchors itself; otherwise the first weight of a shape in a stage is the anchor of all later
ones of that shape. Only weights of blocks with two axes or more count.
"""

from __future__ import annotations

from collections.abc import Iterable

from edge_client.models.contract import Model

__all__ = ["anchors", "first_of_shape"]


def anchors(model: Model) -> dict[str, str]:
    """The anchor of each weight that has one."""
    if model.anchor_names is not None:
        return dict(model.anchor_names)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    blocks = [unit for unit in model.units if unit.kind == "block"]
    return first_of_shape(
        (unit.stage, name, shapes[name]) for unit in blocks for name in unit.parameters if len(shapes[name]) > 1
    )


def first_of_shape(weights: Iterable[tuple[int, str, tuple[int, ...]]]) -> dict[str, str]:
    """From stage, name and shape of weights in order: each later one of a shape in its stage -> the first one."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    anchor_of = {}
    for stage, name, shape in weights:
        anchor = first.setdefault((stage, shape), name)
        if anchor != name:
            anchor_of[name] = anchor
    return anchor_of
