"""What people ask of a running coordinator, and who answers: devices, runs, deployments, how things stand."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.control_messages import Done, GetStatus, MakeSnapshot, Request, Status, parse_request
from coordinator.requests.deployments import DeployCommands
from coordinator.requests.devices import DeviceCommands
from coordinator.requests.runs import RunCommands

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["Commands"]

A = TypeVar("A")


class Commands:
    """Answers requests by their kind."""

    def __init__(self, service: Service) -> None:
        self._service = service
        runs = RunCommands(service)
        self._answers: Mapping[type[Request[Any]], Callable[[Any], object]] = {
            GetStatus: self._status,
            MakeSnapshot: self._backup,
            **DeviceCommands(service).answers(),
            **runs.answers(),
            **DeployCommands(service, runs.find).answers(),
        }

    def handle(self, asked: Mapping[str, Any]) -> object:
        """Answer a request as it arrived."""
        answer: object = self.answer(parse_request(asked))
        return answer

    def answer(self, request: Request[A]) -> A:
        """Answer a request; raises a `FedfitError` that the person gets to read."""
        answer: Any = self._answers[type(request)](request)
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

    def _backup(self, request: MakeSnapshot) -> Done:
        self._service.take_snapshot()
        return Done()
