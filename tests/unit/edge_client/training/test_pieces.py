"""Layers in pieces: the same outputs and gradients, added to what is there. That they are pieces: `test_fedin`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client.training.pieces import InPieces


def _gradients(layer: nn.Module, x: Tensor, *, in_pieces: bool) -> tuple[Tensor, list[Tensor | None]]:
    """Output, and the gradients of the input and of each parameter, which had ones before."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    for param in layer.parameters():
        param.grad = torch.ones_like(param)
    if in_pieces:
        with InPieces():
            out = layer(x)
    else:
        out = layer(x)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()  # not in the context
    return out, [x.grad, *(param.grad for param in layer.parameters())]


def _is_in_pieces(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ in ("_ConvolutionBackward", "_LinearBackward")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(256, 512, 3, padding=1, bias=False), (2, 256, 4, 4)),
        (lambda: nn.Conv2d(256, 272, 3, stride=2, padding=1), (3, 256, 5, 5)),  # 272 = 16 x 17: not in halves
        (lambda: nn.Conv2d(1024, 1024, 1, stride=2), (2, 1024, 4, 4)),
        (lambda: nn.Conv2d(256, 512, 3, dilation=2, padding=2), (2, 256, 4, 4)),
        (lambda: nn.Linear(1024, 1024), (2, 3, 1024)),
        (lambda: nn.Linear(2048, 512, bias=False), (4, 2048)),
        (lambda: nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(inplace=True)), (2, 3, 1024)),
    ],
)
def test_as_the_whole_layer(layer: Any, shape: tuple[int, ...], channels_last: bool) -> None:
    """By torch's own layers."""
    torch.manual_seed(1)
    made, x = layer(), torch.randn(shape)
    if channels_last and len(shape) == 4:
        made, x = made.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    whole, whole_grads = _gradients(made, x, in_pieces=False)
    assert not _is_in_pieces(whole)
    pieces, grads = _gradients(made, x, in_pieces=True)
    assert _is_in_pieces(pieces) or isinstance(made, nn.Sequential)
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5)
    for mine, other in zip(grads, whole_grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_a_gradient_that_is_not_there_is_made() -> None:
    """And what asks for none gets none."""
    layer = nn.Linear(1024, 1024)
    layer.bias.requires_grad_(False)
    with InPieces():
        layer(torch.ones(2, 1024)).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.full((1024, 1024), 2.0))
    assert layer.bias.grad is None
    frozen = nn.Conv2d(512, 512, 3).requires_grad_(False)
    x = torch.ones(1, 512, 3, 3, requires_grad=True)
    with InPieces():
        frozen(x).sum().backward()
    assert frozen.weight.grad is None
    torch.testing.assert_close(x.grad, frozen.weight.sum(0, keepdim=True), rtol=1e-4, atol=1e-4)


class _Ints(nn.Conv2d):
    """Calls the function with numbers in place of pairs."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, None, 1, 0, 1, 1)


def _hooked() -> nn.Module:
    layer = nn.Linear(1024, 1024)
    layer.weight.register_hook(lambda grad: 2 * grad)
    return layer


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(512, 512, 3, padding="same"), (1, 512, 2, 2)),
        (lambda: nn.Conv2d(1024, 1024, 3, groups=2), (1, 1024, 3, 3)),
        (lambda: nn.Conv2d(512, 512, 3), (512, 3, 3)),
        (lambda: _Ints(512, 512, 3, bias=False), (1, 512, 3, 3)),
        (lambda: nn.Conv2d(16, 16, 3), (1, 16, 3, 3)),
        (lambda: nn.Linear(1024, 1024), (1024,)),
        (_hooked, (2, 1024)),
        (lambda: nn.Linear(8, 8), (2, 8)),
    ],
)
def test_what_is_small_or_special_runs_as_it_is(layer: Any, shape: tuple[int, ...]) -> None:
    """Bit for bit."""
    made, x = layer(), torch.randn(shape)
    whole, whole_grads = _gradients(made, x, in_pieces=False)
    pieces, grads = _gradients(made, x, in_pieces=True)
    assert not _is_in_pieces(pieces)
    assert torch.equal(whole, pieces)
    for mine, other in zip(grads, whole_grads, strict=True):
        assert mine is not None
        assert other is not None
        assert torch.equal(mine, other)


@pytest.mark.parametrize("layer", [nn.Linear(1024, 1024), nn.Conv2d(1024, 1024, 1)])
def test_autocast_runs_as_it_is(layer: nn.Module) -> None:
    """In bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16), InPieces():
        out = layer(torch.randn(2, 1024) if isinstance(layer, nn.Linear) else torch.randn(2, 1024, 1, 1))
    assert out.dtype == torch.bfloat16
    assert not _is_in_pieces(out)
