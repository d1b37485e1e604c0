"""The private authority: what a client with our context accepts and what it refuses."""

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
    """TLS version of a handshake over a socket pair; raises what the client sees."""
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(server.server_certificate, server.server_key)
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            theirs.wrap_socket(far, server_side=True).close()
        except OSError:
            far.close()  # the client refused, and says why itself

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
    """Host names and addresses of both kinds."""
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), host) in ("TLSv1.2", "TLSv1.3")


def test_another_authority_is_refused(tmp_path: Path) -> None:
    """Same names, other key."""
    ours, theirs = ensure_pki(tmp_path / "a", NAMES), ensure_pki(tmp_path / "b", NAMES)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(theirs, tls_context(ours.ca_pem), "broker.example")


def test_the_authorities_of_the_machine_are_not_trusted_beside_ours(tmp_path: Path) -> None:
    """Exactly one certificate is in the context."""
    context = tls_context(ensure_pki(tmp_path, NAMES).ca_pem)
    assert [dict(pair[0] for pair in ca["subject"])["commonName"] for ca in context.get_ca_certs()] == ["fedfit CA"]


@pytest.mark.parametrize("host", ["other.example", "10.1.2.4", "sub.broker.example"])
def test_a_wrong_host_name_is_refused(tmp_path: Path, host: str) -> None:
    """The certificate is ours, the machine is not."""
    pki = ensure_pki(tmp_path, NAMES)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(pki, tls_context(pki.ca_pem), host)


def test_a_clock_of_1970_connects(tmp_path: Path) -> None:
    """Certificates are valid from the first second of the epoch, and our context does not look at dates at all."""
    pki = ensure_pki(tmp_path, NAMES)
    for pem in (pki.ca_pem.encode(), pki.server_certificate.read_bytes()):
        certificate = x509.load_pem_x509_certificate(pem)
        assert certificate.not_valid_before_utc == datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
        assert certificate.not_valid_after_utc == datetime.datetime(2100, 1, 1, tzinfo=datetime.timezone.utc)
    assert tls_context(pki.ca_pem).verify_flags & 0x200000  # X509_V_FLAG_NO_CHECK_TIME


def test_the_dates_count_for_authorities_that_are_not_ours() -> None:
    """Without a private CA nothing is weakened."""
    context = tls_context(None)
    assert not context.verify_flags & 0x200000
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_nothing_is_made_again_without_need(tmp_path: Path) -> None:
    """A restart keeps all files as they are, whatever the order of the names and however often one stands there."""
    ensure_pki(tmp_path, [*NAMES, "localhost"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ensure_pki(tmp_path, NAMES[::-1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_new_names_get_a_new_certificate_of_the_same_authority(tmp_path: Path) -> None:
    """Devices that joined before go on to trust it."""
    old = ensure_pki(tmp_path, NAMES)
    new = ensure_pki(tmp_path, ["moved.example"])
    assert new.ca_pem == old.ca_pem
    assert handshake(new, tls_context(old.ca_pem), "moved.example")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(new, tls_context(old.ca_pem), "broker.example")


def test_a_start_that_was_cut_short_is_mended(tmp_path: Path) -> None:
    """Killed after the new key and before its certificate, and after the authority's key: both pairs fit again."""
    ensure_pki(tmp_path, NAMES)
    (tmp_path / "server.pem").unlink()
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), "localhost")
    for name in ("ca.pem", "server.pem", "server.key"):
        (tmp_path / name).unlink()
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), "localhost")


def test_a_certificate_of_an_earlier_authority_is_replaced(tmp_path: Path) -> None:
    """Somebody removed the authority; both have the same name, only the key differs."""
    ensure_pki(tmp_path, NAMES)
    (tmp_path / "ca.pem").unlink()
    pki = ensure_pki(tmp_path, NAMES)
    assert handshake(pki, tls_context(pki.ca_pem), "localhost")


def test_keys_are_readable_by_the_owner_only(tmp_path: Path) -> None:
    """Folder 0700, files 0600."""
    ensure_pki(tmp_path / "pki", NAMES)
    assert stat.S_IMODE((tmp_path / "pki").stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "pki").iterdir()}
    assert modes == dict.fromkeys(("ca.key", "ca.pem", "server.key", "server.pem"), 0o600)


def test_what_is_no_name_is_refused(tmp_path: Path) -> None:
    """X.509 host names are ASCII."""
    with pytest.raises(InputError, match="expected a host name or an IP address"):
        ensure_pki(tmp_path, ["bröker"])


def test_a_damaged_authority_is_not_silently_replaced(tmp_path: Path) -> None:
    """A new one would lock every device out."""
    ensure_pki(tmp_path, NAMES)
    (tmp_path / "ca.key").write_text("garbage")
    with pytest.raises(MachineError, match="restore it from a backup"):
        ensure_pki(tmp_path, NAMES)


def test_a_ca_that_is_no_pem_is_refused() -> None:
    """A truncated join bundle, for example."""
    with pytest.raises(InputError, match="expected the CA certificate as PEM text"):
        tls_context("-----BEGIN CERTIFICATE-----\nAAAA")


@pytest.mark.parametrize("name", ["server.pem", "server.key"])
def test_damaged_files_of_the_server_are_made_again(tmp_path: Path, name: str) -> None:
    """By the same authority: no device notices."""
    before = ensure_pki(tmp_path, NAMES)
    (tmp_path / name).write_text("garbage")
    after = ensure_pki(tmp_path, NAMES)
    assert handshake(after, tls_context(before.ca_pem), "localhost") is not None


def test_an_authority_whose_file_was_lost_is_not_replaced_by_another(tmp_path: Path) -> None:
    """Devices trust it already: its certificate is known, its key is not, and belongs to no other certificate."""
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
