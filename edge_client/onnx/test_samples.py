"""The self-test in an ONNX file: four known samples, and the model's outputs for them at the export.

The samples follow from their shape alone, by whole numbers, so that every machine and every version of numpy has the
same bits. The file has the outputs as `fedfit.probe`, a JSON list per sample: torch's of an fp32 model, onnxruntime's
of an int8 one. Covers: making and comparing them. Needs numpy, not torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_client import faults
from edge_client.errors import InputError
from edge_client.onnx.file import OnnxModel, add_properties

__all__ = ["LIMITS", "NUM_SAMPLES", "add", "difference", "samples"]

NUM_SAMPLES = 4  # BatchNorms that use the statistics of a batch need more than two
# In parts of the largest output, or of 1. Another processor adds in another order; where numbers become bytes, a sum
# next to the border between two bytes may fall to the other side.
LIMITS = {"fp32": 1e-3, "int8": 0.05}
_KEY = "fedfit.probe"
_FACTOR = 2_654_435_761  # Knuth's multiplicative hash: neighbours differ, and each column has all sizes


def samples(shape: Sequence[int]) -> NDArray[np.float32]:
    """[4, *shape], numbers from 0 to 1 with 24 bits: exact in float32."""
    count = NUM_SAMPLES * math.prod(shape)
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_FACTOR) % np.uint64(1 << 32)
    parts = (mixed >> np.uint64(8)).astype(np.float32) / np.float32(1 << 24)
    return parts.reshape(NUM_SAMPLES, *shape)


def add(path: Path, outputs: NDArray[np.float32]) -> None:
    """Append the expected outputs to a finished file."""
    rows = [[float(f"{value:.9g}") for value in row] for row in outputs.tolist()]  # nine digits tell float32 apart
    add_properties(path, {_KEY: json.dumps(rows)})


def difference(model: OnnxModel) -> float | None:
    """Difference between the outputs here and those in the file, in the unit of `LIMITS`; None if the file has none.

    Raises `InputError` if the outputs in the file make no sense. Not a number if an output here is not a number.
    """
    if _KEY not in model.properties:
        return None
    try:
        expected = np.array(json.loads(model.properties[_KEY]), dtype=np.float32)
    except (ValueError, TypeError, RecursionError):
        expected = np.zeros(0, np.float32)
    if expected.shape != (NUM_SAMPLES, model.num_classes) or not np.isfinite(expected).all():
        raise InputError(f"{model.path}: its metadata is damaged: no outputs for {NUM_SAMPLES} known samples")
    outputs = model.run(samples(model.input_shape)) * np.float32(faults.scale("deployed.probe"))
    return float(np.abs(outputs - expected).max() / max(1.0, float(np.abs(expected).max())))
