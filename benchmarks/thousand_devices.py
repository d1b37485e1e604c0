"""A thousand devices at once: how long until all are let in, one round with a 4 kB model, memory of both servers."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

from benchmarks.federation import SMALL, Federation, cpu_s, peak_mb, rss_mb, run_file, scratch
from benchmarks.figures import Figure
from benchmarks.light_devices import LightFleet

__all__ = ["measure"]


def measure(*, quick: bool) -> list[Figure]:
    """All in one federation; the devices live in this process and share the machine's cores with the coordinator."""
    num = 200 if quick else 1000
    rounds = 2 if quick else 4
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        began = time.monotonic()
        federation.enrol(num)
        enrolled_s = time.monotonic() - began
        began = time.monotonic()
        fleet = LightFleet(federation.bundles.values(), Path(folder) / "parts")
        federation.wait_until(lambda: _turn(fleet) and fleet.num_online == num, 120, poll_s=0)
        online_s = time.monotonic() - began
        for _ in range(40):  # two seconds of heartbeats
            fleet.turn(0.05)
        servers = {"coordinator": federation.pid("coordinator"), "broker": federation.broker_pid()}
        idle = {name: rss_mb(pid) for name, pid in servers.items()}
        busy = {name: cpu_s(pid) for name, pid in servers.items()}
        shown = federation.run(
            run_file(hidden=SMALL, rounds=rounds, devices=num), while_running=lambda: _turn(fleet), poll_s=0
        )
        cpu = {name: (cpu_s(pid) - busy[name]) / rounds for name, pid in servers.items()}
        peaks = {name: peak_mb(pid) for name, pid in servers.items()}
        round_s = federation.round_seconds(shown.run)
        fleet.close()
    return [
        Figure(name=f"enrol {num} devices", unit="s", values=(enrolled_s,)),
        Figure(name=f"{num} devices let in", unit="s", values=(online_s,)),
        Figure(name=f"{num} devices, round with 4 kB", unit="s", values=tuple(round_s)),
        *(Figure(name=f"{name}, CPU per round", unit="s", values=(value,)) for name, value in cpu.items()),
        *(Figure(name=f"{name}, idle RSS", unit="MB", values=(value,)) for name, value in idle.items()),
        *(Figure(name=f"{name}, peak RSS", unit="MB", values=(value,)) for name, value in peaks.items()),
    ]


def _turn(fleet: LightFleet) -> bool:
    until = time.monotonic() + 0.2  # let the devices work between two looks at the coordinator
    while time.monotonic() < until:
        fleet.turn(0.05)
    return True
