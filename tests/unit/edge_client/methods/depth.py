"""Small models, data and plans for the tests of training group by group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.methods import registry as methods
from edge_client.methods.base import Client, Job
from edge_client.models import registry
from edge_client.models.contract import Model
from edge_client.records import TrainingPlan
from edge_client.training.loop import Settings, Trained, generator, train

NUM_CLASSES = 3
SHAPE = (1, 8, 8)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {  # each with several blocks, small enough for milliseconds per step
    "mlp": ("mlp", {"hidden": [12, 6, 20, 9]}),
    "preresnet20": ("preresnet20", {"width": 2}),
    "preresnet20, running": ("preresnet20", {"width": 2, "track_running_stats": True}),
    "resnet10": ("resnet10", {"base_width": 2, "small_stem": True}),
    "vit": ("vit-t-16", {"patch": 4, "width": 8, "heads": 2, "depth": 4}),
}


class Memory:
    """Samples in tensors."""

    def __init__(self, num_samples: int = 20, seed: int = 3, shape: Sequence[int] = SHAPE) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.x = torch.randn(num_samples, *shape, generator=rng)
        self.labels = torch.randint(0, NUM_CLASSES, (num_samples,), generator=rng)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.labels[indices]


def model_of(kind: str, seed: int = 1) -> Model:
    """One of `KINDS`, always with the same weights."""
    name, options = KINDS[kind]
    torch.manual_seed(seed)
    return registry.build(name, input_shape=SHAPE, num_classes=NUM_CLASSES, options=options)


def plan_of(
    groups: Sequence[Sequence[str]] = (), skipped: Sequence[str] = (), microbatch: int = 8, **more: Any
) -> TrainingPlan:
    """A plan with these blocks."""
    return TrainingPlan(
        groups=tuple(tuple(group) for group in groups),
        skipped=tuple(skipped),
        microbatch=microbatch,
        budget_bytes=0,
        predicted_bytes=0,
        **more,
    )


def halves(model: Model, start: int = 0) -> list[list[str]]:
    """The blocks from `start` on, in two groups."""
    blocks = list(model.order[1:-1])[start:]
    return [blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]]


def job_of(model: Model, plan: TrainingPlan | None, epochs: int = 1, **more: Any) -> Job:
    """An assignment."""
    return Job(
        model=model,
        round=1,
        num_rounds=2,
        epochs=epochs,
        learning_rate=0.1,
        class_counts=(0,) * NUM_CLASSES,
        plan=plan,
        rng=lambda purpose: generator(1, purpose),
        **more,
    )


def begun(
    model: Model,
    plan: TrainingPlan | None,
    *,
    name: str = "fedepth",
    parameters: Mapping[str, Any] | None = None,
    epochs: int = 1,
    **job: Any,
) -> Client:
    """The method's client, after `begin`; the method's own tensors are fresh ones."""
    method = methods.get(name, parameters or {})
    job.setdefault("extra", method.travel.extra_tensors(model))
    client = method.client()
    client.begin(job_of(model, plan, epochs, **job))
    return client


def trained(model: Model, client: Client, data: Memory, plan: TrainingPlan | None = None, **keys: Any) -> Trained:
    """Train in batches of 8 with momentum and weight decay; `keys`: of the settings, or of `train`."""
    calls = {key: keys.pop(key) for key in ("progress", "replan") if key in keys}
    settings = {
        "batch": 8,
        "microbatch": plan.microbatch if plan is not None else 8,
        "learning_rate": 0.1,
        "seed": 5,
        "momentum": 0.9,
        "weight_decay": 0.01,
        **keys,
    }
    return train(model, client, data, Settings(**settings), **calls)


def values(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all tensors."""
    return {name: value.clone() for name, value in module.state_dict().items()}


class Snapshots:
    """All tensors of a module at the start and after each step, and the progress that was told; a `progress`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.taken = [values(module)]
        self.told: list[tuple[int, int]] = []

    def __call__(self, step: int, total: int, loss: float) -> None:
        self.taken.append(values(self._module))
        self.told.append((step, total))


def of_units(tensors: Mapping[str, Tensor], units: Sequence[str]) -> dict[str, Tensor]:
    """Those that belong to these units."""
    return {name: value for name, value in tensors.items() if name.startswith(tuple(f"{unit}." for unit in units))}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def folder_of(path: Path, buffered: bool) -> dict[str, Any]:
    """Settings that keep activations in a file, or do not."""
    return {"buffered": buffered, "folder": path}
