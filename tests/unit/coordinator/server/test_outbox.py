"""What the coordinator publishes, and how its bytes count."""

from __future__ import annotations

import pytest
from service_site import Site, with_run

from coordinator.conductor.commits import ANNOUNCEMENT
from edge_client.errors import DiskFullError
from edge_client.transport.base import Received
from edge_client.wire.messages import Cancel


def test_a_shared_chunk_counts_for_each_listener(site: Site) -> None:
    """a and b get 1,000 bytes each from one publication on all/down."""
    with_run(site)
    with site.serving() as service:
        heard: list[bytes] = []
        device = site.hub.transport("b", lambda event: heard.append(getattr(event, "payload", b"")))
        device.subscribe((service.topics.shared_down,))
        device.connect()
        assert service._transport is not None
        service._transport.connect()
        site.hub.poll()
        for name in ("a", "b"):
            site.hello(name)
        before = {name: service.traffic.moved[name] for name in ("a", "b")}
        service.chunks.share(("a", "b"), b"x" * 1000)
        site.hub.poll()
        for name, (up, down) in before.items():
            assert service.traffic.moved[name] == (up, down + 1000)
        assert heard.count(b"x" * 1000) == 1


def test_nothing_leaves_before_the_turn_is_durable(site: Site) -> None:
    """In a turn a message waits, and counts as queued; if the turn fails, it is never sent."""
    with site.serving() as service:
        heard: list[object] = []
        device = site.hub.transport("a", heard.append)
        device.subscribe((service.topics.device("a", "cmd"),))
        device.connect()
        assert service._transport is not None
        service._transport.connect()
        site.hub.poll()
        site.hello("a")
        site.hub.poll()
        before = len(heard)
        with site.store.turn():
            service.outbox.send("a", Cancel(lease="lease-1"))
            site.hub.poll()
            assert len(heard) == before
            assert service.outbox.queued_bytes > 0
        site.hub.poll()
        assert len(heard) == before + 1

        def fail() -> None:
            with site.store.turn():
                service.outbox.send("a", Cancel(lease="lease-2"))
                raise DiskFullError("full")

        with pytest.raises(DiskFullError):
            fail()
        site.hub.poll()
        assert len(heard) == before + 1


def test_the_newest_announcement_is_made_again_at_every_start(site: Site) -> None:
    """It is in the store since the transaction that ended its round; a kill may have come before it was sent."""
    site.store.settings.set(ANNOUNCEMENT, "news")
    with site.serving() as service:
        heard: list[object] = []
        watcher = site.hub.transport("b", heard.append)
        watcher.subscribe((service.topics.announcement,))
        watcher.connect()
        assert service._transport is not None
        service._transport.connect()
        site.hub.poll()
    assert [event.payload for event in heard if isinstance(event, Received)] == [b"news"]


def test_nothing_is_published_or_counted_after_the_end(site: Site) -> None:
    """A person may still remove devices while the coordinator waits for disk space."""
    with site.serving() as service:
        site.hello("a")
    before = dict(service.traffic.moved)
    service.outbox.send("a", Cancel(lease="lease-1", code="over"))
    service.outbox.announce("news")
    assert service.traffic.moved == before
    assert service.outbox.queued_bytes == 0
