"""Units one after another against forward(): outputs in evaluation and training, every gradient, every buffer.

Covers: running a chain of units forward and backward, each by itself, and the comparison that decides whether found
units are used. All of it is exact: the same operations in the same order have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.models.found_units.calls import call_model, first, num_samples, tensors_of
from edge_client.models.found_units.running import PartRunner

__all__ = ["Chain", "buffers_of", "chain_gradients", "equal", "problem_of", "restore"]

_SEED = 0x0FED


@dataclass(slots=True)
class Chain:
    """A module's units, which end with these calls."""

    runner: PartRunner
    cuts: list[int] = field(default_factory=list)
    needs_input: bool = False
    running: int = 0  # the unit that was run last

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def unit(self, number: int, x: Any, carried: Tensor | None) -> Any:
        """The output of one unit."""
        self.running = number
        ends = [None, *self.cuts, None]
        start, stop = ends[number], ends[number + 1]
        return self.runner.run(start, stop, x, carried, needs_input=self.needs_input)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers."""
    return {name: item.detach().clone() for name, item in module.named_buffers()}


def restore(module: nn.Module, buffers: dict[str, Tensor]) -> None:
    """In place: a module's own load_state_dict may want more than tensors."""
    with torch.no_grad():
        for name, item in module.named_buffers():
            item.copy_(buffers[name])


def equal(one: Any, other: Any) -> bool:
    """Whether two outputs have the same tensors, bit for bit."""
    mine, others = tensors_of(one), tensors_of(other)
    if len(mine) != len(others) or not mine:
        return False
    return all(not a.is_meta and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, others, strict=True))


def problem_of(chain: Chain, sample: Any) -> str:
    """Why units one after another are not forward(); empty if they are, in all bits."""
    module, count = chain.runner.module, num_samples(sample)
    before = buffers_of(module)
    try:
        module.eval()
        with torch.no_grad():
            carried: Any = None
            for number in range(len(chain)):
                carried = chain.unit(number, first(sample, count), carried)
            if not equal(carried, call_model(module, first(sample, count))):
                return "unit by unit it puts out something else than forward()"
        module.train()
        torch.manual_seed(_SEED)
        out = call_model(module, first(sample, count))
        expected = _gradients(out, list(_trained(module).values()), None)
        buffers = buffers_of(module)
        restore(module, before)
        torch.manual_seed(_SEED)
        by_unit, last = chain_gradients(chain, sample)
        if not equal(last, out):
            return "in training, unit by unit it puts out something else than forward()"
        got = {name: gradient for unit in by_unit for name, gradient in unit.items()}
        wanted = {name: g for name, g in zip(_trained(module), expected, strict=True) if g is not None}
        if wanted.keys() != got.keys() or not all(torch.equal(wanted[name], got[name]) for name in wanted):
            return "unit by unit it has other gradients than forward()"
        if not all(torch.equal(buffers[name], item) for name, item in module.named_buffers()):
            return "unit by unit it leaves other buffers than forward()"
    finally:
        module.eval()
        restore(module, before)
    return ""


def chain_gradients(chain: Chain, sample: Any) -> tuple[list[dict[str, Tensor]], Any]:
    """Forward and backward, each unit by itself: its gradients by name, and the output of the last."""
    count = num_samples(sample)
    named = _trained(chain.runner.module)
    inputs: list[Any] = []
    outputs: list[Any] = []
    for number in range(len(chain)):
        inputs.append(outputs[-1].detach().requires_grad_() if outputs else None)
        outputs.append(chain.unit(number, first(sample, count), inputs[-1]))
    gradient: Tensor | None = None
    by_unit: list[dict[str, Tensor]] = []
    last = outputs[-1]
    for number in reversed(range(len(chain))):
        chain.running = number
        carried, out = inputs.pop(), outputs.pop()
        wanted = [*([] if carried is None else [carried]), *named.values()]
        each = _gradients(out, wanted, gradient)
        gradient = each.pop(0) if carried is not None else None
        by_unit.append({name: grad for name, grad in zip(named, each, strict=True) if grad is not None})
    return by_unit[::-1], last


def _trained(module: nn.Module) -> dict[str, Tensor]:
    return {name: param for name, param in module.named_parameters() if param.requires_grad}


def _gradients(out: Any, wanted: list[Tensor], gradient: Tensor | None) -> list[Tensor | None]:
    """Gradients for one of the output. As a sum of products: `grad_outputs` would load sympy (35 MB)."""
    floating = [item for item in tensors_of(out) if item.requires_grad]
    weights = [_ramp(item) for item in floating] if gradient is None else [gradient]
    total = sum((item * weight).sum() for item, weight in zip(floating, weights, strict=True))
    assert isinstance(total, Tensor)
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def _ramp(out: Tensor) -> Tensor:
    """A gradient that differs from number to number."""
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
