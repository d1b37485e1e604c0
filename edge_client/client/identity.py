"""The identity of this device: the join bundle that the coordinator made for it, stored in `STATE/identity/`.

A bundle is a small JSON file with the federation, the device's name, the brokers' addresses, the federation's CA, and
two secrets: the broker password and the key that authenticates messages. It is written and kept with mode 0600.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from edge_client import durable
from edge_client.errors import ConflictError, InputError, MachineError, PayloadError
from edge_client.records import Between, Hash, Id, Matches, Text, from_map, to_map
from edge_client.transport.base import parse_broker_url

__all__ = [
    "STATE_KIND",
    "STATE_VERSION",
    "Bundle",
    "default_state_dir",
    "join",
    "load_identity",
    "read_bundle",
    "write_bundle",
]

STATE_KIND = "device"
STATE_VERSION = 1

_PASSWORD = r"[A-Za-z0-9_-]{16,128}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Everything that a device needs to connect."""

    fedfit: Annotated[int, Between(1, 1)] = 1  # version of this file
    federation: Id
    device: Id
    brokers: tuple[Text, ...]  # mqtt[s]://host:port; tried in turn
    ca: Annotated[str, Matches(r"(?s).{0,16000}")] | None = None  # PEM; the only authority that is trusted
    password: Annotated[str, Matches(_PASSWORD)]
    key: Hash  # 32 bytes as hex

    def key_bytes(self) -> bytes:
        """The HMAC key."""
        return bytes.fromhex(self.key)


def default_state_dir() -> Path:
    """`$FEDFIT_DEVICE_DIR`, or the usual place of a device's state."""
    return durable.default_state_dir(STATE_KIND, variable="FEDFIT_DEVICE_DIR")


def parse_bundle(text: str, source: str) -> Bundle:
    """A bundle from its JSON text; raises `InputError`."""
    try:
        bundle = from_map(Bundle, _checked_secrets(json.loads(text)), where="bundle")
        if not bundle.brokers:
            raise InputError("expected at least one broker, got none")
        for broker in bundle.brokers:
            parse_broker_url(broker)
    except (ValueError, PayloadError, InputError, RecursionError) as error:
        raise InputError(
            f"{source} is not a join bundle ({error}); make one with: coordinator device add NAME"
        ) from None
    return bundle


def _checked_secrets(data: Any) -> Any:
    """Check the secrets; the error does not repeat a mistyped secret, as that of `from_map` would."""
    for name, form in (("password", _PASSWORD), ("key", r"[0-9a-f]{64}")):
        value = data.get(name, "") if isinstance(data, dict) else ""
        if value and not (isinstance(value, str) and re.fullmatch(form, value)):
            raise InputError(f"bundle.{name} does not match {form}")
    return data


def read_bundle(path: Path) -> Bundle:
    """Read a bundle file."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(65_536)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the join bundle {path}: {getattr(error, 'strerror', error)}") from error
    return parse_bundle(text, str(path))


def write_bundle(path: Path, bundle: Bundle) -> None:
    """Write a bundle, readable by its owner only."""
    durable.write_bytes(path, json.dumps(to_map(bundle), indent=1).encode() + b"\n", point="bundle")


def join(state_dir: Path, bundle: Bundle) -> None:
    """Store the bundle in `state_dir`; joining with the same bundle again changes nothing, another one is refused."""
    # the owner's own file may be there before the device has joined
    lock = durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION, may_hold=("device.toml",))
    try:
        held = _held(state_dir)
        if held is not None and (held.federation, held.device) != (bundle.federation, bundle.device):
            raise ConflictError(
                f"{state_dir} already belongs to device {held.device!r} of federation {held.federation!r}; "
                f"this bundle is for {bundle.device!r} of {bundle.federation!r}: "
                "run edge-client leave first, or name another --state-dir"
            )
        folder = state_dir / "identity"
        folder.mkdir(mode=0o700, exist_ok=True)
        write_bundle(folder / "bundle.json", bundle)
    except OSError as error:
        raise MachineError(f"cannot write below {state_dir}: {error.strerror}") from error
    finally:
        os.close(lock)


def _held(state_dir: Path) -> Bundle | None:
    path = state_dir / "identity" / "bundle.json"
    return read_bundle(path) if durable.is_there(path) else None


def load_identity(state_dir: Path) -> Bundle:
    """The bundle that this device joined with; raises `InputError` if it never did."""
    held = _held(state_dir)
    if held is None:
        raise InputError(
            f"{state_dir} has not joined a federation yet; run: edge-client join FILE --state-dir {state_dir}"
        )
    return held
