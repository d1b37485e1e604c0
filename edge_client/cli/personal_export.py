"""`edge-client export RUN --onnx FILE`: the model that this device uses, with its personal parts, as ONNX.

It is the last model that the device worked with and, in its place, what the method keeps on the device: the personal
layers of FedPer, all of Local's or DraftFed's. Of a method without such parts it is the model as it came.
Covers: finding them, next to a running client or without one. Does not cover: the writing (`onnx.export`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edge_client import durable
from edge_client.client import identity
from edge_client.config.quantities import format_bytes
from edge_client.config.run_file import RunFile
from edge_client.config.shape_text import typed_shape
from edge_client.config.task_files import split_place
from edge_client.errors import InputError, MachineError, NoSuchNameError, PayloadError
from edge_client.methods import coverage
from edge_client.methods import registry as methods
from edge_client.models.slicing import parse
from edge_client.onnx.export import Predicting, Written, write_onnx
from edge_client.onnx.file import NORMALISATION, Facts
from edge_client.operate import owner_file
from edge_client.records import from_map, to_map
from edge_client.task.run_model import Recipe, load_weights, recipe
from edge_client.task.task import read_source
from edge_client.training.contract import Job
from edge_client.training.loop import generator
from edge_client.wire.container import EXTRA_PREFIX, read_header
from edge_client.worker import state_folder
from edge_client.worker.method_state import read_state
from edge_client.worker.state_folder import LastModel
from edge_client.worker.stored_tensors import StoredTensors

__all__ = ["describe", "export"]


def export(options: argparse.Namespace) -> dict[str, Any]:
    """Write the file and return its description; raises `InputError`, `NoSuchNameError`, `MachineError`."""
    if options.onnx.suffix.lower() != ".onnx":
        raise InputError(f"--onnx: expected a file that ends with .onnx, got {str(options.onnx)!r}")
    state_dir: Path = options.state_dir
    bundle = identity.load_identity(state_dir)
    last_model = _find(state_dir, options.run)
    run = _settings(_blob(state_dir, last_model, last_model.settings_sha256))
    model_recipe = recipe(run, _task(run, options))
    shape = model_recipe.input_shape or typed_shape(options.input)
    if shape is None:
        raise InputError("--input: expected the shape of a sample, such as 3x96x96: the run's task does not tell it")
    facts = Facts(
        run=last_model.run,
        version=last_model.round - 1,
        device=bundle.device,
        model=run.what_is(last_model.slice),
        architecture=last_model.slice,
        weights_sha256=last_model.model_sha256,
        classes=run.classes,
        input=shape,
        normalisation=NORMALISATION if run.task is None else "as the task's own functions give them",
    )
    with model_recipe.user_code("export"), durable.disk_errors(f"cannot read the model in {state_dir}"):
        written = write_onnx(
            _personal_model(state_dir, last_model, run, model_recipe, shape), facts, options.onnx.absolute()
        )
    return _summary(written, options.onnx.absolute(), personal=_is_personal(run))


def _is_personal(run: RunFile) -> bool:
    return not methods.has_global_model(run.method.name, run.method.parameters)


def _find(state_dir: Path, name: str) -> LastModel:
    """Find the run by its id, a unique prefix, or `latest`; a device keeps only the last run that it worked for."""
    last_models = (state_folder.read_last_model(folder) for folder in sorted((state_dir / "method-state").glob("*")))
    known = {last_model.run: last_model for last_model in last_models if last_model is not None}
    matching = [last_model for run, last_model in known.items() if name and run.startswith(name)]
    if name in known or (name == "latest" and len(known) == 1):
        return known.get(name) or next(iter(known.values()))
    if len(matching) != 1:
        raise NoSuchNameError.of("run on this device", name, list(known))
    return matching[0]


def _blob(state_dir: Path, last_model: LastModel, sha256: str) -> Path:
    """Read a verified blob from where `BlobStore` keeps it; `BlobStore` itself would create folders here."""
    path = state_dir / "blobs" / sha256[:2] / sha256
    if not durable.is_there(path):
        raise MachineError(
            f"the model of run {last_model.run!r} is not on this device now: the client is getting a newer one, "
            "or works for another run; try again when `edge-client status` says idle"
        )
    with durable.disk_errors(f"cannot read {path}"):
        if durable.sha256_file(path) != sha256:
            raise MachineError(f"{path} is damaged; the client fetches it again in the next round")
    return path


def _settings(path: Path) -> RunFile:
    try:
        return from_map(RunFile, json.loads(path.read_bytes()), where="run")
    except (ValueError, PayloadError) as error:
        raise InputError(f"{path}: expected the settings of a run: {error}") from error


def _task(run: RunFile, options: argparse.Namespace) -> Any:
    """The run's task, if this device's owner allows it."""
    if run.task is None:
        return None
    file = owner_file.load(options.config or options.state_dir / "device.toml")
    place = file.tasks.get(run.task.name)
    if place is None:
        raise InputError(f"task {run.task.name!r} of the run is not in tasks of device.toml any more")
    return read_source(*split_place(place))


def _personal_model(
    state_dir: Path, last_model: LastModel, run: RunFile, model_recipe: Recipe, shape: tuple[int, ...]
) -> nn.Module:
    """The model that a worker would test: the received weights, completed by what the method keeps on the device."""
    method = methods.get(run.method.name, run.method.parameters)
    cut = parse(method.slices.network(last_model.slice))
    model, path = model_recipe.build(shape, cut), _blob(state_dir, last_model, last_model.model_sha256)
    try:
        load_weights(model, path)
    except PayloadError as error:
        raise InputError(f"{path}: {error.detail}") from error
    if not _is_personal(run) and not method.slices.predicts_by_client:
        return model
    folder = state_dir / "method-state" / last_model.run
    state = read_state(folder, last_model.slice)
    if not state and _is_personal(run):
        raise InputError(
            f"this device has nothing of its own in run {last_model.run!r} yet: no round of it has counted"
        )
    client = method.client()
    with torch.no_grad():
        client.begin(
            Job(
                model=model,
                round=last_model.round,
                num_rounds=run.stop.rounds,
                epochs=run.train.most_epochs,  # nothing is trained here
                learning_rate=0.0,
                class_counts=(0,) * len(run.classes),
                slice=last_model.slice,
                rng=lambda purpose: generator(run.seed, "method", purpose),
                state=state,
                extra=StoredTensors(path, EXTRA_PREFIX),
                kept=coverage.never_returned(read_header(path).meta),
                build=lambda purpose: model_recipe.build(shape, cut),
            )
        )
    return Predicting(model, client)


def _summary(written: Written, path: Path, *, personal: bool) -> dict[str, Any]:
    return {
        **to_map(written.facts),
        "personal": personal,
        "onnx": str(path),
        "onnx_sha256": durable.sha256_file(path),
        "bytes": path.stat().st_size,
        "max_difference": written.max_difference,
        "largest_output": written.largest_output,
        "relative_difference": written.relative_difference,
    }


def describe(data: dict[str, Any]) -> str:
    """The description as text."""
    whose = f"{data['device']}'s own" if data["personal"] else "as it was received, nothing in it is personal"
    return (
        f"{data['onnx']}: {data['run']} version {data['version']}, {data['model']} ({data['architecture']}), {whose}, "
        f"{format_bytes(data['bytes'])}\n"
        f"against torch: max difference {data['max_difference']:.2g}, outputs up to {data['largest_output']:.3g}"
    )
