"""Modes of all modules while a phase trains: which parameters get gradients, which BatchNorms move, what comes back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from edge_client.models.contract import Model
from edge_client.training.contract import Phase, named_parameters
from edge_client.training.inputs import frozen_units

__all__ = ["set_for_phase"]


@contextmanager
def set_for_phase(model: Model, modules: Mapping[str, nn.Module], phase: Phase) -> Iterator[dict[str, nn.Parameter]]:
    """The phase's parameters, with the modes of all modules set for it and restored after it."""
    if phase.batchnorm not in ("train", "eval", "restore"):
        raise ValueError(f"phase {phase.name!r}: expected batchnorm of train, eval, restore, got {phase.batchnorm!r}")
    parameters = named_parameters(model, modules)
    unknown = phase.trainable - parameters.keys()
    if unknown:
        raise ValueError(f"phase {phase.name!r} trains {sorted(unknown)[0]!r}, which the model does not have")
    required = {name: param.requires_grad for name, param in parameters.items()}
    saved = [(buffer, buffer.clone()) for buffer in _restored(model, modules, phase)]
    _set_modes(model, modules, phase)
    for name, param in parameters.items():
        param.requires_grad_(name in phase.trainable)
    try:
        yield {name: param for name, param in parameters.items() if name in phase.trainable}
    finally:
        for name, param in parameters.items():
            param.requires_grad_(required[name])
            param.grad = None
        for buffer, before in saved:
            buffer.copy_(before)


def _set_modes(model: Model, modules: Mapping[str, nn.Module], phase: Phase) -> None:
    """Training mode, but for frozen units: their BatchNorms have running statistics that must not move."""
    for module in (model, *modules.values()):
        module.train()
        for part in module.modules() if phase.batchnorm == "eval" else ():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()
    for whole in (model, *(modules[key] for key in phase.beside)):
        if isinstance(whole, Model):
            for unit in frozen_units(model, phase):
                whole.unit(unit).eval()


def _restored(model: Model, modules: Mapping[str, nn.Module], phase: Phase) -> list[Tensor]:
    named = dict(model.named_buffers())
    for key, module in modules.items():
        named |= dict(module.named_buffers(prefix=key))
    return [buffer for name, buffer in named.items() if phase.batchnorm == "restore" or name in phase.restored]
