"""The coordinator as a service: its unit, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from machine import Machine
from typed import typed

from coordinator.cli import server_service
from coordinator.cli.server_checks import ServerChecks
from coordinator.server import launch
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import ConflictError, InputError, MachineError
from edge_client.operate import doctor

TREES = Path(__file__).parents[3] / "profile_trees"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A server with systemd."""
    return Machine(tmp_path, monkeypatch)


def wanted(machine: Machine, **options: object) -> server_service.ServiceOptions:
    """A coordinator in the usual place."""
    state_dir = machine.root / "var/lib/fedfit/coordinator"
    return server_service.ServiceOptions(
        state_dir=state_dir,
        systemd=machine.systemd,
        programs=machine.programs,
        **options,  # type: ignore[arg-type]
    )


def test_a_fresh_server_gets_a_service_with_what_was_typed(machine: Machine) -> None:
    """Options of `start`, test data, and the password of somebody else's broker by file."""
    secret = machine.root / "etc/fedfit/password"
    data = machine.root / "srv/test data"
    data.mkdir(parents=True)
    given = wanted(machine, start=("--broker", "mqtts://b:8883"), password_file=secret, readable=(data / "x.npz", data))
    server_service.install(given)
    path = machine.systemd.unit_path("fedfit-coordinator")
    unit = server_service.Unit(text=path.read_text())
    end = "-m coordinator start --state-dir /var/lib/fedfit/coordinator --broker mqtts://b:8883"
    assert unit.values("ExecStart")[0].endswith(end)
    assert unit.values("LoadCredential") == ["broker-password:/etc/fedfit/password"]
    assert unit.values("BindReadOnlyPaths") == ['"-/srv/test data"']
    assert given.state_dir.stat().st_mode & 0o777 == 0o700
    assert machine.asked()[-1] == "systemctl enable --now fedfit-coordinator"
    with pytest.raises(ConflictError, match=r"nothing was changed.*coordinator uninstall-service"):
        server_service.install(given)
    assert server_service.uninstall(machine.systemd, given.state_dir, purge=False) == [path]


def test_a_service_that_would_not_work_leaves_no_empty_folder(machine: Machine) -> None:
    """systemd refuses the sandbox."""
    machine.deny.write_text("SystemCallFilter memory\n")
    given = wanted(machine)
    with pytest.raises(MachineError, match=r"(?s)not installed.*blocked by: SystemCallFilter"):
        server_service.install(given)
    assert not given.state_dir.exists()
    assert not machine.systemd.unit_path("fedfit-coordinator").exists()


def test_options_that_start_would_refuse_are_refused_before_there_is_a_service(machine: Machine) -> None:
    """3, and nothing is there."""
    before = machine.files()
    where = ("--root", machine.root, "--state-dir", machine.root / "var/lib/fedfit/coordinator")
    done = typed("coordinator", "install-service", "--broker", "mqtt://b.example", *where)
    assert (done.returncode, "not encrypted" in done.stderr) == (3, True)
    done = typed("coordinator", "install-service", "--broker-password-file", "x", *where)
    assert (done.returncode, "name it with --broker" in done.stderr) == (3, True)
    assert typed("coordinator", "uninstall-service", *where).returncode == 7
    assert machine.files() == before


def test_the_brokers_password_comes_from_a_file_the_environment_or_systemd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was named counts most; none of them is an empty password."""
    monkeypatch.delenv("FEDFIT_BROKER_PASSWORD", raising=False)
    plain = launch.StartOptions(state_dir=tmp_path, broker="mqtts://b")
    assert launch.broker_password(plain) == ""
    (tmp_path / "broker-password").write_text("by-systemd\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert launch.broker_password(plain) == "by-systemd"
    monkeypatch.setenv("FEDFIT_BROKER_PASSWORD", "by-environment")
    assert launch.broker_password(plain) == "by-environment"
    (tmp_path / "mine").write_text("by-file")
    named = launch.StartOptions(state_dir=tmp_path, broker="mqtts://b", broker_password_file=tmp_path / "mine")
    assert launch.broker_password(named) == "by-file"
    (tmp_path / "mine").unlink()
    with pytest.raises(InputError, match="cannot read the broker's password"):
        launch.broker_password(named)


def look(check: str, state_dir: Path, **options: Path) -> doctor.Finding:
    """One check alone."""
    (finding,) = doctor.examine(ServerChecks(state_dir, **options).known(), [check])
    return finding


def test_a_server_that_never_served_is_told_how_to_begin(tmp_path: Path) -> None:
    """Nothing has failed yet; a folder of somebody else's has."""
    findings = doctor.examine(ServerChecks(tmp_path / "none").known(), ["state", "coordinator", "port", "devices"])
    assert {finding.state for finding in findings} == {"skipped"}
    (tmp_path / "photo.jpg").touch()
    assert look("state", tmp_path).state == "failed"


def test_a_clock_that_was_once_wrong_is_remembered(tmp_path: Path) -> None:
    """An epoch of the year 2065: older backups would be refused by the devices."""
    store = SqliteStore(tmp_path / "state.db")
    store.settings.next_epoch(3_000_000_000)
    store.close()
    finding = look("clock", tmp_path)
    assert (finding.state, "2065" in finding.text) == ("failed", True)


def test_little_memory_is_found(tmp_path: Path) -> None:
    """A Raspberry Pi Zero 2 W is no server: 239 MB are available."""
    finding = look("memory", tmp_path, root=TREES / "raspberry-pi-zero-2-w")
    assert finding.state == "failed", finding


def test_a_broker_program_that_is_missing_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a part of the extra `coordinator`."""
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    finding = look("broker-program", tmp_path)
    assert (finding.state, "fedfit[coordinator]" in finding.mend) == ("failed", True)
