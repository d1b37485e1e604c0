"""The worker process: how it ends, and that a killed one starts again. Each test starts real processes."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from worker_runs import (
    make_work,
    read_update,
    run_worker,
)

from edge_client.worker import process


def test_a_killed_worker_repeated_gives_the_same_tensors_bit_for_bit(tmp_path: Path, trained: Path) -> None:
    """Killed at the fifth step and again before the manifest's rename: no manifest; the third run ends as if alone."""
    work = make_work(tmp_path / "w")
    log = str(tmp_path / "faults")
    for fault in ("kill:worker.train.step:5@3", "kill:worker.manifest.rename"):
        assert run_worker(work, FEDFIT_FAULT=fault, FEDFIT_FAULT_LOG=log) == -signal.SIGKILL
        assert not (work / "update.json").exists()
    assert run_worker(work) == 0
    _, tensors = read_update(work)
    _, expected = read_update(trained)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)


def test_sigterm_ends_a_training_worker_with_143(tmp_path: Path) -> None:
    """As soon as it has begun to train, and without an update."""
    work = make_work(tmp_path / "w", run={"train": {"epochs": 1000}})
    read_end, write_end = os.pipe()
    command = [sys.executable, "-m", "edge_client.worker.process", str(work)]
    environment = os.environ | {"FEDFIT_PROGRESS_FD": str(write_end), "FEDFIT_PARENT_PID": str(os.getpid())}
    process = subprocess.Popen(command, env=environment, pass_fds=[write_end])
    os.close(write_end)
    with open(read_end, encoding="utf-8") as lines:
        next(line for line in lines if '"train"' in line)
        process.terminate()
        assert process.wait() == 143
    assert not (work / "update.json").exists()


def test_a_second_worker_on_the_same_lease_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is the kernel's: it goes with the process that held it."""
    monkeypatch.setattr(process, "_LOCK_WAIT_S", 0.1)
    with open(tmp_path / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert not process._lock(tmp_path / "lock")
    assert process._lock(tmp_path / "lock")
