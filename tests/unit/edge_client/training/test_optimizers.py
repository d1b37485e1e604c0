"""The optimizers against torch's own."""

from __future__ import annotations

import pytest
import torch

from edge_client.training import optimizers


def _trajectories(ours: optimizers.Optimizer, theirs: torch.optim.Optimizer, mine: torch.Tensor) -> None:
    """Feed both the same 20 gradients and compare after each step, bit for bit."""
    generator = torch.Generator().manual_seed(7)
    (reference,) = theirs.param_groups[0]["params"]
    for _ in range(20):
        grad = torch.randn(mine.shape, generator=generator)
        reference.grad = grad.clone()
        theirs.step()
        ours.step("w", mine, grad, 0.05)
        torch.testing.assert_close(mine, reference.detach(), rtol=0, atol=0)


def _pair() -> tuple[torch.Tensor, torch.nn.Parameter]:
    start = torch.randn(33, 5, generator=torch.Generator().manual_seed(3))
    return start.clone(), torch.nn.Parameter(start.clone())


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_sgd_is_torch_sgd_bit_for_bit(momentum: float, decay: float) -> None:
    """`torch.optim.SGD` is the independent implementation."""
    mine, reference = _pair()
    theirs = torch.optim.SGD([reference], lr=0.05, momentum=momentum, weight_decay=decay, foreach=False)
    _trajectories(optimizers.Sgd(momentum=momentum, weight_decay=decay), theirs, mine)


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adam_is_torch_adam_bit_for_bit(decay: float) -> None:
    """`torch.optim.Adam` is the independent implementation."""
    mine, reference = _pair()
    theirs = torch.optim.Adam([reference], lr=0.05, weight_decay=decay, foreach=False)
    _trajectories(optimizers.Adam(weight_decay=decay), theirs, mine)


def test_momentum_by_hand() -> None:
    """w=1, lr=.1, momentum=.5, g=1 twice: v=1, w=.9; v=1.5, w=.75."""
    sgd = optimizers.Sgd(momentum=0.5)
    w = torch.tensor([1.0])
    sgd.step("w", w, torch.tensor([1.0]), 0.1)
    sgd.step("w", w, torch.tensor([1.0]), 0.1)
    assert w.item() == pytest.approx(0.75)


def test_state_is_per_parameter_and_the_gradient_stays_untouched() -> None:
    """A second name starts with its own velocity, and a step does not write into the caller's gradient."""
    sgd = optimizers.Sgd(momentum=0.5, weight_decay=0.1)
    grad = torch.tensor([1.0])
    for name in ("a", "b", "a"):
        sgd.step(name, torch.tensor([1.0]), grad, 0.1)
    assert grad.item() == 1.0
    assert sgd.state["a"]["velocity"].item() == pytest.approx(1.65)  # 0.5 * 1.1 + 1.1
    assert sgd.state["b"]["velocity"].item() == pytest.approx(1.1)


def test_an_unknown_optimizer_is_refused() -> None:
    """The message lists the known ones."""
    with pytest.raises(ValueError, match="sgd, adam"):
        optimizers.make("lion", momentum=0, weight_decay=0)
