"""The oldest torch that boards come with (2.1, JetPack 6): planner, worker and test accelerator run under it.

Its environment is made once, in FEDFIT_OLD_TORCH or below the folder for temporary files: torch 2.1.2 from PyPI is a
build for CUDA, and takes gigabytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from fedtest_build import INSTALL, compiler
from worker_runs import DIGITS, make_work, read_update

pytestmark = [pytest.mark.slow, pytest.mark.accelerator]

ROOT = Path(__file__).parents[2]
TORCH, NUMPY = "torch==2.1.2", "numpy<2"
OTHERS = ("msgpack>=1.2.1", "paho-mqtt", "psutil", "tomli", "setuptools<80")

# before 2.5 torch does not load devices by entry points
WORKER = "import sys, fedtest; fedtest.register(); from edge_client.worker.process import main; sys.exit(main())"


def _interpreter() -> str:
    """A Python of the versions that torch 2.1 has wheels for."""
    if sys.version_info < (3, 12):
        return sys.executable
    found = shutil.which("python3.11") or shutil.which("python3.10")
    if found is None:
        pytest.skip(f"{TORCH} has no wheel for this Python: install Python 3.10 or 3.11 beside it")
    return found


@pytest.fixture(scope="module")
def python() -> str:
    """The interpreter of the environment, which is made if it is not there."""
    folder = Path(os.environ.get("FEDFIT_OLD_TORCH") or Path(tempfile.gettempdir()) / "fedfit-torch-2.1.2")
    python = folder / "bin/python"
    probe = [str(python), "-c", "import torch, numpy, msgpack; print(torch.__version__, numpy.__version__)"]
    if python.exists() and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return str(python)
    subprocess.run([_interpreter(), "-m", "venv", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, TORCH, NUMPY, *OTHERS], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(f"no {TORCH} here: {' '.join(pip)} '{TORCH}' '{NUMPY}' ends with {done.stderr.strip()[-200:]}")
    return str(python)


def _run(python: str, code: str, *arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    paths = (ROOT, ROOT / "tests", ROOT / "tests/accelerator")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths),
        "FEDFIT_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [python, "-c", code, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=900
    )


@pytest.mark.parametrize("accelerator", ["none", "fedtest:0", "fedtest:1"])
def test_a_worker_trains_under_torch_2_1(tmp_path: Path, python: str, accelerator: str) -> None:
    """On the CPU, and on both forms of the test accelerator, with a plan, a replay and a rehearsal."""
    if accelerator != "none" and compiler() is None:
        pytest.skip(INSTALL)
    # a worker that calibrates starts again, without the device that only this test registers
    limits = {"memory": 10**10, "accelerator": accelerator, "calibrate": accelerator == "none"}
    device: dict[str, Any] = {"data": DIGITS, "limits": limits}
    work = make_work(tmp_path / "w", device_file=device)
    done = _run(python, WORKER, str(work), cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    report, tensors = read_update(work)
    assert report.versions["torch"].startswith("2.1.2")
    assert report.plan is not None
    assert bool(report.plan.accelerator) == (accelerator != "none")
    assert (report.accelerator_peak_bytes > 0) == (accelerator != "none")
    assert tensors


def test_the_planner_runs_under_torch_2_1(tmp_path: Path, python: str) -> None:
    """`edge-client plan` calibrates and chooses."""
    words = ("plan", "--model", "small-cnn", "--budget", "2GB", "--format", "json")
    done = _run(python, "import sys; from edge_client.cli.main import main; sys.exit(main())", *words, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert '"microbatch"' in done.stdout
