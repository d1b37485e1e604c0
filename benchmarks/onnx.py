"""Exported models: how far onnxruntime is from torch, for every built-in model, and what a process that asks takes.

Differences are of new models with BatchNorm statistics of their own, on random samples, in parts of the largest output
where that is above 1, as the export judges; the plain ones are printed. (With statistics of a real batch, a new
ResNet152 is so sensitive that torch itself is 0.004 off float64: that would say nothing about the export.)
Memory: ResNet18 on one 3x224x224 sample at a time, one thread, in a process of its own: fedfit's own classes over
onnxruntime, and over torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.federation import scratch
from benchmarks.figures import Figure

__all__ = ["measure"]

_LIMIT = 1e-4
_CALLS = 30
_SMALL = {"vit-t-16": (3, 64, 64), **{f"vit-s-{depth}": (3, 64, 64) for depth in range(8, 13)}}
_SLICED = {"resnet18": "depth:1.1.1.1-width:1/2", "vit-t-16": "layers:4", "preresnet20": "width:1/4"}

_EXPORT = """
import json, sys
from pathlib import Path
import torch
from edge_client.models import registry
from edge_client.models.slicing import parse
from edge_client.onnx.export import write_onnx
from edge_client.onnx.file import Facts
from edge_client.wire.tensors import codec_for, write_container

torch.manual_seed(1)
for name, shape, cut, out, weights in json.loads(sys.argv[1]):
    model = registry.build(name, input_shape=shape, num_classes=10, options={}, spec=parse(cut))
    for key, value in model.state_dict().items():
        if key.endswith("running_mean"):
            value.normal_(0, 0.1)
        elif key.endswith("running_var"):
            value.uniform_(0.8, 1.2)
    if weights:
        state = {f"model/{key}": value for key, value in model.state_dict().items()}
        table = [(key, codec_for(value, "fp32"), tuple(value.shape)) for key, value in state.items()]
        write_container(Path(weights), {}, table, state.values())
    found = write_onnx(model, Facts(input=tuple(shape)), Path(out))
    print(json.dumps([name, cut, found.max_difference, found.largest_output, found.relative_difference]), flush=True)
"""
_ASKED = """
import statistics, sys, time
import numpy as np
from edge_client.device import guard, meter
guard.pin_malloc()  # as `edge-client infer` does
{opening}
x = np.random.default_rng(1).random((1, 3, 224, 224), dtype=np.float32)
ask(x)
seconds = []
for _ in range({calls}):
    begun = time.perf_counter()
    ask(x)
    seconds.append(time.perf_counter() - begun)
print(meter.rss_bytes(), meter.peak_rss_bytes(), statistics.median(seconds))
"""
_BY_ONNX = """
from pathlib import Path
from edge_client.onnx.file import OnnxModel
model = OnnxModel(Path(sys.argv[1]), threads=1)
ask = model.run
"""
_BY_TORCH = """
from pathlib import Path
import torch
from edge_client.models import registry
from edge_client.task.run_model import load_weights
torch.set_num_threads(1)
torch.set_grad_enabled(False)
model = registry.build("resnet18", input_shape=(3, 224, 224), num_classes=10, options={})
load_weights(model, Path(sys.argv[1]))
model.eval()
ask = lambda x: model(torch.from_numpy(x))
"""


def measure(*, quick: bool) -> list[Figure]:
    """Every model once; the processes three times."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        figures = _differences(Path(folder), quick=quick)
        return [*figures, *_memory(Path(folder), repeats=1 if quick else 3)]


def _differences(folder: Path, *, quick: bool) -> list[Figure]:
    from edge_client.models import registry

    names = ["mlp", "small-cnn", "resnet10"] if quick else registry.names()
    jobs = [(name, _SMALL.get(name, registry.default_input(name)), "full") for name in names]
    jobs += [(name, _SMALL.get(name, registry.default_input(name)), cut) for name, cut in _SLICED.items() if not quick]
    said = _run(_EXPORT, json.dumps([(*job, str(folder / "m.onnx"), "") for job in jobs]))
    rows = [json.loads(line) for line in said.splitlines()]
    for name, cut, difference, largest, _ in rows:
        print(f"   {name} {cut}: {difference:.2g} in outputs up to {largest:.3g}")
    count = f"{len(names)} models" + (f" and {len(_SLICED)} slices" if not quick else "")
    worst = max(relative for *_, relative in rows)
    return [Figure(name=f"largest difference from torch, {count}", unit="", values=(worst,), at_most=_LIMIT)]


def _memory(folder: Path, repeats: int) -> list[Figure]:
    file, weights = folder / "resnet18.onnx", folder / "resnet18.bin"
    _run(_EXPORT, json.dumps([("resnet18", (3, 224, 224), "full", str(file), str(weights))]))
    figures = []
    for way, opening, given in (("onnxruntime", _BY_ONNX, file), ("torch", _BY_TORCH, weights)):
        code = _ASKED.format(opening=opening, calls=_CALLS)
        found = [[float(word) for word in _run(code, str(given)).split()] for _ in range(repeats)]
        rss, peak, seconds = (tuple(column) for column in zip(*found, strict=True))
        told = f"resnet18, batch 1, {way}"
        figures += [
            Figure(name=f"{told}: RSS", unit="MB", values=tuple(value / 1e6 for value in rss)),
            Figure(name=f"{told}: peak RSS", unit="MB", values=tuple(value / 1e6 for value in peak)),
            Figure(name=f"{told}: one sample", unit="ms", values=tuple(value * 1000 for value in seconds)),
        ]
    return figures


def _run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True, env={**os.environ}
    )
    return done.stdout
