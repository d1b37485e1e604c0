"""What a run file that was sent through the page may not name."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.dashboard.actions import refuse_files_of_server
from edge_client.errors import InputError


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"model": {"name": "mlp", "init": "file:/etc/shadow"}}, "model.init"),
        ({"model": {"name": "transformers:/etc/shadow"}}, "model.name"),
        ({"models": {"tiny": {"name": "transformers:x.json"}}}, "models.tiny.name"),
        ({"slices": ["full", "transformers:x.json"]}, "slices"),
        ({"evaluate": {"on": "npz:/srv/test.npz"}}, "evaluate.on"),
        ({"task": "defects"}, "task"),
    ],
)
def test_a_file_of_the_server_is_refused(table: dict[str, Any], key: str) -> None:
    """Whoever operates the page is not thereby allowed to have the server read its files."""
    with pytest.raises(InputError, match=rf"^(a )?{key}.*start (this|its) run in a terminal"):
        refuse_files_of_server(table)


def test_other_run_files_pass() -> None:
    """Weights of an earlier run and built-in models name no file."""
    refuse_files_of_server({"model": {"name": "mlp", "init": "run:digits-1@best"}, "evaluate": {"on": "devices"}})
