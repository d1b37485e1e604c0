"""Velo: the CVAE by hand and against another implementation, what it makes, what is sent before and instead of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from depth import equal, model_of
from federation import Federation, Shifted
from knowing import table
from torch import Tensor, nn

from edge_client.knowledge.kinds import ClassTable
from edge_client.methods.base import Header, Lesson
from edge_client.methods.cards.velo import VeloParameters
from edge_client.methods.velo import VeloTeacher, decode, kl_from_normal, loss_of, new_vae, train_vae


def rng(seed: int = 1) -> torch.Generator:
    """A generator."""
    return torch.Generator().manual_seed(seed)


def test_the_divergence_by_hand() -> None:
    """mu = (1,0), log var 0: 1/2; mu 0, log var = (ln 4, 0): -(1 + ln 4 - 4)/2 = .806853."""
    mu, log_var = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [math.log(4), 0.0]])
    assert kl_from_normal(mu, log_var).tolist() == pytest.approx([0.5, 0.806853], abs=1e-6)


@pytest.mark.parametrize(("classes", "width", "hidden"), [(10, 512, 256), (3, 20, 20)])
def test_the_size_of_the_network(classes: int, width: int, hidden: int) -> None:
    """C E + (F+E) H + H + 2H + H 2Z + 2Z + (Z+E) H + H + H F + F with E = 64, H = Z."""
    c, f, h, e = classes, width, hidden, 64
    expected = c * e + (f + e) * h + h + 2 * h + h * 2 * h + 2 * h + (h + e) * h + h + h * f + f
    assert sum(tensor.numel() for tensor in new_vae(width, classes, hidden, rng()).values()) == expected


def test_the_loss_agrees_with_modules() -> None:
    """The same network of torch's layers, in float64: reconstruction and divergence summed, averaged over the batch."""
    vae = {name: tensor.double() for name, tensor in new_vae(6, 3, 4, rng()).items()}
    s, eps = (torch.randn(5, width, generator=rng(), dtype=torch.float64) for width in (6, 4))
    y = torch.tensor([0, 1, 2, 0, 1])
    embedding, norm = nn.Embedding(3, 64).double(), nn.BatchNorm1d(4).double()
    embedding.weight.data = vae["embedding"]
    layers = {name: nn.Linear(1, 1).double() for name in ("encode1", "encode2", "decode1", "decode2")}
    for name, layer in layers.items():
        layer.weight.data, layer.bias.data = vae[f"{name}.weight"], vae[f"{name}.bias"]
    hidden = torch.relu(norm(layers["encode1"](torch.cat([s, embedding(y)], 1))))
    both = layers["encode2"](hidden)
    mu, log_var = both[:, :4], both[:, 4:]
    z = mu + torch.sqrt(torch.exp(log_var)) * eps
    guessed = layers["decode2"](layers["decode1"](torch.cat([z, embedding(y)], 1)))
    divergence = -0.5 * torch.sum(1 + log_var - mu**2 - torch.exp(log_var))
    expected = (torch.sum((guessed - s) ** 2) + 2.0 * divergence) / 5
    torch.testing.assert_close(loss_of(vae, s, y, eps, 2.0), expected)


def test_training_finds_the_classes() -> None:
    """Two classes around (3,3,..) and (-3,-3,..): decoded features end on the right side, and the loss falls."""
    y = torch.arange(60) % 2
    s = torch.randn(60, 8, generator=rng(2)) * 0.1 + torch.where(y == 0, 3.0, -3.0)[:, None]
    vae = new_vae(8, 2, 8, rng())
    eps = torch.randn(60, 8, generator=rng(3))
    after = train_vae(vae, s, y, epochs=150, learning_rate=1e-2, beta=1.0, rng=rng(4))
    assert loss_of(after, s, y, eps, 1.0) < 0.2 * loss_of(vae, s, y, eps, 1.0)
    features = decode(after, torch.randn(2, 8, generator=rng(5)), torch.tensor([0, 1]))
    assert features[0].mean() > 1
    assert features[1].mean() < -1


def teacher(**parameters: Any) -> VeloTeacher:
    """With a small CVAE."""
    return VeloTeacher(VeloParameters(**({"vae_epochs": 2, "vae_width": 4} | parameters)))


def learn(
    velo: VeloTeacher, memory: Mapping[str, Tensor], round: int, studied: Mapping[str, Tensor], **said: ClassTable
) -> Mapping[str, Tensor]:
    """A round in which these devices said something."""

    def received() -> Any:
        for device, item in said.items():
            yield Header(device=device, num_samples=1), (item,)

    return velo.learn(memory, received, Lesson(round=round, num_classes=3, seed=1), studied)


def told(velo: VeloTeacher, memory: Mapping[str, Tensor]) -> ClassTable:
    """The only table."""
    (found,) = velo.tell(memory, cut="full", device="", lesson=Lesson(round=9, num_classes=3, seed=1))
    return found


def test_means_are_sent_until_the_network_has_made_something() -> None:
    """Round 1: the mean; what is studied of round 1 is taken over by the fold of round 2; class 2 is never there."""
    velo = teacher()
    said = {"a": table("feature", [[1.0, 2.0], [3.0, 4.0], None]), "b": table("feature", [[3.0, 2.0], None, None])}
    memory = learn(velo, {}, 1, {}, **said)
    assert told(velo, memory).values.tolist() == [[2.0, 2.0], [3.0, 4.0]]
    studied = velo.study(memory, Lesson(round=1, num_classes=3, seed=1))
    assert studied["made/2/counts"].tolist() == [2, 1, 0]
    memory = learn(velo, memory, 2, studied, **said)
    made = told(velo, memory)
    assert made.counts.tolist() == [2, 1, 0]  # devices behind it, as Felo says
    assert torch.equal(made.values, studied["made/2/values"])


def test_what_is_made_of_a_class_is_like_what_devices_said_of_it() -> None:
    """Twelve devices say about (3,3,..) of class 0 and (-3,-3,..) of class 1: synthetic features say so, too."""
    velo = teacher(vae_epochs=200, vae_lr=1e-2, vae_width=8)
    near = torch.randn(12, 2, 8, generator=rng(2)) * 0.1 + torch.tensor([3.0, -3.0])[:, None]
    said = {f"d{k:02}": table("feature", [*rows.tolist(), None]) for k, rows in enumerate(near)}
    made = velo.study(learn(velo, {}, 1, {}, **said), Lesson(round=1, num_classes=3, seed=1))["made/8/values"]
    assert made[0].mean() > 1
    assert made[1].mean() < -1


def test_a_class_that_the_network_has_not_seen_gets_its_mean() -> None:
    """Class 2 appears in round 2, after the study of round 1."""
    velo = teacher()
    memory = learn(velo, {}, 1, {}, a=table("feature", [[1.0, 2.0], [3.0, 4.0], None]))
    studied = velo.study(memory, Lesson(round=1, num_classes=3, seed=1))
    memory = learn(velo, memory, 2, studied, b=table("feature", [None, None, [7.0, 8.0]]))
    made = told(velo, memory)
    assert torch.equal(made.values[:2], studied["made/2/values"])
    assert made.values[2].tolist() == [7.0, 8.0]


def test_a_study_depends_on_the_memory_and_the_round_alone() -> None:
    """Twice the same bits, whatever torch's global generator did; another round draws anew."""
    velo = teacher()
    memory = learn(velo, {}, 1, {}, a=table("feature", [[1.0, 2.0], [3.0, 4.0], None]))
    lesson = Lesson(round=1, num_classes=3, seed=1)
    first = velo.study(memory, lesson)
    torch.manual_seed(99)
    assert equal(dict(first), dict(velo.study(memory, lesson)))
    other = velo.study(memory, Lesson(round=2, num_classes=3, seed=1))
    assert not torch.equal(first["made/2/values"], other["made/2/values"])


def test_the_network_goes_on_from_round_to_round_and_pauses_in_between() -> None:
    """interval 2: nothing is studied of round 1, and what is there stays."""
    velo = teacher(interval=2)
    memory = learn(velo, {}, 1, {}, a=table("feature", [[1.0, 2.0], [3.0, 4.0], None]))
    assert velo.study(memory, Lesson(round=1, num_classes=3, seed=1)) == {}
    studied = velo.study(memory, Lesson(round=2, num_classes=3, seed=1))
    memory = learn(velo, memory, 3, studied, a=table("feature", [[1.0, 2.0], [3.0, 4.0], None]))
    memory = learn(velo, memory, 4, {}, a=table("feature", [[1.0, 2.0], [3.0, 4.0], None]))
    assert torch.equal(memory["made/2/values"], studied["made/2/values"])
    again = velo.study(memory, Lesson(round=4, num_classes=3, seed=1))
    moved = (again["vae/2/embedding"] - studied["vae/2/embedding"]).abs().max()
    assert 0 < moved < 0.1  # a few steps of 1e-3: not a new one, whose embedding is normal
    fresh = new_vae(2, 3, 2, rng(7))
    assert again.keys() - {"made/2/counts", "made/2/values"} == {f"vae/2/{name}" for name in fresh}


def test_the_pool_keeps_the_newest_of_each_class() -> None:
    """pool 2: of three rounds of a class the last two; one that came once stays."""
    velo = teacher(pool=2)
    memory: Mapping[str, Tensor] = {}
    for number in (1, 2, 3):
        rows = [[float(number), 0.0], [9.0, 9.0] if number == 1 else None, None]
        memory = learn(velo, memory, number, {}, a=table("feature", rows))
    assert memory["pool/2/values"].tolist() == [[9.0, 9.0], [2.0, 0.0], [3.0, 0.0]]
    assert memory["pool/2/classes"].tolist() == [1, 0, 0]


def test_one_feature_alone_cannot_be_studied() -> None:
    """BatchNorm has no statistics of one row; the mean is sent."""
    velo = teacher()
    memory = learn(velo, {}, 1, {}, a=table("feature", [[1.0, 2.0], None, None]))
    assert velo.study(memory, Lesson(round=1, num_classes=3, seed=1)) == {}


def test_synthetic_features_are_used_by_devices() -> None:
    """Rounds 1 and 2 are Felo's bit for bit: what is made of round 1 is sent with round 3, whose weights differ."""
    data = {name: Shifted(24, k) for k, name in enumerate("ab")}
    velo, felo = (
        Federation(method=name, parameters=parameters, build=lambda: model_of("mlp"), data=data)
        for name, parameters in (("velo", {"vae_epochs": 1}), ("felo", {}))
    )
    for expected in (True, True, False):
        assert equal(velo.round(), felo.round()) == expected
