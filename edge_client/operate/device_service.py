"""What `edge-client install-service`, `uninstall-service` and `doctor` do on this device.

Covers: the unit of a device from its device.toml and its profile. Does not cover: putting it in place
(`service_install`), the checks (`device_checks`).
"""

from __future__ import annotations

import grp
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.client import identity
from edge_client.config.device_file import DeviceFile
from edge_client.device.probe import probe
from edge_client.errors import InputError, MachineError
from edge_client.operate import doctor, owner_file, sandbox, service_install, service_unit
from edge_client.operate.device_checks import DeviceChecks, Subject
from edge_client.operate.service_install import Plan, Programs
from edge_client.operate.service_unit import Unit
from edge_client.operate.systemd import Systemd

__all__ = ["NAME", "ServiceOptions", "examine", "examine_as_service", "install", "make_unit", "uninstall"]

NAME = "fedfit-device"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """The options that a person typed, and the system to which they apply."""

    state_dir: Path
    config: Path | None = None
    kind: str = "auto"  # auto | cpu | gpu
    systemd: Systemd
    programs: Programs


def make_unit(options: ServiceOptions) -> Unit:
    """Build the unit of this device; raises an error if the unit could not work. Changes nothing."""
    path = options.config or options.state_dir / "device.toml"
    service_install.check_programs(options.systemd, options.programs, "fedfit")
    state_dir = options.systemd.inside(options.state_dir)
    service_install.check_state_dir(state_dir, "join as root: sudo edge-client join FILE --data DIR")
    device = owner_file.load(path)
    system = probe(options.systemd.root)
    kind = options.kind if options.kind != "auto" else "gpu" if system.accelerators else "cpu"
    python = str(options.systemd.inside(options.programs.python))
    words = [python, "-m", "edge_client", "start", "--state-dir", str(state_dir)]
    words += ["--config", str(options.systemd.inside(options.config))] if options.config else []
    changes = {
        "ExecStart": [service_unit.command(words)],
        "MemoryMax": [service_unit.memory_max(system.memory, device.limits.memory)],
        "BindReadOnlyPaths": _bound(options, device, path),
        **service_unit.state_values(state_dir),
    }
    template = service_unit.template("fedfit-device-gpu" if kind == "gpu" else "fedfit-device")
    groups = [name for value in template.values("SupplementaryGroups") for name in value.split() if _has_group(name)]
    return template.with_values({**changes, "SupplementaryGroups": [" ".join(groups)] if groups else []})


def _bound(options: ServiceOptions, device: DeviceFile, device_file: Path) -> list[str]:
    """The data and the tasks that device.toml names; relative paths would mean something else to a service."""
    paths = []
    for key, path in owner_file.paths(device):
        if not path.is_absolute():
            raise InputError(f"{device_file}: {key}: expected an absolute path for a service, got {str(path)!r}")
        paths.append(path)
    if options.config:
        paths.append(options.config)
    return [service_unit.quoted(options.systemd.inside(path), optional=True) for path in service_unit.bound(paths)]


def _has_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def install(options: ServiceOptions, *, replace: bool = False) -> None:
    """Install and start the service, after it has read a sample as its own user."""
    service_install.require_root(options.systemd, "install-service")
    options.systemd.require()
    identity.load_identity(options.state_dir)
    unit = make_unit(options)

    def rehearse() -> None:
        findings = sandbox.examine_as_service(options.systemd, unit, _doctor(options), ["data"])
        bad = doctor.failed(findings)
        if bad:
            raise MachineError("the service would not work, so it was not installed:\n" + doctor.describe(bad))

    plan = Plan(name=NAME, unit=unit, state_dir=options.state_dir, command="edge-client")
    service_install.install(options.systemd, plan, replace=replace, rehearse=rehearse)


def _doctor(options: ServiceOptions) -> list[str]:
    words = [str(options.programs.python), "-m", "edge_client", "doctor", "--format", "json"]
    words += ["--state-dir", str(options.state_dir)]
    return words + (["--config", str(options.config)] if options.config else [])


def uninstall(systemd: Systemd, state_dir: Path, *, purge: bool) -> list[Path]:
    """Stop and remove the service; `purge` also removes identity, state and cache, device.toml included."""
    return service_install.uninstall(systemd, NAME, state_dir, purge=purge)


def examine(subject: Subject, only: Sequence[str]) -> list[doctor.Finding]:
    """All checks, here and as this user."""
    return doctor.examine(DeviceChecks(subject).known(), only)


def examine_as_service(options: ServiceOptions, only: Sequence[str], model: Sequence[str]) -> list[doctor.Finding]:
    """All checks under the user and the sandbox of the installed unit, or of the one that would be installed."""
    service_install.require_root(options.systemd, "doctor --as-service")
    options.systemd.require()
    text = options.systemd.unit_text(NAME)
    unit = Unit(text=text) if text is not None else make_unit(options)
    return sandbox.examine_as_service(options.systemd, unit, [*_doctor(options), *model], only)
