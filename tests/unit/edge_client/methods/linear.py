"""A model small enough to compute by hand, and a state and updates in memory; shared by the tests of methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.methods.base import Header, Job, Method
from edge_client.models.contract import Model, from_sequential
from edge_client.params import IndexMap
from edge_client.training.loop import Settings, generator, train


class TensorState:
    """The server's tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor], notes: Mapping[str, Any] | None = None) -> None:
        self.tensors = tensors
        self.notes = notes or {}

    def names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name].clone()


class TensorFrozen:
    """Updates in memory; names that an update lacks are left out of its column."""

    def __init__(
        self,
        updates: Sequence[tuple[Header, dict[str, Tensor]]],
        *,
        places: Sequence[Mapping[str, IndexMap | None]] = (),
        num_devices: int = 0,
        momentum: float = 0.0,
    ) -> None:
        """`places`: of each update where its tensors lie, if not all of them are whole."""
        self.updates = updates
        self.places = places or [{}] * len(updates)
        self.headers = [header for header, _ in updates]
        self.num_devices = max(num_devices, len(updates))
        self.momentum = momentum

    def column(self, name: str) -> Iterator[tuple[Header, Tensor, IndexMap | None]]:
        for (header, tensors), places in zip(self.updates, self.places, strict=True):
            for key in [key for key in tensors if key.partition("#")[0] == name]:
                yield header, tensors[key], places.get(key)


def linear_model(weight: Sequence[float]) -> Model:
    """One linear unit without bias, two classes: logits = weight * x."""
    layer = nn.Linear(1, 2, bias=False)
    layer.weight.data = torch.tensor(weight)[:, None]
    return from_sequential(nn.Sequential(layer), input_shape=(1,))


class Samples:
    """Samples in tensors."""

    def __init__(self, x: Sequence[float], y: Sequence[int]) -> None:
        self.x, self.labels = torch.tensor(x)[:, None], torch.tensor(y)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.labels[indices]


def local_round(method: Method, model: Model, data: Samples, *, steps: int = 1, lr: float = 1.0) -> dict[str, Tensor]:
    """What a device does; returns its weights."""
    client = method.client()
    job = Job(
        model=model,
        round=1,
        num_rounds=1,
        epochs=steps,
        learning_rate=lr,
        class_counts=(0, 0),
        rng=lambda purpose: generator(1, purpose),
    )
    client.begin(job)
    train(model, client, data, Settings(batch=len(data), microbatch=len(data), learning_rate=lr, seed=1))
    client.end()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}
