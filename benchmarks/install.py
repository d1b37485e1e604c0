"""A device's installation from a built wheel in an empty environment: packages and MB beside torch, import time.

Needs an index that pip can reach. The environment is then used as a device does: a profile, a unit, a plan.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.federation import scratch
from benchmarks.figures import Figure

__all__ = ["measure"]

_ROOT = Path(__file__).parents[1]
_LISTED = """
import json, re
from importlib import metadata

def plain(name):
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", name)[0]).lower()

print(json.dumps({
    plain(d.metadata["Name"]): [
        sum(f.locate().stat().st_size for f in d.files or () if f.locate().is_file() and f.suffix != ".pyc"),
        [plain(r) for r in d.requires or () if "extra ==" not in r],
    ]
    for d in metadata.distributions()
}))
"""
_TIMED = """
import sys, time
begun = time.perf_counter()
import edge_client{what}
print(time.perf_counter() - begun)
assert not {{"torch", "numpy"}} & set(sys.modules)
"""


def measure(*, quick: bool) -> list[Figure]:
    """One installation; the import twenty times."""
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        python = _install(Path(folder))
        packages = json.loads(_run(python, "-c", _LISTED))
        own = set(packages) - _needed(packages, {"torch", "numpy", "pip", "setuptools"})
        _use(python, Path(folder))
        repeats = 5 if quick else 20
        plain = [float(_run(python, "-c", _TIMED.format(what=""))) for _ in range(repeats)]
        command = [float(_run(python, "-c", _TIMED.format(what=".cli"))) for _ in range(repeats)]
    print("   beside torch and numpy:", ", ".join(f"{name} {packages[name][0] / 1e6:.2f} MB" for name in sorted(own)))
    size = sum(packages[name][0] for name in own) / 1e6
    return [
        Figure(name="packages beside torch and numpy", unit="", values=(float(len(own)),), at_most=8),
        Figure(name="their files", unit="MB", values=(size,), at_most=10),
        Figure(name="import edge_client", unit="s", values=tuple(plain), at_most=0.15),
        Figure(name="import edge_client.cli.main", unit="s", values=tuple(command)),
    ]


def _install(folder: Path) -> Path:
    """The wheel of this tree in a new environment, with the pinned versions; torch first, as `make` does."""
    tree = folder / "tree"  # a copy: setuptools leaves its own files beside the sources
    tree.mkdir()
    for name in ("edge_client", "coordinator", "profiles", "deploy"):
        shutil.copytree(_ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(_ROOT / name, tree)
    _run(Path(sys.executable), "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, tree)
    _run(Path(sys.executable), "-m", "venv", folder / "venv")
    python, pins = folder / "venv/bin/python", _ROOT / "constraints.txt"
    torch = next(line for line in pins.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    (wheel,) = folder.glob("*.whl")
    for what in (torch, wheel):
        _run(python, "-m", "pip", "install", "--quiet", "--constraint", pins, what)
    return python


def _use(python: Path, folder: Path) -> None:
    """What ships with it is found: profiles, units, data, models."""
    commands = (
        ("profile", "--profile", "jetson-orin-nano-8gb"),
        ("plan", "--model", "small-cnn", "--profile", "raspberry-pi-4-4gb"),
    )
    for words in commands:
        _run(python, "-m", "edge_client", *words, cwd=folder)
    _run(
        python,
        "-c",
        "from edge_client.operate import service_unit as s; print(s.template('fedfit-device'))",
        cwd=folder,
    )


def _needed(packages: dict[str, tuple[int, list[str]]], names: set[str]) -> set[str]:
    """Those and all that they need."""
    found: set[str] = set()
    left = [name for name in names if name in packages]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [other for other in packages[name][1] if other in packages]
    return found


def _run(python: Path, *words: object, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FEDFIT_"))}
    done = subprocess.run(
        [python, *map(str, words)], capture_output=True, text=True, check=False, cwd=cwd or "/", env=environment
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
