"""`coordinator start` as it is mistyped: refused before anything is made."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.broker.certificates import ensure_pki, read_foreign_ca
from coordinator.requests.commands import Commands
from coordinator.server import launch
from edge_client.errors import InputError, MachineError


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
        launch.start(
            launch.StartOptions(state_dir=tmp_path / "state", **typed), lambda service: Commands(service).handle
        )
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "state").exists()


def _authority(path: Path, *, ends: datetime.datetime) -> Path:
    """A self-signed certificate that is valid until `ends`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "old authority")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(datetime.datetime(2000, 1, 1)).not_valid_after(ends)
    path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return path


def test_an_authority_that_has_ended_is_refused_where_the_clock_is_right(tmp_path: Path) -> None:
    """Devices look at no dates, so that one with a dead clock connects: the server must say it, before anything."""
    old = _authority(tmp_path / "old.pem", ends=datetime.datetime(2020, 1, 2))
    options = launch.StartOptions(state_dir=tmp_path / "state", broker="mqtts://broker.example", broker_ca=old)
    with pytest.raises(InputError, match=r"old\.pem: the certificate has expired on 2020-01-02"):
        launch.start(options, lambda service: Commands(service).handle)
    assert not (tmp_path / "state").exists()


def test_a_file_that_is_no_authority_is_named(tmp_path: Path) -> None:
    """Missing, and not PEM; one of fedfit's own is good for others too."""
    with pytest.raises(MachineError, match=r"none\.pem: No such file"):
        read_foreign_ca(tmp_path / "none.pem")
    (tmp_path / "text.pem").write_text("no certificate")
    with pytest.raises(InputError, match=r"text\.pem: expected certificates as PEM text"):
        read_foreign_ca(tmp_path / "text.pem")
    own = ensure_pki(tmp_path / "pki", ["localhost"])
    assert read_foreign_ca(tmp_path / "pki" / "ca.pem") == own.ca_pem
