"""The factor on a loss whose gradients pass through fp16, where those below 6e-8 would vanish.

    65536 at first; halved after a step with a gradient that is not finite, which is left out; doubled after 2000 good

A power of two changes no bit of a float32 gradient. torch's `GradScaler` wants an optimizer of torch's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LossScale"]

_GOOD_STEPS = 2000
_LEAST, _MOST = 1.0, 2.0**24


@dataclass(slots=True)
class LossScale:
    """Of one training."""

    factor: float = 2.0**16
    _good_steps: int = 0

    @torch.no_grad()
    def take_back(self, gradients: Iterable[Tensor]) -> bool:
        """Divide the gradients of a step by the factor, in place; False if the step is to be left out."""
        finite = True
        for gradient in gradients:
            finite = bool(torch.isfinite(gradient.mul_(1 / self.factor)).all()) and finite
        if not finite:
            self.factor, self._good_steps = max(_LEAST, self.factor / 2), 0
            return False
        self._good_steps += 1
        if self._good_steps == _GOOD_STEPS:
            self.factor, self._good_steps = min(_MOST, self.factor * 2), 0
        return True
