"""Keeps a template of workers while a run is on, so that its workers start at once, and ends it when it is in the way.

    begins   with the first assignment of a run: torch loads while the parts of the assignment still come
    ends     with the run, after two minutes without work, when other programs need its memory
    is not   where the system cannot fork safely, and for runs whose workers need the memory that it holds

Does not cover: the template's process (`template`), the worker (`worker_control`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_client.client import workers
from edge_client.client.template import Template, TemplateError
from edge_client.client.workers import WorkerProcess
from edge_client.wire.messages import Assign

__all__ = ["IDLE_S", "LOADING_S", "WarmWorkers"]

log = logging.getLogger(__name__)

IDLE_S = 120.0  # loading torch anew takes one or two percent of this
LOADING_S = 120.0  # that a template may take; a worker of its own tells what the matter is


class WarmWorkers:
    """Starts the processes of workers: as forks of a template where that is possible, else each anew."""

    def __init__(
        self,
        *,
        command: Sequence[str] = workers.COMMAND,
        template_command: Sequence[str] = (),
        started: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """`command` starts a worker anew, `template_command` a template: empty for none; `started` hears of its pid."""
        self._command = command
        self._template_command = template_command if _can_fork() else ()
        self._started = started
        self._template: Template | None = None
        self._begun_at = self._used_at = 0.0
        self._prepared: set[tuple[str, str]] = set()  # run and slice
        self._cold_run = ""  # whose workers do not fit beside a template

    @property
    def pid(self) -> int | None:
        """Process id of the template; None without one."""
        return self._template.pid if self._template is not None else None

    @property
    def is_loading(self) -> bool:
        """Whether a worker should wait until the template is ready."""
        return self._template is not None and not self._template.is_ready

    @property
    def fds(self) -> list[int]:
        """What to watch: the template has become ready, or has ended."""
        return [self._template.fd] if self._template is not None else []

    def begin(self, assign: Assign, now: float) -> None:
        """Start a template for the worker of a new assignment, unless that run needs none."""
        self._used_at = now
        if assign.run == self._cold_run:
            self.end("its run needs its memory")
        elif self._template is None and self._template_command and (assign.train or assign.evaluate):
            try:
                self._template = Template(self._template_command)
            except OSError as error:  # no memory for a process: the worker tells
                log.warning("cannot start a template of workers: %s", error.strerror)
                return
            self._begun_at = now
            self._started(self._template.pid)

    def read(self, ready: Sequence[int], now: float) -> None:
        """Take the template's messages, if its descriptor is `ready`, and give up one that does not finish loading."""
        if self._template is None:
            return
        if self._template.fd in ready:
            self._template.read()
        if self._template.has_ended:
            log.warning("the template of workers has ended; workers load torch anew")
            self._template = None
        elif self.is_loading and now - self._begun_at > LOADING_S:
            self.end(f"it was not ready after {LOADING_S:g} s")

    def launch(self, folder: Path, progress: int, log_file: int) -> WorkerProcess:
        """The process of a worker: a fork where there is a template, else a process of its own."""
        if self._template is not None and self._template.is_ready:
            try:
                return self._template.fork(folder, progress=progress, log_file=log_file)
            except TemplateError as error:
                log.warning("no fork of the template: %s; the worker loads torch anew", error)
                self.end("it cannot fork")
                self._template_command = ()
        return workers.spawn(folder, progress, log_file, self._command)

    def done(self, assign: Assign, now: float) -> None:
        """Prepare for the next assignment after an update, unless that was the last evaluation of the run."""
        if assign.round >= assign.num_rounds and not assign.train:
            self.end("the run is over")
        else:
            self.begin(assign, now)

    def prepare(self, assign: Assign, run: Path, budget_bytes: int) -> None:
        """Between two assignments of a run, let the template do what their workers have in common; `run`: its file.

        Once for each part of the model. Whatever that does to the template, it is not tried again.
        """
        key = (assign.run, assign.slice)
        if self._template is None or self.is_loading or key in self._prepared:
            return
        self._prepared = {key}
        self._begun_at = self._used_at
        self._template.prepare(run, assign.slice, budget_bytes)

    def make_room(self, run: str = "") -> None:
        """End the template to free its memory; with `run`, the workers of that run start without one from now on."""
        self._cold_run = run or self._cold_run
        self.end("its memory is needed")

    def is_idle(self, now: float) -> bool:
        """Whether the template has waited long enough for another assignment."""
        return self._template is not None and now - self._used_at > IDLE_S

    def end(self, reason: str) -> None:
        """End the template, if there is one."""
        if self._template is not None:
            log.debug("ending the template of workers: %s", reason)
            self._template.end()
            self._template = None


def _can_fork() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")
