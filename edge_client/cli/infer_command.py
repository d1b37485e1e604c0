"""`edge-client infer` on weights: predictions of a trained model, whole or group by group with activations on disk.

Covers: opening model and data, the result for people and as JSON. Does not cover: the forward pass group by group
(`training.depthwise`), ONNX files (`onnx.infer`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.config.quantities import format_bytes
from edge_client.device import guard, meter
from edge_client.errors import InputError, PayloadError

if TYPE_CHECKING:
    from torch import Tensor

    from edge_client.data.sources import Samples
    from edge_client.models.contract import Model
    from edge_client.training.depthwise import Weights

__all__ = ["Answer", "describe", "run", "to_json"]

_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The predictions of a model on a data set, as figures."""

    num_samples: int
    num_correct: int
    groups: tuple[tuple[str, ...], ...]
    microbatch: int
    base_bytes: int  # of the process before the first batch, warmed up
    peak_bytes: int  # on top of it
    seconds: float

    @property
    def accuracy(self) -> float:
        """The share of the samples whose class was predicted correctly."""
        return self.num_correct / self.num_samples


def run(options: argparse.Namespace) -> Answer:
    """Run the model on the data; raises `InputError`, `NothingFitsError`, `MachineError`."""
    from edge_client.onnx.predictions import check_out

    if options.run_model is None:
        raise InputError("--run-model: expected the file of its weights, or --model FILE.onnx, which has its own")
    if options.batch is None:
        options.batch = _BATCH
    check_out(options.out)
    if not 1 <= options.threads <= 1024:
        raise InputError(f"--threads: expected 1 to 1024, got {options.threads}")
    if "torch" not in sys.modules:
        guard.pin_malloc()  # before torch is loaded: what a group used goes back to the system
    from edge_client.config.task_files import split_place
    from edge_client.measuring.plan_from_options import Subject, read_subject
    from edge_client.task.run_model import recipe
    from edge_client.task.task import read_source

    samples = _open_data(options)
    what: Subject = read_subject(options)
    source = read_source(*split_place(what.task)) if what.task is not None else None
    model = recipe(what.run, source).skeleton(what.input_shape)
    with _opened(_file(options.run_model), model) as weights:
        return _ask(model, weights, samples, options)


def _open_data(options: argparse.Namespace) -> Samples:
    """The test set if there is one, else the training set; fills in options that follow from the data."""
    from edge_client.config.shape_text import typed_shape
    from edge_client.data.openers import class_names, input_shape, open_both
    from edge_client.data.sources import all_samples

    shape = typed_shape(options.input)
    train, test = open_both(options.data, "", shape)
    classes = class_names(train.labels, train.where)
    if options.classes is None:
        options.classes = len(classes)
    elif options.classes < len(classes):
        raise InputError(f"--classes: {options.data} has {len(classes)} classes, got {options.classes}")
    shape = shape or input_shape(train.shape)
    options.input = "x".join(map(str, shape)) if shape is not None else None
    return all_samples(test if test is not None else train, classes, shape)


def _file(path: Path) -> Path:
    """The path of a model's container, which may be named by the directory of its run."""
    return path / "model.bin" if path.is_dir() else path


@contextmanager
def _opened(path: Path, model: Model) -> Iterator[Weights]:
    """The values of a container by their names in the model; raises `InputError` if it is of another model."""
    from edge_client.training.depthwise import release
    from edge_client.wire.container import MODEL_PREFIX
    from edge_client.wire.tensors import ContainerReader

    expected = set(model.state_dict())
    release(model)
    try:
        with ContainerReader(path) as reader:
            names = {name.removeprefix(MODEL_PREFIX) for name in reader.names(MODEL_PREFIX)}
            if odd := sorted(names ^ expected):
                differ = f"they differ in {len(odd)} tensors, such as {odd[0]!r}"
                raise InputError(f"--run-model: {path} is of another model: {differ}; look at --model and --set")
            yield lambda name: reader.tensor(MODEL_PREFIX + name)
    except OSError as error:
        raise InputError(f"--run-model: cannot read {path}: {error.strerror}") from error
    except PayloadError as error:
        raise InputError(f"--run-model: {path}: {error.detail}") from error


def _ask(model: Model, weights: Weights, samples: Samples, options: argparse.Namespace) -> Answer:
    import torch

    from edge_client.measuring.plan_from_options import parse_size
    from edge_client.onnx.predictions import write_predictions
    from edge_client.training.depthwise import fit_groups, predict_depthwise, survey

    budget = parse_size("--budget", options.budget) if options.budget is not None else None
    torch.set_num_threads(options.threads)
    sizes = survey(model, weights, samples.shape)  # also warms the process up
    groups: Sequence[Sequence[str]] = [[name] for name in model.order] if options.depthwise else [model.order]
    microbatch = options.batch
    if budget is not None:
        groups, microbatch = fit_groups(model, sizes, microbatch, budget)
    meter.reset_peak()
    base, begun = meter.rss_bytes(), time.monotonic()
    logits: list[Tensor] = []
    with tempfile.TemporaryDirectory(prefix="fedfit-infer-") as folder:
        logits += predict_depthwise(model, weights, samples, groups, Path(folder), microbatch)
    outputs = torch.cat(logits)
    answers = outputs.argmax(dim=1)
    if options.out is not None:
        write_predictions(options.out, outputs.numpy(), samples.labels.numpy())
    return Answer(
        num_samples=len(answers),
        num_correct=int((answers == samples.labels).sum()),
        groups=tuple(tuple(group) for group in groups),
        microbatch=microbatch,
        base_bytes=base,
        peak_bytes=max(0, meter.peak_rss_bytes() - base),
        seconds=round(time.monotonic() - begun, 3),
    )


def to_json(answer: Answer) -> dict[str, Any]:
    """The answer as `--format json` prints it."""
    return {
        "num_samples": answer.num_samples,
        "accuracy": answer.accuracy,
        "groups": [list(group) for group in answer.groups],
        "batch": answer.microbatch,
        "base_bytes": answer.base_bytes,
        "peak_bytes": answer.peak_bytes,
        "seconds": answer.seconds,
    }


def describe(answer: Answer) -> str:
    """The answer as text."""
    ways = f"{len(answer.groups)} groups" if len(answer.groups) > 1 else "all units at once"
    return (
        f"{answer.num_samples} samples, accuracy {answer.accuracy:.4f}\n"
        f"{ways}, {answer.microbatch} samples at a time: {format_bytes(answer.peak_bytes)} on top of a process of "
        f"{format_bytes(answer.base_bytes)}; {answer.seconds:.1f} s"
    )
