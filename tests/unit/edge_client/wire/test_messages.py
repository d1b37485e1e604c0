"""Sealed messages and the window that takes each number once."""

from __future__ import annotations

import random

import pytest
from rows import PLAN, PROFILE, assign, digest

from edge_client.errors import PayloadError
from edge_client.wire import frames
from edge_client.wire.messages import (
    Accept,
    Decline,
    Deploy,
    Deployed,
    Grant,
    Hello,
    Message,
    ReplayWindow,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)

KEY = bytes(range(32))
UP, DOWN = context_up("fed", "a"), context_down("fed", "a")


def _sealed(message: Message, context: str, session: str = "s", seq: int = 3) -> bytes:
    return seal_message(message, session=session, seq=seq, key=KEY, context=context)


def test_a_message_comes_back_with_its_place_in_the_session() -> None:
    """Both ways, nested records and all."""
    hello = Hello(boot="b", hello=1, profile=PROFILE, labels={"site": "north"}, free_bytes=5, held="lease-1")
    for message, context in ((hello, UP), (assign(plan=PLAN), DOWN)):
        opened = open_message(_sealed(message, context), key=KEY, context=context)
        assert (opened.session, opened.seq, opened.message) == ("s", 3, message)


def test_a_message_travels_one_way_only() -> None:
    """A device cannot welcome the coordinator, nor can the coordinator accept a lease."""
    welcome = Welcome(boot="b", hello=1, session="s", epoch=1, heartbeat_s=1.0)
    for message, context in ((welcome, UP), (Accept(lease="x"), DOWN)):
        with pytest.raises(PayloadError, match="travels this way"):
            open_message(_sealed(message, context), key=KEY, context=context)


@pytest.mark.parametrize("kind", [0, 9, 32, 40, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    """Sealed with the right key."""
    data = frames.seal(kind, {"session": "s", "seq": 1, "body": {}}, key=KEY, context=UP)
    with pytest.raises(PayloadError, match="kind"):
        open_message(data, key=KEY, context=UP)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"session": "s", "seq": -1, "body": {"lease": "x"}},
        {"session": "a b", "seq": 1, "body": {"lease": "x"}},
        {"session": "s", "seq": True, "body": {"lease": "x"}},
        {"session": "s", "seq": 1, "body": []},
        {"session": "s", "seq": 1, "body": {"lease": ""}},
        {"session": "s", "seq": 1, "body": {"lease": "x", "more": 1}},
        {"session": "s", "seq": 1, "body": {}},
    ],
)
def test_a_body_that_is_not_exactly_the_message_is_refused(body: object) -> None:
    """`Accept` has one key, and the envelope three."""
    with pytest.raises(PayloadError):
        open_message(frames.seal(3, body, key=KEY, context=UP), key=KEY, context=UP)


DEPLOY = {
    "deployment": "d1",
    "run": "r-1",
    "version": 3,
    "architecture": "width:1/2",
    "precision": "int8",
    "input": [3, 8, 8],
    "classes_sha256": digest("classes"),
    "sha256": digest("file"),
    "length": 2**32,
}


@pytest.mark.parametrize(
    "change",
    [
        {"length": 0},
        {"length": 2**32 + 1},
        {"length": True},
        {"sha256": "../../etc/passwd"},
        {"sha256": digest("file").upper()},
        {"deployment": "a/b"},
        {"run": ""},
        {"version": -1},
        {"precision": "fp64"},
        {"architecture": "../x y"},
        {"input": [0]},
        {"input": 3},
        {"command": "rm"},
    ],
    ids=str,
)
def test_a_deployment_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    """The largest file that may be announced has 4 GiB; each change alone breaks a rule."""
    for body, is_right in ((DEPLOY, True), (DEPLOY | change, False)):
        data = frames.seal(40, {"session": "s", "seq": 1, "body": body}, key=KEY, context=DOWN)
        if is_right:
            assert isinstance(open_message(data, key=KEY, context=DOWN).message, Deploy)
        else:
            with pytest.raises(PayloadError):
                open_message(data, key=KEY, context=DOWN)


@pytest.mark.parametrize("change", [{"state": "superseded"}, {"code": "a b"}, {"detail": "x" * 2001}, {"more": 1}])
def test_a_word_on_a_deployment_out_of_bounds_is_refused(change: dict[str, object]) -> None:
    """A device cannot say what only the coordinator decides, nor write a book into its database."""
    body = {"deployment": "d1", "state": "active", "code": "ok", "detail": "x" * 2000}
    for said, is_right in ((body, True), (body | change, False)):
        data = frames.seal(8, {"session": "s", "seq": 1, "body": said}, key=KEY, context=UP)
        if is_right:
            assert isinstance(open_message(data, key=KEY, context=UP).message, Deployed)
        else:
            with pytest.raises(PayloadError):
                open_message(data, key=KEY, context=UP)


def test_text_in_any_language_travels() -> None:
    """A worker's reason of 2,000 characters that need four bytes each."""
    decline = Decline(lease="x", code="crashed", detail="\U0001f525" * 2000)
    assert open_message(_sealed(decline, UP), key=KEY, context=UP).message == decline


def test_the_largest_grant_fits_a_frame() -> None:
    """64 ranges, the most that are asked for at a time, of the largest numbers."""
    grant = Grant(lease="l" * 64, sha256=digest("x"), ranges=((2**53, 2**53),) * 64)
    assert len(_sealed(grant, DOWN, session="s" * 64, seq=2**53)) < frames.MAX_BODY_BYTES // 8


def test_the_window_takes_each_number_once_in_nearly_any_order() -> None:
    """Against a set: new within the last 256 of the highest, and never seen before."""
    rng = random.Random(5)
    window, seen, highest = ReplayWindow(), set(), -1
    for _ in range(20_000):
        seq = max(0, highest + rng.choice([1, 1, 1, 2, 5, 300, -1, -2, -100, -255, -256, -257, -1000, 0]))
        expected = seq not in seen and seq > highest - 256
        assert window.take(seq) == expected
        highest = max(highest, seq)
        seen.add(seq)
    assert window.take(2**53)
    assert not window.take(2**53)
