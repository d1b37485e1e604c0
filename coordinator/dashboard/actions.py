"""What viewers with the role `operate` may do, and the reports and files that are made for them.

Everything passes through the coordinator's own commands: through its loop, as from the control socket, or as a process
of its own where torch is needed. Covers: the routes and their answers. Does not cover: processes (`jobs`).
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from coordinator.columns import plain
from coordinator.control_messages import StartedRun, StoppedRun
from coordinator.dashboard.answers import JobAnswer, NewRun
from coordinator.dashboard.api import known_run
from coordinator.dashboard.history import History
from coordinator.dashboard.http import HttpError, HttpResponse
from coordinator.dashboard.jobs import Jobs
from coordinator.dashboard.live import LiveModel
from coordinator.dashboard.routes import BodyField, Call, Route
from coordinator.results.run_directory import flat
from coordinator.store.rows import PageActionRow
from edge_client.config.tables import read_toml
from edge_client.errors import InputError

__all__ = ["Actions", "LoopCalls", "refuse_files_of_server"]

_FILE_PREFIXES = ("file:", "npz:", "transformers:")  # starting weights, test data, a model's configuration

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoopCalls:
    """What the coordinator's loop does for the page; each is a future of another thread."""

    command: Callable[[dict[str, Any]], Future[object]]  # as from the control socket
    note: Callable[[PageActionRow], Future[None]]


class Actions:
    """Starts, stops, exports, deploys and reports; used in the loop of the page's thread."""

    def __init__(self, *, live: LiveModel, history: History, jobs: Jobs, calls: LoopCalls, state_dir: Path) -> None:
        self._live = live
        self._history = history
        self._jobs = jobs
        self._calls = calls
        self._state_dir = state_dir
        self.routes = self._routes()

    def _routes(self) -> tuple[Route, ...]:
        return (
            Route(method="GET", path="runs/{run}/report", handle=self.report, answer=None, kind="text/html"),
            Route(method="GET", path="jobs/{job}", handle=self.job, answer=JobAnswer),
            Route(
                method="GET",
                path="jobs/{job}/file",
                handle=self.job_file,
                answer=None,
                role="operate",
                kind="application/octet-stream",
            ),
            Route(
                method="POST",
                path="runs",
                handle=self.start,
                answer=JobAnswer,
                role="operate",
                status=202,
                body=(
                    BodyField(name="file", about="the text of a run file with a built-in model"),
                    BodyField(name="again", about="instead: start this run once more, with its file and its task"),
                    BodyField(name="dry", about="ask every device what it would train; train nothing", kind=bool),
                ),
            ),
            Route(
                method="POST",
                path="runs/{run}/stop",
                handle=self.stop,
                answer=NewRun,
                role="operate",
                status=202,
                body=(BodyField(name="now", about="drop the round that is under way", kind=bool),),
            ),
            Route(
                method="POST",
                path="runs/{run}/export",
                handle=self.export,
                answer=JobAnswer,
                role="operate",
                status=202,
                body=(BodyField(name="version", about="a number, best or last"),),
            ),
            Route(
                method="POST",
                path="runs/{run}/deploy",
                handle=self.deploy,
                answer=JobAnswer,
                role="operate",
                status=202,
                body=(
                    BodyField(name="version", about="a number, best or last"),
                    BodyField(name="devices", about="names; without them: all devices", kind=list),
                ),
            ),
        )

    async def start(self, call: Call) -> JobAnswer | NewRun:
        """Start a run, or a dry run, from the text of a file or like an earlier run."""
        dry = bool(call.body.get("dry"))
        again, text = call.body.get("again"), call.body.get("file")
        if (again is None) == (text is None):
            raise HttpError(400, "bad_field", "expected either file or again")
        words = ["run", "start"]
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", suffix=".toml", prefix="page-", dir=self._state_dir / "tmp", delete=False
        ) as file:
            path = Path(file.name)
            file.write(text if text is not None else "")
        try:
            if again is not None:
                return await self._start_again(call, again, dry)
            table = read_toml(path)
            refuse_files_of_server(table)
            await self._note(call, "dry run" if dry else "start run", str(table.get("name", "")))
            job = self._jobs.start(
                "dry-run" if dry else "start", "", [*words, str(path), *(["--dry-run"] if dry else [])]
            )
            asyncio.get_running_loop().create_task(self._remove_after(job.id, path))
            return job
        except InputError as error:
            path.unlink(missing_ok=True)
            raise HttpError(400, "input", str(error).replace(f"{path}: ", "")) from None

    async def _remove_after(self, job_id: str, path: Path) -> None:
        await self._jobs.wait(job_id)
        path.unlink(missing_ok=True)

    async def _start_again(self, call: Call, again: str, dry: bool) -> NewRun:
        run = self._history.run(again)
        if run is None:
            raise HttpError(404, "unknown_run", f"there is no run {again!r}")
        source = ""
        if run.row.task_sha256:
            source = (self._state_dir / "blobs" / run.row.task_sha256[:2] / run.row.task_sha256).read_text("utf-8")
        await self._note(call, "dry run again" if dry else "start again", again)
        request = {"request": "run-start", "file": run.row.file, "task_source": source, "dry": dry}
        started = await self._command(request, StartedRun)
        return NewRun(run=started.run, waits_for=started.waits_for)

    async def stop(self, call: Call) -> NewRun:
        """End a run after its round, or now; its newest model is kept."""
        run = known_run(self._history, call.path["run"])
        at_once = bool(call.body.get("now"))
        await self._note(call, "stop now" if at_once else "stop", run.row.id)
        stopped = await self._command({"request": "run-stop", "run": run.row.id, "now": at_once}, StoppedRun)
        return NewRun(run=stopped.run, waits_for=None)

    async def export(self, call: Call) -> JobAnswer:
        """Write a run's model as ONNX; the job has it as a file."""
        run, version = known_run(self._history, call.path["run"]), _version(call)
        name = f"{run.row.id}-{version}.onnx"
        folder = Path(tempfile.mkdtemp(prefix="page-export-", dir=self._state_dir / "tmp"))
        path = folder / name
        await self._note(call, "export", f"{run.row.id} {version}")
        words = ["run", "export", run.row.id, "--onnx", str(path), "--version", version]
        return self._jobs.start("export", run.row.id, words, file=path, file_name=name)

    async def deploy(self, call: Call) -> JobAnswer:
        """Send a run's model to devices."""
        run, version, names = known_run(self._history, call.path["run"]), _version(call), call.body.get("devices", [])
        if len(names) > 1000:
            raise HttpError(400, "bad_field", "devices: expected at most 1000 names")
        for name in names:
            if self._live.row(name) is None:
                raise HttpError(404, "unknown_device", f"there is no device {name[:64]!r}")
        await self._note(call, "deploy", f"{run.row.id} {version} to {', '.join(names[:5]) or 'all devices'}")
        words = ["run", "deploy", run.row.id, "--version", version, "--no-wait"]
        return self._jobs.start("deploy", run.row.id, [*words, *(w for name in names for w in ("--device", name))])

    async def report(self, call: Call) -> HttpResponse:
        """The report page of a run, as a file."""
        run = known_run(self._history, call.path["run"])
        folder = Path(tempfile.mkdtemp(prefix="page-report-", dir=self._state_dir / "tmp"))
        path, name = folder / f"{run.row.id}.html", f"{run.row.id}.html"
        job = self._jobs.start(
            "report", run.row.id, ["run", "report", run.row.id, "--out", str(path)], file=path, file_name=name
        )
        ended = await self._jobs.wait(job.id)
        if ended.state != "done":
            raise HttpError(500, "report", "; ".join(ended.lines[-2:]) or "the report could not be made")
        return _download(path, name, "text/html; charset=utf-8")

    async def job(self, call: Call) -> JobAnswer:
        """How a job stands, and the last lines that it printed."""
        try:
            return self._jobs.answer(call.path["job"])
        except KeyError:
            raise HttpError(404, "unknown_job", "this job is not known any more") from None

    async def job_file(self, call: Call) -> HttpResponse:
        """What a job wrote."""
        await self.job(call)
        file = self._jobs.file(call.path["job"])
        if file is None or not file[0].exists():
            raise HttpError(404, "no_file", "this job has no file")
        return _download(file[0], file[1], "application/octet-stream")

    async def _note(self, call: Call, action: str, detail: str) -> None:
        row = PageActionRow(at_s=int(time.time()), name=call.viewer.name, action=action, detail=plain(detail)[:200])
        await asyncio.wrap_future(self._calls.note(row))

    async def _command(self, request: dict[str, Any], answer: type[T]) -> T:
        result = await asyncio.wrap_future(self._calls.command(request))
        assert isinstance(result, answer)
        return result


def _version(call: Call) -> str:
    version = call.body.get("version", "best")
    if version not in ("best", "last") and not (version.isdigit() and version.isascii() and len(version) < 10):
        raise HttpError(400, "bad_field", "version: expected a number, best or last")
    return str(version)


def _download(path: Path, name: str, kind: str) -> HttpResponse:
    headers = (("content-disposition", f'attachment; filename="{name}"'),)
    return HttpResponse(content_type=kind, headers=headers, file=path)


def refuse_files_of_server(table: Mapping[str, Any]) -> None:
    """Raise `InputError` for a run file that would make the server read a file which its sender names."""
    if "task" in table:
        raise InputError("a task is code: start its run in a terminal, with coordinator run start FILE.toml")
    for key, value in flat(table):
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and text.startswith(_FILE_PREFIXES) for text in texts):
            raise InputError(
                f"{key}: {value!r} names a file on the server; start this run in a terminal, with coordinator run start"
                " FILE.toml"
            )
