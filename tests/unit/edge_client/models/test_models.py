"""Models: the contract of units and taps, and the registry."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from edge_client.errors import InputError, NoSuchNameError
from edge_client.models import registry, slicing
from edge_client.models.contract import Model, from_sequential

SHAPES = [("small-cnn", (1, 8, 8)), ("small-cnn", (1, 28, 28)), ("small-cnn", (3, 32, 32)), ("mlp", (1, 8, 8))]


def _build(name: str, shape: tuple[int, ...]) -> Model:
    torch.manual_seed(1)
    return registry.build(name, input_shape=shape, num_classes=10, options={})


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_the_two_halves_of_a_model_are_the_whole_at_every_unit(name: str, shape: tuple[int, ...]) -> None:
    """forward_from(next, forward_to(unit)) is forward, bit for bit, and shapes are as announced."""
    model = _build(name, shape).eval()
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(2))
    expected = model(x)
    assert expected.shape == (3, 10)
    for unit, following in zip(model.units, model.units[1:], strict=False):
        middle = model.forward_to(unit.name, x)
        assert tuple(middle.shape[1:]) == unit.out_shape == following.in_shape
        assert torch.equal(model.forward_from(following.name, middle), expected)


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_every_parameter_belongs_to_exactly_one_unit(name: str, shape: tuple[int, ...]) -> None:
    """Planners and block-wise methods rely on it."""
    model = _build(name, shape)
    assert [p for unit in model.units for p in unit.parameters] == [n for n, _ in model.named_parameters()]
    assert [unit.kind for unit in model.units] == ["stem", *["block"] * (len(model.units) - 2), "head"]


def test_small_cnn_has_the_parameters_of_its_formula() -> None:
    """1x8x8, width 32: 32(9+1) + 64(288+1) + 10(64*2*2+1) = 320 + 18,496 + 2,570 = 21,386."""
    assert sum(p.numel() for p in _build("small-cnn", (1, 8, 8)).parameters()) == 21_386


def test_activations_are_counted_per_layer() -> None:
    """mlp on 1x8x8 with hidden 64: flatten 64; linear 64 + relu 64; head 10."""
    assert [unit.num_activations for unit in _build("mlp", (1, 8, 8)).units] == [64, 128, 10]


def test_a_sequence_gets_taps_and_stages_for_free() -> None:
    """`features` is the input of the head, `stage_i_out` the last block of its stage."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model = from_sequential(layers, input_shape=(4,), stages=[0, 1, 1, 2, 3])
    assert dict(model.taps) == {
        "stem_out": "0",
        "block_1_out": "1",
        "block_2_out": "2",
        "block_3_out": "3",
        "stage_1_out": "2",
        "stage_2_out": "3",
        "features": "3",
        "logits": "4",
    }
    assert [unit.index for unit in model.units] == [0, 0, 1, 0, 0]
    assert model.training
    assert int(model.state_dict()["3.num_batches_tracked"]) == 0  # learning the shapes leaves no trace


def test_an_unknown_unit_lists_the_known_ones() -> None:
    """A typo is fixed in seconds."""
    with pytest.raises(NoSuchNameError, match="unknown unit 'blok1'; known: block1, head, stem"):
        _build("small-cnn", (1, 8, 8)).forward_to("blok1", torch.zeros(1, 1, 8, 8))


def test_an_unknown_model_lists_the_known_ones() -> None:
    """Both `validate` and `build` say so."""
    with pytest.raises(NoSuchNameError, match=r"unknown model 'resnet'; known: densenet121, .*, mlp, .*, vit-t-16"):
        registry.validate("resnet", (1, 8, 8), {})
    with pytest.raises(NoSuchNameError, match="unknown model"):
        registry.build("resnet", input_shape=(1, 8, 8), num_classes=10, options={})


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("small-cnn", (64,), {}, "channels, height, width"),
        ("small-cnn", (1, 2, 8), {}, "at least 4x4"),
        ("small-cnn", (1, 8, 8), {"widht": 3}, "did you mean 'width'"),
        ("small-cnn", (1, 8, 8), {"width": 0}, "expected 1 to 1024, got 0"),
        ("small-cnn", (1, 8, 8), {"width": True}, "expected int, got bool"),
        ("mlp", (4,), {"hidden": 64}, "expected a list"),
        ("mlp", (65536, 65536), {}, "input shape"),
        ("mlp", (65536, 16), {"hidden": [65536]}, "narrow it"),
        ("mlp", (), {}, "input shape"),
        ("preresnet20", (3, 7, 32), {}, "'preresnet20' needs .* at least 8x8"),
        ("preresnet20", (3, 32, 32), {"shortcut": "none"}, "shortcut"),
        ("preresnet20", (3, 32, 32), {"track-running-stat": True}, "did you mean 'track-running-stats'"),
        ("preresnet20", (200000, 8, 8), {"width": 256}, "460800000 weights, expected at most 268435456"),
        ("resnet18", (64,), {}, "'resnet18' needs .* channels, height, width"),
        ("resnet18", (3, 32, 32), {"base-width": 257}, "expected 1 to 256, got 257"),
        ("resnet18", (3, 32, 32), {"track-running-stats": False}, r"more than 32x32 .*set small-stem = true"),
        ("resnet18", (3, 8, 8), {"track-running-stats": False, "small-stem": True}, "more than 8x8 pixels, got"),
        ("densenet121", (3, 32, 32), {"track-running-stats": False}, "the last stage has one pixel of each"),
        ("mlp", (4,), {"track-running-stats": False}, "unknown key 'track-running-stats'"),
        ("resnet18", (65536, 64, 64), {"base-width": 128}, "first convolution would have 411041792 weights"),
        ("vit-t-16", (3, 32, 40), {}, r"multiples of patch = 16, got \[3, 32, 40\]"),
        ("vit-t-16", (3, 32, 32), {"heads": 5}, "multiples of heads = 5, got 192"),
        ("vit-t-16", (1, 16384, 16384), {"patch": 4}, "table of 16777217 positions"),
        ("vit-s-12", (3, 32, 32), {"depth": 4}, "unknown key 'depth'"),
        ("densenet121", (3, 7, 32), {}, "'densenet121' needs .* at least 8x8"),
        ("densenet161", (65536, 64, 64), {}, "first convolution would have 308281344 weights"),
        ("har-cnn", (9, 128, 1), {}, r"channels, length with at least 8 values, got \[9, 128, 1\]"),
        ("har-cnn", (9, 7), {}, "at least 8 values"),
        ("har-transformer", (9, 100), {}, r"a length in multiples of patch = 8, got \[9, 100\]; cut the windows"),
        ("har-transformer", (9, 128), {"width": 30}, "multiples of heads = 4, got 30"),
    ],
)
def test_options_and_shapes_are_checked(
    name: str, shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    """What came and what was expected stand in the message."""
    with pytest.raises(InputError, match=message):
        registry.validate(name, shape, options)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("resnet10", (3, 33, 20), {"base-width": 2}),
        ("resnet14", (3, 9, 8), {"base-width": 2, "small-stem": True}),
        ("resnet50", (3, 9, 9), {"base-width": 2, "small-stem": True}),
        ("densenet121", (3, 9, 9), {"growth": 2, "base-width": 4, "small-stem": True}),
        ("har-cnn", (3, 8), {"width": 2}),
        ("preresnet20", (3, 8, 8), {"width": 2}),
    ],
)
def test_without_running_statistics_no_buffers_travel_and_one_sample_can_be_judged(
    name: str, shape: tuple[int, ...], options: dict[str, object]
) -> None:
    """The smallest images that are accepted; parameters are those of a model with statistics, with the same values."""
    built = {}
    for track in (False, True):
        torch.manual_seed(1)
        chosen = {**options, "track-running-stats": track}
        built[track] = registry.build(name, input_shape=shape, num_classes=3, options=chosen)
        assert registry.keeps_statistics(name, chosen) is track
    plain = built[False]
    assert list(plain.buffers()) == []
    assert len(list(built[True].buffers())) > 0
    tracked = dict(built[True].named_parameters())
    assert all(torch.equal(value, tracked.pop(key)) for key, value in plain.named_parameters())
    assert tracked == {}
    assert plain.eval()(torch.randn(1, *shape)).isfinite().all()


def test_names_are_checked_without_torch_and_numpy() -> None:
    """The coordinator checks runs, the daemon reads device files, and neither loads them."""
    code = (
        "import sys\n"
        "from edge_client.data import registry as data\n"
        "from edge_client.methods import registry as methods\n"
        "from edge_client.models import registry as models\n"
        "import edge_client.device.guard, edge_client.device.profile, edge_client.worker.process\n"
        "models.validate('mlp', (1, 8, 8), {'hidden': [3]}); methods.validate('fedprox', {'mu': 0.1}); data.names()\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("cut", ["full", "width:1/4:o3"])
@pytest.mark.parametrize("name", ["mlp", "small-cnn", "preresnet20", "resnet10", "vit-t-16", "har-cnn"])
def test_the_sizes_of_parameters_are_known_without_the_model(name: str, cut: str) -> None:
    """As those of the model itself, with its buffers, and of its slices."""
    shape = (1, 16) if name == "har-cnn" else (1, 16, 16)
    model = registry.build(name, input_shape=shape, num_classes=10, options={}, spec=slicing.parse(cut))
    sizes = registry.parameter_sizes(name, input_shape=shape, num_classes=10, options={}, spec=slicing.parse(cut))
    assert sizes == [tensor.numel() for tensor in (*model.parameters(), *model.buffers())]


def test_neither_sizes_nor_a_step_load_more_of_torch() -> None:
    """Its shape functions and its compiler (77 MB, some 800 modules) stay out, whichever model it is."""
    code = (
        "import sys\n"
        "from edge_client.models import registry as r\n"
        "import torch\n"
        "before = len(sys.modules)\n"
        "for n in r.names(): r.parameter_sizes(n, input_shape=r.default_input(n), num_classes=10, options={})\n"
        "for n in ('preresnet20', 'resnet10', 'vit-t-16'):\n"
        "    model = r.build(n, input_shape=(1, 16, 16), num_classes=10, options={})\n"
        "    model(torch.zeros(2, 1, 16, 16)).sum().backward()\n"
        "assert len(sys.modules) < before + 20, len(sys.modules) - before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
