"""The environment of a process that may train on a GPU, and a torch that has no kernels for it, or does not load."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from edge_client.device import accelerator_environment
from edge_client.device.accelerator import wrong_architecture
from edge_client.device.gpus import User, nvmap_bytes
from edge_client.device.tree import Tree
from edge_client.errors import torch_failure


def test_settings_of_another_allocator_are_dropped_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plans are made for the default one; what an owner set of the others stays."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    with caplog.at_level(logging.WARNING):
        accelerator_environment.prepare()
        accelerator_environment.prepare()
    import os

    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ
    assert [record.getMessage() for record in caplog.records] == [
        "PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync is ignored: plans are made for the default allocator"
    ]
    assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["CUDA_MODULE_LOADING"]) == (":16:8", "LAZY")


@pytest.mark.parametrize(
    ("built_for", "capability", "memory", "works"),
    [
        (["sm_80", "sm_90"], (8, 7), "unified", False),  # a Jetson Orin and a wheel for servers
        (["sm_80", "sm_90"], (8, 6), "separate", True),  # code for 8.0 runs on 8.6
        (["sm_80", "sm_90", "compute_90"], (11, 0), "unified", True),  # translated when it is loaded
        (["sm_87"], (8, 7), "unified", True),
        (["sm_90a"], (9, 0), "separate", True),
        (["sm_86"], (8, 0), "separate", False),  # code for a newer one does not run
        (["gfx90a"], (9, 0), "separate", True),  # not NVIDIA's names: nobody knows
        ([], (8, 7), "unified", True),
    ],
)
def test_a_torch_without_kernels_for_the_gpu_is_noticed(
    built_for: list[str], capability: tuple[int, int], memory: str, works: bool
) -> None:
    """By NVIDIA's rules of compatibility, which do not hold between servers and Jetsons."""
    said = wrong_architecture(built_for, capability, memory=memory)
    assert (said == "") is works
    if not works:
        names = ", ".join(built_for)
        assert said == (
            f"this torch was built for {names}; this GPU is sm_{capability[0]}{capability[1]}: install NVIDIA's"
        )


def _with_torch(folder: Path, text: str) -> None:
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "raise OSError('libnvpl_lapack_lp64_gomp.so.0: cannot open shared object file: No such file or directory')",
            "torch does not load: libnvpl_lapack_lp64_gomp.so.0: cannot open shared object file: No such file or "
            "directory; pip install nvpl-lapack nvpl-blas",
        ),
        ("raise ImportError('libcudss.so.0: cannot open')", "pip install nvidia-cudss-cu13"),
        ("import torch.missing", "torch does not load: No module named 'torch.missing'; install it again"),
    ],
)
def test_a_torch_that_does_not_load_ends_a_command_in_one_line(tmp_path: Path, text: str, says: str) -> None:
    """With what mends it, and the exit code of a machine's problem."""
    _with_torch(tmp_path, text)
    done = subprocess.run(
        [sys.executable, "-m", "edge_client", "plan", "--model", "mlp", "--budget", "1GB"],
        env={"PYTHONPATH": str(tmp_path), "FEDFIT_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 4, done.stderr
    assert says in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_error_elsewhere_is_no_failure_of_torch() -> None:
    """A file that is missing, and a module of somebody else's."""
    for kind in (FileNotFoundError("x"), ModuleNotFoundError("No module named 'h5py'", name="h5py")):
        with pytest.raises(type(kind)) as caught:
            raise kind
        assert torch_failure(caught.value) is None


def test_who_holds_a_gpu_is_told_by_name() -> None:
    """The name is that of this process; another pid space has none."""
    import os

    name = Path("/proc/self/comm").read_text().strip()
    assert str(User(pid=os.getpid(), num_bytes=7_400_000_000)) == f"pid {os.getpid()} ({name}) has 7.4 GB"
    assert str(User(pid=2**22 + 1)) == f"pid {2**22 + 1} (not visible from here) has some memory"


def test_a_jetsons_driver_tells_what_its_gpu_has(tmp_path: Path) -> None:
    """NvMapMemUsed of /proc/meminfo; Thor's driver has no such line."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nNvMapMemUsed:   512 kB\n")
    assert nvmap_bytes(Tree(tmp_path)) == 512 * 1024
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\n")
    assert nvmap_bytes(Tree(tmp_path)) is None
