"""SIGTERM ends a client whatever it waits for."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from device_world import KEY, leave
from rows import assign

from coordinator.broker.certificates import ensure_pki
from edge_client.client import identity
from edge_client.records import from_map


def _joined(folder: Path, broker: str, ca: str | None) -> list[str]:
    """The arguments of a script that runs a client: its bundle and its state directory, with work in hand."""
    fields = {"federation": "fed", "device": "d", "brokers": [broker], "password": "p" * 20, "key": KEY, "ca": ca}
    bundle = from_map(identity.Bundle, fields)
    identity.write_bundle(folder / "d.join", bundle)
    identity.join(folder / "state", bundle)
    leave(folder / "state", assign(parts=()))
    return [str(folder / "d.join"), str(folder / "state")]


def _ends(process: subprocess.Popen[bytes], ready: Callable[[], object]) -> int:
    try:
        ready()
        process.terminate()
        return process.wait(10)
    finally:
        process.kill()
        process.wait()


_STUBBORN = """
import sys
from pathlib import Path
from edge_client.client import connection, identity, run_daemon
from edge_client.config.device_file import DeviceFile, LimitsSection

bundle = identity.read_bundle(Path(sys.argv[1]))
run_daemon.run_daemon(
    bundle=bundle,
    device_file=DeviceFile(limits=LimitsSection(memory=10**9)),
    state_dir=Path(sys.argv[2]),
    connect=lambda on_event, boot: connection.connect(bundle, on_event, boot),
    worker_command=(sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"),
)
"""


def test_sigterm_ends_a_client_whose_broker_does_not_answer_tls_and_whose_worker_does_not_end(tmp_path: Path) -> None:
    """The silent listener takes five seconds and the worker five, at the same time; a supervisor gives ten in all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        ca = ensure_pki(tmp_path / "pki", ["127.0.0.1"]).ca_pem
        arguments = _joined(tmp_path, f"mqtts://127.0.0.1:{listener.getsockname()[1]}", ca)
        accepted: list[socket.socket] = []
        process = subprocess.Popen([sys.executable, "-c", _STUBBORN, *arguments])
        assert _ends(process, lambda: accepted.append(listener.accept()[0])) == 0
        accepted[0].close()


_STUCK = """
import signal, sys, time
from pathlib import Path
from edge_client.client import identity, run_daemon, stop_signals
from edge_client.config.device_file import DeviceFile, LimitsSection

class Stuck:
    queued_bytes = 0
    def connect(self): pass
    def subscribe(self, topics): pass
    def unsubscribe(self, topics): pass
    def wake(self): pass
    def poll(self, timeout_s, extra_fds=()):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the signal ends no call of this thread
        print("stuck", flush=True)
        time.sleep(60)

stop_signals._LAST_RESORT_S = 0.5
bundle = identity.read_bundle(Path(sys.argv[1]))
file = DeviceFile(limits=LimitsSection(memory=10**9))
run_daemon.run_daemon(bundle=bundle, device_file=file, state_dir=Path(sys.argv[2]), connect=lambda *_: Stuck())
"""


def test_sigterm_ends_a_client_that_is_stuck_in_a_call(tmp_path: Path) -> None:
    """As in a name server's silence, which no signal ends; the exit code is that of an orderly end."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, *_joined(tmp_path, "mqtt://h", None)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert _ends(process, out.readline) == 0
