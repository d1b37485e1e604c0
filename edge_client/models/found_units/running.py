"""Runs a part of a module's forward(): from the end of one submodule's call to the end of another.

Calls that lie before the part are skipped: each answers with an empty tensor on `meta`, of the size that it would have.
The call that ends the part before answers with what was carried; the call that ends this part ends the pass by an
exception. Operations between submodules see meta tensors until the part begins, and cost nothing. A second tensor that
crosses into the part is a meta tensor there, and torch refuses to mix it with real ones: that cut is no cut. It is the
module's own code that runs, so bits, buffers and names are those of its owner.
Does not cover: where a module can be cut (`search`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from edge_client.models.found_units.calls import Call, Shape, call_model, calls_go_to, num_samples, tensors_of

__all__ = ["CallsDiffer", "PartRunner"]


class CallsDiffer(RuntimeError):
    """forward() made other calls than when it was recorded."""


class _Ended(BaseException):
    """The part has ended; no `except Exception` of a module's code may catch it."""

    def __init__(self, output: Any) -> None:
        self.output = output


class _Tainting(TorchFunctionMode):
    """While `on`, an operation with any meta tensor happens on meta alone; meta tensors say that they are on `device`.

    So a position table can be added to a skipped activation, and a mask made with `device=x.device` is real.
    """

    def __init__(self, device: torch.device, *, on: bool) -> None:
        super().__init__()
        self.on = on
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one function of torch."""
        kwargs = kwargs or {}
        if not self.on:
            return func(*args, **kwargs)
        if func is torch.Tensor.device.__get__:
            return self._device
        if any(isinstance(item, Tensor) and item.is_meta for item in tree_flatten((args, kwargs))[0]):
            args, kwargs = tree_map(_as_meta, (args, kwargs))
        return func(*args, **kwargs)


def _as_meta(item: Any) -> Any:
    if isinstance(item, torch.device):
        return torch.device("meta")
    return item.to("meta") if isinstance(item, Tensor) and not item.is_meta else item


@dataclass(frozen=True, slots=True)
class PartRunner:
    """A module and the calls of its forward pass."""

    module: nn.Module
    calls: list[Call]

    def run(self, start: int | None, stop: int | None, x: Any, carried: Tensor | None, *, needs_input: bool) -> Any:
        """From the end of call `start` to the end of call `stop`; None: from the input, to the output.

        `x` is the module's input; behind a `start` only its shapes count, unless the module `needs_input` there.
        """
        if start is None and stop is None:
            return call_model(self.module, x)
        device = carried.device if carried is not None else tensors_of(x)[0].device
        tainting = _Tainting(device, on=start is not None)
        given = x if start is None or needs_input else tree_map(_empty_like, x)
        state = _Pass(self.calls, start, stop, carried, num_samples(x), tainting)
        with tainting, calls_go_to(self.module, state.handle):
            try:
                return call_model(self.module, given)
            except _Ended as ended:
                return ended.output


def _empty_like(item: Any) -> Any:
    return torch.empty(item.shape, dtype=item.dtype, device="meta") if isinstance(item, Tensor) else item


@dataclass(slots=True)
class _Pass:
    """One run of a part."""

    calls: list[Call]
    start: int | None
    stop: int | None
    carried: Any
    batch: int
    tainting: _Tainting
    next: int = 0

    def handle(self, path: str, forward: Any, args: Any, kwargs: Any) -> Any:
        number, self.next = self.next, self.next + 1
        if number >= len(self.calls) or self.calls[number].path != path:
            raise CallsDiffer(f"forward() took another way than when it was recorded: {path}")
        call = self.calls[number]
        if self.tainting.on and number == self.start:
            self.next, self.tainting.on, out = call.end, False, self.carried
        elif self.tainting.on and not number < (self.start or 0) < call.end:  # all of it lies before the part
            self.next, out = call.end, self._placeholder(call)
        else:
            out = forward(*args, **kwargs)
        if number == self.stop:
            raise _Ended(out)
        return out

    def _placeholder(self, call: Call) -> Any:
        assert call.spec is not None
        return tree_unflatten([self._skipped(call, leaf) for leaf in call.leaves], call.spec)

    def _skipped(self, call: Call, leaf: Any) -> Any:
        if leaf is ...:
            raise CallsDiffer(f"{call.path} puts out something else than tensors and numbers")
        return torch.empty(leaf.sizes(self.batch), dtype=leaf.dtype, device="meta") if isinstance(leaf, Shape) else leaf
