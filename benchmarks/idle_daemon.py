"""Memory of a client daemon, connected with TLS: idle, and after transfers of a 45 MB model both ways."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from benchmarks.federation import BIG, Federation, rss_mb, run_file, scratch
from benchmarks.figures import Figure
from edge_client.device.private_memory import process_memory

__all__ = ["measure"]

_SETTLE_S = 1.0
_PRIVATE_MB = 16.5  # of the version before workers were forks of a template, measured in turns with the first after it


def measure(*, quick: bool) -> list[Figure]:
    """RSS in MB; the daemon of `edge-client start` itself for the idle figure."""
    transfers = 5 if quick else 20
    idle, private, first, last = [], [], [], []
    for _ in range(1 if quick else 3):
        rss, anonymous = _idle()
        idle.append(rss)
        private.append(anonymous)
        memory = _after_each_transfer(transfers)
        first.append(memory[0])
        last.append(memory[-1])
    ratio = tuple(after / before for before, after in zip(first, last, strict=True))
    return [
        Figure(name="edge-client start, idle, TLS", unit="MB", values=tuple(idle), at_most=28),
        Figure(name="the same, private memory", unit="MB", values=tuple(private), at_most=_PRIVATE_MB),
        Figure(name="after 1 transfer of 45 MB each way", unit="MB", values=tuple(first), at_most=32),
        Figure(name=f"after {transfers} transfers", unit="MB", values=tuple(last), at_most=32),
        Figure(name=f"after {transfers} against after 1", unit="ratio", values=ratio, at_most=1.05),
    ]


def _idle() -> tuple[float, float]:
    """A daemon as users start it: RSS and private memory."""
    with _site() as folder, Federation(Path(folder), options=["--tls", "--heartbeat", "1"]) as federation:
        federation.start()
        (name,) = federation.start_devices(1, training=True)
        time.sleep(3 * _SETTLE_S)  # a few heartbeats
        pid = federation.pid(name)
        return rss_mb(pid), process_memory(pid).private_bytes / 1e6


def _after_each_transfer(num: int) -> list[float]:
    """The same daemon with workers that do not train: a round is one transfer each way."""
    memory = []
    with _site() as folder, Federation(Path(folder), options=["--tls"]) as federation:
        federation.start()
        (name,) = federation.start_devices(1, training=False)
        for rounds in (1, num - 1):  # the second run's model has another seed, so that it travels
            federation.run(run_file(hidden=BIG, rounds=rounds, devices=1, seed=rounds))
            time.sleep(_SETTLE_S)
            memory.append(rss_mb(federation.pid(name)))
    return memory


def _site() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=scratch())
