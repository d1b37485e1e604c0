"""A model's result on test samples, in numbers that add up over devices: sums and counts, no means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_client.device.accelerator import device_of
from edge_client.records import MATRIX_CLASSES
from edge_client.training.inputs import brought
from edge_client.training.loop import Data, Progress, pieces_of
from edge_client.training.objectives import cross_entropy

__all__ = ["Result", "evaluate"]

_HUGE_LOSS = 3.4e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Exact counts, and the loss summed in float64."""

    num_samples: int
    num_correct: int
    loss_sum: float
    confusion: Tensor  # int64, as `records.Evaluation` describes it: [C, C], or [3, C] where there are many classes

    @property
    def finite_loss_sum(self) -> float:
        """The loss as it travels: that of a model that has diverged has no value, and JSON and msgpack need one."""
        return self.loss_sum if math.isfinite(self.loss_sum) else _HUGE_LOSS


@torch.no_grad()
def evaluate(
    model: nn.Module,
    predict: Callable[[Tensor], Tensor],
    data: Data,
    *,
    num_classes: int,
    microbatch: int,
    channels_last: bool = False,
    dtype: str = "fp32",
    progress: Progress | None = None,
) -> Result:
    """Evaluate `predict`, which uses `model`, with the model in evaluation mode."""
    counts, device = _Counts(num_classes), device_of(model)
    data = brought(data, device, channels_last=channels_last)
    loss_sum = 0.0
    pieces = pieces_of(torch.arange(len(data)), microbatch)
    was_training = model.training
    model.eval()
    for number, piece in enumerate(pieces, start=1):
        x, y = data.batch(piece)
        with device.autocast(dtype):
            logits = predict(x).float()
        loss_sum += float(cross_entropy(logits, y).sum(dtype=torch.float64))
        counts.add(y.cpu(), logits.argmax(dim=1).cpu())
        if progress is not None:
            progress(number, len(pieces), loss_sum / counts.num_samples)
    model.train(was_training)
    return Result(
        num_samples=counts.num_samples, num_correct=counts.num_correct, loss_sum=loss_sum, confusion=counts.table
    )


class _Counts:
    """The matrix; above `MATRIX_CLASSES` classes only true positives, false positives and false negatives."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._has_matrix = num_classes <= MATRIX_CLASSES
        self.table = torch.zeros(num_classes if self._has_matrix else 3, num_classes, dtype=torch.int64)
        self.num_samples = 0
        self.num_correct = 0

    def add(self, truth: Tensor, prediction: Tensor) -> None:
        n, right = self._num_classes, truth == prediction
        self.num_samples += len(truth)
        self.num_correct += int(right.sum())
        if self._has_matrix:
            self.table += torch.bincount(truth * n + prediction, minlength=n * n).reshape(n, n)
        else:
            rows = (truth[right], prediction[~right], truth[~right])
            self.table += torch.stack([torch.bincount(row, minlength=n) for row in rows])
