"""Slices: their short form, which elements they are, and that they compute what the full model would."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import InputError, NoSuchNameError
from edge_client.models import registry, slicing
from edge_client.models.anchors import anchors
from edge_client.models.contract import Model, from_sequential
from edge_client.models.slicing import FULL, SliceSpec, index_map, parse, shorten, take
from edge_client.models.user_module import adopt
from edge_client.params import IndexMap
from edge_client.task.run_model import Recipe
from edge_client.task.task import Task

Options = dict[str, Any]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _build(name: str, shape: tuple[int, ...], cut: str = "full", **options: Any) -> Model:
    torch.manual_seed(1)
    return registry.build(name, input_shape=shape, num_classes=5, options=options, spec=parse(cut))


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("full", FULL),
        ("depth:1.1.2.2", SliceSpec(depths=(1, 1, 2, 2))),
        ("layers:8", SliceSpec(layers=8)),
        ("exit:3", SliceSpec(exit=3)),
        ("exit:3-width:1/2", SliceSpec(exit=3, width=Fraction(1, 2))),
        ("width:1/4", SliceSpec(width=Fraction(1, 4))),
        ("width:1/4:o17", SliceSpec(width=Fraction(1, 4), offset=17)),
        ("depth:2.0-width:1/2", SliceSpec(depths=(2, 0), width=Fraction(1, 2))),
        ("layers:3-width:11/20:o2", SliceSpec(layers=3, width=Fraction(11, 20), offset=2)),
    ],
)
def test_a_slice_is_a_short_text(text: str, spec: SliceSpec) -> None:
    """There and back; a plan of a device carries it."""
    assert parse(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    ("text", "short"), [("width:0.25", "width:1/4"), ("width:1", "full"), ("width:2/4", "width:1/2")]
)
def test_a_width_has_one_short_form(text: str, short: str) -> None:
    """The lowest terms."""
    assert str(parse(text)) == short


@pytest.mark.parametrize(
    "text",
    [
        *("", "half", "depth:", "depth:1,2", "layers:x", "depth:1-layers:2", "depth:1-"),
        *("width:0", "width:3/2", "width:1/0", "width:-1/2", "width:1/4:17"),
        *("width:1/2-depth:1", "width:1/2-width:1/2", "-width:1/2", "full-width:1/2"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    """With the forms that there are, or with the range of a width."""
    with pytest.raises(InputError, match=r"expected (full, depth:1\.1\.2\.2|a width above 0)"):
        parse(text)


def test_widths_are_exact() -> None:
    """0.55 of 20 channels are 11; in floats it would be 11.000000000000002, hence 12. Half of 5 is rounded up."""
    assert parse("width:0.55").channels(20) == 11
    assert parse("width:1/2").channels(5) == 3


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [("1", 17_452_362), ("1/2", 4_370_090), ("1/4", 1_096_026), ("1/8", 275_762), ("1/16", 69_822)],
)
def test_widths_of_resnet26_have_the_published_parameters(ratio: str, expected: int) -> None:
    """The 17.45, 4.37, 1.10, 0.28 and 0.07 M of InCo, from the model that is built and from the index map."""
    cut = parse(f"width:{ratio}")
    with torch.device("meta"):
        layers = registry._layers("resnet26", (3, 32, 32), 10, {}, cut)
    assert sum(parameter.numel() for parameter in layers.parameters()) == expected


def test_the_index_map_of_a_wide_model_has_the_published_parameters() -> None:
    """A sixteenth of resnet26 at its full width: the products of the lengths of the indices give 69,822."""
    model = registry.build("resnet26", input_shape=(3, 32, 32), num_classes=10, options={})
    places = index_map(model, parse("width:1/16"))
    sizes = [
        parameter.numel() if place is None else torch.Size([len(axis) for axis in place]).numel()
        for name, parameter in model.named_parameters()
        for place in [places[name]]
    ]
    assert sum(sizes) == 69_822


@pytest.mark.parametrize(
    ("name", "larger", "cut"),
    [
        ("resnet10", "resnet26", "depth:1.1.1.1"),
        ("resnet14", "resnet26", "depth:1.1.2.2"),
        ("resnet18", "resnet26", "depth:2.2.2.2"),
        ("resnet22", "resnet26", "depth:2.2.3.3"),
        ("resnet26", "resnet26", "depth:3.3.3.3"),
        ("resnet26", "resnet34", "depth:3.3.3.3"),
        ("resnet50", "resnet152", "depth:3.4.6.3"),
        ("resnet101", "resnet152", "depth:3.4.23.3"),
        *[(f"vit-s-{depth}", "vit-s-12", f"layers:{depth}") for depth in (8, 9, 10, 11, 12)],
        ("vit-s-9", "vit-s-12", "depth:9"),
    ],
)
def test_a_smaller_network_is_a_slice_of_its_depth(name: str, larger: str, cut: str) -> None:
    """The same names and shapes, by the slice and by its name; at full size, without memory for it."""
    shape = registry.default_input(name)

    def state(model: str, spec: SliceSpec) -> dict[str, torch.Size]:
        with torch.device("meta"):
            layers = registry._layers(model, shape, 10, {}, spec)
        return {tensor: value.shape for tensor, value in layers.state_dict().items()}

    expected = state(name, FULL)
    assert state(larger, parse(cut)) == expected
    assert state(larger, registry.parse_slice(larger, name)) == expected


def test_a_foreign_model_is_no_slice() -> None:
    """resnet50 has other blocks than resnet26; what there is stands in the message."""
    assert registry.parse_slice("resnet26", "width:1/2") == parse("width:1/2")
    with pytest.raises(NoSuchNameError, match=r"unknown slice of resnet26 'resnet50'; known: resnet10, .*resnet34"):
        registry.parse_slice("resnet26", "resnet50")


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        ("resnet26", "depth:1.1.1", "expected blocks for 4 stages, 0 to 3, 1 to 3, 1 to 3, 1 to 3"),
        ("resnet26", "depth:1.1.4.1", "expected 0 to 3, 1 to 3, .* blocks in the stages, got 1, 1, 4, 1"),
        ("resnet26", "layers:5", r"lack stage 3, .*; use slices of depth, such as depth:3\.2\.1\.1, or .*a vit"),
        ("resnet50", "depth:0.1.1.1", "expected 1 to 3, 1 to 4, 1 to 6, 1 to 3 blocks"),
        ("densenet121", "depth:6.13.24.17", "no blocks that can be left out; use slices of width"),
        ("small-cnn", "depth:0", "no blocks that can be left out"),
        ("small-cnn", "layers:2", "no blocks that can be left out; .*another model"),
        ("vit-s-8", "layers:9", "expected blocks for 1 stages, 0 to 8"),
        ("resnet26", "exit:13", "expected an exit behind one of 12 blocks"),
        ("resnet26", "exit:0", "expected an exit behind one of 12 blocks"),
        ("densenet121", "exit:1", "this model has no exits; use another"),
    ],
)
def test_slices_that_a_model_does_not_have(name: str, cut: str, message: str) -> None:
    """What it has instead."""
    with pytest.raises(InputError, match=message):
        registry.parameter_sizes(
            name, input_shape=registry.default_input(name), num_classes=10, options={}, spec=parse(cut)
        )


def test_rolling_windows_go_on_at_the_first_channel() -> None:
    """Two of four hidden features from the fourth on are 3, 0; inputs and classes stay whole."""
    model = _build("mlp", (3,), hidden=[4])
    places = index_map(model, parse("width:1/2:o3"))
    listed = {name: place and [axis.tolist() for axis in place] for name, place in places.items()}
    assert listed == {
        "block1.linear.weight": [[3, 0], [0, 1, 2]],
        "block1.linear.bias": [[3, 0]],
        "head.weight": [[0, 1, 2, 3, 4], [3, 0]],
        "head.bias": None,
    }


def test_pixels_of_a_flattened_channel_stay_together() -> None:
    """small-cnn of width 1 on 8x8: the head reads 2 channels of 2x2; channel 1 has the features 4 to 7."""
    model = _build("small-cnn", (1, 8, 8), width=1)
    place = index_map(model, parse("width:1/2:o1"))["head.linear.weight"]
    assert place is not None
    assert place[1].tolist() == [4, 5, 6, 7]


def test_groups_side_by_side_are_sliced_each() -> None:
    """A dense layer behind stem 4 and two layers of growth 2: halves are 0, 1 of the stem, then 4 and 6."""
    model = _build("densenet121", (3, 32, 32), base_width=4, growth=2)
    place = index_map(model, parse("width:1/2"))["stage1_layer3.conv1.weight"]
    assert place is not None
    assert place[1].tolist() == [0, 1, 4, 6]


def _scattered(
    small: dict[str, Tensor], places: dict[str, IndexMap | None], full: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The full state with zeros wherever the slice has nothing; written with numpy-like indices."""
    made = {name: torch.zeros_like(tensor) for name, tensor in full.items()}
    for name, tensor in small.items():
        place = places[name]
        made[name][... if place is None else torch.meshgrid(*place, indexing="ij")] = tensor
    return made


SUBNETWORKS = [
    ("resnet26", (3, 32, 32), {"base_width": 6}, "width:1/2"),
    ("resnet26", (3, 32, 32), {"base_width": 6}, "width:2/5:o4"),
    ("resnet26", (3, 32, 32), {"base_width": 3}, "depth:1.2.1.3-width:1/2:o1"),
    ("resnet26", (3, 16, 16), {"base_width": 2, "small_stem": True}, "depth:0.1.2.1"),
    ("resnet50", (3, 32, 32), {"base_width": 3}, "depth:2.1.3.1-width:1/3:o2"),
    ("preresnet20", (3, 16, 16), {"width": 6, "track_running_stats": True}, "depth:1.3.2-width:1/3:o3"),
    ("preresnet20", (3, 16, 16), {"width": 1, "track_running_stats": True}, "width:1/2"),
    ("preresnet20", (3, 16, 16), {"width": 3, "track_running_stats": True, "shortcut": "pad"}, "depth:1.1.2"),
    ("densenet121", (3, 32, 32), {"base_width": 5, "growth": 3}, "width:1/2"),
    ("densenet121", (3, 32, 32), {"base_width": 4, "growth": 3}, "width:1/3:o2"),
    ("small-cnn", (3, 16, 16), {"width": 5}, "width:1/2:o3"),
    ("mlp", (6,), {"hidden": [8, 8, 4]}, "depth:1.0.1-width:1/2:o2"),
    ("har-cnn", (9, 32), {"width": 6}, "width:2/3:o5"),
]


@pytest.mark.parametrize(("name", "shape", "options", "cut"), SUBNETWORKS)
def test_a_slice_computes_what_the_full_model_would_without_the_rest(
    name: str, shape: tuple[int, ...], options: Options, cut: str
) -> None:
    """With zeros for all that is not in the slice, the other channels say nothing, through the same units."""
    full, small = _build(name, shape, **options).eval(), _build(name, shape, cut, **options).eval()
    places = index_map(full, parse(cut))
    with torch.no_grad():
        for tensor in (*small.parameters(), *small.buffers()):
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) / 4)  # no norm is the same as another
        full.load_state_dict(_scattered(small.state_dict(), places, full.state_dict()))
        x = torch.randn(3, *shape)
        expected = full.run_units(small.order, x)
        assert bool(expected.std(dim=0).min() > 1e-3)  # it depends on the input
        torch.testing.assert_close(small(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cut", ["width:1/2", "width:3/4:o3", "layers:1-width:1/4:o1"])
def test_a_slice_of_a_transformer_has_all_heads(cut: str) -> None:
    """As above without the norms, which look at all features; a head of h of its H features divides by sqrt(h)."""
    full, small = (_build("har-transformer", (2, 16), c, width=16, heads=4, depth=2) for c in ("full", cut))
    places = index_map(full, parse(cut))
    for model in (full, small):
        for unit in model.order[1:-1]:
            block = model.get_submodule(unit)
            block.norm1 = block.norm2 = nn.Identity()
        model.get_submodule("head").norm = nn.Identity()
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.add_(torch.rand_like(parameter) / 4)
        kept = {name: places[name] for name in small.state_dict()}
        full.load_state_dict(_scattered(small.state_dict(), kept, full.state_dict()))
        per_head = parse(cut).channels(4)
        for unit in small.order[1:-1]:
            qkv = full.get_submodule(f"{unit}.attention.qkv")
            for tensor in (qkv.weight, qkv.bias):
                tensor[:16] *= (4 / per_head) ** 0.5
        x = torch.randn(3, 2, 16)
        torch.testing.assert_close(small(x), full.run_units(small.order, x), rtol=1e-4, atol=1e-4)


def test_a_slice_trains() -> None:
    """A quarter of resnet10 from the middle of its channels: 20 steps on eight samples halve the loss."""
    model = _build("resnet10", (3, 8, 8), "width:1/4:o5", base_width=32, small_stem=True).train()
    x, y = torch.randn(8, 3, 8, 8), torch.arange(8) % 4
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        parameters = list(model.parameters())
        with torch.no_grad():
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= 0.05 * grad
    assert losses[-1] < losses[0] / 2


def _task_model() -> nn.Module:
    """Units `body.0` to `body.3` between `first` and `last`; the third changes the width."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 4)
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 6))
            self.last = nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.body(self.first(x)))
            return out

    torch.manual_seed(3)
    return Net()


UNITS = ["first", "body.0", "body.1", "body.2", "body.3", "last"]


def test_a_users_own_model_has_slices_of_its_depth() -> None:
    """Each of its blocks is a stage: the second and the last can go, and what is left computes the same as before."""
    model = adopt(_task_model(), UNITS, input_shape=(3,), num_classes=2)
    cut = parse("depth:1.0.1.0")
    places = index_map(model, cut)
    kept = ["first", "body.0", "body.2", "last"]
    assert list(places) == [f"{unit}.{tensor}" for unit in kept for tensor in ("weight", "bias")]
    state, x = take(model.state_dict(), places), torch.randn(2, 3)
    expected = model.run_units(kept, x)
    small = shorten(model, cut)
    assert small.order == tuple(kept)
    assert [unit.stage for unit in small.units] == [0, 1, 3, 5]
    assert small.state_dict().keys() == state.keys()
    assert torch.equal(small(x), expected)


def test_the_model_of_a_run_is_made_as_a_slice() -> None:
    """Built in or of a task: resnet26 as resnet10, and the task's model without its second block."""
    common = {"name": "r", "classes": ["a", "b"]}
    section = {"name": "resnet26", "input": [3, 32, 32], "base-width": 2}
    built_in = Recipe(run=parse_table(RunFile, {**common, "model": section}, source="test"))
    cut = parse("depth:1.1.1.1")
    assert [unit.name for unit in built_in.build((3, 32, 32), cut).units[1:-1]] == [
        f"stage{stage}_block1" for stage in (1, 2, 3, 4)
    ]
    assert sum(built_in.parameter_sizes(cut)) < sum(built_in.parameter_sizes())
    task = Task(model=lambda num_classes: _task_model(), train_data=lambda device: None, units=UNITS)
    own = Recipe(run=parse_table(RunFile, {**common, "task": {"name": "mine"}}, source="test"), task=task)
    assert own.build((3,), parse("depth:1.0.1.1")).order == ("first", "body.0", "body.2", "body.3", "last")
    assert own.build((3,)).order == tuple(UNITS)


def test_a_users_own_model_has_no_slices_of_its_width() -> None:
    """Nobody has said which of its axes are channels; and a block that changes the shape stays."""
    model = from_sequential(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(5, 2)), input_shape=(3,))
    with pytest.raises(InputError, match="does not tell its channels; use a slice of its depth"):
        index_map(model, parse("width:1/2"))
    with pytest.raises(InputError, match="only built-in models have slices of their width"):
        shorten(model, parse("width:1/2"))
    with pytest.raises(InputError, match="no blocks that can be left out"):
        shorten(model, parse("depth:0"))
    with pytest.raises(InputError, match='shortcut = "pad" has no slices of the width'):
        _build("preresnet20", (3, 16, 16), "width:1/2", shortcut="pad")


def test_anchors_of_a_resnet_are_second_convolutions() -> None:
    """InCo's rule: conv2 of a stage's first block for all convolutions of its further blocks, also in stage 1."""
    assert anchors(_build("resnet14", (3, 32, 32), base_width=2)) == {
        f"stage{stage}_block2.{conv}.weight": f"stage{stage}_block1.conv2.weight"
        for stage in (3, 4)
        for conv in ("conv1", "conv2")
    }
    found = anchors(_build("resnet26", (3, 32, 32), base_width=2))
    assert {name for name in found if name.startswith("stage1")} == {
        f"stage1_block{number}.{conv}.weight" for number in (2, 3) for conv in ("conv1", "conv2")
    }
    assert set(found.values()) == {f"stage{stage}_block1.conv2.weight" for stage in (1, 2, 3, 4)}
    assert anchors(_build("preresnet20", (3, 16, 16), width=2))["block2.conv1.weight"] == "block1.conv2.weight"


def test_anchors_of_other_models() -> None:
    """A transformer's are its norms; otherwise the first weight of a shape in a stage, never a projection."""
    small_vit = _build("vit-s-8", (1, 8, 8), patch=4, width=8, heads=2)
    assert anchors(small_vit) == {f"block{k}.norm2.weight": f"block{k}.norm1.weight" for k in range(1, 9)}
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    assert anchors(from_sequential(layers, input_shape=(3,), stages=[0, 1, 1, 2])) == {"2.weight": "1.weight"}
    bottlenecks = anchors(_build("resnet50", (3, 32, 32), base_width=2))
    assert not any("shortcut" in name for name in bottlenecks)
    assert bottlenecks["stage1_block3.conv1.weight"] == "stage1_block2.conv1.weight"


def test_slices_are_read_without_torch() -> None:
    """The coordinator and the daemon check what a plan names."""
    code = (
        "import sys\n"
        "from edge_client.models import slicing, registry\n"
        "assert str(registry.parse_slice('resnet26', 'resnet14')) == 'depth:1.1.2.2'\n"
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_slice_needs_sane_numbers() -> None:
    """Those who make one by hand are told at once."""
    for wrong in ({"width": Fraction(0)}, {"width": Fraction(3, 2)}, {"offset": -1}, {"depths": (1,), "layers": 1}):
        with pytest.raises(ValueError, match="expected"):
            SliceSpec(**wrong)
    assert slicing.take_tensor(torch.arange(3), None).tolist() == [0, 1, 2]
