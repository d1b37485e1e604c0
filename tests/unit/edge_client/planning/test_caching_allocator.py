"""The rules of CUDA's caching allocator, against cases by hand, PyTorch's own tests and a public snapshot."""

from __future__ import annotations

import pytest

from edge_client.planning.caching_allocator import MIB, CachingAllocator, Event, OutOfReserveError, replay


def peak_reserved(events: list[Event]) -> int:
    return replay(events).peak_reserved_bytes


@pytest.mark.parametrize(
    ("size", "num_segments_bytes"),
    [
        (512, 2 * MIB),
        (MIB, 4 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 40 * MIB),
        (10 * MIB + 512, 36 * MIB),
    ],
)
def test_three_equal_tensors_reserve_what_pytorchs_own_test_counts(size: int, num_segments_bytes: int) -> None:
    """test_cuda.py, test_graph_memory_stats_and_use_result_after_destroy_graph: its table of sizes and segments."""
    assert peak_reserved([(number, size) for number in range(3)]) == num_segments_bytes


def test_a_public_snapshot_has_the_same_blocks() -> None:
    """discuss.pytorch.org 178671: W [1000, 10], b, X and X @ W + b, with cuBLAS's workspace of 8519680 bytes."""
    found = replay([("W", 40000), ("b", 40), ("X", 4000), ("workspace", 8519680), ("XW", 40), ("y", 40), ("XW", -1)])
    assert found.reserved_bytes == 22 * MIB
    assert found.allocated_bytes == 40448 + 512 + 4096 + 512 + 8519680
    assert found.free_sizes() == ([512, 2051072], [12451840])


def test_the_large_pool_splits_when_more_than_a_mebibyte_is_left() -> None:
    """18 of 20 MiB leave 2: split. 11 of 12 leave 1, not more: the whole block counts as allocated."""
    found = replay([(1, 19 * MIB), (1, -1), (2, 18 * MIB)])
    assert (found.reserved_bytes, found.allocated_bytes) == (20 * MIB, 18 * MIB)
    found = replay([(1, 12 * MIB), (1, -1), (2, 11 * MIB)])
    assert (found.reserved_bytes, found.allocated_bytes) == (12 * MIB, 12 * MIB)


def test_the_small_pool_splits_down_to_512_bytes() -> None:
    """1 MiB and 512 B less in a segment of 2 MiB leave 512 B, which is a block of its own."""
    found = replay([(1, MIB), (2, MIB - 512)])
    assert (found.reserved_bytes, found.free_sizes()) == (2 * MIB, ([512], []))


def test_freed_neighbours_grow_together() -> None:
    """4 + 4 + 4 + 8 MiB fill a segment of 20; the first two together take 8 again, the first and the third do not."""
    full: list[Event] = [(1, 4 * MIB), (2, 4 * MIB), (3, 4 * MIB), (4, 8 * MIB)]
    assert peak_reserved([*full, (1, -1), (2, -1), (5, 8 * MIB)]) == 20 * MIB
    assert peak_reserved([*full, (1, -1), (3, -1), (5, 8 * MIB)]) == 40 * MIB


def test_a_small_tensor_takes_no_block_of_the_large_pool() -> None:
    """20 MiB lie free, 2 more are reserved for 512 bytes."""
    assert peak_reserved([(1, 8 * MIB), (1, -1), (2, 512)]) == 22 * MIB


def test_a_limit_gives_cached_segments_back_first() -> None:
    """12 + 12 MiB; one is free: 26 fit in 40 when it has gone back, 4 more need a segment of 20 and do not."""
    allocator = CachingAllocator(40 * MIB)
    for number in range(2):
        allocator.allocate(number, 12 * MIB)
    allocator.free(0)
    allocator.allocate(2, 26 * MIB)
    assert (allocator.reserved_bytes, allocator.num_retries) == (38 * MIB, 1)
    with pytest.raises(OutOfReserveError, match="a segment of 20971520 bytes does not fit in 41943040 bytes, of which"):
        allocator.allocate(3, 4 * MIB)


def test_what_is_reserved_does_not_follow_what_is_allocated() -> None:
    """Larger tensors reserve less: 4 of just below 10 MiB take two shared segments, 3 of 12 MiB one each."""
    assert peak_reserved([(number, 11 * MIB - 512) for number in range(4)]) == 48 * MIB
    assert peak_reserved([(number, 10 * MIB - 512) for number in range(4)]) == 40 * MIB
    assert peak_reserved([(number, 7 * MIB) for number in range(5)]) == 60 * MIB


def test_nothing_is_reserved_for_no_bytes() -> None:
    """An empty tensor has no storage; freeing it is nothing either."""
    assert replay([("empty", 0), ("empty", -1)]) == CachingAllocator()
