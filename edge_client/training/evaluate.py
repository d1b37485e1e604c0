"""A model's result on test samples, in numbers that add up over devices: sums and counts, no means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_client.training.loop import Data, Progress, pieces_of
from edge_client.training.objectives import cross_entropy

__all__ = ["Result", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Exact counts, and the loss summed in float64."""

    num_samples: int
    num_correct: int
    loss_sum: float
    confusion: Tensor  # [C, C] int64; row: the truth, column: the answer


@torch.no_grad()
def evaluate(
    model: nn.Module,
    predict: Callable[[Tensor], Tensor],
    data: Data,
    *,
    num_classes: int,
    microbatch: int,
    progress: Progress | None = None,
) -> Result:
    """Judge `predict`, which uses `model`, in evaluation mode."""
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    loss_sum = 0.0
    pieces = pieces_of(torch.arange(len(data)), microbatch)
    was_training = model.training
    model.eval()
    for number, piece in enumerate(pieces, start=1):
        x, y = data.batch(piece)
        logits = predict(x)
        loss_sum += float(cross_entropy(logits, y).sum(dtype=torch.float64))
        cells = y * num_classes + logits.argmax(dim=1)
        confusion += torch.bincount(cells, minlength=num_classes**2).reshape(num_classes, num_classes)
        if progress is not None:
            progress(number, len(pieces), loss_sum / int(confusion.sum()))
    model.train(was_training)
    return Result(num_samples=len(data), num_correct=int(confusion.trace()), loss_sum=loss_sum, confusion=confusion)
