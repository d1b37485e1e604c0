"""Which parts of a run's model its devices train, and where their tensors lie in the server's. Free of torch.

    architecture   how much of the model a device can train: the first of the run's slices that fits its memory
    slice    which part that is in a round: an architecture, or for FedRolex one and its first channel
    places   tensor of a slice -> the server's tensor and the elements of it

Without slices of its own in the run file, a method's are taken; most methods have one, the whole model.
Does not cover: how a slice is cut (`models.slicing`), who gets which (`coordinator/rounds/slice_choice.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from edge_client.errors import InputError
from edge_client.models import slicing
from edge_client.models.slicing import SliceSpec
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX

if TYPE_CHECKING:
    from edge_client.models.contract import Model
    from edge_client.params import IndexMap

__all__ = [
    "WHOLE_MODEL",
    "Place",
    "Slicing",
    "Turn",
    "architecture",
    "slice_places",
]

WHOLE_MODEL = "full"


class Place(NamedTuple):
    """Where a tensor of a slice lies: a tensor of the server's container, and which elements; None: all of them."""

    name: str
    where: IndexMap | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A device in a round, for methods that give it another slice each time."""

    rungs: tuple[str, ...]  # of the run, the largest first
    round: int  # from 1
    device: str
    seed: int  # of this device in this round


def _same_slice(architecture: str, turn: Turn) -> str:
    return architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """The rules of a method about slices."""

    ladder: tuple[str, ...] = (WHOLE_MODEL,)  # unless the run names others
    kinds: tuple[str, ...] = ("depth", "layers", "width", "model")  # that it can use; none: only the whole model
    instead: str = ""  # what to use for other kinds
    turn: Callable[[str, Turn], str] = _same_slice  # architecture -> the slice of a round
    separable: bool = True  # each slice may be a model of its own (`sharing = "architecture"`)
    sharing: str = "position"  # unless the run says it
    split: bool = False  # the whole model, too, lies on the server in another form than on devices

    def architectures(self, texts: Sequence[str], method: str) -> tuple[str, ...]:
        """The slices of a run that names these; raises `InputError`."""
        architectures = tuple(str(slicing.parse(text)) for text in texts) or self.ladder
        if len(set(architectures)) != len(architectures):
            raise InputError(f"slices: expected different ones, got {', '.join(architectures)}")
        for architecture in architectures:
            unusable = [kind for kind in _kinds(slicing.parse(architecture)) if kind not in self.kinds]
            if unusable:
                usable = [kind for kind in self.kinds if kind != "model"]
                able = f"slices of {' or '.join(usable)}" if usable else "the whole model"
                raise InputError(
                    f"slices: {method!r} trains {able}, got {architecture!r}{self.instead and '; '}{self.instead}"
                )
        return architectures


def _kinds(spec: SliceSpec) -> list[str]:
    has = {
        "depth": spec.depths is not None,
        "layers": spec.layers is not None,
        "exit": spec.exit is not None,
        "width": spec.narrows,
        "model": bool(spec.model),
    }
    return [kind for kind, present in has.items() if present]


def architecture(slice_name: str) -> str:
    """A slice without its position: how much of the model it has, wherever that begins."""
    return WHOLE_MODEL if slice_name == WHOLE_MODEL else str(replace(slicing.parse(slice_name), offset=0))


def slice_places(model: Model, slice_name: str, names: Sequence[str]) -> Mapping[str, Place]:
    """Of all tensors of the server, by their names in a container, those of a slice.

    Each lies under its own name. What a method keeps of a parameter (`extra/.../PARAMETER`) is sliced as it is; its
    other tensors are sent whole.
    """
    if slice_name == WHOLE_MODEL:
        return {name: Place(name) for name in names}
    places = slicing.index_map(model, slicing.parse(slice_name))
    tensors = frozenset(model.state_dict())
    model_names = {name: _model_name(name, tensors) for name in names}
    return {
        name: Place(name, places[model_name] if model_name is not None else None)
        for name, model_name in model_names.items()
        if model_name is None or model_name in places
    }


def _model_name(name: str, tensors: frozenset[str]) -> str | None:
    """The model's tensor that a tensor is, or belongs to; None: none of them."""
    model_name = name.removeprefix(MODEL_PREFIX if name.startswith(MODEL_PREFIX) else EXTRA_PREFIX)
    while model_name not in tensors:
        _, slash, model_name = model_name.partition("/")
        if not slash:
            return None
    return model_name
