"""Records and their strict form as plain maps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from rows import PLAN, report

from edge_client.errors import PayloadError
from edge_client.records import DeviceProfile, Evaluation, PartRef, Report, TrainingPlan, from_map, is_id, later, to_map

PROFILE = {"budget_bytes": 5, "memory_bytes": 6, "cores": 2, "kind": "jetson", "machine": "Orin"}


def _refused(cls: type, data: object) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        from_map(cls, data)
    return caught.value


def test_a_record_comes_back_from_its_map() -> None:
    """Nested records, tuples of tuples and maps."""
    plan = TrainingPlan(microbatch=4, budget_bytes=1, predicted_bytes=2, groups=(("a", "b"), ("c",)))
    told = report(plan=plan, scalars={"loss": 0.5}, evaluation=Evaluation(num_samples=3, num_correct=2, loss_sum=1.0))
    assert from_map(Report, to_map(told)) == told
    assert to_map(plan)["groups"] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("budget_bytes", True, "malformed"),  # a bool is not an int
        ("budget_bytes", 5.0, "malformed"),
        ("budget_bytes", "5", "malformed"),
        ("budget_bytes", None, "malformed"),
        ("budget_bytes", -1, "range"),
        ("budget_bytes", 2**53 + 1, "range"),
        ("kind", "Not Lower", "malformed"),
        ("kind", "jetson\n", "malformed"),
        ("kind", b"jetson", "malformed"),
        ("machine", "m" * 65, "malformed"),
        ("colour", "red", "malformed"),  # unknown
    ],
)
def test_a_value_of_another_type_or_range_is_refused(key: str, value: object, code: str) -> None:
    """And the message names the field."""
    error = _refused(DeviceProfile, PROFILE | {key: value})
    assert error.code == code
    assert key in error.detail


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e301, 10**400])
def test_a_float_is_finite(value: float) -> None:
    """Also as an int that no float can hold."""
    assert _refused(Evaluation, {"num_samples": 1, "num_correct": 1, "loss_sum": value}).code == "not_finite"


def test_an_int_may_stand_for_a_float_but_a_bool_may_not() -> None:
    """TOML and msgpack write 1 for 1.0."""
    made = from_map(Evaluation, {"num_samples": 1, "num_correct": 1, "loss_sum": 2})
    assert isinstance(made.loss_sum, float)
    assert _refused(Evaluation, {"num_samples": 1, "num_correct": 1, "loss_sum": True}).code == "malformed"


def test_a_newer_peer_may_add_a_key_that_starts_with_x() -> None:
    """It is ignored."""
    assert from_map(DeviceProfile, PROFILE | {"x-new": [1]}) == DeviceProfile(**PROFILE)


def test_a_missing_key_is_named_unless_it_has_a_default() -> None:
    """budget_bytes has none."""
    assert "budget_bytes" in _refused(DeviceProfile, {"cores": 1}).detail
    assert from_map(DeviceProfile, {"budget_bytes": 1}).kind == "host"


@pytest.mark.parametrize("data", [None, [], "text", 3, {1: 2}, {b"budget_bytes": 1}])
def test_anything_but_a_map_with_text_keys_is_refused(data: object) -> None:
    """Whatever a peer sends."""
    assert _refused(DeviceProfile, data).code == "malformed"


@pytest.mark.parametrize(
    "changes", [{"groups": "abc"}, {"groups": [["a"], "b"]}, {"groups": [[1]]}, {"microbatch": 0}, {"recompute": 1}]
)
def test_a_plan_is_checked_to_its_last_name(changes: dict[str, Any]) -> None:
    """Lists of lists of text."""
    _refused(TrainingPlan, to_map(PLAN) | changes)


@pytest.mark.parametrize("text", ["", "a/b", "a" * 65, "ä", "a b", "a\n", "+", "#", "."])
def test_what_is_no_id(text: str) -> None:
    """Nothing that means something in a topic or in a path."""
    assert not is_id(text)
    _refused(PartRef, {"key": "k", "sha256": text, "length": 1})


def test_a_part_has_bytes() -> None:
    """One without could have any hash, and would never arrive."""
    assert _refused(PartRef, {"key": "k", "sha256": "0" * 64, "length": 0}).code == "range"


def test_what_is_an_id() -> None:
    """Letters, digits, dash and underscore, up to 64."""
    assert is_id("Jetson_3-b")
    assert is_id("a" * 64)


@dataclass(frozen=True, kw_only=True)
class _Newer:
    """A record that got two fields after its first release."""

    name: str
    warm: bool = later(False)
    edition: int = later(0, key="x-edition")


def test_a_later_field_does_not_travel_while_it_has_its_default() -> None:
    """So that an earlier version, which refuses unknown keys, reads what it knows."""
    assert to_map(_Newer(name="a")) == {"name": "a"}
    assert from_map(_Newer, {"name": "a"}) == _Newer(name="a")


def test_a_later_field_travels_under_its_key() -> None:
    """`x-edition` is ignored by an earlier version; `warm` is not, so it goes only to peers that know it."""
    record = _Newer(name="a", warm=True, edition=1)
    assert to_map(record) == {"name": "a", "warm": True, "x-edition": 1}
    assert from_map(_Newer, to_map(record)) == record
    assert _refused(_Newer, {"name": "a", "edition": 1}).code == "malformed"  # it has no other key
