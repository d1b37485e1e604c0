"""`edge-client infer` on an ONNX file: its predictions, its latency and its memory; without torch.

Covers: opening the data with the classes of the file, running the model batch by batch, the result for people and as
JSON. Does not cover: the file itself (`onnx.file`), weights of a run (`infer_command`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.config.quantities import format_bytes
from edge_client.data import registry
from edge_client.data.array_set import ArraySet
from edge_client.data.formats import npz_arrays
from edge_client.data.labels import Labels, UnknownClassError, positions
from edge_client.data.npz_samples import samples_in
from edge_client.data.openers import class_names, open_both, open_test, open_train
from edge_client.data.sample_set import SampleSet
from edge_client.device import guard, meter
from edge_client.errors import InputError, NoSuchNameError
from edge_client.onnx.file import OnnxModel
from edge_client.onnx.predictions import check_out, write_predictions
from edge_client.operate import data_folder

__all__ = [
    "Answer",
    "Predictions",
    "TestSamples",
    "describe",
    "num_correct",
    "open_samples",
    "predict",
    "run",
    "to_json",
]

_BATCH_OF_STATISTICS = 32  # where a sample alone says nothing about the others
_MAX_BATCH = 65_536
_MOST_LISTED = 8
_FOR_WEIGHTS = {"run_model": "--run-model", "budget": "--budget", "depthwise": "--depthwise", "classes": "--classes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Accuracy, latency and memory of a model on a data set."""

    num_samples: int
    num_correct: int | None  # None: the data has no labels
    batch: int
    p50_ms: float  # of one call, with a batch
    p99_ms: float
    base_bytes: int  # of the process with the model, before the first batch
    peak_bytes: int  # on top of it
    seconds: float

    @property
    def accuracy(self) -> float | None:
        """Share of the samples."""
        return None if self.num_correct is None else self.num_correct / self.num_samples


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's outputs, and how long each call took."""

    logits: NDArray[np.float32]  # [n, classes]
    seconds: NDArray[np.float64]  # of each call


class TestSamples:
    """A whole set as a model takes it, read batch by batch."""

    __test__ = False  # pytest takes the name for a test's

    def __init__(self, data: SampleSet, labels: NDArray[np.int64] | None, shape: tuple[int, ...]) -> None:
        self.labels = labels
        self._shape = shape
        self._num = len(data.labels.values)
        self._rows, self._convert = data.rows(np.arange(self._num), shape)

    def __len__(self) -> int:
        return self._num

    def batch(self, first: int, size: int) -> NDArray[np.float32]:
        """[b, *input shape]."""
        chosen = np.arange(first, min(first + size, self._num))
        x = self._convert(self._rows.take(chosen)).reshape(len(chosen), *self._shape)
        return np.ascontiguousarray(x, dtype=np.float32)


def run(options: argparse.Namespace) -> Answer:
    """Run the model on the data; raises `InputError`, `MachineError`."""
    _check(options)
    if "onnxruntime" not in sys.modules:
        guard.pin_malloc()  # before it is loaded: what loading a model takes, several times its size, goes back
    model = OnnxModel(Path(options.model), threads=options.threads)
    batch = options.batch or (_BATCH_OF_STATISTICS if model.facts.batch_statistics else 1)
    samples = open_samples(options.data, model)
    model.run(samples.batch(0, batch))  # warms it up: what the first call takes is no latency
    meter.reset_peak()
    base, begun = meter.rss_bytes(), time.monotonic()
    predictions = predict(model, samples, batch)
    peak, seconds = max(0, meter.peak_rss_bytes() - base), time.monotonic() - begun
    if options.out is not None:
        write_predictions(options.out, predictions.logits, samples.labels, model.facts.classes)
    p50, p99 = np.percentile(predictions.seconds, [50, 99]) * 1000
    return Answer(
        num_samples=len(samples),
        num_correct=num_correct(predictions.logits, samples.labels) if samples.labels is not None else None,
        batch=batch,
        p50_ms=round(float(p50), 4),
        p99_ms=round(float(p99), 4),
        base_bytes=base,
        peak_bytes=peak,
        seconds=round(seconds, 3),
    )


def _check(options: argparse.Namespace) -> None:
    refused = [option for key, option in _FOR_WEIGHTS.items() if getattr(options, key) not in (None, False)]
    refused += ["--set"] if options.set else []
    refused += ["--input"] if options.input is not None else []
    if refused:
        raise InputError(f"{refused[0]}: not with an ONNX file, which has its weights and shapes in it; leave it out")
    check_out(options.out)
    if options.batch is not None and not 1 <= options.batch <= _MAX_BATCH:
        raise InputError(f"--batch: expected 1 to {_MAX_BATCH} samples, got {options.batch}")
    if not 1 <= options.threads <= 1024:
        raise InputError(f"--threads: expected 1 to 1024, got {options.threads}")


def predict(model: OnnxModel, samples: TestSamples, batch: int) -> Predictions:
    """All samples, `batch` at a time; only the calls of the model are timed."""
    logits, seconds = [], []
    for first in range(0, len(samples), batch):
        x = samples.batch(first, batch)
        begun = time.perf_counter()
        logits.append(model.run(x))
        seconds.append(time.perf_counter() - begun)
    return Predictions(np.concatenate(logits), np.array(seconds))


def num_correct(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> int:
    """How many samples got the label that they have."""
    return int((logits.argmax(axis=1) == labels).sum())


# data


def open_samples(text: str, model: OnnxModel) -> TestSamples:
    """The test set of that name, or all samples if there is none, in the shape and with the classes of a model."""
    data, has_labels = _open(text, model.input_shape)
    if not len(data.labels.values):
        raise InputError(f"{data.where}: expected at least one sample, got none")
    labels = _labels(data, model) if has_labels else None
    try:
        return TestSamples(data, labels, model.input_shape)
    except InputError as error:
        shape = list(data.shape) if data.shape is not None else "of another kind"
        raise InputError(
            f"{model.path} takes samples of {list(model.input_shape)}, those of {data.where} are {shape}: {error}"
        ) from None


def _open(text: str, shape: tuple[int, ...]) -> tuple[SampleSet, bool]:
    """By its name (`npz:/data/a.npz`), or a path where data is recognised as `edge-client join --data` does it."""
    try:
        kind, place = registry.split_source(text)
    except NoSuchNameError:
        if ":" in text and not Path(text).exists():
            raise
        layout = data_folder.recognise(Path(text))
        if layout.source == "npz" and (unlabelled := _unlabelled(layout.test or layout.train)):
            return unlabelled, False
        if layout.test is not None:
            test = open_test(layout.source, layout.test, inside=False, shape=shape)
            assert test is not None
            return test, True
        inside = open_test(layout.source, layout.train, inside=True)
        return inside or open_train(layout.source, layout.train, shape=shape), True
    if kind == "npz" and (unlabelled := _unlabelled(Path(place))):
        return unlabelled, False
    train, test = open_both(text, "", shape)
    return test or train, True


def _unlabelled(path: Path) -> SampleSet | None:
    """The samples of an npz file that has no labels at all."""
    if not path.is_file():
        return None
    arrays = npz_arrays(path)
    if any(f"y{ending}" in arrays for ending in ("", "_test", "_train")):
        return None
    for ending in ("_test", ""):
        samples = samples_in(arrays, ending)
        if samples is not None:
            none = Labels(values=np.zeros(samples.shape[0], dtype=np.int64))
            return ArraySet(samples, none, where=samples.where)
    return None


def _labels(data: SampleSet, model: OnnxModel) -> NDArray[np.int64]:
    """Each sample's class in the model; raises `InputError` for data with others."""
    names = class_names(data.labels, data.where)
    classes = model.facts.classes or names
    if len(names) > model.num_classes:
        outputs_text = f"{model.path} tells apart {model.num_classes} classes ({_listed(model.facts.classes)})"
        raise InputError(f"{outputs_text}, {data.where} has {len(names)} ({_listed(names)}); it is of other data")
    try:
        return positions(data.labels, classes, {}, data.where)
    except UnknownClassError:
        unknown = [name for name in names if name not in classes]
        raise InputError(
            f"{model.path} tells apart {_listed(classes)}; {data.where} has {_listed(unknown)}; "
            "it is of other data, or its classes have other names"
        ) from None


def _listed(classes: Sequence[str]) -> str:
    more = ", ..." if len(classes) > _MOST_LISTED else ""
    return f"{', '.join(map(repr, classes[:_MOST_LISTED]))}{more}" if classes else "without names"


# showing


def to_json(answer: Answer) -> dict[str, Any]:
    """As `--format json` prints it."""
    return {
        "num_samples": answer.num_samples,
        "accuracy": answer.accuracy,
        "batch": answer.batch,
        "latency_p50_ms": answer.p50_ms,
        "latency_p99_ms": answer.p99_ms,
        "base_bytes": answer.base_bytes,
        "peak_bytes": answer.peak_bytes,
        "seconds": answer.seconds,
    }


def describe(answer: Answer) -> str:
    """For people."""
    judged = f", accuracy {answer.accuracy:.4f}" if answer.accuracy is not None else "; the data has no labels"
    at_a_time = "one sample" if answer.batch == 1 else f"{answer.batch} samples"
    return (
        f"{answer.num_samples} samples{judged}\n"
        f"{at_a_time} at a time: p50 {answer.p50_ms:.2f} ms, p99 {answer.p99_ms:.2f} ms\n"
        f"{format_bytes(answer.peak_bytes)} on top of a process of {format_bytes(answer.base_bytes)}; "
        f"{answer.seconds:.1f} s"
    )
