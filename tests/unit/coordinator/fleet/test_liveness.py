"""Who was heard lately."""

from __future__ import annotations

import random

from coordinator.fleet.liveness import Liveness


def test_a_device_is_present_until_its_time_is_over() -> None:
    """25 s after its last message, and not later; a message in between counts from its own time."""
    liveness = Liveness(25.0)
    liveness.heard("a", 0.0)
    assert liveness.present(25.0) == {"a"}
    liveness.heard("a", 20.0)
    assert liveness.present(45.0) == {"a"}
    assert liveness.present(45.1) == frozenset()


def test_the_set_is_the_same_object_as_long_as_nothing_has_changed() -> None:
    """Whoever has looked at it need not look again."""
    liveness = Liveness(25.0)
    liveness.heard("a", 0.0)
    before = liveness.present(1.0)
    liveness.heard("a", 2.0)
    assert liveness.present(20.0) is before
    liveness.heard("b", 21.0)
    assert liveness.present(21.0) == {"a", "b"}


def test_any_history_gives_what_the_definition_says() -> None:
    """500 random steps of ten devices (seed 3), against: heard at most 7 s ago, and not left since."""
    rng, liveness, heard, now = random.Random(3), Liveness(7.0), dict[str, float](), 0.0
    for _ in range(500):
        now += rng.uniform(0.0, 2.0)
        device = f"d{rng.randrange(10)}"
        if rng.random() < 0.2:
            liveness.left(device)
            heard.pop(device, None)
        else:
            liveness.heard(device, now)
            heard[device] = now
        assert liveness.present(now) == {name for name, at in heard.items() if now <= at + 7.0}
