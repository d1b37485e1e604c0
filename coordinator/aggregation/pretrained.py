"""A run that starts from a file of weights, `init = "file:mobilenet.safetensors"`: which tensor goes where.

    resolved(file, base)     before the run starts: the file's whole path, and its hash, which is part of the run
    load(model, run)         on the server: fills the model, and says what was left out

By name and shape, whatever prefix all names of the file have in common. A head of another shape is left out, and keeps
its random weights; every other difference is an error, and then nothing of the file is in the model.
Does not cover: reading the file (`foreign_weights`). `resolved` needs no torch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.config.run_file import FILE_INIT, RunFile
from edge_client.data.input_sums import MEAN, SCALE
from edge_client.durable import sha256_file
from edge_client.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from edge_client.models.contract import Model

__all__ = ["load", "resolved"]

_log = logging.getLogger(__name__)

# what files lack: torch's counter in older ones, and the numbers of train.normalise
_NOT_IN_FILES = ("num_batches_tracked", MEAN, SCALE)
_PREFIXES = ("module.", "model.")


def resolved(file: RunFile, base: Path) -> RunFile:
    """The run with the whole path of its weights, which lie beside the run file, and their hash."""
    section = file.model or file.task
    if section is None or not section.init.startswith(FILE_INIT):
        return file
    path = (base.parent / section.init.removeprefix(FILE_INIT)).absolute()
    try:
        sha256 = sha256_file(path)
    except OSError as error:
        raise InputError(f"{base}: init: {path} cannot be read: {error.strerror}") from error
    if section.init_sha256 not in ("", sha256):
        raise InputError(f"{base}: init-sha256 is {section.init_sha256}, but {path} has {sha256}")
    init = f"{FILE_INIT}{path}"
    if file.model is not None:
        return dataclasses.replace(file, model=dataclasses.replace(file.model, init=init, init_sha256=sha256))
    assert file.task is not None
    return dataclasses.replace(file, task=dataclasses.replace(file.task, init=init, init_sha256=sha256))


def load(model: Model, run: RunFile) -> str:
    """Fill the model; returns what was taken, in words. Raises `InputError`, with the model as it was."""
    from coordinator.aggregation.foreign_weights import read_weights

    section = run.model or run.task
    assert section is not None
    path = Path(section.init.removeprefix(FILE_INIT))
    weights: Mapping[str, Tensor] = read_weights(path)
    if section.init_sha256 != sha256_file(path):
        raise InputError(f"{path}: it is another file than when the run was started; start the run again")
    state = model.state_dict()
    weights = _without_prefix(weights, state)
    left_out = _left_out(path, weights, state, _head(model))
    for name, tensor in state.items():
        if name in weights and name not in left_out:
            tensor.copy_(weights[name])
    taken = sum(name in weights and name not in left_out for name in state)
    told = f"{path.name}: {taken} of {len(state)} tensors" + (f"; left out {', '.join(left_out)}" if left_out else "")
    _log.info("%s", told)
    return told


def _without_prefix(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The names as the model has them, if all begin with what a wrapper adds."""
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in weights) and not any(name in state for name in weights):
            return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def _head(model: Model) -> frozenset[str]:
    """The tensors of the last unit; without units, those of the module that has the last parameter."""
    if len(model.order) > 1:
        return frozenset(name for names in model.tensors_of_unit(model.order[-1]) for name in names)
    owner = list(model.state_dict())[-1].rpartition(".")[0]
    return frozenset(name for name in model.state_dict() if name.rpartition(".")[0] == owner)


def _left_out(
    path: Path, weights: Mapping[str, Tensor], state: Mapping[str, Tensor], head: Collection[str]
) -> list[str]:
    """The tensors of the head that do not fit; raises `InputError` for any other difference."""
    missing = [name for name in state if name not in weights and name not in head and not name.endswith(_NOT_IN_FILES)]
    known = {_module(name) for name in head}
    unknown = [name for name in weights if name not in state and _module(name) not in known]
    if missing or unknown:
        matching = sum(name in weights for name in state)
        raise InputError(
            f"{path}: {matching} of {len(state)} names match; file: {next(iter(unknown), 'none')}, "
            f"model: {next(iter(missing), 'none')}"
        )
    other_shape = [name for name in state if name in weights and weights[name].shape != state[name].shape]
    wrong = [name for name in other_shape if name not in head]
    if wrong:
        shape, expected = list(weights[wrong[0]].shape), list(state[wrong[0]].shape)
        raise InputError(f"{path}: {wrong[0]!r} is {shape}, the run's model has {expected}")
    return [name for name in state if name in head and (name in other_shape or name not in weights)]


def _module(name: str) -> str:
    return name.rpartition(".")[0]
