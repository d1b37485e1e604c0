"""Services are installed, tried and removed; whatever is wrong is one line, and nothing has changed then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from machine import Machine
from typed import typed

from edge_client import durable
from edge_client.client.identity import STATE_KIND, STATE_VERSION
from edge_client.errors import ConflictError, InputError, MachineError, NoSuchNameError
from edge_client.operate import device_service, service_install
from edge_client.operate.systemd import Systemd


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """With systemd, and a device that has joined."""
    made = Machine(tmp_path, monkeypatch)
    made.join()
    return made


def test_a_service_is_tried_before_it_is_enabled(machine: Machine) -> None:
    """User, sample as that user in the sandbox, unit, start: in this order."""
    device_service.install(machine.wanted())
    assert machine.asked() == [
        "useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin "
        "fedfit-device",
        "systemd-run --quiet --wait --collect --pipe",
        "systemctl daemon-reload",
        "systemctl enable --now fedfit-device",
    ]
    unit = machine.unit.read_text()
    assert "MemoryMax=3686400000\n" in unit  # 4,096,000,000 bytes less a tenth
    assert machine.unit.stat().st_mode & 0o777 == 0o644
    assert machine.state_dir.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        assert machine.state_dir.parent.stat().st_mode & 0o777 == 0o755


def test_data_that_the_service_cannot_read_leaves_it_uninstalled(machine: Machine) -> None:
    """The directive that is in the way is named."""
    machine.deny.write_text("ProtectHome data\n")
    with pytest.raises(MachineError, match=r"(?s)was not installed.*it cannot be read.*blocked by: ProtectHome=tmpfs"):
        device_service.install(machine.wanted())
    assert not machine.unit.exists()
    assert not [line for line in machine.asked() if line.startswith("systemctl")]


def test_a_unit_that_is_there_stays_unless_it_is_to_be_replaced(machine: Machine) -> None:
    """8; with --replace the old one is stopped first, and started again if the new one would not work."""
    machine.unit.write_text("theirs")
    before = machine.files()
    with pytest.raises(ConflictError, match=r"is there already; nothing was changed.*--replace"):
        device_service.install(machine.wanted())
    assert machine.files() == before
    assert machine.asked() == []
    machine.deny.write_text("MemoryMax data\n")
    with pytest.raises(MachineError, match="MemoryMax"):
        device_service.install(machine.wanted(), replace=True)
    assert machine.unit.read_text() == "theirs"
    assert machine.asked()[0] == "systemctl stop fedfit-device"
    assert machine.asked()[-1] == "systemctl start fedfit-device"
    machine.deny.write_text("")
    device_service.install(machine.wanted(), replace=True)
    assert "ExecStart=" in machine.unit.read_text()


@pytest.mark.parametrize("what", ["no systemd", "not joined", "no device.toml", "a client runs", "hidden state"])
def test_what_cannot_work_is_refused_before_anything_changes(machine: Machine, what: str) -> None:
    """One line each, and the machine as before."""
    lock = None
    kind: type[Exception] = InputError
    if what == "no systemd":
        (machine.root / "run/systemd/system").rmdir()
        kind = MachineError
    elif what == "not joined":
        (machine.state_dir / "identity/bundle.json").unlink()
    elif what == "no device.toml":
        (machine.state_dir / "device.toml").unlink()
    elif what == "a client runs":
        lock = durable.claim_state_dir(machine.state_dir, kind=STATE_KIND, version=STATE_VERSION)
        kind = ConflictError
    else:
        machine.state_dir = machine.root / "home/pi/state"
        machine.join()
    before = machine.files()
    with pytest.raises(kind) as refused:
        device_service.install(machine.wanted())
    assert "device.toml" in str(refused.value) or "\n" not in str(refused.value)
    assert machine.files() == before
    assert machine.asked() == []
    if lock is not None:
        os.close(lock)


def test_without_root_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command to type instead is in the line."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for what in ("install-service", "uninstall-service"):
        with pytest.raises(MachineError, match=f"needs root; nothing was changed: sudo .* {what}"):
            service_install.require_root(Systemd(), what)


@pytest.mark.parametrize("program", ["edge_client", "coordinator"])
def test_a_command_that_cannot_install_says_so_in_a_line(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """Without root, and on a system without systemd: 4, and nothing is changed or asked of the system."""
    state_dir = machine.state_dir if program == "edge_client" else machine.root / "var/lib/fedfit/coordinator"
    before = machine.files()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        without_root = typed(program, "install-service", "--state-dir", state_dir)
    (machine.root / "run/systemd/system").rmdir()
    without_systemd = typed(program, "install-service", "--root", machine.root, "--state-dir", state_dir)
    for done, said in ((without_root, "needs root"), (without_systemd, "systemd does not run this system")):
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (4, "", 1), done.stderr
        assert said in done.stderr
        assert "nothing was changed" in done.stderr
    assert machine.files() == before
    assert machine.asked() == []


def test_a_service_is_removed_and_the_device_stays_a_member(machine: Machine) -> None:
    """Only --purge takes identity, state, cache and user away."""
    device_service.install(machine.wanted())
    cache = machine.root / "var/cache/fedfit/device"
    cache.mkdir(parents=True)
    assert device_service.uninstall(machine.systemd, machine.state_dir, purge=False) == [machine.unit]
    assert (machine.state_dir / "identity/bundle.json").exists()
    assert machine.asked()[-2:] == ["systemctl disable --now fedfit-device", "systemctl daemon-reload"]
    device_service.install(machine.wanted())
    removed = device_service.uninstall(machine.systemd, machine.state_dir, purge=True)
    assert removed == [machine.unit, machine.state_dir, cache]
    assert not machine.state_dir.exists()
    assert machine.asked()[-1] == "userdel fedfit-device"
    with pytest.raises(NoSuchNameError, match="no service 'fedfit-device' is installed"):
        device_service.uninstall(machine.systemd, machine.state_dir, purge=False)


def test_purge_takes_nothing_that_is_not_fedfits(machine: Machine) -> None:
    """A mistyped --state-dir."""
    machine.unit.write_text("x")
    (machine.root / "srv").mkdir()
    with pytest.raises(MachineError, match="was not made by fedfit; nothing was changed"):
        device_service.uninstall(machine.systemd, machine.root / "srv", purge=True)
    assert machine.unit.exists()


def test_the_commands_take_what_people_type(machine: Machine) -> None:
    """uninstall-service of nothing is 7; --purge asks; a dry run needs no systemd and changes nothing."""
    where = ("--root", machine.root, "--state-dir", machine.state_dir)
    assert typed("edge_client", "uninstall-service", *where).returncode == 7
    asked = typed("edge_client", "uninstall-service", "--purge", *where)
    assert (asked.returncode, "--yes" in asked.stderr) == (3, True)
    before = machine.files()
    dry = typed("edge_client", "install-service", "--dry-run", *where)
    assert machine.files() == before
    assert "[Service]" in dry.stdout or "hidden from the service" in dry.stderr  # as this interpreter's place is
