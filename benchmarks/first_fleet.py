"""A fleet's first day: how soon a coordinator takes a device, whether a late one disturbs others, exact results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.federation import SMALL, Federation, run_file, scratch
from benchmarks.figures import Figure
from benchmarks.light_devices import LightFleet
from edge_client.client import connection
from edge_client.config.device_file import load_device_file
from edge_client.config.run_file import EvaluateSection
from edge_client.data.sources import open_data

__all__ = ["measure"]

_DEVICES = 50
_WATCHED_S = 3.0  # after the last device was added
_JUDGES = 3
_METRICS = ("accuracy", "balanced_accuracy", "macro_f1")


def measure(*, quick: bool) -> list[Figure]:
    """Seconds of whole starts on new directories; disconnects as the devices and the coordinator's log saw them."""
    repeats = 3 if quick else 7
    plain, encrypted = _starts((), repeats), _starts(("--tls",), repeats)
    disconnects, let_in_s = _late_devices(3 if quick else 10)
    return [
        Figure(name="coordinator start to a device's connection", unit="s", values=plain, at_most=2),
        Figure(name="the same with TLS, certificates made", unit="s", values=encrypted, at_most=2),
        Figure(name=f"device added beside {_DEVICES}: disconnects", unit="", values=(disconnects,), at_most=0),
        Figure(name=f"device added beside {_DEVICES}: let in after", unit="s", values=let_in_s),
        Figure(name="fleet's metrics minus the pooled data's", unit="", values=_differences(), at_most=0),
    ]


def _starts(options: Sequence[str], repeats: int) -> tuple[float, ...]:
    """From the process's start to a broker that accepts the first device's user and password."""
    found = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder), options=options) as server:
            began = time.monotonic()
            server.start()
            (name,) = server.enrol(1)
            connection.check(server.bundles[name])
            found.append(time.monotonic() - began)
    return tuple(found)


def _late_devices(num: int) -> tuple[float, tuple[float, ...]]:
    """Add devices one by one to a federation of connected ones: lost connections in all, seconds of each."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as server:
        server.start()
        server.enrol(_DEVICES)
        fleets = [LightFleet(server.bundles.values(), Path(folder) / "parts")]
        server.wait_until(lambda: _turn(fleets) and fleets[0].num_online == _DEVICES, 60, poll_s=0)
        let_in_s = []
        for _ in range(num):
            began = time.monotonic()
            (name,) = server.enrol(1)
            fleets.append(LightFleet([server.bundles[name]], Path(folder) / "parts"))
            server.wait_until(lambda: _turn(fleets) and fleets[-1].num_online == 1, 60, poll_s=0)
            let_in_s.append(time.monotonic() - began)
        until = time.monotonic() + _WATCHED_S
        while time.monotonic() < until:
            _turn(fleets)
        greeted = (Path(folder) / "coordinator.log").read_text(encoding="utf-8").count(" is here (client")
        for fleet in fleets:
            fleet.close()
    return float(greeted - _DEVICES - num), tuple(let_in_s)


def _differences() -> tuple[float, ...]:
    """The same versions judged by the devices and, on all their test data in one file, by the server."""
    file = run_file(hidden=SMALL, rounds=2, devices=_JUDGES)
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as server:
        server.start()
        names = server.start_devices(_JUDGES, training=True)
        pooled = Path(folder) / "pooled.npz"
        parts = [_test_data(Path(folder) / name / "device.toml", file.classes) for name in names]
        np.savez(pooled, x=np.concatenate([x for x, _ in parts]), y=np.concatenate([y for _, y in parts]))
        there = server.run(replace(file, evaluate=EvaluateSection(every=1))).evaluations
        here = server.run(replace(file, evaluate=EvaluateSection(every=1, on=f"npz:{pooled}"))).evaluations
    pairs = list(zip(there, here, strict=True))
    scalars = [abs(a[metric] - b[metric]) for a, b in pairs for metric in _METRICS]
    return (*scalars, *(float(a["recall"] != b["recall"]) for a, b in pairs))


def _test_data(device_file: Path, classes: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    section = load_device_file(device_file).data
    assert section is not None
    _, test = open_data(section, classes, (1, 8, 8))
    x, y = test.batch(range(len(test)))
    return x.numpy(), y.numpy()


def _turn(fleets: Sequence[LightFleet]) -> bool:
    """A lost connection of a light device raises and ends the benchmark; any other way back is a second hello."""
    for fleet in fleets:
        fleet.turn(0.002)
    return True
