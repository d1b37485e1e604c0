"""The units that ship with fedfit, and what a device makes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from machine import Machine

from edge_client.device.probe import Memory
from edge_client.errors import InputError, MachineError
from edge_client.operate import device_service, service_unit
from edge_client.operate.service_install import Programs, check_programs
from edge_client.operate.service_unit import Unit, bound, command, hiding, memory_max, quoted, template
from edge_client.operate.systemd import Systemd

NAMES = {"fedfit-device": 1.5, "fedfit-device-gpu": 2.0, "fedfit-coordinator": 1.5}
ANALYZE = shutil.which("systemd-analyze")


def exposure(path: Path) -> float:
    """Of 0 to 10, as `systemd-analyze security` judges a file."""
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--no-pager", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    match = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert match, done.stderr
    return float(match[1])


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize(("name", "most"), NAMES.items())
def test_units_leave_little_exposed(tmp_path: Path, name: str, most: float) -> None:
    """At most 1.5 without and 2.0 with a GPU; mosquitto's own unit has 9.6."""
    path = tmp_path / f"{name}.service"
    path.write_text(template(name).text)
    assert exposure(path) <= most


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_an_installed_unit_is_as_tight_and_systemd_understands_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With data in a home directory, a task, and a path that has to be quoted."""
    machine = Machine(tmp_path, monkeypatch)
    folder = machine.root / "home/pi/my data: 100%"
    folder.mkdir(parents=True)
    (machine.root / "opt/tasks").mkdir(parents=True)
    (machine.root / "opt/tasks/t.py").touch()
    machine.join(
        f'data = {{ source = "image-folder", train = "{folder}" }}\n'
        f'tasks = {{ t = "{machine.root}/opt/tasks/t.py:task" }}\n'
    )
    unit = device_service.make_unit(machine.wanted(kind=kind))
    path = tmp_path / "fedfit-device.service"
    path.write_text(unit.with_values({"ExecStart": ["/bin/true"]}).text)
    assert exposure(path) <= (1.5 if kind == "cpu" else 2.0)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "fedfit-device.service" in line] == []
    assert unit.values("BindReadOnlyPaths") == ['"-/home/pi/my data\\\\: 100%%"', "-/opt/tasks"]


@pytest.mark.parametrize("name", NAMES)
def test_units_come_back_by_themselves_and_are_watched(name: str) -> None:
    """What the operator relies on, in every unit."""
    unit = template(name)
    expected = {"Type": "notify", "Restart": "always", "StateDirectoryMode": "0700", "NoNewPrivileges": "yes"}
    assert {key: unit.values(key) for key in expected} == {key: [value] for key, value in expected.items()}
    assert float(unit.values("WatchdogSec")[0]) >= 60
    assert unit.values("User") == [name.removesuffix("-gpu")]
    assert unit.values("ProcSubset") == []  # it would hide /proc/meminfo


def test_a_value_is_replaced_where_it_stands_and_a_new_one_ends_the_section() -> None:
    """Comments, other sections and the order stay."""
    unit = Unit(text="# a\n[Unit]\nUser=no\n\n[Service]\nUser=a\n# b\nX=1\nX=2\n\n[Install]\nX=no\n")
    changed = unit.with_values({"User": ["b"], "X": [], "New": ["1", "2"]})
    assert changed.text == "# a\n[Unit]\nUser=no\n\n[Service]\nUser=b\n# b\nNew=1\nNew=2\n\n[Install]\nX=no\n"
    assert changed.values("New") == ["1", "2"]


def test_the_sandbox_of_a_unit_is_what_bounds_it_and_not_how_it_is_watched() -> None:
    """`systemd-run` refuses some of the rest, and would wait for a word of the doctor's."""
    keys = [key for key, _ in template("fedfit-device").sandbox()]
    assert {"User", "ProtectHome", "MemoryMax", "SystemCallFilter", "StateDirectory"} <= set(keys)
    assert not {"Type", "ExecStart", "WatchdogSec", "Restart", "Description", "WantedBy"} & set(keys)


def test_an_empty_value_takes_back_what_stands_before_it() -> None:
    """As `systemctl edit` uses it; no capability at all is said with an empty one, too."""
    text = "[Service]\nCapabilityBoundingSet=\nBindReadOnlyPaths=/a\n\n[Service]\nBindReadOnlyPaths=\n"
    assert Unit(text=text).sandbox() == [("CapabilityBoundingSet", "")]
    again = f"{text}BindReadOnlyPaths=/b\n"
    assert Unit(text=again).sandbox()[1:] == [("BindReadOnlyPaths", "/b")]


def test_memory_max_leaves_the_reserve_to_the_system_or_is_what_the_owner_allows() -> None:
    """4 GB less 10 %; 1 GB for the worker and 96 MiB beside it; unknown memory: systemd's own share."""
    memory = Memory(total_bytes=4 * 10**9, available_bytes=10**9)
    assert memory_max(memory, None) == "3600000000"
    assert memory_max(memory, 10**9) == str(10**9 + 96 * 2**20)
    assert memory_max(None, None) == "80%"


@pytest.mark.parametrize(
    ("path", "directive"),
    [
        ("/home/pi/venv/bin/python", "ProtectHome"),
        ("/root/x", "ProtectHome"),
        ("/home", "ProtectHome"),
        ("/tmp/x", "PrivateTmp"),
        ("/opt/fedfit/bin/python", ""),
        ("/homes/x", ""),
    ],
)
def test_what_the_sandbox_hides_is_known(path: str, directive: str) -> None:
    """ProtectHome empties /home, /root and /run/user; PrivateTmp both folders for temporary files."""
    assert hiding(Path(path)) == directive


@pytest.mark.parametrize("hidden", ["python", "torch"])
def test_an_interpreter_or_a_torch_below_home_is_refused_with_what_to_do(hidden: str) -> None:
    """The service would not find it."""
    here, there = Path("/opt/fedfit/bin/python"), Path("/home/me/.venv/lib")
    programs = Programs(python=there, packages=()) if hidden == "python" else Programs(python=here, packages=(there,))
    with pytest.raises(MachineError, match=r"hidden.*nothing was changed.*python3 -m venv /opt/fedfit"):
        check_programs(Systemd(), programs, "fedfit")


def test_files_are_bound_by_their_folder_but_never_a_whole_home(tmp_path: Path) -> None:
    """A replaced file has a new inode, which a bound file would not show."""
    (tmp_path / "data").mkdir()
    inside, file = tmp_path / "data/train.npz", Path("/home/pi/task.py")
    assert bound([tmp_path / "data", inside, file]) == [tmp_path / "data", file]
    assert bound([Path("/train.npz"), Path("/srv/x/a.csv")]) == [Path("/train.npz"), Path("/srv/x")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [("/data/a", "/data/a"), ("/data/a b", '"/data/a b"'), ("/d/50%", "/d/50%%"), ("/d/a:b", '"/d/a\\\\:b"')],
)
def test_paths_are_quoted_as_systemd_reads_them(text: str, shown: str) -> None:
    """A colon separates source and target there, `%` begins a specifier."""
    assert quoted(Path(text)) == shown


def test_a_path_that_no_unit_can_name_is_refused() -> None:
    """A newline would begin another directive."""
    with pytest.raises(InputError, match="control characters"):
        quoted(Path("/data/a\nUser=root"))


def test_a_command_has_nothing_that_systemd_would_expand() -> None:
    """`$` and `%` are doubled, blanks quoted."""
    assert command(["/p", "--state-dir", "/a b/$x%"]) == "/p --state-dir '/a b/$$x%%'"


def test_state_elsewhere_is_writable_and_relative_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd makes directories below /var/lib only; a service has no folder in which it was started."""
    machine = Machine(tmp_path, monkeypatch)
    machine.state_dir = machine.root / "srv/fedfit"
    machine.join()
    unit = device_service.make_unit(machine.wanted())
    assert unit.values("StateDirectory") == []
    assert unit.values("ReadWritePaths") == ["/srv/fedfit"]
    assert unit.values("ExecStart")[0].endswith(" -m edge_client start --state-dir /srv/fedfit")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.csv").write_text("a,label\n1,x\n")
    (machine.state_dir / "device.toml").write_text('data = { source = "csv", train = "mine.csv" }\n')
    with pytest.raises(InputError, match=r"data\.train: expected an absolute path"):
        device_service.make_unit(machine.wanted())


def test_memory_and_gpu_come_from_the_machine() -> None:
    """A recorded Jetson: 65.5 GB less its tenth, and the unit that shows it its GPU."""
    tree = Path(__file__).parents[3] / "profile_trees/jetson-agx-orin-64gb"
    found = service_unit.template("fedfit-device-gpu")
    assert found.values("PrivateDevices") == []
    assert device_service.probe(tree).accelerators
    assert Systemd(tree).unit_path("x") == tree / "etc/systemd/system/x.service"
