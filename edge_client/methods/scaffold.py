"""Scaffold. Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

Devices with different data pull the model apart. Each keeps a control variate c_i, what its own steps are like, and the
server keeps their mean c; every local step is corrected by c - c_i, so that it goes where those of the whole fleet
would. Down: the model and c. Up: the trained model, and c + delta c_i in place of c. On the device: c_i.

    y_i <- y_i - eta_l (g_i(y_i) - c_i + c)       the optimizer's step, then y_i <- y_i - eta_l (c - c_i)
    c_i+ = c_i - c + (x - y_i) / (K eta_l)        option II, after K steps from the received x
    x <- mean of y_i,  c <- c + |S|/N mean of (c_i+ - c_i)     over the cohort S

What is sent is c + delta c_i = (x - y_i) / (K eta_l), which needs neither c_i nor c: with all devices, c is its mean.

Deviations: the correction follows the optimizer's step, as in NIID-Bench: for plain SGD it is the same, and with
momentum or Adam c_i is a mean step, not a gradient, and must not be added to one. The mean of models is weighted by
n_k, as everywhere (the global step is 1). N is the largest number of devices that the run has had so far: when it
grows, c is scaled, so that it stays the mean of all c_i; those of devices that have not trained yet are zero. Where
devices train slices, N of an element is that of the devices which have it: N times their share of those that have
trained so far, which say so in their first round. With one N for all, c would not stay the mean of the c_i. Buffers
have no control variate.

Legend: x = received weights, y_i = a device's weights, K = its steps, eta_l = its learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edge_client.errors import PayloadError
from edge_client.methods.base import (
    Frozen,
    Job,
    Method,
    Outcome,
    Place,
    PlainClient,
    SliceRules,
    State,
    Travel,
)
from edge_client.methods.cards.scaffold import ScaffoldParameters
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.slices import slice_places
from edge_client.models.contract import Model
from edge_client.models.slicing import index_map, parse
from edge_client.params import IndexMap, Part, coverage_mean, coverage_sum
from edge_client.wire.container import EXTRA_PREFIX

__all__ = ["ScaffoldClient", "ScaffoldServer", "method"]

_CONTROL = "control/"  # and the parameter's name: c among the method's tensors
_DEVICES = "devices"  # [N of the c that is there, how many of them have a c_i]
_OWNERS = "owners/"  # and the parameter's name: how many of them have each element, where devices train slices
_FIRST = "first"  # scalar of an update: the device had no c_i before


class ScaffoldClient(PlainClient):
    """Cross entropy, and a correction after every step."""

    def __init__(self) -> None:
        self._received_weights: dict[str, Tensor] = {}  # x
        self._correction: dict[str, Tensor] = {}  # c - c_i
        self._distance = 0.0  # K eta_l

    def begin(self, job: Job) -> None:
        """Keep the received weights, and what each step is corrected by."""
        super().begin(job)
        for name, param in job.model.named_parameters():
            if param.requires_grad:
                self._received_weights[name] = param.detach().clone()
                self._correction[name] = self._correction_of(name, param)

    def _correction_of(self, name: str, param: Tensor) -> Tensor:
        """In the layout of the parameter; c_i is zero before this device's first round."""
        control = self.job.extra.get(_CONTROL + name)
        if control is None or control.shape != param.shape:
            shape = "none" if control is None else str(list(control.shape))
            raise PayloadError("names", f"expected a control variate {list(param.shape)} for {name!r}, got {shape}")
        correction = torch.empty_like(param, requires_grad=False).copy_(control)
        if name in self.job.state:
            correction.sub_(self.job.state[name])
        return correction

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        """y_i <- y_i - eta_l (c - c_i)."""
        self._distance += learning_rate
        for name, param in params.items():
            param.add_(self._correction[name], alpha=-learning_rate)

    def end(self) -> Outcome:
        """c + delta c_i for the server, c_i+ for the next time; without a step both stay as they are."""
        if self._distance == 0:
            return Outcome()
        weights = dict(self.job.model.named_parameters())
        controls, state = {}, {}
        for name, weight in self._received_weights.items():  # in place: both are as large as the model
            step = weight.sub_(weights[name].detach()).div_(self._distance)
            controls[_CONTROL + name] = step
            state[name] = self._correction[name].neg_().add_(step)
        return Outcome(extra=controls, state=state, scalars={} if self.job.state else {_FIRST: 1.0})


@dataclass(frozen=True, slots=True)
class _Count:
    """Devices of the run, and how many of them have trained."""

    devices: int
    trained: int

    def having(self, owners: Tensor | None) -> Tensor | float:
        """N of each element, of which so many devices are owners; None: every device has every element."""
        return self.devices if owners is None else self.devices * owners.double() / max(1, self.trained)


class ScaffoldServer(CoverageServer):
    """The coverage mean of the model, and c as the mean of all c_i."""

    def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new state; the owners of a parameter come behind its c."""
        names = state.names()
        before = _Count(*state.tensor(EXTRA_PREFIX + _DEVICES).tolist())
        trained = before.trained + sum(_FIRST in header.scalars for header in frozen.headers)
        now = _Count(max(before.devices, frozen.num_devices, trained), trained)
        sliced = any(name.startswith(EXTRA_PREFIX + _OWNERS) for name in names)
        owners: dict[str, Tensor] = {}
        for name in names:
            old = state.tensor(name)
            if name == EXTRA_PREFIX + _DEVICES:
                yield name, torch.tensor([now.devices, now.trained])
            elif name in owners:
                yield name, owners.pop(name)
            elif name.startswith(EXTRA_PREFIX + _CONTROL) and sliced:
                whose = EXTRA_PREFIX + _OWNERS + name.removeprefix(EXTRA_PREFIX + _CONTROL)
                control, owners[whose] = _sliced_control(name, old, state.tensor(whose), frozen, (before, now))
                yield name, control
            elif name.startswith(EXTRA_PREFIX + _CONTROL):
                yield name, _control(name, old, frozen, before.devices, now.devices)
            else:
                yield name, self.fold_tensor(name, old, frozen)


def _control(name: str, old: Tensor, frozen: Frozen, before: int, now: int) -> Tensor:
    """(N c + sum of delta c_i) / N', where N devices have become N'."""
    share = len(frozen.headers) / now
    mean = coverage_mean(old, ((value, where, 1.0) for _, value, where in frozen.column(name)))
    return (share * mean.double() + (before / now - share) * old.double()).to(old.dtype)


def _sliced_control(
    name: str, old: Tensor, owners: Tensor, frozen: Frozen, counts: tuple[_Count, _Count]
) -> tuple[Tensor, Tensor]:
    """The same where each element has an N of its own; and the owners after this round."""
    before, now = counts
    num_before = before.having(owners)
    places: list[IndexMap | None] = []

    def parts() -> Iterator[Part]:
        for header, value, where in frozen.column(name):
            places.append(where)
            if _FIRST in header.scalars:
                _add_owner(owners, where)
            yield value, where, 1.0

    mean = coverage_mean(old, parts()).double()
    sent = coverage_sum(old.shape, ((where, 1.0) for where in places))
    num_now = now.having(owners)
    new = (num_before * old.double() + sent * (mean - old.double())) / num_now
    return torch.where(torch.as_tensor(num_now) > 0, new, old.double()).to(old.dtype), owners


def _add_owner(owners: Tensor, where: IndexMap | None) -> None:
    """One more at these indices; an axis of which every slice has all is one element long."""
    if where is None:
        owners += 1
        return
    first = torch.zeros(1, dtype=torch.int64)
    axes = [first if size == 1 else indices for indices, size in zip(where, owners.shape, strict=True)]
    owners[torch.meshgrid(*axes, indexing="ij")] += 1


def _controls(rungs: Sequence[str], model: Model) -> Mapping[str, Tensor]:
    """c = 0 for everything that is trained, no owners, and N = 0."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    maps = [index_map(model, parse(rung)) for rung in rungs] if len(rungs) > 1 else []
    controls: dict[str, Tensor] = {}
    for name, param in params.items():
        controls[_CONTROL + name] = torch.zeros(param.shape)
        if maps:
            shape = _sliced_axes(param, [places.get(name) for places in maps])
            controls[_OWNERS + name] = torch.zeros(shape, dtype=torch.int64)
    return {**controls, _DEVICES: torch.zeros(2, dtype=torch.int64)}


def _of_slice(model: Model, slice_name: str) -> Mapping[str, Tensor]:
    """What comes to a device: c of its slice, and N."""
    return _controls((slice_name,), model)


def _sliced_axes(param: Tensor, places: Sequence[IndexMap | None]) -> list[int]:
    """The shape of the owners: 1 for an axis of which all slices that have the parameter have all."""
    narrow = [place for place in places if place is not None]
    return [size if any(len(place[axis]) < size for place in narrow) else 1 for axis, size in enumerate(param.shape)]


def _places(model: Model, slice_name: str, names: Sequence[str]) -> Mapping[str, Place]:
    """The owners stay on the server."""
    return slice_places(model, slice_name, [name for name in names if not name.startswith(EXTRA_PREFIX + _OWNERS)])


def _never_returned(model: Model) -> tuple[str, ...]:
    """N stays on the server."""
    return (EXTRA_PREFIX + _DEVICES,)


def method(parameters: ScaffoldParameters, *, rungs: Sequence[str]) -> Method:
    """Scaffold for these slices, for the registry."""
    if not parameters.correction:
        return Method(client=PlainClient, server=CoverageServer())
    return Method(
        client=ScaffoldClient,
        server=ScaffoldServer(),
        travel=Travel(
            extra_tensors=partial(_controls, tuple(rungs)),
            extra_of_slice=_of_slice,
            inherits_extra=False,  # the c_i of another run are gone
            never_returned=_never_returned,
        ),
        slices=SliceRules(places=_places) if len(rungs) > 1 else SliceRules(),
    )
