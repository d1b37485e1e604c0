"""Training in fp16: no gradient vanishes, and a step with an infinite one is left out."""

from __future__ import annotations

import torch

from edge_client.training.loss_scale import LossScale


def test_a_power_of_two_is_taken_back_without_a_trace() -> None:
    """Bits of float32 are the same after x 65536 / 65536."""
    scale, gradient = LossScale(), torch.randn(100, generator=torch.Generator().manual_seed(1))
    scaled = gradient * scale.factor
    assert scale.take_back([scaled])
    assert torch.equal(scaled, gradient)


def test_a_step_that_overflowed_is_left_out_and_the_factor_halved() -> None:
    """One infinite value in one of two gradients is enough; the factor does not fall below one."""
    scale = LossScale()
    assert not scale.take_back([torch.ones(3), torch.tensor([1.0, float("inf")])])
    assert scale.factor == 2.0**15
    for _ in range(20):
        scale.take_back([torch.tensor([float("nan")])])
    assert scale.factor == 1.0


def test_the_factor_doubles_after_2000_good_steps() -> None:
    """And counts from zero again after an overflow."""
    scale = LossScale()
    for _ in range(1999):
        assert scale.take_back([torch.ones(1)])
    assert scale.factor == 2.0**16
    scale.take_back([torch.ones(1)])
    assert scale.factor == 2.0**17


def test_a_gradient_that_fp16_would_lose_survives() -> None:
    """1e-9 is below the smallest number of fp16 (6e-8); times 65536 it is not."""
    small = torch.tensor([1e-9])
    assert small.half().float().item() == 0
    scale = LossScale()
    gradient = (small * scale.factor).half().float()
    assert scale.take_back([gradient])
    assert abs(gradient.item() - 1e-9) < 1e-11
