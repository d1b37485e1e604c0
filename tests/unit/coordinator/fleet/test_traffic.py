"""Bytes of a run, until they are stored."""

from __future__ import annotations

from coordinator.fleet.traffic import TrafficMeter


def test_bytes_add_up_by_device_until_they_are_taken() -> None:
    """a: 10 + 5 up and 200 down; once taken, it counts from zero, and b keeps its own."""
    meter = TrafficMeter()
    meter.count("a", up=10)
    meter.count("a", up=5, down=200)
    meter.count("b", down=1)
    assert meter.take("a") == {"a": (15, 200)}
    assert meter.take("a") == {}
    assert meter.take_all() == {"b": (0, 1)}
    assert meter.moved == {}
