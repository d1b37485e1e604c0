"""FedProx: the proximal term by hand, and that it is really applied."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from linear import Samples, linear_model, local_round

from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.base import Batch, Job
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


def test_an_anchor_that_can_be_read_again_is_not_kept() -> None:
    """It is asked for in every step, also that of a module beside the model; the term is the same as with a copy."""
    asked: list[str] = []

    class Stored(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return super().__getitem__(name)

    client = registry.get("fedprox", {"mu": 1.0}).client()
    job = _client(1.0, [3.0, 4.0]).job
    client.begin(dataclasses.replace(job, received=Stored({"0.weight": torch.tensor([[1.0], [1.0]])})))
    (phase,) = client.phases()
    for _ in range(2):
        _, proximal = client.terms(_batch(), phase)
        assert proximal.once.item() == (3 - 1) ** 2 + (4 - 1) ** 2
    assert asked == ["0.weight", "0.weight"]


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
        ({"mu": "much"}, "'fedprox': mu: expected float, got str"),
        ({"mo": 0.1}, "unknown key 'mo'; did you mean 'mu'"),
    ],
)
def test_parameters_out_of_range_name_field_value_range_and_symbol(parameters: dict[str, Any], message: str) -> None:
    """The coordinator says so before a run starts."""
    with pytest.raises(InputError, match=message):
        registry.validate("fedprox", parameters)
