"""A round of ten devices with a 45 MB model and with a 4 kB one: how long, and how near to the machine's own limit.

    down       from the first assignment to the moment when the last device has the model
    up         from the first finished update to the last receipt: sent, hashed, checked, stored, acknowledged
    transfer   down + up; MB/s is devices x model x 2 / transfer
    round      from the first assignment to the committed model
    period     from one round's first assignment to the next one's
    CPU        seconds per round, without workers and aggregator: a busy machine changes them less than the others

Without training the workers are forks of a template, as real ones are, and send the model back; they wait for one
another, so that their own time lies between the download and the upload and belongs to neither. All durable writes are
part of the transfer, as in real life.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from pathlib import Path

from benchmarks.broker_alone import Moved, move
from benchmarks.federation import BIG, SMALL, Federation, RoundTimes, cpu_s, run_file, scratch
from benchmarks.figures import Figure
from benchmarks.loopback import blob_mb_s, buffer_mb_s

__all__ = ["big", "small"]

_BIG_MB = 44.96
_DEVICES = 10
_BROKER_GOAL = 2.8


def big(*, quick: bool) -> list[Figure]:
    """The 45 MB model, against raw TCP and the broker alone in the same run."""
    blob, buffer = blob_mb_s(7), buffer_mb_s(5)
    times: list[RoundTimes] = []
    alone: list[Moved] = []
    ratios: list[float] = []
    cpu: dict[str, float] = {}
    for _ in range(1 if quick else 3):  # in turns: both meet the same load of the machine
        moved = move(int(_BIG_MB * 1e6), _DEVICES, 2)
        these, cpu = _rounds(BIG, 2 if quick else 3, training=False)
        moved += move(int(_BIG_MB * 1e6), _DEVICES, 2)
        peer = statistics.median(each.down_s + each.up_s for each in moved)
        ratios += [each.round_s / peer for each in these]
        times += these
        alone += moved
    speeds = tuple(2 * _DEVICES * _BIG_MB / (t.down_s + t.up_s) for t in times)
    figures = [
        Figure(name="raw TCP, a 45 MB blob", unit="MB/s", values=blob),
        Figure(name="raw TCP, one hot buffer", unit="MB/s", values=buffer),
        Figure(name="45 MB x 10, transfer", unit="MB/s", values=speeds),
        Figure(name="45 MB x 10, transfer against the blob", unit="%", values=_shares(speeds, blob)),
        Figure(name="45 MB x 10, transfer against the buffer", unit="%", values=_shares(speeds, buffer), at_least=20),
        Figure(name="45 MB x 10, down", unit="s", values=tuple(t.down_s for t in times)),
        Figure(name="45 MB x 10, up", unit="s", values=tuple(t.up_s for t in times)),
        Figure(name="45 MB x 10, round without training", unit="s", values=tuple(t.round_s for t in times)),
        Figure(
            name="45 MB x 10, the same bytes through the broker alone",
            unit="s",
            values=tuple(each.down_s + each.up_s for each in alone),
        ),
        Figure(
            name="45 MB x 10, round against the broker alone", unit="times", values=tuple(ratios), at_most=_BROKER_GOAL
        ),
        *(Figure(name=f"45 MB x 10, CPU of {who}", unit="s", values=(seconds,)) for who, seconds in cpu.items()),
    ]
    if not quick:
        trained = tuple(t.round_s for t in _rounds(BIG, 3, training=True)[0])
        figures.append(Figure(name="45 MB x 10, round with one step", unit="s", values=trained))
    return figures


def _shares(speeds: tuple[float, ...], limit: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(100 * speed / statistics.median(limit) for speed in speeds)


def small(*, quick: bool) -> list[Figure]:
    """The 4 kB model: what is left is latency."""
    times, _ = _rounds(SMALL, 6 if quick else 20, training=False)
    transfer = tuple(t.down_s + t.up_s for t in times)
    trained, _ = _rounds(SMALL, 2 if quick else 5, training=True)
    return [
        Figure(name="4 kB x 10, transfer", unit="s", values=transfer),
        Figure(
            name="4 kB x 10, round without training", unit="s", values=tuple(t.round_s for t in times), at_most=0.15
        ),
        Figure(name="4 kB x 10, workers in between", unit="s", values=tuple(t.between_s for t in times)),
        Figure(name="4 kB x 10, period without training", unit="s", values=_periods(times)),
        Figure(name="4 kB x 10, period with one step", unit="s", values=_periods(trained)),
    ]


def _rounds(hidden: list[int], rounds: int, *, training: bool) -> tuple[list[RoundTimes], dict[str, float]]:
    """The times of a run's rounds (the first one also warms up, and is not counted), and CPU seconds per round."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder, Federation(Path(folder)) as federation:
        federation.start()
        names = federation.start_devices(_DEVICES, training=training)
        pids = {"the coordinator": [federation.pid("coordinator")], "the broker": [federation.broker_pid()]}
        pids["all clients"] = [federation.pid(name) for name in names]
        before = {who: sum(map(cpu_s, these)) for who, these in pids.items()}
        shown = federation.run(run_file(hidden=hidden, rounds=rounds + 1, devices=_DEVICES))
        cpu = {who: (sum(map(cpu_s, these)) - before[who]) / (rounds + 1) for who, these in pids.items()}
        return federation.rounds(shown.run)[1:], cpu


def _periods(times: list[RoundTimes]) -> tuple[float, ...]:
    return tuple(after.asked - before.asked for before, after in itertools.pairwise(times))
