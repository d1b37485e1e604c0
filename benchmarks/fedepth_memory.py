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
from edge_client.measuring.trial import TrialResult

__all__ = ["measure"]

_FULL = Case(model="preresnet20", batch=128, optimizer="momentum")
_FINEST = replace(_FULL, method="fedepth", groups=(1,))
_VIT = Case(model="vit-224", batch=16, optimizer="adam", method="fedepth")
_EPOCHS = 10  # of each group, as its authors train: outputs of frozen blocks are written once, read in every epoch


def measure(*, quick: bool) -> list[Figure]:
    """Ratios against full training, and the base of a worker."""
    MODELS["vit-224"] = {"name": "vit-t-16", "input": [3, 224, 224]}
    with cache() as folder:
        return [*_memory(folder), *_time(folder, repeats=1 if quick else 5), *_transformer(folder)]


def _memory(folder: Path) -> list[Figure]:
    ways = [_FULL, _FINEST, replace(_FINEST, recompute="fused"), replace(_FINEST, microbatch=16)]
    full, alone, fused, pieces = (_measured(way, folder) for way in ways)

    def share(name: str, found: TrialResult, goal: float) -> Figure:
        ratio = found.peak_bytes / full.peak_bytes
        return Figure(name=f"{name}: memory against full training", unit="ratio", values=(ratio,), at_most=goal)

    return [
        Figure(name="worker before it trains", unit="MiB RSS", values=(full.base_bytes / 2**20,), at_most=260),
        Figure(name="full training", unit="MB", values=(full.peak_bytes / 1e6,)),
        share("FeDepth", alone, 0.30),
        share("FeDepth, recomputing", fused, 0.26),
        share("FeDepth, microbatches of 16", pieces, 0.05),
    ]


def _measured(case: Case, folder: Path, **settings: int) -> TrialResult:
    rows = rows_of(case, folder)
    return trial(case, plan_of(case, rows), rows, **settings)


def _time(folder: Path, *, repeats: int) -> list[Figure]:
    """Repeats take turns; with activations on disk once as short as can be, and once as its authors train."""
    buffered = replace(_FINEST, buffered=True)
    ways = {"": (_FULL, 1), "FeDepth": (_FINEST, 1)}
    ways |= {f"FeDepth, activations on disk, epochs {count}": (buffered, count) for count in (1, _EPOCHS)}
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, (way, epochs) in ways.items():
            spent[name] += _measured(way, folder, epochs=epochs, repeats=1).cpu_seconds
    full = spent.pop("")
    goals = {name: 1.5 if str(_EPOCHS) in name else None for name in spent}
    return [
        Figure(
            name=f"{name}: time of an epoch against full training",
            unit="ratio",
            values=tuple(one / other for one, other in zip(seconds, full, strict=True)),
            at_most=goals[name],
        )
        for name, seconds in spent.items()
    ]


def _transformer(folder: Path) -> list[Figure]:
    """ViT-T/16 on 224x224: 12 blocks of 192 features, 197 tokens."""
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
