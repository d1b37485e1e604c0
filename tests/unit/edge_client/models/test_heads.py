"""From the middle of a model to its classes: FeDepth's worked numbers, and every pair of shapes that may meet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edge_client.models import registry
from edge_client.models.contract import from_sequential
from edge_client.models.heads import auxiliary, fit


def test_an_activation_is_sub_sampled_and_padded_evenly() -> None:
    """FeDepth's example: [1, 2, 4, 4] of 0..31 into (4, 2, 2): every second row and column, zeros on both sides."""
    u = fit(torch.arange(32.0).reshape(1, 2, 4, 4), (4, 2, 2))
    assert u.flatten(2).tolist() == [[[0, 0, 0, 0], [0, 2, 8, 10], [16, 18, 24, 26], [0, 0, 0, 0]]]


def test_a_padded_channel_leaves_batchnorm_as_its_bias() -> None:
    """gamma 2, beta (.3, 0, 0, -.3): a channel of zeros has mean and variance 0, so ReLU(beta) is left: .3 and 0."""
    norm = nn.BatchNorm2d(4)
    nn.init.constant_(norm.weight, 2.0)
    norm.bias.data = torch.tensor([0.3, 0.0, 0.0, -0.3])
    out = norm(fit(torch.arange(32.0).reshape(1, 2, 4, 4), (4, 2, 2))).relu()
    torch.testing.assert_close(out[0, 0], torch.full((2, 2), 0.3))
    assert not out[0, 3].any()


def test_an_odd_gap_has_the_smaller_part_on_the_left() -> None:
    """2 channels into 5: one of zeros on the left, two on the right."""
    assert fit(torch.ones(1, 2, 1, 1), (5, 1, 1)).flatten().tolist() == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(("channels", "size", "stride", "zeros"), [(16, 32, 4, 24), (32, 16, 2, 16), (64, 8, 1, 0)])
def test_preresnets_stages_fit_its_head(channels: int, size: int, stride: int, zeros: int) -> None:
    """(16, 32, 32): stride 4 and 24 zeros on each side; (32, 16, 16): stride 2 and 16; the last as it is."""
    x = torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))
    u = fit(x, (64, 8, 8))
    assert tuple(u.shape) == (2, 64, 8, 8)
    assert torch.equal(u[:, zeros : 64 - zeros], x[:, :, ::stride, ::stride])
    assert not u[:, :zeros].any()
    assert not u[:, 64 - zeros :].any()


def test_sizes_that_are_no_multiples_are_pooled() -> None:
    """7x7 into 3x3: adaptive average pooling; the first bin is rows 0 to 2, columns 0 to 2 (floor 0, ceil 7/3)."""
    x = torch.randn(1, 1, 7, 7, generator=torch.Generator().manual_seed(1))
    u = fit(x, (1, 3, 3))
    torch.testing.assert_close(u[0, 0, 0, 0], x[0, 0, :3, :3].mean())
    torch.testing.assert_close(u[0, 0, 1, 2], x[0, 0, 2:5, 4:7].mean())


def test_vectors_are_padded_or_averaged() -> None:
    """(1, 2) into 5 is (0, 1, 2, 0, 0); (1, 2, 3, 4) into 2 is the mean of neighbours, (1.5, 3.5)."""
    assert fit(torch.tensor([[1.0, 2.0]]), (5,)).tolist() == [[0, 1, 2, 0, 0]]
    assert fit(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), (2,)).tolist() == [[1.5, 3.5]]


def test_channels_that_are_too_many_are_averaged_with_their_neighbours() -> None:
    """4 channels with the constant values 1, 2, 3, 4 into 2: 1.5 and 3.5 at every position."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 4, 1, 1).expand(1, 4, 2, 2)
    assert fit(x, (2, 2, 2)).flatten(2).tolist() == [[[1.5] * 4, [3.5] * 4]]


def test_a_map_in_front_of_a_vector_is_flattened() -> None:
    """(2, 2, 2) into 8 is itself; into 2 the mean of each channel; into 10 zeros around it."""
    x = torch.arange(8.0).reshape(1, 2, 2, 2)
    assert fit(x, (8,)).tolist() == [list(range(8))]
    assert fit(x, (2,)).tolist() == [[1.5, 5.5]]
    assert fit(x, (10,)).tolist() == [[0, *range(8), 0]]
    assert tuple(fit(x.flatten(1), (1, 4, 4)).shape) == (1, 1, 4, 4)


def test_tokens_fit_as_they_are_or_by_their_mean() -> None:
    """Equal shapes are the same tensor; 3 tokens of width 2 in front of a vector of 2: (0+2+4)/3 and (1+3+5)/3."""
    x = torch.arange(6.0).reshape(1, 3, 2)
    assert fit(x, (3, 2)) is x
    assert fit(x, (2,)).tolist() == [[2.0, 3.0]]


def test_auxiliary_heads_have_the_papers_size() -> None:
    """Ends B1, B2, B3 (16 channels), B4, B6 (32), 10 classes: 3 (160 + 10 + 32) + 2 (320 + 10 + 64) = 1,394 values."""
    model = registry.build("preresnet20", input_shape=(3, 32, 32), num_classes=10, options={})
    units = {unit.name: unit for unit in model.units}
    made = {end: auxiliary(model, units[f"block{end}"]) for end in (1, 2, 3, 4, 6)}
    assert sum(value.numel() for head in made.values() for value in head.state_dict().values()) == 1394


def test_an_auxiliary_head_is_norm_mean_and_linear_without_relu() -> None:
    """Against sums by hand: (x - mean) / sqrt(var + eps) of each channel over batch and positions, then the mean."""
    model = registry.build("preresnet20", input_shape=(3, 16, 16), num_classes=4, options={"width": 2})
    head = auxiliary(model, model.units[1])
    x = torch.randn(3, *model.units[1].out_shape, generator=torch.Generator().manual_seed(1))
    mean, variance = x.mean(dim=(0, 2, 3), keepdim=True), x.var(dim=(0, 2, 3), keepdim=True, unbiased=False)
    pooled = ((x - mean) / (variance + 1e-5).sqrt()).mean(dim=(2, 3))
    linear = head.get_submodule("linear")
    torch.testing.assert_close(head(x), pooled @ linear.weight.T + linear.bias)


@pytest.mark.parametrize("layers", [
    [nn.Linear(6, 4), nn.Linear(4, 8), nn.Linear(8, 3)],
    [nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 1), nn.Sequential(nn.Flatten(), nn.Linear(12, 3))],
    [nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 4, 1), nn.Sequential(nn.Flatten(), nn.Linear(4, 3))],
    [nn.Unflatten(1, (1, 1, 2, 1, 3)), nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(6, 3))],
    [nn.Unflatten(1, (3, 2)), nn.Identity(), nn.Sequential(nn.Flatten(), nn.Linear(6, 3))],
], ids=["vectors", "signals", "one pixel", "five axes", "what the head reads"])  # fmt: skip
def test_every_shape_has_an_auxiliary_head(layers: list[nn.Module]) -> None:
    """Also for one sample where there is one value per channel: no BatchNorm stands there."""
    model = from_sequential(nn.Sequential(*layers), input_shape=(6,))
    x = torch.randn(1, 6, generator=torch.Generator().manual_seed(1))
    logits = auxiliary(model, model.units[1])(model.forward_to(model.order[1], x))
    assert tuple(logits.shape) == (1, 3)
    assert logits.isfinite().all()


def test_a_transformers_blocks_get_a_head_like_its_own() -> None:
    """Class token, norm, linear: the same values as the model's head where the weights are the same."""
    options = {"patch": 4, "width": 8, "heads": 2, "depth": 2}
    model = registry.build("vit-t-16", input_shape=(1, 8, 8), num_classes=3, options=options)
    head = auxiliary(model, model.units[1])
    x = torch.randn(2, *model.units[-1].in_shape, generator=torch.Generator().manual_seed(1))
    assert torch.equal(head(x), model.forward_from("head", x))
    assert next(head.parameters()).data_ptr() != next(model.get_submodule("head").parameters()).data_ptr()
