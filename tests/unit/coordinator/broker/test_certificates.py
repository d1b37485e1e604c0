"""The private CA: which brokers a device accepts and refuses, and which files are created, kept and replaced."""

from __future__ import annotations

import datetime
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509

from coordinator.broker.certificates import Pki, ensure_pki
from edge_client.errors import InputError, MachineError
from edge_client.transport.mqtt import tls_context

NAMES = ["broker.example", "localhost", "10.1.2.3", "fd00::1"]


def handshake(server: Pki, context: ssl.SSLContext, host: str) -> str | None:
    """Return the TLS version of a handshake over a socket pair, or raise the client's error."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(server.server_certificate, server.server_key)
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            server_context.wrap_socket(far, server_side=True).close()
        except OSError:
            far.close()  # the client refused, and raises the reason

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with context.wrap_socket(near, server_hostname=host) as sock:
            return sock.version()
    finally:
        near.close()
        thread.join()


@pytest.mark.parametrize("host", NAMES)
def test_the_server_is_accepted_under_each_of_its_names(tmp_path: Path, host: str) -> None:
    """They are host names and addresses of IPv4 and IPv6."""
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), host) in ("TLSv1.2", "TLSv1.3")


def test_another_ca_is_refused(tmp_path: Path) -> None:
    """Its certificate has the same names, but another key."""
    ours, theirs = ensure_pki(tmp_path / "a", NAMES), ensure_pki(tmp_path / "b", NAMES)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(theirs, tls_context(ours.ca_pem), "broker.example")


def test_the_cas_of_the_machine_are_not_trusted(tmp_path: Path) -> None:
    """The context holds exactly one certificate."""
    context = tls_context(ensure_pki(tmp_path, NAMES).ca_pem)
    assert [dict(pair[0] for pair in ca["subject"])["commonName"] for ca in context.get_ca_certs()] == ["fedfit CA"]


@pytest.mark.parametrize("host", ["other.example", "10.1.2.4", "sub.broker.example"])
def test_a_wrong_host_name_is_refused(tmp_path: Path, host: str) -> None:
    """The certificate is valid, but not for this host."""
    pki = ensure_pki(tmp_path, NAMES)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(pki, tls_context(pki.ca_pem), host)


def test_a_clock_of_1970_connects(tmp_path: Path) -> None:
    """Certificates are valid from the first second of 1970, and the context does not check dates at all."""
    pki = ensure_pki(tmp_path, NAMES)
    for pem in (pki.ca_pem.encode(), pki.server_certificate.read_bytes()):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc == datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
        assert certificate.not_valid_after_utc == datetime.datetime(2100, 1, 1, tzinfo=datetime.timezone.utc)
    assert tls_context(pki.ca_pem).verify_flags & 0x200000  # X509_V_FLAG_NO_CHECK_TIME


def test_dates_are_checked_for_public_cas() -> None:
    """Without a private CA, the context checks dates, certificates and host names."""
    context = tls_context(None)
    assert not context.verify_flags & 0x200000
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_a_restart_keeps_all_files(tmp_path: Path) -> None:
    """Neither the order of the names nor a repeated name matters."""
    ensure_pki(tmp_path, [*NAMES, "localhost"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ensure_pki(tmp_path, NAMES[::-1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_new_names_get_a_new_certificate_of_the_same_ca(tmp_path: Path) -> None:
    """Devices that joined before still trust it; the old names are no longer valid."""
    old = ensure_pki(tmp_path, NAMES)
    new = ensure_pki(tmp_path, ["moved.example"])
    assert new.ca_pem == old.ca_pem
    assert handshake(new, tls_context(old.ca_pem), "moved.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(new, tls_context(old.ca_pem), "broker.example")


def test_an_interrupted_start_is_repaired(tmp_path: Path) -> None:
    """It was killed before the certificate of a new key was written: once the broker's, once the CA's."""
    ensure_pki(tmp_path, NAMES)
    (tmp_path / "server.pem").unlink()
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), "localhost")
    for name in ("ca.pem", "server.pem", "server.key"):
        (tmp_path / name).unlink()
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), "localhost")


def test_a_certificate_of_an_earlier_ca_is_replaced(tmp_path: Path) -> None:
    """The CA's certificate was removed; the new CA has the same name, but another key."""
    ensure_pki(tmp_path, NAMES)
    (tmp_path / "ca.pem").unlink()
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), "localhost")


def test_keys_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    """The folder has mode 0700, its files 0600."""
    ensure_pki(tmp_path / "pki", NAMES)
    assert stat.S_IMODE((tmp_path / "pki").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "pki").iterdir()}
    assert modes == dict.fromkeys(("ca.key", "ca.pem", "server.key", "server.pem"), 0o600)


def test_a_host_name_that_is_not_ascii_is_refused(tmp_path: Path) -> None:
    """Host names in certificates are ASCII."""
    with pytest.raises(InputError, match="expected a host name or an IP address"):
        ensure_pki(tmp_path, ["bröker"])


def test_a_damaged_ca_is_not_silently_replaced(tmp_path: Path) -> None:
    """A new CA would lock out every device."""
    ensure_pki(tmp_path, NAMES)
    (tmp_path / "ca.key").write_text("garbage")
    with pytest.raises(MachineError, match="restore it from a backup"):
        ensure_pki(tmp_path, NAMES)


def test_a_truncated_ca_is_refused() -> None:
    """It may come from a truncated join bundle."""
    with pytest.raises(InputError, match="expected the CA certificate as PEM text"):
        tls_context("-----BEGIN CERTIFICATE-----\nAAAA")


@pytest.mark.parametrize("name", ["server.pem", "server.key"])
def test_damaged_files_of_the_broker_are_replaced(tmp_path: Path, name: str) -> None:
    """The same CA signs the new certificate, so that devices still accept it."""
    before = ensure_pki(tmp_path, NAMES)
    (tmp_path / name).write_text("garbage")
    after = ensure_pki(tmp_path, NAMES)
    assert handshake(after, tls_context(before.ca_pem), "localhost") is not None


def test_a_lost_ca_is_not_replaced_by_another(tmp_path: Path) -> None:
    """Its certificate is known and can be restored; without its key, or with another one, the start fails."""
    ca = ensure_pki(tmp_path, NAMES).ca_pem
    (tmp_path / "ca.pem").unlink()
    assert ensure_pki(tmp_path, NAMES, known_ca=ca).ca_pem == ca
    (tmp_path / "ca.key").write_bytes((tmp_path / "server.key").read_bytes())
    with pytest.raises(MachineError, match=r"ca.key is not the key of .*ca.pem; restore both from a backup"):
        ensure_pki(tmp_path, NAMES)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(MachineError, match=r"ca.key is missing or no private key"):
        ensure_pki(tmp_path, NAMES, known_ca=ca)
