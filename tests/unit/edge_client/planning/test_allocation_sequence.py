"""What a recorded sequence of allocations would reserve, at other sizes."""

from __future__ import annotations

import pytest

from edge_client.errors import PayloadError
from edge_client.planning.allocation_sequence import (
    GIVEN_BACK,
    WORKSPACE_BYTES,
    Recorded,
    Sizes,
    bound_bytes,
    pair,
    reserved,
)

MIB = 2**20
KEY = "0" * 64
SAMPLES = {"whole": 6, "rest": 3, "last": 4, "chunk": 6}


def _doubled(small: Recorded) -> Recorded:
    """The same with twice the samples in each piece, where every byte belongs to a sample."""
    events = tuple((number, 2 * size, piece) for number, size, piece in small.events)
    return Recorded(events=events, samples={name: 2 * count for name, count in small.samples.items()})


def test_sizes_follow_the_samples_of_their_piece() -> None:
    """6 MiB for 6 samples are 1 MiB for each: 32 samples take 32 MiB, and a rest of 12 takes 12 MiB after it."""
    small = Recorded(
        events=((1, 6 * MIB, "whole"), (1, -6 * MIB, "whole"), (2, 3 * MIB, "rest"), (2, -3 * MIB, "rest")),
        samples=SAMPLES,
    )
    sequence = pair(KEY, [], small, _doubled(small))
    sizes = Sizes.of(batch=44, microbatch=32, num_samples=0)
    assert (sizes.rest, sizes.last) == (12, 0)
    assert [size for _, size in sequence.events(sizes)] == [32 * MIB, -1, 12 * MIB, -1]
    # the 12 MiB are taken from the free segment of 32 MiB: the smallest free block that is large enough
    assert reserved(sequence, sizes).peak_reserved_bytes == 32 * MIB


def test_a_line_does_not_fall_and_keeps_its_constant() -> None:
    """100 bytes for 6 samples and 160 for 12 are 10 for each and 40 beside; 100 and 90 stay 100."""
    small = Recorded(events=((1, 100, "whole"), (2, 100, "whole")), samples=SAMPLES)
    large = Recorded(events=((1, 160, "whole"), (2, 90, "whole")), samples={n: 2 * c for n, c in SAMPLES.items()})
    sequence = pair(KEY, [], small, large)
    assert [size for _, size in sequence.events(Sizes(microbatch=100))] == [1040, 100]


def test_what_lasts_is_reserved_first() -> None:
    """Weights of 3 MiB open a segment of 20 MiB, in whose rest four of 4 MiB fit; a fifth opens another one."""
    small = Recorded(events=tuple((number, 6 * MIB, "whole") for number in range(1, 6)), samples=SAMPLES)
    sequence = pair(KEY, [3 * MIB], small, _doubled(small))
    assert reserved(sequence, Sizes(microbatch=4)).peak_reserved_bytes == 40 * MIB


def test_cached_segments_are_given_back_between_phases() -> None:
    """64 MiB of the first phase do not stay beside the 128 MiB of the second."""
    events = ((1, 6 * MIB, "whole"), (1, -6 * MIB, "whole"), (GIVEN_BACK, 0, "whole"), (2, 12 * MIB, "whole"))
    small = Recorded(events=events, samples=SAMPLES)
    sequence = pair(KEY, [], small, _doubled(small))
    assert reserved(sequence, Sizes(microbatch=64)).peak_reserved_bytes == 128 * MIB


@pytest.mark.parametrize(("microbatch", "samples"), [(8, 8), (16, 16), (64, 16)])
def test_frozen_units_take_a_chunk_at_a_time(microbatch: int, samples: int) -> None:
    """16 samples at most."""
    assert Sizes(microbatch=microbatch).samples("chunk") == samples


def test_the_bound_before_the_first_use_is_above_the_replay() -> None:
    """A tenth more for other kernels, and a segment for workspaces: 32 MiB x 1.1 + 20 MiB."""
    small = Recorded(events=((1, 6 * MIB, "whole"),), samples=SAMPLES)
    sequence = pair(KEY, [], small, _doubled(small))
    assert bound_bytes(sequence, Sizes(microbatch=32)) == int(1.1 * 32 * MIB) + WORKSPACE_BYTES


def test_two_recordings_of_different_steps_are_refused() -> None:
    """Nothing could be paired."""
    small = Recorded(events=((1, 100, "whole"),), samples=SAMPLES)
    large = Recorded(events=((1, 100, "whole"), (2, 100, "whole")), samples=SAMPLES)
    with pytest.raises(PayloadError, match="allocate in another order"):
        pair(KEY, [], small, large)
