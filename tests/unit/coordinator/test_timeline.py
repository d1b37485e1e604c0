"""The spans of a round, from the coordinator's moments and the durations that devices report."""

from __future__ import annotations

import pytest

from coordinator.timeline import Span, device_spans, known_phases, round_spans

MOMENTS = {"assign": 0.1, "accept": 0.2, "fetch": 0.9, "offer": 10.0, "arrive": 10.5, "check": 10.75}


def _spans(*items: tuple[str, float, float]) -> tuple[Span, ...]:
    return tuple(Span(name=name, begins_s=begin, ends_s=end) for name, begin, end in items)


def test_a_devices_phases_follow_its_acceptance_and_the_rest_is_writing() -> None:
    """1 + 0.5 + 0.25 + 2 + 6 s after 0.2 is 9.95; from there to the offer at 10 it writes."""
    phases = {"fetch": 1.0, "start": 0.5, "load": 0.25, "evaluate": 2.0, "train": 6.0}
    assert device_spans(MOMENTS, phases) == _spans(
        ("send", 0.1, 0.2),
        ("fetch", 0.2, 1.2),
        ("start", 1.2, 1.7),
        ("load", 1.7, 1.95),
        ("evaluate", 1.95, 3.95),
        ("train", 3.95, 9.95),
        ("write", 9.95, 10.0),
        ("upload", 10.0, 10.5),
        ("check", 10.5, 10.75),
    )


def test_no_span_of_a_device_ends_after_its_offer() -> None:
    """A device that claims an hour of loading has trained for no time at all before its offer came."""
    spans = device_spans(MOMENTS, {"load": 3600.0, "train": 5.0})
    assert spans[1:3] == _spans(("load", 0.2, 10.0), ("upload", 10.0, 10.5))


def test_a_device_of_an_earlier_version_has_worked() -> None:
    """Without phases, only its requests for parts tell what it did."""
    fetched, alone = device_spans(MOMENTS, {}), device_spans({"accept": 0.2, "offer": 10.0}, {})
    assert fetched[1:3] == _spans(("fetch", 0.2, 0.9), ("work", 0.9, 10.0))
    assert alone == _spans(("work", 0.2, 10.0))


def test_a_device_without_an_offer_was_only_sent_its_assignment() -> None:
    """It declined, or is late; one that never answered has no span."""
    assert device_spans({"assign": 0.0, "accept": 0.5}, {}) == _spans(("send", 0.0, 0.5))
    assert device_spans({"assign": 0.0}, {}) == ()


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ({"train": 1.0, "load": 0.0}, {"train": 1.0, "load": 0.0}),
        ({"train": -1.0, "load": 1e9, "sleep": 3.0, "<b>": 1.0}, {}),
        (None, {}),
    ],
)
def test_only_phases_that_can_be_are_kept(told: dict[str, float] | None, known: dict[str, float]) -> None:
    """Devices may say anything: negative seconds, years, names of their own."""
    assert known_phases(told) == known


def test_a_round_is_folded_committed_and_announced_after_its_devices() -> None:
    """A round that only evaluates ends with its announcement; one that is under way has nothing yet."""
    moments = {"pause": 0.3, "freeze": 11.0, "fold": 11.5, "commit": 11.6, "announce": 11.7}
    assert round_spans(moments) == _spans(
        ("devices", 0.0, 11.0), ("fold", 11.0, 11.5), ("commit", 11.5, 11.6), ("announce", 11.6, 11.7)
    )
    assert round_spans({"announce": 4.0}) == _spans(("devices", 0.0, 4.0))
    assert round_spans({"pause": 1.0}) == ()
