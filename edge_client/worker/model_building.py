"""The model in memory: built inside the budget, laid out as its rows were measured, warmed up.

Covers: building the received model's twin and other models of its kind, the generators that a user's code draws from.
Does not cover: its weights (`task.run_model`), when which limit holds (`loading`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from edge_client.config.quantities import format_bytes
from edge_client.device.accelerator import device_of
from edge_client.device.private_memory import process_memory
from edge_client.errors import NothingFitsError, is_out_of_memory
from edge_client.models.contract import Model
from edge_client.models.layout import to_channels_last
from edge_client.training.seeds import derive
from edge_client.worker.run_setup import RunSetup

__all__ = ["ModelBuilder", "build_model", "check_weights_fit", "must_fit", "seed_generators"]


@contextmanager
def must_fit(subject: str, budget_bytes: int) -> Iterator[None]:
    """Under the memory limit: an allocation that fails in the body becomes `NothingFitsError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        budget = format_bytes(budget_bytes)
        raise NothingFitsError(f"{subject} alone needs more than the budget of {budget}; see limits.memory") from error


def check_weights_fit(setup: RunSetup, budget_bytes: int) -> None:
    """Raise `NothingFitsError`, before the model is built, if its weights alone are too large."""
    needed = process_memory().private_bytes + 4 * sum(setup.tensor_sizes)
    if needed > budget_bytes:
        raise NothingFitsError(
            f"its parameters alone need {format_bytes(needed)} with the process, the budget is "
            f"{format_bytes(budget_bytes)}; set limits.memory to more, or take a smaller model"
        )


def build_model(setup: RunSetup, input_shape: tuple[int, ...], budget_bytes: int) -> Model:
    """The model with random weights. A built-in one's size was checked before, that of a task's shows only here."""
    with must_fit("making the model", budget_bytes) if setup.recipe.task is not None else nullcontext():
        return setup.recipe.build(input_shape, setup.spec)


def seed_generators(seed: int, *purpose: str) -> None:
    """Seed the global generators, from which a user's code may draw; our own are made where they are used."""
    torch.manual_seed(derive(seed, "torch", *purpose))
    random.seed(derive(seed, "random", *purpose))
    np.random.seed(derive(seed, "numpy", *purpose) % 2**32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBuilder:
    """Builds further models like `model` for the method, such as a peer that learns beside it."""

    model: Model
    setup: RunSetup
    channels_last: bool
    seed: int

    def build(self, purpose: str) -> Model:
        """A model with random weights that follow from `purpose`; it leaves the global generators seeded for them."""
        seed_generators(self.seed, "model", purpose)
        other = self.setup.recipe.build(self.model.input_shape, self.setup.spec)
        if self.channels_last:
            to_channels_last(other)
        other.recompute = self.model.recompute
        return device_of(self.model).move(other)
