"""The doctor: what each check says, what mends it, and which directive of a unit is in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from machine import BUNDLE, Machine
from typed import typed

from edge_client import durable
from edge_client.client import identity
from edge_client.client.identity import STATE_KIND, STATE_VERSION
from edge_client.client.status import Status, StatusFile
from edge_client.errors import MachineError, NoSuchNameError
from edge_client.operate import device_service, doctor
from edge_client.operate.device_checks import DeviceChecks, Subject, check_clock, check_writable
from edge_client.operate.doctor import Finding, ProblemError, SkippedError
from edge_client.operate.service_unit import Unit

TREES = Path(__file__).parents[3] / "profile_trees"


def _raise(error: Exception) -> str:
    raise error


def test_findings_are_passed_failed_or_skipped_and_say_what_mends() -> None:
    """An error of fedfit's own says itself what to do."""
    checks = {
        "a": lambda: "fine",
        "b": lambda: _raise(ProblemError("broken", "mend it so")),
        "c": lambda: _raise(SkippedError("not here")),
        "d": lambda: _raise(MachineError("no rights; check them")),
    }
    findings = doctor.examine(checks)
    assert [(finding.state, finding.text, finding.mend) for finding in findings] == [
        ("passed", "fine", ""),
        ("failed", "broken", "mend it so"),
        ("skipped", "not here", ""),
        ("failed", "no rights; check them", ""),
    ]
    verdict = doctor.verdict(findings)
    assert verdict is not None
    assert (str(verdict), verdict.exit_code) == ("2 of 4 checks failed: b, d", 1)
    assert doctor.from_json(doctor.to_json(findings)) == findings
    assert "mend it: mend it so" in doctor.describe(findings)
    assert [finding.check for finding in doctor.examine(checks, ["c"])] == ["c"]
    with pytest.raises(NoSuchNameError, match="known"):
        doctor.examine(checks, ["e"])


def look(check: str, subject: Subject) -> Finding:
    """One check alone."""
    (finding,) = doctor.examine(DeviceChecks(subject).known(), [check])
    return finding


@pytest.fixture
def joined(tmp_path: Path) -> Subject:
    """A device with the digits as its data."""
    identity.join(tmp_path / "state", BUNDLE)
    (tmp_path / "state/device.toml").write_text('data = { source = "digits" }\n')
    return Subject(state_dir=tmp_path / "state")


def test_a_device_that_has_not_joined_is_told_how(tmp_path: Path) -> None:
    """The first thing that is wrong on a first day."""
    finding = look("identity", Subject(state_dir=tmp_path))
    assert (finding.state, finding.mend.partition(" (")[0]) == ("failed", "edge-client join FILE")


def test_a_secret_that_others_can_read_is_found(joined: Subject) -> None:
    """0640, and the command that mends it."""
    path = joined.state_dir / "identity/bundle.json"
    assert look("identity", joined).state == "passed"
    path.chmod(0o640)
    finding = look("identity", joined)
    assert (finding.state, "0640" in finding.text, finding.mend) == ("failed", True, f"chmod 600 {path}")


def test_one_sample_is_really_read(joined: Subject) -> None:
    """1,797 digits; then an npz file that is none."""
    assert look("data", joined).text == "training: 1797 samples, read one"
    broken = joined.state_dir / "broken.npz"
    broken.write_bytes(b"no zip")
    (joined.state_dir / "device.toml").write_text(f'data = {{ source = "npz", train = "{broken}" }}\n')
    finding = look("data", joined)
    assert (finding.state, str(broken) in finding.text, finding.mend != "") == ("failed", True, True)


def test_a_task_of_the_devices_own_is_tried(joined: Subject, tmp_path: Path) -> None:
    """Its mistake is told with file and line."""
    task = tmp_path / "t.py"
    task.write_text(
        "from edge_client import Task\nimport numpy as np\n\ndef model(n): ...\n"
        "def data(device): return np.zeros((3, 4)), np.arange(int(device.data['train'][-1]))\n"
        "task = Task(model=model, train_data=data)\n"
    )
    text = f'data = {{ train = "NUMBER" }}\ntasks = {{ t = "{task}:task" }}\n'
    (joined.state_dir / "device.toml").write_text(text.replace("NUMBER", "3"))
    assert look("data", joined).text == "task t, train_data(): 3 samples, read one"
    (joined.state_dir / "device.toml").write_text(text.replace("NUMBER", "x"))
    assert f"{task}, line 5: train_data(): ValueError" in look("data", joined).text


@pytest.mark.parametrize(
    ("tree", "check", "state", "said"),
    [
        ("raspberry-pi-zero-2-w", "control-group", "failed", "memory controller is off"),
        ("jetson-agx-orin-64gb", "control-group", "passed", "v2, at most 6.0 GB"),
        ("plain-host", "accelerator", "skipped", "trains on its CPU"),
        ("jetson-orin-nano-8gb", "accelerator", "failed", "Ampere GPU of tegra234"),
        ("raspberry-pi-5", "memory", "passed", "for a worker process"),
    ],
)
def test_recorded_machines_are_judged(joined: Subject, tree: str, check: str, state: str, said: str) -> None:
    """From what their files say; the torch of the tests has no CUDA."""
    finding = look(check, Subject(state_dir=joined.state_dir, root=TREES / tree))
    assert finding.state == state, finding
    assert said in finding.text
    if tree == "raspberry-pi-zero-2-w":
        assert finding.mend == "sudo sed -i '1s/$/ cgroup_enable=memory/' /boot/firmware/cmdline.txt && sudo reboot"


@pytest.mark.parametrize(("now_s", "wrong"), [(0.0, "1970-01-01"), (5e9, "2128-06-11"), (1.8e9, "")])
def test_a_clock_that_cannot_be_right_is_found(tmp_path: Path, now_s: float, wrong: str) -> None:
    """Before this software was written, or after every certificate has ended."""
    if wrong:
        with pytest.raises(ProblemError, match=wrong):
            check_clock(tmp_path / "nothing", now_s=now_s)
    else:
        assert check_clock(tmp_path / "nothing", now_s=now_s) == "2027-01-15 08:00 UTC"


def test_a_clock_that_has_gone_back_is_found(tmp_path: Path) -> None:
    """The status was written two days after now."""
    path = tmp_path / "status.json"
    path.touch()
    os.utime(path, (1.8e9 + 2 * 86_400, 1.8e9 + 2 * 86_400))
    with pytest.raises(ProblemError, match="it has gone back"):
        check_clock(path, now_s=1.8e9)


def test_a_state_directory_that_others_may_enter_is_found(tmp_path: Path) -> None:
    """0755, and one that is not there."""
    (tmp_path / "state").mkdir(mode=0o755)
    with pytest.raises(ProblemError, match="0755"):
        check_writable(tmp_path / "state")
    with pytest.raises(ProblemError, match="does not exist"):
        check_writable(tmp_path / "none")


def test_a_running_client_is_asked_and_not_disturbed(joined: Subject) -> None:
    """A second connection under its name would only confuse."""
    lock = durable.claim_state_dir(joined.state_dir, kind=STATE_KIND, version=STATE_VERSION)
    StatusFile(joined.state_dir / "status.json").update(Status(pid=1, link="let_in"), 0.0)
    assert look("broker", joined).text == "mqtt://127.0.0.1:1: the running client is connected"
    StatusFile(joined.state_dir / "status.json").update(Status(pid=1, link="connecting"), 0.0)
    assert look("broker", joined).state == "failed"
    os.close(lock)


def test_a_broker_that_is_not_there_is_told_with_its_address(joined: Subject) -> None:
    """Nobody listens on port 1."""
    finding = look("broker", joined)
    assert (finding.state, "127.0.0.1:1" in finding.text, "--no-check" in finding.text) == ("failed", True, False)


def test_the_command_prints_json_and_ends_with_1(joined: Subject) -> None:
    """As `--as-service` reads it."""
    done = typed("edge_client", "doctor", "--format", "json", "--only", "broker", "--state-dir", joined.state_dir)
    assert done.returncode == 1
    assert done.stderr == "edge-client: 1 of 1 checks failed: broker\n"
    found = json.loads(done.stdout)
    assert (found["ok"], found["checks"][0]["check"]) == (False, "broker")
    fine = typed("edge_client", "doctor", "--only", "identity", "--state-dir", joined.state_dir)
    assert (fine.returncode, fine.stdout) == (0, "passed   identity  pi of federation fed\n")
    alone = typed("edge_client", "doctor", "--input", "3x32x32", "--state-dir", joined.state_dir)
    assert (alone.returncode, "--model" in alone.stderr) == (3, True)


@pytest.mark.parametrize(
    ("denied", "check", "directive"),
    [
        ("PrivateDevices", "clock", "PrivateDevices=yes"),
        ("ProtectProc", "memory", "ProtectProc=invisible"),
        ("User", "state", "User=fedfit-device"),
        ("RestrictAddressFamilies", "clock", "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX"),
        ("SystemCallFilter", "disk", "SystemCallFilter=@system-service ~@privileged @resources"),
    ],
)
def test_the_directive_that_blocks_is_found_by_leaving_it_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str, check: str, directive: str
) -> None:
    """The check fails with it and passes without: nothing is guessed from the check's name."""
    machine = Machine(tmp_path, monkeypatch)
    machine.join()
    machine.deny.write_text(f"{denied} {check}\n")
    (finding,) = device_service.examine_as_service(machine.wanted(kind="cpu"), ["identity"], [])
    assert (finding.check, finding.state, finding.directive) == (check, "failed", directive)


def test_what_mends_a_directive_is_told_and_edits_of_the_unit_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`systemctl edit` took PrivateDevices away from the installed unit, which is the one that is tried."""
    machine = Machine(tmp_path, monkeypatch)
    machine.join()
    machine.deny.write_text("PrivateDevices clock\n")
    machine.unit.write_text("[Service]\nPrivateDevices=yes\n")
    (finding,) = device_service.examine_as_service(machine.wanted(), ["identity"], [])
    assert finding.mend == "sudo edge-client install-service --replace --unit gpu"
    assert machine.systemd.unit_text("fedfit-device") == "[Service]\nPrivateDevices=yes\n"
    folder = machine.unit.with_name("fedfit-device.service.d")
    folder.mkdir()
    (folder / "override.conf").write_text("[Service]\nUMask=0022\n")
    text = machine.systemd.unit_text("fedfit-device")
    assert Unit(text=text or "").sandbox() == [("PrivateDevices", "yes"), ("UMask", "0022")]


def test_what_fails_without_a_sandbox_too_is_nobodys_directive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker is not there for anybody."""
    machine = Machine(tmp_path, monkeypatch)
    machine.join()
    (finding,) = device_service.examine_as_service(machine.wanted(), ["broker"], [])
    assert (finding.state, finding.directive) == ("failed", "")


def test_a_sandbox_that_systemd_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 217 is about User: the service was never installed."""
    machine = Machine(tmp_path, monkeypatch)
    machine.join()
    (machine.root / "bin/systemd-run").write_text("#!/bin/sh\necho 'no such user' >&2\nexit 217\n")
    with pytest.raises(MachineError, match=r"refuses User=fedfit-device \(exit code 217, no such user\)"):
        device_service.examine_as_service(machine.wanted(), [], [])
