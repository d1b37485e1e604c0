"""Server-sent events: their numbers, and what somebody gets who comes back."""

from __future__ import annotations

import asyncio

from coordinator.dashboard.events import Events


def _read(events: Events, since: int | None, frames: int) -> list[bytes]:
    """The first frames of a stream, without the one that tells how soon to come back."""

    async def read() -> list[bytes]:
        stream = events.stream(since, lambda: True)
        pieces = [await asyncio.wait_for(stream.__anext__(), 5) for _ in range(frames + 1)]
        await stream.aclose()  # type: ignore[attr-defined]
        return pieces[1:]

    return asyncio.run(read())


def test_who_comes_back_gets_what_was_missed() -> None:
    """Numbers go on from the first one; after 101, the events 102 and 103."""
    events = Events(100)
    for text in (b"1", b"2", b"3"):
        events.publish("run", text)
    assert _read(events, 101, 1) == [b"id: 102\nevent: run\ndata: 2\n\nid: 103\nevent: run\ndata: 3\n\n"]
    assert events.num_viewers == 0


def test_who_was_away_too_long_or_saw_another_process_asks_again() -> None:
    """512 events are remembered: the number before the oldest is known, an older one and a higher one are not."""
    events = Events(1000)
    for _ in range(600):
        events.publish("run", b"{}")
    resync = b"id: 1600\nevent: resync\ndata: {}\n\n"
    assert _read(events, 1087, 1) == [resync]
    assert _read(events, 5000, 1) == [resync]
    (missed,) = _read(events, 1088, 1)
    assert missed.startswith(b"id: 1089\n")
    assert missed.count(b"event: run") == 512


def test_a_stream_ends_with_a_goodbye() -> None:
    """When the page's thread ends, every viewer hears it."""

    async def read() -> bytes:
        events = Events(1)
        stream = events.stream(None, lambda: True)
        await stream.__anext__()
        events.close()
        return await stream.__anext__()

    assert asyncio.run(read()) == b"event: bye\ndata: {}\n\n"
