"""Whether the papers' relations come out, small but real: `python -m benchmarks.science GROUP --data DIR [--out DIR]`.

Fashion-MNIST (6,000 samples, Dirichlet 0.5), 20 devices of five sizes, 10 of them in a round, 2 local epochs of Adam;
the accuracy on the whole test set, mean over the five architectures and over the last three evaluations. Every method
has the same partitions and first weights for a seed, so differences are taken seed by seed:

    reproduced           the same sign as the paper's for every seed
    contradicted         the other sign for every seed
    not at this scale    neither

Runs that have finished in `--out` are not repeated, so that a measurement can be stopped and gone on with. Writes
`results/science-GROUP.json` and `.png`. Not a part of `make bench`: it takes an hour and needs data.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import RESULTS, machine
from coordinator import plots, simulation_data
from coordinator.simulation import Processes, Setup, simulate
from coordinator.worker_pool import WorkerPool
from edge_client import durable
from edge_client.calibration import calibrated, job_for
from edge_client.files import parse_table
from edge_client.methods import registry as methods
from edge_client.planning.cost import Workload
from edge_client.planning.planner import whole_batch_bytes
from edge_client.run_file import RunFile

__all__ = ["main"]

_FILES = {"train": "train", "test": "t10k"}
_DEPTHS = ["full", "depth:2.2.3.3", "depth:2.2.2.2", "depth:1.1.2.2", "depth:1.1.1.1"]  # ResNet26, 22, 18, 14, 10
_WIDTHS = ["full", "width:1/2", "width:1/4", "width:1/8", "width:1/16"]
_LAST = 3  # evaluations that count


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What a paper says: one method is better than another."""

    better: str
    worse: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that are compared, and what should come out."""

    runs: Mapping[str, dict[str, Any]]  # name -> what it changes in the run file
    relations: Sequence[Relation]
    width: int = 8  # of the first stage
    by_budget: Sequence[str] = ()  # runs that get the memory of the five widths instead of their slices


GROUPS = {
    "depth": Group(
        runs={
            "FedAvg, one model per architecture": {"slices": _DEPTHS, "sharing": "architecture"},
            "FedAvg, layer by layer": {"slices": _DEPTHS},
            "InCo over FedAvg": {"slices": _DEPTHS, "method": {"name": "inco+fedavg"}},
        },
        relations=[
            Relation(
                better="FedAvg, layer by layer",
                worse="FedAvg, one model per architecture",
                source="InCo, Table 1: 64.8 against 52.3 on CIFAR-10",
            ),
            Relation(
                better="InCo over FedAvg", worse="FedAvg, layer by layer", source="InCo, Table 1: 67.8 against 64.8"
            ),
        ],
    ),
    "width": Group(
        width=16,
        runs={
            "FedAvg, smallest model": {"slices": _WIDTHS[-1:]},
            "HeteroFL": {"method": {"name": "heterofl"}},
            "FedRolex": {"method": {"name": "fedrolex"}},
            "FeDepth": {"method": {"name": "fedepth"}},
            "FeDepth, epochs split": {"method": {"name": "fedepth", "budget-mode": "split"}},
        },
        by_budget=("HeteroFL", "FedRolex", "FeDepth", "FeDepth, epochs split"),
        relations=[
            Relation(better="HeteroFL", worse="FedAvg, smallest model", source="InCo, section 12: all above AllSmall"),
            Relation(better="FedRolex", worse="FedAvg, smallest model", source="InCo, section 12: all above AllSmall"),
            Relation(better="FeDepth", worse="HeteroFL", source="FeDepth, Table 2, equal memory"),
            Relation(better="FeDepth, epochs split", worse="HeteroFL", source="the same with as many local epochs"),
        ],
    ),
}


def main() -> int:
    """0 when all runs are done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.science", description=__doc__)
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--data", type=Path, required=True, help="folder of Fashion-MNIST's four idx files (.gz)")
    parser.add_argument("--out", type=Path, default=None, help="where runs are kept (default: a temporary folder)")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--seeds", default="1,2,3")
    options = parser.parse_args()
    seeds = [int(text) for text in options.seeds.split(",")]
    out = options.out or Path(tempfile.mkdtemp(prefix="science-"))
    out.mkdir(parents=True, exist_ok=True)
    group = GROUPS[options.group]
    path = _subset(options.data, out / f"fashion-{options.samples}.npz", options.samples)
    facts = machine()
    results = _run_all(group, path, out, rounds=options.rounds, seeds=seeds)
    told = [_verdict(relation, results) for relation in group.relations]
    setting = {"rounds": options.rounds, "samples": options.samples, "seeds": seeds, "base_width": group.width}
    _save(options.group, {"setting": setting, "machine": facts, "runs": results, "relations": told})
    return 0


def _subset(folder: Path, path: Path, num_samples: int) -> Path:
    """The first samples for training, and the whole test set."""
    if not path.exists():
        arrays = {}
        for part, beginning in _FILES.items():
            x = _idx(folder / f"{beginning}-images-idx3-ubyte.gz")
            y = _idx(folder / f"{beginning}-labels-idx1-ubyte.gz")
            count = num_samples if part == "train" else len(x)
            arrays |= {f"x_{part}": (x[:count, None] / np.float32(255)), f"y_{part}": y[:count].astype(np.int64)}
        np.savez(path, **arrays)
    return path


def _idx(path: Path) -> np.ndarray:
    with gzip.open(path) as file:
        data = file.read()
    shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(data[3])]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def _run_file(group: Group, name: str, path: Path, *, rounds: int, seed: int) -> RunFile:
    table: dict[str, Any] = {
        "name": "science",
        "seed": seed,
        "model": {"name": "resnet26", "input": [1, 28, 28], "base_width": group.width},
        "classes": [str(number) for number in range(10)],
        "train": {"batch": 32, "epochs": 2, "optimizer": "adam", "lr": 0.001},
        "stop": {"rounds": rounds},
        "devices": {"fraction": 0.5},
        "evaluate": {"on": "simulate", "every": max(1, rounds // 10)},
        "simulate": {"data": f"npz:{path}", "partition": "dirichlet:0.5", "devices": 20},
    }
    table |= group.runs[name]
    if name in group.by_budget:
        table["simulate"] |= {"training-budgets": [f"{count}B*4" for count in _budgets(group, path)]}
    return parse_table(RunFile, table, source="science")


def _budgets(group: Group, path: Path) -> list[int]:
    """Training memory in which each of the widths just trains whole batches, and a tenth more."""
    del path
    table = {
        "name": "science",
        "method": {"name": "heterofl"},
        "model": {"name": "resnet26", "input": [1, 28, 28], "base_width": group.width},
        "classes": [str(number) for number in range(10)],
        "train": {"batch": 32, "optimizer": "adam"},
    }
    run = parse_table(RunFile, table, source="science")
    rules = methods.plan_rules(run.method.name, run.method.parameters)
    rows = [calibrated(job_for(run, rules, (1, 28, 28), cut=rung), durable.cache_dir()) for rung in _WIDTHS]
    return [int(1.1 * whole_batch_bytes(found, Workload.of(run.train, rules))) for found in rows]


class _Silent:
    """Tells nobody."""

    def moved(self, round_: int, done: int, asked: int) -> None:
        """Nothing."""

    def round_done(self, line: dict[str, Any]) -> None:
        """Nothing."""


def _run_all(group: Group, path: Path, out: Path, *, rounds: int, seeds: Sequence[int]) -> dict[str, list[Any]]:
    """Name -> for each seed accuracy, accuracies per architecture, bytes and seconds."""
    processes = Processes(WorkerPool(2))
    results: dict[str, list[Any]] = {name: [] for name in group.runs}
    try:
        for seed in seeds:
            for name in group.runs:
                file = _run_file(group, name, path, rounds=rounds, seed=seed)
                folder = out / f"{'-'.join(name.lower().replace(',', '').split())}-{rounds}-{seed}"
                data = simulation_data.prepare(file, out / f"data-{seed}")
                done = simulate(Setup(file=file, folder=folder, data=data), processes, _Silent())
                judged = [value for value in done["accuracy_per_round"] if value is not None]
                results[name].append(
                    {
                        "seed": seed,
                        "accuracy": statistics.mean(judged[-_LAST:]),
                        "accuracy_per_round": done["accuracy_per_round"],
                        "accuracy_per_architecture": done["accuracy_per_architecture"],
                        "bytes": done["bytes_up"] + done["bytes_down"],
                        "seconds": done["seconds"],
                    }
                )
                print(f"seed {seed}  {results[name][-1]['accuracy']:.3f}  {done['seconds']:5.0f} s  {name}", flush=True)
    finally:
        processes.close()
    return results


def _verdict(relation: Relation, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Differences seed by seed."""
    pairs = zip(results[relation.better], results[relation.worse], strict=True)
    gains = [better["accuracy"] - worse["accuracy"] for better, worse in pairs]
    verdict = "not at this scale"
    if all(gain > 0 for gain in gains):
        verdict = "reproduced"
    elif all(gain < 0 for gain in gains):
        verdict = "contradicted"
    spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
    mean = statistics.mean(gains)
    print(f"{verdict:<18} {relation.better} > {relation.worse}: {mean:+.3f} +- {spread:.3f} ({relation.source})")
    told = {"better": relation.better, "worse": relation.worse, "source": relation.source}
    return {**told, "gains": gains, "mean": mean, "spread": spread, "verdict": verdict}


def _save(name: str, data: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"science-{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    curves = []
    for run, seeds in data["runs"].items():
        judged = [number for number, value in enumerate(seeds[0]["accuracy_per_round"], start=1) if value is not None]
        values = [[seed["accuracy_per_round"][number - 1] for seed in seeds] for number in judged]
        points = [(number, statistics.mean(found)) for number, found in zip(judged, values, strict=True)]
        spread = [statistics.stdev(found) if len(found) > 1 else None for found in values]
        curves.append(plots.Curve(name=run, points=points, spread=spread))
    panel = plots.Panel(title="accuracy, mean over five architectures", curves=curves)
    (RESULTS / f"science-{name}.png").write_bytes(plots.lines([panel], x="round"))


if __name__ == "__main__":
    sys.exit(main())
