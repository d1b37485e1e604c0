"""SplitMix. Hong et al., "Efficient Split-Mix Federated Learning for On-Demand and In-Situ Customization", ICLR 2022.

The model is split into B base networks of 1/B of its channels, which have nothing in common. A device trains as many of
them as its memory holds, each on every batch with a loss of its own; the server takes the mean of each base over the
devices that trained it. To answer, the bases that a device has are mixed: the mean of their logits. Down and up: some
bases.

    bases of a device of width r:   floor(r B), another choice in every round
    base k of a layer:              channels k c/B ... (k + 1) c/B - 1 of c, inputs likewise

On the server the bases lie side by side in the model's own tensors, the rest of which is zero, and the classifier's
bias is the sum of theirs: as one network the model gives the sum of their logits, so its answers are those of all
bases together.

Deviations: the first base of a device goes round by device and round, where the authors draw it from one shuffled list
for all devices; the others are drawn, as there. A classifier's bias begins as the same in all bases. A BatchNorm
keeps running statistics, each base its own. Devices judge with the bases that they have in the round, the server with
the same ones of each width always.

Legend: B = parameters.bases, r = share of the channels, c = channels of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from edge_client.data.input_sums import MEAN, SCALE
from edge_client.errors import InputError, PayloadError
from edge_client.methods.base import (
    Batch,
    Frozen,
    Job,
    Method,
    Outcome,
    Phase,
    Place,
    PlainClient,
    SliceRules,
    State,
    Term,
    Travel,
)
from edge_client.methods.cards.splitmix import SplitMixParameters, bases_of
from edge_client.methods.fedavg import CoverageServer
from edge_client.models.contract import Model
from edge_client.models.slicing import FULL, SliceSpec, index_map, parse
from edge_client.params import IndexMap
from edge_client.training.objectives import cross_entropy
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX

__all__ = ["SplitMixClient", "SplitMixServer", "method"]

_WITHOUT_CHANNELS = "own"  # note: tensors that have no channels; those of each base lie beside the model
_ACROSS = (nn.LayerNorm, nn.GroupNorm)  # what mixes the channels of bases


class SplitMixClient(PlainClient):
    """Each base by itself; the first is the job's model."""

    def __init__(self, num_bases: int) -> None:
        self._num_bases = num_bases
        self._others: dict[str, Model] = {}

    def begin(self, job: Job) -> None:
        """Make the other bases, as they were received."""
        super().begin(job)
        for number in range(1, len(bases_of(self._num_bases, job.slice))):
            if job.build is None:
                raise ValueError("a device with several bases needs a job that can build them")
            key = f"base/{number}"
            self._others[key] = job.build(key)
            for name, tensor in self._others[key].state_dict().items():
                value = job.extra.get(f"{key}/{name}")
                if value is None or value.shape != tensor.shape:
                    shape = "none" if value is None else str(list(value.shape))
                    raise PayloadError("names", f"expected {name!r} {list(tensor.shape)} of {key}, got {shape}")
                tensor.copy_(value)

    def modules(self) -> Mapping[str, nn.Module]:
        """The other bases."""
        return self._others

    def phases(self) -> Sequence[Phase]:
        """One, over all of them."""
        names = [name for key, base in self._others.items() for name, _ in base.named_parameters(prefix=key)]
        return [replace(phase, trainable=phase.trainable | {*names}) for phase in super().phases()]

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """Of one base after the other: each is freed before the next runs."""
        yield from super().terms(batch, phase)
        for key, base in self._others.items():
            yield Term(name=key, each=cross_entropy(base(batch.x), batch.y), reported=False)

    def end(self) -> Outcome:
        """All bases travel."""
        tensors = {
            f"{key}/{name}": tensor for key, base in self._others.items() for name, tensor in base.state_dict().items()
        }
        return Outcome(extra=tensors)

    def predict(self, x: Tensor) -> Tensor:
        """The mean of the bases' logits."""
        logits = [super().predict(x)]
        for base in self._others.values():
            base.eval()
            logits.append(base(x))
        return torch.stack(logits).mean(dim=0) if self._others else logits[0]


class SplitMixServer(CoverageServer):
    """The mean of each base; what has no channels is the sum over the bases in the model itself."""

    def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new state."""
        without_channels = frozenset(state.notes.get(_WITHOUT_CHANNELS, ()))
        names = state.names()
        for name in names:
            old = state.tensor(name)
            if name not in without_channels:
                yield name, self.fold_tensor(name, old, frozen)
                continue
            if name.endswith((f".{MEAN}", f".{SCALE}")):  # numbers of the inputs, the same in all bases
                yield name, old
                continue
            bases = [other for other in names if other.startswith(EXTRA_PREFIX) and other.endswith(f"/{name}")]
            folded = (self.fold_tensor(base, state.tensor(base), frozen) for base in bases)
            yield name, sum((value.double() for value in folded), torch.zeros_like(old).double()).to(old.dtype)


class _Bases:
    """Where the tensors of each base lie in the whole model."""

    def __init__(self, model: Model, num_bases: int) -> None:
        spec = SliceSpec(width=Fraction(1, num_bases)) if num_bases > 1 else FULL
        self.state: Mapping[str, Tensor] = model.state_dict()
        self.parts: list[dict[str, IndexMap | None]] = [index_map(model, spec, part=k) for k in range(num_bases)]
        # tensors without channels that are trained; counters are the largest of all bases
        unsliced = [name for name, place in self.parts[0].items() if place is None and num_bases > 1]
        self.without_channels = [name for name in unsliced if self.state[name].is_floating_point()]

    def place(self, number: int, name: str) -> Place:
        """A tensor of a base on the server."""
        if name in self.without_channels:
            return Place(f"{EXTRA_PREFIX}base{number}/{name}")
        return Place(MODEL_PREFIX + name, self.parts[number][name])


def _places(num_bases: int, model: Model, slice_name: str, names: Sequence[str]) -> Mapping[str, Place]:
    """The first base of a slice as the model, the others behind it."""
    bases = _Bases(model, num_bases)
    places: dict[str, Place] = {}
    for position, number in enumerate(bases_of(num_bases, slice_name)):
        beginning = f"{EXTRA_PREFIX}base/{position}/" if position else MODEL_PREFIX
        places |= {beginning + name: bases.place(number, name) for name in bases.state}
    return places


def _tensors_without_channels(num_bases: int, model: Model) -> Mapping[str, Tensor]:
    """Of each base what has no channels; in the model is their sum."""
    names, state = _Bases(model, num_bases).without_channels, model.state_dict()
    return {f"base{number}/{name}": state[name] / num_bases for number in range(num_bases) for name in names}


def _other_bases(num_bases: int, model: Model, slice_name: str) -> Mapping[str, Tensor]:
    """For a device, from its first base."""
    return {
        f"base/{position}/{name}": tensor.clone()
        for position in range(1, len(bases_of(num_bases, slice_name)))
        for name, tensor in model.state_dict().items()
    }


def _split(num_bases: int, model: Model, build: Callable[[str], Model]) -> None:
    """Networks side by side, and zeros between them; what has no channels becomes the sum of equal ones."""
    if num_bases == 1:
        return
    bases = _Bases(model, num_bases)
    for name, tensor in bases.state.items():
        if name in bases.without_channels:
            tensor.mul_(num_bases)
        elif bases.parts[0][name] is not None:
            tensor.zero_()
    for part in bases.parts:
        for name, value in build(_network(num_bases, "full")).state_dict().items():
            if (place := part[name]) is not None:
                bases.state[name][torch.meshgrid(*place, indexing="ij")] = value


def _notes(num_bases: int, model: Model) -> Mapping[str, Any]:
    names = _Bases(model, num_bases).without_channels
    return {_WITHOUT_CHANNELS: names} if names else {}


def _check(num_bases: int, rungs: Sequence[str], model: Model) -> None:
    """Bases lie side by side, and every device has one at least."""
    if num_bases == 1 and tuple(rungs) == ("full",):
        return
    narrow = [rung for rung in rungs if parse(rung).width * num_bases < 1]
    if narrow:
        raise InputError(
            f"slices: 'splitmix' has {num_bases} bases of 1/{num_bases} of the channels, and {narrow[0]!r} is less; "
            f"leave it out, or set bases to {math.ceil(1 / parse(narrow[0]).width)}"
        )
    if any(isinstance(part, _ACROSS) for part in model.modules()):
        raise InputError(
            "method 'splitmix' needs bases that have nothing in common, and this model normalises over all channels; "
            "use one with BatchNorm or without a norm, or heterofl"
        )
    _check_division(num_bases, model)


def _check_division(num_bases: int, model: Model) -> None:
    state = model.state_dict()
    for name, place in index_map(model, SliceSpec(width=Fraction(1, num_bases))).items():
        for size, indices in zip(state[name].shape, place or (), strict=False):
            if len(indices) not in (size, size // num_bases) or (len(indices) < size and size % num_bases):
                raise InputError(
                    f"method 'splitmix': {name!r} has {size} channels, which {num_bases} bases cannot share; "
                    "set bases to a divisor of the channels of all layers, or the model's width to a multiple of them"
                )


def _network(num_bases: int, slice_name: str) -> str:
    return f"width:1/{num_bases}" if num_bases > 1 else "full"


def method(parameters: SplitMixParameters, *, rungs: Sequence[str]) -> Method:
    """SplitMix for these slices, for the registry."""
    count = parameters.bases
    return Method(
        client=partial(SplitMixClient, count),
        server=SplitMixServer(),
        check=partial(_check, count, rungs),
        travel=Travel(
            extra_tensors=partial(_tensors_without_channels, count),
            extra_of_slice=partial(_other_bases, count),
            notes=partial(_notes, count),
        ),
        slices=SliceRules(
            network=partial(_network, count),
            places=partial(_places, count),
            first_weights=partial(_split, count),
            predicts_by_client=count > 1,
        ),
    )
