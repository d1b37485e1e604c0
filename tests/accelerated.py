"""The accelerator that tests train on: a GPU that FEDFIT_TEST_ACCELERATOR names, else the test accelerator.

`tests/accelerator` has the device that stands in for a GPU; it needs a C++ compiler once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fedtest_build import INSTALL, compiler

from edge_client.device.accelerator import Accelerator, choose

__all__ = [
    "FOLDER",
    "discrete",
    "environment",
    "is_real",
    "needs_accelerator",
    "needs_test_accelerator",
    "register",
    "unified",
]

FOLDER = Path(__file__).parent / "accelerator"
_NAMED = os.environ.get("FEDFIT_TEST_ACCELERATOR", "")


def is_real() -> bool:
    """Whether the tests run on a device that somebody can buy."""
    return bool(_NAMED)


def _missing() -> str:
    """Why there is none; empty if there is one."""
    if is_real():
        import torch

        kind = _NAMED.partition(":")[0]
        module = getattr(torch, kind, None)
        return "" if module is not None and module.is_available() else f"torch finds no {kind} device here"
    return "" if compiler() is not None else INSTALL


def _mark(skip: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(skip), reason=skip or "there is one")


def needs_accelerator() -> list[pytest.MarkDecorator]:
    """Marks of tests that run on any accelerator, a GPU included."""
    return [pytest.mark.accelerator, _mark(_missing())]


def needs_test_accelerator() -> list[pytest.MarkDecorator]:
    """Marks of tests that look into the test accelerator or play its world."""
    skip = "" if compiler() is not None else INSTALL
    return [pytest.mark.accelerator, _mark("a GPU's memory cannot be played" if is_real() else skip)]


def discrete() -> Accelerator:
    """A device with memory of its own."""
    return _chosen("fedtest:0")


def unified() -> Accelerator:
    """A device that uses the host's memory."""
    return _chosen("fedtest:1")


def register() -> None:
    """Make the test accelerator known to this process, unless tests run on a GPU or nothing can compile it."""
    if not is_real() and compiler() is not None:
        import fedtest

        fedtest.register()


def _chosen(name: str) -> Accelerator:
    return choose(_NAMED if is_real() else name).accelerator


def environment(**of_test: str) -> dict[str, str]:
    """Of a process that finds the test accelerator as soon as it loads torch."""
    path = os.pathsep.join(
        word for word in (str(FOLDER), str(FOLDER / "autoload"), os.environ.get("PYTHONPATH")) if word
    )
    return os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"} | of_test


if str(FOLDER) not in sys.path:  # what pytest's `pythonpath` does for its own process
    sys.path.append(str(FOLDER))
