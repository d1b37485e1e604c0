"""`coordinator start` as it is mistyped: refused before anything is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator import launch
from edge_client.errors import InputError


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ({"port": -1}, "--port: expected 0 to 65535, got -1"),
        ({"port": 70_000}, "--port: expected 0 to 65535, got 70000"),
        ({"listen": ""}, r"--listen '': expected an address of this machine \(.*127\.0\.0\.1"),
        ({"listen": "192.0.2.7"}, "--listen '192.0.2.7': expected an address of this machine"),
        ({"advertise": ("192.168.1.300",)}, "--advertise: expected a host name or an IP address .*'192.168.1.300'"),
        ({"broker_ca": Path("ca.pem")}, "--broker-ca .*--broker"),
        ({"broker": "http://h"}, "expected a broker such as .*'http://h'"),
        ({"broker": "mqtt://broker.example"}, "is not encrypted"),
        ({"broker": "mqtt://127.0.0.1", "port": 5, "tls": True}, "--port, --tls: of fedfit's own broker only"),
    ],
)
def test_what_cannot_be_served_leaves_nothing_behind(tmp_path: Path, typed: dict[str, Any], message: str) -> None:
    """Each is one line that names the option; 192.0.2.7 is an address of no machine (RFC 5737)."""
    with pytest.raises(InputError, match=message) as caught:
        launch.start(launch.StartOptions(state_dir=tmp_path / "state", **typed))
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "state").exists()
