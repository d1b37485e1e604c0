"""The status file: when it is written, what is made of a damaged one, what people read."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rows import digest

from edge_client import durable
from edge_client.client import deployed, status
from edge_client.client.identity import STATE_KIND, STATE_VERSION, Bundle
from edge_client.client.status import Moment, Status, StatusFile, one_line_status, read_status
from edge_client.wire.messages import Deploy, Deployed

BUNDLE = Bundle(federation="fed", device="pi", brokers=("mqtts://h:8883",), password="p" * 20, key=digest("k"))
LEASE = Status(pid=7, link="let_in", state="working", lease="l", run="r-1", round=3, num_rounds=9)
WORKING = replace(LEASE, phase="train", total=8)


def test_the_file_is_written_when_something_changed_and_steps_less_often(tmp_path: Path) -> None:
    """Steps alone wait for five seconds since the last write; a new phase does not."""
    path = tmp_path / "status.json"
    file = StatusFile(path)
    file.update(WORKING, 0.0)
    assert file.due == 1.0
    path.unlink()
    file.update(WORKING, 100.0)
    file.update(replace(WORKING, step=2, loss=0.5), 4.9)
    assert not path.exists()
    file.update(replace(WORKING, step=3, loss=0.5), 5.0)
    assert read_status(path) == replace(WORKING, step=3, loss=0.5)
    file.update(replace(WORKING, phase="write"), 6.0)
    assert read_status(path) == replace(WORKING, phase="write")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_disk_that_takes_nothing_is_nobodys_business(tmp_path: Path) -> None:
    """The folder is gone."""
    StatusFile(tmp_path / "gone" / "status.json").update(WORKING, 0.0)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"pid": -1}', '{"pid": 1, "link": "g"}', '{"x": 1}'])
def test_a_damaged_file_is_no_status(tmp_path: Path, text: str) -> None:
    """After a power cut."""
    (tmp_path / "status.json").write_text(text)
    assert read_status(tmp_path / "status.json") is None
    assert status.summary(tmp_path, BUNDLE)["link"] == "stopped"


def test_people_read_what_runs_and_what_happened_last(tmp_path: Path) -> None:
    """While the lock is held, all of it; afterwards the identity and the last events."""
    lock = durable.claim_state_dir(tmp_path, kind=STATE_KIND, version=STATE_VERSION)
    told = replace(WORKING, step=2, loss=0.25, error=Moment(text="it\nfailed\x1b[2J", at_s=1.0))
    StatusFile(tmp_path / "status.json").update(told, 0.0)
    text = status.describe(status.summary(tmp_path, BUNDLE))
    for part in ("pi of federation fed", "process 7", "mqtts://h:8883: connected", "3 of 9, train 2/8, loss 0.25"):
        assert part in text
    assert "it failed?[2J (19" in text
    os.close(lock)
    text = status.describe(status.summary(tmp_path, BUNDLE))
    assert "does not run" in text
    assert "round 3" not in text
    assert "it failed" in text


def test_after_the_last_round_the_model_is_judged_once_more() -> None:
    """Round 10 of 9 would be a riddle."""
    assert status.one_line_status(LEASE) == "working: run r-1, round 3 of 9"
    assert status.one_line_status(replace(LEASE, round=10)) == "working: run r-1, the last evaluation"


def test_a_deployed_model_is_shown_with_its_path(tmp_path: Path) -> None:
    """What is in use, and why a newer one is not; a device that was never given one has no such line."""
    assert status.summary(tmp_path, BUNDLE)["deployed"] is None
    about = {"run": "r-1", "version": 3, "input": (1,), "classes_sha256": digest("c"), "sha256": digest("m")}
    folder = deployed.DeployedFolder(tmp_path)
    folder.set_wanted(Deploy(deployment="d1", length=5, **about))
    assert "deploying     r-1 version 3 (full, fp32)" in status.describe(status.summary(tmp_path, BUNDLE))
    (tmp_path / "blob").write_bytes(b"model")
    folder.set_wanted(Deploy(deployment="d1", length=5, **about | {"sha256": hashlib.sha256(b"model").hexdigest()}))
    assert folder.swap(tmp_path / "blob")
    folder.set_wanted(Deploy(deployment="d2", length=5, **about))
    folder.end(Deployed(deployment="d2", state="rolled_back", code="self_test", detail="it\ndiffers"))
    text = status.describe(status.summary(tmp_path, BUNDLE))
    assert f"deployed      r-1 version 3 (full, fp32): {tmp_path}/deployed/current.onnx" in text
    assert "not deployed  self_test: it differs" in text


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (Status(pid=1), "not connected"),
        (Status(pid=1, link="connected"), "connected; the coordinator has not answered"),
        (Status(pid=1, link="let_in"), "idle"),
        (
            Status(pid=1, link="let_in", state="working", run="r-1", round=2, num_rounds=5),
            "working: run r-1, round 2 of 5",
        ),
    ],
)
def test_the_status_says_who_waits_for_whom(status: Status, line: str) -> None:
    """What `systemctl status` prints."""
    assert one_line_status(status) == line
