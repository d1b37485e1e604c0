"""A model as it travels: names, order and codec of its tensors."""

from __future__ import annotations

from pathlib import Path

import torch
from aggregator_jobs import (
    INT8,
    do_job,
    load,
    save,
)

from edge_client.wire.tensors import ContainerReader


def test_encode_keeps_names_and_order_and_applies_the_rule(tmp_path: Path) -> None:
    """int8: row (127, -127) has scale 1 and is exact; the vector is fp32, the counter i64."""
    model = save(tmp_path / "m", {"w": torch.tensor([[127.0, -127.0]]), "b": torch.tensor([0.1]), "n": torch.tensor(3)})
    reply = do_job({"id": 1, "job": "encode", "run": INT8, "model": str(model), "out": str(tmp_path / "o")})
    assert reply["ok"]
    with ContainerReader(tmp_path / "o") as reader:
        assert [(e.name, e.codec) for e in reader.header.entries] == [
            ("model/w", "int8"),
            ("model/b", "fp32"),
            ("model/n", "i64"),
        ]
    assert load(tmp_path / "o")["w"].tolist() == [[127.0, -127.0]]
