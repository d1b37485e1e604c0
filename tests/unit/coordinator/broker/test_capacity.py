"""The memory that the broker gets, in numbers derived by hand."""

from __future__ import annotations

from coordinator.broker.capacity import BrokerCapacity, reload_s

GIB = 1 << 30


def test_a_small_fleet_keeps_the_setting_that_saves_cpu_time() -> None:
    """Up to 3,000 devices: 256 MiB, collected at 400 %."""
    capacity = BrokerCapacity.plan(3000, has_tls=False, machine_bytes=16 * GIB)
    assert capacity.environment() == {"GOGC": "400", "GOMEMLIMIT": "256MiB"}
    assert capacity.num_devices == 3000


def test_a_large_fleet_gets_memory_for_a_quarter_more_devices_than_are_enrolled() -> None:
    """10,000: planned for 12,500, 64 + 0.08 * 12,500 = 1,064 MiB; with TLS 64 + 0.1 * 12,500 = 1,314 MiB."""
    plain = BrokerCapacity.plan(10_000, has_tls=False, machine_bytes=16 * GIB)
    with_tls = BrokerCapacity.plan(10_000, has_tls=True, machine_bytes=16 * GIB)
    assert plain.num_devices == with_tls.num_devices == 12_500
    assert plain.environment() == {"GOGC": "100", "GOMEMLIMIT": "1064MiB"}
    assert with_tls.environment() == {"GOGC": "100", "GOMEMLIMIT": "1314MiB"}


def test_the_next_device_after_three_thousand_changes_the_setting() -> None:
    """3,001: planned for ceil(3,751.25) = 3,752, 64 + 300.16 = 364.16, so 365 MiB."""
    capacity = BrokerCapacity.plan(3001, has_tls=False, machine_bytes=16 * GIB)
    assert (capacity.num_devices, capacity.memory_mib) == (3752, 365)


def test_the_broker_never_gets_more_than_a_quarter_of_the_machine() -> None:
    """2 GiB: 512 MiB instead of 1,064."""
    assert BrokerCapacity.plan(10_000, has_tls=False, machine_bytes=2 * GIB).memory_mib == 512


def test_the_time_for_a_reload_grows_with_the_users() -> None:
    """5 s, and one more for every 500 users: 25 s for ten thousand."""
    assert reload_s(0) == 5
    assert reload_s(10_000) == 25
