"""The calls of submodules that one forward pass makes, in the order in which they begin.

    calls = record(module, sample)          runs forward() with 2 and with 3 samples
    fingerprint(calls)                      equal on two machines whose modules make the same calls

`forward` of each submodule is replaced on the instance for the length of a pass, and put back. Inputs and outputs are
tensors, or tuples, lists and dictionaries of them, with the batch first.
Does not cover: running a part of a pass (`running`), which calls are good ends of a unit (`search`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

__all__ = [
    "RECORDED",
    "Call",
    "Shape",
    "call_model",
    "calls_go_to",
    "fingerprint",
    "first",
    "num_samples",
    "record",
    "tensors_of",
]

RECORDED = (2, 3)  # samples of the two passes: what differs between them is the batch
_PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor that a call puts out, for any number of samples."""

    two: tuple[int, ...]  # of a batch of 2
    three: tuple[int, ...]
    dtype: torch.dtype

    def sizes(self, batch: int) -> list[int]:
        """For so many samples."""
        return [a if a == b else a * batch // RECORDED[0] for a, b in zip(self.two, self.three, strict=True)]

    @property
    def scales(self) -> bool:
        """Whether each size is the same for all batches, or grows with the number of samples."""
        pairs = zip(self.two, self.three, strict=True)
        return len(self.two) == len(self.three) and all(a == b or 3 * a == 2 * b for a, b in pairs)


@dataclass(eq=False, slots=True)
class Call:
    """One call of a submodule in one forward pass."""

    number: int
    path: str
    parents: tuple[int, ...]
    end: int = 0  # number of the first call after all calls inside of this one
    spec: TreeSpec | None = None  # how its outputs are packed
    leaves: list[Any] = field(default_factory=list)  # a `Shape`, a plain value, or `Ellipsis` for anything else
    cost: float = 0.0

    def __deepcopy__(self, memo: object) -> Call:
        """Itself: it does not change once it is recorded."""
        return self

    @property
    def has_inside(self) -> bool:
        """Whether it calls submodules itself."""
        return self.end > self.number + 1


def call_model(module: nn.Module, x: Any) -> Any:
    """forward() with one input, several in a tuple, or named ones in a dictionary."""
    with _usual_attention():
        if isinstance(x, dict):
            return module(**x)
        return module(*x) if isinstance(x, (tuple, list)) else module(x)


@contextmanager
def _usual_attention() -> Iterator[None]:
    """Without the fused path of torch's own transformer layers, which some evaluations take, with other bits."""
    switch: Any = getattr(torch.backends, "mha", None)
    if switch is None or not switch.get_fastpath_enabled():
        yield
        return
    switch.set_fastpath_enabled(False)
    try:
        yield
    finally:
        switch.set_fastpath_enabled(True)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of an input or output."""
    return [item for item in tree_flatten(tree)[0] if isinstance(item, Tensor)]


def num_samples(x: Any) -> int:
    """How many samples an input has."""
    return len(tensors_of(x)[0])


def first(x: Any, count: int) -> Any:
    """New memory with the first samples of an input."""
    return tree_map(lambda item: item[:count].clone() if isinstance(item, Tensor) else item, x)


@contextmanager
def calls_go_to(module: nn.Module, handler: Callable[..., Any]) -> Iterator[None]:
    """`handler(path, forward, args, kwargs)` in place of the forward of each submodule."""
    before = [(part, part.__dict__.get("forward")) for part in module.modules()]
    try:
        for path, part in module.named_modules():
            if path:
                part.__dict__["forward"] = partial(_forward, handler, path, part.forward)
        yield
    finally:
        for part, original in before:
            part.__dict__.pop("forward", None)
            if original is not None:
                part.__dict__["forward"] = original


def _forward(handler: Any, path: str, forward: Any, *args: Any, **kwargs: Any) -> Any:
    return handler(path, forward, args, kwargs)


def record(module: nn.Module, sample: Any) -> list[Call] | None:
    """The calls of a pass; None if they depend on how many samples there are. `sample` has three or more.

    The module is in the mode in which its owner put it; evaluation mode leaves no trace in its buffers.
    """
    two, three = (_pass(module, first(sample, count)) for count in RECORDED)
    if [call.path for call in two] != [call.path for call in three]:
        return None
    for call, other in zip(two, three, strict=True):
        if call.spec != other.spec:
            return None
        call.leaves = [_merged(*pair) for pair in zip(call.leaves, other.leaves, strict=True)]
    return two


def _merged(one: Any, other: Any) -> Any:
    if not isinstance(one, Shape) or not isinstance(other, Shape):
        return one if type(one) is type(other) and one == other else ...
    shape = Shape(one.two, other.two, one.dtype)
    return shape if shape.scales else ...


def _pass(module: nn.Module, x: Any) -> list[Call]:
    calls: list[Call] = []
    open_calls: list[int] = []
    count = num_samples(x)

    def note(path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        call = Call(len(calls), path, tuple(open_calls))
        calls.append(call)
        open_calls.append(call.number)
        out = forward(*args, **kwargs)
        open_calls.pop()
        call.end = len(calls)
        items, call.spec = tree_flatten(out)
        call.leaves = [_leaf(item) for item in items]
        if not call.has_inside:
            call.cost = sum(item.numel() for item in items if isinstance(item, Tensor)) / count
        return out

    with calls_go_to(module, note):
        call_model(module, x)
    return calls


def _leaf(item: Any) -> Any:
    if isinstance(item, Tensor):
        return Shape(tuple(item.shape), tuple(item.shape), item.dtype)
    return item if isinstance(item, _PLAIN) else ...


def fingerprint(calls: list[Call]) -> str:
    """A hash of the paths and shapes of all calls; empty if none could be recorded."""
    if not calls:
        return ""
    rows = [[call.path, call.end, [_text(leaf) for leaf in call.leaves]] for call in calls]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _text(leaf: Any) -> str:
    return f"{leaf.two} {leaf.three} {leaf.dtype}" if isinstance(leaf, Shape) else str(type(leaf))
