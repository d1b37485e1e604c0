"""An assignment's files: parts by their keys, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_runs import make_work

from edge_client.errors import MachineError, PayloadError
from edge_client.records import WorkOrder, from_map
from edge_client.worker.order_files import knowledge_paths, model_path, part_path, read_assignment, read_json
from edge_client.worker.process_cache import ProcessCache


def _order(work: Path, **changes: object) -> WorkOrder:
    return from_map(WorkOrder, read_json(work / "order.json") | changes, where="order")


def test_an_assignment_has_its_run_and_the_owners_file(tmp_path: Path) -> None:
    """The run is read once in a process; the order of the next assignment is its own."""
    work, cache = make_work(tmp_path / "w"), ProcessCache()
    one = read_assignment(_order(work), work, cache)
    (work / "run.json").unlink()
    other = read_assignment(_order(work, train=False, device_file={"share": {"min_count": 99}}), work, cache)
    assert one.run is other.run
    assert (one.run.name, one.settings["name"], one.device.data is not None) == ("t", "t", True)
    assert (one.only_evaluates, other.only_evaluates, other.gate.min_count) == (False, True, 99)


def test_parts_are_found_by_their_keys(tmp_path: Path) -> None:
    """A slice has its own file; shared samples and knowledge are parts, too."""
    parts = {"run": "/r", "model": "/m", "slice:width:1/2": "/s", "public": "/p", "knowledge:1": "/k"}
    order = _order(make_work(tmp_path / "w"), parts=parts)
    assert (model_path(order), part_path(order, "run")) == (Path("/m"), Path("/r"))
    sliced = _order(tmp_path / "w", parts=parts, slice="width:1/2")
    assert model_path(sliced) == Path("/s")
    assert knowledge_paths(order) == [Path("/p"), Path("/k")]


def test_a_part_that_did_not_come_is_named(tmp_path: Path) -> None:
    """So are the parts that did."""
    order = _order(make_work(tmp_path / "w"), parts={"run": "/r"})
    with pytest.raises(PayloadError, match="has no part 'model', only run"):
        model_path(order)


def test_a_file_that_cannot_be_read_is_the_machines_fault_and_bad_json_the_peers(tmp_path: Path) -> None:
    """The first may pass, the second never does."""
    with pytest.raises(MachineError, match="cannot read"):
        read_json(tmp_path / "nothing.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(PayloadError, match=r"half.json is not JSON"):
        read_json(tmp_path / "half.json")
