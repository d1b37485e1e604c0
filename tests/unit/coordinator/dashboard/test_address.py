"""`--page HOST:PORT`, and the names under which the page may be opened."""

from __future__ import annotations

import pytest

from coordinator.dashboard import address
from edge_client.errors import InputError, MachineError


@pytest.mark.parametrize(
    ("typed", "host", "port"),
    [
        ("127.0.0.1:8765", "127.0.0.1", 8765),
        ("[::1]:80", "::1", 80),
        ("server.example:0", "server.example", 0),
    ],
)
def test_an_address_and_a_port_are_read(typed: str, host: str, port: int) -> None:
    """An IPv6 address stands in brackets."""
    place = address.parse(typed)
    assert (place.host, place.port) == (host, port)


@pytest.mark.parametrize(
    "typed", ["8765", "8765:127", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "::1:80", "a:b", ""]
)
def test_what_is_no_address_is_refused_with_an_example(typed: str) -> None:
    """One line."""
    with pytest.raises(InputError, match=r"expected HOST:PORT, such as 127\.0\.0\.1:8765"):
        address.parse(typed)


def test_a_taken_port_is_named_with_what_to_type() -> None:
    """The second listener on a port is told who is there, or at least what to do."""
    first = address.listen(address.parse("127.0.0.1:0"))
    port = first.getsockname()[1]
    with pytest.raises(MachineError, match=rf"cannot serve the page on 127\.0\.0\.1:{port}.*--no-page"):
        address.listen(address.parse(f"127.0.0.1:{port}"))
    first.close()


def test_on_loopback_no_advertised_name_opens_the_page() -> None:
    """Otherwise a foreign site of that name could lead here; on all addresses the advertised names come first."""
    assert address.parse("127.0.0.1:1").names(("evil.example",)) == ("127.0.0.1", "localhost")
    everywhere = address.parse("0.0.0.0:1").names(("server.example",))
    assert everywhere[0] == "server.example"
    assert {"localhost", "127.0.0.1"} <= set(everywhere)
