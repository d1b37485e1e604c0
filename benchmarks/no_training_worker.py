"""A worker that trains nothing: it answers an assignment with the model it got, changed in one number; no torch.

Takes the place of `edge_client.worker` in benchmarks of transfers. One number changes in every round, because a model
that stayed the same would not travel again; the report depends on the device, because equal updates are stored once.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from edge_client.wire.container import Header, build_header, codec_rule, payload_kind, read_header, tensor_bytes

_PIECE = 1 << 18
_LAST = {"fp32": struct.Struct("<f"), "fp16": struct.Struct("<e")}  # how the last number of an update is written


def main() -> int:
    """Write `update.bin` and `update.json` into the work directory that the daemon names."""
    folder = Path(sys.argv[1])
    order = json.loads((folder / "order.json").read_bytes())
    codec = json.loads(Path(order["parts"]["run"]).read_bytes())["rounds"]["codec"]
    model = Path(order["parts"]["model"])
    base = read_header(model)
    num_samples = 1 + zlib.crc32(order["device"].encode()) % 1000
    table = [(e.name, codec_rule(len(e.shape), codec, integer=e.codec == "i64"), e.shape) for e in base.entries]
    meta = {"num_samples": num_samples, "steps": 1, "payload": payload_kind(codec)}
    last = _LAST[table[-1][1]].pack(order["round"] if codec == "fp32" else 1.0)
    if codec == "fp32":
        body = _without_end(model, base, len(last))
    else:
        body = _zeros(sum(tensor_bytes(codec, shape) for _, codec, shape in table) - len(last))
    digest, length = hashlib.sha256(), 0
    with open(folder / "update.bin", "wb", buffering=0) as out:
        for piece in (build_header(meta, table), *body, last):
            digest.update(piece)
            length += out.write(piece)
    manifest = {"sha256": digest.hexdigest(), "length": length, "num_samples": num_samples}
    (folder / "update.json").write_text(json.dumps(manifest), encoding="utf-8")
    return 0


def _without_end(model: Path, base: Header, end_bytes: int) -> Iterator[bytes]:
    """The model's numbers but for the last `end_bytes`."""
    fd = os.open(model, os.O_RDONLY)
    position, end = base.data_offset, base.total_bytes - end_bytes
    while position < end:
        piece = os.pread(fd, min(_PIECE, end - position), position)
        position += len(piece)
        yield piece
    os.close(fd)


def _zeros(count: int) -> Iterator[bytes]:
    """A delta of nothing."""
    whole = bytes(_PIECE)
    while count > 0:
        yield whole[: min(count, _PIECE)]
        count -= _PIECE


if __name__ == "__main__":
    sys.exit(main())
