"""The aggregator's job `evaluate`: every slice of a model on test data of the server. Imports torch."""

from __future__ import annotations

from pathlib import Path

from coordinator.aggregation.extraction import extractor_of
from coordinator.aggregation.jobs import EvaluateJob, ServerEvaluation, SliceEvaluation
from coordinator.aggregation.task_source import recipe_of
from edge_client import faults
from edge_client.data.sets import npz
from edge_client.data.sources import Samples, all_samples
from edge_client.models.contract import Model
from edge_client.models.slicing import parse
from edge_client.task.run_model import Recipe
from edge_client.training.evaluate import evaluate
from edge_client.wire.tensors import ContainerReader

__all__ = ["evaluate_model", "microbatch", "server_samples"]

_BATCH = 64
_BATCH_ELEMENTS = 2**24  # activations of a piece: 64 MB of float32, whatever the model


def evaluate_model(job: EvaluateJob) -> ServerEvaluation:
    """Evaluate every slice of a model."""
    faults.point("aggregator.evaluate")
    recipe = recipe_of(job.run, job.task)
    samples = server_samples(recipe, job.data)
    architectures = extractor_of(job.run, job.task).architectures
    return ServerEvaluation(
        results=tuple(_evaluate_slice(job, recipe, samples, architecture) for architecture in architectures)
    )


def server_samples(recipe: Recipe, path: str) -> Samples:
    """The server's test data in an npz file, as the run's model takes it."""
    return all_samples(npz(path, test=True), recipe.run.classes, recipe.input_shape)


def microbatch(model: Model) -> int:
    """How many test samples go through a model at once."""
    return max(1, min(_BATCH, _BATCH_ELEMENTS // sum(unit.num_activations for unit in model.units)))


def _evaluate_slice(job: EvaluateJob, recipe: Recipe, samples: Samples, slice_name: str) -> SliceEvaluation:
    extractor = extractor_of(job.run, job.task)
    slices = extractor.method.slices
    model = recipe.build(samples.shape, parse(slices.network(slice_name)))
    with ContainerReader(Path(job.model)) as reader:
        extractor.fill(model, slice_name, reader)
        predict = extractor.client(slice_name, model, reader).predict if slices.predicts_by_client else model
    model.requires_grad_(False)
    with recipe.user_code("evaluation"):
        result = evaluate(model, predict, samples, num_classes=len(job.run.classes), microbatch=microbatch(model))
    return SliceEvaluation(
        slice=slice_name,
        num_samples=result.num_samples,
        num_correct=result.num_correct,
        loss_sum=result.finite_loss_sum,
        confusion=tuple(result.confusion.flatten().tolist()),
    )
