"""Requests to a running coordinator and its answers: one record for each, and their JSON.

A request travels as `{"request": NAME, ...}` with the fields that differ from their defaults, an answer as the fields
of its record. Covers: the records and the codec. Does not cover: the socket (`coordinator.control`), answering
(`coordinator.requests`), the parts of a run's details (`coordinator.run_details`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from coordinator.run_details import RunDetails, RunLine
from coordinator.timeline import RunTimeline
from edge_client.client.identity import Bundle
from edge_client.config.run_file import RunFile
from edge_client.errors import ConflictError, InputError, PayloadError
from edge_client.records import Between, Count, DeviceProfile, Hash, Matches, Positive, SliceText, from_map, to_map
from edge_client.wire.messages import MAX_DEPLOYED_BYTES

__all__ = [
    "AddDevices",
    "AddedDevices",
    "DeployedModel",
    "Deployment",
    "DeploymentLine",
    "DeploymentPlan",
    "DeviceDetails",
    "DeviceFailure",
    "DeviceLabels",
    "DeviceLine",
    "DeviceList",
    "Done",
    "ExportedFile",
    "FindModel",
    "GetStatus",
    "KnownFile",
    "LabelDevice",
    "ListDevices",
    "ListRuns",
    "MakeSnapshot",
    "PlanDeployment",
    "RemoveDevices",
    "RemovedDevices",
    "Request",
    "RunList",
    "ShowDeployment",
    "ShowDevice",
    "ShowRun",
    "ShowTimeline",
    "StartDeployment",
    "StartRun",
    "StartedDeployment",
    "StartedRun",
    "Status",
    "StopCoordinator",
    "StopRun",
    "StoppedRun",
    "StoredModel",
    "parse_answer",
    "parse_request",
    "request_map",
]

A = TypeVar("A")

Precision = Annotated[str, Matches(r"fp32|int8")]


class Request(Generic[A]):
    """Something that people ask; `A` is the record of the answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How the coordinator stands."""

    federation: str
    epoch: int
    brokers: tuple[str, ...]
    connected: bool
    online: tuple[str, ...]
    enrolled: int
    paused: str
    run: str | None
    round: int | None
    phase: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStatus(Request[Status]):
    """How does the coordinator stand?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCoordinator(Request[Status]):
    """Stop the coordinator; answered with how it stands, refused where a service manager would start it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """It is done, and there is nothing to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeSnapshot(Request[Done]):
    """Write the snapshot that `coordinator backup` packs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedDevices:
    """What new devices join with."""

    bundles: tuple[Bundle, ...]
    external: bool  # somebody else keeps the broker's accounts


@dataclass(frozen=True, slots=True, kw_only=True)
class AddDevices(Request[AddedDevices]):
    """Enrol devices, or give enrolled ones fresh secrets."""

    names: tuple[str, ...]
    labels: Mapping[str, str] | None = None
    replace: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLine:
    """A device in a line."""

    id: str
    online: bool
    seen_s_ago: float | None  # None: not since this coordinator was started
    client: str | None
    client_is: str | None  # its version against the coordinator's: same, older, newer or unknown
    plan: str
    budget_bytes: int | None
    labels: Mapping[str, str]
    state: str | None
    phase: str
    step: int
    total: int
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceList:
    """Enrolled devices, sorted by name."""

    devices: tuple[DeviceLine, ...]
    num_matching: int = 0  # on all pages
    next: str = ""  # `after` of the next page; empty: there is none
    counts: Mapping[str, int] = field(default_factory=dict)  # state -> matching devices


@dataclass(frozen=True, slots=True, kw_only=True)
class ListDevices(Request[DeviceList]):
    """Which devices are there: all, or those in a state, with labels, and of these a page?"""

    limit: Count = 0  # 0: all
    after: str = ""  # only names behind this one
    state: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployedModel:
    """A model that a device uses."""

    deployment: str
    run: str
    version: int
    architecture: str
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentLine:
    """A model for one device, and what became of it there."""

    device: str
    state: str
    waits: str  # why a pending one does not get on
    code: str
    detail: str
    deployment: str
    run: str
    version: int
    architecture: str
    precision: str
    sha256: str
    bytes: int
    created_s: int
    in_use: DeployedModel | None  # what the device uses instead


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFailure:
    """An assignment of a device that brought nothing."""

    run: str
    round: int
    state: str
    code: str
    detail: str
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDetails(DeviceLine):
    """All that is known of a device."""

    labels_given: Mapping[str, str]  # by the coordinator
    labels_own: Mapping[str, str]  # of the device's own file
    profile: DeviceProfile | None
    free_bytes: int | None
    tasks: Mapping[str, str]  # name -> hash of the file
    brokers: tuple[str, ...]  # that new bundles name
    deployed: DeploymentLine | None
    failures: tuple[DeviceFailure, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowDevice(Request[DeviceDetails]):
    """What is known of a device?"""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLabels:
    """A device's labels after a change."""

    id: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelDevice(Request[DeviceLabels]):
    """Change the labels that the coordinator gives to a device."""

    name: str
    put: Mapping[str, str]
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedDevices:
    """Devices that are forgotten."""

    removed: tuple[str, ...]
    external: bool  # somebody else keeps the broker's accounts


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveDevices(Request[RemovedDevices]):
    """Forget devices."""

    names: tuple[str, ...]


# runs


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRun:
    """A run that was started or queued."""

    run: str
    waits_for: str | None  # the run that trains


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRun(Request[StartedRun]):
    """Start a run, or queue it behind the one that trains."""

    file: RunFile
    task_source: str = ""  # the text of the task's file
    dry: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunList:
    """All runs but dry ones."""

    runs: tuple[RunLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRuns(Request[RunList]):
    """Which runs are there?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowRun(Request[RunDetails]):
    """What came of a run: its `newest` results, and with `report` also what only a page about it needs."""

    run: str
    newest: int = 200
    report: bool = False
    after: int | None = None  # instead: what is new after this version, in short


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowTimeline(Request[RunTimeline]):
    """When did what happen in the `newest` rounds of a run, or in the given one?"""

    run: str
    newest: Annotated[int, Between(1, 1000)] = 3
    round: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedRun:
    """A run that was asked to stop, as it stood then."""

    run: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRun(Request[StoppedRun]):
    """End a run after its round, or now."""

    run: str
    now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """Where a kept model lies, and all that is needed to build it, for a command on this machine."""

    run: str
    file: RunFile
    task: str | None  # path of the task's source
    version: int
    sha256: str
    path: str
    metric: str = ""  # of the score; empty if nothing judged this version
    score: float | None = None
    is_best: bool = False  # of all versions that were judged


@dataclass(frozen=True, slots=True, kw_only=True)
class FindModel(Request[StoredModel]):
    """Where does a run's model lie? Without a version: the best one, or the last where none was judged."""

    run: str
    version: str = ""


# deployments


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """An exported file that the coordinator has."""

    sha256: str
    length: int
    input: tuple[int, ...]
    classes_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPlan(StoredModel):
    """The model and the devices that are meant."""

    devices: Mapping[str, str | None]  # -> the architecture that each trained
    made: Mapping[str, KnownFile]  # by architecture: files of earlier deployments


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDeployment(Request[DeploymentPlan]):
    """Which model, which devices, and which files are there already?"""

    run: str
    precision: str
    version: str = ""  # the best one, or the last where none was judged
    devices: tuple[str, ...] = ()
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """An ONNX file, made a moment ago or before, for the devices that are to have it."""

    name: Annotated[str, Matches(r"deploy-[0-9a-f]{16}\.onnx")] | None  # in `STATE/tmp`; None: the blob is there
    architecture: SliceText
    precision: Precision
    sha256: Hash
    length: Annotated[int, Between(1, MAX_DEPLOYED_BYTES)]
    input: tuple[Positive, ...]
    classes_sha256: Hash
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedDeployment:
    """A deployment that is recorded."""

    run: str
    deployment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartDeployment(Request[StartedDeployment]):
    """Give a run's model to devices."""

    run: str
    version: Count
    files: tuple[ExportedFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What became of a run's deployments, by device."""

    run: str
    devices: tuple[DeploymentLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowDeployment(Request[Deployment]):
    """How do a run's deployments stand: the newest on each device, or one of them, on all its devices or on these?"""

    run: str
    deployment: str = ""
    devices: tuple[str, ...] = ()
    labels: Mapping[str, str] | None = field(default=None)


# the codec

_KINDS: Mapping[str, tuple[type[Request[Any]], type[Any]]] = {
    "status": (GetStatus, Status),
    "backup": (MakeSnapshot, Done),
    "device-add": (AddDevices, AddedDevices),
    "device-list": (ListDevices, DeviceList),
    "device-show": (ShowDevice, DeviceDetails),
    "device-label": (LabelDevice, DeviceLabels),
    "device-remove": (RemoveDevices, RemovedDevices),
    "run-start": (StartRun, StartedRun),
    "run-list": (ListRuns, RunList),
    "run-show": (ShowRun, RunDetails),
    "run-timeline": (ShowTimeline, RunTimeline),
    "run-stop": (StopRun, StoppedRun),
    "run-model": (FindModel, StoredModel),
    "deploy-plan": (PlanDeployment, DeploymentPlan),
    "deploy-start": (StartDeployment, StartedDeployment),
    "deploy-show": (ShowDeployment, Deployment),
    "stop": (StopCoordinator, Status),
}
_NAMES = {request: name for name, (request, _) in _KINDS.items()}


def request_map(request: Request[Any]) -> dict[str, Any]:
    """A request as plain data, without the fields that have their defaults, which an older coordinator may not know."""
    named: Any = request
    fields = ((f, getattr(named, f.name)) for f in dataclasses.fields(named))
    changed = {f.name: to_map(value) for f, value in fields if value != _default(f)}
    return {"request": _NAMES[type(request)], **changed}


def _default(request_field: dataclasses.Field[Any]) -> object:
    factory = request_field.default_factory
    return request_field.default if factory is dataclasses.MISSING else factory()


def parse_request(data: Mapping[str, Any]) -> Request[Any]:
    """A request as it arrived; raises `InputError` for one that nobody can answer."""
    fields = dict(data)
    name = str(fields.pop("request", ""))
    if name not in _KINDS:
        raise InputError(f"unknown request {name!r}; known: {', '.join(_KINDS)}")
    try:
        return from_map(_KINDS[name][0], fields, where=name)
    except PayloadError as error:  # of a newer command, perhaps
        raise InputError(f"request {name!r}: {error.detail.removeprefix(name).lstrip('.: ')}") from None


def parse_answer(request: Request[A], data: object) -> A:
    """The answer to a request; raises `ConflictError` for one of another version of fedfit."""
    name = _NAMES[type(request)]
    try:
        answer: A = from_map(_KINDS[name][1], data, where=name)
    except PayloadError as error:
        raise ConflictError(
            f"the coordinator's answer is of another version of fedfit ({error.detail}); start the coordinator again"
        ) from None
    return answer
