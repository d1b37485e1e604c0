"""What FeDepth saves, and what it costs: memory of training and time of an epoch against training everything at once.

PreResNet-20 on 3x32x32 with batches of 128, as its authors trained it, in the finest groups: one block each. Then a
vision transformer with a sixth of the memory that its full training takes. Ratios of time are those of processor time;
measurements take turns, so that a busy machine disturbs all of them alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.memory_cases import MODELS, Case, cache, fitting_of, plan_of, rows_of, trial
from edge_client.trial import Measured

__all__ = ["measure"]

_FULL = Case(model="preresnet20", batch=128, optimizer="momentum")
_FINEST = replace(_FULL, method="fedepth", groups=(1,))
_VIT = Case(model="vit-64", batch=32, optimizer="adam", method="fedepth")
_EPOCHS = 5  # of each group: outputs of frozen blocks are written once and read in every epoch


def measure(*, quick: bool) -> list[Figure]:
    """Ratios against full training, and the base of a worker."""
    MODELS["vit-64"] = {"name": "vit-t-16", "input": [3, 64, 64], "patch": 8}
    with cache() as folder:
        return [*_memory(folder), *_time(folder, repeats=1 if quick else 5), *_transformer(folder)]


def _memory(folder: Path) -> list[Figure]:
    ways = [_FULL, _FINEST, replace(_FINEST, recompute="fused"), replace(_FINEST, microbatch=16)]
    full, alone, fused, pieces = (_measured(way, folder) for way in ways)

    def share(name: str, found: Measured, goal: float) -> Figure:
        ratio = found.peak_bytes / full.peak_bytes
        return Figure(name=f"{name}: memory against full training", unit="ratio", values=(ratio,), at_most=goal)

    return [
        Figure(name="worker before it trains", unit="MiB RSS", values=(full.base_bytes / 2**20,), at_most=260),
        Figure(name="full training", unit="MB", values=(full.peak_bytes / 1e6,)),
        share("FeDepth", alone, 0.30),
        share("FeDepth, recomputing", fused, 0.26),
        share("FeDepth, microbatches of 16", pieces, 0.05),
    ]


def _measured(case: Case, folder: Path, **settings: int) -> Measured:
    rows = rows_of(case, folder)
    return trial(case, plan_of(case, rows), rows, **settings)


def _time(folder: Path, *, repeats: int) -> list[Figure]:
    """Medians of repeats that take turns."""
    ways = [_FULL, _FINEST, replace(_FINEST, buffered=True)]
    spent: list[list[float]] = [[], [], []]
    for _ in range(repeats):
        for way, seconds in zip(ways, spent, strict=True):
            epochs = _EPOCHS if way.buffered else 1
            seconds += _measured(way, folder, epochs=epochs, repeats=1).cpu_seconds
    full, plain, buffered = spent
    ratios = [tuple(one / other for one, other in zip(way, full, strict=True)) for way in (plain, buffered)]
    return [
        Figure(name="FeDepth: time of an epoch against full training", unit="ratio", values=ratios[0]),
        Figure(name="FeDepth with activations on disk", unit="ratio", values=ratios[1], at_most=1.5),
    ]


def _transformer(folder: Path) -> list[Figure]:
    """ViT-T on 64x64 in patches of 8: 12 blocks of 192 features, 65 tokens."""
    rows = rows_of(_VIT, folder)
    full = trial(_VIT, plan_of(_VIT, rows), rows).peak_bytes
    fitting = fitting_of(_VIT, rows)
    plan = fitting.choose(rows.base_bytes, full // 6).plan
    found = trial(_VIT, plan, rows).peak_bytes
    trained = sum(len(group) for group in plan.groups) if plan.groups else 12
    print(f"   ViT: full training {full / 1e6:.1f} MB; {plan.describe()}; {found / 1e6:.1f} MB")
    return [
        Figure(name="ViT-T with a sixth of its memory: blocks trained", unit="of 12", values=(trained,), at_least=12),
        Figure(name="ViT-T: memory against the sixth", unit="ratio", values=(6 * found / full,), at_most=1),
    ]
