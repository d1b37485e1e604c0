"""The container format: exact bytes, round trips, refusals, and memory under attack."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

import pytest

from edge_client.errors import PayloadError
from edge_client.wire import container

ATTACKS = Path(__file__).parents[3] / "attacks"
MAX_RISE_KIB = 8 * 1024
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="measures memory with /proc")

_MEASURE = """
import pathlib, sys
from edge_client.errors import PayloadError
from edge_client.wire import container

def kib(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # VmHWM starts again from the memory in use now
before = kib("VmRSS")
try:
    container.read_header(pathlib.Path(sys.argv[1]))
    result = "accepted"
except PayloadError:
    result = "refused"
print(result, kib("VmHWM") - before)
"""


def _load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attacks_make", ATTACKS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _load_make()


def _parse_in_a_fresh_process(path: Path) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path)],
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    result, rise = done.stdout.split()
    return result, int(rise)


def test_header_bytes_are_those_of_the_format() -> None:
    """{} is 80; the row is 93, a1 w, a4 fp32, 92 02 03: 11 bytes; 32 + 1 + 13 = 46, padded to 64; 24 of data."""
    row = b"\x93\xa1w\xa4fp32\x92\x02\x03"
    table = struct.pack("<H", 11) + row
    fixed = b"FFT1" + struct.pack("<IIIQII", 1, 1, 13, 24, zlib.crc32(b"\x80" + table), 0)
    assert container.build_header({}, [("w", "fp32", (2, 3))]) == fixed + b"\x80" + table + bytes(18)


def test_a_header_comes_back_with_offsets_without_gaps() -> None:
    """int8 [2, 3] is 2 scales of 4 bytes and 6 values: 14; then fp16 [5] is 10; then a scalar i64 is 8; in all 32."""
    rows = [("model/a", "int8", (2, 3)), ("model/b", "fp16", (5,)), ("model/n", "i64", ())]
    head = container.build_header({"steps": 7}, rows)
    header = container.parse_header(head, len(head) + 32)
    assert header.meta == {"steps": 7}
    assert [(e.offset, e.nbytes) for e in header.entries] == [(0, 14), (14, 10), (24, 8)]
    assert [(e.name, e.codec, e.shape) for e in header.entries] == rows
    assert header.data_offset == len(head)
    assert header.data_offset % 64 == 0
    assert header.total_bytes == len(head) + 32


def test_a_container_without_tensors_is_allowed() -> None:
    """An update of a device that found nothing to say but its report."""
    head = container.build_header({"a": 1}, [])
    assert container.parse_header(head, len(head)).entries == ()


@pytest.mark.parametrize(
    ("codec", "shape", "expected"),
    [
        ("fp32", (), 4),
        ("fp32", (3, 5), 60),
        ("fp16", (3, 5), 30),
        ("bf16", (7,), 14),
        ("int8", (3, 5), 27),
        ("int8", (3, 0), 12),
        ("i64", (10, 10), 800),
        ("fp32", (0, 9), 0),
    ],
)
def test_tensor_bytes_follow_the_codec(codec: str, shape: tuple[int, ...], expected: int) -> None:
    """Elements times item size; int8 adds 4 bytes per channel: 3 * 4 + 15 = 27."""
    assert container.tensor_bytes(codec, shape) == expected


@pytest.mark.parametrize(
    ("num_dims", "integer", "run_codec", "expected"),
    [
        (4, False, "int8", "int8"),
        (1, False, "int8", "fp32"),
        (0, False, "int8", "fp32"),
        (1, False, "bf16", "bf16"),
        (4, False, "fp16", "fp16"),
        (0, True, "int8", "i64"),
        (2, True, "fp32", "i64"),
    ],
)
def test_codec_rule_keeps_vectors_and_integers_exact(
    num_dims: int, integer: bool, run_codec: str, expected: str
) -> None:
    """int8 is for matrices only; integers are never rounded."""
    assert container.codec_rule(num_dims, run_codec, integer=integer) == expected


def test_only_fp32_sends_weights() -> None:
    """Whatever rounds sends deltas."""
    assert [container.payload_kind(c) for c in container.FLOAT_CODECS] == ["params", "delta", "delta", "delta"]


@pytest.mark.parametrize(
    ("meta", "table"),
    [
        ({}, [("a", "fp32", (1,)), ("a", "fp32", (1,))]),
        ({}, [("", "fp32", (1,))]),
        ({}, [("n" * 257, "fp32", (1,))]),
        ({}, [("größe", "fp32", (1,))]),
        ({}, [("a", "int8", (4,))]),
        ({}, [("a", "fp64", (4,))]),
        ({}, [("a", "fp32", (1,) * 9)]),
        ({}, [("a", "fp32", (-1,))]),
        ({"k": "v" * 20_000}, []),
        ({}, [(f"{i}", "fp32", (1,)) for i in range(8193)]),
    ],
)
def test_building_what_would_be_refused_is_misuse(meta: dict[str, object], table: list[container.TableRow]) -> None:
    """The writer's mistake is a ValueError at the writer, not a PayloadError at the reader."""
    with pytest.raises(ValueError, match=r"expected|refused|dimensions"):
        container.build_header(meta, table)


def test_the_largest_names_and_counts_are_accepted() -> None:
    """256 characters, 8 dimensions and 8,192 tensors are inside the limits."""
    head = container.build_header({}, [("n" * 256, "fp32", (1,) * 8)])
    assert len(container.parse_header(head, len(head) + 4).entries[0].name) == 256
    head = container.build_header({}, [(f"{i}", "fp32", (0,)) for i in range(8192)])
    assert len(container.parse_header(head, len(head)).entries) == 8192


def test_reading_a_file_reads_no_data(tmp_path: Path) -> None:
    """A sparse file of 1 TiB has its header read at once; its real length is what counts."""
    head = container.build_header({}, [("w", "fp32", (128, 2**31))])
    path = tmp_path / "model.bin"
    path.write_bytes(head)
    with pytest.raises(PayloadError, match="truncated"):
        container.read_header(path)
    with open(path, "r+b") as file:
        file.truncate(len(head) + 2**40)
    assert container.read_header(path).entries[0].nbytes == 2**40


@needs_proc
@pytest.mark.parametrize("name", sorted(make.small()))
def test_an_attack_is_refused_within_8_mib(name: str) -> None:
    """Each hostile file ends in a PayloadError, in a fresh process, whose memory rises by 8 MiB at most."""
    result, rise = _parse_in_a_fresh_process(ATTACKS / name)
    assert result == "refused"
    assert rise <= MAX_RISE_KIB


@needs_proc
@pytest.mark.parametrize("name", sorted(make.large()))
def test_the_heaviest_header_costs_at_most_8_mib(name: str, tmp_path: Path) -> None:
    """The limits are chosen so that even what they allow stays small."""
    path = tmp_path / "container.bin"
    path.write_bytes(make.large()[name])
    result, rise = _parse_in_a_fresh_process(path)
    assert result == name.partition("-")[0]
    assert rise <= MAX_RISE_KIB


def test_the_attack_folder_is_what_its_generator_makes() -> None:
    """No file is forgotten, stale, or edited by hand."""
    found = {path.name: path.read_bytes() for path in ATTACKS.glob("container-*")}
    assert found == make.small()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("container-half-a-start.bin", "truncated"),
        ("container-no-data.bin", "truncated"),
        ("container-data-of-16-eib.bin", "truncated"),
        ("container-meta-of-4-gib.bin", "too_large"),
        ("container-tensors-4-billion.bin", "too_large"),
        ("container-shape-zero-times-huge.bin", "too_large"),
        ("container-shape-wraps-at-64-bits.bin", "too_large"),
        ("container-wrong-crc.bin", "damaged"),
        ("container-name-twice.bin", "malformed"),
        ("container-one-byte-more.bin", "malformed"),
    ],
)
def test_a_refusal_has_the_code_of_its_reason(name: str, code: str) -> None:
    """Codes are stable: they go back to the device."""
    with pytest.raises(PayloadError) as caught:
        container.read_header(ATTACKS / name)
    assert caught.value.code == code
