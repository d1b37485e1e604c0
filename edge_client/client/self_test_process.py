"""The process that tests a deployed model, as the daemon sees it; see also `edge_client.onnx.self_test`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.device.watch import count_oom_kills, killed_for_memory
from edge_client.errors import PayloadError
from edge_client.records import from_map, to_map
from edge_client.wire.messages import Deploy

__all__ = ["COMMAND", "SelfTest", "write_job"]

COMMAND = (sys.executable, "-m", "edge_client.onnx.self_test")  # the job's and the result's file follow


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """The result of a test that failed."""

    error: str


def write_job(folder: Path, file: Path, deploy: Deploy, budget_bytes: int) -> None:
    """Make an empty folder with the job in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    job = {"file": str(file), "deploy": to_map(deploy), "budget_bytes": budget_bytes}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    (folder / "log.txt").touch()


class SelfTest:
    """A running test; it has ended when `fd` can be read."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        """Start the test of the job that `write_job` has put into `folder`."""
        self._result = folder / "result.json"
        self._oom_kills = count_oom_kills()
        self.until: float | None = None
        self.fd, write_fd = os.pipe()
        environment = {"FEDFIT_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        try:
            with open(folder / "log.txt", "wb") as log_file:
                self._process = subprocess.Popen(
                    [*command, str(folder / "job.json"), str(self._result)],
                    stdin=subprocess.DEVNULL,
                    stdout=log_file,
                    stderr=log_file,
                    pass_fds=(write_fd,),
                    env={**os.environ, **environment},
                )
        except OSError:
            os.close(self.fd)
            raise
        finally:
            os.close(write_fd)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it now."""
        self._process.kill()

    def result(self) -> tuple[int, str]:
        """Wait for its end; returns its exit code, and the error that it wrote, if any."""
        os.close(self.fd)
        code = self._process.wait()
        try:
            error = from_map(_Failure, json.loads(self._result.read_bytes())).error
        except (OSError, ValueError, RecursionError, PayloadError):
            error = ""
        return code, error[:1500]

    def killed_for_memory(self, code: int) -> bool:
        """Whether the kernel killed it for lack of memory; `kill` was not called."""
        return killed_for_memory(code, self._oom_kills)
