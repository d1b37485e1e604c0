"""What outlives virtual devices."""

from __future__ import annotations

import json
from pathlib import Path

from coordinator.simulation.virtual_devices import settle_left


def test_what_a_method_wrote_stays_if_its_update_does(tmp_path: Path) -> None:
    """Killed with three leases in hand: the first was stored, the second not, the third order was half written."""
    for name, order in (("a", json.dumps({"lease": "l1"})), ("b", json.dumps({"lease": "l2"})), ("c", '{"lea')):
        for folder in ("work", "method-state/r-1"):
            (tmp_path / name / folder).mkdir(parents=True)
        (tmp_path / name / "work/order.json").write_text(order)
        (tmp_path / name / "work/update.bin").write_bytes(b"update")
        (tmp_path / name / "method-state/r-1/next").write_bytes(b"new")
        (tmp_path / name / "method-state/r-1/current").write_bytes(b"old")
    settle_left(tmp_path, lambda lease: lease == "l1")
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/method-state/r-1/*")}
    assert kept == {*(f"{name}/method-state/r-1/current" for name in "abc"), "a/method-state/r-1/stored-l1"}
    assert (tmp_path / "a/method-state/r-1/stored-l1").read_bytes() == b"new"
    assert not list(tmp_path.glob("*/work/*"))
