"""Work that viewers ask for and that takes a while: commands of this coordinator in processes of their own.

What loads torch cannot run in the coordinator. At most two run at a time; what they print is kept, and so is the file
that they write, until the next start of the coordinator.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.columns import plain
from coordinator.dashboard.answers import JobAnswer
from edge_client.errors import ConflictError

__all__ = ["Jobs"]

_AT_A_TIME = 2
_REMEMBERED = 20
_LONGEST_S = 3600.0
_LINES = 30


@dataclass(slots=True)
class _Job:
    id: str
    kind: str
    run: str
    state: str = "running"
    lines: tuple[str, ...] = ()
    file: Path | None = None
    file_name: str = ""


class Jobs:
    """The newest jobs."""

    def __init__(self, state_dir: Path, changed: Callable[[JobAnswer], None]) -> None:
        """`changed` hears of every job that begins or ends."""
        self._state_dir = state_dir
        self._changed = changed
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._processes: set[subprocess.Popen[str]] = set()

    def start(
        self, kind: str, run: str, words: Sequence[str], *, file: Path | None = None, file_name: str = ""
    ) -> JobAnswer:
        """Begin `coordinator WORDS`; raises `ConflictError` while too many are running."""
        if sum(job.state == "running" for job in self._jobs.values()) >= _AT_A_TIME:
            raise ConflictError(f"{_AT_A_TIME} jobs are running already; try again when one of them has ended")
        job = _Job(id=secrets.token_hex(8), kind=kind, run=run, file=file, file_name=file_name)
        self._jobs[job.id] = job
        while len(self._jobs) > _REMEMBERED:
            _, forgotten = self._jobs.popitem(last=False)
            if forgotten.file is not None:
                forgotten.file.unlink(missing_ok=True)
        task = asyncio.get_running_loop().create_task(self._carry_out(job, words))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._changed(self.answer(job.id))
        return self.answer(job.id)

    async def _carry_out(self, job: _Job, words: Sequence[str]) -> None:
        code, output = await asyncio.to_thread(self._run, words)
        job.lines = tuple(plain(line)[:500] for line in output.splitlines()[-_LINES:])
        job.state = "done" if code == 0 else "failed"
        self._changed(self.answer(job.id))

    def _run(self, words: Sequence[str]) -> tuple[int, str]:
        command = [sys.executable, "-m", "coordinator", *words, "--state-dir", str(self._state_dir)]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            return 4, f"cannot start {command[0]}: {error.strerror}"
        self._processes.add(process)
        try:
            output, _ = process.communicate(timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += f"\nended after {_LONGEST_S:.0f} s"
        finally:
            self._processes.discard(process)
        return process.returncode, output

    def answer(self, job_id: str) -> JobAnswer:
        """How a job stands; raises `KeyError` if it is not known any more."""
        job = self._jobs[job_id]
        has_file = job.state == "done" and job.file is not None
        return JobAnswer(
            id=job.id,
            kind=job.kind,
            run=job.run,
            state=job.state,
            lines=job.lines,
            file=job.file_name if has_file else "",
        )

    def file(self, job_id: str) -> tuple[Path, str] | None:
        """What a job wrote and the name to save it under; raises `KeyError`."""
        job = self._jobs[job_id]
        return (job.file, job.file_name) if job.state == "done" and job.file is not None else None

    async def wait(self, job_id: str) -> JobAnswer:
        """The job when it has ended."""
        while self._jobs[job_id].state == "running":
            await asyncio.sleep(0.05)
        return self.answer(job_id)

    def close(self) -> None:
        """End what is running."""
        for process in list(self._processes):
            with contextlib.suppress(OSError):
                process.terminate()
