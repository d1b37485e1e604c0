"""The process of `coordinator run export`: builds a run's model, fills it with its tensors and writes it as ONNX.

`python -m coordinator.aggregation.export_job` does each `ExportJob` on its standard input. It is a process of its own
because a run's model may be a task's code, and because commands stay free of torch.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.aggregation.job_child import answer_jobs
from coordinator.aggregation.jobs import ExportedModel, ExportJob, Failure, Job, QuantizationLoss
from coordinator.aggregation.task_source import recipe_of
from edge_client import durable
from edge_client.device import guard
from edge_client.errors import FedfitError, InputError, MachineError, PayloadError

if TYPE_CHECKING:
    from torch import nn

    from edge_client.onnx.export import Written
    from edge_client.onnx.file import Facts
    from edge_client.task.run_model import Recipe

__all__ = ["do", "main"]

_BATCH = 64  # of the samples that int8 is measured on; as the aggregator's


def do(job: Job[object]) -> ExportedModel | Failure:
    """Do one job; what fedfit raises on purpose becomes an answer."""
    assert isinstance(job, ExportJob)
    try:
        with durable.disk_errors("export"):
            return _export(job)
    except PayloadError as error:
        return Failure.of(InputError(error.detail))
    except FedfitError as error:
        return Failure.of(error)


def _export(job: ExportJob) -> ExportedModel:
    _need_onnx()
    import torch

    from edge_client.onnx.export import quantize, write_onnx
    from edge_client.onnx.file import NORMALISATION, Facts

    torch.set_num_threads(1)
    recipe, out = recipe_of(job.run, job.task), Path(job.out)
    shape = recipe.input_shape or job.input
    if shape is None:
        raise InputError("--input: expected the shape of a sample, such as 3x96x96: the run's task does not tell it")
    facts = Facts(
        run=job.name,
        version=job.version,
        model=job.run.what_is(job.architecture),
        architecture=job.architecture,
        weights_sha256=job.sha256,
        classes=job.run.classes,
        input=shape,
        normalisation=NORMALISATION if job.run.task is None else "as the task's own functions give them",
    )
    with recipe.user_code("export"), tempfile.TemporaryDirectory(prefix="fedfit-export-") as folder:
        plain = Path(folder) / "fp32.onnx" if job.int8 else out
        written = write_onnx(_predicting_model(job, recipe, shape), facts, plain)
        if not job.int8:
            return _exported(job, written, written.facts)
        quantized = quantize(plain, written.facts, out)
        return _exported(job, written, quantized, _quantization_loss(job.data, plain, out))


def _need_onnx() -> None:
    """Raise `MachineError` without the package whose checker looks at the file."""
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise MachineError(
            f"run export needs onnx and onnxruntime ({error}); type: pip install 'fedfit[coordinator]'"
        ) from error


def _predicting_model(job: ExportJob, recipe: Recipe, shape: tuple[int, ...]) -> nn.Module:
    """The model that the server evaluates, or what the method makes of several."""
    from coordinator.aggregation.extraction import SliceExtractor
    from edge_client.models.slicing import parse
    from edge_client.onnx.export import Predicting
    from edge_client.wire.tensors import ContainerReader

    extractor = SliceExtractor(recipe)
    slices = extractor.method.slices
    model = recipe.build(shape, parse(slices.network(job.architecture)))
    try:
        with ContainerReader(Path(job.model)) as reader:
            extractor.fill(model, job.architecture, reader)
            if slices.predicts_by_client:
                return Predicting(model, extractor.client(job.architecture, model, reader))
            return model
    except PayloadError as error:
        raise InputError(f"{job.model}: {error.detail}") from error
    except FileNotFoundError as error:
        raise InputError(f"version {job.version} of {job.name} was removed meanwhile; name a newer one") from error


def _exported(job: ExportJob, written: Written, facts: Facts, int8: QuantizationLoss | None = None) -> ExportedModel:
    out = Path(job.out)
    return ExportedModel(
        **{field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)},
        onnx=job.out,
        onnx_sha256=durable.sha256_file(out),
        bytes=out.stat().st_size,
        max_difference=written.max_difference,
        largest_output=written.largest_output,
        relative_difference=written.relative_difference,
        int8=int8,
    )


def _quantization_loss(data: str, plain: Path, quantized: Path) -> QuantizationLoss | None:
    """The accuracy of both files on test data; None without any."""
    if not data:
        return None
    from edge_client.onnx.file import OnnxModel
    from edge_client.onnx.infer import num_correct, open_samples, predict

    models = [OnnxModel(path) for path in (plain, quantized)]
    samples = open_samples(data, models[0])
    if samples.labels is None:
        raise InputError(f"--data: expected samples with labels, {data} has none")
    before, after = (num_correct(predict(model, samples, _BATCH).logits, samples.labels) for model in models)
    return QuantizationLoss(
        data=data,
        num_samples=len(samples),
        fp32_bytes=plain.stat().st_size,
        fp32_accuracy=before / len(samples),
        accuracy=after / len(samples),
        accuracy_lost=(before - after) / len(samples),
    )


def main() -> int:
    """Answer the job on standard input."""
    guard.die_with_parent()
    answer_jobs(do)
    return 0


if __name__ == "__main__":
    guard.end(main())
