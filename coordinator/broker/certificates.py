"""The federation's private certificate authority (CA) and the broker's certificate, created at the first start.

The keys are P-256. Certificates are valid from 1970 to 2100, so that a device with a dead clock can connect. The CA is
created once and goes into every join bundle; the broker's certificate is replaced when devices reach the broker under
other names.

Covers: creating and checking the files below STATE/pki. Does not cover: trusting them (`edge_client.transport.mqtt`).
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edge_client import durable
from edge_client.errors import InputError, MachineError

__all__ = ["Pki", "ensure_pki", "fingerprint", "read_foreign_ca"]

_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
_NOT_AFTER = datetime.datetime(2100, 1, 1, tzinfo=datetime.timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pki:
    """The CA that devices must trust, and the files that the broker serves."""

    ca_pem: str
    server_certificate: Path
    server_key: Path


def ensure_pki(directory: Path, names: Sequence[str], *, known_ca: str = "", server: str = "server") -> Pki:
    """Create the missing files below `directory` for a broker reached as `names` (host names and IP addresses).

    `known_ca` is the CA that devices already trust; replacing it would lock all of them out. `server` is the name of
    the files of another server than the broker.
    """
    if not names:
        raise ValueError("expected at least one name under which devices reach the broker")
    with durable.disk_errors(f"cannot write certificates to {directory}"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if known_ca and not (directory / "ca.pem").exists():
            durable.write_bytes(directory / "ca.pem", known_ca.encode("ascii"), point="pki.ca")
        ca_key, ca = _ensure_ca(directory)
        certificate, key = directory / f"{server}.pem", directory / f"{server}.key"
        if not _is_usable(certificate, key, names, ca):
            _create_server(certificate, key, names, ca_key, ca)
    return Pki(ca_pem=_pem(ca).decode("ascii"), server_certificate=certificate, server_key=key)


def fingerprint(file: Path) -> str:
    """The SHA-256 of a certificate, as browsers show it."""
    return _read_certificate(file).fingerprint(hashes.SHA256()).hex(":").upper()


def read_foreign_ca(file: Path) -> str:
    """Read the CA of an external broker as PEM text; an expired one is refused.

    Only the coordinator checks the date, since the clocks of devices may be wrong. Raises `InputError`, `MachineError`.
    """
    try:
        text = file.read_text(encoding="ascii")
        certificates = x509.load_pem_x509_certificates(text.encode())
    except OSError as error:
        raise MachineError(f"cannot read the broker's CA {file}: {error.strerror}") from error
    except ValueError as error:  # not ASCII, or no certificate
        raise InputError(f"--broker-ca {file}: expected certificates as PEM text, got none ({error})") from error
    now = datetime.datetime.now(datetime.timezone.utc)
    expiry = min(certificate.not_valid_after_utc for certificate in certificates)
    if expiry < now:
        reason = f"the certificate has expired on {expiry:%Y-%m-%d}"
        raise InputError(f"--broker-ca {file}: {reason}; name the broker's new CA")
    return text


def _ensure_ca(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Read the CA or create it. Its certificate is written last: a key without one was never used."""
    key_file, file = directory / "ca.key", directory / "ca.pem"
    if file.exists():
        key, certificate = _read_key(key_file), _read_certificate(file)
        if key.public_key() != certificate.public_key():
            raise MachineError(f"{key_file} is not the key of {file}; restore both from a backup")
        return key, certificate
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfit CA")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)  # signs certificates and CRLs
    certificate = (
        _builder(name, name, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    durable.write_bytes(key_file, _key_pem(key), point="pki.ca-key")
    durable.write_bytes(file, _pem(certificate), point="pki.ca")
    return key, certificate


def _create_server(
    file: Path, key_file: Path, names: Sequence[str], ca_key: ec.EllipticCurvePrivateKey, ca: x509.Certificate
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedfit broker")])
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)  # signs handshakes
    alternatives = x509.SubjectAlternativeName([_general_name(name) for name in dict.fromkeys(names)])
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    certificate = (
        _builder(subject, ca.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(alternatives, critical=False)
        .add_extension(authority, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    file.unlink(missing_ok=True)  # an old certificate must never stand beside a new key
    durable.write_bytes(key_file, _key_pem(key), point="pki.server-key")
    durable.write_bytes(file, _pem(certificate), point="pki.server")


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(_NOT_BEFORE).not_valid_after(_NOT_AFTER)


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise InputError(f"expected a host name or an IP address, got {name!r}") from error


def _is_usable(file: Path, key_file: Path, names: Sequence[str], ca: x509.Certificate) -> bool:
    """Whether the broker's files can stay; damaged ones are simply replaced, unlike those of the CA."""
    try:
        certificate, key = _read_certificate(file), _read_key(key_file)
        alternatives = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, MachineError, x509.ExtensionNotFound):
        return False
    same_names = set(alternatives) == {_general_name(name) for name in names}
    return same_names and certificate.public_key() == key.public_key() and _is_signed_by(certificate, ca)


def _is_signed_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, InvalidSignature):
        return False
    return True


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except ValueError as error:
        raise MachineError(f"{file} is not a certificate ({error}); restore it from a backup") from error


def _read_key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    except (FileNotFoundError, ValueError) as error:
        raise MachineError(f"{file} is missing or no private key ({error}); restore it from a backup") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise MachineError(f"expected a P-256 key in {file}, got {type(key).__name__}; restore it from a backup")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
