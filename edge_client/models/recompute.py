"""Activations that are made again in backward instead of being kept: less memory for the same result, bit for bit.

    units   a unit keeps its input only, and runs a second time in backward
    fused   BatchNorm, ReLU and convolutions in a row keep the BatchNorm's input only; no convolution runs twice

The second pass draws the same random numbers, finds modes and buffers as the first did, and leaves no trace: running
statistics move once. torch.utils.checkpoint would move them twice, and it loads a compiler (68 MB more in a worker).
Where no gradient is asked for, nothing is different.
Does not cover: what a unit remembers outside of its buffers, random numbers that are not torch's, second derivatives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from edge_client.device.accelerator import Accelerator, States, of
from edge_client.errors import InputError

__all__ = ["Begin", "Fusible", "run_unit"]

_KEEP_THEIR_INPUT = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)


class Fusible(nn.Module):
    """A part of a model in which a BatchNorm, a ReLU and convolutions follow each other."""

    fused: bool = False
    _like: Tensor | None = None  # during the second pass of this unit: a tensor like its output

    def norm_relu_conv(
        self, x: Tensor, norm: nn.BatchNorm2d, relu: nn.ReLU, *convs: nn.Conv2d, last: bool = False
    ) -> tuple[Tensor, ...]:
        """conv(relu(norm(x))) for each of `convs`, which have zeros around their image.

        `last`: the outputs are only added to others of their shape, which is the output of this module. A second pass
        can do without their values.
        """
        params = [norm.weight, norm.bias, *(param for conv in convs for param in (conv.weight, conv.bias))]
        if self.fused and _is_trained(x, params):
            like = self._like if last else None
            return _Fused.apply(norm, relu, convs, like, x, *params)  # type: ignore[no-any-return, no-untyped-call]
        if not torch.is_grad_enabled():
            active = _activated(norm, relu, x)
        elif relu._forward_hooks:
            active = relu(norm(x))
        else:
            active = _Relu.apply(norm(x))  # type: ignore[no-untyped-call]
        return tuple(conv(active) for conv in convs)


class _Relu(torch.autograd.Function):
    """A ReLU in front of convolutions: their gradient is nobody else's, so it is overwritten in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        active = torch.relu(x)
        ctx.save_for_backward(active)
        return active

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (active,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward.grad_input(grad, active, 0, grad_input=grad)  # type: ignore[no-any-return]


def _is_trained(x: Tensor, params: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *params))


def _activated(norm: nn.BatchNorm2d, relu: nn.ReLU, x: Tensor) -> Tensor:
    """relu(norm(x)) without gradient; in place, which spares new memory, unless a hook keeps what the norm put out."""
    normed: Tensor = norm(x)
    active: Tensor = relu(normed) if norm._forward_hooks or relu._forward_hooks else normed.relu_()
    return active


class _Fused(torch.autograd.Function):
    """Its parameters are inputs, so that autograd asks for their gradients as for those of any other function."""

    @staticmethod
    def forward(
        ctx: Any,
        norm: nn.BatchNorm2d,
        relu: nn.ReLU,
        convs: Sequence[nn.Conv2d],
        like: Tensor | None,
        x: Tensor,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """With `like` the outputs have its shape and no values: only their places in the graph count."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *params)
        ctx.convs, ctx.eps = convs, norm.eps
        batch_statistics = norm.training or norm.running_mean is None
        ctx.statistics = (None, None) if batch_statistics else (norm.running_mean, norm.running_var)
        if like is not None:
            return tuple(like.new_zeros(()).expand_as(like) for _ in convs)
        active = _activated(norm, relu, x)
        return tuple(conv(active) for conv in convs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, scale, shift, *params = ctx.saved_tensors
        _, _, _, _, *asked = ctx.needs_input_grad  # of x, scale and shift, then of each convolution's weight and bias
        mean, variance = ctx.statistics
        from_batch = mean is None
        active, *statistics = torch.native_batch_norm(
            x, scale, shift, running_mean=mean, running_var=variance, training=from_batch, momentum=0.0, eps=ctx.eps
        )
        active.relu_()
        inward, of_convs = _convolutions_backward(ctx.convs, grads, active, params[::2], asked)
        if inward is None:
            return *[None] * 7, *of_convs
        torch.ops.aten.threshold_backward.grad_input(inward, active, 0, grad_input=inward)
        del active
        of_norm = torch.ops.aten.native_batch_norm_backward(
            inward, x, scale, mean, variance, *statistics, from_batch, ctx.eps, asked[:3]
        )
        return *[None] * 4, *of_norm, *of_convs


def _convolutions_backward(
    convs: Sequence[nn.Conv2d],
    grads: Sequence[Tensor | None],
    x: Tensor,
    weights: Sequence[Tensor],
    asked: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Gradient of the common input `x`, and of each weight and bias, as far as they are asked for."""
    inward: Tensor | None = None
    of_params: list[Tensor | None] = []
    for number, (conv, grad, weight) in enumerate(zip(convs, grads, weights, strict=True)):
        mask = [any(asked[:3]), *asked[3 + 2 * number : 5 + 2 * number]]
        more, *of_conv = _convolution_backward(conv, grad, x, weight, mask)
        inward = more if inward is None else inward if more is None else inward.add_(more)
        of_params += of_conv
    return inward, of_params


def _convolution_backward(
    conv: nn.Conv2d, grad: Tensor | None, x: Tensor, weight: Tensor, mask: Sequence[bool]
) -> Sequence[Tensor | None]:
    """Gradients of input, weight and bias, where `mask` is true."""
    if grad is None:
        return None, None, None
    bias_shape = None if conv.bias is None else [conv.out_channels]
    rest = (bias_shape, conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups, mask)
    # under autocast the convolution took both in the type of its output
    inward, *of_params = torch.ops.aten.convolution_backward(grad, x.to(grad.dtype), weight.to(grad.dtype), *rest)
    return None if inward is None else inward.to(x.dtype), *of_params


def run_unit(name: str, unit: nn.Module, x: Tensor, *, overwrites: bool = False) -> Tensor:
    """Output of a unit that runs again in backward, unless it would keep hardly less for it.

    One that `overwrites` its input, or has parts that may, gets a copy: the second pass needs it as it was.
    """
    params = list(unit.parameters())
    if not params or _keeps_its_input_only(unit) or not _is_trained(x, params):
        plain: Tensor = unit(x)
        return plain
    overwrites = overwrites or any(getattr(part, "inplace", False) for part in unit.modules())
    output: Tensor = _Unit.apply(name, unit, overwrites, x, *params)  # type: ignore[no-untyped-call]
    return output


def _keeps_its_input_only(unit: nn.Module) -> bool:
    if isinstance(unit, nn.Sequential) and len(unit) == 1:
        return _keeps_its_input_only(unit[0])
    return type(unit) in _KEEP_THEIR_INPUT


class _Unit(torch.autograd.Function):
    """Its parameters are inputs, so that autograd asks for their gradients as for those of any other function."""

    @staticmethod
    def forward(ctx: Any, name: str, unit: nn.Module, overwrites: bool, x: Tensor, *params: Tensor) -> Tensor:
        ctx.unit, ctx.overwrites, ctx.before = unit, overwrites, _Before(unit, of(x.device))
        ctx.save_for_backward(x, *params)  # the parameters, so that a change of them in between is noticed
        version = x._version
        output: Tensor = unit(x.clone() if overwrites else x)
        if x._version != version:
            raise InputError(
                f"model: unit {name!r} changes its input in place in training only, and cannot run on it again in "
                "backward; use a function that makes a new tensor"
            )
        return output.detach()  # torch lets nobody change a view, or the input itself, that comes from a function

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *params = ctx.saved_tensors
        _, _, _, *asked = ctx.needs_input_grad
        x = x.detach().requires_grad_(asked[0])
        with torch.enable_grad():  # the output has no name here: it is freed as soon as its place in the graph is known
            unit_input = x.clone() if ctx.overwrites else x
            begin = Begin.apply(ctx.before.run_again(ctx.unit, unit_input, grad), grad)  # type: ignore[no-untyped-call]
            del unit_input
        if not begin.requires_grad:  # a unit that shuts gradients out by itself
            return None, None, None, *[None] * len(asked)
        sources = [tensor for tensor, needed in zip((x, *params), asked, strict=True) if needed]
        grads = iter(torch.autograd.grad(begin, sources, allow_unused=True))
        return None, None, None, *(next(grads) if needed else None for needed in asked)


class Begin(torch.autograd.Function):
    """A number whose gradient at `output` is `grad`: torch.autograd.grad with `grad_outputs` loads sympy (35 MB)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return grad.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor, None]:
        (grad,) = ctx.saved_tensors
        return grad, None


class _Before:
    """What a unit's output depends on beside input and parameters, as it is before the first pass."""

    def __init__(self, unit: nn.Module, device: Accelerator) -> None:
        self._device = device
        self._modes = _modes(unit)
        self._buffers = [(part, name, buffer.clone()) for part, name, buffer in _buffers(unit)]
        self._random = device.random_states()
        self._autocast = device.autocast_again()

    def run_again(self, unit: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
        """The unit's output with all of it as it was then; afterwards everything is as it is now.

        Only the graph of the output is right; its values may be missing.
        """
        modes, buffers, random = _modes(unit), list(_buffers(unit)), self._device.random_states()
        self._set(self._modes, [(part, name, buffer.clone()) for part, name, buffer in self._buffers], self._random)
        if isinstance(unit, Fusible):
            unit._like = grad
        try:
            with torch.enable_grad(), self._autocast:
                output: Tensor = unit(x)
        finally:
            self._set(modes, buffers, random)
            if isinstance(unit, Fusible):
                unit._like = None
        return output

    def _set(self, modes: _Modes, buffers: _Buffers, random: States) -> None:
        for part, mode in modes:
            part.training = mode
        for part, name, buffer in buffers:
            setattr(part, name, buffer)  # another tensor in its place: what was saved of the old one stays valid
        self._device.set_random_states(random)


_Modes = list[tuple[nn.Module, bool]]
_Buffers = list[tuple[nn.Module, str, Tensor]]


def _modes(unit: nn.Module) -> _Modes:
    return [(part, part.training) for part in unit.modules()]


def _buffers(unit: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for part in unit.modules():
        yield from ((part, name, buffer) for name, buffer in part.named_buffers(recurse=False))
