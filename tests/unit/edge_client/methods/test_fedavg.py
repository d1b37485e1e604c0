"""FedAvg: one round by hand, from the loop to the mean."""

from __future__ import annotations

import torch
from linear import Samples, TensorFrozen, TensorState, linear_model, local_round

from edge_client.methods import registry
from edge_client.methods.base import Batch, Header, Job, Phase, PlainClient, Term
from edge_client.training.loop import generator


def test_one_round_of_one_linear_step_by_hand() -> None:
    """w=(0,0): softmax is (1/2, 1/2), so the gradient of one sample (x, y) is x * (1/2 - [y=0], 1/2 - [y=1]).

    Device a: x=1, y=0 -> gradient (-1/2, 1/2); w_a = (1/2, -1/2) with lr 1.
    Device b: x=2, y=1, three times the same sample -> gradient (1, -1); w_b = (-1, 1).
    n_a=1, n_b=3: w = (1/4)(1/2, -1/2) + (3/4)(-1, 1) = (-5/8, 5/8). All numbers are exact in binary.
    """
    method = registry.get("fedavg", {})
    w_a = local_round(method, linear_model([0.0, 0.0]), Samples([1.0], [0]))
    w_b = local_round(method, linear_model([0.0, 0.0]), Samples([2.0] * 3, [1] * 3))
    assert w_a["0.weight"].flatten().tolist() == [0.5, -0.5]
    torch.testing.assert_close(w_b["0.weight"].flatten(), torch.tensor([-1.0, 1.0]))
    frozen = TensorFrozen([(Header(device="a", num_samples=1), w_a), (Header(device="b", num_samples=3), w_b)])
    state = TensorState({"0.weight": torch.zeros(2, 1)})
    (folded,) = method.server.fold(state, frozen, round=1)
    assert folded[0] == "0.weight"
    torch.testing.assert_close(folded[1].flatten(), torch.tensor([-0.625, 0.625]))


def test_the_fold_yields_every_tensor_in_the_order_of_the_state() -> None:
    """Layers that some lack are averaged over those that have them; what nobody has stays; counters: the largest.

    n = 10, 30, 60 with b0 = 1, 3, 5 and b1 = -, 5, 9: b0 = (10 + 90 + 300)/100 = 4, b1 = (150 + 540)/90 = 7.6667.
    """
    updates = [
        (Header(device="a", num_samples=10), {"b0": torch.tensor([1.0]), "count": torch.tensor(4)}),
        (Header(device="b", num_samples=30), {"b0": torch.tensor([3.0]), "b1": torch.tensor([5.0])}),
        (Header(device="c", num_samples=60), {"b0": torch.tensor([5.0]), "b1": torch.tensor([9.0])}),
    ]
    old = {name: torch.tensor([-1.0]) for name in ("lonely", "b1", "b0")} | {"count": torch.tensor(2)}
    folded = list(registry.get("fedavg", {}).server.fold(TensorState(old), TensorFrozen(updates), round=3))
    assert [name for name, _ in folded] == ["lonely", "b1", "b0", "count"]
    values = [round(float(tensor), 4) for _, tensor in folded]
    assert values == [-1.0, 7.6667, 4.0, 4.0]


def test_identical_updates_are_folded_to_themselves_bit_for_bit() -> None:
    """Whatever the weights."""
    weights = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    updates = [(Header(device=str(n), num_samples=n), {"w": weights}) for n in (3, 7, 11)]
    state = TensorState({"w": torch.zeros(1000)})
    ((_, folded),) = registry.get("fedavg", {}).server.fold(state, TensorFrozen(updates), round=1)
    assert torch.equal(folded, weights)


def test_the_plain_client_trains_everything_with_cross_entropy() -> None:
    """-log softmax(0,0)[y] = log 2 for each sample; one phase over the one parameter."""
    client, model = PlainClient(), linear_model([0.0, 0.0])
    client.begin(
        Job(
            model=model,
            round=1,
            num_rounds=1,
            epochs=2,
            learning_rate=1.0,
            class_counts=(1, 1),
            rng=lambda purpose: generator(1, purpose),
        )
    )
    assert client.phases() == (Phase(name="train", trainable=frozenset({"0.weight"}), epochs=2),)
    y = torch.tensor([0, 1])
    batch = Batch(x=torch.ones(2, 1), y=y, num_whole=2, whole_y=y, first=True)
    (term,) = client.terms(batch, client.phases()[0])
    assert isinstance(term, Term)
    torch.testing.assert_close(term.each, torch.full((2,), 0.693147), rtol=1e-5, atol=0)
    assert torch.equal(client.predict(batch.x), torch.zeros(2, 2))
