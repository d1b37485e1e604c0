"""The envelope, byte by byte, and what it refuses."""

from __future__ import annotations

import hashlib
import hmac
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgpack
import pytest
from attacks import make

from edge_client.errors import PayloadError
from edge_client.wire import frames

ATTACKS = Path(__file__).parents[3] / "attacks"
KEY = make.FRAME_KEY
CONTEXT = make.FRAME_CONTEXT
MAX_RISE_KIB = 8 * 1024
_PROBE = """
import sys
from edge_client.errors import PayloadError
from edge_client.wire import frames
from edge_client.wire.messages import open_message

def peak():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

key, context = bytes.fromhex(sys.argv[2]), sys.argv[3]
try:
    open_message(b"FF", key=key, context=context)
except PayloadError:
    pass
data = open(sys.argv[1], "rb").read()
before = peak()
try:
    open_message(data, key=key, context=context)
    print("accepted", peak() - before)
except PayloadError as error:
    print(error.code, peak() - before)
"""


def test_a_frame_has_the_documented_bytes() -> None:
    """Put together here by hand."""
    body = msgpack.packb({"a": 1})
    head = b"FF" + bytes([1, 7]) + struct.pack("<HHI", len(body), 0, zlib.crc32(body)) + body
    mac = hmac.new(KEY, CONTEXT.encode() + b"\0" + head, hashlib.sha256).digest()
    sealed = frames.seal(7, {"a": 1}, key=KEY, context=CONTEXT)
    assert sealed == head + mac
    frame = frames.open_frame(sealed, key=KEY, context=CONTEXT)
    assert (frame.kind, frame.body) == (7, {"a": 1})
    assert frames.peek(sealed) == 7


@pytest.mark.parametrize(("key", "context"), [(bytes(32), CONTEXT), (KEY, "fed/a/down"), (KEY, "other/a/up")])
def test_a_frame_is_valid_for_one_key_and_one_way(key: bytes, context: str) -> None:
    """Another device, the other direction, another federation."""
    with pytest.raises(PayloadError, match="forged"):
        frames.open_frame(frames.seal(1, {}, key=KEY, context=CONTEXT), key=key, context=context)


def test_every_flipped_bit_is_found() -> None:
    """In the header, the body and the HMAC; damage of the body is told from forgery."""
    sealed = frames.seal(1, {"abc": [1, 2]}, key=KEY, context=CONTEXT)
    codes = set()
    for position in range(len(sealed)):
        for bit in range(8):
            changed = bytearray(sealed)
            changed[position] ^= 1 << bit
            with pytest.raises(PayloadError) as caught:
                frames.open_frame(bytes(changed), key=KEY, context=CONTEXT)
            codes.add(caught.value.code)
    assert codes == {"malformed", "version", "damaged", "forged"}


def test_every_cut_is_found() -> None:
    """At each length."""
    sealed = frames.seal(1, {"abc": [1, 2]}, key=KEY, context=CONTEXT)
    for length in range(len(sealed)):
        with pytest.raises(PayloadError):
            frames.open_frame(sealed[:length], key=KEY, context=CONTEXT)


def test_a_body_that_is_too_long_is_the_senders_mistake() -> None:
    """16,384 bytes travel, one more does not."""
    fits = {"a": b"x" * (16_384 - 6)}  # map, key, and three bytes that announce the bytes
    assert len(msgpack.packb(fits)) == 16_384
    assert frames.open_frame(frames.seal(1, fits, key=KEY, context=CONTEXT), key=KEY, context=CONTEXT).body == fits
    with pytest.raises(ValueError, match="16385 bytes"):
        frames.seal(1, {"a": b"x" * (16_384 - 5)}, key=KEY, context=CONTEXT)


def test_msgpack_lists_come_back_as_tuples_and_text_up_to_8192_bytes() -> None:
    """2,000 characters of four bytes each are a valid `Text`."""
    assert frames.unpack(msgpack.packb({"a": [1, [2]]})) == {"a": (1, (2,))}
    long = "\U0001f525" * 2000
    assert frames.unpack(msgpack.packb(long)) == long
    with pytest.raises(PayloadError, match="malformed"):
        frames.unpack(msgpack.packb("x" * 8193))


def test_the_attack_folder_is_what_its_generator_makes() -> None:
    """No frame is forgotten, stale, or edited by hand."""
    found = {path.name: path.read_bytes() for path in ATTACKS.glob("frame-*")}
    assert found == make.frames()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_attack_is_refused_within_8_mib(tmp_path: Path) -> None:
    """Each hostile frame ends in a `PayloadError` with its code, in a fresh process."""
    for name, code in make.FRAME_CODES.items():
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, str(ATTACKS / f"frame-{name}.bin"), KEY.hex(), CONTEXT],
            capture_output=True,
            text=True,
            check=True,
        )
        found, rise = done.stdout.split()
        assert (name, found) == (name, code)
        assert int(rise) <= MAX_RISE_KIB, name
