"""Requests about devices to a running coordinator."""

from __future__ import annotations

import time

from raw_requests import answer
from service_site import Site


def test_a_suspended_device_is_shown_as_one(site: Site) -> None:
    """`device list`: the state, and nothing of what it said before."""
    with site.serving() as service:
        now = time.monotonic()
        site.hello("a", now)
        for _ in range(2001):
            site.receive("a", "up", b"junk", now)
        rows = {row["id"]: row for row in answer(service, "device-list")["devices"]}
        assert (rows["a"]["state"], rows["a"]["online"]) == ("suspended: flooding", False)
        assert rows["b"]["state"] is None
