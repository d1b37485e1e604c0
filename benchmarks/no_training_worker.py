"""A worker that trains nothing: it answers an assignment with the model it got, changed in one number; no torch.

Takes the place of `edge_client.worker.process` in benchmarks of transfers. One number changes in every round, because
a model
that stayed the same would not travel again; the report depends on the device, because equal updates are stored once.

`python -m benchmarks.no_training_worker MEETING NUM WORKDIR`: the update is finished when NUM workers have theirs, so
that all downloads end before the first upload begins; MEETING is a folder that they share.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from edge_client.wire.container import Header, build_header, codec_rule, payload_kind, read_header, tensor_bytes

__all__ = ["num_samples_of", "update_pieces", "work"]

_PIECE = 1 << 18
_POLL_S = 0.01
_LAST = {"fp32": struct.Struct("<f"), "fp16": struct.Struct("<e")}  # how the last number of an update is written


def work(meeting_folder: str, num_workers: str, work_folder: str) -> int:
    """Write `update.bin` and `update.json` into the work directory that the daemon names."""
    meeting, num, folder = Path(meeting_folder), int(num_workers), Path(work_folder)
    order = json.loads((folder / "order.json").read_bytes())
    device, round_ = order["device"], order["round"]
    digest, length = hashlib.sha256(), 0
    with open(folder / "update.bin", "wb", buffering=0) as out:
        for piece in update_pieces(Path(order["parts"]["run"]), Path(order["parts"]["model"]), device, round_):
            digest.update(piece)
            length += out.write(piece)
    _meet(meeting / f"{order['run']}-{round_}", device, num)
    manifest = {"sha256": digest.hexdigest(), "length": length, "num_samples": num_samples_of(device)}
    (folder / "update.json").write_text(json.dumps(manifest), encoding="utf-8")
    return 0


def _meet(place: Path, device: str, num: int) -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / device).touch()
    while len(os.listdir(place)) < num:
        time.sleep(_POLL_S)


def num_samples_of(device: str) -> int:
    """What a device claims to have trained on."""
    return 1 + zlib.crc32(device.encode()) % 1_000_000


def update_pieces(run: Path, model: Path, device: str, round_: int) -> Iterator[bytes]:
    """The bytes of an update of the container `model`: the same weights, or a delta of nothing, but for one number."""
    codec = json.loads(run.read_bytes())["rounds"]["codec"]
    base = read_header(model)
    table = [(e.name, codec_rule(len(e.shape), codec, integer=e.codec == "i64"), e.shape) for e in base.entries]
    yield build_header({"num_samples": num_samples_of(device), "steps": 1, "payload": payload_kind(codec)}, table)
    last = _LAST[table[-1][1]].pack(round_ if codec == "fp32" else 1.0)
    if codec == "fp32":
        yield from _without_end(model, base, len(last))
    else:
        yield from _zeros(sum(tensor_bytes(codec, shape) for _, codec, shape in table) - len(last))
    yield last


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
    whole = bytes(_PIECE)
    while count > 0:
        yield whole[: min(count, _PIECE)]
        count -= _PIECE


if __name__ == "__main__":
    sys.exit(work(*sys.argv[1:]))
