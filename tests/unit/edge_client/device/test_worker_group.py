"""The worker's control group, on a copy of the files that the kernel would make: what is written where.

Real groups could not be tried here. Files of a group appear with it; in the copy they are made before.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from edge_client.device.worker_group import WorkerGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux")

ME = str(os.getpid())


def _tree(root: Path, *, own: str = "/fedfit.service", controllers: str = "cpu memory", delegated: bool = True) -> Path:
    """A system with this process in `own`; returns the directory of the service's group."""
    base = root / "sys/fs/cgroup/fedfit.service"
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(f"0::{own}\n")
    _group(base, ["cgroup.procs", "cgroup.subtree_control"])
    for folder in (base.parent, base):
        (folder / "cgroup.controllers").write_text(f"{controllers}\n")
    if delegated and os.geteuid() == 0:
        try:
            os.setxattr(base, "user.delegate", b"1")
        except OSError:
            pytest.skip("this file system has no extended attributes")
    return base


def _group(folder: Path, files: Sequence[str]) -> None:
    folder.mkdir(parents=True)
    for name in files:
        (folder / name).touch()


def _children(base: Path) -> None:
    _group(base / "fedfit-client", ["cgroup.procs"])
    _group(base / "fedfit-worker", ["cgroup.procs", "memory.max", "memory.swap.max"])


def _texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("own", ["/fedfit.service", "/fedfit.service/fedfit-client"])
def test_a_worker_gets_a_group_with_a_limit(tmp_path: Path, own: str) -> None:
    """Budget and 32 MiB, no swap; this process goes beside it first, and stays there after a start over."""
    base = _tree(tmp_path, own=own)
    _children(base)
    group = WorkerGroup.open(tmp_path)
    assert group is not None
    assert (base / "fedfit-client/cgroup.procs").read_text() == ME
    assert (base / "cgroup.subtree_control").read_text() == "+memory"
    group.take(77, 10**8)
    expected = {"cgroup.procs": "77", "memory.max": str(10**8 + 32 * 2**20), "memory.swap.max": "0"}
    assert _texts(base / "fedfit-worker") == expected
    assert (base / "cgroup.procs").read_text() == ""


def test_the_group_is_removed(tmp_path: Path) -> None:
    """And a second time is no error."""
    base = _tree(tmp_path)
    _group(base / "fedfit-client", ["cgroup.procs"])
    group = WorkerGroup.open(tmp_path)
    assert group is not None
    assert (base / "fedfit-worker").is_dir()
    group.remove()
    group.remove()
    assert not (base / "fedfit-worker").exists()


def test_a_refusal_leaves_everything_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The new group has no cgroup.procs here: this process goes back, the group goes away, and the log says so."""
    base = _tree(tmp_path)
    with caplog.at_level(logging.INFO):
        assert WorkerGroup.open(tmp_path) is None
    assert (base / "cgroup.procs").read_text() == ME
    assert not (base / "fedfit-client").exists()
    assert "no control group for workers" in caplog.text


def test_a_worker_that_cannot_be_moved_runs_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line; memory.swap.max may be missing where there is no swap."""
    base = _tree(tmp_path)
    _children(base)
    (base / "fedfit-worker/memory.swap.max").unlink()
    (base / "fedfit-worker/cgroup.procs").unlink()
    group = WorkerGroup.open(tmp_path)
    assert group is not None
    group.take(77, 10**8)
    assert (base / "fedfit-worker/memory.max").read_text() == str(10**8 + 32 * 2**20)
    assert caplog.text.count("the worker is not in") == 1


@pytest.mark.parametrize("why", ["nothing", "controllers", "v1", "delegated"])
def test_what_is_not_ours_is_left_alone(tmp_path: Path, why: str) -> None:
    """No groups at all, no memory controller, only version 1; as root: not marked as delegated."""
    if why == "delegated" and os.geteuid() != 0:
        pytest.skip("whoever is not root can write only where it was delegated")
    if why != "nothing":
        base = _tree(tmp_path, controllers="cpu" if why == "controllers" else "memory", delegated=why != "delegated")
        _children(base)
    if why == "v1":
        (tmp_path / "proc/self/cgroup").write_text("4:memory:/fedfit.service\n")
    assert WorkerGroup.open(tmp_path) is None
    if why != "nothing":
        assert (base / "fedfit-client/cgroup.procs").read_text() == ""
