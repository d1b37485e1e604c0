"""The budget of a running worker, each in a process of its own: limits and peaks are a process's."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and peaks are the Linux kernel's")

BEGIN = """
import sys
from pathlib import Path
from edge_client.worker import allowance, live_files
from edge_client.device import guard, meter
from edge_client.device.private_memory import process_memory
allowance._LOOK_EVERY_S = 0.0
here, MIB = Path(sys.argv[1]), 2**20
guard.pin_malloc()
def use(size):
    block = bytearray(b"x") * (size * MIB)
"""


def _run(folder: Path, code: str) -> str:
    script = BEGIN + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_was_used_beyond_the_budget_is_noticed_although_it_is_free_again(tmp_path: Path) -> None:
    """64 MiB above the start are allowed; 30 are fine, 100 are not. What came before the beginning does not count."""
    out = _run(
        tmp_path,
        """
        use(200)
        mine = allowance.Allowance(process_memory().private_bytes + 64 * MIB, here)
        mine.begin()
        use(30)
        print(mine.look(), mine.peak_bytes() > mine.budget_bytes)  # the peak that is told has all of it
        use(100)
        try:
            mine.look()
        except MemoryError as error:
            print(str(error).startswith("the worker used "))
        """,
    )
    assert out.split("\n")[:-1] == ["None True", "True"]


def test_an_allocation_far_beyond_the_budget_fails_before_it_happens(tmp_path: Path) -> None:
    """64 MiB and 8 of slack: 128 are refused, and the peak stays where it was."""
    out = _run(
        tmp_path,
        """
        mine = allowance.Allowance(process_memory().private_bytes + 64 * MIB, here)
        mine.begin()
        mine.limit(8 * MIB)
        try:
            use(128)
        except MemoryError:
            print("refused")
        mine.check()
        """,
    )
    assert out == "refused\n"


def test_less_is_heard_once_and_holds(tmp_path: Path) -> None:
    """A larger budget is no news. After it shrank, the 100 MiB of before are forgotten and 40 are refused."""
    out = _run(
        tmp_path,
        """
        start = process_memory().private_bytes
        mine = allowance.Allowance(start + 200 * MIB, here)
        mine.begin()
        use(100)
        live_files.write_budget(here, start + 300 * MIB)
        print(mine.look())
        live_files.write_budget(here, start + 32 * MIB)
        told = mine.look()
        print(told == start + 32 * MIB, mine.look())
        mine.shrink(told, 0)
        mine.check()
        print(mine.budget_bytes == told, mine.peak_bytes() < told)
        try:
            use(40)
        except MemoryError:
            print("refused")
        """,
    )
    assert out.split("\n")[:-1] == ["None", "True None", "True True", "refused"]


def test_where_the_peak_cannot_begin_anew_the_past_is_not_held_against_the_worker(tmp_path: Path) -> None:
    """A kernel that does not reset it: with 200 MiB in the peak, a budget of 64 says nothing."""
    out = _run(
        tmp_path,
        """
        use(200)
        meter.reset_peak = lambda: False
        mine = allowance.Allowance(process_memory().private_bytes + 64 * MIB, here)
        mine.begin()
        mine.check()
        print("fine")
        """,
    )
    assert out == "fine\n"
