"""`coordinator run export RUN --onnx FILE`: a run's model, or a slice of it, as an ONNX file.

Covers: which model is meant (of the running coordinator, or of a simulation's folder), the process that writes it, what
is shown. Does not cover: the writing (`export_job`, `edge_client.onnx.export`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from coordinator import control
from coordinator.aggregation.jobs import ExportedModel, ExportJob, Failure, QuantizationLoss, encode_job, read_answer
from coordinator.aggregation.task_source import with_task
from coordinator.cli.options import add_state_dir, formatted, show
from coordinator.control_messages import FindModel, StoredModel
from coordinator.results import run_folders
from coordinator.results.run_directory import RUN, RunDirectory
from coordinator.run_check import check_has_model
from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.config.run_file import RunFile, load_run_file
from edge_client.config.shape_text import typed_shape
from edge_client.errors import InputError, MachineError, NoSuchNameError, PayloadError, RunFailedError
from edge_client.methods import registry as methods
from edge_client.records import is_id, to_map

__all__ = ["add_options", "chosen_architecture", "in_a_process", "lost", "test_data", "which_version"]


def add_options(export: argparse.ArgumentParser) -> None:
    """Add the options of `run export`."""
    formatted(add_state_dir(export)).set_defaults(do=_export)
    export.add_argument("run", metavar="RUN|DIR", help="id, unique prefix or latest; or the folder of a simulation")
    export.add_argument("--onnx", metavar="FILE", type=Path, required=True, help="the file to write; ends with .onnx")
    export.add_argument(
        "--version", metavar="N|best|last", default="", help="default: the best, or the last if none was judged"
    )
    export.add_argument("--architecture", metavar="SLICE", help="a slice of the run; default: its largest one")
    export.add_argument("--input", metavar="SHAPE", help="of one sample, such as 3x96x96, if the task does not tell")
    export.add_argument("--int8", action="store_true", help="weights and activations as bytes: a quarter of the size")
    export.add_argument(
        "--data", metavar="SOURCE:PATH", help="with --int8: what to judge it with; default: the server's test data"
    )


def _export(options: argparse.Namespace) -> None:
    _check(options)
    place = Path(options.run)
    of_a_folder = run_folders.holds_runs(place) or not is_id(options.run)
    model = _in_folder(place, options.version) if of_a_folder else _of_coordinator(options)
    file = model.file
    check_has_model(file, model.run, str(options.onnx))
    job = ExportJob(
        run=file,
        name=model.run,
        version=model.version,
        task=model.task,
        model=model.path,
        sha256=model.sha256,
        architecture=chosen_architecture(file, options.architecture),
        input=typed_shape(options.input),
        int8=options.int8,
        data=(options.data or test_data(file)) if options.int8 else "",
        out=str(options.onnx.absolute()),
    )
    exported = in_a_process(job)
    data = to_map(exported)
    if not job.int8:
        del data["int8"]
    which = "" if of_a_folder else f"{which_version(model)}\n"
    show(options, data, lambda _: which + _summary(exported))


def _check(options: argparse.Namespace) -> None:
    if options.onnx.suffix.lower() != ".onnx":
        raise InputError(f"--onnx: expected a file that ends with .onnx, got {str(options.onnx)!r}")
    if not options.onnx.absolute().parent.is_dir():
        raise InputError(f"--onnx: the folder {options.onnx.absolute().parent} does not exist")
    if options.data and not options.int8:
        raise InputError("--data: only with --int8, to tell the accuracy lost; see also: edge-client infer")


def _of_coordinator(options: argparse.Namespace) -> StoredModel:
    return control.ask(options.state_dir, FindModel(run=options.run, version=options.version))


def _in_folder(place: Path, version: str) -> StoredModel:
    """The one finished simulation at `place`."""
    folders = run_folders.find_runs([place])
    if len(folders) > 1:
        listed = ", ".join(map(str, folders[:5]))
        raise NoSuchNameError(f"{place} has {len(folders)} simulations; name one of them: {listed}")
    folder = RunDirectory(folders[0])
    if not folder.model.is_file():
        raise RunFailedError(f"{folder.path} has no model.bin; let the simulation end first")
    record = run_folders.read_run(folder.path)
    last = max((line.number for line in record.rounds), default=0)
    if version not in ("", "last", str(last)):
        raise InputError(f"--version: a simulation keeps its last model alone, version {last}; got {version!r}")
    file = load_run_file(folder.path / RUN)
    task = None
    if file.task is not None:
        file, _, place_of_task = with_task(file, file.task, folder.path / RUN)
        task = place_of_task.rpartition(":")[0]
    with durable.disk_errors(f"cannot read {folder.model}"):
        sha256 = durable.sha256_file(folder.model)
    return StoredModel(
        run=folder.path.resolve().name,
        file=file,
        task=task,
        version=last,
        sha256=sha256,
        path=str(folder.model.resolve()),
    )


def which_version(model: StoredModel) -> str:
    """Which version was taken, and how it was judged: `photos-2 version 4, the best: accuracy 0.5533`."""
    name = f"{model.run} version {model.version}"
    if model.score is None:
        return f"{name}, which nobody judged"
    return f"{name}, {'the best' if model.is_best else 'not the best'}: {model.metric} {model.score:.4f}"


def chosen_architecture(file: RunFile, asked: str | None) -> str:
    """One of the run's slices, as the run writes it; raises `NoSuchNameError`."""
    architectures = methods.architectures(file)
    if asked is None or asked in architectures:
        return asked or architectures[0]
    try:
        spelled = str(methods.named(file, asked))
    except (InputError, PayloadError):
        spelled = ""
    if spelled not in architectures:
        raise NoSuchNameError(f"unknown architecture {asked!r} of this run; it has: {', '.join(architectures)}")
    return spelled


def test_data(file: RunFile) -> str:
    """What the server judges with; empty if it does not."""
    if file.evaluate.on == "simulate":
        return file.simulate.data if file.simulate is not None else ""
    return "" if file.evaluate.on == "devices" else file.evaluate.on


def in_a_process(job: ExportJob) -> ExportedModel:
    """Export a model in a separate process; raises the error that it reports."""
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.aggregation.export_job"],
        input=encode_job(1, job),
        stdout=subprocess.PIPE,
        check=False,
        start_new_session=True,  # Ctrl-C ends us, and we end it: it has nothing to say about that
    )
    try:
        answer = read_answer(done.stdout).answer_to(job)
    except (ValueError, PayloadError):
        raise MachineError(f"the export ended with code {done.returncode}; its last words are above") from None
    if isinstance(answer, Failure):
        raise answer.error()
    return answer


def _summary(exported: ExportedModel) -> str:
    lines = [
        f"{exported.onnx}: {exported.run} version {exported.version}, {exported.model} ({exported.architecture}), "
        f"{exported.precision}, {format_bytes(exported.bytes)}",
        f"fp32 against torch: max difference {exported.max_difference:.2g}, "
        f"outputs up to {exported.largest_output:.3g}",
    ]
    if exported.precision == "int8":
        lines.append(lost(exported.int8))
    if exported.batch_statistics:
        lines.append("its BatchNorms use the statistics of each batch: ask it about many samples at a time")
    return "\n".join(lines)


def lost(loss: QuantizationLoss | None) -> str:
    """What int8 costs, for people."""
    if loss is None:
        return "accuracy lost by int8: not known, the server has no test data; name some with --data"
    return (
        f"accuracy lost by int8: {loss.accuracy_lost:.4f} ({loss.fp32_accuracy:.4f} -> "
        f"{loss.accuracy:.4f} on {loss.num_samples} samples)"
    )
