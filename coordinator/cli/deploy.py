"""`coordinator run deploy RUN`: push a run's model to devices, and look at what became of it.

Covers: the files that are needed, one per architecture, made as `run export` makes them; handing them to the running
coordinator; watching. Does not cover: who gets what and when (`coordinator.fleet.deployments`), the devices' side
(`edge_client.client.deploying`).
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from coordinator import control
from coordinator.aggregation.jobs import ExportedModel, ExportJob
from coordinator.cli import export as cli_export
from coordinator.cli import tables
from coordinator.cli.devices import parse_labels
from coordinator.cli.options import add_state_dir, formatted, show
from coordinator.control_messages import (
    Deployment,
    DeploymentPlan,
    ExportedFile,
    KnownFile,
    PlanDeployment,
    ShowDeployment,
    StartDeployment,
    StartedDeployment,
)
from coordinator.requests.deployments import new_name
from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.config.shape_text import typed_shape
from edge_client.errors import InputError, RunFailedError
from edge_client.onnx.file import classes_hash

__all__ = ["add_options"]

_POLL_S = 0.3
_PATIENCE_S = 3.0  # a device that is not there may be on its way back, or the coordinator was just started
_OPEN = ("pending", "downloading", "testing")


def add_options(deploy: argparse.ArgumentParser) -> None:
    """Add the options of `run deploy`."""
    formatted(add_state_dir(deploy)).set_defaults(do=_deploy)
    deploy.add_argument("run", metavar="RUN", help="id, unique prefix or latest")
    who = deploy.add_mutually_exclusive_group()
    who.add_argument("--device", metavar="ID", action="append", default=[], help="repeatable; default: all devices")
    who.add_argument("--label", metavar="K=V", action="append", default=[], help="devices with this label; repeatable")
    deploy.add_argument(
        "--version", metavar="N|best|last", default="", help="default: the best, or the last if none was judged"
    )
    deploy.add_argument(
        "--architecture", metavar="SLICE", help="for all; default: what each device trained, or the largest slice"
    )
    deploy.add_argument("--input", metavar="SHAPE", help="of one sample, such as 3x96x96, if the task does not tell")
    deploy.add_argument("--int8", action="store_true", help="weights and activations as bytes: a quarter of the size")
    deploy.add_argument(
        "--data", metavar="SOURCE:PATH", help="with --int8: what to judge it with; default: the server's test data"
    )
    later = deploy.add_mutually_exclusive_group()
    later.add_argument("--no-wait", action="store_true", help="do not wait for the devices that are there")
    later.add_argument("--status", action="store_true", help="deploy nothing: how it stands, there or everywhere")


def _deploy(options: argparse.Namespace) -> None:
    if options.status:
        request = ShowDeployment(run=options.run, devices=tuple(options.device), labels=_labels(options))
        show(options, control.ask(options.state_dir, request), tables.deployments)
        return
    plan = _plan(options)
    job = _job(options, plan)
    with contextlib.ExitStack() as opened:
        files = []
        for architecture, devices in _by_architecture(plan.file, plan.devices, options.architecture).items():
            made_file = _file(options.state_dir, plan.made, replace(job, architecture=architecture), devices)
            files.append(opened.enter_context(made_file))
        print(cli_export.which_version(plan), file=sys.stderr)
        start = StartDeployment(run=plan.run, version=plan.version, files=tuple(files))
        started = control.ask(options.state_dir, start)
    _watch(options, started)


def _plan(options: argparse.Namespace) -> DeploymentPlan:
    """The model and the devices that are meant; what a person can mistype is found before anything is made."""
    if options.data and not options.int8:
        raise InputError("--data: only with --int8, to tell the accuracy lost")
    typed_shape(options.input)
    request = PlanDeployment(
        run=options.run,
        precision=_precision(options.int8),
        version=options.version,
        devices=tuple(options.device),
        labels=_labels(options),
    )
    return control.ask(options.state_dir, request)


def _labels(options: argparse.Namespace) -> dict[str, str]:
    return parse_labels(options.label, may_drop=False)[0]


def _precision(is_int8: bool) -> str:
    return "int8" if is_int8 else "fp32"


def _job(options: argparse.Namespace, plan: DeploymentPlan) -> ExportJob:
    """The export of the plan's model, whose architecture and place are yet to be filled in."""
    return ExportJob(
        run=plan.file,
        name=plan.run,
        version=plan.version,
        task=plan.task,
        model=plan.path,
        sha256=plan.sha256,
        architecture="",
        input=typed_shape(options.input),
        int8=options.int8,
        data=(options.data or cli_export.test_data(plan.file)) if options.int8 else "",
        out="",
    )


def _by_architecture(
    file: RunFile, trained_by_device: Mapping[str, str | None], asked: str | None
) -> dict[str, list[str]]:
    """Which devices get which architecture: what they trained, unless one is named for all."""
    devices: dict[str, list[str]] = {}
    for device, trained in trained_by_device.items():
        devices.setdefault(cli_export.chosen_architecture(file, asked or trained), []).append(device)
    return devices


@contextlib.contextmanager
def _file(
    state_dir: Path, known_files: Mapping[str, KnownFile], job: ExportJob, devices: Sequence[str]
) -> Iterator[ExportedFile]:
    """The file for these devices: one that the coordinator has already, or a new one in `STATE/tmp`."""
    known, precision = known_files.get(job.architecture), _precision(job.int8)
    if known is not None:
        yield ExportedFile(
            name=None,
            architecture=job.architecture,
            precision=precision,
            sha256=known.sha256,
            length=known.length,
            input=known.input,
            classes_sha256=known.classes_sha256,
            devices=tuple(devices),
        )
        return
    name = new_name()
    place = state_dir / "tmp" / name
    print(f"exporting {job.name} version {job.version} ({job.architecture}, {precision})", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fedfit-deploy-") as folder:
        exported = _export(replace(job, out=str(Path(folder) / "model.onnx")))
        _copy(Path(folder) / "model.onnx", place, state_dir)
    try:
        yield ExportedFile(
            name=name,
            architecture=job.architecture,
            precision=precision,
            sha256=exported.onnx_sha256,
            length=exported.bytes,
            input=exported.input,
            classes_sha256=classes_hash(exported.classes),
            devices=tuple(devices),
        )
    finally:
        with durable.as_owner(state_dir):
            place.unlink(missing_ok=True)  # what became a blob has another name by now


def _copy(exported: Path, place: Path, state_dir: Path) -> None:
    """What we can read becomes a file of the coordinator's owner, who cannot."""
    with (
        durable.disk_errors(f"cannot write {place}"),
        open(exported, "rb") as source,
        durable.as_owner(state_dir),
        open(place, "wb") as target,
    ):
        shutil.copyfileobj(source, target)


def _export(job: ExportJob) -> ExportedModel:
    """Write the file and check it as `run export` does."""
    exported = cli_export.in_a_process(job)
    if job.int8:
        print(cli_export.lost(exported.int8), file=sys.stderr)
    return exported


def _watch(options: argparse.Namespace, started: StartedDeployment) -> None:
    """Wait until every device that is there has answered; the others get the model when they come."""
    request = ShowDeployment(run=started.run, deployment=started.deployment)
    try:
        data = control.ask(options.state_dir, request) if options.no_wait else _wait(options, request)
    except KeyboardInterrupt:
        again = f"coordinator run deploy {started.run} --status"
        raise KeyboardInterrupt(f"the deployment continues; look again with: {again}") from None
    show(options, data, tables.deployments)
    num_failed = sum(line.state in ("refused", "rolled_back") for line in data.devices)
    if num_failed:
        raise RunFailedError(f"{num_failed} of {len(data.devices)} devices did not take the model; see why above")


def _wait(options: argparse.Namespace, request: ShowDeployment) -> Deployment:
    from rich.console import Console  # takes 0.1 s to load
    from rich.live import Live
    from rich.text import Text

    from coordinator.cli import follow

    console = Console(stderr=True)
    live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
    until = time.monotonic() + _PATIENCE_S
    with live or contextlib.nullcontext():
        while True:
            data = follow.ask(options.state_dir, request, console=console)
            open_lines = [line for line in data.devices if line.state in _OPEN]
            if any(not line.waits for line in open_lines):
                until = time.monotonic() + _PATIENCE_S
            elif not open_lines or time.monotonic() >= until:
                return data
            if live is not None:
                live.update(Text(tables.deployments(data)))
            time.sleep(_POLL_S)
