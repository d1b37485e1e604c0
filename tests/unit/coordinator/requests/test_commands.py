"""Requests as they arrive: their names and arguments."""

from __future__ import annotations

from typing import Any

import pytest
from service_site import Site

from coordinator.requests.commands import Commands
from edge_client.errors import InputError

WRONG: list[dict[str, Any]] = [
    {"request": "device-add", "names": "abc"},
    {"request": "device-add", "names": [1]},
    {"request": "device-add", "names": None},
    {"request": "device-add", "names": ["x"], "labels": {"k": 1}},
    {"request": "device-add", "names": ["x"], "colour": "red"},
    {"request": "device-remove", "names": "a"},
    {"request": "device-label", "name": "a", "put": ["k=v"]},
    {"request": "run-show", "run": 7},
    {"request": "run-show", "run": "latest", "newest": "all"},
    {"request": "run-stop", "run": "latest", "now": "yes"},
    {"request": "run-stop", "run": {"id": 1}},
    {"request": "run-start", "file": [1]},
    {"request": "run-start", "file": {"name": 1}},
    {"request": "status", "verbose": True},
    {"request": None},
]


@pytest.mark.parametrize("asked", WRONG, ids=range(len(WRONG)))
def test_a_request_with_wrong_or_unknown_arguments_is_refused(site: Site, asked: dict[str, Any]) -> None:
    """Of a newer command, or of somebody who writes his own; the coordinator goes on."""
    with site.serving() as service, pytest.raises(InputError, match=r"request|run"):
        Commands(service).handle(dict(asked))
