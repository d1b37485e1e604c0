"""Runs a daemon until SIGTERM; when the disk is full, it starts over from its stored state, as after a crash.

Nothing is lost by that, and it goes on as soon as there is space. Any other error of the disk ends the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from edge_client import durable, logs
from edge_client.client import template, workers
from edge_client.client.daemon import ConnectTo, Daemon
from edge_client.client.identity import STATE_KIND, STATE_VERSION, Bundle
from edge_client.client.stop_signals import stop_at_signals
from edge_client.client.supervisor import Supervisor
from edge_client.config.device_file import DeviceFile
from edge_client.device.worker_group import WorkerGroup
from edge_client.errors import DiskFullError

__all__ = ["run_daemon"]

log = logging.getLogger(__name__)

_DISK_RETRY_S = 1.0
_LONGEST_DISK_RETRY_S = 60.0
_WATCHDOG_S = 1.0  # between two signs of life while it waits


def run_daemon(
    *,
    bundle: Bundle,
    device_file: DeviceFile,
    state_dir: Path,
    connect: ConnectTo,
    worker_command: Sequence[str] = workers.COMMAND,
    template_command: Sequence[str] = (),
    root: Path = Path("/"),
    context: logs.Context | None = None,
) -> None:
    """Run a client until SIGTERM or SIGINT; starts over by itself when the disk was full.

    Other workers than ours are no forks of our template: they have one of their own, or none.
    """
    if worker_command == workers.COMMAND:
        template_command = template_command or template.COMMAND
    lock = durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION)
    stopped = threading.Event()
    current: list[Daemon] = []

    def stop() -> None:
        stopped.set()
        for daemon in current:
            daemon.request_stop()

    group = WorkerGroup.open(root)
    supervisor = Supervisor.from_environment()
    retry_s, last_error = _DISK_RETRY_S, ""
    with stop_at_signals(stop):
        while not stopped.is_set():
            try:
                daemon = Daemon(
                    bundle=bundle,
                    device_file=device_file,
                    state_dir=state_dir,
                    connect=connect,
                    worker_command=worker_command,
                    template_command=template_command,
                    root=root,
                    group=group,
                    supervisor=supervisor,
                    context=context,
                )
                current[:] = [daemon]
                if not stopped.is_set():
                    daemon.run()
            except DiskFullError as error:
                is_same = str(error) == last_error
                retry_s = min(2 * retry_s, _LONGEST_DISK_RETRY_S) if is_same else _DISK_RETRY_S
                last_error = str(error)
                log.error("disk_full: %s; nothing is lost, trying again in %.0f s", error, retry_s)
                _wait(stopped, retry_s, supervisor)
    if group is not None:
        group.remove()
    os.close(lock)


def _wait(stopped: threading.Event, seconds: float, supervisor: Supervisor) -> None:
    """Wait for space on the disk, and report to the watchdog meanwhile, because the process does not hang."""
    supervisor.ready()
    supervisor.doing("the disk is full; waiting for space")
    until = time.monotonic() + seconds
    while not stopped.is_set() and (now := time.monotonic()) < until:
        supervisor.alive(now)
        stopped.wait(min(_WATCHDOG_S, until - now))
