"""A round of ten devices with a 45 MB model and with a 4 kB one: how long, and how near to the machine's own limit.

    transfer MB/s   (devices x model x 2) / seconds from the first assignment to the last receipt
    whole round     from the first assignment to the committed model
    period          from one round's first assignment to the next one's

Without training the workers only send the model back; their time is part of the transfer's.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from benchmarks.federation import BIG, SMALL, Federation, RoundTimes, run_file, scratch
from benchmarks.figures import Figure
from benchmarks.loopback import loopback_mb_s

__all__ = ["big", "small"]

_BIG_MB = 44.97
_DEVICES = 10


def big(*, quick: bool) -> list[Figure]:
    """The 45 MB model, against raw TCP in the same run."""
    raw = loopback_mb_s(2 if quick else 5)
    limit = sorted(raw)[len(raw) // 2]
    without = _rounds(BIG, 2 if quick else 5, training=False)
    moved = 2 * _DEVICES * _BIG_MB
    speeds = tuple(moved / times.transfer_s for times in without)
    figures = [
        Figure(name="raw TCP loopback", unit="MB/s", values=raw),
        Figure(name="45 MB x 10, no training: transfer", unit="MB/s", values=speeds),
        Figure(
            name="45 MB x 10, no training: share of raw TCP",
            unit="%",
            values=tuple(100 * speed / limit for speed in speeds),
            at_least=20,
        ),
        Figure(name="45 MB x 10, no training: whole round", unit="s", values=tuple(t.round_s for t in without)),
        Figure(
            name="45 MB x 10, no training: workers, one core",
            unit="s",
            values=tuple(times.workers_s for times in without),
        ),
    ]
    if quick:
        return figures
    trained = _rounds(BIG, 3, training=True)
    return [
        *figures,
        Figure(name="45 MB x 10, one step: whole round", unit="s", values=tuple(times.round_s for times in trained)),
    ]


def small(*, quick: bool) -> list[Figure]:
    """The 4 kB model: what is left is latency."""
    without = _rounds(SMALL, 6 if quick else 20, training=False)
    figures = [
        Figure(name="4 kB x 10, no training: transfer", unit="s", values=tuple(t.transfer_s for t in without)),
        Figure(name="4 kB x 10, no training: period", unit="s", values=_periods(without)),
        Figure(name="4 kB x 10, no training: workers, one core", unit="s", values=tuple(t.workers_s for t in without)),
    ]
    trained = _rounds(SMALL, 2 if quick else 5, training=True)
    return [*figures, Figure(name="4 kB x 10, one step: period", unit="s", values=_periods(trained))]


def _rounds(hidden: list[int], rounds: int, *, training: bool) -> list[RoundTimes]:
    """The times of a run's rounds; the first one also warms up, and is not counted."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        federation.start_devices(_DEVICES, training=training)
        shown = federation.run(run_file(hidden=hidden, rounds=rounds + 1, devices=_DEVICES))
        return federation.rounds(shown["run"])[1:]


def _periods(times: list[RoundTimes]) -> tuple[float, ...]:
    return tuple(after.asked - before.asked for before, after in itertools.pairwise(times))
