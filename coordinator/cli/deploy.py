"""`coordinator run deploy RUN`: push a run's model to devices, and look at what became of it.

Covers: the files that are needed, one per architecture, made as `run export` makes them; handing them to the running
coordinator; watching. Does not cover: who gets what and when (`deployments`), the devices' side
(`edge_client/client/deploying.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator import control
from coordinator.aggregation.jobs import ExportJob
from coordinator.cli import export as cli_export
from coordinator.cli import tables
from coordinator.cli.devices import parse_labels
from coordinator.cli.options import formatted, show, verb
from coordinator.requests.deployments import new_name
from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.config.shape_text import typed_shape
from edge_client.errors import InputError, RunFailedError
from edge_client.onnx.file import classes_hash
from edge_client.records import from_map

__all__ = ["add_deploy"]

_POLL_S = 0.3
_PATIENCE_S = 3.0  # a device that is not there may be on its way back, or the coordinator was just started
_OPEN = ("pending", "downloading", "testing")

Json = dict[str, Any]


def add_deploy(run: Any) -> None:
    """The verb."""
    deploy = formatted(verb(run, "deploy", _deploy, "push a run's model to devices, which test it before they use it"))
    deploy.add_argument("run", metavar="RUN", help="id, unique prefix or latest")
    who = deploy.add_mutually_exclusive_group()
    who.add_argument("--device", metavar="ID", action="append", default=[], help="repeatable; default: all devices")
    who.add_argument("--label", metavar="K=V", action="append", default=[], help="devices with this label; repeatable")
    deploy.add_argument("--version", metavar="N|best|last", default="last", help="default: %(default)s")
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
        show(options, _look(options.state_dir, {"run": options.run, **_who(options)}), tables.deployments)
        return
    plan = _plan(options)
    file = from_map(RunFile, plan["file"])
    by_architecture = _by_architecture(file, plan["devices"], options.architecture)
    job = _job(options, plan, file)
    with contextlib.ExitStack() as made:
        files = [
            {
                **made.enter_context(_file(options.state_dir, plan["made"], replace(job, architecture=architecture))),
                "devices": who,
            }
            for architecture, who in by_architecture.items()
        ]
        about = {"run": plan["run"], "version": plan["version"]}
        begun = control.request(options.state_dir, "deploy-start", **about, files=files)
    _watch(options, begun)


def _plan(options: argparse.Namespace) -> Json:
    """The model and the devices that are meant; what a person can mistype is found before anything is made."""
    if options.data and not options.int8:
        raise InputError("--data: only with --int8, to tell the accuracy lost")
    typed_shape(options.input)
    asked = {
        "version": options.version,
        "precision": "int8" if options.int8 else "fp32",
        **_who(options),
    }
    return control.request(options.state_dir, "deploy-plan", run=options.run, **asked)


def _who(options: argparse.Namespace) -> Json:
    """The devices that are meant; nothing stands for all."""
    return {"devices": options.device, "labels": parse_labels(options.label, may_drop=False)[0]}


def _job(options: argparse.Namespace, plan: Json, file: RunFile) -> ExportJob:
    """The export of the plan's model, whose architecture and place are yet to be filled in."""
    return ExportJob(
        run=file,
        name=plan["run"],
        version=plan["version"],
        task=plan["task"],
        model=plan["path"],
        sha256=plan["sha256"],
        architecture="",
        input=typed_shape(options.input),
        int8=options.int8,
        data=(options.data or cli_export.test_data(file)) if options.int8 else "",
        out="",
    )


def _by_architecture(file: RunFile, devices: Json, asked: str | None) -> dict[str, list[str]]:
    """Which devices get which slice: what they trained, unless one is named for all."""
    found: dict[str, list[str]] = {}
    for device, trained in devices.items():
        found.setdefault(cli_export.chosen_architecture(file, asked or trained), []).append(device)
    return found


@contextlib.contextmanager
def _file(state_dir: Path, made: Json, job: ExportJob) -> Iterator[Json]:
    """A `deploy_commands.MadeFile` without its devices: one that is here already, or a new one in `STATE/tmp`."""
    known = {"architecture": job.architecture, "precision": "int8" if job.int8 else "fp32"}
    if job.architecture in made:
        yield {**known, **made[job.architecture], "name": None}
        return
    name = new_name()
    place = state_dir / "tmp" / name
    print(f"exporting {job.name} version {job.version} ({job.architecture}, {known['precision']})", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fedfit-deploy-") as folder:
        facts = _export(replace(job, out=str(Path(folder) / "model.onnx")))
        _copy(Path(folder) / "model.onnx", place, state_dir)
    try:
        yield {**known, **facts, "name": name}
    finally:
        with durable.as_owner(state_dir):
            place.unlink(missing_ok=True)  # what became a blob has another name by now


def _copy(made: Path, place: Path, state_dir: Path) -> None:
    """What we can read becomes a file of the coordinator's owner, who cannot."""
    with (
        durable.disk_errors(f"cannot write {place}"),
        open(made, "rb") as source,
        durable.as_owner(state_dir),
        open(place, "wb") as target,
    ):
        shutil.copyfileobj(source, target)


def _export(job: ExportJob) -> Json:
    """Write the file and check it as `run export` does; what the coordinator has to know of it."""
    exported = cli_export.in_a_process(job)
    if job.int8:
        print(cli_export.lost(exported.int8), file=sys.stderr)
    facts = {"input": exported.input, "classes_sha256": classes_hash(exported.classes)}
    return {**facts, "sha256": exported.onnx_sha256, "length": exported.bytes}


def _watch(options: argparse.Namespace, begun: Json) -> None:
    """Until every device that is there has told; the others get it when they come."""
    asked = {"run": begun["run"], "deployment": begun["deployment"]}
    try:
        data = _wait(options, asked) if not options.no_wait else _look(options.state_dir, asked)
    except KeyboardInterrupt:
        print(f"it goes on; look again with: coordinator run deploy {begun['run']} --status", file=sys.stderr)
        raise
    show(options, data, tables.deployments)
    bad = [row["device"] for row in data["devices"] if row["state"] in ("refused", "rolled_back")]
    if bad:
        raise RunFailedError(f"{len(bad)} of {len(data['devices'])} devices did not take the model; see why above")


def _look(state_dir: Path, asked: Json) -> Json:
    return control.request(state_dir, "deploy-show", **asked)


def _wait(options: argparse.Namespace, asked: Json) -> Json:
    from rich.console import Console  # takes 0.1 s to load
    from rich.live import Live
    from rich.text import Text

    from coordinator.cli import follow

    console = Console(stderr=True)
    live = Live(console=console, transient=True, refresh_per_second=4) if console.is_terminal else None
    until = time.monotonic() + _PATIENCE_S
    with live or contextlib.nullcontext():
        while True:
            data = follow.ask(options.state_dir, "deploy-show", console=console, **asked)
            open_rows = [row for row in data["devices"] if row["state"] in _OPEN]
            if any(not row["waits"] for row in open_rows):
                until = time.monotonic() + _PATIENCE_S
            elif not open_rows or time.monotonic() >= until:
                return data
            if live is not None:
                live.update(Text(tables.deployments(data)))
            time.sleep(_POLL_S)
