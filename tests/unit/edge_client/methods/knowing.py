"""Models, data and rounds for the tests of methods that exchange knowledge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.knowledge.kinds import ClassTable, Knowledge
from edge_client.methods.base import Batch, Client, Job, Outcome
from edge_client.models.contract import Model, from_sequential
from edge_client.training import optimizers
from edge_client.training.contract import Data
from edge_client.training.loop import Settings, generator, train


def table(label: str, rows: Sequence[Sequence[float] | None], count: int = 40) -> ClassTable:
    """One row per class; None: absent."""
    counts = torch.tensor([0 if row is None else count for row in rows])
    return ClassTable(label=label, counts=counts, values=torch.tensor([list(row) for row in rows if row is not None]))


def identity_model(width: int = 2, num_classes: int = 2) -> Model:
    """Features are the input, logits are zeros: what a term adds can be computed by hand."""
    body, head = nn.Linear(width, width, bias=False), nn.Linear(width, num_classes, bias=False)
    body.weight.data, head.weight.data = torch.eye(width), torch.zeros(num_classes, width)
    return from_sequential(nn.Sequential(body, head), input_shape=(width,))


def batch_of(x: Sequence[Sequence[float]], y: Sequence[int], *, last_epoch: bool = True) -> Batch:
    """A whole batch."""
    labels = torch.tensor(y)
    return Batch(
        x=torch.tensor(x),
        y=labels,
        num_whole=len(y),
        whole_y=labels,
        first=True,
        positions=torch.arange(len(y)),
        last_epoch=last_epoch,
    )


def job_for(model: Model, *, classes: int = 2, epochs: int = 1, **more: Any) -> Job:
    """An assignment."""
    job = {
        "model": model,
        "round": 2,
        "num_rounds": 4,
        "epochs": epochs,
        "learning_rate": 0.1,
        "class_counts": (40,) * classes,
        "rng": lambda purpose: generator(1, purpose),
        "optimizer": lambda: optimizers.make("sgd", momentum=0.0, weight_decay=0.0),
    }
    return Job(**(job | more))


def begun(client: Client, model: Model, **more: Any) -> Client:
    """The client, after `begin`."""
    client.begin(job_for(model, **more))
    return client


def loss_of(client: Client, batch: Batch) -> float:
    """The mean over the batch of all terms of the first phase."""
    phase = client.phases()[0]
    total = 0.0
    for term in client.terms(batch, phase):
        if term.once is not None:
            total += term.weight * term.once.item()
            continue
        assert term.each is not None
        mask = term.mask if term.mask is not None else torch.ones_like(term.each)
        denominator = term.denominator if term.denominator is not None else batch.num_whole
        total += term.weight * (term.each * mask).sum().item() / denominator
    return total


def run(
    client: Client, model: Model, data: Data, *, knowledge: Iterable[Knowledge] = (), state: Any = None, **more: Any
) -> Outcome:
    """One assignment: begin, train, end."""
    keys = {key: more.pop(key) for key in ("batch", "microbatch", "learning_rate", "seed", "optimizer") if key in more}
    settings = {"batch": 8, "microbatch": 8, "learning_rate": 0.1, "seed": 5} | keys
    client.begin(job_for(model, knowledge=knowledge, state=state or {}, data=data, **more))
    train(model, client, data, Settings(**settings))
    return client.end()


def weights(model: Model) -> dict[str, Tensor]:
    """A copy."""
    return {name: value.clone() for name, value in model.state_dict().items()}
