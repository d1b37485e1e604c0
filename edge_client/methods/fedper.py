"""FedPer. Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818.

The first layers of the model, the base, are trained together as in FedAvg; the last ones are personal: each device has
its own, keeps them, and trains them with the base. Down: the model, its personal layers as the server first made them,
with which a device begins. Up: the base alone. On the device: personal layers, and the state of their optimizer.

Where devices train slices of different sizes, the base is what all of them begin with: the longest prefix of units that
have the same names and shapes in every slice. With `match = "name_shape"` it is every tensor that has one shape in all
slices that have it, averaged over those. What is personal in one slice is personal in all.

Deviations: layers are units of the model; those without parameters do not count. All devices begin with the same
personal layers. The mean is weighted by n_k, as everywhere.

Legend: K_P = parameters.personal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile

from torch import Tensor

from edge_client.errors import InputError, PayloadError
from edge_client.methods.base import Job, Method, Outcome, Phase, PlainClient, Travel
from edge_client.methods.cards.fedper import FedPerParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.models.contract import Model
from edge_client.models.slicing import FULL, index_map, parse, units_of_slice
from edge_client.wire.container import MODEL_PREFIX

__all__ = ["PersonalClient", "everything", "method", "shared", "size_of"]

_OPTIMIZER = "optimizer/"
_MOST_NOTED = 12_000  # characters: a container says up to 16,384 bytes of itself
Personal = Callable[[Job], tuple[str, ...]]  # prefixes of the names of a model's personal tensors
Size = Mapping[str, Mapping[str, tuple[int, ...]]]  # of one slice: unit -> its tensors -> their shapes, in order


class PersonalClient(PlainClient):
    """Cross entropy on everything; personal tensors are this device's own, from round to round."""

    def __init__(self, personal: Personal) -> None:
        self._personal = personal
        self._optimizer: dict[str, dict[str, Tensor]] = {}  # parameter -> state of its optimizer

    def begin(self, job: Job) -> None:
        """Copy the personal tensors into the received model; before the first round they are as received."""
        super().begin(job)
        for name, tensor in self._personal_of(job.model.state_dict()).items():
            stored = MODEL_PREFIX + name
            if stored in job.state:
                _copy(tensor, job.state[stored], name)
        for key in job.state:
            if key.startswith(_OPTIMIZER):
                name, _, field = key.removeprefix(_OPTIMIZER).rpartition("/")
                self._optimizer.setdefault(name, {})[field] = job.state[key]

    def _personal_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        prefixes = self._personal(self.job)
        return {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}

    def phases(self) -> Sequence[Phase]:
        """The optimizer of personal parameters goes on where it was."""
        return [replace(phase, optimizer_state=self._optimizer) for phase in super().phases()]

    def end(self) -> Outcome:
        """The personal tensors, and the state of their optimizer."""
        personal = self._personal_of(self.job.model.state_dict())
        state = {MODEL_PREFIX + name: tensor for name, tensor in personal.items()}
        for name, tensors in self._optimizer.items():
            if name in personal:
                state |= {f"{_OPTIMIZER}{name}/{field}": tensor for field, tensor in tensors.items()}
        return Outcome(state=state)


def _copy(tensor: Tensor, value: Tensor, name: str) -> None:
    if value.shape != tensor.shape:
        raise PayloadError(
            "shape", f"this device's own {name!r} is {list(value.shape)}, the run's is {list(tensor.shape)}"
        )
    tensor.copy_(value)


def everything(job: Job) -> tuple[str, ...]:
    """The whole model is personal."""
    return ("",)


def _personal_names(parameters: FedPerParameters, job: Job) -> tuple[str, ...]:
    """What the server says is personal, as a device knows no other sizes; its last units are in any case."""
    never_returned = _never_returned(parameters, ("full",), job.model) if job.kept is None else job.kept
    prefixes = tuple(name.removeprefix(MODEL_PREFIX) for name in never_returned if name.startswith(MODEL_PREFIX))
    units = list(size_of(job.model).values())
    personal = units[max(0, len(units) - parameters.personal) :]
    for name in (name for tensors in personal for name in tensors if not name.startswith(prefixes)):
        raise PayloadError("names", f"{name!r} is personal on this device, and the coordinator wants it back")
    return prefixes


def size_of(model: Model, slice_name: str = "full") -> Size:
    """The units of a slice that have tensors."""
    spec, state = parse(slice_name), model.state_dict()
    if spec == FULL:
        units, places = list(model.order), dict.fromkeys(state)
    else:
        units, places = [unit.name for unit in units_of_slice(model, spec)], index_map(model, spec)
    shapes = {
        name: tuple(state[name].shape) if place is None else tuple(len(indices) for indices in place)
        for name, place in places.items()
    }
    names_of = {unit: frozenset(name for names in model.tensors_of_unit(unit) for name in names) for unit in units}
    tensors_of = {
        unit: {name: shape for name, shape in shapes.items() if name in names} for unit, names in names_of.items()
    }
    return {unit: tensors for unit, tensors in tensors_of.items() if tensors}


def shared(sizes: Sequence[Size], parameters: FedPerParameters) -> frozenset[str]:
    """The tensors of the base."""
    personal_units = {unit for size in sizes for unit in list(size)[max(0, len(size) - parameters.personal) :]}
    if parameters.match == "name_shape":
        shapes: dict[str, set[tuple[int, ...]]] = {}
        for size in sizes:
            for unit in size.keys() - personal_units:
                for name, shape in size[unit].items():
                    shapes.setdefault(name, set()).add(shape)
        return frozenset(name for name, variants in shapes.items() if len(variants) == 1)
    rows = zip(*(size.items() for size in sizes), strict=False)
    same = takewhile(lambda row: row[0][0] not in personal_units and all(other == row[0] for other in row), rows)
    return frozenset(name for (_, tensors), *_ in same for name in tensors)


def _never_returned(parameters: FedPerParameters, rungs: Sequence[str], model: Model) -> tuple[str, ...]:
    """All units and tensors that are not in the base."""
    base, names = shared([size_of(model, rung) for rung in rungs], parameters), []
    for unit, tensors in size_of(model).items():
        inside = base & tensors.keys()
        names += [f"{unit}."] if not inside else [name for name in tensors if name not in inside]
    return tuple(MODEL_PREFIX + name for name in names)


def _check(parameters: FedPerParameters, rungs: Sequence[str], model: Model) -> None:
    """Raise `InputError` for slices that share nothing: such a run is another method."""
    if len(rungs) > 1 and not hasattr(model, "units"):
        raise InputError(
            "method 'fedper' needs the shape of a sample on the server, too; tell it, Task(input=(3, 96, 96))"
        )
    sizes = [size_of(model, rung) for rung in rungs]
    count, number = min(map(len, sizes)), parameters.personal
    base = shared(sizes, parameters)
    if number >= count:
        raise InputError(
            f"method 'fedper': personal = {number} shares nothing, the model has {count} units with parameters; "
            f'set personal to 0 to {count - 1}, or let each device train alone: method = "local"'
        )
    if not any(name in base for name, _ in model.named_parameters()):
        raise InputError(
            f"method 'fedper': the slices {', '.join(rungs)} share nothing, no first unit has one shape in all of them "
            f"beside the last {number}, which are personal; use slices of depth, fewer personal units, heterofl for "
            'slices of width, or let each device train alone: method = "local"'
        )
    names = _never_returned(parameters, rungs, model)
    if number == 0 and names:
        raise InputError(
            "method 'fedper': personal = 0 is FedAvg, and these slices would have layers of their own, such as "
            f"{names[0].removeprefix(MODEL_PREFIX).removesuffix('.')!r}; use fedavg, or set personal to 1 or more"
        )
    if (length := sum(len(name) + 3 for name in names)) > _MOST_NOTED:
        raise InputError(
            f"method 'fedper': the names of the {len(names)} layers that are not shared have {length} characters, at "
            f"most {_MOST_NOTED} can be noted; name slices that differ less, or use shorter names"
        )


def method(parameters: FedPerParameters, *, rungs: Sequence[str]) -> Method:
    """FedPer for these slices, which share one base, for the registry."""
    return Method(
        client=partial(PersonalClient, partial(_personal_names, parameters)),
        server=CoverageServer(),
        check=partial(_check, parameters, rungs),
        travel=Travel(never_returned=partial(_never_returned, parameters, rungs)),
    )
