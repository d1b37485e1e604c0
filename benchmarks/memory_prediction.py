"""Predicted against measured peak of training: many models, batches, optimizers and ways to train.

The prediction is what the planner goes by; the measurement is VmHWM of a fresh process without what it had before it
trained. Excess is predicted / measured - 1: below 0 a device could run out of memory, far above 0 it trains less than
it could.
"""

from __future__ import annotations

import statistics

from benchmarks.figures import Figure
from benchmarks.memory_cases import Case, cache, plan_of, predicted, rows_of, trial

__all__ = ["CASES", "measure"]

_FULL = [
    Case(model="preresnet20", batch=8, optimizer="sgd"),
    Case(model="preresnet20", batch=32, optimizer="adam"),
    Case(model="preresnet20", batch=128, optimizer="momentum"),
    Case(model="preresnet20-rs", batch=64, optimizer="momentum"),
    Case(model="resnet18", batch=8, optimizer="sgd"),
    Case(model="resnet18", batch=32, optimizer="momentum"),
    Case(model="resnet18", batch=16, optimizer="adam"),
    Case(model="vit", batch=8, optimizer="adam"),
    Case(model="vit", batch=32, optimizer="sgd"),
    Case(model="vit", batch=64, optimizer="momentum"),
    Case(model="mlp", batch=16, optimizer="sgd"),
    Case(model="mlp", batch=128, optimizer="momentum"),
    Case(model="mlp", batch=128, optimizer="adam"),
    Case(model="small-cnn", batch=32, optimizer="sgd"),
    Case(model="small-cnn", batch=128, optimizer="adam"),
]
_SMALLER = [
    Case(model="preresnet20", batch=64, optimizer="momentum", microbatch=16),
    Case(model="preresnet20", batch=64, optimizer="momentum", recompute="fused"),
    Case(model="preresnet20", batch=64, optimizer="sgd", recompute="units"),
    Case(model="preresnet20", batch=16, optimizer="sgd", recompute="units"),
    Case(model="resnet18", batch=32, optimizer="momentum", microbatch=8),
    Case(model="resnet18", batch=25, optimizer="momentum", microbatch=12),
    Case(model="resnet18", batch=32, optimizer="momentum", recompute="units"),
    Case(model="vit", batch=64, optimizer="adam", microbatch=8),
    Case(model="vit", batch=32, optimizer="momentum", recompute="units"),
    Case(model="mlp", batch=128, optimizer="momentum", microbatch=16),
    Case(model="small-cnn", batch=128, optimizer="momentum", microbatch=32),
    Case(model="preresnet20", batch=128, optimizer="momentum", slice="width:1/2"),
    Case(model="preresnet20", batch=64, optimizer="sgd", slice="depth:3.2.1"),
    Case(model="resnet18", batch=32, optimizer="sgd", slice="depth:1.1.1.1"),
    Case(model="resnet18", batch=32, optimizer="momentum", slice="width:1/4"),
    Case(model="vit", batch=32, optimizer="adam", slice="layers:6"),
]
_GROUPS = [
    Case(model="preresnet20", batch=128, optimizer="momentum", method="fedepth", groups=(1,)),
    Case(model="preresnet20-rs", batch=128, optimizer="momentum", method="fedepth", groups=(1,)),
    Case(model="preresnet20-rs", batch=64, optimizer="momentum", method="fedepth", groups=(2, 2, 5)),
    Case(model="preresnet20", batch=64, optimizer="adam", method="fedepth", groups=(3,)),
    Case(model="preresnet20", batch=128, optimizer="sgd", method="fedepth", groups=(1,), recompute="fused"),
    Case(model="preresnet20", batch=128, optimizer="sgd", method="fedepth", groups=(1,), microbatch=16),
    Case(model="preresnet20", batch=100, optimizer="momentum", method="fedepth", groups=(1,), microbatch=12),
    Case(model="preresnet20", batch=64, optimizer="sgd", method="fedepth", groups=(1,), recompute="units"),
    Case(model="preresnet20-rs", batch=64, optimizer="sgd", method="fedepth", groups=(1, 2), skipped=3),
    Case(model="preresnet20-rs", batch=64, optimizer="sgd", method="fedepth", groups=(2,), buffered=True),
    Case(model="preresnet20", batch=64, optimizer="momentum", method="m-fedepth", groups=(1,)),
    Case(model="preresnet20", batch=64, optimizer="momentum", method="m-fedepth", groups=(2, 3, 4)),
    Case(model="resnet18", batch=16, optimizer="momentum", method="fedepth", groups=(2,)),
    Case(model="resnet18", batch=16, optimizer="sgd", method="m-fedepth", groups=(1,)),
    Case(model="vit", batch=32, optimizer="adam", method="fedepth", groups=(3,)),
    Case(model="vit", batch=64, optimizer="momentum", method="fedepth", groups=(1,), buffered=True),
    Case(model="vit", batch=32, optimizer="sgd", method="m-fedepth", groups=(4,), recompute="units"),
    Case(model="mlp", batch=64, optimizer="adam", method="fedepth", groups=(1,)),
    Case(model="mlp", batch=64, optimizer="momentum", method="fedepth", groups=(1,), microbatch=16),
    Case(model="small-cnn", batch=128, optimizer="momentum", method="fedepth", groups=(1,)),
    Case(model="preresnet20", batch=32, optimizer="momentum", method="fedepth", num_models=2),
    Case(model="preresnet20", batch=64, optimizer="momentum", method="fedprox"),
    Case(model="mlp", batch=64, optimizer="momentum", method="fedepth+fedprox", groups=(1,)),
]
CASES = [*_FULL, *_SMALLER, *_GROUPS]


def measure(*, quick: bool) -> list[Figure]:
    """Excess in percent, of each case and over all."""
    figures, found = [], []
    with cache() as folder:
        for case in CASES[::4] if quick else CASES:
            rows = rows_of(case, folder)
            told, peak = predicted(case, rows), trial(case, plan_of(case, rows), rows).peak_bytes
            excess = 100 * (told / peak - 1)
            print(f"   {case!s:<66} {told / 1e6:7.1f} MB predicted {peak / 1e6:7.1f} measured {excess:+5.1f} %")
            found.append(excess)
            figures.append(Figure(name=str(case), unit="% excess", values=(excess,)))
    return [
        Figure(name="smallest excess", unit="%", values=(min(found),), at_least=0),
        Figure(name="mean excess", unit="%", values=(statistics.mean(found),), at_most=5),
        Figure(name="largest excess", unit="%", values=(max(found),), at_most=12),
        *figures,
    ]
