"""The folder of a deployed model: at every moment a whole model or none, whatever ended the process before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rows import digest

from edge_client import durable, faults
from edge_client.client import deployed
from edge_client.client.deployed import DeployedFolder, Record, read_record
from edge_client.errors import InputError
from edge_client.wire.messages import Deploy, Deployed

OLD, NEW = b"an old model", b"a new model, and a longer one"
STEPS = [f"deployed.{what}.{step}" for what in ("name", "current") for step in ("sync", "rename", "done")]


def deploy(content: bytes, name: str) -> Deploy:
    """Of a file with these bytes."""
    about = {"run": "r-1", "version": 3, "input": (1, 2, 2), "classes_sha256": digest("classes")}
    return Deploy(deployment=name, sha256=hashlib.sha256(content).hexdigest(), length=len(content), **about)


FIRST, SECOND = deploy(OLD, "d1"), deploy(NEW, "d2")


def put(state_dir: Path, content: bytes, what: Deploy) -> DeployedFolder:
    """A blob that passed its test takes its place."""
    files = DeployedFolder(state_dir)
    files.set_wanted(what)
    blob = state_dir / "blob"
    blob.write_bytes(content)
    assert files.swap(blob)
    assert not blob.exists()
    return files


def test_a_model_takes_the_place_of_another_which_is_kept(tmp_path: Path) -> None:
    """The record tells what both are, also to the next process; no temporary file is left."""
    put(tmp_path, OLD, FIRST)
    assert (tmp_path / "deployed/current.onnx").read_bytes() == OLD
    files = put(tmp_path, NEW, SECOND)
    names = {entry.name: entry.read_bytes() for entry in files.folder.iterdir() if entry.suffix == ".onnx"}
    assert names == {"current.onnx": NEW, "previous.onnx": OLD}
    active = Deployed(deployment="d2", state="active")
    assert read_record(files.folder) == Record(current=SECOND, previous=FIRST, outcome=active)
    assert sorted(entry.name for entry in files.folder.iterdir()) == ["current.onnx", "previous.onnx", "record.json"]
    assert deployed.model_path(tmp_path).read_bytes() == NEW


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_ends_half_way_leaves_a_whole_model_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """At each step of the swap, as a kill does: the current file has the old or the new bytes, then the new ones."""
    put(tmp_path, OLD, FIRST)
    files = DeployedFolder(tmp_path)
    files.set_wanted(SECOND)
    blob = tmp_path / "blob"
    blob.write_bytes(NEW)
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"eio:{step}")])
    with pytest.raises(OSError, match="injected"):
        files.swap(blob)
    assert (tmp_path / "deployed/current.onnx").read_bytes() in (OLD, NEW)
    again = DeployedFolder(tmp_path)
    again.repair()
    if again.record.wanted is not None:
        assert (tmp_path / "deployed/current.onnx").read_bytes() == OLD
        assert again.swap(blob)
    assert (tmp_path / "deployed/current.onnx").read_bytes() == NEW
    assert (tmp_path / "deployed/previous.onnx").read_bytes() == OLD
    assert (again.record.current, again.record.previous, again.record.wanted) == (SECOND, FIRST, None)


@pytest.mark.parametrize("damage", [NEW[:-1], b"", None])
def test_a_damaged_model_is_replaced_by_the_one_before(tmp_path: Path, damage: bytes | None) -> None:
    """At a start after a power cut: the previous file is whole, and the coordinator will be told."""
    put(tmp_path, OLD, FIRST)
    put(tmp_path, NEW, SECOND)
    current = tmp_path / "deployed/current.onnx"
    current.unlink()
    if damage is not None:
        current.write_bytes(damage)
    files = DeployedFolder(tmp_path)
    files.repair()
    assert current.read_bytes() == OLD
    assert files.record.current == FIRST
    assert files.record.outcome is not None
    assert (files.record.outcome.deployment, files.record.outcome.state) == ("d2", "rolled_back")
    assert "r-1 version 3 is in use again" in files.record.outcome.detail


def test_a_damaged_model_without_one_before_is_none(tmp_path: Path) -> None:
    """Nobody may load half a model."""
    put(tmp_path, OLD, FIRST)
    (tmp_path / "deployed/current.onnx").write_bytes(OLD[:-1])
    files = DeployedFolder(tmp_path)
    files.repair()
    assert files.record.current is None
    with pytest.raises(InputError, match="no model is deployed on this device"):
        deployed.model_path(tmp_path)


def test_a_disk_that_does_not_keep_what_it_is_given_gets_the_old_model_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hash of the file in its place is compared: the swap did not happen, and says so."""
    put(tmp_path, OLD, FIRST)
    files = DeployedFolder(tmp_path)
    files.set_wanted(SECOND)
    blob = tmp_path / "blob"
    blob.write_bytes(NEW[:-1])  # as the test did not see it
    assert not files.swap(blob)
    assert (tmp_path / "deployed/current.onnx").read_bytes() == OLD
    assert (files.record.current, files.record.wanted) == (FIRST, None)
    assert files.record.outcome is not None
    assert (files.record.outcome.deployment, files.record.outcome.code) == ("d2", "damaged")


def test_the_same_file_again_needs_no_swap(tmp_path: Path) -> None:
    """Another deployment of what is in use; not if the file is damaged, or another one is meant."""
    files = put(tmp_path, OLD, FIRST)
    assert not files.adopt_current(SECOND)
    assert files.adopt_current(replace(FIRST, deployment="d9"))
    assert read_record(files.folder).outcome == Deployed(deployment="d9", state="active")
    files.current.write_bytes(b"x")
    assert not files.adopt_current(FIRST)


def test_a_disk_without_links_keeps_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FAT has none."""

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(deployed.os, "link", no_links)
    put(tmp_path, OLD, FIRST)
    put(tmp_path, NEW, SECOND)
    assert (tmp_path / "deployed/previous.onnx").read_bytes() == OLD


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, json.dumps({"current": 1}), json.dumps({"attempts": -1})])
def test_a_record_that_makes_no_sense_leaves_the_model_alone(tmp_path: Path, text: str) -> None:
    """The file beside it stays what programs use, and the next deployment works."""
    files = put(tmp_path, OLD, FIRST)
    (files.folder / "record.json").write_text(text)
    again = DeployedFolder(tmp_path)
    again.repair()
    assert again.record == Record()
    assert durable.sha256_file(again.current) == FIRST.sha256
    put(tmp_path, NEW, SECOND)
