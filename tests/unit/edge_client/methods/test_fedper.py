"""FedPer and Local: what leaves a device, what stays there, and that it goes on from round to round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import SHAPE, equal, model_of
from federation import Federation, Shifted
from linear import Samples
from torch import Tensor, nn

from edge_client.errors import InputError, PayloadError
from edge_client.methods import registry
from edge_client.methods.cards.fedper import FedPerParameters
from edge_client.methods.fedper import shared, size_of
from edge_client.models import registry as models
from edge_client.models.contract import Model, from_sequential
from edge_client.models.slicing import parse
from edge_client.training.loop import generator


def _data() -> dict[str, Shifted]:
    return {name: Shifted(n, k) for k, (name, n) in enumerate((("a", 8), ("b", 16), ("c", 11)))}


def _chain() -> Model:
    """y = head * base * x with base = 1, head = 2 and -2: two units of one and two weights."""
    base, head = nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False)
    base.weight.data, head.weight.data = torch.tensor([[1.0]]), torch.tensor([[2.0], [-2.0]])
    return from_sequential(nn.Sequential(base, head), input_shape=(1,))


def _pull(target: float) -> Any:
    """base^2/2 + |head - target|^2/2: gradients base and head - target."""
    return lambda model: (
        lambda batch, phase: (
            (model.get_parameter("0.weight").square().sum() + (model.get_parameter("1.weight") - target).square().sum())
            / 2
            * torch.ones(len(batch.y))
        )
    )


def test_two_rounds_by_hand() -> None:
    """lr .1, one step: base .9 of base on both devices; head: a to target 0, b to target 1: h - .1 (h - target).

    Round 1: base .9; a: (1.8, -1.8), b: (1.9, -1.7). Round 2: base .81; a: (1.62, -1.62), b: (1.81, -1.43).
    The server's head stays (2, -2): averaged heads would be (1.85, -1.75), and their next steps other ones.
    """
    made = Federation(
        method="fedper",
        build=_chain,
        data={"a": Samples([1.0], [0]), "b": Samples([1.0] * 3, [0] * 3)},
        loss={"a": _pull(0.0), "b": _pull(1.0)},
    )
    made.round()
    server = made.round()
    assert server["0.weight"].item() == pytest.approx(0.81)
    assert server["1.weight"].flatten().tolist() == [2.0, -2.0]
    heads = {name: state["model/1.weight"].flatten().tolist() for name, state in made.states.items()}
    assert heads == {"a": pytest.approx([1.62, -1.62]), "b": pytest.approx([1.81, -1.43])}
    assert [list(update) for _, update in made.updates] == [["0.weight"], ["0.weight"]]


def test_a_device_is_judged_with_its_own_layers() -> None:
    """Logits of x = 1 after the two rounds above: base .81 times the device's own head."""
    made = Federation(
        method="fedper",
        build=_chain,
        data={"a": Samples([1.0], [0]), "b": Samples([1.0], [0])},
        loss={"a": _pull(0.0), "b": _pull(1.0)},
    )
    assert made.begun("a").predict(torch.ones(1, 1)).tolist() == [[2.0, -2.0]]  # before its first round: as received
    made.round()
    made.round()
    assert made.begun("a").predict(torch.ones(1, 1)).flatten().tolist() == pytest.approx([0.81 * 1.62, -0.81 * 1.62])
    assert made.begun("b").predict(torch.ones(1, 1)).flatten().tolist() == pytest.approx([0.81 * 1.81, -0.81 * 1.43])


@pytest.mark.parametrize("personal", [1, 2])
def test_updates_lack_the_personal_units_with_their_buffers(personal: int) -> None:
    """resnet10 has BatchNorms in its blocks: their running statistics stay, too."""
    parameters = {"personal": personal}
    made = Federation(method="fedper", parameters=parameters, build=lambda: model_of("resnet10"), data=_data())
    first = made.weights()
    own = tuple(f"{unit}." for unit in model_of("resnet10").order[-personal:])
    folded = made.round()
    for name, value in folded.items():
        is_own = name.startswith(own)
        assert all((name in update) != is_own for _, update in made.updates)
        assert all((f"model/{name}" in state) == is_own for state in made.states.values())
        assert torch.equal(value, first[name]) == is_own


def test_personal_layers_differ_and_come_back_as_they_were_left() -> None:
    """A device that was not asked for two rounds begins with the layers of its own last one."""
    made = Federation(method="fedper", build=lambda: model_of("mlp"), data=_data())
    made.round()
    kept = dict(made.states["b"])
    head = [name for name in kept if name.startswith("model/")]
    assert any(not torch.equal(kept[name], made.states["a"][name]) for name in head)
    made.round(["a", "c"])
    client = made.begun("b")
    tensors = client.job.model.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(tensors[name.removeprefix("model/")], kept[name]) for name in head)


def _alone(data: Shifted, seeds: list[int], settings: dict[str, Any]) -> dict[str, Tensor]:
    """One device with torch's own optimizer, which is never made anew: the rounds follow one another."""
    model = model_of("mlp")
    rate = settings["learning_rate"]
    if settings.get("optimizer") == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=settings["momentum"])
    for seed in seeds:
        order = torch.randperm(len(data), generator=generator(seed, "shuffle", "train", 0))
        for chosen in order.split(8):
            x, y = data.batch(chosen)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "settings",
    [{"learning_rate": 0.1, "momentum": 0.9}, {"learning_rate": 0.01, "optimizer": "adam"}],
    ids=["momentum", "adam"],
)
def test_local_is_training_alone_without_a_break(settings: dict[str, Any]) -> None:
    """Three rounds of each device are what one long training with torch's optimizer is; nothing leaves a device."""
    data = _data()
    made = Federation(method="local", build=lambda: model_of("mlp"), data=data, settings=settings)
    first = made.weights()
    for _ in range(3):
        assert equal(made.round(), first)  # the same bytes: devices fetch no second version
        assert [update for _, update in made.updates] == [{}, {}, {}]
    for name, samples in data.items():
        expected = _alone(samples, [1, 2, 3], settings)
        for tensor, value in expected.items():
            torch.testing.assert_close(made.states[name][f"model/{tensor}"], value, rtol=1e-4, atol=1e-5)


def test_the_optimizer_of_shared_layers_begins_anew() -> None:
    """Momentum is kept for the head alone: its state has a velocity, the others' have none."""
    made = Federation(method="fedper", build=lambda: model_of("mlp"), data=_data(), settings={"momentum": 0.9})
    made.round()
    kept = {name for name in made.states["a"] if name.startswith("optimizer/")}
    head = [name for name, _ in model_of("mlp").named_parameters() if name.startswith("head.")]
    assert kept == {f"optimizer/{name}/velocity" for name in head}


@pytest.mark.parametrize("personal", [2, 3, 1000])
def test_nothing_shared_is_said_before_the_run(personal: int) -> None:
    """Two units: 0 and 1 would work, or another method."""
    with pytest.raises(InputError) as caught:
        registry.get("fedper", {"personal": personal}).check(_chain())
    assert str(caught.value) == (
        f"method 'fedper': personal = {personal} shares nothing, the model has 2 units with parameters; "
        'set personal to 0 to 1, or let each device train alone: method = "local"'
    )


def _skeleton(name: str) -> Model:
    return models.skeleton(name, input_shape=(3, 32, 32), num_classes=10, options={})


def _base(names: tuple[str, ...], **parameters: Any) -> list[str]:
    """The units of the base of these architectures, by the largest one's names."""
    sizes = [size_of(_skeleton(name)) for name in names]
    base = shared(sizes, FedPerParameters(**parameters))
    return [unit for unit, tensors in sizes[-1].items() if base >= tensors.keys()]


def test_the_base_of_bottleneck_resnets_ends_inside_stage_2() -> None:
    """[3, 4, 6, 3], [3, 4, 23, 3] and [3, 8, 36, 3] blocks: stem, 3 of stage 1 and the first 4 of stage 2.

    101 and 152 alone have no more in common; 50 and 101 also share all of stage 2 and 6 blocks of stage 3.
    """
    first = ["stem", *(f"stage1_block{k}" for k in (1, 2, 3)), *(f"stage2_block{k}" for k in (1, 2, 3, 4))]
    assert _base(("resnet50", "resnet101", "resnet152")) == first
    assert _base(("resnet101", "resnet152")) == first
    assert _base(("resnet50", "resnet101")) == [*first, *(f"stage3_block{k}" for k in range(1, 7))]


def test_every_tensor_of_one_name_and_shape_is_shared_if_asked_for() -> None:
    """ResNet50, 101, 152 again: all but the head; the 4 last blocks of 152's stage 2 are averaged over 152's alone."""
    sizes = [size_of(_skeleton(name)) for name in ("resnet50", "resnet152")]
    base = shared(sizes, FedPerParameters(match="name_shape"))
    every = {name for unit, tensors in sizes[-1].items() if unit != "head" for name in tensors}
    assert base == every
    assert "stage2_block8.conv1.weight" in base


def test_the_base_of_densenets() -> None:
    """121, 169 and 201 (24, 32, 48 layers in stage 3) share all up to its 24th; 161 has another stem: nothing."""
    base = _base(("densenet121", "densenet169", "densenet201"))
    assert (base[0], base[-1]) == ("stem", "stage3_layer24")
    layers = [*(f"stage1_layer{k}" for k in range(1, 7)), "stage2_transition"]
    layers += [*(f"stage2_layer{k}" for k in range(1, 13)), "stage3_transition"]
    assert base[1:] == [*layers, *(f"stage3_layer{k}" for k in range(1, 25))]
    assert _base(("densenet121", "densenet161", "densenet169", "densenet201")) == []


def _deep(cut: str = "full") -> Model:
    torch.manual_seed(1)
    return models.build("mlp", input_shape=SHAPE, num_classes=3, options={"hidden": [4, 4, 4]}, spec=parse(cut))


SIZES = {"a": "full", "b": "depth:1.1.0", "c": "depth:1.0.0"}  # the head is personal, and so is what c has not


def _deep_fleet(method: str = "fedper", **parameters: Any) -> Federation:
    return Federation(
        method=method,
        parameters=parameters,
        build=_deep,
        build_slice=_deep,
        data=_data(),
        slices=SIZES,
        rungs=tuple(SIZES.values()),
    )


@pytest.mark.parametrize(
    ("parameters", "base", "personal"),
    [
        ({}, ["block1"], {"a": ["block2", "block3", "head"], "b": ["block2", "head"], "c": ["head"]}),
        ({"match": "name_shape"}, ["block1", "block2", "block3"], {name: ["head"] for name in "abc"}),
        ({"match": "name_shape", "personal": 2}, [], {}),
    ],
)
def test_devices_of_different_depth_share_what_all_begin_with(
    parameters: dict[str, Any], base: list[str], personal: dict[str, list[str]]
) -> None:
    """Three, two and one hidden layer: block1 is everybody's, the others stay; by name and shape only heads stay.

    With two personal units, c's are block1 and its head: nothing is left that all share.
    """
    made = _deep_fleet(**parameters)
    if not base:
        with pytest.raises(InputError, match=r"personal = 2 shares nothing, the model has 2 units"):
            made.made.check(_deep())
        return
    made.made.check(_deep())
    first = made.weights()
    for _ in range(2):
        folded = made.round()
    units = {unit: [name for name in first if name.startswith(f"{unit}.")] for unit in size_of(_deep())}
    for unit, names in units.items():
        assert all(torch.equal(folded[name], first[name]) == (unit not in base) for name in names), unit
    for header, update in made.updates:
        device = header.device
        have = size_of(_deep(SIZES[device]))
        assert {*update} == {name for unit in base if unit in have for name in units[unit]}
        own = {f"model/{name}" for unit in personal[device] for name in units[unit]}
        assert made.states[device].keys() == own
    samples = {header.device: header.num_samples for header, _ in made.updates}
    came = {header.device: update["block1.linear.weight"].double() for header, update in made.updates}
    mean = sum(samples[name] * came[name] for name in "abc") / sum(samples.values())
    torch.testing.assert_close(folded["block1.linear.weight"], torch.as_tensor(mean).float())


@pytest.mark.parametrize(
    ("rungs", "parameters", "said"),
    [
        (("full", "width:1/2"), {}, r"slices full, width:1/2 share nothing, .* use slices of depth"),
        (("full", "width:1/2"), {"match": "name_shape"}, r"slices full, width:1/2 share nothing"),
        (("full", "depth:1.0.0"), {"personal": 0}, r"personal = 0 is FedAvg, .* such as 'block2'; use fedavg"),
        (("full", "depth:1.0.0"), {"personal": 2}, r"personal = 2 shares nothing, the model has 2 units"),
    ],
)
def test_sizes_that_share_nothing_are_refused_with_what_would_work(
    rungs: tuple[str, ...], parameters: dict[str, Any], said: str
) -> None:
    """Before the run; two widths have no tensor of one shape but the head's bias, which is personal."""
    with pytest.raises(InputError, match=said):
        registry.get("fedper", parameters, rungs).check(_deep())


def test_all_layers_of_different_depth_are_fedavgs_if_none_is_personal() -> None:
    """personal = 0 by name and shape: the same bits as layer-wise FedAvg."""
    results = []
    for name, parameters in (("fedper", {"personal": 0, "match": "name_shape"}), ("fedavg", {})):
        made = _deep_fleet(name, **parameters)
        made.made.check(_deep())
        made.round()
        results.append(made.round())
    assert equal(*results)


def test_a_device_does_not_send_what_is_personal_whatever_the_server_says() -> None:
    """The received container keeps nothing back: the device refuses."""
    made = Federation(method="fedper", build=_chain, data={"a": Samples([1.0], [0])})
    made.kept = ()
    with pytest.raises(PayloadError, match=r"'1\.weight' is personal on this device, .* wants it back"):
        made.begun("a")


def test_units_without_parameters_do_not_count() -> None:
    """Flatten, Linear, ReLU, Linear, Softmax: personal = 1 is the second Linear, 2 would share nothing."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Softmax(dim=1))
    model = from_sequential(layers, input_shape=(4,))
    method = registry.get("fedper", {})
    method.check(model)
    assert method.travel.never_returned(model) == ("model/3.",)
    with pytest.raises(InputError, match="2 units with parameters; set personal to 0 to 1"):
        registry.get("fedper", {"personal": 2}).check(model)


def test_own_layers_of_another_shape_are_refused() -> None:
    """A state that belongs to another model."""
    made = Federation(method="fedper", build=_chain, data={"a": Samples([1.0], [0])})
    made.states["a"] = {"model/1.weight": torch.zeros(3, 1)}
    with pytest.raises(PayloadError, match=r"this device's own '1.weight' is \[3, 1\], the run's is \[2, 1\]"):
        made.begun("a")


@pytest.mark.parametrize(("name", "parameters", "expected"), [("fedper", {}, False), ("fedper", {"personal": 0}, True)])
def test_who_has_the_model(name: str, parameters: dict[str, Any], expected: bool) -> None:
    """The server cannot judge what lives on the devices."""
    assert registry.has_global_model(name, parameters) is expected
    assert not registry.has_global_model("local", {})
    assert registry.has_global_model("fedepth+fedprox", {})


def test_before_the_server_was_asked_the_last_units_are_personal() -> None:
    """As when the memory of a device's training is measured."""
    made = Federation(method="fedper", build=_chain, data={"a": Samples([1.0], [0])})
    made.kept = None  # type: ignore[assignment]
    made.states["a"] = {"model/1.weight": torch.tensor([[5.0], [6.0]])}
    assert made.begun("a").predict(torch.ones(1, 1)).tolist() == [[5.0, 6.0]]
