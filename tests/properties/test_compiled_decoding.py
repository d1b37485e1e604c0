"""The compiled decoder and the slow one accept the same data, make the same records and refuse with the same words."""

from __future__ import annotations

import typing
from typing import Any

import pytest
from any_record import records
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_client.decoding import MismatchError, decoder
from edge_client.errors import PayloadError
from edge_client.records import Report, WorkOrder, check_value, from_map, to_map
from edge_client.wire import messages

CLASSES: list[Any] = [*typing.get_args(messages.Message), Report, WorkOrder]
_ANYTHING: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=70),
    st.binary(max_size=3),
    st.lists(st.one_of(st.text(max_size=3), st.integers(), st.none()), max_size=3),
    st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), st.integers(), max_size=2),
)


@st.composite
def _nearly(draw: st.DrawFn) -> tuple[Any, Any]:
    """A class and the map of one of its records, with up to two values changed, keys added or keys removed."""
    cls = draw(st.sampled_from(CLASSES))
    data = to_map(draw(records(cls)))
    for _ in range(draw(st.integers(0, 2))):
        place = data
        while True:  # walk to a random depth
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(place[key], (dict, list)) or not place[key] or draw(st.booleans()):
                break
            place = place[key]
        if isinstance(place, dict) and draw(st.booleans()):
            place[draw(st.one_of(st.sampled_from(["x-new", "new", "lease"]), st.integers()))] = draw(_ANYTHING)
        elif isinstance(place, dict) and key is not None and draw(st.booleans()):
            del place[key]
        elif key is not None:
            place[key] = draw(_ANYTHING)
    return cls, data


def _outcome(decode: Any) -> tuple[str, ...]:
    """`repr` tells 1 from 1.0 and from True, which are equal."""
    try:
        return ("taken", repr(decode()))
    except PayloadError as error:
        return (error.code, error.detail)


@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=_nearly())
def test_both_decoders_agree(case: tuple[Any, Any]) -> None:
    """`check_value` looks at the annotations each time; the compiled decoder takes exactly what that takes."""
    cls, data = case
    slow = _outcome(lambda: check_value(cls, data, "w"))
    assert _outcome(lambda: from_map(cls, data, where="w")) == slow
    if slow[0] == "taken":
        assert repr(decoder(cls)(data)) == slow[1]
    else:
        with pytest.raises((MismatchError, TypeError)):
            decoder(cls)(data)


@given(cls=st.sampled_from(CLASSES), data=_ANYTHING)
def test_both_refuse_what_is_no_record(cls: Any, data: Any) -> None:
    """With one error, whatever it is."""
    assert _outcome(lambda: from_map(cls, data, where="w")) == _outcome(lambda: check_value(cls, data, "w"))
