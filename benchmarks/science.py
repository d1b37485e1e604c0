"""Whether the papers' relations come out, small but real: `python -m benchmarks.science GROUP... --data DIR --out DIR`.

Subsets of Fashion-MNIST or CIFAR-10 (Dirichlet 0.5), 20 devices of different sizes, half of them in a round, 2 local
epochs of Adam; the accuracy on a test set that no device has, mean over the architectures (of models that live on
devices: over the devices) and over the last three evaluations. Every method has the same partitions and first weights
for a seed, so differences are taken seed by seed (`science_table`). The groups are in `science_groups`.

Runs that have finished in `--out` are not repeated, so that a measurement can be stopped and gone on with; with
`--recorded` neither are those that stand in the results, of any group with the same setting. Writes
`results/science-GROUP.json` and `docs/pictures/science-GROUP.png` of the seeds that are complete. Not a part of
`make bench`: it takes hours and needs data: `--data` is a folder with Fashion-MNIST's four idx files (.gz), or one with
CIFAR-10 as its authors give it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import science_table
from benchmarks.draft_alignment import Alignment
from benchmarks.figures import machine
from benchmarks.science_data import public_file, subset
from benchmarks.science_groups import GROUPS, PUBLIC, WIDTHS, Group, Setting
from coordinator.simulation import data as simulation_data
from coordinator.simulation.simulation import Processes, Setup, simulate
from coordinator.simulation.worker_pool import WorkerPool
from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.measuring.calibration import calibrated, job_for
from edge_client.methods import registry as methods
from edge_client.planning.cost import Workload
from edge_client.planning.planner import whole_batch_bytes

__all__ = ["main"]

Json = dict[str, Any]

_LAST = 3  # evaluations that count


def main() -> int:
    """0 when all runs are done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.science", description=__doc__)
    parser.add_argument("groups", nargs="+", choices=sorted(GROUPS), metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--data", type=Path, required=True, help="folder of the data set")
    parser.add_argument("--out", type=Path, required=True, help="where runs are kept")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--recorded", action="store_true", help="take runs that stand in the results as they are there")
    options = parser.parse_args()
    seeds = [int(text) for text in options.seeds.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    # before the first seed is saved, which leaves out those that are not complete yet
    known = science_table.recorded if options.recorded else lambda setting: {}
    recorded = {name: known(GROUPS[name].setting) for name in options.groups}
    processes = Processes(WorkerPool(2))
    try:
        for seed in seeds:
            for name in options.groups:
                for run in GROUPS[name].runs:
                    if seed not in recorded[name].get(run, {}):
                        _run(GROUPS[name], run, options, processes, seed)
                _save(name, options.out, recorded[name])
    finally:
        processes.close()
    return 0


def _run(group: Group, name: str, options: argparse.Namespace, processes: Processes, seed: int) -> None:
    """One run, unless it is there; what came of it is in its folder."""
    folder = _folder(group.setting, name, seed, options.out)
    if (folder / "result.json").exists():
        return
    data = subset(group.setting, options.data, options.out)
    file = _run_file(group, name, data, options.out, seed=seed)
    prepared = simulation_data.prepare(file, options.out / f"data-{group.setting.name}-{seed}")
    observer = Alignment(file, folder, public_file(group.setting, options.out)) if group.setting.public else _Silent()
    done = simulate(Setup(file=file, folder=folder, data=prepared), processes, observer)
    print(f"{group.setting.name}  seed {seed}  {_accuracy(done):.3f}  {done['seconds']:5.0f} s  {name}", flush=True)


def _folder(setting: Setting, name: str, seed: int, out: Path) -> Path:
    return out / f"{setting.name}-{'-'.join(name.lower().replace(',', '').split())}-{seed}"


def _run_file(group: Group, name: str, data: Path, out: Path, *, seed: int) -> RunFile:
    setting = group.setting
    on_devices = name in group.on_devices
    table = _model(setting) | {
        "seed": seed,
        "train": {"batch": setting.batch, "epochs": 2, "optimizer": "adam", "lr": 0.001},
        "stop": {"rounds": setting.rounds},
        "devices": {"fraction": setting.fraction},
        "evaluate": {"on": "devices" if on_devices else "simulate", "every": setting.every},
        "simulate": {"data": f"npz:{data}", "partition": setting.partition, "devices": setting.devices},
    }
    table |= group.runs[name]
    if table.get("method", {}).get("public") == PUBLIC:
        table["method"] = table["method"] | {"public": f"npz:{public_file(setting, out)}"}
    if name in group.by_budget:
        each = setting.devices // len(WIDTHS)
        table["simulate"] |= {"training-budgets": [f"{count}B*{each}" for count in _budgets(setting, out)]}
    return parse_table(RunFile, table, source="science")


def _model(setting: Setting) -> Json:
    width = "width" if setting.model == "preresnet20" else "base_width"
    return {
        "name": "science",
        "model": {"name": setting.model, "input": list(setting.shape), width: setting.width},
        "classes": [str(number) for number in range(10)],
    }


def _budgets(setting: Setting, out: Path) -> list[int]:
    """Training memory in which each of the widths just trains whole batches, and a tenth more; measured once."""
    path = out / f"budgets-{setting.name}.json"
    if not path.exists():
        table = _model(setting) | {
            "method": {"name": "heterofl"},
            "train": {"batch": setting.batch, "optimizer": "adam"},
        }
        run = parse_table(RunFile, table, source="science")
        rules = methods.plan_rules(run.method.name, run.method.parameters)
        rows = [calibrated(job_for(run, rules, setting.shape, slice_name=rung), durable.cache_dir()) for rung in WIDTHS]
        found = [int(1.1 * whole_batch_bytes(row, Workload.of(run.train, rules))) for row in rows]
        path.write_text(json.dumps(found), encoding="utf-8")
    budgets: list[int] = json.loads(path.read_text(encoding="utf-8"))
    return budgets


class _Silent:
    """Tells nobody."""

    def moved(self, round_: int, done: int, asked: int) -> None:
        """Nothing."""

    def round_done(self, line: Json) -> None:
        """Nothing."""


def _accuracy(done: Mapping[str, Any]) -> float:
    judged: list[float] = [value for value in done["accuracy_per_round"] if value is not None]
    return statistics.mean(judged[-_LAST:])


def _save(name: str, out: Path, recorded: Mapping[str, Mapping[int, Json]]) -> None:
    """The results of the seeds for which all runs of the group are done, here or in the results."""
    group = GROUPS[name]
    found = {
        run: {**recorded.get(run, {}), **{done["seed"]: _kept(done) for done in _finished(group.setting, run, out)}}
        for run in group.runs
    }
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed in found.values())))
    if not seeds:
        return
    runs = {run: [by_seed[seed] for seed in seeds] for run, by_seed in found.items()}
    science_table.save(name, {"setting": group.setting.to_map(), "seeds": seeds, "machine": machine(), "runs": runs})


def _finished(setting: Setting, run: str, out: Path) -> Iterator[Json]:
    folder = _folder(setting, run, 0, out).name.removesuffix("0")
    for path in sorted(out.glob(f"{folder}[0-9]*/result.json")):
        beside = path.with_name("alignment.json")
        measured = {"alignment": json.loads(beside.read_text(encoding="utf-8"))} if beside.exists() else {}
        yield json.loads(path.read_text(encoding="utf-8")) | measured


def _kept(done: Mapping[str, Any]) -> Json:
    return {
        "seed": done["seed"],
        "accuracy": _accuracy(done),
        "accuracy_per_round": done["accuracy_per_round"],
        "accuracy_per_architecture": done["accuracy_per_architecture"],
        "bytes": done["bytes_up"] + done["bytes_down"],
        "seconds": done["seconds"],
        **({"alignment": done["alignment"]} if "alignment" in done else {}),
    }


if __name__ == "__main__":
    sys.exit(main())
