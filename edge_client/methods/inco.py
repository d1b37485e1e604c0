"""InCo. Chan et al., "Internal Cross-Layer Gradients for Extending Homogeneity to Heterogeneity in Federated Learning",
ICLR 2024.

Where devices train models of different depth, few of them train the deep layers of a stage and all of them its first
ones. After the mean, the coordinator adds what the first layer of a stage learned to what the later layers of the same
shape did. Put over any method that shares weights; devices do what that one tells, and what travels is the same.

    d_k = h_k + theta h_0,  g_k <- scale d_k,  scale = (||g_k|| + ||g_0||)/2    for every target k and its anchor 0

| rule | theta | |
|---|---|---|
| `released` | +abs(<g_0, g_k>) / (<g_0, g_0> + 1e-7), at most theta_max | the authors' code; h = g/(norm + 1e-7) |
| `theorem` | 0 where <h_0, h_k> >= 0, else -<h_0, h_k> | Theorem 3.1 on normalised gradients |
| `text` | -<h_0, h_k>, whatever its sign | section 3.3 and Algorithm 1 |
| `no_opt` | 1 | ablation |
| `no_norm` | as released; g_k + theta g_0, unscaled | ablation |
| `sum` | 1; g_k + g_0, unscaled | ablation |
| `off` | | the method underneath |

The three rules agree only for <h_0, h_k> < 0: the published numbers come from the first, hence the default. Every
element of the result is clipped to +-clip. A kernel whose g_k or g_0 is zero, because nobody trained it, stays as the
mean left it, unclipped. All g are those of the mean: a changed one changes no other.

Deviations: the mean is weighted as the method underneath does it, by n_k, so that the two differ in the transform
alone; the code's own is `weights = "uniform"`. 1x1 convolutions, matrices and vectors are taken whole: one element has
no direction. `server_lr` (the code's 1/E for transformers) multiplies the mean step of all parameters before the rule;
buffers and a method's own tensors move as they do underneath.

Legend: g = mean update (new - old), h = g/||g||, anchor 0 = first layer, target k = later one, of one shape and stage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edge_client.errors import InputError
from edge_client.methods.base import Frozen, Header, Method, Server, State
from edge_client.methods.parameters import InCoParameters
from edge_client.models.anchors import anchors
from edge_client.models.contract import Model
from edge_client.params import IndexMap, is_buffer
from edge_client.wire.container import EXTRA_PREFIX

__all__ = ["InCoServer", "Step", "method", "transformed"]

_PAPER = "Chan et al., ICLR 2024, arXiv:2308.11464"
_ANCHORS = "anchors"  # among the notes: [anchor, target, target, ...], each the number of a tensor of the model
_EPSILON = 1e-7
_DOT_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """g of a tensor, a row for each kernel, and <g, g> of each row."""

    rows: Tensor  # [n, elements of a kernel]
    squares: Tensor  # [n]

    @classmethod
    def of(cls, change: Tensor, granularity: str) -> Step:
        """A convolution's (out, in) kernels, if they have more than one element each; otherwise one row."""
        kernels = granularity == "kernel" and _kernel_size(change) > 1
        rows = change.reshape(-1, _kernel_size(change)) if kernels else change.reshape(1, -1)
        return cls(rows, _dots(rows, rows))


def transformed(target: Step, anchor: Step, parameters: InCoParameters) -> Tensor:
    """The new g of the target, in rows."""
    own, others = _FACTORS[parameters.rule](target.squares, _dots(target.rows, anchor.rows), anchor.squares, parameters)
    untouched = (target.squares == 0) | (anchor.squares == 0)
    own, others = own.masked_fill(untouched, 1.0), others.masked_fill(untouched, 0.0)
    result = target.rows * own[:, None].to(target.rows.dtype)
    result.addcmul_(anchor.rows, others[:, None].to(target.rows.dtype))
    if parameters.clip > 0:
        result.clamp_(-parameters.clip, parameters.clip)
        if bool(untouched.any()):
            result[untouched] = target.rows[untouched]
    return result


def _kernel_size(tensor: Tensor) -> int:
    """1 for matrices and vectors."""
    return tensor[0, 0].numel() if tensor.ndim > 2 else 1


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """The inner product of each pair of rows: [n]; of one long row in float64."""
    if len(x) > 1:
        return torch.mv(x * y, torch.ones(x.shape[1], dtype=x.dtype))  # twice as fast as a sum over so short an axis
    pieces = zip(torch.split(x[0], _DOT_PIECE), torch.split(y[0], _DOT_PIECE), strict=True)
    return torch.stack([torch.dot(a.double(), b.double()) for a, b in pieces]).sum(dim=0, keepdim=True)


# what the rows of target and anchor are multiplied with, from <g_k, g_k>, <g_k, g_0>, <g_0, g_0>
Factors = tuple[Tensor, Tensor]


def _released(kk: Tensor, k0: Tensor, oo: Tensor, parameters: InCoParameters) -> Factors:
    theta = _raw_theta(k0, oo, parameters)
    scale = (kk.sqrt() + oo.sqrt()) / 2
    return scale / (kk.sqrt() + _EPSILON), theta * scale / (oo.sqrt() + _EPSILON)


def _raw_theta(k0: Tensor, oo: Tensor, parameters: InCoParameters) -> Tensor:
    return (k0.abs() / (oo + _EPSILON)).clamp(max=parameters.theta_max)


def _theorem(kk: Tensor, k0: Tensor, oo: Tensor, parameters: InCoParameters) -> Factors:
    return _projected(kk, k0.clamp(max=0), oo)


def _text(kk: Tensor, k0: Tensor, oo: Tensor, parameters: InCoParameters) -> Factors:
    return _projected(kk, k0, oo)


def _projected(kk: Tensor, k0: Tensor, oo: Tensor) -> Factors:
    """h_k - beta h_0, times the scale; beta = <h_0, h_k>."""
    scale = (kk.sqrt() + oo.sqrt()) / 2
    return scale / kk.sqrt(), -scale * k0 / (kk.sqrt() * oo)


def _no_opt(kk: Tensor, k0: Tensor, oo: Tensor, parameters: InCoParameters) -> Factors:
    scale = (kk.sqrt() + oo.sqrt()) / 2
    return scale / (kk.sqrt() + _EPSILON), scale / (oo.sqrt() + _EPSILON)


def _no_norm(kk: Tensor, k0: Tensor, oo: Tensor, parameters: InCoParameters) -> Factors:
    return torch.ones_like(kk), _raw_theta(k0, oo, parameters)


def _sum(kk: Tensor, k0: Tensor, oo: Tensor, parameters: InCoParameters) -> Factors:
    return torch.ones_like(kk), torch.ones_like(kk)


_FACTORS: Mapping[str, Callable[[Tensor, Tensor, Tensor, InCoParameters], Factors]] = {
    "released": _released,
    "theorem": _theorem,
    "text": _text,
    "no_opt": _no_opt,
    "no_norm": _no_norm,
    "sum": _sum,
}


class InCoServer:
    """The fold of the method underneath, and the transform over it: new + (T(g) - g)."""

    def __init__(self, parameters: InCoParameters, base: Server) -> None:
        self._parameters = parameters
        self._base = base

    def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new state; the anchors of a stage are held until its last target has passed."""
        anchor_of = _anchor_names(state) if self._parameters.rule != "off" else {}
        last = {anchor: target for target, anchor in anchor_of.items()}  # the last target of each anchor
        held: dict[str, Step] = {}
        counted = frozen if self._parameters.weights == "samples" else _Uniform(frozen)
        for name, new in self._base.fold(state, counted, round=round):
            if name in anchor_of:
                anchor = held[anchor_of[name]]
                if last[anchor_of[name]] == name:
                    del held[anchor_of[name]]
                self._transform(new, self._step(name, new, state), anchor)
            elif name in last:
                held[name] = Step.of(self._step(name, new, state), self._parameters.granularity)
            elif self._is_scaled(name, new):
                self._step(name, new, state)
            yield name, new

    def _is_scaled(self, name: str, new: Tensor) -> bool:
        trained = new.is_floating_point() and not is_buffer(name) and not name.startswith(EXTRA_PREFIX)
        return self._parameters.server_lr != 1 and trained

    def _step(self, name: str, new: Tensor, state: State) -> Tensor:
        """g, times the server's learning rate, which `new` follows; 1 leaves its bits alone."""
        change, rate = state.tensor(name), self._parameters.server_lr
        torch.sub(new, change, out=change)
        if rate != 1:
            new.add_(change, alpha=rate - 1)
            change.mul_(rate)
        return change

    def _transform(self, new: Tensor, change: Tensor, anchor: Step) -> None:
        """In place."""
        step = Step.of(change, self._parameters.granularity)
        result = transformed(step, anchor, self._parameters).sub_(step.rows).view(change.shape)
        if len(step.rows) == 1 and change.ndim > 2:  # kernels that nobody trained, inside a tensor that is taken whole
            result[~change.flatten(2).any(dim=2)] = 0
        new.add_(result)


class _Uniform:
    """The frozen updates, each of them with the same weight; one without samples still counts for nothing."""

    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen
        self.headers: Sequence[Header] = tuple(_counted_once(header) for header in frozen.headers)
        self.num_devices = frozen.num_devices
        self.momentum = frozen.momentum

    def column(self, name: str) -> Iterator[tuple[Header, Tensor, IndexMap | None]]:
        for header, value, place in self._frozen.column(name):
            yield _counted_once(header), value, place


def _counted_once(header: Header) -> Header:
    return dataclasses.replace(header, num_samples=min(1, header.num_samples))


def _anchor_names(state: State) -> dict[str, str]:
    """Target -> anchor, as noted when the run began."""
    names = state.names()
    return {names[target]: names[anchor] for anchor, *targets in state.notes[_ANCHORS] for target in targets}


def _notes(below: Callable[[Model], Mapping[str, Any]], model: Model) -> Mapping[str, Any]:
    """By number: the names of a deep model's weights would not fit into what a container says of itself."""
    number = {name: index for index, name in enumerate(model.state_dict())}
    groups: dict[str, list[int]] = {}
    for target, anchor in anchors(model).items():
        groups.setdefault(anchor, [number[anchor]]).append(number[target])
    return {**below(model), _ANCHORS: list(groups.values())}


def _check(below: Callable[[Model], None], model: Model) -> None:
    below(model)
    if model.anchor_names is None and not hasattr(model, "units"):
        raise InputError(
            "method 'inco' needs the shape of a sample on the server, too; tell it, Task(input=(3, 96, 96))"
        )
    found, order = anchors(model), list(model.state_dict())
    if not found:
        raise InputError(
            "method 'inco' changes weights of the shape of an earlier one in their stage, and this model has none; "
            "use a deeper one (such as resnet14 or preresnet20; of a task, several layers of one shape in a unit), "
            "or the method underneath by itself"
        )
    for target, anchor in found.items():
        if order.index(anchor) > order.index(target):
            raise InputError(
                f"method 'inco': {anchor!r} runs before {target!r} and is defined after it; "
                "define the layers of the model in the order in which they run"
            )


def method(parameters: InCoParameters, base: Method) -> Method:
    """InCo over another method, for the registry."""
    made = dataclasses.replace(
        base,
        name="inco",
        paper=_PAPER if base.name == "fedavg" else f"{_PAPER}; {base.paper}",
        parameters=parameters,
    )
    if parameters.rule == "off" and parameters.weights == "samples" and parameters.server_lr == 1:
        return made
    if parameters.rule == "off":
        return dataclasses.replace(made, server=InCoServer(parameters, base.server))
    return dataclasses.replace(
        made,
        server=InCoServer(parameters, base.server),
        notes=partial(_notes, base.notes),
        check=partial(_check, base.check),
    )
