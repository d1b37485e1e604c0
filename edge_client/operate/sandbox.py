"""Runs the doctor as the user and in the sandbox of the service, and finds the directive that blocks a check.

A check that fails there and passes without the sandbox is tried again with one directive loosened at a time: the first
that makes it pass is named. So the result is measured on this machine, not guessed. Does not cover: the checks
(`device_checks`), the units (`service_unit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge_client.errors import InputError, MachineError
from edge_client.operate.doctor import Finding, failed, from_json
from edge_client.operate.service_unit import Unit
from edge_client.operate.systemd import SETUP_FAILURES, Systemd

__all__ = ["examine_as_service"]

Properties = list[tuple[str, str]]

# what to loosen, in the order in which it is likely; None: the directive is left out
_LOOSENED: tuple[tuple[str, str | None], ...] = (
    ("MemoryMax", None),
    ("ProtectHome", None),
    ("PrivateTmp", None),
    ("PrivateDevices", None),
    ("DevicePolicy", "auto"),
    ("ProtectProc", None),
    ("ProcSubset", None),
    ("ProtectKernelTunables", None),
    ("ProtectControlGroups", None),
    ("RestrictAddressFamilies", None),
    ("IPAddressDeny", None),
    ("SystemCallFilter", None),
    ("MemoryDenyWriteExecute", None),
    ("RestrictNamespaces", None),
    ("ProtectSystem", None),
    ("PrivateUsers", None),
    ("User", None),
)
_AGAIN = "sudo {program} install-service --replace"
_REVERT = f"systemctl revert takes edits of the unit away; {_AGAIN} writes it as fedfit means it"
_REMEDIES = {
    "MemoryMax": f"a smaller model, or limits.memory in device.toml and {_AGAIN}",
    "ProtectHome": f"{_AGAIN}: it binds the paths of device.toml anew",
    "PrivateTmp": "data for a service does not lie in a folder for temporary files: move it",
    "PrivateDevices": f"{_AGAIN} --unit gpu",
    "DevicePolicy": "a line DeviceAllow=/dev/NAME rw for the device that is missing, with systemctl edit",
}
_OF_A_USER = ("CapabilityBoundingSet", "AmbientCapabilities", "PrivateUsers")  # root without them is nobody
_DIRECTORIES = {"StateDirectory": "/var/lib", "CacheDirectory": "/var/cache"}


def examine_as_service(systemd: Systemd, unit: Unit, command: Sequence[str], only: Sequence[str] = ()) -> list[Finding]:
    """What the doctor `command` finds under the unit's sandbox, of all checks or `only` some; it must print JSON.

    Raises `MachineError` if the sandbox cannot be set up, with the directive that systemd names.
    """
    properties = unit.sandbox()
    findings = _examine(systemd, properties, [*command, *(word for check in only for word in ("--only", check))])
    bad = failed(findings)
    return [_explained(systemd, properties, command, finding) if finding in bad else finding for finding in findings]


def _explained(systemd: Systemd, properties: Properties, command: Sequence[str], finding: Finding) -> Finding:
    """The finding with the directive that blocks the check, and how to solve that."""
    directive = _blocking(systemd, properties, [*command, "--only", finding.check])
    program = command[2].replace("_", "-")  # python -m PROGRAM
    key = directive.partition("=")[0]
    if not directive or key == "User":  # the check's own words are about that user's rights
        return replace(finding, directive=directive)
    return replace(finding, directive=directive, mend=_REMEDIES.get(key, _REVERT).format(program=program))


def _examine(systemd: Systemd, properties: Properties, command: Sequence[str]) -> list[Finding]:
    done = systemd.run_under(properties, command)
    try:
        return from_json(done.stdout)
    except InputError as error:
        about = SETUP_FAILURES.get(done.returncode)
        stderr = " ".join(done.stderr.split())[:500]
        if about is not None:
            values = ", ".join(value for key, value in properties if key == about)
            raise MachineError(
                f"the service's sandbox cannot be set up: systemd refuses {about}={values} (exit code "
                f"{done.returncode}{', ' + stderr if stderr else ''})"
            ) from error
        what = f"as a service the doctor ended with exit code {done.returncode}"
        raise MachineError(f"{what}: {stderr or error}") from error


def _blocking(systemd: Systemd, properties: Properties, command: Sequence[str]) -> str:
    """The directive without which the check passes; empty if it fails without any of them, too."""
    if not _passes(systemd, [], command):
        return ""
    for key, value in _LOOSENED:
        values = [text for name, text in properties if name == key]
        if values and _passes(systemd, _without(properties, key, value), command):
            return f"{key}={' '.join(values)}"
    return "more than one directive of the unit together"


def _without(properties: Properties, key: str, value: str | None) -> Properties:
    """With one directive loosened. As root, with a root's rights; what systemd would give to it is made writable."""
    if key == "User":
        folders = [(name, text) for name, text in properties if name in _DIRECTORIES]
        gone = {key, "Group", *_OF_A_USER, *_DIRECTORIES}
        writable = [("ReadWritePaths", f"{_DIRECTORIES[name]}/{text}") for name, text in folders]
        return [*((name, text) for name, text in properties if name not in gone), *writable]
    return [*((name, text) for name, text in properties if name != key), *([(key, value)] if value else [])]


def _passes(systemd: Systemd, properties: Properties, command: Sequence[str]) -> bool:
    try:
        return not failed(_examine(systemd, properties, command))
    except MachineError:
        return False
