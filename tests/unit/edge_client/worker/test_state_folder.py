"""The record of the model that a device last worked with."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_runs import make_work

from edge_client.records import WorkOrder, from_map
from edge_client.worker.order_files import read_json
from edge_client.worker.state_folder import LastModel, read_last_model, write_last_model


def test_the_last_model_is_that_of_the_newest_assignment(tmp_path: Path) -> None:
    """Blobs are named by their hashes; round 3 of run t-1 as `make_work` has it."""
    work = make_work(tmp_path / "w")
    order = from_map(WorkOrder, read_json(work / "order.json"), where="order")
    folder = Path(order.method_state)
    assert read_last_model(folder) is None
    write_last_model(order, Path("/blobs/older"), Path("/blobs/older"))
    write_last_model(order, Path("/blobs/aa"), Path("/blobs/bb"))
    assert read_last_model(folder) == LastModel(
        run="t-1", round=3, slice="full", settings_sha256="aa", model_sha256="bb"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": "t-1"}', "[" * 9999])
def test_a_damaged_record_counts_as_none(tmp_path: Path, text: str) -> None:
    """It is written again in the next round."""
    (tmp_path / "received.json").write_text(text)
    assert read_last_model(tmp_path) is None
