"""FedNova: the worked examples, and the paper's formula over devices with different numbers of steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from federation import Federation, Shifted
from linear import Samples, TensorFrozen, TensorState, linear_model
from torch import Tensor

from edge_client.methods import registry
from edge_client.methods.base import Header
from edge_client.methods.fednova import effective_steps
from edge_client.params import IndexMap


def _fold(
    old: dict[str, Tensor], updates: Sequence[tuple[int, int, dict[str, Tensor]]], momentum: float = 0.0
) -> dict[str, Tensor]:
    """Updates as (n, tau, tensors)."""
    headers = [Header(device=str(k), num_samples=n, steps=tau) for k, (n, tau, _) in enumerate(updates)]
    frozen = TensorFrozen([(header, u[2]) for header, u in zip(headers, updates, strict=True)], momentum=momentum)
    return dict(registry.get("fednova", {}).server.fold(TensorState(old), frozen, round=1))


@pytest.mark.parametrize(
    ("steps", "momentum", "expected"),
    [(3, 0.5, 4.25), (3, 0.0, 3.0), (1, 0.9, 1.0), (2, 0.9, 2.9), (4, 1.0, 10.0), (0, 0.9, 0.0)],
)
def test_how_far_steps_carry(steps: int, momentum: float, expected: float) -> None:
    """By hand: 1 + (1 + rho) + (1 + rho + rho^2) + ...; three steps with rho = .5: 1 + 1.5 + 1.75 = 4.25."""
    assert effective_steps(steps, momentum) == pytest.approx(expected)


def test_devices_with_more_steps_do_not_count_for_more() -> None:
    """tau 2 and 4, equal n, x - x_i = 2 each: (sum p a)(sum p d) = 3 (.5 * 1 + .5 * .5) = 2.25; FedAvg moves by 2."""
    old = {"w": torch.tensor([10.0])}
    updates = [(5, 2, {"w": torch.tensor([8.0])}), (5, 4, {"w": torch.tensor([8.0])})]
    assert _fold(old, updates)["w"].tolist() == pytest.approx([7.75])


def _formula(x: Tensor, updates: Sequence[tuple[int, int, Tensor]], momentum: float) -> Tensor:
    """As the paper writes it."""
    total = sum(n for n, _, _ in updates)
    a = [sum(sum(momentum**j for j in range(k)) for k in range(1, tau + 1)) for _, tau, _ in updates]
    p = [n / total for n, _, _ in updates]
    directions = [(x - x_i) / a_i for (_, _, x_i), a_i in zip(updates, a, strict=True)]
    step = sum(p_i * a_i for p_i, a_i in zip(p, a, strict=True))
    return x - step * torch.stack([p_i * d for p_i, d in zip(p, directions, strict=True)]).sum(dim=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_papers_formula(momentum: float) -> None:
    """Four devices with different n and tau, in float64."""
    rng = torch.Generator().manual_seed(2)
    x = torch.randn(3, 5, generator=rng, dtype=torch.float64)
    sizes = [(10, 3), (25, 7), (4, 1), (60, 15)]
    updates = [(n, tau, x + torch.randn(3, 5, generator=rng, dtype=torch.float64)) for n, tau in sizes]
    folded = _fold({"w": x}, [(n, tau, {"w": value}) for n, tau, value in updates], momentum)["w"]
    torch.testing.assert_close(folded, _formula(x, updates, momentum), rtol=1e-12, atol=1e-12)


def test_sums_are_over_the_devices_that_cover_an_element() -> None:
    """The second element is one device's alone: its own mean, 4, and s = 1. The first: m = (8/2 + 6/4)/(1/2 + 1/4),
    s = 3 * 3/8 = 9/8, from 10: 10 + 9/8 (22/3 - 10) = 7. Third: nobody's, it stays.
    """

    class Sliced(TensorFrozen):
        def column(self, name: str) -> object:  # type: ignore[override]
            places: list[IndexMap] = [(torch.tensor([0]),), (torch.tensor([0, 1]),)]
            for (header, tensors), place in zip(self.updates, places, strict=True):
                yield header, tensors[name], place

    one, other = Header(device="a", num_samples=1, steps=2), Header(device="b", num_samples=1, steps=4)
    frozen = Sliced([(one, {"w": torch.tensor([8.0])}), (other, {"w": torch.tensor([6.0, 4.0])})])
    state = TensorState({"w": torch.tensor([10.0, 9.0, 5.0])})
    ((_, folded),) = registry.get("fednova", {}).server.fold(state, frozen, round=1)
    assert folded.tolist() == pytest.approx([7.0, 4.0, 5.0])


def test_buffers_and_counters_are_folded_as_in_fedavg() -> None:
    """n = 1 and 3: running_mean = (1 * 2 + 3 * 6)/4 = 5, the counter is the largest; steps do not matter."""
    old = {"bn.running_mean": torch.tensor([0.0]), "bn.num_batches_tracked": torch.tensor(0)}
    updates = [
        (1, 100, {"bn.running_mean": torch.tensor([2.0]), "bn.num_batches_tracked": torch.tensor(100)}),
        (3, 1, {"bn.running_mean": torch.tensor([6.0]), "bn.num_batches_tracked": torch.tensor(1)}),
    ]
    folded = _fold(old, updates)
    assert folded["bn.running_mean"].tolist() == [5.0]
    assert int(folded["bn.num_batches_tracked"]) == 100


def test_a_device_without_a_step_counts_for_nothing() -> None:
    """And if all are without, the model stays."""
    old = {"w": torch.tensor([1.0])}
    trained, idle = (2, 3, {"w": torch.tensor([5.0])}), (9, 0, {"w": torch.tensor([1.0])})
    assert _fold(old, [trained, idle])["w"].tolist() == [5.0]
    assert _fold(old, [idle])["w"].tolist() == [1.0]


def test_it_finds_an_optimum_that_fedavg_misses() -> None:
    """f = (w - 0)^2/2 with 1 step and (w - 1)^2/2 with 9 steps of .1, equal n: the optimum is 1/2.

    FedAvg: w = (.9 w + 1 - .9^9 (1 - w))/2 -> w = (1 - .9^9)/(2 - .9 - .9^9) = .8597: drawn to the busier device.
    FedNova's fixed point: .1 w = (1 - .9^9)(1 - w)/9 -> w = q/(q + .1), q = (1 - .9^9)/9: .4050.
    """
    q = (1 - 0.9**9) / 9
    assert _after("fednova") == pytest.approx(q / (q + 0.1), abs=1e-3)
    assert _after("fedavg") == pytest.approx((1 - 0.9**9) / (2 - 0.9 - 0.9**9), abs=1e-3)


def _after(method: str) -> float:
    def loss(center: float) -> object:
        return lambda model: (
            lambda batch, phase: (
                (model.get_parameter("0.weight") - center).square().sum() / 2 * torch.ones(len(batch.y))
            )
        )

    made = Federation(
        method=method,
        build=lambda: linear_model([3.0, 3.0]),
        data={"a": Samples([1.0] * 9, [0] * 9), "b": Samples([1.0] * 9, [0] * 9)},
        loss={"a": loss(0.0), "b": loss(1.0)},  # type: ignore[dict-item]
    )
    for _ in range(60):
        made.settings = {"batch": 9, "microbatch": 9}
        one = made._train("a")
        made.settings = {"batch": 1, "microbatch": 1}
        other = made._train("b")
        frozen = TensorFrozen([one, other])
        made.server = dict(made.made.server.fold(TensorState(made.server), frozen, round=1))
    return float(made.server["0.weight"][0])


def test_steps_come_from_the_training_itself() -> None:
    """8, 16 and 24 samples in batches of 8: 1, 2 and 3 steps; not FedAvg's model then."""
    data = {name: Shifted(n, n) for name, n in (("a", 8), ("b", 16), ("c", 24))}
    from depth import model_of

    models = {}
    for method in ("fedavg", "fednova"):
        made = Federation(method=method, build=lambda: model_of("mlp"), data=data, settings={"momentum": 0.9})
        models[method] = made.round()
        assert [header.steps for header, _ in made.updates] == [1, 2, 3]
    differing = [name for name, value in models["fedavg"].items() if not torch.equal(value, models["fednova"][name])]
    assert differing == list(models["fedavg"])
