"""Which devices a run asks, and which it does not ask any more."""

from __future__ import annotations

from rows import run_file

from coordinator.rounds.candidates import Candidates

SECTION = run_file(devices={"min": 1, "fraction": 0.5}).devices


def _candidates(names: str, *, drop_rate: float = 0.0, asks_spares: bool = True) -> Candidates:
    candidates = Candidates(drop_rate=drop_rate, asks_spares=asks_spares)
    candidates.online = frozenset(names)
    return candidates


def test_a_lasting_reason_excludes_a_device_until_it_returns() -> None:
    """nothing_fits stays until the device restarts; crashed may be better next time."""
    candidates = _candidates("cab")
    candidates.declined("a", "nothing_fits")
    candidates.declined("b", "crashed")
    assert candidates.available() == ["b", "c"]
    assert candidates.excluded == {"a": "nothing_fits"}
    candidates.returned("a")
    assert candidates.available() == ["a", "b", "c"]


def test_a_device_that_keeps_its_results_still_trains() -> None:
    """not_shared concerns evaluations alone, and a restart of the device resets it."""
    candidates = _candidates("ab")
    candidates.declined("a", "not_shared")
    assert candidates.available() == ["a", "b"]
    assert not candidates.shares_results("a")
    candidates.returned("a")
    assert candidates.shares_results("a")


def test_a_removed_device_is_not_available() -> None:
    """Until the next tick names the devices that are connected."""
    candidates = _candidates("ab")
    candidates.removed("a")
    assert candidates.available() == ["b"]


def test_a_cohort_has_spares_unless_nobody_drops_out() -> None:
    """Half of ten: goal 5, quorum 4; a simulation asks exactly 5, a fleet that loses a third asks all ten."""
    exact = _candidates("abcdefghij", asks_spares=False).cohort(SECTION, seed=1)
    assert (exact.goal, exact.quorum, len(exact.devices)) == (5, 4, 5)
    lossy = _candidates("abcdefghij", drop_rate=0.5).cohort(SECTION, seed=1)
    assert (lossy.goal, lossy.quorum, len(lossy.devices)) == (5, 4, 10)


def test_a_cohort_depends_on_its_seed_alone() -> None:
    """The same seed chooses the same devices; another one chooses others."""
    cohorts = [_candidates("abcdefghij", asks_spares=False).cohort(SECTION, seed=seed).devices for seed in (1, 1, 2)]
    assert cohorts[0] == cohorts[1] != cohorts[2]


def test_unasked_devices_are_connected_and_not_excluded() -> None:
    """Of a to d, a was asked, b is excluded."""
    candidates = _candidates("dcab")
    candidates.declined("b", "no_data")
    assert candidates.unasked({"a"}) == ["c", "d"]
