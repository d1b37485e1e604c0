"""Makes the hostile containers and frames of this folder: `python tests/attacks/make.py` writes them beside itself.

Each name says what the file tries. The bytes are put together by hand, not with
the code under test. Files too large to keep (`large`) are made by the tests that use them.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import zlib
from pathlib import Path
from typing import Any

import msgpack

Row = tuple[Any, Any, Any]
ONE: list[Row] = [("model/w", "fp32", [2])]  # 8 bytes of data


def container(
    meta: bytes = b"\x80",
    rows: list[bytes] | None = None,
    *,
    data: bytes = bytes(8),
    magic: bytes = b"FFT1",
    zero: int = 0,
    pad: bytes = b"\0",
    **lie: int,
) -> bytes:
    """A container of raw parts; `lie` replaces meta_bytes, num_tensors, table_bytes, data_bytes or crc."""
    packed = [msgpack.packb(row) for row in ONE] if rows is None else rows
    table = b"".join(struct.pack("<H", len(row)) + row for row in packed)
    fields = {
        "meta_bytes": len(meta),
        "num_tensors": len(packed),
        "table_bytes": len(table),
        "data_bytes": len(data),
        "crc": zlib.crc32(meta + table),
    } | lie
    head = struct.pack(
        "<4sIIIQII",
        magic,
        fields["meta_bytes"],
        fields["num_tensors"],
        fields["table_bytes"],
        fields["data_bytes"],
        fields["crc"],
        zero,
    )
    head += meta + table
    return head + pad * (-len(head) % 64) + data


def rows(*values: Any) -> list[bytes]:
    """Table rows as msgpack."""
    return [msgpack.packb(value) for value in values]


def _raw_table(table: bytes, num_tensors: int) -> bytes:
    """A container whose table is exactly these bytes."""
    meta = b"\x80"
    head = struct.pack("<4sIIIQII", b"FFT1", 1, num_tensors, len(table), 8, zlib.crc32(meta + table), 0) + meta + table
    return head + bytes(-len(head) % 64) + bytes(8)


def small() -> dict[str, bytes]:
    """File name -> bytes; every one of them must be refused."""
    valid = container()
    attacks = {
        "empty": b"",
        "half-a-start": valid[:17],
        "start-only": valid[:32],
        "no-data": valid[:-8],
        "one-byte-more": valid + b"\0",
        "other-magic": container(magic=b"PK\x03\x04"),
        "reserved-not-zero": container(zero=1),
        "padding-not-zero": container(pad=b"\x01"),
        "wrong-crc": container(crc=0),
        "meta-of-4-gib": container(meta_bytes=2**32 - 1),
        "table-of-4-gib": container(table_bytes=2**32 - 1),
        "tensors-4-billion": container(num_tensors=2**32 - 1),
        "tensors-8192-announced-one-sent": container(num_tensors=8192),
        "no-tensors-announced-one-sent": container(num_tensors=0),
        "data-of-16-eib": container(data_bytes=2**64 - 1),
        "meta-empty": container(b""),
        "meta-is-a-list": container(b"\x90"),
        "meta-and-more": container(b"\x80\x80"),
        "meta-repeats-a-key": container(b"\x82\xa1a\x01\xa1a\x02"),
        "meta-number-as-key": container(b"\x81\x01\x02"),
        "meta-extension": container(b"\x81\xa1a\xc7\x00\x05"),
        "meta-timestamp": container(b"\x81\xa1a\xd6\xff\x00\x00\x00\x00"),
        "meta-bad-utf8": container(b"\x81\xa2\xff\xfe\x01"),
        "meta-array-of-4-billion": container(b"\x81\xa1a\xdd\xff\xff\xff\xff"),
        "meta-map-of-4-billion": container(b"\xdf\xff\xff\xff\xff"),
        "meta-text-of-4-gib": container(b"\x81\xa1a\xdb\xff\xff\xff\xff"),
        "meta-nested-16000-deep": container(b"\x81\xa1a" + b"\x91" * 16_000 + b"\xc0"),
        "meta-16-kib-of-maps-then-a-lie": container(_maps(), rows(("model/w", "fp32", [3]))),
        "row-of-65535": _raw_table(struct.pack("<H", 65535) + bytes(30), 1),
        "row-length-cut": _raw_table(b"\x0f", 1),
        "row-empty": _raw_table(b"\0\0", 1),
        "row-is-a-map": container(rows=[b"\x80"]),
        "row-of-two": container(rows=rows(["model/w", "fp32"])),
        "row-and-more": container(rows=[msgpack.packb(ONE[0]) + b"\0"]),
        "name-empty": container(rows=rows(["", "fp32", [2]])),
        "name-of-257": container(rows=rows(["n" * 257, "fp32", [2]])),
        "name-is-bytes": container(rows=rows([b"model/w", "fp32", [2]])),
        "name-not-ascii": container(rows=rows(["\U0001f525", "fp32", [2]])),
        "name-with-newline": container(rows=rows(["model/w\n", "fp32", [2]])),
        "name-twice": container(rows=rows(["model/w", "fp32", [1]], ["model/w", "fp32", [1]])),
        "codec-unknown": container(rows=rows(["model/w", "fp64", [1]])),
        "codec-is-a-list": container(rows=rows(["model/w", ["fp32"], [2]])),
        "int8-without-channels": container(rows=rows(["model/w", "int8", [4]])),
        "shape-is-a-number": container(rows=rows(["model/w", "fp32", 2])),
        "shape-of-nine": container(rows=rows(["model/w", "fp32", [1] * 8 + [2]])),
        "shape-negative": container(rows=rows(["model/w", "fp32", [-1, -2]])),
        "shape-bool": container(rows=rows(["model/w", "i64", [True]])),
        "shape-float": container(rows=rows(["model/w", "fp32", [2.0]])),
        "shape-wraps-at-64-bits": container(rows=rows(["model/w", "fp32", [2**31, 2**31, 4]]), data=b""),
        "shape-zero-times-huge": container(rows=rows(["model/w", "fp32", [0] + [2**31] * 7]), data=b""),
        "shape-over-2-31": container(rows=rows(["model/w", "fp32", [0, 2**31 + 1]]), data=b""),
        "data-longer-than-tensors": container(data=bytes(12)),
        "data-shorter-than-tensors": container(data=bytes(4)),
    }
    return {f"container-{name}.bin": data for name, data in attacks.items()}


def _maps() -> bytes:
    """The most memory that 16 KiB of msgpack can ask for: lists of empty maps, 64 bytes each."""
    return b"\x84" + b"".join(bytes([0xA1, 97 + i]) + b"\xdc\x0f\xf0" + b"\x80" * 4080 for i in range(4))


def large() -> dict[str, bytes]:
    """The heaviest containers that the rules allow, and one that is a lie at its very end."""
    wide = [[f"{i:04x}" + "n" * 95, "i64", [300 + i, 0, 70_000, 300, 1, 1, 1, 1]] for i in range(8192)]
    long = [[f"{i:04x}" + "n" * 252, "fp32", [0]] for i in range(3870)]
    repeated = [*wide[:-1], wide[0]]
    return {
        "accepted-8192-tensors": container(_maps(), rows(*wide), data=b""),
        "accepted-long-names": container(_maps(), rows(*long), data=b""),
        "refused-at-the-last-tensor": container(_maps(), rows(*repeated), data=b""),
    }


FRAME_KEY = bytes(range(32))
FRAME_CONTEXT = "fed/a/up"
FRAME_CODES = {  # name of the attack -> the code of its refusal
    "empty": "malformed",
    "header-only": "malformed",
    "other-magic": "malformed",
    "reserved-not-zero": "malformed",
    "version-of-tomorrow": "version",
    "body-of-64-kib-announced": "malformed",
    "body-longer-than-announced": "malformed",
    "body-of-20-kib": "malformed",
    "wrong-crc": "damaged",
    "wrong-mac": "forged",
    "mac-of-another-device": "forged",
    "mac-of-the-other-way": "forged",
    "no-mac": "malformed",
    "kind-unknown": "kind",
    "kind-that-travels-down": "kind",
    "body-empty": "malformed",
    "body-is-a-list": "malformed",
    "body-and-more": "malformed",
    "nested-16000-deep": "malformed",
    "nested-maps-4000-deep": "malformed",
    "array-of-4-billion": "malformed",
    "map-of-4-billion": "malformed",
    "text-of-4-gib": "malformed",
    "bytes-of-4-gib": "malformed",
    "extension-empty": "malformed",
    "extension-of-4-gib": "malformed",
    "timestamp": "malformed",
    "key-twice": "malformed",
    "number-as-key": "malformed",
    "bytes-as-key": "malformed",
    "map-as-key": "malformed",
    "bad-utf8": "malformed",
    "reserved-byte": "malformed",
    "16-kib-of-empty-maps": "malformed",
    "16-kib-of-empty-lists": "malformed",
    "loss-is-nan": "not_finite",
    "number-beyond-64-bits": "malformed",
    "seq-negative": "range",
    "label-keys-300": "malformed",
}


def frame(body: bytes, *, kind: int = 2, magic: bytes = b"FF", version: int = 1, zero: int = 0, **lie: Any) -> bytes:
    """A frame of raw parts, with a right HMAC; `lie` replaces length, crc, key or context."""
    length, crc = lie.get("length", len(body)), lie.get("crc", zlib.crc32(body))
    head = struct.pack("<2sBBHHI", magic, version, kind, length & 0xFFFF, zero, crc) + body
    context = lie.get("context", FRAME_CONTEXT)
    return head + hmac.new(lie.get("key", FRAME_KEY), context.encode() + b"\0" + head, hashlib.sha256).digest()


def _said(heartbeat: bytes, seq: bytes = b"\x01") -> bytes:
    """The envelope around a heartbeat's map."""
    return b"\x83\xa7session\xa1s\xa3seq" + seq + b"\xa4body" + heartbeat


def frames() -> dict[str, bytes]:
    """File name -> bytes; every one of them must be refused when it is opened as a message to the coordinator."""
    good = _said(b"\x81\xa5state\xa4idle")
    valid = frame(good)
    state = b"\x82\xa5state\xa4idle"
    attacks = {
        "empty": b"",
        "header-only": valid[:12],
        "other-magic": frame(good, magic=b"PK"),
        "reserved-not-zero": frame(good, zero=1),
        "version-of-tomorrow": frame(good, version=2),
        "body-of-64-kib-announced": frame(good, length=65_535),
        "body-longer-than-announced": frame(good, length=len(good) - 1),
        "body-of-20-kib": frame(bytes(20_000)),
        "wrong-crc": frame(good, crc=0),
        "wrong-mac": valid[:-1] + bytes([valid[-1] ^ 1]),
        "mac-of-another-device": frame(good, key=bytes(32)),
        "mac-of-the-other-way": frame(good, context="fed/a/down"),
        "no-mac": valid[:-32],
        "kind-unknown": frame(good, kind=200),
        "kind-that-travels-down": frame(good, kind=33),
        "body-empty": frame(b""),
        "body-is-a-list": frame(b"\x90"),
        "body-and-more": frame(good + b"\xc0"),
        "nested-16000-deep": frame(b"\x91" * 16_000),
        "nested-maps-4000-deep": frame(b"\x81\xa1a" * 4000 + b"\xc0"),
        "array-of-4-billion": frame(_said(b"\xdd\xff\xff\xff\xff")),
        "map-of-4-billion": frame(b"\xdf\xff\xff\xff\xff"),
        "text-of-4-gib": frame(_said(b"\xdb\xff\xff\xff\xff")),
        "bytes-of-4-gib": frame(_said(b"\xc6\xff\xff\xff\xff")),
        "extension-empty": frame(_said(state + b"\xa4loss\xc7\x00\x05")),
        "extension-of-4-gib": frame(_said(state + b"\xa4loss\xc9\xff\xff\xff\xff\x05")),
        "timestamp": frame(_said(state + b"\xa4loss\xd6\xff\x00\x00\x00\x00")),
        "key-twice": frame(_said(state + b"\xa5state\xa4busy")),
        "number-as-key": frame(_said(state + b"\x01\x02")),
        "bytes-as-key": frame(_said(state + b"\xc4\x04loss\xc0")),
        "map-as-key": frame(_said(state + b"\x80\xc0")),
        "bad-utf8": frame(_said(state + b"\xa2\xff\xfe\xc0")),
        "reserved-byte": frame(_said(state + b"\xa4loss\xc1")),
        "16-kib-of-empty-maps": frame(_maps()),
        "16-kib-of-empty-lists": frame(_said(b"\xdc\x0f\xf0" + b"\x90" * 4080)),
        "loss-is-nan": frame(_said(state + b"\xa4loss\xcb" + struct.pack(">d", float("nan")))),
        "number-beyond-64-bits": frame(_said(state + b"\xa4step\xcf" + b"\xff" * 8 + b"\xff")),
        "seq-negative": frame(_said(b"\x81\xa5state\xa4idle", seq=b"\xff")),
        "label-keys-300": frame(_said(msgpack.packb({f"x-{i}": None for i in range(300)}))),
    }
    assert attacks.keys() == FRAME_CODES.keys()
    return {f"frame-{name}.bin": data for name, data in attacks.items()}


if __name__ == "__main__":
    for file_name, content in (small() | frames()).items():
        (Path(__file__).parent / file_name).write_bytes(content)
