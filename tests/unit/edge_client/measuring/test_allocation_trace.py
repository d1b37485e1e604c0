"""Reading traces of allocations that are made by hand: at 2 samples and at 4, so that slopes are easy to see."""

from __future__ import annotations

from edge_client.measuring.allocation_trace import BATCH, Trace, TracePair, _drop_first_buffers


def _trace(num_samples: int, *, moments: int = 2) -> Trace:
    """A piece that begins at 100 bytes: 10 per sample until `pre`, then `moments` allocations of one per sample."""
    trace = Trace()
    trace.add(BATCH, 100.0, [], 1.0)
    trace.add("pre", 100.0 + 10 * num_samples, [100.0 + 10 * num_samples], 2.0)
    live = [100.0 + 10 * num_samples + number * num_samples for number in range(1, moments + 1)]
    trace.add("post", live[-1], live, 2.0 + num_samples)
    return trace


def test_a_part_begins_with_its_samples_at_zero() -> None:
    """Two pieces one after another: each has its own marks, above what was in use when it began."""
    trace = _trace(2)
    for number, name in enumerate((BATCH, "pre")):
        trace.add(name, 124.0 + number, [124.0 + number], 9.0 + number)
    first, second = trace.parts()
    assert (first.marks, first.live) == ([BATCH, "pre", "post"], [0.0, 20.0, 24.0])
    assert (second.marks, second.live, second.moments[1]) == ([BATCH, "pre"], [0.0, 1.0], [1.0])


def test_between_two_marks_are_all_moments() -> None:
    """From `pre`, where 20 are in use, two allocations of 2 bytes."""
    assert _trace(2).parts()[0].between("pre", "post") == [20.0, 22.0, 24.0]


def test_two_batches_make_lines() -> None:
    """10 per sample at `pre`, 11 and 12 after its allocations; a second per sample; nothing at an unknown mark."""
    pair = TracePair((2, 4), _trace(2).parts()[0], _trace(4).parts()[0])
    assert pair.live("pre") == (10, 0)
    assert pair.moments("pre", "post") == [(10, 0), (11, 0), (12, 0)]
    assert pair.seconds("pre", "post") == (1, 0)
    assert (pair.has("grad"), pair.moments("grad", "post"), pair.seconds("grad", "post")) == (False, [], (0, 0))


def test_with_another_number_of_allocations_only_the_worst_moments_count() -> None:
    """Another kernel was chosen for the larger batch: 24 at 2 samples, 52 at 4, so 14 per sample less 4."""
    pair = TracePair((2, 4), _trace(2).parts()[0], _trace(4, moments=3).parts()[0])
    assert pair.moments("pre", "post") == [(14, -4)]


def test_the_first_buffer_of_a_batchnorms_backward_is_gone_before_the_second_comes() -> None:
    """+8 +8 -8 during the backward becomes +8 -8 +8: 16 at once never were; outside of it nothing changes."""
    events = [(1, "", 8), (2, "", 8), (3, "", -8), (10, "", 8), (11, "", 8), (12, "", -8)]
    _drop_first_buffers(events, [(1, 4)])
    assert [num_bytes for _, _, num_bytes in events] == [8, -8, 8, 8, 8, -8]
