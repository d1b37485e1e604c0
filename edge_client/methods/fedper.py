"""FedPer. Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818.

The first layers of the model, the base, are trained together as in FedAvg; the last ones are personal: each device has
its own, keeps them, and trains them with the base. Down: the model, its personal layers as the server first made them,
with which a device begins. Up: the base alone. On the device: personal layers, and the state of their optimizer.

Deviations: layers are units of the model; those without parameters do not count. All devices begin with the same
personal layers. The mean is weighted by n_k, as everywhere.

Legend: K_P = parameters.personal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from edge_client.errors import InputError, PayloadError
from edge_client.methods.base import Exchange, Job, Method, Outcome, Phase, PlainClient
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.parameters import FedPerParameters
from edge_client.models.contract import Model
from edge_client.wire.container import MODEL_PREFIX

__all__ = ["PersonalClient", "everything", "method"]

_OPTIMIZER = "optimizer/"
Personal = Callable[[Model], tuple[str, ...]]  # what the names of a model's personal tensors begin with


class PersonalClient(PlainClient):
    """Cross entropy on everything; personal tensors are this device's own, from round to round."""

    def __init__(self, personal: Personal) -> None:
        self._personal = personal
        self._optimizer: dict[str, dict[str, Tensor]] = {}  # parameter -> state of its optimizer

    def begin(self, job: Job) -> None:
        """Put the personal tensors into the received model; before the first round they are as received."""
        super().begin(job)
        for name, tensor in self._own(job.model.state_dict()).items():
            stored = MODEL_PREFIX + name
            if stored in job.state:
                _copy(tensor, job.state[stored], name)
        for key in job.state:
            if key.startswith(_OPTIMIZER):
                name, _, what = key.removeprefix(_OPTIMIZER).rpartition("/")
                self._optimizer.setdefault(name, {})[what] = job.state[key]

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        beginnings = self._personal(self.job.model)
        return {name: tensor for name, tensor in tensors.items() if name.startswith(beginnings)}

    def phases(self) -> Sequence[Phase]:
        """The optimizer of personal parameters goes on where it was."""
        return [replace(phase, optimizer_state=self._optimizer) for phase in super().phases()]

    def end(self) -> Outcome:
        """The personal tensors and their optimizer's."""
        own = self._own(self.job.model.state_dict())
        state = {MODEL_PREFIX + name: tensor for name, tensor in own.items()}
        for name, tensors in self._optimizer.items():
            if name in own:
                state |= {f"{_OPTIMIZER}{name}/{what}": tensor for what, tensor in tensors.items()}
        return Outcome(state=state)


def _copy(tensor: Tensor, value: Tensor, name: str) -> None:
    if value.shape != tensor.shape:
        raise PayloadError(
            "shape", f"this device's own {name!r} is {list(value.shape)}, the run's is {list(tensor.shape)}"
        )
    tensor.copy_(value)


def everything(model: Model) -> tuple[str, ...]:
    """The whole model is personal."""
    return ("",)


def _units(model: Model) -> list[str]:
    """Those that have tensors."""
    return [name for name in model.order if model.get_submodule(name).state_dict()]


def _last_units(number: int, model: Model) -> tuple[str, ...]:
    return tuple(f"{unit}." for unit in _units(model)[-number:]) if number else ()


def _kept(personal: Personal, model: Model) -> tuple[str, ...]:
    return tuple(MODEL_PREFIX + beginning for beginning in personal(model))


def _check(number: int, model: Model) -> None:
    """A run in which nothing is shared is another method."""
    count = len(_units(model))
    if number >= count:
        raise InputError(
            f"method 'fedper': personal = {number} shares nothing, the model has {count} units with parameters; "
            f'set personal to 0 to {count - 1}, or let each device train alone: method = "local"'
        )


def method(parameters: FedPerParameters) -> Method:
    """FedPer, for the registry."""
    personal = partial(_last_units, parameters.personal)
    return Method(
        name="fedper",
        paper="Arivazhagan et al., arXiv:1912.00818",
        parameters=parameters,
        client=partial(PersonalClient, personal),
        server=CoverageServer(),
        exchange=Exchange(
            down="model (personal layers as the server first made them)",
            up="model without personal layers",
            device="personal layers and the state of their optimizer",
        ),
        kept=partial(_kept, personal),
        check=partial(_check, parameters.personal),
    )
