"""Damaged and forged frames, chunks, bundles and topics: nothing but the declared error escapes."""

from __future__ import annotations

import hashlib
import hmac
import json
import random
import struct
import zlib

import pytest
from rows import PLAN, PROFILE, assign, digest

from edge_client.client.identity import Bundle, parse_bundle
from edge_client.errors import InputError, PayloadError
from edge_client.records import to_map
from edge_client.wire import frames
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, parse_chunk
from edge_client.wire.messages import (
    Decline,
    Hello,
    Message,
    Offer,
    Pull,
    Receipt,
    context_down,
    context_up,
    open_message,
    seal_message,
)
from edge_client.wire.topics import Topics

KEY = bytes(range(32))
UP, DOWN = context_up("fed", "a"), context_down("fed", "a")
NUM_FRAMES = 12_000
NUM_CHUNKS = 6_000
NUM_TOPICS = 6_000
NUM_BUNDLES = 3_000
SAMPLES: list[tuple[Message, str]] = [
    (Hello(boot="b", hello=1, profile=PROFILE, labels={"site": "north"}, free_bytes=5, held="lease-1"), UP),
    (Decline(lease="x", code="crashed", detail="why", log=("a", "b")), UP),
    (Offer(lease="x", run="r", round=1, sha256=digest("x"), length=5, num_samples=2), UP),
    (Pull(sha256=digest("x"), ranges=((0, 4), (9, 1))), UP),
    (assign(plan=PLAN), DOWN),
    (Receipt(lease="x", sha256=digest("x"), status="late"), DOWN),
]
# bytes that mean something to msgpack: long lengths, extensions, nests, reserved
TOKENS = [b"\xc1", b"\xc7\x00\x05", b"\xd6\xff" + bytes(4), b"\xcb\x7f\xf0" + bytes(6), b"\x91" * 600, b"\x80", b"\xc0"]
TOKENS += [bytes([long]) + b"\xff" * 4 for long in (0xDB, 0xDD, 0xDF)] + [b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7)]


def _mutate(rng: random.Random, data: bytearray) -> None:
    at = rng.randrange(len(data) + 1)
    match rng.randrange(6):
        case 0:
            for _ in range(rng.randrange(1, 5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 2:
            del data[at:]
        case 3:
            data[at : at + rng.randrange(12)] = rng.randbytes(rng.randrange(12))
        case 4:
            data[at : at + rng.randrange(3)] = rng.choice(TOKENS)
        case _:
            other = rng.randrange(len(data) + 1)
            data[at:at] = data[min(at, other) : max(at, other)]


def _forge(kind: int, body: bytes, context: str) -> bytes:
    """What a device that was taken over can do: right checksum, right HMAC, any body."""
    head = struct.pack("<2sBBHHI", b"FF", 1, kind, len(body) & 0xFFFF, 0, zlib.crc32(body)) + body
    return head + hmac.digest(KEY, context.encode() + b"\0" + head, "sha256")


def test_only_payload_errors_escape_from_mutated_frames() -> None:
    """12,000 seeded mutations; two of three change the body and seal it again, so that the decoder sees it."""
    rng = random.Random(20_240_602)
    accepted, codes = 0, set()
    for case in range(NUM_FRAMES):
        message, context = rng.choice(SAMPLES)
        sealed = seal_message(message, session="s", seq=1, key=KEY, context=context)
        if case % 3:
            body = bytearray(sealed[12:-32])
            _mutate(rng, body)
            sealed = _forge(sealed[3], bytes(body), context)
        else:
            changed = bytearray(sealed)
            _mutate(rng, changed)
            sealed = bytes(changed)
        try:
            opened = open_message(sealed, key=KEY, context=context)
        except PayloadError as error:
            codes.add(error.code)
            continue
        accepted += 1
        assert type(opened.message) is type(message)
    assert {"malformed", "damaged", "forged", "range"} <= codes
    assert accepted < NUM_FRAMES // 4


def test_only_payload_errors_escape_from_random_msgpack() -> None:
    """6,000 strings of random bytes and of meaningful pieces."""
    rng = random.Random(7)
    codes = set()
    for case in range(6000):
        data = rng.randbytes(rng.randrange(80))
        if case % 2:
            data = b"".join(rng.choice([*TOKENS, data[:3], b"\xa1a", b"\x81"]) for _ in range(rng.randrange(1, 9)))
        try:
            frames.unpack(data)
        except PayloadError as error:
            codes.add(error.code)
    assert codes == {"malformed"}


def test_only_payload_errors_escape_from_mutated_chunks() -> None:
    """6,000; what is accepted has a right checksum over all of it."""
    rng = random.Random(3)
    refused = 0
    for case in range(NUM_CHUNKS):
        data = bytearray(make_chunk(rng.randbytes(16), rng.randrange(2**32), rng.randbytes(rng.randrange(1, 200))))
        _mutate(rng, data)
        if case % 2 and len(data) >= 32:
            struct.pack_into("<I", data, 28, zlib.crc32(data[:28] + data[32:]))
        try:
            chunk = parse_chunk(bytes(data))
        except PayloadError:
            refused += 1
            continue
        assert 0 < len(chunk.body) <= CHUNK_BYTES
        assert zlib.crc32(bytes(data[:28]) + bytes(chunk.body)) == struct.unpack_from("<I", data, 28)[0]
    assert NUM_CHUNKS // 3 < refused < NUM_CHUNKS


def test_only_payload_errors_escape_from_mutated_topics() -> None:
    """6,000 texts; what is accepted is built again as the same topic."""
    rng = random.Random(5)
    topics = Topics("fed")
    refused = 0
    for _ in range(NUM_TOPICS):
        text = list(topics.device(rng.choice(["a", "jetson-1", "x" * 64]), rng.choice(["up", "data", "state"])))
        for _ in range(rng.randrange(3)):
            text[rng.randrange(len(text))] = rng.choice("/+#a\0\n.\U0001f525é-_9")
        try:
            name, channel = topics.parse_device("".join(text))
        except PayloadError:
            refused += 1
            continue
        assert topics.device(name, channel) == "".join(text)
    assert NUM_TOPICS // 10 < refused < NUM_TOPICS


def test_only_input_errors_escape_from_mutated_bundles() -> None:
    """3,000 join bundles as a person might have damaged them."""
    rng = random.Random(9)
    bundle = Bundle(federation="f", device="a", brokers=("mqtt://h:1883",), password="p" * 20, key=digest("a"))
    text = json.dumps(to_map(bundle))
    refused = 0
    for _ in range(NUM_BUNDLES):
        changed = bytearray(text.encode())
        _mutate(rng, changed)
        try:
            parse_bundle(changed.decode("utf-8", "replace"), "file")
        except InputError:
            refused += 1
    assert refused > NUM_BUNDLES // 2


@pytest.mark.slow
def test_a_million_forged_bodies() -> None:
    """The release's share: every body is sealed with the right key."""
    rng = random.Random(hashlib.sha256(b"slow").digest())
    sealed = [(context, seal_message(m, session="s", seq=1, key=KEY, context=context)) for m, context in SAMPLES]
    for _ in range(1_000_000):
        context, whole = rng.choice(sealed)
        changed = bytearray(whole[12:-32])
        _mutate(rng, changed)
        try:
            open_message(_forge(whole[3], bytes(changed), context), key=KEY, context=context)
        except PayloadError:
            continue
