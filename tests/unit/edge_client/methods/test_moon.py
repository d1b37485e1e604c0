"""MOON: the contrastive loss by hand, that it is applied, and whose representations it compares."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from depth import KINDS, Memory, begun, equal, job_of, model_of, trained, values
from federation import Federation, Shifted
from linear import linear_model
from torch import Tensor, nn

from edge_client.errors import InputError, PayloadError
from edge_client.methods import registry
from edge_client.methods.base import Batch
from edge_client.methods.moon import contrast
from edge_client.models.contract import Model, from_sequential


def test_the_contrastive_loss_by_hand() -> None:
    """cos 1 and 0, tau .5: -log(e^2 / (e^2 + 1)) = .126928; exchanged: 2.126928; the same to both: log 2."""
    z, right, other = torch.tensor([[2.0, 0.0]]), torch.tensor([[5.0, 0.0]]), torch.tensor([[0.0, 0.1]])
    assert contrast(z, right, other, 0.5).item() == pytest.approx(0.126928, abs=1e-6)
    assert contrast(z, other, right, 0.5).item() == pytest.approx(2.126928, abs=1e-6)
    assert contrast(z, right, right, 0.5).item() == pytest.approx(math.log(2))


def _two(first: float) -> Model:
    """Features (relu of first * x, 1 * x) and a linear classifier."""
    body, head = nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)
    body.weight.data = torch.tensor([[first], [1.0]])
    head.weight.data = torch.eye(2)
    return from_sequential(nn.Sequential(body, head), input_shape=(1,))


def test_the_term_is_that_of_the_current_the_received_and_the_previous_model() -> None:
    """x = 1. Received and trained begin with features (3, 1), the previous model has (0, 1).

    At the start cos(z, z_glob) = 1, cos(z, z_prev) = 1/sqrt(10). CE of the label 0: log(1 + e^-2).
    When the weights have moved to (0, 1), the received model's have not: the cosines change places.
    """
    model, previous = _two(3.0), values(_two(0.0))
    client = registry.get("moon", {"mu": 2.0, "temperature": 0.5}).client()
    client.begin(job_of(model, None, state=previous))
    y = torch.tensor([0])
    batch = Batch(x=torch.ones(1, 1), y=y, num_whole=1, whole_y=y, first=True)
    (phase,) = client.phases()
    (term,) = client.terms(batch, phase)
    far = 1 / math.sqrt(10)
    expected = math.log1p(math.exp(-2)) + 2 * math.log1p(math.exp((far - 1) / 0.5))
    assert term.each is not None
    assert term.each.item() == pytest.approx(expected, rel=1e-6)
    model.get_parameter("0.weight").data = torch.tensor([[0.0], [1.0]])
    (term,) = client.terms(batch, phase)
    moved = math.log1p(math.exp(1)) + 2 * math.log1p(math.exp((1 - far) / 0.5))
    assert term.each is not None
    assert term.each.item() == pytest.approx(moved, rel=1e-6)


def _reference(model: Model, previous: dict[str, Tensor], data: Memory, mu: float, tau: float) -> None:
    """MOON's local training of an mlp written out: three steps of the whole batch."""

    def features(weights: dict[str, Tensor]) -> Tensor:
        x = data.x.flatten(1)
        for block in model.order[1:-1]:
            x = torch.relu(x @ weights[f"{block}.linear.weight"].T + weights[f"{block}.linear.bias"])
        return x

    received = values(model)
    for _ in range(3):
        weights: dict[str, Tensor] = dict(model.named_parameters())
        z = features(weights)
        logits = z @ weights["head.weight"].T + weights["head.bias"]
        near, far = (torch.exp(nn.functional.cosine_similarity(z, features(w)) / tau) for w in (received, previous))
        loss = nn.functional.cross_entropy(logits, data.labels) - mu * (near / (near + far)).log().mean()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        with torch.no_grad():
            for param, gradient in zip(weights.values(), gradients, strict=True):
                param -= 0.1 * gradient


@pytest.mark.parametrize("microbatch", [20, 6])
def test_local_training_agrees_with_the_paper(microbatch: int) -> None:
    """An mlp in float64, against the loss as the paper writes it; microbatches change nothing but rounding."""
    model, reference, data = model_of("mlp").double(), model_of("mlp").double(), Memory()
    data.x = data.x.double()
    previous = values(model_of("mlp", seed=9).double())
    _reference(reference, previous, data, 0.7, 0.3)
    client = begun(model, None, name="moon", parameters={"mu": 0.7, "temperature": 0.3}, state=previous, epochs=3)
    trained(model, client, data, batch=20, microbatch=microbatch, momentum=0.0, weight_decay=0.0)
    for name, value in values(reference).items():
        torch.testing.assert_close(values(model)[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recompute", [None, "units"])
def test_every_kind_of_model_has_features_to_compare(kind: str, recompute: str | None) -> None:
    """With a previous model the weights become others than FedAvg's, also where units run again in backward."""
    data, previous = Memory(), values(model_of(kind, seed=9))
    results: dict[str, Any] = {}
    for name in ("fedavg", "moon"):
        model = model_of(kind)
        model.recompute = recompute
        trained(model, begun(model, None, name=name, state=previous), data)
        results[name] = values(model)
    assert not equal(results["fedavg"], results["moon"])
    stem = next(iter(results["moon"]))
    assert not torch.equal(results["fedavg"][stem], results["moon"][stem])  # the gradient goes all the way down


def test_recomputing_units_changes_no_bit() -> None:
    """A model of one's own, whose features are a unit's output."""
    data, results = Memory(), []
    for recompute in (None, "units"):
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 3))
        model = from_sequential(layers, input_shape=(1, 8, 8))
        model.recompute = recompute
        previous = {name: value + 0.1 for name, value in values(model).items()}
        trained(model, begun(model, None, name="moon", state=previous), data)
        results.append(values(model))
    assert equal(*results)


def test_the_previous_model_is_the_devices_own_of_its_last_round() -> None:
    """Round 1 is FedAvg's; what is kept is the trained model, not the mean; round 2 is not FedAvg's."""
    data = {name: Shifted(16, k) for k, name in enumerate("ab")}
    moon = Federation(method="moon", build=lambda: model_of("resnet10"), data=data)
    average = Federation(method="fedavg", build=lambda: model_of("resnet10"), data=data)
    assert equal(moon.round(), average.round())
    for header, update in moon.updates:
        assert equal(moon.states[header.device], update)
    assert not equal(moon.round(), average.round())


def test_a_device_that_was_away_compares_with_its_own_old_model() -> None:
    """b trains in rounds 1 and 3: what it keeps does not change in round 2."""
    data = {name: Shifted(16, k) for k, name in enumerate("ab")}
    moon = Federation(method="moon", build=lambda: model_of("mlp"), data=data)
    moon.round()
    kept = dict(moon.states["b"])
    moon.round(["a"])
    assert equal(moon.states["b"], kept)


def test_a_model_of_one_unit_is_refused_before_the_run() -> None:
    """It has no representation; the server says so, and so would a device."""
    method, model = registry.get("moon", {}), linear_model([0.0, 0.0])
    with pytest.raises(InputError, match="this model is one unit; make it two or more"):
        method.check(model)
    with pytest.raises(InputError, match="one unit"):
        method.client().begin(job_of(model, None))


def test_a_previous_model_of_another_shape_is_refused() -> None:
    """A state that belongs to another model."""
    model = model_of("mlp")
    client = registry.get("moon", {}).client()
    with pytest.raises(PayloadError, match="previous model has no"):
        client.begin(job_of(model, None, state={"other": torch.zeros(1)}))


def _normed(first: float) -> Model:
    """As `_two`, with a BatchNorm behind the features: nothing in evaluation, batch statistics in training."""
    body, head = nn.Sequential(nn.Linear(1, 2, bias=False), nn.BatchNorm1d(2)), nn.Linear(2, 2, bias=False)
    body[0].weight.data = torch.tensor([[first], [1.0]])
    head.weight.data = torch.eye(2)
    return from_sequential(nn.Sequential(body, head), input_shape=(1,))


def test_the_received_and_the_previous_model_are_in_evaluation_mode() -> None:
    """x = 1 and 2. Trained, by its batch: z = (-1, -1), (1, 1); received (3, 1) x, previous (0, 1) x, as they are.

    cos(z, z_glob) = -+4/sqrt(20), cos(z, z_prev) = -+1/sqrt(2); both logits are the same: CE log 2. By their batches
    all three would have one representation, and l_con log 2.
    """
    model = _normed(3.0).train()
    client = registry.get("moon", {"mu": 1.0, "temperature": 0.5}).client()
    client.begin(job_of(model, None, state=values(_normed(0.0))))
    y = torch.tensor([0, 0])
    batch = Batch(x=torch.tensor([[1.0], [2.0]]), y=y, num_whole=2, whole_y=y, first=True)
    (phase,) = client.phases()
    (term,) = client.terms(batch, phase)
    assert term.each is not None
    gap = (4 / math.sqrt(20) - 1 / math.sqrt(2)) / 0.5
    expected = [math.log(2) + math.log1p(math.exp(sign * gap)) for sign in (1, -1)]
    assert term.each.tolist() == pytest.approx(expected, abs=1e-3)
