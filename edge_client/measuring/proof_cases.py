"""The cases of `edge-client prove`: which model, batch, optimizer, method and budget, drawn from a seed.

The same seed draws the same cases. Architectures come in turn, so that few cases are of many; each has two sizes, so
that what was measured of a model once serves several of its cases, as on a device.
Covers: drawing. Does not cover: carrying out (`cli.prove_command`), the models themselves (`proof_models`). No torch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ZOO", "Case", "cases"]

Json = dict[str, Any]

# built-in models, as a run file says it; methods that train by groups need their units
ZOO: Mapping[str, Json] = {
    "zoo:small-cnn": {"name": "small-cnn", "input": [1, 28, 28]},
    "zoo:mlp": {"name": "mlp", "input": [3, 32, 32], "hidden": [256, 256, 256]},
    "zoo:preresnet20": {"name": "preresnet20", "input": [3, 32, 32]},
    "zoo:preresnet20-tracked": {"name": "preresnet20", "input": [3, 16, 16], "track-running-stats": True},
    "zoo:resnet10": {"name": "resnet10", "input": [3, 16, 16], "small-stem": True},
    "zoo:densenet121-narrow": {
        **{"name": "densenet121", "input": [1, 8, 8], "growth": 4, "base-width": 8},
        "small-stem": True,
    },
    "zoo:vit-t-16": {"name": "vit-t-16", "input": [3, 16, 16], "patch": 4},
    "zoo:har-cnn": {"name": "har-cnn", "input": [9, 128]},
    "zoo:har-transformer": {"name": "har-transformer", "input": [9, 128]},
}
_BATCHES = (4, 8, 12, 16, 20, 24, 32, 32, 48, 64)
_BATCHES_OF_LARGE = (2, 4, 6, 8, 12, 16)
_OPTIMIZERS: tuple[Json, ...] = (
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "momentum": 0.9},
    {"optimizer": "sgd", "momentum": 0.9, "weight-decay": 0.0005},
    {"optimizer": "adam"},
)
_METHODS = ("fedavg", "fedavg", "fedavg", "fedprox", "fednova", "scaffold", "local")
_METHODS_BY_UNITS = ("fedavg", "fedepth", "m-fedepth", "fedprox")
_COLD_SHARE = 0.1  # of workers that are processes of their own; the others are forks of a template
_MOST_IN_A_ROW = 8  # cases of one model
_WHOLE_SHARE = 0.3  # of budgets that leave room for training everything at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training to plan, try and measure."""

    number: int
    architecture: str  # of `proof_models`, `ZOO`, torchvision or timm; or the place of a task
    size: int
    batch: int
    num_samples: int  # to train on
    num_tests: int
    epochs: int
    train: Mapping[str, Any]
    method: str
    room: float  # of the budget: 0, the smallest with a plan; 1, everything at once; above: more than that
    cold: bool

    def __str__(self) -> str:
        optimizer = self.train["optimizer"] if not self.train.get("momentum") else "momentum"
        return f"{self.architecture} size {self.size}, {self.method}, batch {self.batch}, {optimizer}"


def cases(seed: int, count: int, architectures: Sequence[str]) -> Iterator[Case]:
    """At least `count`; with many, several of one model follow each other, so that all models come soon."""
    rng, number, order = random.Random(seed), 0, list(architectures)
    in_a_row = max(1, min(_MOST_IN_A_ROW, count // (2 * len(order))))
    while number < count:
        rng.shuffle(order)
        for architecture in order:
            size = rng.choice((1, 2))
            for _ in range(in_a_row):
                yield _case(rng, seed, number, architecture, size)
                number += 1


def _case(rng: random.Random, seed: int, number: int, architecture: str, size: int) -> Case:
    is_zoo = architecture in ZOO
    is_large = architecture.startswith(("torchvision:", "timm:"))
    batch = rng.choice(_BATCHES_OF_LARGE if is_large else _BATCHES)
    size = 1 if is_large or is_zoo else size
    # a model that is measured once serves all of its cases: its method is part of what is measured
    methods = rng if is_zoo else random.Random(f"{seed} {architecture} {size}")
    whole = rng.random() < _WHOLE_SHARE
    return Case(
        number=number,
        architecture=architecture,
        size=size,
        batch=batch,
        num_samples=batch * rng.choice((1, 2, 3)) + rng.randrange(batch),
        num_tests=rng.choice((0, 3, batch, 2 * batch + 1)),
        epochs=rng.choice((1, 2, 2, 3)),
        train=rng.choice(_OPTIMIZERS),
        method=methods.choice(_METHODS_BY_UNITS if is_zoo else _METHODS),
        room=rng.uniform(1.0, 1.5) if whole else rng.random(),
        cold=rng.random() < _COLD_SHARE,
    )
