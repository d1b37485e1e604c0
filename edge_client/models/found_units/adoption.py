"""Any module as a model: with the units that came with the run, that were found before on this machine, or found now.

A search takes about 25 passes of two samples and needs the whole model, so its result is remembered by the hashes of
the module and its calls. Units that came with a run are used only if this machine's module makes the same calls.
Does not cover: what a module must be in any case (`user_module`), the search itself (`search`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from edge_client import durable
from edge_client.errors import FedfitError
from edge_client.models.found_units.calls import Call, fingerprint
from edge_client.models.found_units.model import FoundModel
from edge_client.models.found_units.result import FoundUnits, UnitsDifferError
from edge_client.models.found_units.search import SAMPLES, find_units, module_hash, recorded_calls
from edge_client.records import from_map, to_map

__all__ = ["found_model", "remember", "whole_model"]

_log = logging.getLogger(__name__)

_SEED = 0x0FED
_FORMAT = 1  # of what a search finds: another one is searched anew
_MAX_FILE_BYTES = 2**20


def found_model(module: nn.Module, *, input_shape: Sequence[int], given: FoundUnits | None = None) -> FoundModel:
    """The module as units, not yet described; `given` came with the run. Raises `UnitsDifferError`."""
    sample = torch.rand(SAMPLES, *input_shape, generator=torch.Generator().manual_seed(_SEED))
    calls = recorded_calls(module, sample)
    units = given
    if given is not None:
        _check_same(module, calls, given)
    else:
        units = _remembered(module_hash(module), fingerprint(calls))
    if units is None:
        units = find_units(module, sample)
        remember(units)
    return FoundModel(module, calls if units.is_cut else [], units, sample=input_shape)


def whole_model(module: nn.Module) -> FoundModel:
    """The module as one unit, which can be made without data."""
    return FoundModel(module, [], FoundUnits(names=("model",)), sample=())


def _check_same(module: nn.Module, calls: list[Call], given: FoundUnits) -> None:
    if given.module != module_hash(module):
        raise UnitsDifferError(
            "model: its tensors have other names or shapes here than on the server; the same versions of all libraries "
            f"make them equal: here torch {torch.__version__}, there torch {given.versions}"
        )
    if given.is_cut and given.calls != fingerprint(calls):
        raise UnitsDifferError(
            "model: forward() calls its submodules otherwise here than on the server, so that its units differ; the "
            f"same versions of all libraries make them equal: here torch {torch.__version__}, there torch "
            f"{given.versions}"
        )


def remember(units: FoundUnits) -> None:
    """Keep them for the next time that this machine builds the module; by rename, they can be found again."""
    path = _path(units.module, units.calls)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(to_map(units)), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("cannot keep the units of a model in %s: %s", path.parent, error.strerror)


def _remembered(module: str, calls: str) -> FoundUnits | None:
    path = _path(module, calls)
    try:
        with open(path, "rb") as file:
            units: FoundUnits = from_map(FoundUnits, json.loads(file.read(_MAX_FILE_BYTES)), where=str(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, FedfitError) as error:
        _log.warning("%s: not usable as the units of a model, found anew (%s)", path, str(error)[:200])
        return None
    return units if (units.module, units.calls) == (module, calls) else None


def _path(module: str, calls: str) -> Path:
    key = hashlib.sha256(json.dumps([_FORMAT, module, calls]).encode()).hexdigest()
    return durable.cache_dir() / "units" / f"{key}.json"
