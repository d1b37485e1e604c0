"""Loss functions, one value per sample; the loop takes the means."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["cross_entropy"]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[label]: [b, C], [b] -> [b]."""
    return functional.cross_entropy(logits, labels, reduction="none")
