"""ScaleFL. Ilhan, Su and Liu, "ScaleFL: Resource-Adaptive Federated Learning with Heterogeneous Clients", CVPR 2023.

A small device trains a network that is narrower and ends earlier: the first channels of every layer, up to an early
exit with a classifier of its own. A device trains all exits that it has, the later ones with more weight, and its last
exit teaches those before it. Down and up: a slice of the model with its exits.

    loss = sum of j L_j / (1 + ... + E)        over the exits j = 1 ... E of a device, in order
    L_E  = CE(z_E, y)
    L_j  = CE(z_j, y) + gamma tau^2 KL(softmax(z_E / tau) || softmax(z_j / tau))     after the first rounds of a run

The slices of a run say where exits are: `["full", "exit:6-width:3/4", "exit:3-width:1/2"]` has exits behind blocks 3
and 6, and the model's own classifier.

Deviations: an exit's classifier has the layers of the model's own, as a network has that ends there, where the paper's
has three convolutions before them. Blocks count over all stages. The last exit is detached where it teaches. The mean
is over those that have an element, and a device has only what it trains.

Legend: E = exits of a device, z_j = logits of exit j, tau = temperature.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from edge_client.device.accelerator import device_of
from edge_client.errors import InputError, PayloadError
from edge_client.methods.base import (
    Batch,
    Job,
    Method,
    Outcome,
    Phase,
    Place,
    PlainClient,
    SliceRules,
    Term,
    Travel,
)
from edge_client.methods.cards.scalefl import ScaleFLParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.slices import slice_places
from edge_client.models import heads
from edge_client.models.axes import CHANNELS
from edge_client.models.contract import Model
from edge_client.models.slicing import parse, place_of, units_of_slice
from edge_client.training.objectives import cross_entropy, divergence
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX

__all__ = ["ScaleFLClient", "exit_losses", "method"]


class ScaleFLClient(PlainClient):
    """The losses of all exits of a device's slice."""

    def __init__(self, parameters: ScaleFLParameters, rungs: Sequence[str]) -> None:
        self._parameters = parameters
        self._rungs = rungs
        self._exits: dict[int, nn.Module] = {}  # behind so many blocks; the last one is the model's own head

    def begin(self, job: Job) -> None:
        """Make the early exits, as they were received."""
        super().begin(job)
        for exit_, head in _build_exits(self._rungs, job.model, job.slice).items():
            for name, tensor in head.state_dict().items():
                value = job.extra.get(_exit_name(exit_, name))
                if value is None or value.shape != tensor.shape:
                    shape = "none" if value is None else str(list(value.shape))
                    raise PayloadError("names", f"expected {name!r} {list(tensor.shape)} of exit {exit_}, got {shape}")
                tensor.copy_(value)
            self._exits[exit_] = device_of(job.model).move(head)

    def modules(self) -> Mapping[str, nn.Module]:
        """The early exits."""
        return {f"{EXTRA_PREFIX}exit/{exit_}": head for exit_, head in self._exits.items()}

    def phases(self) -> Sequence[Phase]:
        """One, over the model and its exits."""
        exit_names = [name for key, head in self.modules().items() for name, _ in head.named_parameters(prefix=key)]
        return [replace(phase, trainable=phase.trainable | {*exit_names}) for phase in super().phases()]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """One term: all exits come from one pass."""
        if not self._exits:
            yield from super().terms(batch, phase)
            return
        distills = self.job.round > self._parameters.warm_up * self.job.num_rounds
        gamma = self._parameters.gamma if distills else 0.0
        yield Term(name="exits", each=exit_losses(self._logits(batch.x), batch.y, gamma, self._parameters.temperature))

    def _logits(self, x: Tensor) -> list[Tensor]:
        """The logits of each exit, those of the last exit at the end."""
        model, logits, start = self.job.model, [], 0
        for exit_, head in self._exits.items():
            x = model.run_units(model.order[start : exit_ + 1], x)
            logits.append(head(x))
            start = exit_ + 1
        return [*logits, model.run_units(model.order[start:], x)]

    def end(self) -> Outcome:
        """The exits travel."""
        tensors = {
            _exit_name(exit_, name): tensor
            for exit_, head in self._exits.items()
            for name, tensor in head.state_dict().items()
        }
        return Outcome(extra=tensors)


def exit_losses(logits: Sequence[Tensor], labels: Tensor, gamma: float, temperature: float) -> Tensor:
    """The weighted loss of each sample: [b]."""
    last, count = logits[-1].detach(), len(logits)
    total = torch.zeros_like(labels, dtype=torch.float32)
    for number, z in enumerate(logits, start=1):
        loss = cross_entropy(z, labels)
        if gamma > 0 and number < count:
            loss = loss + gamma * temperature**2 * divergence(last / temperature, z / temperature)
        total = total + number * loss
    return total / (count * (count + 1) / 2)


def _exit_name(exit_: int, name: str) -> str:
    return f"exit/{exit_}/{name}"


def _early(rungs: Sequence[str], slice_name: str) -> list[int]:
    """The exits that a slice has before its last one, in order."""
    exits = {parse(rung).exit for rung in rungs} - {None}
    last = parse(slice_name).exit
    return sorted(number for number in exits if number is not None and (last is None or number < last))


def _build_exits(rungs: Sequence[str], model: Model, slice_name: str) -> dict[int, nn.Module]:
    """Heads for the early exits of a slice, from the slice itself."""
    return {exit_: heads.alike(model, model.units[exit_]) for exit_ in _early(rungs, slice_name)}


def _exit_tensors(rungs: Sequence[str], model: Model, slice_name: str) -> Mapping[str, Tensor]:
    return {
        _exit_name(exit_, name): tensor
        for exit_, head in _build_exits(rungs, model, slice_name).items()
        for name, tensor in head.state_dict().items()
    }


def _all_exit_tensors(rungs: Sequence[str], model: Model) -> Mapping[str, Tensor]:
    return _exit_tensors(rungs, model, "full")


def _places(rungs: Sequence[str], model: Model, slice_name: str, names: Sequence[str]) -> Mapping[str, Place]:
    """A slice's own head is the exit where it ends; its earlier exits lie under their own names."""
    spec, head = parse(slice_name), f"{model.units[-1].name}."
    places = slice_places(model, slice_name, [name for name in names if name.startswith(MODEL_PREFIX)])
    with torch.device("meta"):  # for its shapes
        exits = {exit_: heads.alike(model, model.units[exit_]).state_dict() for exit_ in _early(rungs, "full")}
    axes = model.channel_axes or {}

    def place(exit_: int, name: str) -> Place:
        where = place_of(exits[exit_][name], axes.get(head + name, (CHANNELS, CHANNELS)), spec)
        return Place(EXTRA_PREFIX + _exit_name(exit_, name), where)

    if spec.exit is not None:
        head_places = {MODEL_PREFIX + head + name: place(spec.exit, name) for name in exits[spec.exit]}
        places = {name: head_places.get(name, place_in_model) for name, place_in_model in places.items()}
    early = {
        EXTRA_PREFIX + _exit_name(exit_, name): place(exit_, name)
        for exit_ in _early(rungs, slice_name)
        for name in exits[exit_]
    }
    return {**places, **early}


def _check(rungs: Sequence[str], model: Model) -> None:
    """Raise `InputError` unless each level lies inside the one before it, and the model can have heads at its exits."""
    for larger, rung in pairwise(rungs):
        one, other = parse(larger), parse(rung)
        deeper = other.exit is not None and (one.exit is None or other.exit <= one.exit)
        if not (deeper or one.exit is other.exit) or other.width > one.width:
            raise InputError(
                f"slices: 'scalefl' needs each inside the one before it, and {rung!r} is not inside {larger!r}; "
                "name the largest first, none later or wider than the one before"
            )
    if _early(rungs, "full") and not hasattr(model, "units"):
        raise InputError(
            "method 'scalefl' needs the shape of a sample on the server, too; tell it, Task(input=(3, 96, 96))"
        )
    for rung in rungs if _early(rungs, "full") else ():
        units_of_slice(model, parse(rung))
    _all_exit_tensors(rungs, model)


def method(parameters: ScaleFLParameters, *, rungs: Sequence[str]) -> Method:
    """ScaleFL for these slices, for the registry."""
    return Method(
        client=partial(ScaleFLClient, parameters, rungs),
        server=CoverageServer(uniform=parameters.uniform),
        check=partial(_check, rungs),
        travel=Travel(extra_tensors=partial(_all_exit_tensors, rungs), extra_of_slice=partial(_exit_tensors, rungs)),
        slices=SliceRules(places=partial(_places, rungs)),
    )
