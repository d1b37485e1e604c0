"""Damaged and forged containers: nothing but a `PayloadError` escapes the decoder."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable

from edge_client.errors import PayloadError
from edge_client.wire import container

NUM_CASES = 24_000
EXTREMES = (0, 1, 2, 31, 63, 64, 127, 128, 255, 4096, 16_384, 16_385, 65_535, 2**20, 2**20 + 1, 2**31, 2**32 - 1)


def _valid(rng: random.Random) -> bytes:
    rows = [
        (f"model/{i}", rng.choice(container.CODECS), tuple(rng.randrange(4) for _ in range(rng.randrange(2, 5))))
        for i in range(rng.randrange(6))
    ]
    meta = {"num_samples": rng.randrange(1000), "scalars": {"loss": rng.random()}, "payload": "params"}
    head = container.build_header(meta, rows)
    return head + rng.randbytes(sum(container.tensor_bytes(codec, shape) for _, codec, shape in rows))


def _flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.randrange(1, 6)):
        data[rng.randrange(len(data))] = rng.randrange(256)


def _flip_one_bit(rng: random.Random, data: bytearray) -> None:
    data[rng.randrange(min(len(data), 160))] ^= 1 << rng.randrange(8)


def _truncate(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data)) :]


def _extend(rng: random.Random, data: bytearray) -> None:
    data += rng.randbytes(rng.randrange(1, 200))


def _length_field(rng: random.Random, data: bytearray) -> None:
    struct.pack_into("<I", data, rng.choice((4, 8, 12, 16, 20, 28)), rng.choice(EXTREMES))


def _splice(rng: random.Random, data: bytearray) -> None:
    start = rng.randrange(len(data))
    data[start : start + rng.randrange(20)] = rng.randbytes(rng.randrange(20))


MUTATIONS: list[Callable[[random.Random, bytearray], None]] = [
    _flip,
    _flip_one_bit,
    _truncate,
    _extend,
    _length_field,
    _splice,
]


def _forge_checksum(data: bytearray) -> None:
    """What an attacker does: without it most cases would end at the CRC."""
    if len(data) >= 32:
        meta_bytes, _, table_bytes = struct.unpack_from("<III", data, 4)
        struct.pack_into("<I", data, 24, zlib.crc32(data[32 : min(32 + meta_bytes + table_bytes, len(data))]))


def test_only_payload_errors_escape_from_mutated_containers() -> None:
    """24,000 seeded mutations, three of four with a forged checksum; what is accepted keeps a header's promises."""
    rng = random.Random(20_240_601)
    refused = 0
    for case in range(NUM_CASES):
        data = bytearray(_valid(rng))
        rng.choice(MUTATIONS)(rng, data)
        if case % 4:
            _forge_checksum(data)
        try:
            header = container.parse_header(bytes(data), len(data))
        except PayloadError:
            refused += 1
            continue
        assert header.data_offset + sum(entry.nbytes for entry in header.entries) == len(data)
        assert len({entry.name for entry in header.entries}) == len(header.entries)
    assert NUM_CASES // 3 < refused < NUM_CASES


def test_only_payload_errors_escape_from_random_rows() -> None:
    """4,000 tables of random bytes behind a correct start and checksum."""
    rng = random.Random(7)
    codes = set()
    for _ in range(4000):
        row = rng.randbytes(rng.randrange(1, 60))
        body = b"\x80" + struct.pack("<H", len(row)) + row
        head = struct.pack("<4sIIIQII", b"FFT1", 1, 1, len(row) + 2, 0, zlib.crc32(body), 0) + body
        head += bytes(-len(head) % 64)
        try:
            container.parse_header(head, len(head))
        except PayloadError as error:
            codes.add(error.code)
    assert codes == {"malformed"}
