"""What a process loads once."""

from __future__ import annotations

from edge_client.config.device_file import DataSection
from edge_client.worker.process_cache import ProcessCache


def test_equal_keys_are_loaded_once() -> None:
    """Two equal records are one key; another kind or another value is another one: three loads for four calls."""
    cache, loads = ProcessCache(), list[str]()

    def load() -> str:
        loads.append("load")
        return f"value {len(loads)}"

    digits = DataSection(source="digits", part=(0, 4))
    assert cache.once("data", [digits, "a"], load) == "value 1"
    assert cache.once("data", [DataSection(source="digits", part=(0, 4)), "a"], load) == "value 1"
    assert cache.once("rows", [digits, "a"], load) == "value 2"
    assert cache.once("data", [DataSection(source="digits", part=(1, 4)), "a"], load) == "value 3"


def test_a_value_of_none_is_loaded_once_too() -> None:
    """A warm-up returns nothing, and must not be repeated."""
    cache, loads = ProcessCache(), list[int]()
    for _ in range(2):
        assert cache.once("warm", ["run", "full"], lambda: loads.append(1)) is None
    assert loads == [1]
