"""`coordinator install-service`, `uninstall-service` and `doctor --as-service`: the unit of this server.

Covers: what stands in the unit. Does not cover: putting it in place (`edge_client.operate.service_install`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client import durable
from edge_client.device.probe import probe
from edge_client.errors import FedfitError, MachineError
from edge_client.operate import doctor, sandbox, service_install, service_unit
from edge_client.operate.service_install import Plan, Programs
from edge_client.operate.service_unit import Unit
from edge_client.operate.systemd import Systemd

__all__ = ["NAME", "ServiceOptions", "examine_as_service", "install", "make_unit", "uninstall"]

NAME = "fedfit-coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """What was typed, and the system that it is about."""

    state_dir: Path
    start: tuple[str, ...] = ()  # further options of `coordinator start`
    password_file: Path | None = None  # of a broker that somebody else runs
    readable: tuple[Path, ...] = ()  # files of the server that runs name: test data
    systemd: Systemd
    programs: Programs


def make_unit(options: ServiceOptions) -> Unit:
    """The unit of this server; raises before anything is changed if it could not work."""
    systemd = options.systemd
    service_install.check_programs(systemd, options.programs, "fedfit[coordinator]")
    state_dir = systemd.inside(options.state_dir)
    how = "name another --state-dir, such as /var/lib/fedfit/coordinator (coordinator backup and restore move it)"
    service_install.check_state_dir(state_dir, how)
    words = [str(systemd.inside(options.programs.python)), "-m", "coordinator", "start", "--state-dir", str(state_dir)]
    changes: dict[str, Sequence[str]] = {
        "ExecStart": [service_unit.command([*words, *options.start])],
        "MemoryMax": [service_unit.memory_max(probe(systemd.root).memory, None)],
        "BindReadOnlyPaths": [
            service_unit.quoted(systemd.inside(path), optional=True) for path in service_unit.bound(options.readable)
        ],
        **service_unit.state_values(state_dir),
    }
    if options.password_file is not None:
        file = service_unit.quoted(systemd.inside(options.password_file))
        changes["LoadCredential"] = [f"broker-password:{file}"]
    return service_unit.template(NAME).with_values(changes)


def install(options: ServiceOptions, *, replace: bool = False) -> None:
    """Install and start the service, after its checks have passed as its own user."""
    service_install.require_root(options.systemd, "install-service")
    options.systemd.require()
    unit = make_unit(options)
    fresh = not durable.is_there(options.state_dir)
    if not fresh and not durable.is_there(options.state_dir / "version") and any(options.state_dir.iterdir()):
        raise MachineError(f"{options.state_dir} was not made by fedfit; nothing was changed: name another --state-dir")

    def rehearse() -> None:
        checks = ("state", "disk", "memory", "torch", "broker-program")
        bad = doctor.failed(_examine(options, unit, checks))
        if bad:
            raise MachineError("the service would not work, so it was not installed:\n" + doctor.describe(bad))

    if fresh:
        with durable.disk_errors(f"cannot make {options.state_dir}"):
            durable.make_dir(options.state_dir)
    plan = Plan(name=NAME, unit=unit, state_dir=options.state_dir, command="coordinator")
    try:
        service_install.install(options.systemd, plan, replace=replace, rehearse=rehearse)
    except FedfitError:
        if fresh:
            with contextlib.suppress(OSError):  # it is empty, and was not there before
                options.state_dir.rmdir()
        raise


def _examine(options: ServiceOptions, unit: Unit, only: Sequence[str]) -> list[doctor.Finding]:
    words = [str(options.programs.python), "-m", "coordinator", "doctor", "--format", "json"]
    return sandbox.examine_as_service(options.systemd, unit, [*words, "--state-dir", str(options.state_dir)], only)


def uninstall(systemd: Systemd, state_dir: Path, *, purge: bool) -> list[Path]:
    """Stop and remove the service; `purge` also removes the whole federation: its CA, devices, models."""
    return service_install.uninstall(systemd, NAME, state_dir, purge=purge)


def examine_as_service(options: ServiceOptions, only: Sequence[str]) -> list[doctor.Finding]:
    """All checks under the user and the sandbox of the installed unit, or of the one that would be installed."""
    service_install.require_root(options.systemd, "doctor --as-service")
    options.systemd.require()
    text = options.systemd.unit_text(NAME)
    unit = Unit(text=text) if text is not None else make_unit(options)
    return _examine(options, unit, only)
