"""Who may connect to the broker: a device that floods is shut out, and let in again."""

from __future__ import annotations

import logging

import pytest
from service_site import Site

from edge_client.wire.chunks import CHUNK_BYTES, make_chunk

JUNK = {
    "large messages": ("up", b"FF" + bytes(119_998), 290),
    "large chunks": ("data", make_chunk(bytes(16), 0, bytes(CHUNK_BYTES)), 290),
    "small messages": ("up", b"junk", 2001),
    "small chunks": ("data", b"junk", 2001),
    "chunks without a session": ("data", make_chunk(bytes(16), 0, b"x"), 2001),
}


@pytest.mark.parametrize("kind", list(JUNK))
def test_a_device_that_floods_is_suspended_told_and_let_in_again(
    site: Site, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """a sends junk: one line of log, the broker cuts a alone, nothing of a is heard, and 61 s later it is."""
    caplog.set_level(logging.INFO)
    channel, payload, count = JUNK[kind]
    with site.serving() as service:
        site.hello("b")
        if kind != "chunks without a session":
            site.hello("a")
        for _ in range(count):
            site.receive("a", channel, payload, 1.0)
        service.accounts.suspend(service.roster.suspended(1.0), 1.0)
        assert site.users() == {"coordinator", "b"}
        assert service.roster.online(1.0) == {"b"}
        assert len([record for record in caplog.records if "dropped" in record.message]) == 1
        before = service.roster.presence("a")
        site.try_hello("a", 2.0)
        assert service.roster.presence("a") is before
        service.accounts.suspend(service.roster.suspended(61.1), 61.1)
        assert site.users() == {"coordinator", "a", "b"}
        site.hello("a", 62.0)
        assert "a" in service.roster.online(62.0)
