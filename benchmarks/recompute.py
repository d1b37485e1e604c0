"""Memory and time of recomputing activations: PreResNet-20, batch 128, 3x32x32, channels_last, one thread.

Each measurement is a process of its own, `python -m benchmarks.recompute KIND`, with malloc pinned as in a worker. It
warms up on two samples; what training adds to that is its peak. Times are CPU time of a step through the real loop,
against the process without recomputation that ran just before.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.figures import Figure
from edge_client.device import guard, meter

__all__ = ["measure"]

_KINDS = ("full", "fused", "units")
_SLOWDOWN = {"fused": 1.1, "units": 1.3}
_BATCH = 128
_SHAPE = (3, 32, 32)
_STEPS = 4  # the first is not timed: libraries choose their kernels


def measure(*, quick: bool) -> list[Figure]:
    """MB above the warmed-up process, and steps against those without recomputation."""
    repeats = [{kind: _in_own_process(kind) for kind in _KINDS} for _ in range(2 if quick else 5)]
    figures = []
    for kind in _KINDS:
        peaks = tuple(repeat[kind]["peak_mb"] for repeat in repeats)
        figures.append(Figure(name=f"{kind}: training peak", unit="MB", values=peaks))
        if kind != "full":
            shares = tuple(repeat[kind]["peak_mb"] / repeat["full"]["peak_mb"] for repeat in repeats)
            figures.append(Figure(name=f"{kind}: peak against full", unit="x", values=shares))
        seconds = tuple(repeat[kind]["step_s"] for repeat in repeats)
        figures.append(Figure(name=f"{kind}: step", unit="CPU s", values=seconds))
        if kind != "full":
            slower = tuple(repeat[kind]["step_s"] / repeat["full"]["step_s"] for repeat in repeats)
            figures.append(Figure(name=f"{kind}: step against full", unit="x", values=slower, at_most=_SLOWDOWN[kind]))
    return figures


def _in_own_process(kind: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.recompute", kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _train(kind: str) -> dict[str, float]:
    """In this process; torch is loaded here, after malloc was pinned."""
    import torch

    from edge_client.methods.base import Job, PlainClient
    from edge_client.models import registry
    from edge_client.models.layout import to_channels_last
    from edge_client.training.loop import Settings, generator, train
    from edge_client.training.warmup import warm_up

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = registry.build("preresnet20", input_shape=_SHAPE, num_classes=10, options={})
    to_channels_last(model)
    model.recompute = None if kind == "full" else kind
    settings = Settings(batch=_BATCH, microbatch=_BATCH, learning_rate=0.1, seed=1, momentum=0.9, channels_last=True)
    warm_up(model, settings)
    client = PlainClient()
    client.begin(
        Job(
            model=model,
            round=1,
            num_rounds=1,
            epochs=_STEPS,
            learning_rate=0.1,
            class_counts=(_BATCH // 10,) * 10,
            rng=lambda purpose: generator(1, purpose),
        )
    )
    data = _Noise()
    base = meter.rss_bytes()
    if not meter.reset_peak():
        raise SystemExit("this system does not let a process reset its peak memory; nothing was measured")
    ends = [time.process_time()]
    train(model, client, data, settings, progress=lambda step, total, loss: ends.append(time.process_time()))
    seconds = [end - start for start, end in itertools.pairwise(ends)][1:]
    return {"peak_mb": (meter.peak_rss_bytes() - base) / 1e6, "step_s": statistics.median(seconds)}


class _Noise:
    """One batch of samples, in memory before anything is measured."""

    def __init__(self) -> None:
        import torch

        rng = torch.Generator().manual_seed(1)
        self._x = torch.randn(_BATCH, *_SHAPE, generator=rng)
        self.labels = torch.randint(0, 10, (_BATCH,), generator=rng)

    def __len__(self) -> int:
        return _BATCH

    def batch(self, indices: Any) -> tuple[Any, Any]:
        return self._x[indices], self.labels[indices]


if __name__ == "__main__":
    guard.pin_malloc()
    print(json.dumps(_train(sys.argv[1])))
