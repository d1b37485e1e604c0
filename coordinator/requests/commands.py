"""What people ask of a running coordinator, and the answers: devices, runs, how things stand."""

from __future__ import annotations

import inspect
import time
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coordinator.requests.deployments import DeployCommands
from coordinator.requests.devices import DeviceCommands
from coordinator.requests.runs import RunCommands
from edge_client.errors import InputError, PayloadError
from edge_client.records import check_value

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["Commands"]

Json = dict[str, Any]


class Commands:
    """Requests by name; each takes and returns plain data."""

    def __init__(self, service: Service) -> None:
        self._service = service
        runs = RunCommands(service)
        self._known: dict[str, Callable[..., Json]] = {
            "status": self._status,
            "backup": self._backup,
            **DeviceCommands(service).known(),
            **runs.known(),
            **DeployCommands(service, runs.find).known(),
        }

    def handle(self, asked: Json) -> Json:
        """Answer one request."""
        name = str(asked.pop("request", ""))
        if name not in self._known:
            raise InputError(f"unknown request {name!r}; known: {', '.join(self._known)}")
        do = self._known[name]
        try:
            inspect.signature(do).bind(**asked)
            types = typing.get_type_hints(do)
            values = {key: check_value(types[key], value, key) for key, value in asked.items()}
        except TypeError as error:  # of a newer command, perhaps
            raise InputError(f"request {name!r}: {error}") from None
        except PayloadError as error:
            raise InputError(f"request {name!r}: {error.detail}") from None
        return do(**values)

    def _status(self) -> Json:
        service = self._service
        machine = service.conductor.machine
        return {
            "federation": service.federation,
            "epoch": service.epoch,
            "brokers": list(service.brokers),
            "connected": service.connected,
            "online": sorted(service.roster.online(time.monotonic())),
            "enrolled": service.roster.num_enrolled,
            "paused": service.paused,
            "run": machine.run if machine else None,
            "round": machine.number if machine else None,
            "phase": machine.phase if machine else None,
        }

    def _backup(self) -> Json:
        """The snapshot that `coordinator backup` packs."""
        self._service.take_snapshot()
        return {}
