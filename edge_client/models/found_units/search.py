"""Finds where any module can be cut into units that run by themselves, without a change of its forward().

    find_units(module, sample)      `FoundUnits`; the module is as it was before

A call is a good end of a unit if it puts out one floating tensor with the batch first, and running the rest from there
gives exactly what forward() gives. It is run with a leaf that requires gradients: an operation in place that follows
at once fails there, as it would in training, and the next call is tried. Then each unit is back-propagated by itself,
which tells whose parameters it has; weights that two units use join all units between them. What is left is compared
with forward() in values, gradients and buffers, bit for bit (`checks`), or it is not used.
Does not cover: sequences, and units that a task names (`user_module`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from edge_client.errors import InputError
from edge_client.models.found_units.calls import Call, Shape, call_model, calls_go_to, fingerprint, first, record
from edge_client.models.found_units.checks import (
    Chain,
    buffers_of,
    chain_gradients,
    equal,
    problem_of,
    restore,
)
from edge_client.models.found_units.ownership import joined, spans_by_unit
from edge_client.models.found_units.result import MAX_UNITS, FoundUnits
from edge_client.models.found_units.running import PartRunner
from edge_client.user_code import UserCode

__all__ = ["SAMPLES", "find_units", "module_hash", "recorded_calls"]

SAMPLES = 4  # that a search needs: the last check has a number of them that was not recorded
_LOOKED_INTO = 1 / 8  # a call with a larger share of the cost is looked into
_LEAST = 1 / 64  # a unit with a smaller share is joined with the next
_ENOUGH = 3  # cuts; with fewer, the input itself may have to cross them

_NO_BATCH = "forward() makes other calls for another number of samples"
_NOTHING = "nothing in forward() can be separated"
_INPUT_CROSSES = "the input is used behind blocks of several shapes"


def find_units(module: nn.Module, sample: Any) -> FoundUnits:
    """The units of a module; `sample` is an input of `SAMPLES` samples."""
    with _unchanged(module), torch.enable_grad():  # without gradients torch may take other kernels, with other bits
        module.eval()
        calls = record(module, sample)
        if calls is None:
            return _whole(module, _NO_BATCH)
        search = _Search(module, calls, sample)
        search.find_cuts()
        if not search.chain.cuts:
            return _whole(module, _NOTHING, calls)
        if search.chain.needs_input and not search.carries_equal_shapes():
            return _whole(module, _INPUT_CROSSES, calls)
        restore(module, search.buffers)
        try:
            with _any_error():
                problem = problem_of(search.chain, sample)
        except InputError as error:
            problem = str(error).removeprefix("model: ")
        if problem:
            return _whole(module, problem, calls)
        return search.result()


def recorded_calls(module: nn.Module, sample: Any) -> list[Call]:
    """The calls of a module, without gradients; none if they depend on the number of samples."""
    with _unchanged(module), torch.no_grad():
        module.eval()
        return record(module, sample) or []


def module_hash(module: nn.Module) -> str:
    """A hash of the names and shapes of all tensors that travel."""
    rows = [[name, list(tensor.shape), str(tensor.dtype)] for name, tensor in module.state_dict().items()]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _whole(module: nn.Module, reason: str, calls: list[Call] | None = None) -> FoundUnits:
    return FoundUnits(
        names=("model",),
        calls=fingerprint(calls or []),
        module=module_hash(module),
        versions=str(torch.__version__),
        reason=reason,
    )


def _any_error() -> UserCode:
    """Errors of the module become `InputError`; running out of memory stays what it is: it says nothing about a cut."""
    return UserCode("model", "a part of forward()")


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Modes, buffers and the global generator as they were."""
    random, saved = torch.get_rng_state(), buffers_of(module)
    modes = [(part, part.training) for part in module.modules()]
    try:
        yield
    finally:
        restore(module, saved)
        for part, mode in modes:
            part.training = mode
        torch.set_rng_state(random)


class _Search:
    def __init__(self, module: nn.Module, calls: list[Call], sample: Any) -> None:
        self.module, self.calls, self.sample = module, calls, sample
        self.chain = Chain(PartRunner(module, calls))
        self.buffers = buffers_of(module)
        self.owned: list[set[str]] = []

    def find_cuts(self) -> None:
        """Fill in the chain's cuts; none if there is none."""
        _add_costs(self.module, self.calls)
        candidates = _candidates(self.module, self.calls)
        two = first(self.sample, 2)
        expected, outputs = self._outputs(two, set(candidates))
        valid: list[int] = []
        for self.chain.needs_input in (False, True):
            valid = [number for number in candidates if self._holds(number, two, outputs[number], expected)]
            if len(valid) >= _ENOUGH:
                break
        self.chain.cuts = _with_pooling_in_head(self.module, self.calls, valid, _chosen(self.calls, valid))
        while self.chain.cuts and not self._divide():
            restore(self.module, self.buffers)

    def _outputs(self, x: Any, wanted: set[int]) -> tuple[Any, dict[int, Tensor]]:
        """forward()'s output, and those of some calls on the way, as they were before anything changed them."""
        outputs: dict[int, Tensor] = {}
        count = 0

        def keep(path: str, forward: Any, args: Any, kwargs: Any) -> Any:
            nonlocal count
            number, count = count, count + 1
            out = forward(*args, **kwargs)
            if number in wanted:
                outputs[number] = out.detach().clone()
            return out

        with calls_go_to(self.module, keep):
            return call_model(self.module, first(x, 2)), outputs

    def _holds(self, number: int, x: Any, output: Tensor, expected: Any) -> bool:
        carried = output.clone().requires_grad_()
        try:
            with _any_error():  # whatever a module raises when it meets a meta tensor
                out = self.chain.runner.run(number, None, first(x, 2), carried, needs_input=self.chain.needs_input)
        except InputError:
            return False
        return equal(out, expected)

    def _divide(self) -> bool:
        """Whose parameters each unit has, by a backward of each; drops the cuts that stand in the way."""
        self.module.train()
        try:
            with _any_error():
                gradients, _ = chain_gradients(self.chain, self.sample)
        except InputError:  # in training something else happens behind a cut, such as an operation in place
            del self.chain.cuts[max(0, self.chain.running - 1)]
            return False
        finally:
            self.module.eval()
        self.chain.cuts, self.owned = joined(self.module, self.calls, self.chain.cuts, [set(g) for g in gradients])
        return True

    def carries_equal_shapes(self) -> bool:
        """Whether one tensor can hold what is carried and the input, wherever the model is cut."""
        return len({self.calls[cut].leaves[0].two for cut in self.chain.cuts}) == 1

    def result(self) -> FoundUnits:
        """What travels."""
        return FoundUnits(
            names=_names(self.calls, self.chain.cuts),
            cuts=tuple(self.chain.cuts),
            spans=spans_by_unit(self.module, self.calls, self.chain.cuts, self.owned),
            needs_input=self.chain.needs_input,
            calls=fingerprint(self.calls),
            module=module_hash(self.module),
            versions=str(torch.__version__),
        )


def _names(calls: list[Call], cuts: list[int]) -> tuple[str, ...]:
    """Each unit has the path of the call that it ends with; the last one that of what it calls last."""
    behind = [call.path for call in calls[calls[cuts[-1]].end :] if not call.has_inside]
    names: list[str] = []
    for path in [*(calls[cut].path for cut in cuts), behind[-1].split(".")[0] if behind else "output"]:
        number, name = 2, path
        while name in names:
            name, number = f"{path}-{number}", number + 1
        names.append(name)
    return tuple(names)


def _add_costs(module: nn.Module, calls: list[Call]) -> None:
    """Shares of all activations and of all parameters, so that neither hides the other (VGG); they add up to 2."""
    sizes = {path: sum(p.numel() for p in part.parameters(recurse=False)) for path, part in module.named_modules()}
    activations = max(1.0, sum(call.cost for call in calls))
    parameters = max(1, sum(sizes.values()))
    for call in calls:
        call.cost = call.cost / activations + sizes.pop(call.path, 0) / parameters
    for call in reversed(calls):
        if call.parents:
            calls[call.parents[-1]].cost += call.cost


def _with_pooling_in_head(module: nn.Module, calls: list[Call], valid: list[int], chosen: list[int]) -> list[int]:
    """The last unit begins before maps or tokens become a vector: then a head can be given those of any other unit."""
    owners = _owners(module)
    earlier = [number for number in reversed(valid) if chosen and calls[number].end < calls[chosen[-1]].end]
    for number in earlier if chosen and len(calls[chosen[-1]].leaves[0].two) == 2 else []:
        if any(call.path in owners for call in calls[calls[number].end : calls[chosen[-1]].end]):
            break
        if len(calls[number].leaves[0].two) > 2:
            return [*(cut for cut in chosen if calls[cut].end < calls[number].end), number]
    return chosen


def _owners(module: nn.Module) -> set[str]:
    """Paths of the submodules that have parameters themselves."""
    return {path for path, part in module.named_modules() if any(True for _ in part.parameters(recurse=False))}


def _candidates(module: nn.Module, calls: list[Call]) -> list[int]:
    """Calls by the order in which they end, large ones looked into; each puts out one floating tensor per sample.

    Behind a cut something is left to train: the head has the last of the parameters.
    """
    owners = _owners(module)
    last = max((call.number for call in calls if call.path in owners), default=0)
    total = sum(call.cost for call in calls if not call.parents)
    looked_into = {call.number for call in calls if call.has_inside and call.cost > _LOOKED_INTO * total}
    shown = [call for call in calls if all(parent in looked_into for parent in call.parents)]
    shown.sort(key=lambda call: (call.end, -call.number))
    return [call.number for call in shown if call.end <= last and _carries_one(call)]


def _carries_one(call: Call) -> bool:
    if len(call.leaves) != 1 or call.spec is None or not isinstance(call.leaves[0], Shape):
        return False
    shape = call.leaves[0]
    is_tensor = isinstance(tree_unflatten([torch.empty(0)], call.spec), Tensor)
    return (
        is_tensor and shape.dtype.is_floating_point and len(shape.two) > 1 and (shape.two[0], shape.three[0]) == (2, 3)
    )


def _chosen(calls: list[Call], valid: list[int]) -> list[int]:
    """Of cuts with little between them the last; the first and the last unit may be small."""
    leaves = [call for call in calls if not call.has_inside]
    ends = {number: sum(call.cost for call in leaves if call.end <= calls[number].end) for number in valid}
    total = sum(call.cost for call in leaves)
    chosen: list[int] = []
    for number in valid:
        if chosen and ends[number] - ends[chosen[-1]] < _LEAST * total:
            if len(chosen) > 1:
                chosen[-1] = number
            continue
        chosen.append(number)
    while len(chosen) >= MAX_UNITS:
        del chosen[1::2]
    return chosen
