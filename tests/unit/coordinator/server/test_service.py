"""The coordinator's loop by hand."""

from __future__ import annotations

import time

from service_site import Site


def test_a_hello_makes_the_next_tick_due_soon(site: Site) -> None:
    """A device that may be asked for something does not wait for a quarter of a second."""
    with site.serving() as service:
        service._broker = None  # a tick would start it
        now = time.monotonic()
        service._tick(now - 0.1)
        assert service.wait_s() > 0.1
        site.hello("a", now)
        assert service.wait_s() == 0.0


def test_hellos_that_come_together_share_a_tick(site: Site) -> None:
    """A tick looks at the whole fleet: after one, the next is 50 ms away, however many devices arrive."""
    with site.serving() as service:
        service._broker = None
        now = time.monotonic() + 100
        service._tick(now)
        for device in ("a", "b", "a"):
            site.hello(device, now)
        assert service._tick_at == now + 0.05
