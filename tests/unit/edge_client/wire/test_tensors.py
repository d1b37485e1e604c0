"""Codecs against numpy, and containers on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_client.errors import PayloadError
from edge_client.wire import tensors
from edge_client.wire.container import codec_rule, tensor_bytes
from edge_client.wire.tensors import ContainerReader, codec_for, decode, encode, write_container


def test_fp32_bytes_are_little_endian() -> None:
    """1.0 is 0x3f800000, -2.0 is 0xc0000000."""
    assert encode(torch.tensor([1.0, -2.0]), "fp32") == bytes.fromhex("0000803f000000c0")


def test_fp16_bf16_and_i64_bytes_are_little_endian() -> None:
    """1.5 is 0x3e00 as half and 0x3fc0 as bfloat16; 258 is 0x0102."""
    assert encode(torch.tensor([1.5]), "fp16") == bytes.fromhex("003e")
    assert encode(torch.tensor([1.5]), "bf16") == bytes.fromhex("c03f")
    assert encode(torch.tensor(258), "i64") == bytes.fromhex("0201000000000000")


def test_fp16_rounds_as_numpy_does() -> None:
    """numpy's conversion is the independent implementation; seed 1."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    assert encode(x, "fp16") == x.numpy().astype("<f2").tobytes()
    np.testing.assert_array_equal(
        decode(encode(x, "fp16"), "fp16", [1000]).numpy(), x.numpy().astype("<f2").astype("<f4")
    )


def test_bf16_rounds_to_nearest_even() -> None:
    """1 + 2^-8 lies halfway between 1 and 1 + 2^-7 and goes to the even 1; 1 + 3*2^-8 goes up to 1 + 2^-6."""
    x = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8])
    assert decode(encode(x, "bf16"), "bf16", [2]).tolist() == [1.0, 1 + 2**-6]


def test_int8_scales_each_channel_by_its_own_peak() -> None:
    """(127, -63.6): scale 1, values 127 and -64; (0, 0.254): scale 0.002, values 0 and 127; a row of zeros: 0."""
    x = torch.tensor([[127.0, -63.6], [0.0, 0.254], [0.0, 0.0]])
    data = encode(x, "int8")
    assert len(data) == 3 * 4 + 6
    np.testing.assert_allclose(np.frombuffer(data[:12], "<f4"), [1.0, 0.002, 0.0], rtol=1e-6)
    assert np.frombuffer(data[12:], "i1").tolist() == [127, -64, 0, 127, 0, 0]
    np.testing.assert_allclose(decode(data, "int8", [3, 2]).numpy(), [[127, -64], [0, 0.254], [0, 0]], rtol=1e-6)


def test_int8_is_off_by_half_a_step_at_most() -> None:
    """|x - q * scale| <= scale / 2 with scale = max|row| / 127; room of 1e-5 for float32; seed 2."""
    x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(2))
    error = (decode(encode(x, "int8"), "int8", x.shape) - x).abs().flatten(1).amax(1)
    half_step = x.abs().flatten(1).amax(1) / 254
    assert bool((error <= half_step * 1.00001).all())


def test_int8_of_values_too_small_for_a_scale_is_zero() -> None:
    """The smallest float32, 1.4e-45, divided by 127 is 0: the row is sent as zeros, not as a division by zero."""
    x = torch.full((1, 2), 1e-45)
    assert decode(encode(x, "int8"), "int8", [1, 2]).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_int8_refuses_values_that_are_not_finite(bad: float) -> None:
    """There is no scale for them."""
    with pytest.raises(PayloadError) as caught:
        encode(torch.tensor([[1.0, bad]]), "int8")
    assert caught.value.code == "not_finite"


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16"])
def test_float_codecs_pass_values_that_are_not_finite(codec: str) -> None:
    """The intake judges them, not the codec."""
    back = decode(encode(torch.tensor([float("inf"), float("nan")]), codec), codec, [2])
    assert back[0] == float("inf")
    assert bool(torch.isnan(back[1]))


def test_integers_beyond_float_precision_stay_exact() -> None:
    """2^53 + 1 has no float64."""
    assert int(decode(encode(torch.tensor(2**53 + 1), "i64"), "i64", [])) == 2**53 + 1


@pytest.mark.parametrize(
    ("shape", "codec"),
    [(shape, codec) for codec in ("fp32", "fp16", "bf16", "i64") for shape in ((0,), (3, 0), (0, 3), ())]
    + [((3, 0), "int8"), ((0, 3), "int8")],
)
def test_empty_and_scalar_tensors_travel(shape: tuple[int, ...], codec: str) -> None:
    """Shapes and byte counts hold at the edges; int8 needs two dimensions."""
    x = torch.zeros(shape, dtype=torch.int64 if codec == "i64" else torch.float32)
    data = encode(x, codec)
    assert len(data) == tensor_bytes(codec, shape)
    assert torch.equal(decode(data, codec, shape), x)


def test_a_transposed_tensor_is_encoded_by_its_values() -> None:
    """Strides are not part of the wire."""
    x = torch.arange(6.0).reshape(2, 3).t()
    assert torch.equal(decode(encode(x, "fp32"), "fp32", [3, 2]), torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_a_single_element_with_an_odd_stride_is_encoded() -> None:
    """torch calls it contiguous although its stride is 3; 1.0 is 0x3f800000."""
    x = torch.ones(2, 3)[:1, 0]
    assert x.stride() == (3,)
    assert encode(x, "fp32") == bytes.fromhex("0000803f")


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_every_kind_are_decoded(kind: type) -> None:
    """Read-only memory is copied; torch warns about it otherwise."""
    assert decode(kind(bytes.fromhex("0000803f")), "fp32", [1]).tolist() == [1.0]


@pytest.mark.parametrize("num_bytes", [0, 7, 9])
def test_a_wrong_number_of_bytes_is_refused(num_bytes: int) -> None:
    """Two float32 are 8 bytes."""
    with pytest.raises(PayloadError, match="expected 8"):
        decode(bytes(num_bytes), "fp32", [2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_integer_tensors_are_always_i64(dtype: torch.dtype) -> None:
    """Whatever the run's codec."""
    assert codec_for(torch.zeros(2, 2, dtype=dtype), "int8") == "i64"


def test_codec_for_follows_the_shared_rule() -> None:
    """The coordinator applies `codec_rule` without torch; both must say the same."""
    for run_codec in ("fp32", "fp16", "bf16", "int8"):
        for x in (torch.zeros(()), torch.zeros(3), torch.zeros(3, 2), torch.zeros(2, 2, 3, 3)):
            assert codec_for(x, run_codec) == codec_rule(x.ndim, run_codec, integer=False)


def test_misuse_is_a_value_error() -> None:
    """Complex tensors, floats as i64, vectors as int8, unknown codecs."""
    with pytest.raises(ValueError, match="real"):
        codec_for(torch.zeros(2, dtype=torch.complex64), "fp32")
    with pytest.raises(ValueError, match="integer"):
        encode(torch.zeros(2), "i64")
    with pytest.raises(ValueError, match="two dimensions"):
        encode(torch.zeros(2), "int8")
    with pytest.raises(ValueError, match="codec"):
        encode(torch.zeros(2), "fp8")


def _write(path: Path) -> tuple[dict[str, Tensor], tuple[str, int]]:
    generator = torch.Generator().manual_seed(3)
    values = {
        "model/conv.weight": torch.randn(4, 3, 3, 3, generator=generator),
        "model/conv.bias": torch.randn(4, generator=generator),
        "model/bn.num_batches_tracked": torch.tensor(12),
        "evaluation/confusion": torch.arange(9).reshape(3, 3),
    }
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in values.items()]
    return values, write_container(path, {"steps": 3}, table, iter(values.values()))


def test_a_container_comes_back_from_disk(tmp_path: Path) -> None:
    """Values, order, meta, hash and length; the file is exactly its header and its tensors."""
    path = tmp_path / "update.bin"
    values, (sha256, length) = _write(path)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with ContainerReader(path) as reader:
        assert reader.names() == list(values)
        assert reader.names("evaluation/") == ["evaluation/confusion"]
        assert reader.header.meta == {"steps": 3}
        assert length == path.stat().st_size == reader.header.data_offset + 4 * 108 + 4 * 4 + 8 + 72
        for name in reversed(list(values)):
            assert torch.equal(reader.tensor(name), values[name])
            assert reader.tensor(name).dtype == values[name].dtype


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("shape", [(700, 1000), (3, 700_000), (70_000, 30), (1, 600_000)])
def test_a_large_tensor_is_decoded_in_pieces(
    codec: str, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all at once, a megabyte at most at a time; fp32 needs no second copy. Another tensor stands behind."""
    value, after = torch.randn(shape, generator=torch.Generator().manual_seed(1)), torch.ones(2, 2)
    path = tmp_path / "large"
    write_container(path, {}, [("large", codec, shape), ("after", "fp32", (2, 2))], iter([value, after]))
    sizes: list[int] = []
    read = tensors._read
    monkeypatch.setattr(tensors, "_read", lambda fd, at, size, entry: sizes.append(size) or read(fd, at, size, entry))
    with ContainerReader(path) as reader:
        assert torch.equal(reader.tensor("large"), decode(encode(value, codec), codec, shape))
        assert torch.equal(reader.tensor("after"), after)
    assert sum(sizes) == tensor_bytes(codec, shape) + 16
    assert max(sizes) <= 2**20 or codec == "fp32"


def test_a_reader_names_what_is_missing(tmp_path: Path) -> None:
    """An update that lacks a tensor is the peer's fault."""
    _write(tmp_path / "update.bin")
    with ContainerReader(tmp_path / "update.bin") as reader, pytest.raises(PayloadError, match=r"no tensor 'model/fc'"):
        reader.tensor("model/fc")


def test_a_file_that_shrinks_under_the_reader_is_refused(tmp_path: Path) -> None:
    """Never a short tensor."""
    path = tmp_path / "update.bin"
    _write(path)
    with ContainerReader(path) as reader:
        with open(path, "r+b") as file:
            file.truncate(reader.header.data_offset + 5)
        with pytest.raises(PayloadError, match="truncated"):
            reader.tensor("model/conv.weight")


def test_writing_asks_for_one_tensor_at_a_time(tmp_path: Path) -> None:
    """After tensor i was asked for, all earlier ones are in the file: 64 bytes of header and i * 400."""
    path = tmp_path / "model.bin"
    sizes = []

    def stream() -> Iterator[Tensor]:
        for _ in range(3):
            sizes.append(path.stat().st_size)
            yield torch.zeros(100)

    table = [(f"{i}", "fp32", (100,)) for i in range(3)]
    write_container(path, {}, table, stream())
    assert [size - sizes[0] for size in sizes] == [0, 400, 800]


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_or_more_tensors_than_the_table_lists_is_misuse(tmp_path: Path, count: int) -> None:
    """A container never lies about its content."""
    with pytest.raises(ValueError, match="zip"):
        write_container(tmp_path / "x", {}, [("a", "fp32", (1,)), ("b", "fp32", (1,))], iter([torch.zeros(1)] * count))


def test_another_shape_than_the_table_lists_is_misuse(tmp_path: Path) -> None:
    """A [2, 2] is not a [4], though its bytes would fit."""
    with pytest.raises(ValueError, match="its table says"):
        write_container(tmp_path / "x", {}, [("a", "fp32", (4,))], iter([torch.zeros(2, 2)]))


def test_the_public_names_are_deliberate() -> None:
    """Adding one is a decision."""
    assert tensors.__all__ == ["ContainerReader", "codec_for", "decode", "encode", "read_entry", "write_container"]
