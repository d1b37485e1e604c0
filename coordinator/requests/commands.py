"""What people ask of a running coordinator, and who answers: devices, runs, deployments, how things stand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.control import Later
from coordinator.control_messages import (
    Done,
    GetStatus,
    MakeSnapshot,
    Request,
    Status,
    StopCoordinator,
    parse_request,
)
from coordinator.requests.deployments import DeployCommands
from coordinator.requests.devices import DeviceCommands
from coordinator.requests.runs import RunCommands
from coordinator.requests.views import NEED_PICTURE, VIEWS, Views
from coordinator.server.picture import Picture
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import ConflictError

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["Commands"]

A = TypeVar("A")


class Commands:
    """Answers requests by their kind."""

    def __init__(self, service: Service, *, store_path: Path | None = None) -> None:
        """With `store_path`, the database of the service, what people only look at is answered beside the loop."""
        self._service = service
        self._store_path = store_path
        self._store_to_read: SqliteStore | None = None  # of the thread beside the loop
        runs = RunCommands(service)
        self._answers: Mapping[type[Request[Any]], Callable[[Any], object]] = {
            GetStatus: self._status,
            MakeSnapshot: self._backup,
            StopCoordinator: self._stop,
            **DeviceCommands(service).answers(),
            **runs.answers(),
            **DeployCommands(service, runs.find).answers(),
        }

    def handle(self, asked: Mapping[str, Any]) -> object:
        """Answer a request as it arrived; what is only looked at may be answered `Later`."""
        request: Request[Any] = parse_request(asked)
        if isinstance(request, VIEWS) and self._store_path is not None:
            needs_picture = isinstance(request, NEED_PICTURE)
            picture = self._service.pictures.newest(self._service, time.monotonic()) if needs_picture else None
            return Later(lambda: self._views(picture).answer(request))
        answer: object = self.answer(request)
        return answer

    def _views(self, picture: Picture | None) -> Views:
        """In the thread beside the loop."""
        if self._store_to_read is None:
            self._store_to_read = SqliteStore(self._store_path, read_only=True)
        return Views(self._store_to_read, picture, self._service.blobs)

    def answer(self, request: Request[A]) -> A:
        """Answer a request; raises a `FedfitError` that the person gets to read."""
        answer: Any
        if isinstance(request, VIEWS):
            picture = self._service.pictures.of_now(self._service, time.monotonic())
            answer = Views(self._service.store, picture, self._service.blobs).answer(request)
        else:
            answer = self._answers[type(request)](request)
        return answer  # type: ignore[no-any-return]  # the table above pairs them

    def _status(self, request: GetStatus) -> Status:
        service = self._service
        machine = service.conductor.machine
        return Status(
            federation=service.federation,
            epoch=service.epoch,
            brokers=service.brokers,
            connected=service.connected,
            online=tuple(sorted(service.roster.online(time.monotonic()))),
            enrolled=service.roster.num_enrolled,
            paused=service.paused,
            run=machine.run if machine else None,
            round=machine.number if machine else None,
            phase=machine.phase if machine else None,
        )

    def _stop(self, request: StopCoordinator) -> Status:
        if self._service.is_supervised:
            raise ConflictError(
                "this coordinator runs as a service, which would start it again; "
                "type: sudo systemctl stop fedfit-coordinator"
            )
        self._service.request_stop()
        return self._status(GetStatus())

    def _backup(self, request: MakeSnapshot) -> Done:
        self._service.take_snapshot()
        return Done()
