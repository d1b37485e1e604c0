"""Velo. Chan and Ngai, "Exploiting Features and Logits in Heterogeneous Federated Learning", arXiv:2210.15527.

Felo whose server does not send the mean of the features of a class, but a synthetic one: it trains a conditional
variational autoencoder (CVAE) on the class means that devices sent, and decodes one feature per class. Travels as Felo
does; the CVAE never leaves the server.

    encoder   concat(s, emb(y)) -> Linear -> BatchNorm -> ReLU -> Linear -> mu, log var
    decoder   concat(z, emb(y)) -> Linear -> Linear -> s_hat
    minimise  |s_hat - s|^2 + beta KLD,  KLD = -1/2 sum(1 + log var - mu^2 - var),  z = mu + sqrt(var) eps
              both summed over numbers and averaged over the batch

The CVAE is trained beside the round (`study`): on what the server knew when the round began, and what it makes is sent
with the round after. Until then, and for a class that it has not seen, the mean is sent; a class that nobody had is
absent.

Deviations: a loss instead of the evidence lower bound of Eq. 2, which is its negative. The released code weighs the KLD
about a batch times a feature's width heavier, which makes the decoder say the class mean. It feeds the CVAE with
features of single samples; here it gets the class means of all rounds, up to `pool` of each class. One CVAE for each
width of features.

Legend: s = a feature (a device's class mean), y = its class, z = latent, E = 64 = width of the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn import functional

from edge_client.knowledge.kinds import ClassTable
from edge_client.methods import felo
from edge_client.methods.base import Lesson, Method, Received
from edge_client.methods.cards.velo import VeloParameters
from edge_client.methods.class_means import ClassTeacher
from edge_client.training.optimizers import Adam
from edge_client.training.seeds import derive

__all__ = ["VeloTeacher", "decode", "kl_from_normal", "loss_of", "method", "new_vae", "train_vae"]

_EMBEDDING = 64
_BATCH = 64
_POOL, _VAE, _MADE = "pool/", "vae/", "made/"
_MORE = (_POOL, _VAE, _MADE)
Vae = dict[str, Tensor]


def new_vae(width: int, num_classes: int, hidden: int, rng: Generator) -> Vae:
    """Random weights for features of `width`; hidden and latent layers are equally wide."""
    dense = {
        "encode1": (width + _EMBEDDING, hidden),
        "encode2": (hidden, 2 * hidden),
        "decode1": (hidden + _EMBEDDING, hidden),
        "decode2": (hidden, width),
    }
    vae: Vae = {"embedding": torch.randn(num_classes, _EMBEDDING, generator=rng)}
    for name, (inputs, outputs) in dense.items():
        bound = 1 / math.sqrt(inputs)
        vae[f"{name}.weight"] = torch.empty(outputs, inputs).uniform_(-bound, bound, generator=rng)
        vae[f"{name}.bias"] = torch.empty(outputs).uniform_(-bound, bound, generator=rng)
    return {**vae, "norm.weight": torch.ones(hidden), "norm.bias": torch.zeros(hidden)}


def _encode(vae: Vae, s: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """mu and log var."""
    x = functional.linear(torch.cat((s, vae["embedding"][y]), dim=1), vae["encode1.weight"], vae["encode1.bias"])
    x = functional.batch_norm(x, None, None, vae["norm.weight"], vae["norm.bias"], training=True)
    mu, log_var = functional.linear(x.relu(), vae["encode2.weight"], vae["encode2.bias"]).chunk(2, dim=1)
    return mu, log_var


def decode(vae: Vae, z: Tensor, y: Tensor) -> Tensor:
    """Features of classes `y` for latents `z`."""
    x = functional.linear(torch.cat((z, vae["embedding"][y]), dim=1), vae["decode1.weight"], vae["decode1.bias"])
    return functional.linear(x, vae["decode2.weight"], vae["decode2.bias"])


def kl_from_normal(mu: Tensor, log_var: Tensor) -> Tensor:
    """KLD of each sample: [b, Z] twice -> [b]."""
    return -0.5 * (1 + log_var - mu.square() - log_var.exp()).sum(dim=1)


def loss_of(vae: Vae, s: Tensor, y: Tensor, eps: Tensor, beta: float) -> Tensor:
    """The mean over a batch; one draw `eps` for each sample."""
    mu, log_var = _encode(vae, s, y)
    decoded = decode(vae, mu + (0.5 * log_var).exp() * eps, y)
    return ((decoded - s).square().sum(dim=1) + beta * kl_from_normal(mu, log_var)).mean()


def train_vae(vae: Vae, s: Tensor, y: Tensor, *, epochs: int, learning_rate: float, beta: float, rng: Generator) -> Vae:
    """The CVAE after some passes over features `s` of classes `y`, with Adam."""
    vae = {name: tensor.clone().requires_grad_() for name, tensor in vae.items()}
    optimizer = Adam()
    latent = vae["decode1.weight"].shape[1] - _EMBEDDING
    for _ in range(epochs):
        for rows in _batches(len(s), rng):
            eps = torch.randn(len(rows), latent, generator=rng)
            loss = loss_of(vae, s[rows], y[rows], eps, beta)
            for (name, tensor), grad in zip(vae.items(), torch.autograd.grad(loss, list(vae.values())), strict=True):
                optimizer.step(name, tensor, grad, learning_rate)
    return {name: tensor.detach() for name, tensor in vae.items()}


def _batches(count: int, rng: Generator) -> Iterator[Tensor]:
    """Random batches of two rows or more: BatchNorm has no statistics of one."""
    order = torch.randperm(count, generator=rng)
    yield from (order[start : start + _BATCH] for start in range(0, count - 1, _BATCH))


class VeloTeacher(ClassTeacher):
    """Felo's memory; and for each width of features a pool (`pool/`), the CVAE (`vae/`), its features (`made/`)."""

    def __init__(self, parameters: VeloParameters) -> None:
        super().__init__(by_count=parameters.weighting == "count", max_age=parameters.max_age)
        self._parameters = parameters

    def learn(
        self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson, studied: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Felo's memory, the pools with the features of this round, and what was generated meanwhile."""
        felo_memory = {name: memory[name] for name in memory if not name.startswith(_MORE)}
        class_means = super().learn(felo_memory, received, lesson, {})
        generated = {name: memory[name] for name in memory if name.startswith((_VAE, _MADE))}
        return {**class_means, **self._updated_pools(memory, class_means, lesson.round), **generated, **studied}

    def _updated_pools(
        self, memory: Mapping[str, Tensor], class_means: Mapping[str, Tensor], round: int
    ) -> dict[str, Tensor]:
        """The pools with the features of this round behind the older ones; the newest `pool` of each class stay."""
        pools = {name: memory[name] for name in memory if name.startswith(_POOL)}
        groups = [
            name.removesuffix("/values") for name in class_means if name.startswith("feature/") and "values" in name
        ]
        for group in groups:
            width = group.removeprefix("feature/")
            is_new = class_means[f"{group}/rounds"] == round
            classes, values = class_means[f"{group}/classes"][is_new], class_means[f"{group}/values"][is_new]
            if f"{_POOL}{width}/classes" in pools:
                classes = torch.cat((pools[f"{_POOL}{width}/classes"], classes))
                values = torch.cat((pools[f"{_POOL}{width}/values"], values))
            rows = _newest(classes, self._parameters.pool)
            pools |= {f"{_POOL}{width}/classes": classes[rows], f"{_POOL}{width}/values": values[rows]}
        return pools

    def study(self, memory: Mapping[str, Tensor], lesson: Lesson) -> Mapping[str, Tensor]:
        """Train the CVAEs and let each generate one feature per class that it has seen; every `interval` rounds."""
        if lesson.round % self._parameters.interval:
            return {}
        generated: dict[str, Tensor] = {}
        for name in sorted(name for name in memory if name.startswith(_POOL) and name.endswith("/classes")):
            width = name.removeprefix(_POOL).removesuffix("/classes")
            generated |= self._generate(width, memory[name], memory[f"{_POOL}{width}/values"], memory, lesson)
        return generated

    def _generate(
        self, width: str, classes: Tensor, values: Tensor, memory: Mapping[str, Tensor], lesson: Lesson
    ) -> dict[str, Tensor]:
        if len(classes) < 2:
            return {}
        parameters, prefix = self._parameters, f"{_VAE}{width}/"
        rng = torch.Generator().manual_seed(derive(lesson.seed, "vae", lesson.round, width))
        vae = {name.removeprefix(prefix): memory[name] for name in memory if name.startswith(prefix)}
        hidden = min(int(width), parameters.vae_width)
        vae = vae or new_vae(int(width), lesson.num_classes, hidden, rng)
        settings = {"epochs": parameters.vae_epochs, "learning_rate": parameters.vae_lr, "beta": parameters.beta_kld}
        vae = train_vae(vae, values, classes, rng=rng, **settings)  # type: ignore[arg-type]
        counts = torch.bincount(classes, minlength=lesson.num_classes)
        seen = counts.nonzero()[:, 0]
        features = decode(vae, torch.randn(len(seen), hidden, generator=rng), seen)
        table = {f"{_MADE}{width}/counts": counts, f"{_MADE}{width}/values": features}
        return {**{prefix + name: tensor for name, tensor in vae.items()}, **table}

    def tell(self, memory: Mapping[str, Tensor], *, cut: str, device: str, lesson: Lesson) -> tuple[ClassTable, ...]:
        """Felo's tables, with synthetic features where there are any."""
        felo_memory = {name: memory[name] for name in memory if not name.startswith(_MORE)}
        tables = super().tell(felo_memory, cut=cut, device=device, lesson=lesson)
        return tuple(_synthetic(table, memory) for table in tables)


def _newest(classes: Tensor, most: int) -> Tensor:
    """Which rows are among the last `most` of their class: [n] of bool."""
    is_newest = torch.zeros(len(classes), dtype=torch.bool)
    for number in torch.unique(classes):
        is_newest[(classes == number).nonzero()[-most:, 0]] = True
    return is_newest


def _synthetic(table: ClassTable, memory: Mapping[str, Tensor]) -> ClassTable:
    """The same with decoded features in place of means, for the classes that have one."""
    counts = memory.get(f"{_MADE}{table.width}/counts")
    if table.label != "feature" or counts is None:
        return table
    generated = ClassTable(label="feature", counts=counts, values=memory[f"{_MADE}{table.width}/values"])
    (features, generated_for), (means, _) = generated.targets(), table.targets()
    values = torch.where(generated_for[:, None] > 0, features, means)[table.classes]
    return ClassTable(label="feature", counts=table.counts, values=values)


def method(parameters: VeloParameters) -> Method:
    """Velo, for the registry."""
    plain = felo.method(parameters)
    return replace(
        plain,
        check=partial(felo.check_features, method="velo"),
        knowledge=replace(plain.knowledge, teacher=VeloTeacher(parameters)),
    )
