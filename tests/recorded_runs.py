"""Runs whose models and bytes are recorded: what a refactor must not change.

`python tests/recorded_runs.py` records them as this tree makes them on this machine, in `recorded_runs.json`: after a
change of the maths that the changelog names, or on a machine that the file does not know yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from simulations import shared_processes, simulated

RECORD = Path(__file__).with_suffix(".json")
ROUNDS = 2
DEMO = "demo"

Flags = Mapping[str, Any]

_EVERY: Flags = {"data": "digits", "devices": 3, "rounds": ROUNDS, "seed": "1"}
_TRAIN = (
    "train.batch=32",
    "train.max-steps=6",
    "train.threads=1",
    "train.epochs=5",
    "train.weight-decay=0.0",
    "train.schedule=constant",
    "train.warm-up=false",
    "train.normalise=false",
)
_MLP: Flags = {"model": "mlp", "set": ("model.hidden=[32,16]",)}
_TWO_WIDTHS: Flags = {**_MLP, "slices": "full,width:1/2"}
_RESNET: Flags = {"model": "preresnet20", "set": ("model.width=4",)}
_TWO_DEPTHS: Flags = {**_RESNET, "slices": "full,depth:1.1.1"}
_TWO_EXITS: Flags = {**_RESNET, "slices": "full,exit:2"}
_TWO_BASES: Flags = {**_MLP, "set": (*_MLP["set"], "bases=2")}
_SHARED_SAMPLES: Flags = {**_TWO_WIDTHS, "set": (*_MLP["set"], "public=digits", "public-samples=16")}

FLAGS: Mapping[str, Flags] = {
    "fedavg": _TWO_DEPTHS,
    "fedprox": _MLP,
    "scaffold": _MLP,
    "fednova": _MLP,
    "moon": _MLP,
    "fedper": _MLP,
    "local": _MLP,
    "heterofl": _TWO_WIDTHS,
    "fedrolex": _TWO_WIDTHS,
    "inclusivefl": _TWO_DEPTHS,
    "scalefl": _TWO_EXITS,
    "splitmix": _TWO_BASES,
    "inco": _TWO_DEPTHS,
    "fedepth": _RESNET,
    "m-fedepth": _RESNET,
    "felo": _TWO_WIDTHS,
    "velo": _TWO_WIDTHS,
    "fedhe": _TWO_WIDTHS,
    "fedproto": _TWO_WIDTHS,
    "fedin": _TWO_DEPTHS,
    "fedmd": _SHARED_SAMPLES,
    "draftfed": _SHARED_SAMPLES,
    "fedgkt": _RESNET,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run ended with."""

    model_sha256: str
    rounds: int
    bytes_down: int  # bytes up differ by a few: reports carry measurements


def flags_of(method: str) -> dict[str, Any]:
    """What `coordinator simulate` is told to record a method."""
    flags = {**_EVERY, **FLAGS[method], "method": method}
    return {**flags, "set": (*flags["set"], *_TRAIN)}


def outcomes_of(methods: Iterable[str]) -> dict[str, Outcome]:
    """Two simulated rounds of each method, by one worker."""
    outcomes: dict[str, Outcome] = {}
    with shared_processes() as processes, tempfile.TemporaryDirectory() as folder:
        for method in methods:
            result = simulated(Path(folder) / method, processes, **flags_of(method))
            outcomes[method] = Outcome(**{key: result[key] for key in ("model_sha256", "rounds", "bytes_down")})
    return outcomes


def demo_sha256() -> str:
    """The model of `make demo`, as a person starts it: its plans follow from a calibration with all threads."""
    command = [sys.executable, "-m", "coordinator", "demo", "--seed", "1", "--format", "json"]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory() as cache:
        environment["FEDFIT_CACHE_DIR"] = cache
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=environment)
    return str(json.loads(done.stdout)["model_sha256"])


def machine() -> str:
    """What decides over a model's last bits: torch's version, and which of its kernels suit this processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU architecture", "CPU part")  # x86, Arm
    processor = " ".join(fields[name] for name in names if name in fields)
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {processor}"


def read_record() -> tuple[dict[str, int], dict[str, dict[str, str]]]:
    """Bytes down by method, and by machine the hash of each method's model and of the demo's."""
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return record["bytes_down"], record["model_sha256"]


def main() -> None:
    """Record every run, and print which were recorded otherwise before."""
    bytes_before, hashes = read_record()
    outcomes = outcomes_of(FLAGS)
    sha256s = {name: outcome.model_sha256 for name, outcome in outcomes.items()} | {DEMO: demo_sha256()}
    bytes_down = {name: outcome.bytes_down for name, outcome in outcomes.items()}
    before = hashes.get(machine(), {})
    changed = [name for name, sha256 in sha256s.items() if before.get(name, sha256) != sha256]
    changed += [f"bytes of {name}" for name, count in bytes_down.items() if bytes_before.get(name, count) != count]
    record = {"bytes_down": bytes_down, "model_sha256": {**hashes, machine(): sha256s}}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{machine()}: {len(sha256s)} runs; changed: {', '.join(changed) or 'none'}")


if __name__ == "__main__":
    main()
