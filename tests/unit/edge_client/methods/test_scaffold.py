"""Scaffold: the worked example, an independent implementation of the paper's algorithm, and what c must always be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from depth import job_of
from federation import Federation, Shifted
from linear import Samples, TensorFrozen, TensorState, linear_model
from torch import Tensor, nn

from edge_client.errors import PayloadError
from edge_client.methods import registry
from edge_client.methods.base import Header
from edge_client.models import registry as models
from edge_client.models.contract import Model, from_sequential
from edge_client.models.slicing import parse
from edge_client.training.loop import Settings, train

CONTROL = "extra/control/0.weight"


def _quadratic(center: float, curvature: float) -> Any:
    """f_i(w) = curvature/2 |w - center|^2, whatever the samples are."""
    return lambda model: (
        lambda batch, phase: (
            curvature / 2 * (model.get_parameter("0.weight") - center).square().sum() * torch.ones(len(batch.y))
        )
    )


def _slope(model: Model, gradient: float) -> Any:
    """A loss with the same gradient everywhere."""
    return lambda batch, phase: gradient * model.get_parameter("0.weight").sum() * torch.ones(len(batch.y))


def test_one_step_by_hand() -> None:
    """w=1, c=.2, c_i=.1, lr=.1, g=.5: w = 1 - .1 (.5 - .1 + .2) = .94; c_i+ = .1 - .2 + (1 - .94)/.1 = .5.

    What is sent is c + (c_i+ - c_i) = .2 + .4 = .6.
    """
    model = linear_model([1.0, 1.0])
    client = registry.get("scaffold", {}).client()
    both = {"extra": {"control/0.weight": torch.full((2, 1), 0.2)}, "state": {"0.weight": torch.full((2, 1), 0.1)}}
    client.begin(job_of(model, None, loss=_slope(model, 0.5), **both))
    train(model, client, Samples([1.0], [0]), Settings(batch=1, microbatch=1, learning_rate=0.1, seed=1))
    outcome = client.end()
    assert model.get_parameter("0.weight").flatten().tolist() == pytest.approx([0.94, 0.94])
    assert outcome.state["0.weight"].flatten().tolist() == pytest.approx([0.5, 0.5], rel=1e-5)
    assert outcome.extra["control/0.weight"].flatten().tolist() == pytest.approx([0.6, 0.6], rel=1e-5)


def _folded(c: float, before: int, now: int, sent: Sequence[float]) -> tuple[float, int]:
    """The server's new c and N."""
    state = {"0.weight": torch.zeros(1), CONTROL: torch.tensor([c]), "extra/devices": torch.tensor([before, 0])}
    updates = [
        (Header(device=str(k), num_samples=1 + k), {"0.weight": torch.zeros(1), CONTROL: torch.tensor([value])})
        for k, value in enumerate(sent)
    ]
    frozen = TensorFrozen(updates, num_devices=now)
    folded = dict(registry.get("scaffold", {}).server.fold(TensorState(state), frozen, round=1))
    assert list(folded) == list(state)
    return float(folded[CONTROL]), int(folded["extra/devices"][0])


def test_the_servers_control_variate_by_hand() -> None:
    """c=.2, N=10, one device with delta c=.4: c = .2 + .04. Two devices of N=4 with .4 and -.2: c = .2 + .2/4 = .25.

    All of N=2 with .6 and .4 in place of c: their mean .5, whatever their samples are. A fifth device, new, with
    delta c = .3, where N was 4: (4 * .2 + .3)/5 = .22. A device that is not there any more still counts in N.
    """
    assert _folded(0.2, 10, 10, [0.6]) == (pytest.approx(0.24), 10)
    assert _folded(0.2, 4, 4, [0.6, 0.0]) == (pytest.approx(0.25), 4)
    assert _folded(0.2, 2, 2, [0.6, 0.4]) == (pytest.approx(0.5), 2)
    assert _folded(0.2, 4, 5, [0.5]) == (pytest.approx(0.22), 5)
    assert _folded(0.0, 0, 2, [0.6, 0.4]) == (pytest.approx(0.5), 2)
    assert _folded(0.2, 10, 3, [0.6]) == (pytest.approx(0.24), 10)


def _algorithm_1(
    weights: Tensor, data: dict[str, Samples], rounds: int, epochs: int, lr: float
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The paper's algorithm with option II, full batches and all devices, on logits = w x; in float64."""
    c, own = torch.zeros_like(weights), {name: torch.zeros_like(weights) for name in data}
    for _ in range(rounds):
        models, deltas = {}, {}
        for name, samples in data.items():
            y = weights.clone().requires_grad_()
            for _ in range(epochs):
                loss = nn.functional.cross_entropy(samples.x.double() @ y.T, samples.labels)
                (gradient,) = torch.autograd.grad(loss, y)
                with torch.no_grad():
                    y -= lr * (gradient - own[name] + c)
            models[name] = y.detach()
            deltas[name] = -c + (weights - models[name]) / (epochs * lr)
            own[name] = own[name] + deltas[name]
        total = sum(len(samples) for samples in data.values())
        weights = sum(len(data[name]) * model for name, model in models.items()) / total  # type: ignore[assignment]
        c = c + sum(deltas.values()) / len(data)
    return weights, c, own


def test_rounds_agree_with_the_papers_algorithm() -> None:
    """Three devices with 4, 7 and 5 samples, 5 steps in each of 4 rounds, against a loop written from the paper."""
    data = {name: Shifted(n, n, shape=(1,), num_classes=2) for name, n in (("a", 4), ("b", 7), ("c", 5))}
    made = Federation(
        method="scaffold",
        build=lambda: linear_model([0.3, -0.2]),
        data=data,
        epochs=5,
        settings={"learning_rate": 0.5},
    )
    for _ in range(4):
        weights = made.round()
    expected, c, own = _algorithm_1(torch.tensor([[0.3], [-0.2]]).double(), data, 4, 5, 0.5)  # type: ignore[arg-type]
    torch.testing.assert_close(weights["0.weight"].double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(made.server[CONTROL].double(), c, rtol=1e-5, atol=1e-6)
    for name, control in own.items():
        torch.testing.assert_close(made.states[name]["0.weight"].double(), control, rtol=1e-4, atol=1e-5)


def _after(parameters: dict[str, Any], rounds: int) -> float:
    """Two quadratics with the centers 0 and 1 and the curvatures 1 and 3, ten steps of 0.1 in each round."""
    made = Federation(
        method="scaffold",
        parameters=parameters,
        build=lambda: linear_model([5.0, 5.0]),
        data={"a": Samples([1.0], [0]), "b": Samples([1.0], [0])},
        loss={"a": _quadratic(0.0, 1.0), "b": _quadratic(1.0, 3.0)},
        epochs=10,
    )
    for _ in range(rounds):
        weights = made.round()
    return float(weights["0.weight"][0])


def test_it_finds_the_optimum_that_fedavg_misses() -> None:
    """(w^2 + 3 (w - 1)^2)/2 is smallest at 3/4; this fails without the correction.

    FedAvg's fixed point: a makes .9^10 w of w, b makes 1 - .7^10 (1 - w), and w is the mean of both:
    w = (1 - .7^10)/(2 - .9^10 - .7^10) = .5987.
    """
    assert _after({}, 40) == pytest.approx(0.75, abs=1e-3)
    drifted = (1 - 0.7**10) / (2 - 0.9**10 - 0.7**10)
    assert _after({"correction": False}, 40) == pytest.approx(drifted, abs=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"momentum": 0.9}, {"optimizer": "adam", "learning_rate": 0.01}], ids=["sgd", "momentum", "adam"]
)
def test_c_is_always_the_mean_of_all_c_i(settings: dict[str, Any]) -> None:
    """Also while devices take part for the first time and while only some do; those that never did have c_i = 0."""
    data = {name: Shifted(8 + 2 * k, k) for k, name in enumerate("abcd")}
    made = Federation(method="scaffold", build=_cnn, data=data, settings=settings)
    for cohort in ("ab", "abc", "c", "ad", "b", "abcd"):
        made.round(list(cohort))
        for name, control in made.server.items():
            if name.startswith("extra/control/"):
                param = name.removeprefix("extra/control/")
                known = [state[param] for state in made.states.values() if state]
                mean = torch.stack(known).sum(dim=0) / len(made.answered)
                torch.testing.assert_close(control, mean, rtol=1e-4, atol=1e-5)
    assert made.server["extra/devices"].tolist() == [4, 4]


def _cnn() -> Model:
    torch.manual_seed(4)
    layers = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()), nn.Linear(144, 3)
    )
    return from_sequential(layers, input_shape=(1, 8, 8))


SIZES = {"a": "full", "b": "width:1/2", "c": "depth:1.0", "d": "depth:1.0-width:1/2", "e": "width:1/4"}
COHORTS = ("ab", "c", "abe", "d", "ce", "ad", "b", "acde", "e", "abcde")


def _sliced(cut: str = "full") -> Model:
    torch.manual_seed(4)
    options = {"hidden": [8, 8]}
    return models.build("mlp", input_shape=(1, 8, 8), num_classes=3, options=options, spec=parse(cut))


def test_c_is_the_mean_of_the_c_i_of_the_devices_that_have_an_element() -> None:
    """Five sizes, some of them in each round; what no device has trained yet is zero.

    Of d and e nobody has the later channels, of c and d nobody the second layer: an N of all devices would leave c a
    part of the mean, and one of the cohort's share would carry what differs from round to round along for ever.
    """
    data = {name: Shifted(8 + 2 * k, k) for k, name in enumerate(SIZES)}
    made = Federation(
        method="scaffold", build=_sliced, build_slice=_sliced, data=data, slices=SIZES, rungs=tuple(SIZES.values())
    )
    for cohort in COHORTS:
        made.round(list(cohort))
        for name, control in made.server.items():
            if not name.startswith("extra/control/"):
                continue
            total, count = torch.zeros_like(control), torch.zeros_like(control)
            for device in made.answered:
                place = made.places(device).get(name)
                if place is None:
                    continue
                at = torch.meshgrid(*place.where, indexing="ij") if place.where is not None else ...
                total[at] += made.states[device][name.removeprefix("extra/control/")]
                count[at] += 1
            torch.testing.assert_close(control, total / count.clamp(min=1), rtol=1e-4, atol=1e-5)
    assert made.server["extra/devices"].tolist() == [5, 5]


def test_owners_stay_on_the_server_and_are_no_larger_than_they_must() -> None:
    """Of a layer's inputs, which no slice leaves out, one column; with slices of depth alone one number each."""
    made = registry.get("scaffold", {}, ("full", "width:1/2"))
    extra = made.travel.extra_tensors(_sliced())
    assert {name: tuple(value.shape) for name, value in extra.items() if "block1" in name} == {
        "control/block1.linear.weight": (8, 64),
        "owners/block1.linear.weight": (8, 1),
        "control/block1.linear.bias": (8,),
        "owners/block1.linear.bias": (8,),
    }
    sent = made.slices.places(_sliced(), "width:1/2", [f"extra/{name}" for name in extra])
    assert not any("owners" in name for name in sent)
    assert made.travel.extra_of_slice is not None
    assert {f"extra/{name}" for name in made.travel.extra_of_slice(_sliced("width:1/2"), "width:1/2")} == {*sent}
    deep = registry.get("scaffold", {}, ("full", "depth:1.0")).travel.extra_tensors(_sliced())
    assert {value.numel() for name, value in deep.items() if name.startswith("owners/")} == {1}


def test_where_each_architecture_has_its_own_model_its_devices_are_counted() -> None:
    """A cohort of one, then another one: N is 1, then 2, whatever other devices the run has."""
    state = {CONTROL: torch.tensor([0.0]), "extra/devices": torch.tensor([0, 0])}
    for device, value, expected in (("a", 0.6, 0.6), ("b", 1.0, 0.5)):  # b: delta c = 1 - .6, (.6 + .4)/2
        header = Header(device=device, num_samples=1, scalars={"first": 1.0})
        frozen = TensorFrozen([(header, {CONTROL: torch.tensor([value])})])
        state = dict(registry.get("scaffold", {}).server.fold(TensorState(state), frozen, round=1))
        assert float(state[CONTROL]) == pytest.approx(expected)
    assert state["extra/devices"].tolist() == [2, 2]


def test_it_covers_what_is_trained_and_no_buffers() -> None:
    """Six parameters have a control variate; running statistics have none, and neither does a frozen parameter."""
    model = _cnn()
    names = {"0.weight", "0.bias", "1.0.weight", "1.0.bias", "2.weight", "2.bias"}
    extra = registry.get("scaffold", {}).travel.extra_tensors(model)
    assert extra.keys() == {"devices", *(f"control/{name}" for name in names)}
    model.get_parameter("0.weight").requires_grad_(False)
    assert "control/0.weight" not in registry.get("scaffold", {}).travel.extra_tensors(model)


def test_a_learning_rate_of_zero_changes_nothing() -> None:
    """(x - y) / 0 would be no number: what was received goes back, and the state stays as it is."""
    data = {"a": Shifted(8, 1, shape=(1,), num_classes=2)}
    made = Federation(method="scaffold", build=lambda: linear_model([1.0, 2.0]), data=data)
    made.round()
    before, c = made.states["a"]["0.weight"].clone(), made.server[CONTROL].clone()
    made.settings = {"learning_rate": 0.0}
    made.round()
    assert torch.equal(made.states["a"]["0.weight"], before)
    assert torch.equal(made.server[CONTROL], c)


def test_a_model_without_control_variates_is_refused() -> None:
    """A server that speaks of another method, or of another model."""
    model = linear_model([1.0, 1.0])
    client = registry.get("scaffold", {}).client()
    with pytest.raises(PayloadError, match=r"expected a control variate \[2, 1\] for '0.weight', got none"):
        client.begin(job_of(model, None))
