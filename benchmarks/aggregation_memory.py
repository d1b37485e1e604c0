"""Peak memory of the coordinator and its aggregator while updates of a 45 MB model are taken and folded.

The baseline is the same round with a 4 kB model and two devices: the interpreter, torch, the code.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.federation import BIG, SMALL, Federation, peak_mb, run_file, scratch
from benchmarks.figures import Figure

__all__ = ["measure"]

_MODEL_MB = 45.0
_ONE_TENSOR = [3316, 3316]  # 11,247,882 parameters, 98 % of them in one tensor: the worst case of a tensor-major fold


def measure(*, quick: bool) -> list[Figure]:
    """MB above the baseline, for more and more devices."""
    counts = (2, 10) if quick else (2, 10, 20)
    repeats = 1 if quick else 3
    base = [_peak(SMALL, 2) for _ in range(repeats)]
    floor = min(base)
    figures = [Figure(name="baseline: 2 updates of 4 kB", unit="MB", values=tuple(base))]
    peaks = {num: [_peak(BIG, num) for _ in range(repeats)] for num in counts}
    for num, found in peaks.items():
        over = tuple(peak - floor for peak in found)
        figures.append(Figure(name=f"{num} updates of 45 MB: above it", unit="MB", values=over, at_most=2 * _MODEL_MB))
    growth = (min(peaks[counts[-1]]) - min(peaks[2])) / _MODEL_MB
    figures.append(Figure(name=f"{counts[-1]} updates against 2", unit="models", values=(growth,), at_most=0.25))
    worst = tuple(_peak(_ONE_TENSOR, 2) - floor for _ in range(repeats))
    figures.append(Figure(name="2 updates of 45 MB in one tensor: above it", unit="MB", values=worst))
    return figures


def _peak(hidden: Sequence[int], devices: int) -> float:
    """Sum of the peaks of both processes over two rounds."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        federation.start_devices(devices, training=False)
        federation.run(run_file(hidden=hidden, rounds=2, devices=devices))
        aggregator = federation.aggregator_pid()
        assert aggregator is not None
        return peak_mb(federation.pid("coordinator")) + peak_mb(aggregator)
