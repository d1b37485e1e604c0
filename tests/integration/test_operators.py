"""What an operator sees of a running federation: doctors, logs, status, versions, metrics."""

from __future__ import annotations

import importlib.util
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, mlp_run
from typed import ok, typed

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


OLDER = "import edge_client\nedge_client.__version__ = '0.0.9'\n"
METRICS = importlib.util.find_spec("prometheus_client") is not None


def test_a_federation_with_an_older_client_is_seen_in_lists_logs_and_metrics(tmp_path: Path) -> None:
    """One run of two rounds with a, of this version, and b, which calls itself 0.0.9."""
    (tmp_path / "older").mkdir()
    (tmp_path / "older/sitecustomize.py").write_text(OLDER)
    options = ("--log-format", "json", "--page", "127.0.0.1:0", *(("--metrics-port", "0") if METRICS else ()))
    with Fleet(tmp_path, start_options=options) as fleet:
        fleet.start_coordinator()
        fleet.add_devices("a", "b")
        fleet.start_device("a")
        fleet.start_device("b", {"PYTHONPATH": f"{tmp_path / 'older'}:{Path(__file__).parents[2]}"})
        run = fleet.start_run(mlp_run(rounds=2))
        fleet.wait_until(lambda: all(row["plan"] for row in _devices(fleet)), 240, "both have told a plan")
        rows = {row["id"]: row for row in _devices(fleet)}
        status = json.loads(ok("edge_client", "status", "--format", "json", "--state-dir", tmp_path / "a/state"))
        if METRICS:  # a picture is taken every few seconds
            fleet.wait_until(lambda: 'fedfit_device_online{device="b"} 1.0' in _metrics(fleet), 120, "b in the metrics")
        shown = fleet.wait_finished(run, 240)
    assert shown["state"] == "finished"
    assert (rows["a"]["client_is"], rows["b"]["client"], rows["b"]["client_is"]) == ("same", "0.0.9", "older")
    assert rows["a"]["plan"].startswith("full, microbatch")
    assert (status["client"], status["budget_bytes"]) == (rows["a"]["client"], 2 * 10**9)
    lines = [json.loads(line) for line in fleet.log("coordinator").splitlines()]
    assert {"time", "level", "device", "run", "round", "message"} <= set.intersection(*(set(line) for line in lines))
    (page,) = (line["message"] for line in lines if "the page is at" in line["message"])
    assert "#t=" not in page  # a link signs in whoever reads the log
    here = {line["device"] for line in lines if "is here" in line["message"]}
    committed = [(line["run"], line["round"]) for line in lines if "committed" in line["message"]]
    assert (here, committed) == ({"a", "b"}, [(run, 1), (run, 2)])
    for name in ("a", "b"):
        told = fleet.log(name).splitlines()
        form = re.compile(rf"[-0-9]+ [0-9:,]+ [A-Z]+ +\[{name} (- -|{run} [12])\] ")
        assert [line for line in told if not form.match(line)] == []
        assert any(f"[{name} {run} 2]" in line for line in told)


def _devices(fleet: Fleet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(
        ok("coordinator", "device", "list", "--format", "json", "--state-dir", fleet.state_dir)
    )
    return rows


def _metrics(fleet: Fleet) -> str:
    """Where the log says they are."""
    (address,) = re.findall(r"metrics on (http://[^\"]+)", fleet.log("coordinator"))
    with urllib.request.urlopen(address, timeout=10) as answer:
        return str(answer.read().decode())
