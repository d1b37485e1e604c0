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
from edge_client.methods.cards.inco import InCoParameters
from edge_client.models.anchors import anchors
from edge_client.models.contract import Model
from edge_client.params import IndexMap, inner_product, is_buffer
from edge_client.wire.container import EXTRA_PREFIX

__all__ = ["Anchor", "InCoServer", "add_change", "method"]

_ANCHORS = "anchors"  # in the notes: [anchor, target, target, ...] of each, by name
_MOST_NOTED = 12_000  # characters: a container says up to 16,384 bytes of itself
_EPSILON = 1e-7
_Factors = tuple[Tensor, Tensor]  # what g_k and g_0 are multiplied with: of each row [n], or of all [1]
_PIECE = 1 << 17  # elements that are in the cache while all is done to them, in memory that is taken once


@dataclass(frozen=True, slots=True)
class Anchor:
    """g_0 of a stage, with what all its targets need of it."""

    change: Tensor
    norms: Tensor  # ||g_0|| of each kernel [n], or of all of it [1]

    @classmethod
    def of(cls, change: Tensor, granularity: str) -> Anchor:
        """A kernel of one element has no direction: such tensors are taken whole."""
        size = _kernel_size(change)
        if size == 1 or granularity == "tensor":
            return cls(change, _total(change, change).sqrt())
        pieces = torch.split(change.view(-1, size), max(1, _PIECE // size))
        room = torch.empty_like(pieces[0])
        return cls(change, torch.cat([_row_products(rows, rows, room[: len(rows)]) for rows in pieces]).sqrt())


def add_change(new: Tensor, target: Tensor, anchor: Anchor, parameters: InCoParameters) -> None:
    """new += T(g_k) - g_k, in place; `target` is g_k."""
    size = _kernel_size(target)
    by_kernel = len(anchor.norms) * size == target.numel()
    step = max(1, _PIECE // size)
    totals = None if by_kernel else (_total(target, anchor.change), _total(target, target))
    pieces = [torch.split(tensor.view(-1, size), step) for tensor in (new, target, anchor.change)]
    scratch = torch.empty_like(pieces[0][0])
    for number, (rows, g_k, g_0) in enumerate(zip(*pieces, strict=True)):
        room = scratch[: len(g_k)]
        product, square = totals or (_row_products(g_k, g_0, room), _row_products(g_k, g_k, room))
        norm_0 = anchor.norms[number * step : (number + 1) * step] if by_kernel else anchor.norms
        _transform(g_k, g_0, (product, square.sqrt(), norm_0), parameters, out=room)
        if not by_kernel and target.ndim > 2:
            _keep(~g_k.any(dim=1), g_k, room)  # kernels that nobody trained, inside a tensor that is taken whole
        rows.add_(room.sub_(g_k))


def _kernel_size(tensor: Tensor) -> int:
    """Elements of an (out, in) kernel; 1 for matrices and vectors."""
    return tensor[0, 0].numel() if tensor.ndim > 2 else 1


def _row_products(x: Tensor, y: Tensor, room: Tensor) -> Tensor:
    """The inner product of each pair of rows; as a matrix product, twice as fast as a sum over so short an axis."""
    return torch.mv(torch.mul(x, y, out=room), torch.ones(x.shape[1], dtype=x.dtype))


def _total(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> of whole tensors: [1]."""
    return torch.tensor([inner_product(x, y)], dtype=torch.float64)


def _transform(
    g_k: Tensor, g_0: Tensor, sizes: tuple[Tensor, Tensor, Tensor], parameters: InCoParameters, *, out: Tensor
) -> None:
    """T(g_k) of each row; one that has no direction, or whose anchor has none, stays as it is."""
    k_factors, anchor_factors = _RULES[parameters.rule](*sizes, parameters)
    _, norm_k, norm_0 = sizes
    torch.mul(g_k, k_factors[:, None].to(g_k.dtype), out=out).addcmul_(g_0, anchor_factors[:, None].to(g_k.dtype))
    if parameters.clip > 0:
        out.clamp_(-parameters.clip, parameters.clip)
    _keep((norm_k * norm_0 == 0).expand(len(g_k)), g_k, out)


def _keep(rows: Tensor, g_k: Tensor, result: Tensor) -> None:
    if bool(rows.any()):
        result[rows] = g_k[rows]


def _released(product: Tensor, norm_k: Tensor, norm_0: Tensor, parameters: InCoParameters) -> _Factors:
    theta = _raw_theta(product, norm_0, parameters)
    scale = (norm_k + norm_0) / 2
    return scale / (norm_k + _EPSILON), theta * scale / (norm_0 + _EPSILON)


def _raw_theta(product: Tensor, norm_0: Tensor, parameters: InCoParameters) -> Tensor:
    return (product.abs() / (norm_0.square() + _EPSILON)).clamp(max=parameters.theta_max)


def _theorem(product: Tensor, norm_k: Tensor, norm_0: Tensor, parameters: InCoParameters) -> _Factors:
    return _text(product.clamp(max=0), norm_k, norm_0, parameters)


def _text(product: Tensor, norm_k: Tensor, norm_0: Tensor, parameters: InCoParameters) -> _Factors:
    """h_k - beta h_0, times the scale; beta = <h_0, h_k>."""
    scale = (norm_k + norm_0) / 2
    return scale / norm_k, -scale * product / (norm_k * norm_0.square())


def _no_opt(product: Tensor, norm_k: Tensor, norm_0: Tensor, parameters: InCoParameters) -> _Factors:
    scale = (norm_k + norm_0) / 2
    return scale / (norm_k + _EPSILON), scale / (norm_0 + _EPSILON)


def _no_norm(product: Tensor, norm_k: Tensor, norm_0: Tensor, parameters: InCoParameters) -> _Factors:
    return torch.ones_like(norm_k), _raw_theta(product, norm_0, parameters)


def _sum(product: Tensor, norm_k: Tensor, norm_0: Tensor, parameters: InCoParameters) -> _Factors:
    return torch.ones_like(norm_k), torch.ones_like(norm_k)


_RULES: Mapping[str, Callable[[Tensor, Tensor, Tensor, InCoParameters], _Factors]] = {
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
        held: dict[str, Anchor] = {}
        counted = frozen if self._parameters.weights == "samples" else _Uniform(frozen)
        for name, new in self._base.fold(state, counted, round=round):
            if name in anchor_of:
                anchor = held[anchor_of[name]]
                if last[anchor_of[name]] == name:
                    del held[anchor_of[name]]
                add_change(new, self._step(name, new, state), anchor, self._parameters)
            elif name in last:
                held[name] = Anchor.of(self._step(name, new, state), self._parameters.granularity)
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
    """Target -> anchor, from the notes of the run; only those of this model, which may be a part of the run's."""
    groups, names = state.notes[_ANCHORS], frozenset(state.names())
    return {target: anchor for anchor, *targets in groups for target in targets if {anchor, target} <= names}


def _notes(base_notes: Callable[[Model], Mapping[str, Any]], model: Model) -> Mapping[str, Any]:
    groups: dict[str, list[str]] = {}
    for target, anchor in anchors(model).items():
        groups.setdefault(anchor, [anchor]).append(target)
    return {**base_notes(model), _ANCHORS: list(groups.values())}


def _check(base_check: Callable[[Model], None], model: Model) -> None:
    base_check(model)
    if model.anchor_names is None and not hasattr(model, "units"):
        raise InputError(
            "method 'inco' needs the shape of a sample on the server, too; tell it, Task(input=(3, 96, 96))"
        )
    anchor_of, order = anchors(model), list(model.state_dict())
    if not anchor_of:
        raise InputError(
            "method 'inco' changes weights of the shape of an earlier one in their stage, and this model has none; "
            "use a deeper one (such as resnet14 or preresnet20; of a task, several layers of one shape in a unit), "
            "or the method underneath by itself"
        )
    if (length := sum(len(name) + 3 for name in {*anchor_of, *anchor_of.values()})) > _MOST_NOTED:
        raise InputError(
            f"method 'inco': the names of the {len(anchor_of)} layers that it would change have {length} characters, "
            f"at most {_MOST_NOTED} can be noted; use a smaller model, or shorter names"
        )
    for target, anchor in anchor_of.items():
        if order.index(anchor) > order.index(target):
            raise InputError(
                f"method 'inco': {anchor!r} runs before {target!r} and is defined after it; "
                "define the layers of the model in the order in which they run"
            )


def method(parameters: InCoParameters, base: Method) -> Method:
    """InCo over another method, for the registry."""
    if parameters.rule == "off" and parameters.weights == "samples" and parameters.server_lr == 1:
        return base
    if parameters.rule == "off":
        return dataclasses.replace(base, server=InCoServer(parameters, base.server))
    return dataclasses.replace(
        base,
        server=InCoServer(parameters, base.server),
        travel=dataclasses.replace(base.travel, notes=partial(_notes, base.travel.notes)),
        check=partial(_check, base.check),
    )
