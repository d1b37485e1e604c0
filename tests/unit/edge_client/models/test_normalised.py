"""A model that normalises its inputs: by hand, in its slices, with all its units, and in an ONNX file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from edge_client.errors import InputError
from edge_client.models import registry
from edge_client.models.contract import Model, from_sequential
from edge_client.models.normalised import normalise_inputs, number_names
from edge_client.models.slicing import SliceSpec, index_map
from edge_client.onnx.export import write_onnx
from edge_client.onnx.file import Facts


def _set(model: Model, mean: list[float], scale: list[float]) -> None:
    state = model.state_dict()
    for name, values in zip(number_names(model), (mean, scale), strict=True):
        state[name].copy_(torch.tensor(values))


def test_each_channel_is_shifted_and_scaled() -> None:
    """A model that hands its input on: (3 - 1) * 0.5 = 1 in channel 0, (3 - 5) * 2 = -4 in channel 1."""
    model = normalise_inputs(from_sequential(nn.Sequential(nn.Identity(), nn.Flatten()), input_shape=(2, 1, 2)))
    _set(model, [1.0, 5.0], [0.5, 2.0])
    assert model(torch.full((1, 2, 1, 2), 3.0)).tolist() == [[1.0, 1.0, -4.0, -4.0]]


def test_each_feature_of_a_table_is_shifted_and_scaled() -> None:
    """Samples without positions: a number for every feature."""
    model = normalise_inputs(from_sequential(nn.Sequential(nn.Identity(), nn.Flatten()), input_shape=(3,)))
    _set(model, [1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert model(torch.tensor([[2.0, 3.0, 4.0]])).tolist() == [[1.0, 2.0, 3.0]]


def test_before_the_sums_are_there_nothing_changes() -> None:
    """Mean 0 and scale 1: the outputs are those of the same weights without."""
    torch.manual_seed(1)
    plain = registry.build("small-cnn", input_shape=(3, 8, 8), num_classes=4, options={})
    torch.manual_seed(1)
    model = normalise_inputs(registry.build("small-cnn", input_shape=(3, 8, 8), num_classes=4, options={}))
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(model(x), plain(x))


def test_the_numbers_belong_to_the_first_unit_and_no_slice_cuts_them() -> None:
    """Half of the channels of every layer, but all three of the input."""
    model = normalise_inputs(registry.build("small-cnn", input_shape=(3, 8, 8), num_classes=4, options={}))
    assert set(number_names(model)) <= set(model.units[0].buffers)
    places = index_map(model, SliceSpec(width=Fraction(1, 2)))
    assert [places[name] for name in number_names(model)] == [None, None]


def test_an_exported_file_normalises_by_itself(tmp_path: Path) -> None:
    """ONNX has the numbers inside: onnxruntime's answers are torch's, on inputs far from 0."""
    torch.manual_seed(2)
    model = normalise_inputs(registry.build("small-cnn", input_shape=(1, 8, 8), num_classes=3, options={}))
    _set(model, [100.0], [0.01])
    facts = Facts(classes=("a", "b", "c"), input=(1, 8, 8))
    written = write_onnx(model, facts, tmp_path / "m.onnx")
    assert written.relative_difference < 1e-4
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    x = 100 + 100 * torch.rand(2, 1, 8, 8)
    (answers,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert torch.allclose(torch.from_numpy(answers), model(x), atol=1e-4)


def test_a_first_unit_that_stands_there_twice_is_refused() -> None:
    """Its second pass would normalise what is normalised already."""
    shared = nn.ReLU()
    layers = nn.Sequential(shared, nn.Conv2d(1, 2, 1), shared, nn.Flatten(), nn.Linear(8, 2))
    with pytest.raises(InputError, match="more than once"):
        normalise_inputs(from_sequential(layers, input_shape=(1, 2, 2)))
