"""What FedIN takes beyond FedAvg: peak memory of training with a batch of foreign feature pairs, as in later rounds.

Beside it DraftFed, which learns towards outputs inside of the model, against its prediction.

Each measurement is a process of its own, as a worker is: warmed up, then two epochs with a smaller last batch by the
real loop. The peak of the worker is all that its device has to have for it; that of training is what comes on top of
the warm process. Methods take turns. Both are held against FedAvg's in the same turn, and against what the planner
predicts: below the measurement it must never be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure
from benchmarks.memory_cases import MODELS, Case, cache, plan_of, predicted, rows_of
from edge_client.device import guard, meter
from edge_client.records import TrainingPlan, from_map, to_map

if TYPE_CHECKING:
    from edge_client.knowledge.kinds import Knowledge
    from edge_client.models.contract import Model
    from edge_client.worker.stored_tensors import StoredKnowledge

__all__ = ["measure"]

_GOAL = 1.03
MODELS["resnet18-paper"] = {"name": "resnet18", "input": [3, 32, 32]}  # the stem halves twice: 64x8x8 behind it
_CASES = [  # activations decide in some, weights in others
    Case(model="resnet18", batch=32, optimizer="momentum"),
    Case(model="resnet18", batch=16, optimizer="adam"),
    Case(model="resnet18-paper", batch=64, optimizer="adam"),
    Case(model="resnet18-paper", batch=16, optimizer="adam"),
    Case(model="preresnet20", batch=32, optimizer="momentum"),
]
_WAYS: dict[str, dict[str, Any]] = {
    "weighted": {},
    "without the proximal term": {"mu": 0.0},
    "projection": {"alleviation": "projection"},
    "sequential": {"alleviation": "sequential"},
}
_DRAFTS = [
    Case(model="resnet50", batch=16, optimizer="momentum", method="draftfed"),
    Case(model="densenet121", batch=8, optimizer="momentum", method="draftfed"),
    Case(model="resnet18", batch=32, optimizer="momentum", method="draftfed", microbatch=8),
]
MODELS["resnet50"] = {"name": "resnet50", "input": [3, 32, 32]}
MODELS["densenet121"] = {"name": "densenet121", "input": [3, 32, 32]}


@dataclass(frozen=True, slots=True)
class _Peak:
    """Bytes of one process."""

    base_bytes: int
    peak_bytes: int  # on top of it

    @property
    def worker_bytes(self) -> int:
        return self.base_bytes + self.peak_bytes


def measure(*, quick: bool) -> list[Figure]:
    """Ratios to FedAvg's peak, and predictions."""
    figures: list[Figure] = []
    repeats = 1 if quick else 3
    with cache() as folder:
        for case in _CASES[1:2] if quick else _CASES:
            plain = [_trained(case, {}, folder)[0] for _ in range(repeats)]
            for name, parameters in _WAYS.items():
                goal = _GOAL if name in ("weighted", "without the proximal term") else None
                figures += _against(plain, case, f"{case}: FedIN, {name}", parameters, folder, goal)
        for case in _DRAFTS[:1] if quick else _DRAFTS:
            found = [_trained(case, {"public": "digits"}, folder) for _ in range(repeats)]
            excess = tuple(told / mine.peak_bytes for mine, told in found)
            figures.append(Figure(name=f"{case}: predicted", unit="x measured", values=excess, at_least=1))
    return figures


def _against(
    plain: list[_Peak], case: Case, name: str, parameters: dict[str, Any], folder: Path, goal: float | None
) -> list[Figure]:
    fedin = replace(case, method="fedin")
    found = [_trained(fedin, parameters, folder) for _ in plain]
    training = tuple(mine.peak_bytes / other.peak_bytes for (mine, _), other in zip(found, plain, strict=True))
    worker = tuple(mine.worker_bytes / other.worker_bytes for (mine, _), other in zip(found, plain, strict=True))
    excess = tuple(told / mine.peak_bytes for mine, told in found)
    return [
        Figure(name=f"{name}: training", unit="x FedAvg", values=training, at_most=goal),
        Figure(name=f"{name}: worker", unit="x FedAvg", values=worker, at_most=goal),
        Figure(name=f"{name}: predicted", unit="x measured", values=excess, at_least=1),
    ]


def _trained(case: Case, parameters: dict[str, Any], folder: Path) -> tuple[_Peak, int]:
    """The peak of a process that trains so, and what was predicted."""
    rows = rows_of(case, folder, parameters)
    plan = plan_of(case, rows, parameters)
    asked = {"model": MODELS[case.model], "case": to_map(case), "parameters": parameters, "plan": to_map(plan)}
    with tempfile.TemporaryDirectory(prefix="fedfit-told-") as scratch:
        command = [sys.executable, "-m", "benchmarks.fedin_memory", json.dumps(asked | {"folder": scratch})]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=600)
    *found, told_bytes, sample_bytes = json.loads(done.stdout)
    return _Peak(*found), predicted(case, rows, parameters, sample_bytes=sample_bytes) + told_bytes


def _one(asked: dict[str, Any]) -> list[int]:
    """In this process."""
    import torch

    from benchmarks.memory_cases import run_of
    from edge_client.knowledge.kinds import FeaturePairs
    from edge_client.measuring.prepared_training import prepare
    from edge_client.methods.fedin import extractor
    from edge_client.models.taps import flat_width
    from edge_client.training.loop import train

    case = from_map(Case, asked["case"])
    MODELS[case.model] = asked["model"]
    run, plan = run_of(case, asked["parameters"]), from_map(TrainingPlan, asked["plan"])
    made = prepare(run, tuple(asked["model"]["input"]))
    knowledge: tuple[Knowledge, ...] = ()
    if case.method == "fedin":
        count = made.method.parameters.pairs
        shape = next(unit.out_shape for unit in made.model.units if unit.name == extractor(made.model))
        out = torch.rand(count, flat_width(made.model, "features"))
        knowledge = (FeaturePairs(inputs=torch.rand(count, *shape), outputs=out),)
    elif case.method == "draftfed":
        knowledge = _targets(made.model)
    told_bytes = sum(item.nbytes() for item in knowledge)  # a worker counts it to its base
    received = _received(knowledge, Path(asked["folder"]) / "told.bin")
    del knowledge
    if not meter.reset_peak():
        raise SystemExit("this system does not let a process reset its peak memory")
    base_bytes = meter.rss_bytes()
    client = made.client(plan, epochs=2, round=3, knowledge=received)
    train(made.model, client, made.samples(case.batch + case.batch // 2), made.settings(case.batch, plan))
    client.end()
    peak_bytes = meter.peak_rss_bytes() - base_bytes
    return [base_bytes, peak_bytes, told_bytes, made.method.knowledge.sample_bytes(made.model)]


def _received(knowledge: tuple[Knowledge, ...], path: Path) -> StoredKnowledge:
    """In a file, as it comes to a device."""
    from edge_client.knowledge.kinds import named_tensors
    from edge_client.wire.tensors import codec_for, write_container
    from edge_client.worker.stored_tensors import StoredKnowledge

    named = dict(named_tensors(knowledge))
    table = [(name, codec_for(value, "fp32"), tuple(value.shape)) for name, value in named.items()]
    write_container(path, {}, table, iter(named.values()))
    return StoredKnowledge([path], codec="fp32", classes=10)


def _targets(model: Model) -> tuple[Knowledge, ...]:
    """128 shared samples with random targets."""
    import torch

    from edge_client.knowledge.kinds import DraftSet, PublicSamples
    from edge_client.methods.draftfed import draft_taps
    from edge_client.methods.shared_samples import outputs

    taps, count = draft_taps(model), 128
    ends = {number: taps[number] for number in (1, max(taps))}
    seen, logits = outputs(model, torch.zeros(1, *model.input_shape), sorted(set(ends.values())), 1)
    convs = {number: torch.rand(count, *seen[tap].shape[1:]) for number, tap in ends.items()}
    rows = torch.rand(count, logits.shape[1])
    drafts = DraftSet(ids=torch.arange(count), depths=torch.tensor([max(taps)]), convs=convs, logits=rows)
    return drafts, PublicSamples(values=torch.rand(count, *model.input_shape))


if __name__ == "__main__":
    guard.pin_malloc()
    print(json.dumps(_one(json.loads(sys.argv[1]))))
