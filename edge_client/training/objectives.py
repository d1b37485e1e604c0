"""Loss functions, one value per sample; the loop takes the means."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["cross_entropy", "divergence"]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(logits)[label]: [b, C], [b] -> [b]."""
    return functional.cross_entropy(logits, labels, reduction="none")


def divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax(target) || softmax(logits)): [b, C], [b, C] -> [b]; in float32 at least, as cross entropy is."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = (functional.log_softmax(scores, dim=1, dtype=dtype) for scores in (target, logits))
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)
