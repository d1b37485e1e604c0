"""FedPer and Local: what leaves a device, what stays there, and that it goes on from round to round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import equal, model_of
from federation import Federation, Shifted
from linear import Samples
from torch import Tensor, nn

from edge_client.errors import InputError, PayloadError
from edge_client.methods import registry
from edge_client.models.contract import Model, from_sequential
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
    return lambda model: lambda batch, phase: (
        (model.get_parameter("0.weight").square().sum() + (model.get_parameter("1.weight") - target).square().sum())
        / 2
        * torch.ones(len(batch.y))
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


def test_units_without_parameters_do_not_count() -> None:
    """Flatten, Linear, ReLU, Linear, Softmax: personal = 1 is the second Linear, 2 would share nothing."""
    layers = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.Softmax(dim=1))
    model = from_sequential(layers, input_shape=(4,))
    method = registry.get("fedper", {})
    method.check(model)
    assert method.kept(model) == ("model/3.",)
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
