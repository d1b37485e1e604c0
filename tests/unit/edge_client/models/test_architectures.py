"""The built-in networks: sizes as published, and the whole contract at small widths."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from edge_client.models import registry
from edge_client.models.contract import Model, Unit
from edge_client.models.preresnet import preresnet
from edge_client.models.vit import vit


class Case(NamedTuple):
    """A network small enough for a test."""

    name: str
    shape: tuple[int, ...]
    options: dict[str, Any]


TINY_VIT = {"patch": 4, "width": 16, "heads": 2}
CASES = [
    Case("preresnet20", (3, 16, 16), {"width": 4}),
    Case("preresnet20", (1, 13, 9), {"width": 3, "shortcut": "pad", "stem_norm": True, "track_running_stats": True}),
    Case("resnet10", (3, 32, 32), {"base_width": 4}),
    Case("resnet14", (1, 28, 28), {"base_width": 4, "small_stem": True}),
    Case("resnet18", (3, 40, 33), {"base_width": 2}),
    Case("vit-t-16", (3, 16, 16), {**TINY_VIT, "depth": 3}),
    Case("vit-s-8", (1, 8, 16), TINY_VIT),
    Case("resnet50", (3, 32, 32), {"base_width": 2}),
    Case("densenet121", (3, 21, 32), {"base_width": 4, "growth": 2}),
    Case("har-cnn", (9, 25), {"width": 4}),
    Case("har-transformer", (9, 32), {"width": 16}),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors this small are slower on two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _build(case: Case, num_classes: int = 5) -> Model:
    torch.manual_seed(1)
    return registry.build(case.name, input_shape=case.shape, num_classes=num_classes, options=case.options)


def _samples(case: Case, count: int = 3) -> Tensor:
    return torch.randn(count, *case.shape, generator=torch.Generator().manual_seed(2))


def _cuts(model: Model) -> list[tuple[Unit, Unit]]:
    """Neighbours in order; of a deep network about ten of them."""
    pairs = list(itertools.pairwise(model.units))
    return pairs[:: len(pairs) // 10 + 1]


def _num_parameters(name: str, shape: tuple[int, ...], num_classes: int, **options: Any) -> int:
    """Of the full-size network, without memory for it."""
    with torch.device("meta"):
        layers = registry._layers(name, shape, num_classes, options)
    return sum(parameter.numel() for parameter in layers.parameters())


@pytest.mark.parametrize(
    ("name", "ten", "grey", "hundred"),
    [
        ("resnet10", 4_910_922, 4_904_650, 4_957_092),
        ("resnet14", 10_812_234, 10_805_962, 10_858_404),
        ("resnet18", 11_181_642, 11_175_370, 11_227_812),
        ("resnet22", 17_082_954, 17_076_682, 17_129_124),
        ("resnet26", 17_452_362, 17_446_090, 17_498_532),
        ("resnet34", 21_289_802, 21_289_802 - 2 * 49 * 64, 21_289_802 + 90 * 513),
        ("resnet50", 23_528_522, 23_528_522 - 2 * 49 * 64, 23_528_522 + 90 * 2049),
        ("resnet101", 42_520_650, 42_520_650 - 2 * 49 * 64, 42_520_650 + 90 * 2049),
        ("resnet152", 58_164_298, 58_164_298 - 2 * 49 * 64, 58_164_298 + 90 * 2049),
    ],
)
def test_resnets_have_the_published_parameters(name: str, ten: int, grey: int, hundred: int) -> None:
    """The 4.91, 10.81, 11.18, 17.08 and 17.45 M of FedIN, and those of He et al.; also 1 channel, and 100 classes."""
    shapes = [((3, 32, 32), 10), ((1, 28, 28), 10), ((3, 32, 32), 100)]
    assert [_num_parameters(name, shape, classes) for shape, classes in shapes] == [ten, grey, hundred]


def test_the_small_stem_saves_its_convolution() -> None:
    """resnet26: 17,452,362 - 3 x (49 - 9) x 64 = 17,444,682, the 17.445 M of the CIFAR variant."""
    assert _num_parameters("resnet26", (3, 32, 32), 10, small_stem=True) == 17_444_682


@pytest.mark.parametrize(("base_width", "expected"), [(32, 4_370_090), (16, 1_096_026), (8, 275_762), (4, 69_822)])
def test_narrow_resnets_have_the_published_parameters(base_width: int, expected: int) -> None:
    """resnet26 at 1/2, 1/4, 1/8 and 1/16 of its width: 4.37, 1.10, 0.28 and 0.07 M."""
    assert _num_parameters("resnet26", (3, 32, 32), 10, base_width=base_width) == expected


@pytest.mark.parametrize(
    ("options", "ten", "hundred"),
    [
        ({}, 272_282, 278_132),
        ({"stem_norm": True}, 272_314, 278_164),
        ({"shortcut": "pad"}, 269_722, 275_572),
    ],
)
def test_preresnet20_has_the_published_parameters(options: dict[str, Any], ten: int, hundred: int) -> None:
    """10 classes: 272,282, with the stem's norm 272,314, with padded shortcuts 269,722; 100 classes: 5,850 more."""
    assert _num_parameters("preresnet20", (3, 32, 32), 10, **options) == ten
    assert _num_parameters("preresnet20", (3, 32, 32), 100, **options) == hundred


@pytest.mark.parametrize(
    ("name", "num_classes", "expected"),
    [
        ("vit-s-8", 10, 14_571_658),
        ("vit-s-9", 10, 16_346_122),
        ("vit-s-10", 10, 18_120_586),
        ("vit-s-11", 10, 19_895_050),
        ("vit-s-12", 10, 21_669_514),
        ("vit-t-16", 10, 5_526_346),
        ("vit-t-16", 1000, 5_717_416),
    ],
)
def test_transformers_have_the_published_parameters(name: str, num_classes: int, expected: int) -> None:
    """3x224x224: vit-s-8 14,571,658, 1,774,464 per further block; vit-t-16 5,526,346, 1,000 classes 5,717,416."""
    assert _num_parameters(name, (3, 224, 224), num_classes) == expected


@pytest.mark.parametrize(
    ("name", "ten", "thousand"),
    [
        ("densenet121", 6_964_106, 7_978_856),
        ("densenet161", 26_494_090, 28_681_000),
        ("densenet169", 12_501_130, 14_149_480),
        ("densenet201", 18_112_138, 20_013_928),
        ("resnet50", 23_528_522, 25_557_032),
        ("resnet101", 42_520_650, 44_549_160),
        ("resnet152", 58_164_298, 60_192_808),
    ],
)
def test_deep_networks_have_the_published_parameters(name: str, ten: int, thousand: int) -> None:
    """For 10 classes, and for the 1,000 of ImageNet, for which they were published."""
    assert [_num_parameters(name, (3, 32, 32), classes) for classes in (10, 1000)] == [ten, thousand]


def test_models_for_sensors_are_small() -> None:
    """9 channels of 128 values, 10 classes.

    har-cnn: 9*5*32+64, 2 (32*32*5+64), 32*64*5+128, 64*64*5+128, 64*10+10 = 1,504 + 10,368 + 10,368 + 20,608 + 650.
    har-transformer: stem 9*8*64+64 + 64 + 17*64 = 5,824; 3 blocks of 12*64^2+13*64 = 49,984; head 128 + 650.
    """
    assert _num_parameters("har-cnn", (9, 128), 10) == 43_498
    assert _num_parameters("har-transformer", (9, 128), 10) == 5_824 + 3 * 49_984 + 778


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuts_change_nothing_in_evaluation(case: Case) -> None:
    """forward_from(next, forward_to(unit)) is forward, bit for bit, and shapes are as announced."""
    model, x = _build(case).eval(), _samples(case)
    expected = model(x)
    assert expected.shape == (3, 5)
    for unit, following in _cuts(model):
        middle = model.forward_to(unit.name, x)
        assert tuple(middle.shape[1:]) == unit.out_shape == following.in_shape
        assert torch.equal(model.forward_from(following.name, middle), expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cuts_change_nothing_in_training(case: Case) -> None:
    """Each cut on a copy of its own: the same logits, and the same running statistics after it."""
    fresh, x = _build(case).train(), _samples(case)
    whole = copy.deepcopy(fresh)
    expected = whole(x)
    for unit, following in _cuts(fresh):
        cut = copy.deepcopy(fresh)
        assert torch.equal(cut.forward_from(following.name, cut.forward_to(unit.name, x)), expected)
        for name, buffer in whole.named_buffers():
            assert torch.equal(cut.get_buffer(name), buffer), name


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_reaches_every_parameter(case: Case) -> None:
    """No parameter is left out of the graph, and none gets a gradient of zeros only."""
    model = _build(case).train()
    cross_entropy(model(_samples(case, 4)), torch.tensor([0, 1, 2, 3])).backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())]
    assert still == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_units_hold_the_whole_state(case: Case) -> None:
    """Parameters of the units in order, then what travels beside them, are exactly the names of the state."""
    model = _build(case)
    assert [name for unit in model.units for name in unit.parameters] == [name for name, _ in model.named_parameters()]
    assert {name for unit in model.units for name in unit.buffers} == {name for name, _ in model.named_buffers()}
    listed = [name for unit in model.units for name in (*unit.parameters, *unit.buffers)]
    assert sorted(listed) == sorted(model.state_dict())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_seed_decides_the_weights(case: Case) -> None:
    """The same global seed, the same bits; all are finite."""
    first, second = _build(case).state_dict(), _build(case).state_dict()
    assert all(torch.equal(first[name], second[name]) and bool(first[name].isfinite().all()) for name in first)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_tap_is_put_out_once(case: Case) -> None:
    """Hooks see one output per tap and forward pass; features are flat and the last thing before the logits."""
    model, seen = _build(case).eval(), []
    for tap, place in model.taps.items():
        model.get_submodule(place).register_forward_hook(lambda m, i, out, tap=tap: seen.append((tap, out)))
    logits = model(_samples(case))
    outputs = dict(seen)
    assert len(seen) == len(model.taps)
    assert torch.equal(outputs["logits"], logits)
    assert outputs["features"].ndim == 2
    linear = model.get_submodule("head.linear")
    assert torch.equal(linear(outputs["features"]), logits)


def test_stages_of_a_resnet_halve_and_double() -> None:
    """resnet26 on 32x32, a sixteenth of the width: stem (4,8,8), then (4,8,8), (8,4,4), (16,2,2), (32,1,1)."""
    model = _build(Case("resnet26", (3, 32, 32), {"base_width": 4}))
    assert [(unit.kind, unit.stage, unit.index) for unit in model.units] == [
        ("stem", 0, 0),
        *[("block", stage, index) for stage in (1, 2, 3, 4) for index in (0, 1, 2)],
        ("head", 5, 0),
    ]
    out = {unit.name: unit.out_shape for unit in model.units}
    assert out["stem"] == (4, 8, 8)
    shapes = [out[model.taps[f"stage_{stage}_out"]] for stage in (1, 2, 3, 4)]
    assert shapes == [(4, 8, 8), (8, 4, 4), (16, 2, 2), (32, 1, 1)]
    assert model.taps["block_12_out"] == model.taps["stage_4_out"] == "stage4_block3"


def test_a_smaller_resnet_is_named_inside_the_larger() -> None:
    """10 < 14 < 18 < 22 < 26, by names and shapes: weights are averaged by name."""
    states = [_build(Case(f"resnet{n}", (3, 32, 32), {"base_width": 2})).state_dict() for n in (10, 14, 18, 22, 26)]
    for small, large in itertools.pairwise(states):
        assert small.keys() < large.keys()
        assert all(tensor.shape == large[name].shape for name, tensor in small.items())


def test_convolutions_are_numbered_along_the_main_path() -> None:
    """After their norm where one follows: resnet18 has 17 of them, preresnet20 19; shortcuts do not count."""
    resnet = _build(Case("resnet18", (3, 32, 32), {"base_width": 2}))
    pre = _build(Case("preresnet20", (3, 16, 16), {"width": 2}))
    for model, count in ((resnet, 17), (pre, 19)):
        assert {tap for tap in model.taps if tap.startswith("conv_")} == {f"conv_{k}" for k in range(1, count + 1)}
    assert [resnet.taps[f"conv_{k}"] for k in (1, 2, 17)] == ["stem.norm", "stage1_block1.norm1", "stage4_block2.norm2"]
    assert [pre.taps[f"conv_{k}"] for k in (1, 2, 3, 19)] == [
        "stem.conv",
        "block1.norm2",
        "block1.conv2",
        "block9.conv2",
    ]


@pytest.mark.parametrize(
    ("name", "num_convs", "first", "middle", "last"),
    [
        ("resnet50", 49, (64, 16, 16), None, (2048, 1, 1)),
        ("resnet101", 100, (64, 16, 16), (1024, 2, 2), (2048, 1, 1)),
        ("resnet152", 151, (64, 16, 16), (1024, 2, 2), (2048, 1, 1)),
        ("densenet121", 120, (64, 16, 16), None, (1024, 1, 1)),
        ("densenet161", 160, (96, 16, 16), None, (2208, 1, 1)),
        ("densenet169", 168, (64, 16, 16), None, (1664, 1, 1)),
        ("densenet201", 200, (64, 16, 16), None, (1920, 1, 1)),
    ],
)
def test_drafts_have_the_published_shapes(
    name: str, num_convs: int, first: tuple[int, ...], middle: tuple[int, ...] | None, last: tuple[int, ...]
) -> None:
    """DraftFed at 32x32: the first and the last convolution's tap, and the 49th, which deeper ResNets supply."""
    shapes: dict[str, tuple[int, ...]] = {}
    with torch.no_grad():
        model = _build(Case(name, (3, 32, 32), {}))
        for tap in ("conv_1", "conv_49", f"conv_{num_convs}"):
            model.get_submodule(model.taps[tap]).register_forward_hook(
                lambda m, i, out, tap=tap: shapes.__setitem__(tap, tuple(out.shape[1:]))
            )
        model.eval()(torch.zeros(1, 3, 32, 32))
    assert {tap for tap in model.taps if tap.startswith("conv_")} == {f"conv_{k}" for k in range(1, num_convs + 1)}
    assert (shapes["conv_1"], shapes[f"conv_{num_convs}"]) == (first, last)
    assert middle is None or shapes["conv_49"] == middle


def test_a_bottleneck_is_that_of_the_paper() -> None:
    """1x1, 3x3 with the stride, 1x1, each normed, plus the projection: written out with functions."""
    model = _build(Case("resnet50", (3, 32, 32), {"base_width": 2})).eval()
    block, x = model.get_submodule("stage2_block1"), torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(3))

    def normed(name: str, norm: str, inputs: Tensor, **how: int) -> Tensor:
        layer = block.get_submodule(norm)
        out = nn.functional.conv2d(inputs, block.get_submodule(name).weight, **how)
        return nn.functional.batch_norm(out, layer.running_mean, layer.running_var, layer.weight, layer.bias)

    out = normed("conv1", "norm1", x).relu()
    out = normed("conv2", "norm2", out, stride=2, padding=1).relu()
    out = normed("conv3", "norm3", out) + normed("shortcut.conv", "shortcut.norm", x, stride=2)
    torch.testing.assert_close(block(x), out.relu())


def test_a_dense_layer_adds_to_what_it_was_given() -> None:
    """Its input, bit for bit, then `growth` channels; a transition halves channels and size, rounded up."""
    model = _build(Case("densenet121", (3, 28, 28), {"base_width": 6, "growth": 3})).eval()
    x = torch.randn(2, 6, 7, 7, generator=torch.Generator().manual_seed(3))
    out = model.get_submodule("stage1_layer1")(x)
    assert out.shape == (2, 9, 7, 7)
    assert torch.equal(out[:, :6], x)
    shapes = {unit.name: unit.out_shape for unit in model.units}
    assert shapes["stage1_layer6"] == (6 + 6 * 3, 7, 7)
    assert shapes["stage2_transition"] == (12, 4, 4)
    assert shapes["stage4_transition"][1:] == (1, 1)
    assert [model.units[k].index for k in (6, 7, 8)] == [5, 0, 1]  # the transition begins its stage
    assert [model.taps[f"conv_{k}"] for k in (1, 2, 3, 13, 14)] == [
        "stem.norm",
        "stage1_layer1.norm2",
        "stage1_layer2.norm1",
        "stage2_transition.norm",
        "stage2_layer1.norm1",
    ]


def test_densenets_share_names_and_shapes_up_to_the_third_stage() -> None:
    """121, 169 and 201 differ from layer 25 of stage 3 on: FedPer's common base; the shapes at growth 1."""
    small, large = (_build(Case(f"densenet{n}", (3, 32, 32), {"growth": 1})).state_dict() for n in (121, 201))
    common = [name for name in small if name in large and small[name].shape == large[name].shape]
    last = next(number for number, name in enumerate(small) if name.startswith("stage4_transition"))
    assert common[:last] == list(small)[:last]
    assert list(large)[:last] == list(small)[:last]
    assert list(large)[last].startswith("stage3_layer25")


def test_windows_halve_twice_in_har_cnn() -> None:
    """128 values: 64 behind the stem's pooling, 32 in the second stage; 25 values: 12 and 6."""
    for length, halved in ((128, (64, 32)), (25, (12, 6))):
        model = _build(Case("har-cnn", (9, length), {"width": 4}))
        shapes = [unit.out_shape for unit in model.units]
        assert shapes == [(4, halved[0])] * 3 + [(8, halved[1])] * 2 + [(5,)]
    transformer = _build(Case("har-transformer", (9, 128), {}))
    assert [unit.out_shape for unit in transformer.units] == [(17, 64)] * 4 + [(5,)]


def test_preresnet20_keeps_running_statistics_only_if_asked() -> None:
    """Without them nothing but parameters travels, and evaluation takes the statistics of its batch."""
    plain = _build(Case("preresnet20", (3, 16, 16), {"width": 2}))
    assert [unit.buffers for unit in plain.units] == [()] * 11
    x = _samples(Case("", (3, 16, 16), {}), 4)
    assert torch.equal(plain.eval()(x), plain.train()(x))
    tracking = _build(Case("preresnet20", (3, 16, 16), {"width": 2, "track_running_stats": True}))
    assert tracking.units[1].buffers == tuple(
        f"block1.{norm}.{name}"
        for norm in ("norm1", "norm2")
        for name in ("running_mean", "running_var", "num_batches_tracked")
    )


@pytest.mark.parametrize(("shortcut", "raw"), [("conv", False), ("pad", True)])
def test_what_a_preactivation_block_adds(shortcut: str, raw: bool) -> None:
    """With the convolutions at zero only that is left: the input as it is, or padded; or 1x1 of the activated one."""
    torch.manual_seed(0)
    layers = preresnet((3, 8, 8), 2, width=3, shortcut=shortcut, stem_norm=False, track_running_stats=False)
    x = torch.randn(2, 3, 8, 8)
    for name in ("block1", "block4"):
        nn.init.zeros_(layers.get_submodule(f"{name}.conv2").weight)
    same, wider = layers.get_submodule("block1"), layers.get_submodule("block4")
    assert torch.equal(same(x), x)
    if raw:  # 3 -> 6 channels: one of zeros before, two behind
        out = wider(x)
        assert torch.equal(out[:, 1:4], x[:, :, ::2, ::2])
        assert not bool(out[:, [0, 4, 5]].any())
    else:
        scale = torch.rsqrt(x.var(dim=(0, 2, 3), unbiased=False, keepdim=True) + 1e-5)
        active = ((x - x.mean(dim=(0, 2, 3), keepdim=True)) * scale).relu()
        weight = wider.get_submodule("shortcut").weight[:, :, 0, 0]
        expected = torch.einsum("oc,bchw->bohw", weight, active[:, :, ::2, ::2])
        torch.testing.assert_close(wider(x), expected)


def test_attention_is_that_of_the_paper() -> None:
    """Softmax(Q K^T / sqrt(width of a head)) V, heads side by side, written out with loops over the heads."""
    torch.manual_seed(0)
    layers = vit((1, 4, 4), 2, patch=2, width=6, heads=2, depth=1)
    attention = layers.get_submodule("block1.attention")
    x = torch.randn(3, 5, 6)
    query, key, value = (x @ attention.get_submodule("qkv").weight.T).chunk(3, dim=2)
    heads = []
    for part in (slice(0, 3), slice(3, 6)):
        scores = query[:, :, part] @ key[:, :, part].transpose(1, 2) / 3**0.5
        heads.append(scores.softmax(dim=2) @ value[:, :, part])
    torch.testing.assert_close(attention(x), attention.get_submodule("out")(torch.cat(heads, dim=2)))


def test_the_head_of_a_transformer_reads_the_class_token_only() -> None:
    """Other tokens count through attention alone: after the last block they may be anything."""
    model = _build(CASES[5]).eval()
    tokens = model.forward_to("block3", _samples(CASES[5]))
    other = tokens.clone()
    other[:, 1:] = 7.0
    assert tokens.shape == (3, 17, 16)
    assert torch.equal(model.forward_from("head", tokens), model.forward_from("head", other))


def test_units_say_when_one_sample_is_too_few() -> None:
    """resnet10 on 32x32 ends at 1x1, where BatchNorm cannot train on one sample; on 40x40 at 2x2, where it can."""
    small, large = (_build(Case("resnet10", (3, side, side), {"base_width": 2})) for side in (32, 40))
    assert [unit.min_batch for unit in small.units] == [1, 1, 1, 1, 2, 1]
    assert {unit.min_batch for unit in large.units} == {1}
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        small.train()(torch.zeros(1, 3, 32, 32))
    large.train()(torch.zeros(1, 3, 40, 40))


@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_a_few_steps_lower_the_loss(case: Case) -> None:
    """Plain gradient descent on eight samples of noise with four labels: the loss at least halves in 30 steps."""
    model, x = _build(case, num_classes=4).train(), _samples(case, 8)
    y = torch.arange(8) % 4
    losses = []
    for _ in range(30):
        loss = cross_entropy(model(x), y)
        losses.append(loss.item())
        parameters = list(model.parameters())
        with torch.no_grad():
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= 0.1 * grad
    assert losses[-1] < losses[0] / 2
