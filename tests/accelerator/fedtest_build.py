"""Compiles the test accelerator with g++ alone: no Python headers, no ninja; the result is kept by torch and source."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

__all__ = ["INSTALL", "built", "compiler"]

HERE = Path(__file__).parent
INSTALL = "no g++: install it with `apt-get install g++`"


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def built() -> Path:
    """The library for this torch; compiled the first time, by one process while others wait."""
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    sources = [path.read_text(encoding="utf-8") for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".h")]
    key = hashlib.sha256("\n".join([torch.__version__, str(abi), *sources]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("FEDTEST_BUILD_DIR") or Path(tempfile.gettempdir()) / f"fedtest-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"fedtest-{key}.so"
    if not target.exists():
        with open(folder / "lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(target, abi)
    return target


def _compile(target: Path, abi: int) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths  # it loads half a second of setuptools

    found = compiler()
    if found is None:
        raise RuntimeError(INSTALL)
    temporary = target.with_suffix(".tmp")
    flags = ["-O1", "-g0", "-std=c++17", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    includes = [f"-I{path}" for path in include_paths() if "torch" in path]
    libraries = [word for path in library_paths() for word in (f"-L{path}", f"-Wl,-rpath,{path}")]
    command = [found, *flags, *includes, str(HERE / "device.cpp"), "-o", str(temporary), *libraries]
    done = subprocess.run([*command, "-lc10", "-ltorch_cpu", "-ltorch"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{found} failed:\n{done.stderr[-6000:]}")
    os.replace(temporary, target)
