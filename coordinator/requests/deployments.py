"""What people ask of deployments, and the answers: which devices and which model, record it, how it stands.

The command (`coordinator.cli.deploy`) exports the file, with torch, and puts it into `STATE/tmp`; here it is checked
and becomes a blob before any row names it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.control_messages import (
    Deployment,
    DeploymentPlan,
    ExportedFile,
    KnownFile,
    PlanDeployment,
    Request,
    ShowDeployment,
    StartDeployment,
    StartedDeployment,
)
from coordinator.requests.runs import judged, version_of
from coordinator.run_check import check_has_model
from coordinator.store.rows import DeploymentRow, RunRow
from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.errors import ConflictError, InputError, MachineError, NoSuchNameError
from edge_client.methods.slices import architecture
from edge_client.records import from_map

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["DeployCommands", "new_name"]


def new_name() -> str:
    """A name for a file in `STATE/tmp`."""
    return f"deploy-{secrets.token_hex(8)}.onnx"


class DeployCommands:
    """Requests about deployments to a running coordinator."""

    def __init__(self, service: Service, find_run: Callable[[str], RunRow]) -> None:
        self._service = service
        self._find = find_run

    def answers(self) -> Mapping[type[Request[Any]], Callable[[Any], object]]:
        """What answers each request."""
        return {PlanDeployment: self._plan, StartDeployment: self.start, ShowDeployment: self._show}

    def _plan(self, request: PlanDeployment) -> DeploymentPlan:
        """The model and the devices that are meant, what each of them trained, and which files are here already."""
        service, row = self._service, self._find(request.run)
        version = version_of(row, request.version)
        file = from_map(RunFile, row.file)
        check_has_model(file, row.id, "mine.onnx")
        last = service.store.models.last(row.id)
        if last is None or last.version == 0:
            raise InputError(f"run {row.id!r} has no trained model yet; see: coordinator run show {row.id}")
        model = service.conductor.model_named(f"{row.id}@{version}", option="--version")
        if model.version == 0:
            raise InputError(f"--version: 0 is what run {row.id!r} began with, nothing of it is trained; name another")
        trained = service.store.leases.trained_slices(row.id)
        names = self._chosen(request.devices, request.labels or {})
        return DeploymentPlan(
            run=row.id,
            file=file,
            task=str(service.blobs.path(row.task_sha256)) if row.task_sha256 else None,
            version=model.version,
            sha256=model.sha256,
            path=str(service.blobs.path(model.sha256)),
            **judged(row, model),
            devices={name: architecture(trained[name]) if name in trained else None for name in names},
            made=self._known_files(row.id, model.version, request.precision),
        )

    def _chosen(self, devices: Sequence[str], labels: Mapping[str, str]) -> list[str]:
        """The devices that are meant: these, or all, that have the labels; raises `NoSuchNameError` if none has."""
        roster = self._service.roster
        enrolled = roster.names()
        for name in devices:
            if name not in enrolled:
                raise NoSuchNameError.of("device", name, enrolled)
        if not enrolled:
            raise NoSuchNameError("there is no device yet; add one with: coordinator device add NAME")
        named = list(dict.fromkeys(devices)) or enrolled
        labelled = [name for name in named if labels.items() <= roster.labels_of(name).items()]
        if not labelled:
            pairs = " ".join(f"{key}={value}" for key, value in sorted(labels.items()))
            raise NoSuchNameError(f"there is no device with {pairs}; see: coordinator device list")
        return labelled

    def _known_files(self, run: str, version: int, precision: str) -> dict[str, KnownFile]:
        """Files of earlier deployments by architecture: the same model is not exported twice."""
        return {
            row.architecture: KnownFile(
                sha256=row.sha256, length=row.length, input=tuple(row.input), classes_sha256=row.classes_sha256
            )
            for row in self._service.store.deployments.all(run)
            if (row.version, row.precision) == (version, precision) and self._service.blobs.verified(row.sha256)
        }

    def start(self, request: StartDeployment) -> StartedDeployment:
        """Keep the files, record the deployment, tell the devices; all of it, or an error and nothing."""
        service, row = self._service, self._find(request.run)
        self._chosen([name for file in request.files for name in file.devices], {})  # one may be removed by now
        for file in request.files:
            self._keep(file)
        name, issue, now = secrets.token_hex(8), service.store.deployments.next_issue(), int(time.time())
        rows = [
            DeploymentRow(
                id=name,
                issue=issue,
                device=device,
                run=row.id,
                version=request.version,
                architecture=file.architecture,
                precision=file.precision,
                sha256=file.sha256,
                length=file.length,
                input=file.input,
                classes_sha256=file.classes_sha256,
                created_s=now,
            )
            for file in request.files
            for device in file.devices
        ]
        service.deployments.add(rows, time.monotonic())
        return StartedDeployment(run=row.id, deployment=name)

    def _keep(self, file: ExportedFile) -> None:
        """Blob before row."""
        blobs = self._service.blobs
        if file.name is None or blobs.verified(file.sha256):
            if not blobs.verified(file.sha256):
                raise ConflictError("the file of an earlier deployment is gone meanwhile; type the command again")
            return
        path = blobs.temporary_path(file.name)
        if not path.is_file():
            raise MachineError(f"{path} is gone: the coordinator was started anew meanwhile; type the command again")
        with durable.disk_errors(f"cannot read {path}"):
            content = (path.stat().st_size, durable.sha256_file(path))
        if content != (file.length, file.sha256):
            raise MachineError(f"{path} is not the file that was exported; type the command again")
        blobs.adopt(path, file.sha256, point="deployment")

    def _show(self, request: ShowDeployment) -> Deployment:
        """A run's newest deployment on each device, or one deployment on all its devices; or on those only."""
        service, row = self._service, self._find(request.run)
        rows = [entry for entry in service.store.deployments.all(row.id) if request.deployment in ("", entry.id)]
        if request.devices or request.labels:
            names = set(self._chosen(request.devices, request.labels or {}))
            rows = [entry for entry in rows if entry.device in names]
        newest = {entry.device: entry for entry in rows}
        online = service.roster.online(time.monotonic())
        lines = (service.deployments.describe(newest[device], online) for device in sorted(newest))
        return Deployment(run=row.id, devices=tuple(lines))
