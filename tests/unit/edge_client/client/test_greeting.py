"""Hellos and the welcome that answers one of them: which counts, and when the next hello is due."""

from __future__ import annotations

from edge_client.client.greeting import Greeting
from edge_client.client.pace import Pace
from edge_client.wire.messages import Welcome


def _greeting() -> Greeting:
    """A pause of 10 s without jitter."""
    return Greeting(Pace(10.0, 30.0, jitter=lambda low, high: 0.0))


def _welcome(hello: int, session: str) -> Welcome:
    return Welcome(boot="b", hello=hello, session=session, epoch=1, heartbeat_s=60.0)


def test_a_welcome_to_any_hello_of_this_connection_begins_the_session() -> None:
    """The coordinator is behind: it answers the first hello when the second is on its way."""
    greeting = _greeting()
    assert (greeting.count_hello(0.0), greeting.count_hello(10.0)) == (1, 2)
    assert greeting.accepts(_welcome(1, "s"))


def test_the_answer_to_a_repeated_hello_begins_no_second_session() -> None:
    """Same session: nothing new. An earlier version begins another one with each hello: the newest counts."""
    greeting = _greeting()
    greeting.count_hello(0.0)
    greeting.count_hello(10.0)
    assert greeting.accepts(_welcome(1, "s"))
    assert not greeting.accepts(_welcome(2, "s"))
    assert greeting.accepts(_welcome(2, "t"))
    assert not greeting.accepts(_welcome(1, "u"))


def test_a_hello_of_an_earlier_connection_has_no_answer_any_more() -> None:
    """Nor has one that was never sent."""
    greeting = _greeting()
    greeting.count_hello(0.0)
    greeting.restart()
    assert not greeting.accepts(_welcome(1, "s"))
    assert not greeting.accepts(_welcome(2, "s"))
    assert greeting.count_hello(1.0) == 2
    assert greeting.accepts(_welcome(2, "s"))
