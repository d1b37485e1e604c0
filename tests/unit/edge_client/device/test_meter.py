"""The memory meter."""

from __future__ import annotations

import mmap
import os
import sys

import pytest

from edge_client.device import meter

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
def test_a_peak_can_begin_anew() -> None:
    """64 MiB written and dropped are gone from it."""
    block = bytearray(os.urandom(1)) * (64 * 2**20)
    del block
    assert meter.reset_peak()
    assert meter.peak_rss_bytes() < meter.rss_bytes() + 20 * 2**20


@linux
def test_data_bytes_are_what_the_limit_counts() -> None:
    """Private memory is there, and grows by a large block whether it is touched or not."""
    before = meter.data_bytes()
    block = mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have one of that size
    assert meter.data_bytes() - before >= len(block)
