"""What the coordinator publishes, and how its bytes count."""

from __future__ import annotations

from service_site import Site, with_run

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


def test_nothing_is_published_or_counted_after_the_end(site: Site) -> None:
    """A person may still remove devices while the coordinator waits for disk space."""
    with site.serving() as service:
        site.hello("a")
    before = dict(service.traffic.moved)
    service.outbox.send("a", Cancel(lease="lease-1", code="over"))
    service.outbox.announce({"run": "r-1"})
    assert service.traffic.moved == before
    assert service.outbox.queued_bytes == 0
