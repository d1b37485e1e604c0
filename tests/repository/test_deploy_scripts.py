"""The install scripts of the boards, on recorded systems: what they refuse, what they make, and the way back.

The interpreter is a stand-in that makes environments out of files and writes down what pip is asked for; the recorded
systems are those of `profile_trees`. No script touches anything outside of its root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREES = Path(__file__).parents[1] / "profile_trees"
SCRIPTS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "deploy").rglob("*.sh"))]

# $FOLDER/torch is the installed version, $FOLDER/minor Python's, $FOLDER/doctor what a doctor ends with
PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*torch*) cat FOLDER/torch ;;
    "-c "*) exec REAL -c "import sys; sys.version_info = (3, $(cat FOLDER/minor), 0)
$2" ;;
    "-m venv")
        for made; do :; done
        echo "$*" | sed "s|$made|MADE|" >> FOLDER/asked
        mkdir -p "$made/bin"
        cp "$0" "$made/bin/python"
        printf '#!/bin/sh\\necho "edge-client $*" >> FOLDER/asked\\nexit $(cat FOLDER/doctor)\\n' \\
            > "$made/bin/edge-client"
        chmod +x "$made/bin/edge-client" ;;
    *) echo "$*" | sed "s|[^ ]*/kept.txt|KEPT|" >> FOLDER/asked ;;
esac
"""
SYSTEMCTL = '#!/bin/sh\necho "systemctl $*" >> FOLDER/asked\nexit $(cat FOLDER/systemctl)\n'
PIP = "-m pip install --quiet --disable-pip-version-check"


class Board:
    """A recorded board, and an interpreter with a torch."""

    def __init__(self, folder: Path, tree: str, *, minor: int, torch: str) -> None:
        self.root = folder / "root"
        shutil.copytree(TREES / tree, self.root, symlinks=True)
        self._folder = folder
        (folder / "bin").mkdir()
        for name, text in (("python3", PYTHON), ("systemctl", SYSTEMCTL)):
            script = folder / "bin" / name
            script.write_text(text.replace("FOLDER", str(folder)).replace("REAL", sys.executable))
            script.chmod(0o755)
        answers = {"torch": torch, "minor": str(minor), "doctor": "0", "systemctl": "0", "asked": ""}
        for name, value in answers.items():
            self.answer(name, value)
        self.place = self.root / "opt/fedfit"

    def answer(self, name: str, value: str) -> None:
        """What the stand-ins answer."""
        (self._folder / name).write_text(value + "\n" if value else "")

    def asked(self) -> list[str]:
        """What was asked of them since the last call."""
        lines = (self._folder / "asked").read_text().splitlines()
        self.answer("asked", "")
        return lines

    def run(self, script: str, *options: str) -> subprocess.CompletedProcess[str]:
        """As a person types it."""
        return subprocess.run(
            [str(ROOT / "deploy" / script / "install.sh"), "--root", str(self.root), *options],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}"},
        )

    def files(self) -> set[str]:
        """All names below the root."""
        return {str(path.relative_to(self.root)) for path in self.root.rglob("*")}


def jetson(
    folder: Path, tree: str = "jetson-orin-nano-8gb", *, minor: int = 10, torch: str = "2.5.0a0+nv24.08"
) -> Board:
    return Board(folder, tree, minor=minor, torch=torch)


def pi(folder: Path, tree: str = "raspberry-pi-5", *, minor: int = 11) -> Board:
    made = Board(folder, tree, minor=minor, torch="2.13.0+cpu")
    (made.root / "boot/firmware").mkdir(parents=True)
    (made.root / "boot/firmware/cmdline.txt").write_text("console=tty1 root=PARTUUID=1-02 rootwait\n")
    return made


def test_scripts_have_no_known_mistakes() -> None:
    """As shellcheck judges them."""
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([found, "-x", "-P", ".", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize(("tree", "minor"), [("jetson-orin-nano-8gb", 10), ("jetson-thor", 12)])
def test_a_jetson_keeps_nvidias_torch(tmp_path: Path, tree: str, minor: int) -> None:
    """JetPack 6 and 7: the environment sees the system's packages, and pip may not replace torch."""
    board = jetson(tmp_path, tree, minor=minor)
    done = board.run("jetson", "--package", "fedfit.whl")
    assert (done.returncode, done.stderr) == (0, "")
    assert board.asked() == [
        "-m venv --system-site-packages MADE",
        f"{PIP} --constraint KEPT fedfit.whl",
        f"edge-client doctor --state-dir {board.root}/var/lib/fedfit/device --only torch --only accelerator",
    ]
    assert (board.place / "kept.txt").read_text() == "torch==2.5.0a0+nv24.08\n"
    assert "edge-client install-service" in done.stdout


def test_jetpack_7_2_is_known_and_a_later_one_is_not(tmp_path: Path) -> None:
    """R39, for Orin and Thor; R40 does not exist yet."""
    board = jetson(tmp_path, "jetson-thor", minor=12)
    release = board.root / "etc/nv_tegra_release"
    text = release.read_text()
    release.write_text(text.replace("# R38 ", "# R40 "))
    refused = board.run("jetson", "--package", "fedfit.whl")
    assert (refused.returncode, board.asked()) == (4, [])
    assert "it knows R36 (JetPack 6), R38 (JetPack 7) and R39 (JetPack 7.2)" in refused.stderr
    release.write_text(text.replace("# R38 ", "# R39 "))
    assert board.run("jetson", "--package", "fedfit.whl").returncode == 0


@pytest.mark.parametrize(
    ("tree", "minor", "torch", "options", "code", "reason"),
    [
        ("jetson-xavier-nx-8gb", 8, "2.1.0", (), 4, "JetPack 5 (Jetson Linux R35) has Python 3.8"),
        ("jetson-xavier-nx-8gb", 8, "2.1.0", ("--cpu",), 4, "fedfit needs Python 3.10 or newer, python3 is 3.8"),
        ("jetson-orin-nano-8gb", 10, "", (), 4, "NVIDIA's torch for JetPack 6 is not installed"),
        ("jetson-orin-nano-8gb", 10, "", ("--torch", "/none.whl"), 3, "cannot read --torch /none.whl"),
        ("plain-host", 10, "2.5", (), 4, "this is no Jetson"),
        ("jetson-orin-nano-8gb", 10, "2.5", ("--upgrade",), 7, "there is nothing to upgrade"),
        ("jetson-orin-nano-8gb", 10, "2.5", ("--python", "python3.99"), 4, "expected python3.99, found none"),
    ],
)
def test_a_jetson_that_cannot_work_is_refused_with_the_reason(
    tmp_path: Path, tree: str, minor: int, torch: str, options: tuple[str, ...], code: int, reason: str
) -> None:
    """One line, and nothing is there that was not before."""
    board = jetson(tmp_path, tree, minor=minor, torch=torch)
    before = board.files()
    done = board.run("jetson", *options)
    assert (done.returncode, done.stdout) == (code, "")
    assert reason in done.stderr
    assert done.stderr.endswith("nothing was changed\n")
    assert board.files() == before
    assert board.asked() == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("# R32 (release), REVISION: 7.1", "JetPack 4 and older (Jetson Linux R32)"),
        ("# R99 (release), REVISION: 1.0", "Jetson Linux R99 is not known"),
        ("hello", "does not begin with a release"),
    ],
)
def test_a_jetpack_that_is_not_supported_is_named(tmp_path: Path, line: str, reason: str) -> None:
    """Too old, too new, or no such file at all."""
    board = jetson(tmp_path)
    (board.root / "etc/nv_tegra_release").write_text(f"{line}\n")
    before = board.files()
    done = board.run("jetson")
    assert (done.returncode, reason in done.stderr) == (4, True)
    assert (board.files(), board.asked()) == (before, [])


def test_a_jetson_5_may_train_on_its_cpu(tmp_path: Path) -> None:
    """With a newer Python and a torch without CUDA, in an environment of its own."""
    board = jetson(tmp_path, "jetson-xavier-nx-8gb", minor=10, torch="2.13.0")
    assert board.run("jetson", "--cpu").returncode == 0
    assert board.asked()[:2] == ["-m venv MADE", f"{PIP} fedfit[images]"]


def joined(board: Board) -> str:
    """Make it a device; the doctor's words then."""
    bundle = board.root / "var/lib/fedfit/device/identity/bundle.json"
    bundle.parent.mkdir(parents=True)
    bundle.touch()
    (board.root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
    (board.root / "etc/systemd/system/fedfit-device.service").touch()
    checks = ("torch", "accelerator", "identity", "device-file", "state", "memory", "data", "model")
    words = " ".join(f"--only {check}" for check in checks)
    return f"edge-client doctor --state-dir {board.root}/var/lib/fedfit/device {words}"


def test_an_upgrade_keeps_the_old_version_and_restarts_the_service(tmp_path: Path) -> None:
    """Then the one before that goes."""
    board = jetson(tmp_path)
    assert board.run("jetson").returncode == 0
    again = board.run("jetson")
    assert (again.returncode, "upgrade it with --upgrade" in again.stderr) == (8, True)
    first = os.readlink(board.place)
    doctor = joined(board)
    board.asked()
    assert board.run("jetson", "--upgrade").returncode == 0
    assert board.asked()[-2:] == [doctor, "systemctl restart fedfit-device"]
    second = os.readlink(board.place)
    assert first != second
    assert (board.root / "opt" / first).exists()
    assert board.run("jetson", "--upgrade").returncode == 0
    assert not (board.root / "opt" / first).exists()
    assert sorted(path.name for path in (board.root / "opt/fedfit.d").iterdir()) == sorted(
        Path(link).name for link in (second, os.readlink(board.place))
    )


@pytest.mark.parametrize("what", ["doctor", "systemctl"])
def test_an_upgrade_that_does_not_work_returns_to_the_old_version(tmp_path: Path, what: str) -> None:
    """The new doctor fails, or the service does not start: 1, and the old one is in use."""
    board = jetson(tmp_path)
    board.run("jetson")
    joined(board)
    before, link = board.files(), os.readlink(board.place)
    board.answer(what, "1")
    done = board.run("jetson", "--upgrade")
    assert (done.returncode, "old one" in done.stderr) == (1, True)
    assert (board.files(), os.readlink(board.place)) == (before, link)


def test_a_first_install_with_a_torch_that_does_not_work_leaves_nothing(tmp_path: Path) -> None:
    """The doctor's word counts there, too."""
    board = jetson(tmp_path)
    board.answer("doctor", "1")
    assert board.run("jetson").returncode == 1
    assert not board.place.exists()
    assert list((board.root / "opt/fedfit.d").iterdir()) == []


def test_a_raspberry_pi_gets_a_small_torch_and_its_memory_controller(tmp_path: Path) -> None:
    """One word in cmdline.txt, with a copy beside it; twice is once."""
    board = pi(tmp_path)
    done = board.run("raspberry-pi")
    assert (done.returncode, done.stderr) == (0, "")
    index = "https://download.pytorch.org/whl/cpu"
    assert board.asked()[:3] == ["-m venv MADE", f"{PIP} --index-url {index} torch", f"{PIP} fedfit[images]"]
    line = (board.root / "boot/firmware/cmdline.txt").read_text()
    assert line == "console=tty1 root=PARTUUID=1-02 rootwait cgroup_enable=memory\n"
    assert "cgroup" not in (board.root / "boot/firmware/cmdline.txt.before-fedfit").read_text()
    assert "restart the board" in done.stdout
    assert "restart the board" in board.run("raspberry-pi", "--upgrade").stdout
    assert (board.root / "boot/firmware/cmdline.txt").read_text() == line


def test_a_raspberry_pi_whose_controller_is_on_is_left_alone(tmp_path: Path) -> None:
    """The recorded Raspberry Pi 4 has it; --keep-cmdline leaves any."""
    board = pi(tmp_path, "raspberry-pi-4")
    assert "memory controller" not in board.run("raspberry-pi").stdout
    (tmp_path / "other").mkdir()
    other = pi(tmp_path / "other")
    assert "stays off" in other.run("raspberry-pi", "--keep-cmdline").stdout
    for left in (board, other):
        assert "cgroup" not in (left.root / "boot/firmware/cmdline.txt").read_text()


def test_a_card_is_spared_on_request(tmp_path: Path) -> None:
    """Swap leaves the card, the journal stays in memory."""
    board = pi(tmp_path)
    (board.root / "etc").mkdir(exist_ok=True)
    (board.root / "etc/dphys-swapfile").touch()
    assert board.run("raspberry-pi", "--spare-card").returncode == 0
    assert board.asked()[-2:] == ["systemctl disable --now dphys-swapfile", "systemctl restart systemd-journald"]
    assert "Storage=volatile" in (board.root / "etc/systemd/journald.conf.d/fedfit.conf").read_text()


@pytest.mark.parametrize(
    ("tree", "minor", "reason"),
    [("raspberry-pi-5", 9, "is 3.9; Raspberry Pi OS has it since bookworm"), ("plain-host", 11, "no Raspberry Pi")],
)
def test_a_raspberry_pi_that_cannot_work_is_refused(tmp_path: Path, tree: str, minor: int, reason: str) -> None:
    """One line, and nothing has changed."""
    board = pi(tmp_path, tree, minor=minor)
    before = board.files()
    done = board.run("raspberry-pi")
    assert (done.returncode, reason in done.stderr) == (4, True)
    assert (board.files(), board.asked()) == (before, [])


@pytest.mark.parametrize("script", ["jetson", "raspberry-pi"])
def test_words_that_nobody_knows_are_answered_with_the_usage(tmp_path: Path, script: str) -> None:
    """2, as with every command."""
    board = jetson(tmp_path)
    for words in (("--uprade",), ("--package",)):
        done = board.run(script, *words)
        assert (done.returncode, done.stderr.startswith("usage: ")) == (2, True)
    assert board.run(script, "--help").returncode == 0
