"""The memory meter and the device profile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edge_client.device import meter
from edge_client.device.profile import measure
from edge_client.errors import MachineError

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
def test_the_peak_remembers_what_the_present_forgot() -> None:
    """64 MiB written and dropped: in the peak, not in the RSS."""
    before = meter.rss_bytes()
    block = bytearray(os.urandom(1)) * (64 * 2**20)
    del block
    assert meter.peak_rss_bytes() >= before + 60 * 2**20
    assert meter.rss_bytes() < before + 20 * 2**20


@linux
def test_data_bytes_are_what_the_limit_counts() -> None:
    """Private memory is there, and grows by a large block whether it is touched or not."""
    before = meter.data_bytes()
    block = bytearray(64 * 2**20)
    assert meter.data_bytes() - before >= len(block)


def _meminfo(path: Path, total_kb: int, available_kb: int) -> Path:
    path.write_text(f"MemTotal: {total_kb} kB\nMemFree: 1 kB\nMemAvailable: {available_kb} kB\n")
    return path


@linux
def test_the_budget_is_four_fifths_of_what_is_free_beyond_the_reserve(tmp_path: Path) -> None:
    """4,000,000 kB in all: reserve 10 % = 409.6 MB; (2,048 - 409.6) MB * 0.8 = 1,310.72 MB."""
    profile = measure(None, meminfo=_meminfo(tmp_path / "m", 4_000_000, 2_000_000))
    assert profile.budget_bytes == 1_310_720_000
    assert profile.memory_bytes == 4_096_000_000
    assert profile.cores >= 1


@linux
def test_a_small_board_keeps_128_mb_and_never_owes_memory(tmp_path: Path) -> None:
    """500,000 kB in all, 300,000 kB free: (307.2 - 128) MB * 0.8 = 143.36 MB; with 100,000 kB free: 0."""
    assert measure(None, meminfo=_meminfo(tmp_path / "m", 500_000, 300_000)).budget_bytes == 143_360_000
    assert measure(None, meminfo=_meminfo(tmp_path / "m", 500_000, 100_000)).budget_bytes == 0


def test_a_limit_is_the_budget() -> None:
    """The owner decides."""
    assert measure(123_456_789).budget_bytes == 123_456_789


@linux
def test_an_unreadable_meminfo_says_what_to_set(tmp_path: Path) -> None:
    """Some containers hide it."""
    (tmp_path / "m").write_text("MemTotal: many\n")
    with pytest.raises(MachineError, match=r"limits\.memory"):
        measure(None, meminfo=tmp_path / "m")
