"""A user's own module as a model: its units in order, which must be all of it, or units that are found.

    parts(module, units)                    what needs no data: names, parameters, types
    adopt(module, units, input_shape=...)   also runs a random batch: the units one after another must give `forward()`

A functional ReLU between two units would be lost without a sound when the units run by themselves, and a parameter
outside of them would travel without ever being trained; both are errors that say what to change. Parameters keep the
names that they have in the user's module. Units of a module that is no sequence are found, if nobody names them
(`found_units`); one that cannot be cut is one unit, `model`, and trains whole, in microbatches and with recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from edge_client.errors import InputError
from edge_client.models.contract import Model, children_of, describe
from edge_client.models.found_units.adoption import found_model, whole_model
from edge_client.models.found_units.model import FoundModel
from edge_client.models.found_units.result import FoundUnits
from edge_client.wire.container import EXTRA_PREFIX

__all__ = ["adopt", "check_shapes", "parts"]

_SEED = 0x0FED
_BATCH = 2
_MAX_TENSORS = 8192  # of a container, as are the characters of a name below its prefix
_MAX_NAME_CHARS = 240
_FIX = "put what forward() does there into a unit, as a module (nn.ReLU, nn.Flatten, ...), or name fewer, larger units"


def parts(module: object, units: Sequence[str] | None) -> Model:
    """The module as units in order, without their shapes; raises `InputError` for what no data is needed to see."""
    if not isinstance(module, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, got {type(module).__name__}")
    if units is None and not isinstance(module, nn.Sequential):
        _check_names(module)
        _check_tensors(module)
        return whole_model(module)
    if not children_of(module):
        raise InputError(f"model: {type(module).__name__} has no submodules; a model needs at least one unit")
    reserved = [name for name in children_of(module) if hasattr(Model, name) or name in Model.__annotations__]
    if reserved:
        raise InputError(f"model: {_some(reserved)}: a name that fedfit needs itself; call the submodule otherwise")
    order = tuple(children_of(module)) if units is None else tuple(units)
    _check_units(module, order)
    _check_owners(module, order)
    _check_tensors(module)
    return Model(children_of(module), order)


def _check_units(module: nn.Module, order: Sequence[str]) -> None:
    known = {name for name, _ in module.named_modules(remove_duplicate=False) if name}
    for name in order:
        if name not in known:
            raise InputError(f"model: no unit {name!r}; {type(module).__name__} has {_some(children_of(module))}")
    times = Counter(order)
    for name in order:
        for outer in _outer(name):
            if times[outer] > (outer == name):
                raise InputError(f"model: units {outer!r} and {name!r} overlap; every part belongs to one unit")


def _outer(name: str) -> list[str]:
    """A dotted name and all that it lies in: a.b.c, a.b, a."""
    levels = name.split(".")
    return [".".join(levels[:count]) for count in range(len(levels), 0, -1)]


def _check_owners(module: nn.Module, order: Sequence[str]) -> None:
    """Every parameter and every buffer that travels is in exactly one unit, under one name."""
    _check_names(module)
    units = set(order)
    outside = [name for name in module.state_dict() if units.isdisjoint(_outer(name))]
    if outside:
        raise InputError(
            f"model: {_some(outside)} belong{'s' if len(outside) == 1 else ''} to no unit ({_some(order)}); "
            "add their module to units, or remove them"
        )


def _check_names(module: nn.Module) -> None:
    """Every tensor has one name: under two it would travel twice."""
    names: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(tensor), []).append(name)
    shared = [owners for owners in names.values() if len(owners) > 1]
    if shared:
        raise InputError(f"model: {_some(shared[0])} are one tensor under {len(shared[0])} names; give each its own")


def _check_tensors(module: nn.Module) -> None:
    state: dict[str, Any] = module.state_dict()
    if len(state) > _MAX_TENSORS:
        raise InputError(f"model: expected at most {_MAX_TENSORS} tensors, got {len(state)}; only so many travel")
    for name, tensor in state.items():
        if not name.isascii() or len(name) > _MAX_NAME_CHARS:
            raise InputError(f"model: {name[:80]!r}: expected a name of at most {_MAX_NAME_CHARS} ASCII characters")
        if name.startswith(EXTRA_PREFIX):
            raise InputError(f"model: {name[:80]!r}: names that begin with {EXTRA_PREFIX!r} are those of methods")
        dtype = torch.float32 if isinstance(tensor, Tensor) and tensor.is_floating_point() else torch.int64
        if not isinstance(tensor, Tensor) or (tensor.dtype != dtype and not is_lazy(tensor)):
            came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(f"model: {name!r}: expected float32 or int64, got {came}; only these travel")
    if not any(param.requires_grad for param in module.parameters()):
        raise InputError("model: expected at least one parameter that can be trained, got none")


def check_shapes(model: nn.Module) -> None:
    """Raise `InputError` if some parameter has no shape before data went through."""
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise InputError(f"model: {_some(lazy)} have no shape yet; tell the shape of a sample, Task(input=(3, 96, 96))")


def adopt(
    module: object,
    units: Sequence[str] | None,
    *,
    input_shape: Sequence[int],
    num_classes: int,
    found: FoundUnits | None = None,
) -> Model:
    """The module as a model with the whole contract, checked on a random batch; `found` came with the run."""
    model = parts(module, units)
    assert isinstance(module, nn.Module)
    if isinstance(model, FoundModel):
        return _adopt_any(module, input_shape, num_classes, found)
    with _repeatable(module), torch.no_grad():
        x = _random_batch(input_shape, may_be_negative=len(model.order) > 1)
        expected, calls = _watch(module, model, x)
        _check_logits(expected, num_classes, x)
        # a sequence may have one activation twice; a single unit has no order
        if type(module).forward is not nn.Sequential.forward and len(model.order) > 1:
            _check_chain(model.order, calls, x, expected)
        _check_result(model, x, expected)
        describe(model, input_shape=input_shape)
    _check_tensors(module)  # again: a lazy module has made its parameters now
    return model


def _adopt_any(module: nn.Module, input_shape: Sequence[int], num_classes: int, found: FoundUnits | None) -> FoundModel:
    """A module without named units: they are found."""
    with _repeatable(module), torch.no_grad():
        x = _random_batch(input_shape, may_be_negative=False)
        torch.manual_seed(_SEED)
        _check_logits(module(x.clone()), num_classes, x)
    _check_tensors(module)  # again: a lazy module has made its parameters now
    model = found_model(module, input_shape=input_shape, given=found)
    with _repeatable(module), torch.no_grad():
        describe(model, input_shape=input_shape, by_shape=True)
    return model


def _random_batch(input_shape: Sequence[int], *, may_be_negative: bool) -> Tensor:
    """Two samples. Negative numbers show a ReLU between units; a module that looks up words takes none."""
    draw = torch.randn if may_be_negative else torch.rand
    return draw(_BATCH, *input_shape, generator=torch.Generator().manual_seed(_SEED))


@contextmanager
def _repeatable(module: nn.Module) -> Iterator[None]:
    """Evaluation mode, and the global generator as it was."""
    state, was_training = torch.get_rng_state(), module.training
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
        for part, mode in modes:  # a part that its owner keeps in another mode stays so
            part.training = mode
        torch.set_rng_state(state)


@dataclass(frozen=True, slots=True)
class _Call:
    unit: str
    inputs: tuple[object, ...]
    output: object


def _watch(module: nn.Module, model: Model, x: Tensor) -> tuple[object, list[_Call]]:
    """`forward()` and what it gave to each unit and got from it, in the order of the calls."""
    calls: list[_Call] = []
    received: dict[str, tuple[object, ...]] = {}  # by the units that run: copied before they may change it in place

    def before(unit: str) -> Any:
        def copy(part: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            received[unit] = tuple(_copy(item) for item in (*args, *kwargs.values()))

        return copy

    def after(unit: str) -> Any:
        def note(part: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            calls.append(_Call(unit, received.pop(unit), _copy(output)))

        return note

    units = [(unit, model.get_submodule(unit)) for unit in model.order]
    hooks = [part.register_forward_pre_hook(before(unit), with_kwargs=True) for unit, part in units]
    hooks += [part.register_forward_hook(after(unit), with_kwargs=True) for unit, part in units]
    try:
        torch.manual_seed(_SEED)
        return module(x.clone()), calls
    finally:
        for hook in hooks:
            hook.remove()


def _copy(value: object) -> object:
    """As it is now: an in-place function between two units would change the output that was seen."""
    return value.clone() if isinstance(value, Tensor) else value


def _check_logits(expected: object, num_classes: int, x: Tensor) -> None:
    if not isinstance(expected, Tensor) or tuple(expected.shape) != (len(x), num_classes):
        came = list(expected.shape) if isinstance(expected, Tensor) else type(expected).__name__
        raise InputError(
            f"model: expected one score for each of {num_classes} classes, [{len(x)}, {num_classes}] for "
            f"{len(x)} samples of {list(x.shape[1:])}, got {came}"
        )


def _check_chain(order: Sequence[str], calls: Sequence[_Call], x: Tensor, expected: object) -> None:
    """Each unit is called once, in order, with exactly what the one before it gave."""
    called = [call.unit for call in calls]
    for unit in order:
        if called.count(unit) != 1:
            raise InputError(f"model: forward() calls unit {unit!r} {called.count(unit)} times, expected once; {_FIX}")
    if called != list(order):
        raise InputError(f"model: forward() calls the units as {_some(called)}, Task(units=...) has {_some(order)}")
    received: object = x
    before = "the input"
    for call in calls:
        if len(call.inputs) != 1 or not _same(call.inputs[0], received):
            raise InputError(
                f"model: units {before} and {call.unit!r}: forward() changes the data between them, the units in "
                f"order do not; {_FIX}"
                if before != "the input"
                else f"model: forward() changes its input before unit {call.unit!r}; {_FIX}"
            )
        received, before = call.output, repr(call.unit)
    if not _same(expected, received):
        raise InputError(f"model: forward() changes the output of the last unit {before}; {_FIX}")


def _check_result(model: Model, x: Tensor, expected: object) -> None:
    """The whole, once more by itself: what one unit remembers of another shows only here."""
    torch.manual_seed(_SEED)
    result = model(x.clone())
    if not _same(result, expected):
        raise InputError(f"model: units {_some(model.order)} in order give another result than forward(); {_FIX}")


def _same(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other) or torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True))


def _some(names: Sequence[str] | dict[str, Any]) -> str:
    listed = [repr(name) for name in names]
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
