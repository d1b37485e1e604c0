"""The shared download topic as the coordinator sees it: who listens, who has room, who is sent back."""

from __future__ import annotations

from coordinator.fleet.shared_topic import SharedTopic
from edge_client.wire.flow_control import SHARED_WINDOW_CHUNKS

ALL = frozenset({"a", "b", "c"})


def _listening(*names: str) -> SharedTopic:
    topic = SharedTopic()
    for name in names:
        topic.note_heard(name, "x", 0)
    return topic


def _publish(topic: SharedTopic, *indices: int, now: float = 0.0) -> None:
    for index in indices:
        topic.publish("x", index, now)


def test_the_slowest_listener_sets_the_pace() -> None:
    """A window goes out; a heard all of it, b nothing: no room. When b heard the first chunk there is room for one."""
    topic = _listening("a", "b")
    _publish(topic, *range(SHARED_WINDOW_CHUNKS))
    topic.note_heard("a", "x", SHARED_WINDOW_CHUNKS)
    assert not topic.has_room
    topic.note_heard("b", "x", 1)
    assert topic.has_room
    _publish(topic, SHARED_WINDOW_CHUNKS)
    assert not topic.has_room


def test_who_comes_later_owes_nothing_for_what_went_before() -> None:
    """c has the whole window for itself; the chunk it missed is not under way to it, the next one is."""
    topic = _listening("a", "b")
    _publish(topic, *range(SHARED_WINDOW_CHUNKS - 1))
    topic.note_heard("c", "x", 0)
    assert topic.has_room
    _publish(topic, SHARED_WINDOW_CHUNKS - 1)
    assert not topic.is_under_way("c", "x", 0, 0.0)
    assert topic.is_under_way("c", "x", SHARED_WINDOW_CHUNKS - 1, 0.0)


def test_a_chunk_is_under_way_until_it_was_heard_or_must_be_lost() -> None:
    """For three seconds, or until a later one was heard: a connection keeps the order."""
    topic = _listening("a", "b")
    _publish(topic, 0, 1, now=10.0)
    assert topic.is_under_way("a", "x", 0, 12.9)
    assert not topic.is_under_way("a", "x", 0, 13.1)
    topic.note_heard("b", "x", 2)
    assert not topic.is_under_way("b", "x", 0, 10.0)
    assert not topic.is_under_way("stranger", "x", 0, 10.0)


def test_a_listener_that_needs_more_than_two_seconds_for_a_window_is_sent_back() -> None:
    """b heard nothing of a window that went out at 10: at 11.9 it may, at 12 it is told, at 14 again; a is never."""
    topic = _listening("a", "b")
    _publish(topic, *range(SHARED_WINDOW_CHUNKS), now=10.0)
    topic.note_heard("a", "x", SHARED_WINDOW_CHUNKS)
    assert list(topic.send_back(ALL, 11.9)) == []
    assert list(topic.send_back(ALL, 12.0)) == [("b", "x")]
    assert list(topic.send_back(ALL, 13.0)) == []
    assert list(topic.send_back(ALL, 14.0)) == [("b", "x")]
    assert topic.closed
    assert topic.members("x") == ("a",)
    assert set(topic.listeners) == {"a", "b"}  # it still gets what is published
    topic.leave("b")
    assert not topic.closed
    assert topic.has_room


def test_a_listener_that_moves_but_too_slowly_is_sent_back_too() -> None:
    """b takes one chunk a second and always fills its window again: the oldest one it has not heard is 2 s old."""
    topic = _listening("a", "b")
    _publish(topic, *range(SHARED_WINDOW_CHUNKS), now=0.0)
    topic.note_heard("a", "x", SHARED_WINDOW_CHUNKS)
    topic.note_heard("b", "x", 1)
    _publish(topic, SHARED_WINDOW_CHUNKS, now=1.0)
    assert list(topic.send_back(ALL, 1.0)) == []
    assert list(topic.send_back(ALL, 2.0)) == [("b", "x")]


def test_a_listener_with_room_is_never_sent_back() -> None:
    """Nothing is published for a minute: silence is no sign of slowness."""
    topic = _listening("a", "b")
    _publish(topic, *range(SHARED_WINDOW_CHUNKS - 1), now=0.0)
    assert list(topic.send_back(ALL, 60.0)) == []
    assert not topic.closed


def test_who_is_gone_or_never_leaves_holds_nobody_up() -> None:
    """b is not online any more; c was told to leave 30 s ago and is there: both count no longer."""
    topic = _listening("a", "b", "c")
    _publish(topic, *range(SHARED_WINDOW_CHUNKS), now=0.0)
    topic.note_heard("a", "x", SHARED_WINDOW_CHUNKS)
    assert list(topic.send_back(ALL - {"b"}, 3.0)) == [("c", "x")]
    assert set(topic.listeners) == {"a", "c"}
    list(topic.send_back(ALL, 33.1))
    assert topic.listeners == ("a",)
    assert topic.has_room
    assert not topic.closed


def test_what_was_published_is_forgotten_with_the_last_listener() -> None:
    """The next ones begin anew; and so does everybody after a lost connection."""
    topic = _listening("a", "b")
    _publish(topic, 5)
    topic.leave("a")
    assert topic.was_published("x", 5)
    topic.leave("b")
    assert not topic.was_published("x", 5)
    topic = _listening("a", "b")
    _publish(topic, 5)
    topic.lost_connection()
    assert not topic.was_published("x", 5)
