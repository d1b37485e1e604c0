"""Every tensor that a model can have survives the wire as well as its codec allows."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from edge_client.wire.container import tensor_bytes
from edge_client.wire.tensors import ContainerReader, codec_for, decode, encode, write_container

FAST = settings(max_examples=150)
shapes = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=4)
floats = hnp.arrays(np.float32, shapes, elements=st.floats(width=32, allow_nan=True, allow_infinity=True))
matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=5),
    elements=st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32),
)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array)).reshape(array.shape)


@FAST
@given(floats)
def test_fp32_is_bit_exact(array: np.ndarray) -> None:
    """Also NaN payloads, infinities, negative zeros and subnormals."""
    data = encode(_tensor(array), "fp32")
    assert data == array.astype("<f4").tobytes()
    assert encode(decode(data, "fp32", array.shape), "fp32") == data


@FAST
@given(hnp.arrays(np.int64, shapes))
def test_i64_is_bit_exact(array: np.ndarray) -> None:
    """All 64 bits."""
    data = encode(_tensor(array), "i64")
    assert data == array.astype("<i8").tobytes()
    assert decode(data, "i64", array.shape).numpy().tolist() == array.tolist()


@FAST
@given(floats, st.sampled_from(["fp16", "bf16"]))
def test_rounding_twice_is_rounding_once(array: np.ndarray, codec: str) -> None:
    """A decoded tensor is encoded to the same bytes again, so a forwarded model does not drift."""
    array = np.nan_to_num(array)  # a NaN may change its payload
    data = encode(_tensor(array), codec)
    assert len(data) == tensor_bytes(codec, array.shape)
    assert encode(decode(data, codec, array.shape), codec) == data


@FAST
@given(matrices)
def test_int8_keeps_every_channel_within_half_a_step(array: np.ndarray) -> None:
    """|error| <= max|row| / 254, computed in float64 by numpy; subnormal scales lose at most the row itself."""
    back = decode(encode(_tensor(array), "int8"), "int8", array.shape).numpy().astype(np.float64)
    for row, got in zip(array.astype(np.float64), back, strict=True):
        peak = float(np.abs(row).max(initial=0.0))
        room = peak / 254 * 1.001 if peak > 1e-34 else peak
        assert float(np.abs(row - got).max(initial=0.0)) <= room


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(floats, max_size=6), st.sampled_from(["fp32", "fp16", "bf16", "int8"]))
def test_a_container_returns_what_each_codec_returns(tmp_path: Path, arrays: list[np.ndarray], run_codec: str) -> None:
    """A file adds nothing and loses nothing; its length is its header and the sum of its tensors."""
    values = {f"model/{i}": torch.nan_to_num(_tensor(array)) for i, array in enumerate(arrays)}
    table = [(name, codec_for(value, run_codec), value.shape) for name, value in values.items()]
    _, length = write_container(tmp_path / "x", {}, table, iter(values.values()))
    with ContainerReader(tmp_path / "x") as reader:
        assert length == reader.header.data_offset + sum(entry.nbytes for entry in reader.header.entries)
        for name, codec, shape in table:
            expected = decode(encode(values[name], codec), codec, shape)
            assert torch.equal(reader.tensor(name), expected)
            assert math.prod(shape) == expected.numel()
