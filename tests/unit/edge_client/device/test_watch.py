"""What a worker may still use while other programs take memory. Sizes in meminfo are kB of 1024 bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.device.private_memory import process_memory
from edge_client.device.watch import MemoryWatch, count_oom_kills

MIB = 2**20
MOST = 480_000_000


def _meminfo(root: Path, available_bytes: int, total_bytes: int = 1_024_000_000) -> Path:
    (root / "proc").mkdir(exist_ok=True)
    text = f"MemTotal: {total_bytes // 1024} kB\nMemAvailable: {available_bytes // 1024} kB\n"
    (root / "proc/meminfo").write_text(text)
    return root


@pytest.fixture(scope="module")
def holder() -> Iterator[int]:
    """The id of a process that holds 100 MiB of its own."""
    code = "block = bytearray(b'x') * (100 * 2**20)\nprint(len(block), flush=True)\ninput()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process.pid
    process.communicate(b"\n")


@pytest.mark.parametrize(
    ("available", "budget"),
    [(1_024_000_000, MOST), (729_088_000, MOST), (640_000_000, 409_600_000), (128_000_000, 0), (0, 0)],
)
def test_the_budget_follows_the_free_memory_but_is_never_more_than_usual(
    tmp_path: Path, available: int, budget: int
) -> None:
    """80 % of what is available beyond 128 MB: 0.8 x 512 MB = 409.6 MB; 480 are the most."""
    assert MemoryWatch(MOST, limit=None, root=_meminfo(tmp_path, available)).budget_bytes() == budget


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_workers_own_memory_is_not_taken_by_others(tmp_path: Path, holder: int) -> None:
    """100 MiB and an interpreter of at most 30 are counted as free, at 80 %; a process that is gone has none."""
    watch = MemoryWatch(MOST, limit=None, root=_meminfo(tmp_path, 400_000_000))
    alone = watch.budget_bytes()
    assert alone == (400_000_000 - 128_000_000) * 8 // 10
    assert 0.8 * 100 * MIB <= watch.budget_bytes(holder) - alone <= 0.8 * 130 * MIB
    assert watch.budget_bytes(2**22 + 1) == alone


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_control_group_counts_without_the_worker(tmp_path: Path, holder: int) -> None:
    """200 of 300 MB are used: 100 are left, and with the worker's own again all that it holds in RAM."""
    group = _meminfo(tmp_path, 1_024_000_000) / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    for name, text in (("cgroup.controllers", "memory"), ("memory.max", 3 * 10**8), ("memory.current", 2 * 10**8)):
        (group / name).write_text(f"{text}\n")
    watch = MemoryWatch(MOST, limit=None, root=tmp_path)
    assert watch.budget_bytes() == 10**8
    assert watch.budget_bytes(holder) - 10**8 == pytest.approx(process_memory(holder).private_bytes, abs=MIB)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_owners_limit_holds_until_the_system_is_in_danger(tmp_path: Path, holder: int) -> None:
    """The reserve is 128 MB. Down to 64 MB all is as the owner wants; below, the worker gives back what is missing."""
    watch = MemoryWatch(MOST, limit=MOST, root=_meminfo(tmp_path, 64_000_000))
    assert watch.budget_bytes(holder) == MOST
    _meminfo(tmp_path, 63_488_000)
    assert watch.budget_bytes() == 0
    missing = 128_000_000 - 63_488_000
    assert watch.budget_bytes(holder) == pytest.approx(process_memory(holder).private_bytes - missing, abs=MIB)


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\n", "MemTotal: x kB\nMemAvailable: 1 kB\n"])
def test_memory_that_cannot_be_read_is_no_reason_to_shrink(tmp_path: Path, text: str | None) -> None:
    """It may be written at this moment; where there never is one, only the owner's limit exists."""
    if text is not None:
        (_meminfo(tmp_path, 0) / "proc/meminfo").write_text(text)
    assert MemoryWatch(MOST, limit=None, root=tmp_path).budget_bytes() == MOST


@pytest.mark.parametrize(("text", "count"), [("nr_x 7\noom_kill 3\ny 1\n", 3), ("nr_x 7\n", None), (None, None)])
def test_the_kernel_tells_how_many_it_killed(tmp_path: Path, text: str | None, count: int | None) -> None:
    """In vmstat; old kernels do not."""
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/vmstat").write_text(text)
    assert count_oom_kills(tmp_path) == count
