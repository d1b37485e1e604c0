"""What an operator sees of a running federation: doctors on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fleet import Fleet
from tests.typed import typed

pytestmark = pytest.mark.broker


def examined(package: str, state_dir: Path, *only: str) -> dict[str, dict[str, Any]]:
    """What a doctor found, by the check's name."""
    words = [word for name in only for word in ("--only", name)]
    done = typed(package, "doctor", "--format", "json", "--state-dir", state_dir, *words)
    assert done.returncode in (0, 1), done.stderr
    return {found["check"]: found for found in json.loads(done.stdout)["checks"]}


def test_doctors_see_a_federation_that_works_and_one_that_does_not(tmp_path: Path) -> None:
    """Server and device pass while it runs; afterwards both say what is missing."""
    server = ("state", "broker-program", "coordinator", "addresses", "port", "devices")
    with Fleet(tmp_path, start_options=("--tls",)) as fleet:
        fleet.start_coordinator()
        found = examined("coordinator", fleet.state_dir, *server)
        assert {name: entry["state"] for name, entry in found.items()} == {
            "state": "passed",
            "broker-program": "passed",
            "coordinator": "passed",
            "addresses": "passed",
            "port": "skipped",
            "devices": "failed",
        }
        assert found["devices"]["mend"] == "coordinator device add NAME --out bundles"
        device = tmp_path / "a" / "state"
        typed("edge_client", "join", fleet.write_bundle("a"), "--state-dir", device)
        assert examined("edge_client", device, "broker", "identity")["broker"]["state"] == "passed"
        assert examined("coordinator", fleet.state_dir, "devices")["devices"]["text"].startswith("none of 1 devices")
    found = examined("coordinator", fleet.state_dir, "coordinator", "port", "addresses")
    assert [entry["state"] for entry in found.values()] == ["failed", "passed", "skipped"]
    assert found["coordinator"]["mend"].startswith("coordinator start")
    assert "no broker of this bundle answers" in examined("edge_client", device, "broker")["broker"]["text"]
