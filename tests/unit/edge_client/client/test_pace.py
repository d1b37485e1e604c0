"""How long to wait before something is said again."""

from __future__ import annotations

import random

from edge_client.client.pace import Pace


def test_each_pause_is_half_as_long_again_up_to_the_longest() -> None:
    """Without jitter 4, 6, 9, 10, 10 s: 4 x 1.5 x 1.5 x 1.5 is 13.5, and 10 the most; anew it begins with 4."""
    pace = Pace(4.0, 10.0, jitter=lambda low, high: 0.0)
    assert [pace.next_s() for _ in range(5)] == [4.0, 6.0, 9.0, 10.0, 10.0]
    pace.restart()
    assert pace.next_s() == 4.0


def test_the_waits_of_a_fleet_fill_a_pause() -> None:
    """A thousand devices: between 10 and 20 s, and each of its ten seconds has 60 to 140 of them (seed 1)."""
    jitter = random.Random(1).uniform
    waits = [Pace(10.0, 30.0, jitter).next_s() for _ in range(1000)]
    assert all(10.0 <= wait <= 20.0 for wait in waits)
    assert all(60 <= sum(second <= wait < second + 1 for wait in waits) <= 140 for second in range(10, 20))
