"""A round of four devices that train, against the same four trainings in plain PyTorch; and where the rest of it goes.

Small-cnn on Fashion-MNIST, 1,500 samples each, batch 32, one epoch, one thread, nothing evaluated. The peer is two
processes of one thread (`plain_training`), each with two of the trainings, with torch and their data loaded before the
clock starts. Runs and peers alternate, so that both meet the same load of the machine; each run's first round, which
also starts a template of workers, is left out. A round lasts from its first assignment to its announced model, as the
coordinator's own timeline has it (`coordinator run show --timeline`), a period to the next round's first assignment.

FEDFIT_BENCH_DATA names the folder with the four files of Fashion-MNIST. Without it the images are noise of the same
shape: what is learnt differs, the time does not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.federation import Federation, cpu_of_all_s, cpu_s, scratch
from benchmarks.figures import Figure
from benchmarks.science_data import fashion_mnist
from coordinator.control_messages import ShowTimeline
from coordinator.timeline import DEVICE_SPANS, ROUND_SPANS, RoundTimeline
from edge_client.config.device_file import DataSection
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.records import to_map

__all__ = ["measure"]

_DEVICES = 4
_SAMPLES = 1500
_GOAL = 1.4


def measure(*, quick: bool) -> list[Figure]:
    """Runs and peers in turns; each turn gives one value of every figure."""
    rounds, turns = (2, 2) if quick else (3, 7)
    with tempfile.TemporaryDirectory(dir=scratch()) as name, Federation(Path(name)) as federation:
        data = [_samples(Path(name), number) for number in range(_DEVICES)]
        federation.start()
        devices = federation.start_devices(_DEVICES, training=True, data=data)
        peers = _Peers(Path(name), data)
        try:
            peers.train()
            pairs = [(_rounds(federation, devices, rounds), peers.train(), peers.train()) for _ in range(turns)]
        finally:
            peers.close()
    plain = [statistics.mean(peer.seconds for peer in pair[1:]) for pair in pairs]
    plain_cpu = [statistics.mean(peer.cpu_s for peer in pair[1:]) for pair in pairs]
    shown = [pair[0] for pair in pairs]
    ratios = tuple(each.seconds / peer for each, peer in zip(shown, plain, strict=True))
    periods = tuple(each.period_s / peer for each, peer in zip(shown, plain, strict=True))
    cpu = tuple(each.cpu_s / peer for each, peer in zip(shown, plain_cpu, strict=True))
    figures = [
        Figure(name="the four trainings in two plain processes", unit="s", values=tuple(plain)),
        Figure(name="round", unit="s", values=tuple(each.seconds for each in shown)),
        Figure(name="round against the plain processes", unit="times", values=ratios, at_most=_GOAL),
        Figure(name="period against the plain processes", unit="times", values=periods),
        Figure(name="CPU of the plain processes", unit="s", values=tuple(plain_cpu)),
        Figure(name="CPU of a round, all processes", unit="s", values=tuple(each.cpu_s for each in shown)),
        Figure(name="CPU of a round against the plain processes", unit="times", values=cpu),
    ]
    for span in (*DEVICE_SPANS, "waits", *ROUND_SPANS):
        values = tuple(each.spans[span] for each in shown if span in each.spans)
        if values:
            figures.append(Figure(name=f"timeline: {span}", unit="s", values=values))
    return figures


class _Rounds:
    """Medians of a run's rounds but for its first; a span's is the mean of the devices."""

    def __init__(self, rounds: Sequence[RoundTimeline], pauses: Sequence[float], cpu_s: float) -> None:
        self.seconds = statistics.median(row.ends_s for row in rounds)
        self.period_s = self.seconds + statistics.median(pauses)
        self.cpu_s = cpu_s
        self.spans: dict[str, float] = {}
        for name in DEVICE_SPANS:
            seconds = [device.seconds(name) for row in rounds for device in row.devices]
            took = [s for s in seconds if s is not None]
            if took:
                self.spans[name] = statistics.mean(took)
        for name in ROUND_SPANS:
            took = [span.seconds for row in rounds for span in row.spans if span.name == name]
            if took:
                self.spans[name] = statistics.median(took)
        ends = [(row, max(span.ends_s for span in row.spans if span.name == "devices")) for row in rounds]
        self.spans["waits"] = statistics.mean(
            end - device.spans[-1].ends_s for row, end in ends for device in row.devices if device.spans
        )


def _rounds(federation: Federation, devices: Sequence[str], num: int) -> _Rounds:
    names = ("coordinator", *devices)
    before = sum(cpu_of_all_s(federation.pid(name)) for name in names)
    run = federation.run(_run_file(num + 1)).run
    used = (sum(cpu_of_all_s(federation.pid(name)) for name in names) - before) / (num + 1)
    rounds = federation.ask(ShowTimeline(run=run, newest=num + 1)).rounds
    pauses = [row.pause_s for row in rounds[1:] if row.pause_s is not None]
    return _Rounds(rounds[1:], pauses, used)


def _run_file(rounds: int) -> RunFile:
    table = {
        "name": "bench",
        "model": {"name": "small-cnn", "input": [1, 28, 28]},
        "classes": [str(label) for label in range(10)],
        "train": {"batch": 32, "epochs": 1, "lr": 0.05, "momentum": 0.9},
        "stop": {"rounds": rounds},
        "devices": {"min": _DEVICES},
        "evaluate": {"every": 0},
    }
    return parse_table(RunFile, table, source="benchmark")


def _samples(folder: Path, number: int) -> DataSection:
    """The samples of one device as a file of its own, and the section that names it."""
    named = os.environ.get("FEDFIT_BENCH_DATA")
    if named:
        images, labels, _, _ = fashion_mnist(Path(named))
        chosen = slice(number * _SAMPLES, (number + 1) * _SAMPLES)
        arrays = {"x": images[chosen], "y": labels[chosen].astype(np.int64)}
    else:
        rng = np.random.default_rng(number)
        images = rng.integers(0, 256, (_SAMPLES, 1, 28, 28), dtype=np.uint8)
        arrays = {"x": images, "y": rng.integers(0, 10, _SAMPLES)}
    path = folder / f"samples-{number}.npz"
    np.savez(path, x=arrays["x"], y=arrays["y"])
    return DataSection(source=f"npz:{path}", test_fraction=0.0)


class _Peer(NamedTuple):
    seconds: float
    cpu_s: float


class _Peers:
    """Two plain processes that train at our word."""

    def __init__(self, folder: Path, data: Sequence[DataSection]) -> None:
        run = folder / "run.json"
        run.write_text(json.dumps(to_map(_run_file(1))), encoding="utf-8")
        for number, section in enumerate(data):
            (folder / f"data-{number}.json").write_text(json.dumps(to_map(section)), encoding="utf-8")
        half = len(data) // 2
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.plain_training", str(run)]
                + [str(folder / f"data-{number}.json") for number in numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for numbers in (range(half), range(half, len(data)))
        ]
        self._await("ready")

    def train(self) -> _Peer:
        """Until both have done their trainings."""
        used = sum(cpu_s(process.pid) for process in self._processes)
        began = time.monotonic()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("train\n")
            process.stdin.flush()
        self._await("done")
        seconds = time.monotonic() - began
        return _Peer(seconds, sum(cpu_s(process.pid) for process in self._processes) - used)

    def _await(self, word: str) -> None:
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if line != word:
                raise RuntimeError(f"expected {word!r} of a plain process, got {line!r}")

    def close(self) -> None:
        """End both."""
        for process in self._processes:
            process.communicate()
