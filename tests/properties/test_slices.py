"""Any slice of any model: its index map fits the model that is built, and the coverage mean puts it back."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edge_client.models import registry
from edge_client.models.contract import Model
from edge_client.models.slicing import FULL, SliceSpec, index_map, parse, take, take_tensor
from edge_client.params import coverage_mean

FAST = settings(max_examples=40)

# name, shape of a sample, options, most and fewest blocks per stage (None: no slices of the depth)
MODELS: list[tuple[str, tuple[int, ...], dict[str, Any], list[tuple[int, int]] | None]] = [
    ("mlp", (5,), {"hidden": (6, 6, 3)}, [(1, 1), (0, 1), (1, 1)]),
    ("small-cnn", (1, 8, 8), {"width": 3}, [(1, 1)]),
    ("har-cnn", (2, 16), {"width": 4}, [(0, 2), (1, 2)]),
    ("har-transformer", (2, 16), {"width": 8, "heads": 2}, [(0, 3)]),
    ("preresnet20", (1, 8, 8), {"width": 3, "track_running_stats": True}, [(0, 3), (1, 3), (1, 3)]),
    ("resnet22", (1, 8, 8), {"base_width": 3, "small_stem": True}, [(0, 2), (1, 2), (1, 3), (1, 3)]),
    ("resnet50", (1, 8, 8), {"base_width": 1}, [(1, 3), (1, 4), (1, 6), (1, 3)]),
    ("densenet121", (1, 8, 8), {"base_width": 3, "growth": 2}, None),
    (
        "densenet121",
        (1, 9, 9),
        {"base_width": 3, "growth": 2, "small_stem": True, "track_running_stats": False},
        None,
    ),
    ("vit-t-16", (1, 8, 8), {"patch": 4, "width": 6, "heads": 3, "depth": 4}, [(0, 4)]),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _full(number: int) -> Model:
    name, shape, options, _ = MODELS[number]
    torch.manual_seed(number)
    return registry.build(name, input_shape=shape, num_classes=4, options=options)


@st.composite
def slices(draw: st.DrawFn, number: int) -> SliceSpec:
    """A slice that the model has."""
    stages = MODELS[number][3]
    width = draw(st.fractions(min_value=Fraction(1, 16), max_value=1, max_denominator=16))
    offset = draw(st.integers(0, 40))
    depths = None
    if stages is not None and draw(st.booleans()):
        depths = tuple(draw(st.integers(least, most)) for least, most in stages)
    return SliceSpec(depths=depths, width=width, offset=offset)


def fleets(numbers: list[int]) -> st.SearchStrategy[tuple[int, list[SliceSpec]]]:
    """One of these models, and up to four devices with a slice of it."""
    return st.sampled_from(numbers).flatmap(
        lambda number: st.tuples(st.just(number), st.lists(slices(number), min_size=1, max_size=4))
    )


@FAST
@given(fleets(list(range(len(MODELS)))))
def test_the_index_map_fits_the_model_that_is_built(fleet: tuple[int, list[SliceSpec]]) -> None:
    """The same names in the same order, the same shapes; indices are distinct and inside; the text is short."""
    number, (cut, *_) = fleet
    name, shape, options, _ = MODELS[number]
    full = _full(number)
    places = index_map(full, cut)
    with torch.device("meta"):
        small = registry._layers(name, shape, 4, options, cut).state_dict()
    state = take(full.state_dict(), places)
    assert [(tensor, value.shape) for tensor, value in state.items()] == [(t, v.shape) for t, v in small.items()]
    for tensor, place in places.items():
        for indices, size in zip(place or (), full.state_dict()[tensor].shape, strict=False):
            assert len(set(indices.tolist())) == len(indices)
            assert 0 <= int(indices.min()) <= int(indices.max()) < size
    assert parse(str(cut)) == cut
    assert len(str(cut)) <= 64


@FAST
@given(fleets(list(range(len(MODELS)))))
def test_ones_own_slices_change_nothing(fleet: tuple[int, list[SliceSpec]]) -> None:
    """Slices that come back as they went leave every bit of the model, whoever has which and counts how much."""
    number, cuts = fleet
    state = _full(number).state_dict()
    maps = [index_map(_full(number), cut) for cut in cuts]
    for name, old in state.items():
        sent = [places[name] for places in maps if name in places]
        parts = [(take_tensor(old, place), place, weight) for weight, place in enumerate(sent, start=1)]
        assert torch.equal(coverage_mean(old, parts), old), name


def _covers(number: int, cut: SliceSpec, name: str, tensor: Tensor) -> Tensor | None:
    """By hand, for the models whose channels are plain: channel c of n is in if (c - offset) mod n < ceil(width n).

    None: the unit is not in the slice. Not sliced are the classes, the input, and kernels.
    """
    if cut.depths is not None and name.startswith("stage"):
        stage, block = (int(text) for text in name.removeprefix("stage").partition(".")[0].split("_block"))
        if block > cut.depths[stage - 1]:
            return None
    covered = torch.ones(tensor.shape, dtype=torch.bool)
    fixed = {"stem.conv.weight": {1}, "head.linear.weight": {0}, "head.linear.bias": {0}}.get(name, set())
    for axis in {0, 1} - fixed:
        if axis < tensor.ndim:
            size = tensor.shape[axis]
            inside = [(c - cut.offset) % size < math.ceil(cut.width * size) for c in range(size)]
            covered &= torch.tensor(inside).view([-1 if a == axis else 1 for a in range(tensor.ndim)])
    return covered


PLAIN = [number for number, model in enumerate(MODELS) if model[0] in ("har-cnn", "resnet22", "resnet50")]


@FAST
@given(fleets(PLAIN))
def test_what_a_fleet_covers_is_updated_and_nothing_else(fleet: tuple[int, list[SliceSpec]]) -> None:
    """Every device sends its slice plus one: elements that somebody has are one more, all others keep their bits."""
    number, cuts = fleet
    maps = [index_map(_full(number), cut) for cut in cuts]
    for name, old in _full(number).state_dict().items():
        sent = [places[name] for places in maps if name in places]
        new = coverage_mean(old, [(take_tensor(old + 1, place), place, 2.0) for place in sent])
        covered = torch.zeros(old.shape, dtype=torch.bool)
        for cut in cuts:
            mine = _covers(number, cut, name, old)
            covered |= mine if mine is not None else torch.tensor(False)
        assert torch.equal(new, torch.where(covered, old + 1, old)), name


@pytest.mark.parametrize("number", [0, 1, 3])
def test_rolling_windows_reach_every_channel(number: int) -> None:
    """FedRolex: after as many rounds as the widest layer has channels, every index of every axis has had its turn."""
    state = _full(number).state_dict()
    reached: dict[str, list[set[int]]] = {name: [set() for _ in tensor.shape] for name, tensor in state.items()}
    for offset in range(max(max(tensor.shape[:2]) for tensor in state.values() if tensor.ndim)):
        for name, place in index_map(_full(number), SliceSpec(width=Fraction(1, 3), offset=offset)).items():
            for axis, size in enumerate(state[name].shape):
                reached[name][axis] |= set(range(size) if place is None else place[axis].tolist())
    assert {name: [len(found) for found in axes] for name, axes in reached.items()} == {
        name: list(tensor.shape) for name, tensor in state.items()
    }


def test_the_full_slice_is_all() -> None:
    """No indices at all: the uploads of full models need no place."""
    for number in range(len(MODELS)):
        assert index_map(_full(number), FULL) == dict.fromkeys(_full(number).state_dict())
