"""Any message comes back as it was; any other bytes are refused with one error."""

from __future__ import annotations

import typing

from any_record import records
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from edge_client.errors import PayloadError
from edge_client.records import to_map
from edge_client.wire import frames, messages
from edge_client.wire.messages import Message, context_down, context_up, open_message, seal_message

KEY = bytes(range(32))
UP, DOWN = context_up("fed", "a"), context_down("fed", "a")
KINDS: tuple[type[Message], ...] = typing.get_args(messages.Message)
DOWNWARD = {"Welcome", "Refuse", "Assign", "Cancel", "Grant", "Receipt", "Share", "Deploy"}


any_message = st.sampled_from(KINDS).flatmap(records)
_SETTINGS = settings(suppress_health_check=[HealthCheck.too_slow])


def _context(message: Message) -> str:
    return DOWN if type(message).__name__ in DOWNWARD else UP


def _seal(message: Message, session: str, seq: int) -> bytes:
    try:
        return seal_message(message, session=session, seq=seq, key=KEY, context=_context(message))
    except ValueError:
        assume(False)
        raise


@settings(_SETTINGS, max_examples=400)
@given(message=any_message, session=st.from_regex(r"[A-Za-z0-9_-]{0,64}", fullmatch=True), seq=st.integers(0, 2**53))
def test_any_message_comes_back_as_it_was(message: Message, session: str, seq: int) -> None:
    """Every field of every kind, with the values that its annotation allows."""
    opened = open_message(_seal(message, session, seq), key=KEY, context=_context(message))
    assert (opened.session, opened.seq, opened.message) == (session, seq, message)


@settings(_SETTINGS, max_examples=300)
@given(message=any_message, position=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255), cut=st.booleans())
def test_any_change_of_a_sealed_message_is_refused(message: Message, position: float, change: int, cut: bool) -> None:
    """One byte changed, or the rest cut off."""
    sealed = bytearray(_seal(message, "s", 1))
    at = int(position * len(sealed))
    if cut:
        del sealed[at:]
    else:
        sealed[at] ^= change
    try:
        open_message(bytes(sealed), key=KEY, context=_context(message))
    except PayloadError:
        return
    raise AssertionError("a changed message was believed")


json_like = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=20),
        st.binary(max_size=20),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10) | st.binary(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(_SETTINGS, max_examples=400)
@given(kind=st.integers(0, 255), body=json_like, wrapped=st.booleans(), down=st.booleans())
def test_a_body_of_anything_is_a_message_or_refused(kind: int, body: object, wrapped: bool, down: bool) -> None:
    """Sealed with the right key, as a device that was taken over can."""
    context = DOWN if down else UP
    whole = {"session": "s", "seq": 1, "body": body} if wrapped else body
    data = frames.seal(kind, whole, key=KEY, context=context)
    try:
        opened = open_message(data, key=KEY, context=context)
    except PayloadError:
        return
    assert isinstance(opened.message, KINDS)


@settings(_SETTINGS, max_examples=300)
@given(message=any_message, field=st.integers(0, 20), value=json_like)
def test_a_message_with_one_strange_field_is_a_message_or_refused(message: Message, field: int, value: object) -> None:
    """All other fields are right, so that the check of this one decides."""
    body = to_map(message)
    if body:
        body[list(body)[field % len(body)]] = value
    number = messages._NUMBERS[type(message)]
    context = _context(message)
    assume(len(frames.pack(body)) < frames.MAX_BODY_BYTES - 100)
    data = frames.seal(number, {"session": "s", "seq": 1, "body": body}, key=KEY, context=context)
    try:
        opened = open_message(data, key=KEY, context=context)
    except PayloadError:
        return
    assert type(opened.message) is type(message)
