"""What FedAvg would send of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aggregator_jobs import do_job
from rows import run_file

from coordinator.results.reference_bytes import whole_model_bytes
from edge_client.records import to_map
from edge_client.wire.tensors import ContainerReader, codec_for, write_container


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
def test_it_is_what_a_run_of_fedavg_encodes(tmp_path: Path, codec: str) -> None:
    """The length of the container that the aggregator makes for its devices."""
    run = to_map(run_file(rounds={"codec": codec}))
    assert do_job({"id": 1, "job": "init", "run": run, "out": str(tmp_path / "m")})["ok"]
    job = {"id": 1, "job": "encode", "run": run, "model": str(tmp_path / "m"), "out": str(tmp_path / "sent")}
    assert do_job(job)["length"] == whole_model_bytes(tmp_path / "m", codec)


def test_what_a_method_keeps_beside_the_model_is_not_fedavgs(tmp_path: Path) -> None:
    """Extra tensors, memory and the models of slices: the same length as without them, and 4 x 6 bytes of numbers."""
    own = {"model/w": torch.zeros(2, 3)}
    more = own | {"extra/c": torch.zeros(9), "memory/m": torch.zeros(9), "slice:width:1/2/model/w": torch.zeros(9)}
    for name, values in (("own", own), ("more", more)):
        table = [(key, codec_for(value, "fp32"), value.shape) for key, value in values.items()]
        write_container(tmp_path / name, {}, table, iter(values.values()))
    size = whole_model_bytes(tmp_path / "own", "fp32")
    assert whole_model_bytes(tmp_path / "more", "fp32") == size == (tmp_path / "own").stat().st_size
    with ContainerReader(tmp_path / "own") as reader:
        assert size - reader.header.data_offset == 24
