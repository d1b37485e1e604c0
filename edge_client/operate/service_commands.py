"""The commands of `edge-client` for operators, install-service, uninstall-service and doctor, and options of many.

Reading the options loads nothing: every start of a daemon does it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from edge_client.client import identity
from edge_client.errors import InputError
from edge_client.operate.output_format import add_format

__all__ = [
    "add_config",
    "add_doctor_options",
    "add_state_dir",
    "confirm",
    "doctor_options",
    "install_options",
    "uninstall_options",
]


def doctor_options(doctor: argparse.ArgumentParser) -> None:
    """Add the options of `doctor`."""
    add_doctor_options(doctor)
    add_config(doctor)
    what = doctor.add_mutually_exclusive_group()
    what.add_argument("--model", metavar="NAME", help="a built-in model that should fit (default: the first task's)")
    what.add_argument("--task", metavar="FILE:OBJ", help="a model of your own that should fit: defects.py:task")
    doctor.add_argument("--input", metavar="SHAPE", help="shape of one sample for --model or --task, such as 3x96x96")
    add_state_dir(doctor)
    doctor.set_defaults(do=_doctor)


def install_options(install: argparse.ArgumentParser) -> None:
    """Add the options of `install-service`."""
    install.add_argument("--dry-run", action="store_true", help="print the unit and change nothing")
    install.add_argument("--replace", action="store_true", help="replace a service that is there, e.g. for new data")
    install.add_argument(
        "--unit", choices=["auto", "cpu", "gpu"], default="auto", help="gpu: the GPU's devices are visible to it"
    )
    add_config(install)
    _root(install)
    add_state_dir(install)
    install.set_defaults(do=_install)


def uninstall_options(uninstall: argparse.ArgumentParser) -> None:
    """Add the options of `uninstall-service`."""
    uninstall.add_argument("--purge", action="store_true", help="remove identity, state, device.toml and user as well")
    uninstall.add_argument("--yes", action="store_true", help="do not ask")
    _root(uninstall)
    add_state_dir(uninstall)
    uninstall.set_defaults(do=_uninstall)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the owner's file."""
    parser.add_argument("--config", metavar="FILE", type=Path, help="device.toml (default: in the state directory)")


def add_state_dir(parser: argparse.ArgumentParser) -> None:
    """Add the option that names this device's state directory."""
    default = identity.default_state_dir()
    parser.add_argument("--state-dir", type=Path, default=default, metavar="DIR", help=f"default: {default}")


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that the doctors of devices and coordinators share."""
    add_format(parser)
    parser.add_argument("--only", metavar="CHECK", action="append", default=[], help="this check alone; repeatable")
    parser.add_argument(
        "--as-service", action="store_true", help="as the service's user, in its sandbox; tells what is in the way"
    )
    _root(parser)


def _root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--root", metavar="DIR", type=Path, default=Path("/"), help=argparse.SUPPRESS)  # for tests


def _service_options(options: argparse.Namespace) -> Any:
    from edge_client.operate import device_service
    from edge_client.operate.service_install import Programs
    from edge_client.operate.systemd import Systemd

    return device_service.ServiceOptions(
        state_dir=options.state_dir.absolute(),
        config=options.config.absolute() if options.config else None,
        kind=getattr(options, "unit", "auto"),
        systemd=Systemd(options.root),
        programs=Programs.of_this_process(),
    )


def _doctor(options: argparse.Namespace) -> None:
    from edge_client.operate import device_service, doctor
    from edge_client.operate.device_checks import Subject

    typed = [(f"--{key}", getattr(options, key)) for key in ("model", "task", "input") if getattr(options, key)]
    words = [word for pair in typed for word in pair]
    if words and words[0] == "--input":
        raise InputError("--input is the shape for a model: name it with --model or --task")
    if options.as_service:
        findings = device_service.examine_as_service(_service_options(options), options.only, words)
    else:
        subject = Subject(state_dir=options.state_dir, config=options.config, model=words, root=options.root)
        findings = device_service.examine(subject, options.only)
    print(doctor.to_json(findings) if options.format == "json" else doctor.describe(findings), flush=True)
    problem = doctor.verdict(findings)
    if problem is not None:
        raise problem


def _install(options: argparse.Namespace) -> None:
    from edge_client.operate import device_service

    service_options = _service_options(options)
    if options.dry_run:
        print(device_service.make_unit(service_options).text, end="")
        return
    device_service.install(service_options, replace=options.replace)
    name = device_service.NAME
    print(f"{name} runs, and will at every start; it has read a sample of its data as user {name}")
    print(f"look at it: systemctl status {name}; journalctl -u {name} -f; sudo edge-client status")
    print("if something is not as it should be: sudo edge-client doctor --as-service")


def _uninstall(options: argparse.Namespace) -> None:
    from edge_client.operate import device_service
    from edge_client.operate.systemd import Systemd

    if options.purge and not options.yes:
        confirm(f"the service, and identity, state and device.toml in {options.state_dir}, are removed; go on?")
    removed = device_service.uninstall(Systemd(options.root), options.state_dir, purge=options.purge)
    for path in removed:
        print(f"removed {path}")
    if not options.purge:
        print(f"the device stays a member: {options.state_dir} is kept; its files belong to {device_service.NAME}")


def confirm(question: str) -> None:
    """Ask a person; raises `InputError` unless the answer is yes."""
    import sys

    if not sys.stdin.isatty():
        raise InputError("nobody is there to ask: type --yes to do it without a question")
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise InputError("nothing was changed")
