"""FedProx: the proximal term by hand, and that it is really applied."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from linear import Samples, linear_model, local_round
from torch import nn

from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.base import Batch, Job
from edge_client.models.contract import from_sequential
from edge_client.records import TrainingPlan
from edge_client.training.loop import generator


def _client(mu: float, weight: list[float]) -> Any:
    client = registry.get("fedprox", {"mu": mu}).client()
    client.begin(
        Job(
            model=linear_model(weight),
            round=1,
            num_rounds=1,
            epochs=1,
            learning_rate=1.0,
            class_counts=(1, 1),
            rng=lambda purpose: generator(1, purpose),
        )
    )
    return client


def _batch(*, first: bool = True) -> Batch:
    y = torch.tensor([0])
    return Batch(x=torch.ones(1, 1), y=y, num_whole=1, whole_y=y, first=first)


def test_the_proximal_term_and_its_gradient_by_hand() -> None:
    """w=(1,2), anchor 0, mu/2=.05: .05 * (1 + 4) = .25; gradient mu * w = (.1, .2)."""
    client = _client(0.1, [0.0, 0.0])
    weight = client.job.model.get_parameter("0.weight")
    weight.data = torch.tensor([[1.0], [2.0]])
    (phase,) = client.phases()
    _, proximal = client.terms(_batch(), phase)
    value = proximal.weight * proximal.once
    assert value.item() == pytest.approx(0.25)
    (grad,) = torch.autograd.grad(value, weight)
    torch.testing.assert_close(grad.flatten(), torch.tensor([0.1, 0.2]))


def test_two_steps_by_hand_show_that_the_term_is_applied() -> None:
    """One sample x=1, y=0, w=(0,0), lr=1, mu=.5; p = softmax(w), gradient (p0 - 1, p1) + mu (w - anchor).

    Step 1: p=(1/2,1/2), w at the anchor: w = (1/2, -1/2).
    Step 2: p0 = 1/(1+e^-1) = .731059: gradient (-.268941 + .25, .268941 - .25): w = (.518941, -.518941).
    Without the term w would be (.768941, -.768941).
    """
    method = registry.get("fedprox", {"mu": 0.5})
    weights = local_round(method, linear_model([0.0, 0.0]), Samples([1.0], [0]), steps=2)["0.weight"].flatten()
    torch.testing.assert_close(weights, torch.tensor([0.5189414, -0.5189414]), rtol=1e-5, atol=0)


def test_the_anchor_is_what_was_received_not_zero() -> None:
    """At the received weights the term is zero, wherever they are; it does not move while training does."""
    client = _client(1.0, [3.0, 4.0])
    weight = client.job.model.get_parameter("0.weight")
    (phase,) = client.phases()
    _, at_start = client.terms(_batch(), phase)
    assert at_start.once.item() == 0.0
    weight.data += 1.0  # in place, as an optimizer does
    _, later = client.terms(_batch(), phase)
    assert later.once.item() == 2.0


class _Stored(dict[str, torch.Tensor]):
    """Received tensors, each a new one when it is read, as from a file; and which of them were."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return super().__getitem__(name).clone()


def _wide(stored: _Stored) -> Any:
    """300 inputs, 2 classes, and a bias."""
    model = from_sequential(nn.Sequential(nn.Linear(300, 2)), input_shape=(300,))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3.0)
    client = registry.get("fedprox", {"mu": 1.0}).client()
    client.begin(dataclasses.replace(_client(1.0, [3.0, 4.0]).job, model=model, received=stored))
    return client


def test_an_anchor_that_can_be_read_again_is_kept_only_if_it_is_small() -> None:
    """600 weights are read in every step, a bias of 2 once. (3 - 1)^2 of each: 4 x 2 and 4 x 600."""
    stored = _Stored({"0.weight": torch.ones(2, 300), "0.bias": torch.ones(2)})
    client = _wide(stored)
    assert stored.read == ["0.bias"]
    (phase,) = client.phases()
    batch = dataclasses.replace(_batch(), x=torch.ones(1, 300))
    for _ in range(2):
        _, *proximal = client.terms(batch, phase)
        assert [term.once.item() for term in proximal] == [8.0, 2400.0]
    assert stored.read == ["0.bias", "0.weight", "0.weight"]


def test_what_is_kept_of_small_anchors_has_a_bound() -> None:
    """200 biases of 256 are 204,800 bytes: 128 of them, 131,072 bytes, are kept, and the plan counts as many."""
    model = nn.Module()
    for number in range(200):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(256)))
    stored = _Stored({name: param.detach() for name, param in model.named_parameters()})
    client = registry.get("fedprox", {"mu": 1.0}).client()
    client.begin(dataclasses.replace(_client(1.0, [3.0, 4.0]).job, model=model, received=stored))
    assert stored.read == [f"p{number}" for number in range(128)]
    assert registry.plan_rules("fedprox", {}).fixed_bytes == 128 * 256 * 4
    assert registry.plan_rules("fedprox", {"mu": 0}).fixed_bytes == 0


def test_anchors_of_another_plan_are_what_was_received_though_they_have_been_trained() -> None:
    """A module that comes with `replan` is read, not copied."""
    stored = _Stored({"0.weight": torch.ones(2, 300), "0.bias": torch.ones(2), "late.bias": torch.full((2,), 5.0)})
    client = _wide(stored)
    late = nn.Linear(1, 2, bias=True)
    late.bias.data.fill_(9.0)
    client.job = dataclasses.replace(client.job, modules={"late": late})
    client.replan(TrainingPlan(microbatch=1, budget_bytes=0, predicted_bytes=0))
    phase = dataclasses.replace(client.phases()[0], trainable=frozenset({"late.bias"}))
    _, proximal = client.terms(dataclasses.replace(_batch(), x=torch.ones(1, 300)), phase)
    assert proximal.once.item() == 2 * (9 - 5) ** 2


@pytest.mark.parametrize("channels_last", [False, True])
def test_kept_and_read_anchors_train_the_same_bits(channels_last: bool) -> None:
    """As a term for each parameter by itself, mu (w - w_t) added to its gradient, would."""
    rng = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 3, 8, 8, generator=rng), torch.randint(0, 4, (8,), generator=rng)
    weights: list[dict[str, torch.Tensor]] = []
    for apart in (False, True):
        torch.manual_seed(7)
        head = (nn.Conv2d(32, 4, 1), nn.Flatten(), nn.Linear(144, 4))
        net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), *head)
        if channels_last:
            net = net.to(memory_format=torch.channels_last)
        model = from_sequential(net, input_shape=(3, 8, 8))
        received = _Stored({name: param.detach().clone().contiguous() for name, param in model.named_parameters()})
        client = registry.get("fedavg" if apart else "fedprox", {} if apart else {"mu": 0.3}).client()
        client.begin(dataclasses.replace(_client(1.0, [3.0, 4.0]).job, model=model, received=received))
        for _ in range(3):
            batch = Batch(x=x, y=y, num_whole=8, whole_y=y, first=True)
            for term in client.terms(batch, client.phases()[0]):
                (term.weight * (term.once if term.each is None else term.each.sum() / 8)).backward()
            with torch.no_grad():
                for name, param in model.named_parameters():
                    assert param.grad is not None
                    if apart:
                        param.grad += 0.3 * (param - received[name])
                    param -= 0.1 * param.grad
                    param.grad = None
        weights.append({name: param.detach().clone() for name, param in model.named_parameters()})
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name


def test_the_term_counts_once_per_step_whatever_the_microbatch() -> None:
    """Only the first piece of a batch has it."""
    client = _client(1.0, [3.0, 4.0])
    (phase,) = client.phases()
    assert [term.name for term in client.terms(_batch(first=False), phase)] == ["cross_entropy"]


def test_with_mu_zero_it_is_fedavg_bit_for_bit() -> None:
    """And with mu > 0 it is not."""
    rng = torch.Generator().manual_seed(3)
    data = Samples(torch.randn(16, generator=rng).tolist(), torch.randint(0, 2, (16,), generator=rng).tolist())
    runs = {
        label: local_round(registry.get(name, parameters), linear_model([0.3, -0.2]), data, steps=5)["0.weight"]
        for label, name, parameters in (
            ("avg", "fedavg", {}),
            ("zero", "fedprox", {"mu": 0}),
            ("prox", "fedprox", {"mu": 0.1}),
        )
    }
    assert torch.equal(runs["avg"], runs["zero"])
    assert not torch.equal(runs["avg"], runs["prox"])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"mu": -0.1}, "'fedprox': mu: expected 0 to 1000, got -0.1; mu in the paper: weight of the proximal term"),
        ({"mu": "much"}, "'fedprox': mu: expected float, got str 'much' .range: 0 to 1000.; mu in the paper: "),
        ({"mo": 0.1}, "unknown key 'mo'; did you mean 'mu'"),
    ],
)
def test_parameters_out_of_range_name_field_value_range_and_symbol(parameters: dict[str, Any], message: str) -> None:
    """The coordinator says so before a run starts."""
    with pytest.raises(InputError, match=message):
        registry.validate("fedprox", parameters)
