"""The bytes that FedAvg would have moved in a run's place: the whole model to each device that trained, and back.

    each way, in a round   devices whose updates counted x bytes of the whole model in the run's codec

The model counts as the container in which it travels, without messages and the frames of its chunks. The count of a run
includes these, and what devices received that only evaluate: a run of FedAvg is a little above this reference.
"""

from __future__ import annotations

from pathlib import Path

from edge_client.wire.container import MODEL_PREFIX, TableRow, build_header, codec_rule, read_header, tensor_bytes

__all__ = ["whole_model_bytes"]


def whole_model_bytes(path: Path, codec: str) -> int:
    """The length of the container in which the server's whole model would travel, without the tensors of its method."""
    entries = [entry for entry in read_header(path).entries if entry.name.startswith(MODEL_PREFIX)]
    table: list[TableRow] = [
        (entry.name, codec_rule(len(entry.shape), codec, integer=entry.codec == "i64"), entry.shape)
        for entry in entries
    ]
    return len(build_header({}, table)) + sum(tensor_bytes(kind, shape) for _, kind, shape in table)
