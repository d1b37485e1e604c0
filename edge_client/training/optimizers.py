"""SGD and Adam with torch's own arithmetic, one parameter at a time.

`torch.optim` computes the same, but its constructors import a compiler that adds 68 MB to a worker. Weight decay is an
L2 penalty (added to the gradient), not AdamW's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Adam", "Optimizer", "Sgd", "make"]


class Optimizer(Protocol):
    """Changes a parameter in place, given its gradient; keeps state per parameter name."""

    state: dict[str, dict[str, Tensor]]

    def step(self, name: str, param: Tensor, grad: Tensor, learning_rate: float) -> None:
        """One step of one parameter."""


@dataclass(slots=True, kw_only=True)
class Sgd:
    """w <- w - lr v, v <- momentum v + g (v = g at the first step), g += weight_decay w."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, name: str, param: Tensor, grad: Tensor, learning_rate: float) -> None:
        """One step of one parameter."""
        if self.weight_decay:
            grad = grad.add(param, alpha=self.weight_decay)
        if self.momentum:
            state = self.state.get(name)
            if state is None:
                velocity = grad.clone()
                self.state[name] = {"velocity": velocity}
            else:
                velocity = state["velocity"].mul_(self.momentum).add_(grad)
            grad = velocity
        param.add_(grad, alpha=-learning_rate)


@dataclass(slots=True, kw_only=True)
class Adam:
    """Kingma and Ba, ICLR 2015, Algorithm 1: m and v with bias correction."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    state: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @torch.no_grad()
    def step(self, name: str, param: Tensor, grad: Tensor, learning_rate: float) -> None:
        """One step of one parameter."""
        if self.weight_decay:
            grad = grad.add(param, alpha=self.weight_decay)
        state = self.state.get(name)
        if state is None:
            state = {
                "m": torch.zeros_like(param),
                "v": torch.zeros_like(param),
                "steps": torch.zeros((), dtype=torch.int64),
            }
            self.state[name] = state
        state["steps"] += 1
        steps = int(state["steps"])
        state["m"].lerp_(grad, 1 - self.beta1)
        state["v"].mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        correction = math.sqrt(1 - self.beta2**steps)
        denominator = state["v"].sqrt().div_(correction).add_(self.epsilon)
        param.addcdiv_(state["m"], denominator, value=-learning_rate / (1 - self.beta1**steps))


def make(name: str, *, momentum: float, weight_decay: float) -> Optimizer:
    """A new optimizer, `sgd` or `adam`."""
    if name == "sgd":
        return Sgd(momentum=momentum, weight_decay=weight_decay)
    if name == "adam":
        return Adam(weight_decay=weight_decay)
    raise ValueError(f"expected an optimizer of sgd, adam, got {name!r}")
