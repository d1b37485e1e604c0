"""Controls the worker of a device, one process at a time: starts it, watches it, and ends it when it hangs.

    memory    other programs take it: the worker is told to make do with less
    stall     it does nothing for minutes: it is ended, which counts as a crash
    failures  are explained to people here, and to the coordinator as far as the owner allows

Covers: the process of one lease. Does not cover: when it starts and what follows its end (`session`), the pipe and the
signals (`workers`), whether it is a fork of a template (`warm_workers`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from edge_client import durable, faults
from edge_client.client import workers
from edge_client.client.events import Event, WorkerDone, WorkerFailed
from edge_client.client.instructions import Start
from edge_client.client.lease_files import LeaseFiles
from edge_client.client.status import one_line
from edge_client.client.warm_workers import WarmWorkers
from edge_client.client.worker_stall import STALLED_AFTER_S, StallWatch
from edge_client.config.device_file import DeviceFile
from edge_client.config.quantities import format_bytes
from edge_client.device.watch import MemoryWatch
from edge_client.device.worker_group import WorkerGroup
from edge_client.records import to_map
from edge_client.wire.messages import Assign

__all__ = ["WorkerControl"]

log = logging.getLogger(__name__)

_MAX_WARNINGS = 100  # of workers, logged by one daemon
_LOOK_EVERY_S = 1.0  # at the memory, while a worker runs
_NOTEWORTHY = 0.9  # of the last budget: a budget above this share differs only by the noise of other programs


class WorkerControl:
    """Starts, watches and ends the worker of one device."""

    def __init__(
        self,
        *,
        device: str,
        device_file: DeviceFile,
        files: LeaseFiles,
        budget_bytes: int,
        note_error: Callable[[str], None],
        command: Sequence[str] = workers.COMMAND,
        template_command: Sequence[str] = (),
        root: Path = Path("/"),
        group: WorkerGroup | None = None,
    ) -> None:
        """`budget_bytes` is what a worker may use when other programs leave it, `note_error` takes failures for the
        status file; the other parameters are those of `Daemon`.
        """
        self._device = device
        self._device_file = device_file
        self._files = files
        self._usual_bytes = budget_bytes
        self._note_error = note_error
        self._root = root
        self._group = group
        self._memory = MemoryWatch(budget_bytes, limit=device_file.limits.memory, root=root)
        self._stall = StallWatch()
        self._look_at = 0.0
        self._warnings: set[str] = set()  # those that were logged
        self._worker: workers.Worker | None = None
        self._ending: workers.Worker | None = None  # the one before: its update is here, its process is about to end
        self._start: Start | None = None  # what the worker does that runs, ran last, or waits for the template
        self._waits = False
        self._phases: dict[str, float] = {}  # seconds of what comes before the worker of this lease
        self._since: tuple[str, float] | None = None  # the lease and when it began to wait for its parts, or a worker
        self._warm = WarmWorkers(
            command=command,
            template_command=template_command,
            started=lambda pid: self.limit(pid, self._usual_bytes),  # its workers are born in its group
        )
        self.budget_bytes = budget_bytes  # of the worker that runs or ran last

    @property
    def is_running(self) -> bool:
        """Whether a worker runs, or is about to start; also until its end was noticed."""
        return self._worker is not None or self._waits

    @property
    def fds(self) -> list[int]:
        """The file descriptors to watch: they become readable when the worker reports something or ends."""
        running = [worker.progress_fd for worker in (self._worker, self._ending) if worker is not None]
        return [*running, *self._warm.fds]

    @property
    def plan(self) -> str:
        """How the worker trains, as text; empty without a worker."""
        return self._worker.plan() if self._worker is not None else ""

    def prepare(self, assign: Assign) -> None:
        """A worker will be needed for this assignment as soon as its parts are here."""
        self._since = (assign.lease, time.monotonic())
        self._warm.begin(assign, time.monotonic())

    def start(self, instruction: Start) -> None:
        """Start a worker as soon as its template is ready, or at once if it will have none."""
        if self._worker is not None:  # it was stopped and has not ended yet: its lease is over, do not wait for it
            self._worker.kill()
            self._worker = None
        self._start = instruction
        self._phases = {}
        self._passed("fetch")
        self._warm.begin(instruction.assign, time.monotonic())
        self._waits = True
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._waits and self._start is not None and not self._warm.is_loading:
            self._waits = False
            self._launch(self._start)

    def _passed(self, phase: str) -> None:
        """A phase of this lease before its worker has ended, and the next one begins."""
        assert self._start is not None
        lease, now = self._start.assign.lease, time.monotonic()
        if self._since is not None and self._since[0] == lease:  # otherwise nobody saw it begin
            self._phases[phase] = round(self._phases.get(phase, 0.0) + now - self._since[1], 3)
        self._since = (lease, now)

    def _launch(self, instruction: Start) -> None:
        """Start the worker with a budget from the memory that is available now."""
        self._passed("wait")
        self._end_last()
        assign, files = instruction.assign, self._files
        self.budget_bytes = self.budget_now()
        folder, method_state = files.work_dir(assign.lease), files.method_state(assign.run)
        with durable.disk_errors("cannot prepare the worker"):
            durable.make_dir(method_state)
            workers.write_order(
                instruction,
                folder=folder,
                parts={part.key: str(files.blobs.path(part.sha256)) for part in assign.parts},
                device=self._device,
                device_file=to_map(self._device_file),
                budget_bytes=self.budget_bytes,
                ceilings=files.ceilings(self.budget_bytes),
                accelerator_ceilings=files.accelerator_ceilings(),
                method_state=method_state,
                ledger=files.ledger,
                phases=self._phases,
            )
            self._worker = workers.Worker(assign.lease, folder, self._warm.launch, root=self._root)
        self.limit(self._worker.pid, self.budget_bytes)
        faults.point("daemon.worker.started")
        smaller = f", with a smaller plan (try {instruction.replans + 1})" if instruction.replans else ""
        log.info("run %s round %d: worker %d started%s", assign.run, assign.round, self._worker.pid, smaller)

    def budget_now(self) -> int:
        """The budget of a process that starts now: the usual one, unless there is much less memory."""
        usual, now = self._usual_bytes, self._memory.budget_bytes(self._warm.pid)
        if now >= _NOTEWORTHY * usual:
            return usual
        log.warning("there is less memory: %s are left to a worker, usually %s", format_bytes(now), format_bytes(usual))
        return now

    def budget_outside_runs(self) -> int:
        """The same for a process outside of a run: the template of workers is ended first."""
        self._warm.make_room()
        return self.budget_now()

    def limit(self, pid: int, budget_bytes: int) -> None:
        """Let the kernel enforce a budget, if this device's control group is delegated to us."""
        if self._group is not None:
            self._group.take(pid, budget_bytes)

    def read(self, ready: Sequence[int]) -> list[Event]:
        """The worker's progress and its end, if its descriptor is `ready`; one that did not stop in time is killed."""
        self._warm.read(ready, time.monotonic())
        self._start_waiting()
        if self._ending is not None and self._ending.progress_fd in ready and self._ending.has_gone():
            self._ending = None
        worker = self._worker
        if worker is None or not (worker.progress_fd in ready or worker.overdue(time.monotonic())):
            return []
        events, has_ended = worker.read()
        if has_ended:
            faults.point("daemon.worker.ended")
            self._log_warnings(worker.warnings())
            self._worker = None
            if worker.is_ending:
                self._end_last()
                self._ending = worker
            if worker.needs_own_process:
                self._start_without_template(events[-1])
                return []
            self._prepare_next(events[-1])
        return [self._explained(event) if isinstance(event, WorkerFailed) else event for event in events]

    def _end_last(self) -> None:
        """End a process whose update is complete: its memory is needed, or the client ends."""
        if self._ending is not None:
            self._ending.kill()
            self._ending = None

    def _start_without_template(self, ended: Event) -> None:
        """Start a worker again as a separate process, because the fork needed the memory of its template."""
        assert self._start is not None
        lasts = isinstance(ended, WorkerFailed) and ended.code == "nothing_fits"
        self._warm.make_room(self._start.assign.run if lasts else "")
        self._launch(self._start)

    def _prepare_next(self, ended: Event) -> None:
        """Prepare for the next round, which may come soon."""
        if self._start is not None and isinstance(ended, WorkerDone):
            assign = self._start.assign
            self._warm.done(assign, time.monotonic())
            run = next((part for part in assign.parts if part.key == "run"), None)
            if run is not None:
                self._warm.prepare(assign, self._files.blobs.path(run.sha256), self._usual_bytes)

    def _explained(self, failed: WorkerFailed) -> WorkerFailed:
        """Log a failure; returns it as the coordinator may see it."""
        if failed.code == "nothing_fits" and self.budget_bytes < self._usual_bytes:
            usual = format_bytes(self._usual_bytes)
            detail = f"{failed.detail}; other programs use the memory: usually the budget is {usual}"
            failed = replace(failed, code="low_memory", detail=detail)  # it passes: ask again in the next round
        self._note_error(f"the worker failed: {failed.code}: {failed.detail}")
        log.warning("the worker failed: %s: %s", failed.code, one_line(failed.detail))
        return failed if self._device_file.share.logs != "none" else replace(failed, log=())

    def _log_warnings(self, lines: list[str]) -> None:
        """Log each warning once: every round meets the same unreadable image."""
        for line in lines:
            if line not in self._warnings and len(self._warnings) < _MAX_WARNINGS:
                self._warnings.add(line)
                log.warning("worker: %s", one_line(line.removeprefix("WARNING ")))

    def watch(self, now: float) -> None:
        """Check the running worker: its memory, and whether it still makes progress."""
        if self._worker is not None:
            self._watch_memory(self._worker, now)
            self._watch_stall(self._worker, now)
        elif self._warm.pid is not None and not self._waits:
            self._watch_template(self._warm.pid, now)

    def _watch_memory(self, worker: workers.Worker, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        budget = self._memory.budget_bytes(worker.pid, accelerator_bytes=worker.accelerator_bytes())
        if budget < _NOTEWORTHY * self.budget_bytes:
            before, left = format_bytes(self.budget_bytes), format_bytes(budget)
            log.warning("there is less memory: %s are left to the worker, it had %s", left, before)
            self.budget_bytes = budget
            try:
                worker.write_budget(budget)
            except OSError as error:  # it goes on as it is
                log.warning("cannot tell the worker: %s", error)

    def _watch_template(self, template: int, now: float) -> None:
        """End the template when it is idle or its memory is needed: it only saves time."""
        if now < self._look_at:
            return
        self._look_at = now + _LOOK_EVERY_S
        if self._warm.is_idle(now):
            self._warm.end("there was no work")
        elif self._memory.budget_bytes(template) < _NOTEWORTHY * self._usual_bytes:
            self._warm.make_room()

    def _watch_stall(self, worker: workers.Worker, now: float) -> None:
        if self._stall.has_stalled(worker, now):
            log.error("the worker has done nothing for %d minutes: ending it", STALLED_AFTER_S // 60)
            worker.stop(now)

    def stop(self, lease: str | None = None) -> None:
        """Ask the worker of this lease to end; without a lease any worker, and then callable from any thread."""
        worker, start = self._worker, self._start
        if start is not None and lease in (None, start.assign.lease):
            self._waits = False
        if worker is not None and lease in (None, worker.lease):
            worker.stop(time.monotonic())

    def shut_down(self) -> None:
        """End the worker and wait for that, at most five seconds since it was first asked."""
        self._end_last()
        if self._worker is not None:
            self._worker.stop(time.monotonic())
            self._worker.wait(time.monotonic())
        self._warm.end("the client ends")
