"""SplitMix: which bases a device has, that they have nothing in common, and that the model is all of them together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import equal
from federation import Federation, Shifted
from linear import TensorFrozen, TensorState

from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.base import Header
from edge_client.methods.cards.splitmix import bases_of
from edge_client.methods.slices import Turn
from edge_client.models import registry as models
from edge_client.models.contract import Model
from edge_client.models.slicing import parse, take_tensor

SHAPE = (1, 8, 8)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"hidden": [8, 12]}),
    "small-cnn": ("small-cnn", {"width": 4}),
    "resnet10": ("resnet10", {"base_width": 4, "small_stem": True}),
    "densenet": ("densenet121", {"growth": 4, "base_width": 8, "small_stem": True}),
}
RUNGS = ("full", "width:1/2", "width:1/4")


def build(kind: str, cut: str = "full") -> Model:
    torch.manual_seed(1)
    name, options = KINDS[kind]
    return models.build(name, input_shape=SHAPE, num_classes=3, options=options, spec=parse(cut))


def fleet(kind: str, slices: dict[str, str], name: str = "splitmix", rounds: int = 1, **parameters: Any) -> Federation:
    data = {device: Shifted(n, seed, SHAPE) for seed, (device, n) in enumerate((("a", 16), ("b", 24), ("c", 16)))}
    made = Federation(
        method=name,
        parameters=parameters,
        build=lambda: build(kind),
        build_slice=lambda cut: build(kind, cut),
        data=data,
        slices=slices,
        rungs=RUNGS if parameters.get("bases", 8) > 1 and name == "splitmix" else ("full",),
    )
    for _ in range(rounds):
        made.round()
    return made


def test_a_device_has_as_many_bases_as_its_width_holds() -> None:
    """B = 8: all, 4, 2 and 1 of them, each once; 5/12 of 6 are floor(2.5) = 2."""
    assert [len({*bases_of(8, cut)}) for cut in ("full", "width:1/2:o17", "width:1/4:o5", "width:1/8:o3")] == [
        8,
        4,
        2,
        1,
    ]
    assert len(bases_of(6, "width:5/12")) == 2


def test_the_first_base_goes_round_and_the_others_are_drawn() -> None:
    """In eight rounds a device begins with each base once; over many rounds all others come."""
    turn = registry.slicing("splitmix", {"bases": 8}).turn
    drawn = [
        bases_of(8, turn("width:1/4", Turn(rungs=RUNGS, round=n, device="pi", seed=n * 7919))) for n in range(1, 41)
    ]
    assert {first for first, _ in drawn[:8]} == {*range(8)}
    assert {other for _, other in drawn} == {*range(8)}
    assert turn("full", Turn(rungs=RUNGS, round=3, device="pi", seed=5)) == "full"


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_is_the_sum_of_its_bases(kind: str) -> None:
    """What comes to a device of all four bases, run one by one: their logits add up to those of the whole network."""
    made = fleet(kind, {}, rounds=0, bases=4)
    whole = build(kind)
    whole.load_state_dict(made.weights())
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(3))
    client = made.begun("a")
    with torch.no_grad():
        client.job.model.eval()  # type: ignore[attr-defined]
        mixed = client.predict(x)
        torch.testing.assert_close(whole.eval()(x), 4 * mixed, rtol=1e-4, atol=1e-5)
    assert mixed.abs().sum() > 0


@pytest.mark.parametrize("kind", ["mlp", "resnet10"])
def test_it_stays_so_when_bases_are_trained(kind: str) -> None:
    """Two rounds of devices with four, two and one of them."""
    slices = {"b": "width:1/2:o5", "c": "width:1/4:o2"}
    made = fleet(kind, slices, rounds=2, bases=4)
    whole = build(kind)
    whole.load_state_dict(made.weights())
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(3))
    client = made.begun("a")
    with torch.no_grad():
        client.job.model.eval()  # type: ignore[attr-defined]
        torch.testing.assert_close(whole.eval()(x), 4 * client.predict(x), rtol=1e-3, atol=1e-4)


def test_bases_begin_as_networks_of_their_width() -> None:
    """Here each build gives the same: every block of the second layer is that of a narrow network, zeros between."""
    server = fleet("mlp", {}, rounds=0, bases=4).server
    narrow = build("mlp", "width:1/4").state_dict()
    assert torch.equal(server["block2.linear.weight"], torch.block_diag(*[narrow["block2.linear.weight"]] * 4))
    assert torch.equal(server["head.weight"], narrow["head.weight"].repeat(1, 4))
    assert torch.equal(server["head.bias"], 4 * server["extra/base2/head.bias"])


def test_a_base_is_the_mean_of_those_that_trained_it() -> None:
    """16, 24, 16 samples; bases 1 and 3 are also b's, 2 is also c's: (16 a + 24 b)/40, (16 a + 16 c)/32; 0 is a's."""
    slices = {"b": "width:1/2:o17", "c": "width:1/4:o2"}
    assert (bases_of(4, slices["b"]), bases_of(4, slices["c"])) == ([1, 3], [2])
    made = fleet("mlp", slices, bases=4)
    name = "block2.linear.weight"  # [12, 8]: base k has rows 3k to 3k + 2 and columns 2k, 2k + 1
    sent = {}
    for header, tensors in made.updates:
        keys = [key for key in tensors if key.partition("#")[0] == name]
        sent[header.device] = dict(zip(bases_of(4, header.slice), (tensors[key] for key in keys), strict=True))
    for number, other, m in ((1, "b", 24), (3, "b", 24), (2, "c", 16), (0, "a", 16)):
        expected = (16 * sent["a"][number].double() + m * sent[other][number].double()) / (16 + m)
        block = made.server[name][3 * number : 3 * number + 3, 2 * number : 2 * number + 2]
        assert torch.equal(block, expected.float())
    mask = torch.block_diag(*[torch.ones(3, 2)] * 4).bool()
    assert not made.server[name][~mask].any()


def test_bases_are_trained_apart() -> None:
    """A device's bases come out as if it had each alone, bit for bit: no other has a part in its loss or step."""
    alone = fleet("mlp", {"a": "width:1/4:o5"}, bases=4).updates[0][1]
    more = fleet("mlp", {"a": "width:1/2:o5"}, bases=4).updates[0][1]
    assert bases_of(4, "width:1/4:o5") == bases_of(4, "width:1/2:o5")[:1] == [1]
    assert equal({key: more[key] for key in alone}, alone)
    assert len(more) == 2 * len(alone)
    _, number = bases_of(4, "width:1/2:o5")
    second = fleet("mlp", {"a": f"width:1/4:o{number}"}, bases=4).updates[0][1].values()
    assert all(torch.equal(*pair) for pair in zip(list(more.values())[len(alone) :], second, strict=True))


def test_what_has_no_channels_is_each_bases_own() -> None:
    """Biases of two bases: means 3 and 5 of their devices, 8 in the model."""
    state = TensorState(
        {"head.bias": torch.zeros(1), "extra/base0/head.bias": torch.zeros(1), "extra/base1/head.bias": torch.zeros(1)},
        {"own": ("head.bias",)},
    )
    updates = [
        (Header(device="a", num_samples=1), {"extra/base0/head.bias": torch.tensor([3.0])}),
        (Header(device="b", num_samples=1), {"extra/base1/head.bias": torch.tensor([5.0])}),
    ]
    server = registry.get("splitmix", {"bases": 2}, ("full",)).server
    assert [float(v) for _, v in server.fold(state, TensorFrozen(updates), round=1)] == [8.0, 3.0, 5.0]


def test_bytes_are_those_of_the_bases() -> None:
    """Half of the width is two bases of four: twice the parameters of a quarter, not those of a dense half."""
    made = fleet("mlp", {"b": "width:1/2:o5", "c": "width:1/4:o2"}, bases=4)
    sizes = {header.device: sum(value.numel() for value in tensors.values()) for header, tensors in made.updates}
    base = sum(value.numel() for value in build("mlp", "width:1/4").state_dict().values())
    assert sizes == {"a": 4 * base, "b": 2 * base, "c": base}


@pytest.mark.parametrize("kind", ["mlp", "resnet10"])
def test_with_one_base_it_is_fedavg_bit_for_bit(kind: str) -> None:
    """And with more it is not."""
    plain = fleet(kind, {}, "fedavg", 2).server
    assert equal(fleet(kind, {}, rounds=2, bases=1).server, plain)
    split = fleet(kind, {}, rounds=2, bases=2).weights()
    assert not equal(split, plain)


def test_what_it_cannot_serve_is_said_before_the_run() -> None:
    """A budget below one base; channels that bases cannot share; norms over all channels; slices of depth."""
    cases = [
        ("mlp", 4, ("full", "width:1/8"), "has 4 bases of 1/4 of the channels, and 'width:1/8' is less; .* bases to 8"),
        ("mlp", 2, ("full", "width:3/10"), "and 'width:3/10' is less; .* bases to 4"),  # 3 bases: floor(.9) of them
        ("mlp", 3, ("full",), "'block1.linear.weight' has 8 channels, which 3 bases cannot share"),
    ]
    for kind, bases, rungs, message in cases:
        with pytest.raises(InputError, match=message):
            registry.get("splitmix", {"bases": bases}, rungs).check(build(kind))
    vit = models.build(
        "vit-t-16", input_shape=SHAPE, num_classes=3, options={"patch": 4, "width": 8, "heads": 2, "depth": 2}
    )
    with pytest.raises(InputError, match="this model normalises over all channels; use one with BatchNorm"):
        registry.get("splitmix", {"bases": 2}, ("full",)).check(vit)
    with pytest.raises(InputError, match=r"'splitmix' trains slices of width, got 'depth:1\.1\.1\.1'"):
        registry.slicing("splitmix", {}).architectures(["full", "depth:1.1.1.1"], "splitmix")
    with pytest.raises(InputError, match="'splitmix' cannot be under 'inco': its bases have no layers in common"):
        registry.validate("inco+splitmix", {})
    for kind in KINDS:
        registry.get("splitmix", {"bases": 4}, RUNGS).check(build(kind))


def test_parts_lie_side_by_side() -> None:
    """Base 1 of 4 in a layer of 8 x 64: rows 2, 3 of the first layer, all inputs."""
    places = registry.get("splitmix", {"bases": 4}, RUNGS).slices.places(build("mlp"), "width:1/4:o1", [])
    place = places["model/block1.linear.weight"]
    weight = torch.arange(8 * 64.0).reshape(8, 64)
    assert torch.equal(take_tensor(weight, place.where), weight[2:4])
    assert places["model/head.bias"].name == "extra/base1/head.bias"


@pytest.mark.parametrize("kind", ["mlp", "resnet10"])
def test_bases_that_nobody_drew_stay_as_they_are(kind: str) -> None:
    """All devices train base 1 of 4, two rounds: 0, 2 and 3 keep their bits, and what lies between all of them stays 0.

    Counters of batches are the largest of all bases.
    """
    made = fleet(kind, dict.fromkeys("abc", "width:1/4:o1"), rounds=0, bases=4)
    before = {name: value.clone() for name, value in made.server.items()}
    made.round()
    made.round()
    stored = [name if name.startswith("extra/") else f"model/{name}" for name in before]
    inside = {name: torch.zeros(value.shape, dtype=torch.bool) for name, value in before.items()}
    for number in range(4):
        for place in made.made.slices.places(build(kind), f"width:1/4:o{number}", stored).values():
            name = place.name.removeprefix("model/")
            if not before[name].is_floating_point() or before[name].numel() == 0:
                continue
            at = torch.meshgrid(*place.where, indexing="ij") if place.where is not None else ...
            assert torch.equal(made.server[name][at], before[name][at]) == (number != 1), (number, name)
            inside[name][at] = True
    sums = {*made.notes["own"]}
    for name, own in inside.items():
        if before[name].is_floating_point() and name not in sums:
            assert torch.equal(made.server[name][~own], before[name][~own])
            assert not made.server[name][~own].any()
