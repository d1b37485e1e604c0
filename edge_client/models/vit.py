"""`vit-t-16`, `vit-s-8` ... `vit-s-12`: vision transformers (Dosovitskiy et al., 16x16 Words, ICLR 2021).

Also `har-transformer`, the same on windows of sensors, [channels, length]: 64 features, 4 heads, 3 blocks, a token per
8 values of time; 156,554 parameters for 9 channels of 128 values and 10 classes.

Patches of the image and a class token go through blocks of equal width; the head reads the class token. In `vit-t-16`
the number is the size of a patch (width 192, 3 heads, 12 blocks: 5,526,346 parameters), in `vit-s-8` to `vit-s-12` the
number of blocks (width 384, 6 heads: 14,571,658 to 21,669,514, 1,774,464 per block), as the papers write them; all for
3x224x224 and 10 classes. A network with fewer blocks owns the first blocks of a deeper one under the same names.
A slice of the width has all heads, each with a part of its features, as HeteroFL's transformer has. The blocks stand in
for convolutions as taps.

Does not cover: dropout, positions interpolated for other image sizes, weights trained elsewhere.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edge_client.models.axes import CHANNELS, WHOLE, Axis, inner_axes
from edge_client.models.contract import Staged
from edge_client.models.slicing import FULL, SliceSpec

__all__ = ["vit"]

_MLP_RATIO = 4
_EPSILON = 1e-6
_POSITION_BOUND = 0.02 * 3**0.5  # uniform with the customary deviation of 0.02


def vit(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    patch: int,
    width: int,
    heads: int,
    depth: int,
    spec: SliceSpec = FULL,
) -> Staged:
    """`depth` blocks of `heads` x `width // heads` features per token; one token per `patch` (x `patch`) values."""
    features, per_head = spec.channels(width), spec.channels(width // heads)
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=_Stem(input_shape, patch, features))
    names = [f"block{number}" for number in range(1, spec.blocks([depth], [0], exits=True)[0] + 1)]
    for name in names:
        units[name] = _Block(features, heads, per_head, spec.channels(_MLP_RATIO * width))
    units["head"] = nn.Sequential(
        OrderedDict(token=_ClassToken(), norm=_norm(features), linear=_linear(features, num_classes))
    )
    return Staged(
        units,
        stages=[0, *[1] * len(names), 2],
        taps={"features": "head.norm"} | {f"conv_{number}": name for number, name in enumerate(names, start=1)},
        axes=_axes(names, heads, per_head),
        anchors={f"{name}.norm2.weight": f"{name}.norm1.weight" for name in names},
    )


def _axes(blocks: list[str], heads: int, per_head: int) -> dict[str, tuple[Axis | None, ...]]:
    """Each head is sliced by itself: side by side lie those of queries, keys and values."""
    mixed, split = Axis((per_head,) * heads), Axis((per_head,) * heads * 3)
    axes = inner_axes(inputs="stem.patches", outputs="head.linear")
    axes |= {f"stem.{name}": (WHOLE, WHOLE, CHANNELS) for name in ("class_token", "positions")}
    for name in blocks:
        axes[f"{name}.attention.qkv.weight"] = (split, CHANNELS)
        axes[f"{name}.attention.qkv.bias"] = (split,)
        axes[f"{name}.attention.out.weight"] = (CHANNELS, mixed)
    return axes


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=_EPSILON)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    layer = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class _Stem(nn.Module):
    """[B, C, (H,) W] to [B, 1 + patches, width]: the class token, then the patches, each with its position."""

    def __init__(self, input_shape: tuple[int, ...], patch: int, width: int) -> None:
        super().__init__()
        channels, *sides = input_shape
        num_tokens = 1 + math.prod(side // patch for side in sides)
        convolution = nn.Conv2d if len(sides) == 2 else nn.Conv1d
        self.patches = convolution(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, num_tokens, width))
        nn.init.uniform_(self.positions, -_POSITION_BOUND, _POSITION_BOUND)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # [B, width, (h,) w] -> [B, h * w, width]
        return torch.cat((self.class_token.expand(x.shape[0], -1, -1), tokens), dim=1) + self.positions


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int, per_head: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = _norm(width)
        self.attention = _Attention(width, heads, per_head)
        self.norm2 = _norm(width)
        self.mlp = nn.Sequential(OrderedDict(up=_linear(width, hidden), gelu=nn.GELU(), down=_linear(hidden, width)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class _Attention(nn.Module):
    """Self-attention; torch's own kernel does not keep the [tokens, tokens] weights for backward."""

    def __init__(self, width: int, heads: int, per_head: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = _linear(width, 3 * heads * per_head)
        self.out = _linear(heads * per_head, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        split = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, tokens, features of a head]
        mixed = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return joined


class _ClassToken(nn.Module):
    """[B, tokens, width] to [B, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
