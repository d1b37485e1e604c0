"""What people ask of deployments, and the answers: which devices and which model, record it, how it stands.

The file is made by the command (`cli_deploy`), which has torch for it and puts it into `STATE/tmp`; here it is checked
and becomes a blob before any row names it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from coordinator.run_check import check_has_model
from coordinator.store.rows import DeploymentRow, RunRow
from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.errors import ConflictError, InputError, MachineError, NoSuchNameError, PayloadError
from edge_client.methods.slices import architecture
from edge_client.records import Between, Count, Hash, Matches, Positive, SliceText, from_map
from edge_client.wire.messages import MAX_DEPLOYED_BYTES

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["DeployCommands", "MadeFile", "new_name"]

Json = dict[str, Any]

_NAME = r"deploy-[0-9a-f]{16}\.onnx"


def new_name() -> str:
    """A name for a file in `STATE/tmp`."""
    return f"deploy-{secrets.token_hex(8)}.onnx"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFile:
    """An ONNX file, made a moment ago or before, for the devices that are to have it."""

    name: Annotated[str, Matches(_NAME)] | None  # in `STATE/tmp`; None: the blob is here already
    architecture: SliceText
    precision: Annotated[str, Matches(r"fp32|int8")]
    sha256: Hash
    length: Annotated[int, Between(1, MAX_DEPLOYED_BYTES)]
    input: tuple[Positive, ...]
    classes_sha256: Hash
    devices: tuple[str, ...]


class DeployCommands:
    """Requests to a running coordinator; each takes and returns plain data."""

    def __init__(self, service: Service, find_run: Callable[[str], RunRow]) -> None:
        self._service = service
        self._find = find_run

    def known(self) -> dict[str, Callable[..., Json]]:
        """The requests by name."""
        return {"deploy-plan": self._plan, "deploy-start": self._start, "deploy-show": self._show}

    def _plan(
        self,
        run: str,
        precision: str,
        version: str = "last",
        devices: tuple[str, ...] = (),
        labels: dict[str, str] | None = None,
    ) -> Json:
        """The model and the devices that are meant, what each of them trained, and which files are here already."""
        service, row = self._service, self._find(run)
        if version not in ("best", "last") and not (version.isascii() and version.isdigit()):
            raise InputError(f"--version: expected a number, best or last, got {version!r}")
        check_has_model(from_map(RunFile, row.file), row.id, "mine.onnx")
        last = service.store.models.last(row.id)
        if last is None or last.version == 0:
            raise InputError(f"run {row.id!r} has no trained model yet; see: coordinator run show {row.id}")
        model = service.conductor.model_named(f"{row.id}@{version}", option="--version")
        if model.version == 0:
            raise InputError(f"--version: 0 is what run {row.id!r} began with, nothing of it is trained; name another")
        trained = service.store.leases.trained_slices(row.id)
        chosen = self._chosen(devices, labels or {})
        return {
            "run": row.id,
            "file": dict(row.file),
            "task": str(service.blobs.path(row.task_sha256)) if row.task_sha256 else None,
            "version": model.version,
            "sha256": model.sha256,
            "path": str(service.blobs.path(model.sha256)),
            "devices": {name: architecture(trained[name]) if name in trained else None for name in chosen},
            "made": self._made(row.id, model.version, precision),
        }

    def _chosen(self, devices: Sequence[str], labels: Mapping[str, str]) -> list[str]:
        roster = self._service.roster
        known = roster.names()
        for name in devices:
            if name not in known:
                raise NoSuchNameError.of("device", name, known)
        if not known:
            raise NoSuchNameError("there is no device yet; add one with: coordinator device add NAME")
        wanted = list(dict.fromkeys(devices)) or known
        found = [name for name in wanted if labels.items() <= roster.labels_of(name).items()]
        if not found:
            told = " ".join(f"{key}={value}" for key, value in sorted(labels.items()))
            raise NoSuchNameError(f"there is no device with {told}; see: coordinator device list")
        return found

    def _made(self, run: str, version: int, precision: str) -> Json:
        """Files of earlier deployments by architecture: the same model is not exported twice."""
        blobs, found = self._service.blobs, {}
        for row in self._service.store.deployments.all(run):
            if (row.version, row.precision) == (version, precision) and blobs.verified(row.sha256):
                about = {"sha256": row.sha256, "length": row.length, "input": list(row.input)}
                found[row.architecture] = {**about, "classes_sha256": row.classes_sha256}
        return found

    def _start(self, run: str, version: Count, files: tuple[Json, ...]) -> Json:
        """Keep the files, record the deployment, tell the devices; all of it, or an error and nothing."""
        service, row = self._service, self._find(run)
        try:
            made = [from_map(MadeFile, file, where="file") for file in files]
        except PayloadError as error:
            raise InputError(error.detail) from None
        self._chosen([name for file in made for name in file.devices], {})  # one may be removed by now
        for file in made:
            self._keep(file)
        name, issue, now = secrets.token_hex(8), service.store.deployments.next_issue(), int(time.time())
        rows = [
            DeploymentRow(
                id=name,
                issue=issue,
                device=device,
                run=row.id,
                version=version,
                architecture=file.architecture,
                precision=file.precision,
                sha256=file.sha256,
                length=file.length,
                input=file.input,
                classes_sha256=file.classes_sha256,
                created_s=now,
            )
            for file in made
            for device in file.devices
        ]
        service.deployments.add(rows, time.monotonic())
        return {"run": row.id, "deployment": name}

    def _keep(self, file: MadeFile) -> None:
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
            found = (path.stat().st_size, durable.sha256_file(path))
        if found != (file.length, file.sha256):
            raise MachineError(f"{path} is not the file that was exported; type the command again")
        blobs.adopt(path, file.sha256, point="deployment")

    def _show(
        self, run: str, deployment: str = "", devices: tuple[str, ...] = (), labels: dict[str, str] | None = None
    ) -> Json:
        """A run's newest deployment on each device, or one deployment on all its devices; or on those only."""
        service, row = self._service, self._find(run)
        rows = [found for found in service.store.deployments.all(row.id) if deployment in ("", found.id)]
        if devices or labels:
            chosen = set(self._chosen(devices, labels or {}))
            rows = [found for found in rows if found.device in chosen]
        newest = {found.device: found for found in rows}
        online = service.roster.online(time.monotonic())
        shown = [service.deployments.describe(newest[device], online) for device in sorted(newest)]
        return {"run": row.id, "devices": shown}
