"""`vit-t-16`, `vit-s-8` ... `vit-s-12`: vision transformers (Dosovitskiy et al., 16x16 Words, ICLR 2021).

Patches of the image and a class token go through blocks of equal width; the head reads the class token. In `vit-t-16`
the number is the size of a patch (width 192, 3 heads, 12 blocks: 5,526,346 parameters), in `vit-s-8` to `vit-s-12` the
number of blocks (width 384, 6 heads: 14,571,658 to 21,669,514, 1,774,464 per block), as the papers write them; all for
3x224x224 and 10 classes. A network with fewer blocks owns the first blocks of a deeper one under the same names.

Does not cover: dropout, positions interpolated for other image sizes, weights trained elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edge_client.models.contract import Staged

__all__ = ["vit"]

_MLP_RATIO = 4
_EPSILON = 1e-6
_POSITION_BOUND = 0.02 * 3**0.5  # uniform with the customary deviation of 0.02


def vit(
    input_shape: tuple[int, ...], num_classes: int, *, patch: int, width: int, heads: int, depth: int
) -> Staged:
    """`depth` blocks of `heads` x `width // heads` features per token; one token per `patch` x `patch` pixels."""
    units: OrderedDict[str, nn.Module] = OrderedDict(stem=_Stem(input_shape, patch, width))
    for number in range(1, depth + 1):
        units[f"block{number}"] = _Block(width, heads)
    units["head"] = nn.Sequential(
        OrderedDict(token=_ClassToken(), norm=_norm(width), linear=_linear(width, num_classes))
    )
    return Staged(units, stages=[0, *[1] * depth, 2], taps={"features": "head.norm"})


def _norm(width: int) -> nn.LayerNorm:
    return nn.LayerNorm(width, eps=_EPSILON)


def _linear(in_features: int, out_features: int) -> nn.Linear:
    made = nn.Linear(in_features, out_features)
    nn.init.xavier_uniform_(made.weight)
    nn.init.zeros_(made.bias)
    return made


class _Stem(nn.Module):
    """[B, C, H, W] to [B, 1 + number of patches, width]: the class token, then the patches, each with its position."""

    def __init__(self, input_shape: tuple[int, ...], patch: int, width: int) -> None:
        super().__init__()
        channels, height, breadth = input_shape
        num_tokens = 1 + (height // patch) * (breadth // patch)
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, num_tokens, width))
        nn.init.uniform_(self.positions, -_POSITION_BOUND, _POSITION_BOUND)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # [B, width, h, w] -> [B, h * w, width]
        return torch.cat((self.class_token.expand(len(x), -1, -1), tokens), dim=1) + self.positions


class _Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = _norm(width)
        self.attention = _Attention(width, heads)
        self.norm2 = _norm(width)
        self.mlp = nn.Sequential(
            OrderedDict(
                up=_linear(width, _MLP_RATIO * width), gelu=nn.GELU(), down=_linear(_MLP_RATIO * width, width)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        added: Tensor = x + self.mlp(self.norm2(x))
        return added


class _Attention(nn.Module):
    """Self-attention; torch's own kernel does not keep the [tokens, tokens] weights for backward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = _linear(width, 3 * width)
        self.out = _linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        split = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [B, heads, tokens, width / heads]
        mixed = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return joined


class _ClassToken(nn.Module):
    """[B, tokens, width] to [B, width]."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
