"""Reads a file of weights that somebody else made: `.safetensors`, or `.pth`, `.pt` and `.bin` of torch. Imports torch.

Only the server opens such files, once; devices get fedfit's own containers. Nothing in a file becomes code: safetensors
are read here, byte by byte, and torch's files with `weights_only`, which torch 2.6 made safe. Sizes are checked before
memory is taken for them.
Does not cover: which tensor belongs where in a model (`pretrained`).
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from edge_client.errors import InputError
from edge_client.user_code import UserCode

__all__ = ["read_weights"]

_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
_MAX_HEADER_BYTES = 2**24
_MAX_TENSORS = 2**16
_MAX_AXES = 8
_MAX_COUNT = 2**48
_LEAST_TORCH = (2, 6)  # before it, weights_only could be got around (CVE-2025-32434)
_OF_TORCH = (".pth", ".pt", ".bin")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, floats as float32; raises `InputError` for anything else than weights."""
    kind = path.suffix.lower()
    if kind != ".safetensors" and kind not in _OF_TORCH:
        raise InputError(f"{path}: expected a file of weights, .safetensors or {', '.join(_OF_TORCH)}")
    try:
        with open(path, "rb") as file:
            tensors = _read_safetensors(path, file) if kind == ".safetensors" else _read_torch(path, file)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return {name: tensor if tensor.dtype == torch.int64 else tensor.float() for name, tensor in tensors.items()}


def _read_safetensors(path: Path, file: BinaryIO) -> dict[str, Tensor]:
    """8 bytes of length, a table in JSON, the tensors one after another."""
    size = os.fstat(file.fileno()).st_size
    head = file.read(8)
    length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
    if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        raise _no_weights(path, f"a table of {length} bytes in a file of {size}")
    try:
        table = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise _no_weights(path, "its table is not JSON") from error
    if not isinstance(table, dict) or len(table) > _MAX_TENSORS:
        raise _no_weights(path, "its table has no tensors, or too many")
    table.pop("__metadata__", None)
    places = {str(name): _place(path, str(name), entry, size - 8 - length) for name, entry in table.items()}
    end = 0
    for name, (_, _, start, stop) in sorted(places.items(), key=lambda item: item[1][2:]):
        if start < end:
            raise _no_weights(path, f"{name[:80]!r} lies where another tensor is")
        end = stop
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, start, stop) in places.items():
        file.seek(8 + length + start)
        data = bytearray(file.read(stop - start))
        if len(data) != stop - start:
            raise _no_weights(path, f"it ends inside of {name[:80]!r}")
        tensors[name] = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    return tensors


def _place(path: Path, name: str, entry: Any, data_bytes: int) -> tuple[torch.dtype, list[int], int, int]:
    if not isinstance(entry, dict):
        raise _no_weights(path, f"{name[:80]!r} has no type, shape and place")
    dtype = _TYPES.get(str(entry.get("dtype")))
    shape, place = _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if dtype is None:
        raise InputError(
            f"{path}: {name[:80]!r} has type {str(entry.get('dtype'))[:20]!r}, expected one of {', '.join(_TYPES)}"
        )
    if shape is None or place is None or len(place) != 2:
        raise _no_weights(path, f"{name[:80]!r} has no shape and place")
    if place[1] > data_bytes or place[1] - place[0] != math.prod(shape) * dtype.itemsize:
        raise _no_weights(path, f"{name[:80]!r} of {shape} does not lie in bytes {place[0]} to {place[1]}")
    return dtype, shape, place[0], place[1]


def _counts(value: Any) -> list[int] | None:
    """A short list of whole numbers; None for anything else."""
    if not isinstance(value, list) or len(value) > _MAX_AXES:
        return None
    return value if all(type(number) is int and 0 <= number < _MAX_COUNT for number in value) else None


def _read_torch(path: Path, file: BinaryIO) -> dict[str, Tensor]:
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if installed < _LEAST_TORCH:
        raise InputError(
            f"{path}: reading it safely needs torch {'.'.join(map(str, _LEAST_TORCH))} on the server, it has "
            f"{torch.__version__}; upgrade torch, or convert the file to .safetensors"
        )
    try:
        with UserCode(str(path), "loading"):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except InputError as error:
        raise _no_weights(path, "code in a pickle is refused") from error
    tensors = _mapping_of_tensors(path, content)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _TYPES.values():
            raise InputError(f"{path}: {name[:80]!r} has type {tensor.dtype}, expected one of {', '.join(_TYPES)}")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise _no_weights(path, f"{name[:80]!r} of {list(tensor.shape)} has fewer values than its shape says")
    return tensors


def _mapping_of_tensors(path: Path, content: Any) -> dict[str, Tensor]:
    """The names and tensors, or those of the only entry that has some, such as `state_dict`."""
    if _is_mapping_of_tensors(content):
        return {str(name): tensor for name, tensor in content.items()}
    inside = (
        [key for key, value in content.items() if _is_mapping_of_tensors(value)] if isinstance(content, dict) else []
    )
    if len(inside) != 1:
        keys = ", ".join(str(key)[:40] for key in list(content)[:8]) if isinstance(content, dict) else "no names at all"
        raise _no_weights(path, f"expected names and tensors, it has {keys}")
    return {str(name): tensor for name, tensor in content[inside[0]].items()}


def _is_mapping_of_tensors(value: Any) -> bool:
    return isinstance(value, Mapping) and len(value) > 0 and all(isinstance(item, Tensor) for item in value.values())


def _no_weights(path: Path, what: str) -> InputError:
    return InputError(f"{path}: not a file of weights ({what}); save model.state_dict()")
