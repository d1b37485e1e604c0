"""The coordinator's loop by hand."""

from __future__ import annotations

import time

from service_site import Site


def test_a_hello_makes_the_next_tick_due_at_once(site: Site) -> None:
    """A device that may be asked for something does not wait for a quarter of a second."""
    with site.serving() as service:
        service._broker = None  # a tick would start it
        now = time.monotonic()
        service._tick(now)
        assert service.wait_s() > 0.0
        site.hello("a", now)
        assert service.wait_s() == 0.0
