"""Runs large layers a few output channels at a time and adds their gradients in place, to save memory.

A convolution's library copies its weights into another layout at every call, and autograd makes a gradient before it
adds it to the one that is there: twice the largest weights, on top of all gradients. In pieces both are as small as a
piece. Outputs and gradients are those of the whole layer, except for rounding.
Does not cover: convolutions in groups or in one dimension, autocast, weights with hooks; they run as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from edge_client.device.accelerator import of

__all__ = ["InPieces"]

_PIECE_BYTES = 2**21  # of weights
_LANES = 16  # channels that kernels work on at once; a piece has a multiple


class InPieces(TorchFunctionMode):
    """A context: layers called inside run in pieces, and are back-propagated in pieces, inside or later."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace convolutions and linear layers; all other functions run as they are."""
        kwargs = kwargs or {}
        if func is functional.conv2d and not kwargs and _is_simple(args[0], *args[3:]) and _is_large(args[1]):
            return _Convolution.apply(*args[:3], args[3:6])  # type: ignore[no-untyped-call]
        if func is functional.linear and not kwargs and args[0].ndim > 1 and _is_large(args[1]):
            return _Linear.apply(*args, *[None] * (3 - len(args)))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def _is_large(weight: Tensor) -> bool:
    """Large enough to be worth it, and a plain leaf: no hook sees its gradient, no other type computes it."""
    plain = weight.is_leaf and not weight._backward_hooks and weight.nbytes > _PIECE_BYTES
    return plain and not of(weight.device).autocasts()


def _is_simple(x: Tensor, stride: Any = None, padding: Any = None, dilation: Any = None, groups: int = 0) -> bool:
    """A batch of images, as a module calls it."""
    return x.ndim == 4 and groups == 1 and all(isinstance(pair, tuple) for pair in (stride, padding, dilation))


def _pieces(weight: Tensor) -> Iterator[slice]:
    """Output channels in pieces of equal size, because kernels are made for each size."""
    rows = len(weight)
    while weight[:rows].nbytes > _PIECE_BYTES and rows % (2 * _LANES) == 0:
        rows //= 2
    return (slice(first, first + rows) for first in range(0, len(weight), rows))


def _gradient(weight: Tensor) -> Tensor:
    """The gradient to add to, made if there is none."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Sequence[Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.how = weight, how
        return torch.cat(
            [
                functional.conv2d(x, weight[rows], None if bias is None else bias[rows], *how)
                for rows in _pieces(weight)
            ],
            dim=1,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight, needed = ctx.weight, ctx.needs_input_grad
        input_grad: Tensor | None = None
        for rows in _pieces(weight):
            piece_grad, weight_grad, _ = torch.ops.aten.convolution_backward(
                grad[:, rows], x, weight[rows], None, *ctx.how, False, [0, 0], 1, [needed[0], needed[1], False]
            )
            if needed[0]:
                input_grad = piece_grad if input_grad is None else input_grad.add_(piece_grad)
            if needed[1]:
                _gradient(weight)[rows].add_(weight_grad)
        return input_grad, None, grad.sum((0, 2, 3)) if needed[2] else None, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return functional.linear(x, weight, bias).detach()  # no view: what follows may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (x,) = ctx.saved_tensors
        needed, flat = ctx.needs_input_grad, grad.flatten(0, -2)
        if needed[1]:
            _gradient(ctx.weight).addmm_(flat.T, x.flatten(0, -2))
        input_grad = grad @ ctx.weight if needed[0] else None
        return input_grad, None, flat.sum(0) if needed[2] else None
