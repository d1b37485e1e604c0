"""A trained model as an ONNX file: its metadata, and running it with onnxruntime.

    fedfit.run, fedfit.version, fedfit.device    where it comes from; `device` of a personal model only
    fedfit.model, fedfit.architecture            what it is: a built-in model or a task, and the slice of it
    fedfit.weights_sha256                        of the weights that it was made of
    fedfit.classes, fedfit.input                 what its outputs mean, and the shape of one sample
    fedfit.normalisation                         what samples go through before they are its input
    fedfit.precision                             fp32, or int8
    fedfit.batch_statistics                      whether a sample's answer depends on the others of its batch
    fedfit.probe                                 its outputs for four known samples (`test_samples`)

Texts stand as they are, all else as JSON. Covers: reading and writing these, opening and running the file. Needs numpy
and onnxruntime, not torch. Does not cover: making the file (`export`), data (`infer`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client import durable
from edge_client.errors import InputError, MachineError, PayloadError
from edge_client.records import Count, from_map, to_map

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "INPUT",
    "NORMALISATION",
    "OUTPUT",
    "Facts",
    "OnnxModel",
    "add_facts",
    "add_properties",
    "classes_hash",
    "runtime",
]

INPUT, OUTPUT = "input", "logits"
NORMALISATION = "float32; bytes are divided by 255, other numbers are taken as they are"

_PREFIX = "fedfit."
_METADATA_FIELD = 14  # metadata_props of ModelProto, a repeated map entry of key (1) and value (2)
_LENGTH_DELIMITED = 2
_FATAL_ONLY = 4  # onnxruntime's log level: what it cannot do, it raises as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The metadata of a file that fedfit exported."""

    run: str = ""
    version: Count = 0
    device: str = ""
    model: str = ""
    architecture: str = "full"
    weights_sha256: str = ""
    classes: tuple[str, ...] = ()
    input: tuple[int, ...] = ()
    normalisation: str = NORMALISATION
    precision: str = "fp32"
    batch_statistics: bool = False

    def properties(self) -> dict[str, str]:
        """The metadata entries as text."""
        return {
            f"{_PREFIX}{key}": value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in to_map(self).items()
        }


def _facts(properties: Mapping[str, str], where: str) -> Facts | None:
    """Read the metadata; None if fedfit did not export the file."""
    texts = {f.name for f in dataclasses.fields(Facts) if f.type == "str"}
    known = {f"{_PREFIX}{f.name}": f.name for f in dataclasses.fields(Facts)}
    ours = {known[key]: value for key, value in properties.items() if key in known}
    if not ours:
        return None
    try:
        values = {name: text if name in texts else json.loads(text) for name, text in ours.items()}
        return from_map(Facts, values, where=where)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: its metadata is damaged: {error}") from None
    except PayloadError as error:
        raise InputError(f"{where}: its metadata is damaged: {error.detail}") from None


def classes_hash(classes: Sequence[str]) -> str:
    """A hash of the class names in their order, for messages without room for the names."""
    return hashlib.sha256(json.dumps(list(classes)).encode()).hexdigest()


def add_facts(path: Path, facts: Facts) -> None:
    """Append the metadata to a finished file."""
    add_properties(path, facts.properties())


def add_properties(path: Path, properties: Mapping[str, str]) -> None:
    """Add metadata to a finished file.

    Protocol buffers that follow each other are one message with the fields of both: no library is needed for it.
    """
    with open(path, "ab") as file:
        for key, value in properties.items():
            entry = _field(1, key.encode()) + _field(2, value.encode())
            file.write(_field(_METADATA_FIELD, entry))


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | _LENGTH_DELIMITED]) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def runtime() -> Any:
    """The package onnxruntime; raises `MachineError` with what to type if it is not there."""
    try:
        import onnxruntime
    except ImportError as error:
        raise MachineError(f"ONNX files need onnxruntime ({error}); type: pip install 'fedfit[infer]'") from error
    return onnxruntime


class OnnxModel:
    """An ONNX file that takes samples and gives one number per class."""

    def __init__(self, path: Path, *, threads: int = 1) -> None:
        """Raises `InputError` for a file that is not such a model."""
        self.path = path
        if not durable.is_there(path):
            raise InputError(f"{path} does not exist; expected an ONNX file")
        with _refusals(path):
            self._session = _session(path, threads)
            self.properties: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
            self._input, self.input_shape = _only_input(self._session, path)
            self.num_classes = _num_classes(self._session, path)
        facts = _facts(self.properties, str(path))
        self.is_ours = facts is not None
        self.facts = facts or Facts(input=self.input_shape)
        if self.facts.classes and len(self.facts.classes) != self.num_classes:
            counts = f"{len(self.facts.classes)} names of classes and {self.num_classes} outputs"
            raise InputError(f"{path}: its metadata is damaged: {counts}")

    def run(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Samples [b, *input shape] to numbers [b, classes]; raises `InputError` for samples that it does not take."""
        with _refusals(self.path):
            logits: NDArray[np.float32] = self._session.run(None, {self._input: x})[0]
        if logits.shape != (len(x), self.num_classes):
            came = f"{_shown(logits.shape)} came for {len(x)} samples"
            raise InputError(f"{self.path}: expected an output [batch, {self.num_classes}], as it says; {came}")
        return logits


def _session(path: Path, threads: int) -> Any:
    onnxruntime = runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # an arena keeps the most that was ever used
    options.log_severity_level = _FATAL_ONLY
    # no fallback: it would print what it met, and try the same once more
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)


@contextlib.contextmanager
def _refusals(path: Path) -> Iterator[None]:
    """What onnxruntime raises about a file, as one error; it has no exception of its own above its others.

    Beside those: RuntimeError of its C++ parts, and of its Python ones ValueError, such as for names that are no UTF-8.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    exceptions = (kind for kind in vars(state).values() if isinstance(kind, type) and issubclass(kind, Exception))
    kinds: tuple[type[Exception], ...] = (*exceptions, RuntimeError, ValueError)
    try:
        yield
    except (state.InvalidProtobuf, state.NoModel, UnicodeError) as error:
        raise InputError(f"{path}: expected an ONNX file, got something else, or a part of one") from error
    except kinds as error:
        detail = " ".join(str(error).split())[:300]
        raise InputError(f"{path}: onnxruntime cannot use it: {detail}") from error


def _only_input(session: Any, path: Path) -> tuple[str, tuple[int, ...]]:
    inputs = session.get_inputs()
    if len(inputs) != 1 or inputs[0].type != "tensor(float)":
        came = ", ".join(f"{one.name} {one.type}" for one in inputs)
        raise InputError(f"{path}: expected one input of floats, got {came or 'none'}")
    shape = inputs[0].shape[1:]
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InputError(f"{path}: expected an input [batch, ...] with sizes, got {_shown(inputs[0].shape)}")
    return str(inputs[0].name), tuple(shape)


def _num_classes(session: Any, path: Path) -> int:
    for output in session.get_outputs()[:1]:
        shape = output.shape
        if output.type != "tensor(float)" or len(shape) != 2 or not isinstance(shape[1], int) or shape[1] < 1:
            came = f"{output.type} {_shown(shape)}"
            raise InputError(f"{path}: expected an output of floats [batch, classes], got {came}")
        return int(shape[1])
    raise InputError(f"{path}: expected an output of floats [batch, classes], got none")


def _shown(shape: Sequence[object]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"
