"""Installs and removes a systemd service with its user, state directory and unit, for devices and coordinators.

All checks come before the first change, and the service is tried under its user and sandbox before it is enabled; if
that fails, everything but the new user is as before. Does not cover: what is in the unit
(`service_unit`), the commands (`device_service`, the coordinator's own).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_client import durable
from edge_client.errors import ConflictError, InputError, MachineError, NoSuchNameError
from edge_client.operate.service_unit import Unit, hiding
from edge_client.operate.systemd import Systemd

__all__ = ["Plan", "Programs", "check_programs", "check_state_dir", "install", "require_root", "uninstall"]

_VENV = "/opt/fedfit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The interpreter of a service, and the folders of its packages."""

    python: Path
    packages: tuple[Path, ...]

    @classmethod
    def of_this_process(cls) -> Programs:
        """The programs that this process uses."""
        import importlib.util

        spec = importlib.util.find_spec("torch")  # finds it without loading it
        torch = Path(spec.origin).parents[1] if spec is not None and spec.origin else None
        usual = Path(_VENV)  # a link, where a script of `deploy` made it: an upgrade changes where it leads
        linked = usual.is_symlink() and usual.resolve() == Path(sys.prefix).resolve()
        return cls(
            python=usual / "bin/python" if linked else Path(sys.executable),
            packages=(Path(sys.base_prefix), Path(__file__).parents[2], *([torch] if torch else [])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to install."""

    name: str  # of the unit and of its user
    unit: Unit
    state_dir: Path
    command: str  # edge-client | coordinator


def require_root(systemd: Systemd, what: str) -> None:
    """Raise `MachineError` unless this process may change the system."""
    if os.geteuid() != 0 and systemd.root == Path("/"):
        raise MachineError(f"{what} changes the system and needs root; nothing was changed: sudo {sys.argv[0]} {what}")


def check_programs(systemd: Systemd, programs: Programs, extra: str) -> None:
    """Raise `MachineError` for an interpreter or packages that the sandbox hides; `extra` is what pip installs."""
    for path in (programs.python, programs.python.resolve(), *programs.packages):
        directive = hiding(systemd.inside(path))
        if directive:
            raise MachineError(
                f"{path} would be hidden from the service ({directive}); nothing was changed: install fedfit where "
                f"services may read it: sudo python3 -m venv {_VENV} && sudo {_VENV}/bin/pip install '{extra}'"
            )


def check_state_dir(state_dir: Path, how: str) -> None:
    """Raise `InputError` for a state directory that the sandbox hides; `how` makes one elsewhere."""
    directive = hiding(state_dir)
    if directive:
        raise InputError(
            f"the state directory {state_dir} would be hidden from the service ({directive}); nothing was changed: "
            f"{how}"
        )


def install(systemd: Systemd, plan: Plan, *, replace: bool, rehearse: Callable[[], None]) -> None:
    """Install, try and start a service; `rehearse` raises if it would not work as its own user."""
    path = systemd.unit_path(plan.name)
    before = path.read_bytes() if path.exists() else None
    if before is not None and not replace:
        raise ConflictError(
            f"{path} is there already; nothing was changed: replace it with --replace, or take it away with: "
            f"{plan.command} uninstall-service"
        )
    if before is not None:
        systemd.call("stop", plan.name)
    if durable.is_claimed(plan.state_dir):
        raise ConflictError(f"a process holds {plan.state_dir}: stop it first (Ctrl-C where it was started)")
    _make_user(systemd, plan)
    owner = plan.state_dir.stat()
    works = False
    try:
        _change_owner(plan.state_dir, *_user(systemd, plan.name))
        rehearse()
        _write(path, plan.unit.text.encode())
        works = True
    finally:
        if not works:
            _change_owner(plan.state_dir, owner.st_uid, owner.st_gid)
            if before is not None:
                systemd.call("start", plan.name)
    systemd.call("daemon-reload")
    systemd.call("enable", "--now", plan.name)


def uninstall(systemd: Systemd, name: str, state_dir: Path, *, purge: bool) -> list[Path]:
    """Stop and remove a service; `purge` also removes its state, its cache and its user. Returns what was removed."""
    require_root(systemd, "uninstall-service")
    systemd.require()
    path = systemd.unit_path(name)
    if purge and durable.is_there(state_dir) and not durable.is_there(state_dir / "version"):
        raise MachineError(f"{state_dir} was not made by fedfit; nothing was changed: name another --state-dir")
    if not path.exists():
        raise NoSuchNameError(f"no service {name!r} is installed: {path} is not there; nothing was changed")
    systemd.call("disable", "--now", name)
    with durable.disk_errors(f"cannot remove {path}"):
        path.unlink()
    systemd.call("daemon-reload")
    cache = systemd.root / "var/cache" / name.replace("-", "/")
    edits = path.with_name(f"{path.name}.d")  # of `systemctl edit`
    folders = [folder for folder in (state_dir, cache, edits) if folder.exists()] if purge else []
    for folder in folders:
        with durable.disk_errors(f"cannot remove {folder}"):
            shutil.rmtree(folder)
    if purge:
        systemd.do("userdel", name)
    return [path, *folders]


def _write(path: Path, data: bytes) -> None:
    with durable.disk_errors(f"cannot write {path}"):
        durable.write_bytes(path, data, point="service.unit", mode=0o644)
        os.chmod(path, 0o644)  # whatever the umask


def _make_user(systemd: Systemd, plan: Plan) -> None:
    """Create the service's user, who owns only the state directory and cannot log in."""
    if _find_user(systemd, plan.name) is None:
        words = ("--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent", "--shell")
        systemd.do("useradd", *words, "/usr/sbin/nologin", plan.name)


def _find_user(systemd: Systemd, name: str) -> tuple[int, int] | None:
    """The user's (uid, gid) from the system's password file."""
    with durable.disk_errors("cannot read the users of this system"):
        lines = (systemd.root / "etc/passwd").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = next((line.split(":") for line in lines if line.startswith(f"{name}:")), None)
    return (int(fields[2]), int(fields[3])) if fields is not None and len(fields) > 3 else None


def _user(systemd: Systemd, name: str) -> tuple[int, int]:
    user = _find_user(systemd, name)
    if user is None:
        raise MachineError(f"the user {name!r} is not in {systemd.root / 'etc/passwd'} after useradd made it")
    return user


def _change_owner(state_dir: Path, uid: int, gid: int) -> None:
    """Change the owner of a state directory; without root's rights (in tests) the owner stays."""
    if os.geteuid() != 0:
        return
    with durable.disk_errors(f"cannot hand {state_dir} over"):
        for folder, _, files in os.walk(state_dir):
            os.chown(folder, uid, gid)
            for name in files:
                os.chown(os.path.join(folder, name), uid, gid, follow_symlinks=False)
        os.chmod(state_dir, 0o700)
        if state_dir.parent.name == "fedfit":  # made by a `join` as root: others must get through to what is theirs
            os.chmod(state_dir.parent, 0o755)
