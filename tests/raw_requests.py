"""Requests to a running coordinator as they travel: what another program would write and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coordinator import control
from coordinator.requests.commands import Commands
from coordinator.run_details import plain
from coordinator.server.service import Service

__all__ = ["answer", "request"]


def request(state_dir: Path, what: str, **fields: Any) -> dict[str, Any]:
    """Ask, and return the answer as plain data."""
    return control.exchange(state_dir, {"request": what, **fields})


def answer(service: Service, what: str, **fields: Any) -> dict[str, Any]:
    """The same of a service in this process, without a socket."""
    result: dict[str, Any] = json.loads(
        json.dumps(Commands(service).handle({"request": what, **fields}), default=plain)
    )
    return result
