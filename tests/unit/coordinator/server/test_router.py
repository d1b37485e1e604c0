"""What devices publish: who is heard, what counts, what is charged to them."""

from __future__ import annotations

import logging

import pytest
from service_site import Site, with_run

from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, transfer_id


def test_what_a_client_calls_itself_cannot_move_the_cursor(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """An escape sequence is logged as text."""
    caplog.set_level(logging.INFO)
    with site.serving():
        site.hello("a")
    (line,) = [record.getMessage() for record in caplog.records if "is here" in record.message]
    assert "\x1b" not in line
    assert "\\x1b" in line


def test_traffic_is_counted_for_devices_with_a_session_only(site: Site) -> None:
    """Junk under a's name before it was let in counts nowhere; its hello does, both ways."""
    with_run(site)
    with site.serving() as service:
        site.receive("a", "up", b"junk")
        site.receive("stranger", "up", b"junk")
        site.receive("a", "data", b"junk")
        assert service.traffic.moved == {}
        site.hello("a")
        assert list(service.traffic.moved) == ["a"]
        up, down = service.traffic.moved["a"]
        assert up > 100
        assert down > 100


def test_chunks_of_an_upload_that_is_over_count_against_their_device(site: Site) -> None:
    """290 well-formed chunks of an update that nobody waits for are a flood, too."""
    with site.serving() as service:
        site.hello("a")
        payload = make_chunk(transfer_id("1" * 64), 0, bytes(CHUNK_BYTES))
        for _ in range(290):
            site.receive("a", "data", payload, 1.0)
        assert service.roster.suspended(1.0) == {"a"}
