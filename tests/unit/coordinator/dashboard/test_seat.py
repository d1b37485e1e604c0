"""The page's seat in the coordinator's loop: nothing is loaded before a visitor comes; what changes is handed on."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
from service_site import Site, with_run

from coordinator.dashboard import messages
from coordinator.dashboard.picture import Change, Picture
from coordinator.dashboard.seat import PageSeat, StoredTokens
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import MachineError


def test_nothing_that_serves_is_loaded_before_somebody_comes() -> None:
    """Neither h11 nor asyncio, by all that `coordinator start` imports for the page."""
    code = "import sys, coordinator.dashboard.opening; print({'h11', 'asyncio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_look_hands_on_what_has_changed_and_nothing_else(site: Site) -> None:
    """All devices at first, nothing while nothing happens, then the one that said hello; not before 250 ms."""
    changes: list[Change] = []
    with_run(site)
    with site.serving() as service:
        picture = Picture(service, changes.append)
        picture.look(0.0)
        assert changes[0].names == ("a", "b")
        assert {facts.name: facts.lease_state for facts in changes[1].devices} == {"a": "stored", "b": "accepted"}
        assert changes[1].run is not None
        assert changes[1].run.run == "r-1"
        picture.look(0.1)
        assert len(changes) == 2
        picture.look(0.3)
        assert (changes[2].devices, changes[2].names) == ((), None)
        site.hello("a", 0.4)
        picture.look(0.6)
        (facts,) = changes[3].devices
        assert (facts.name, facts.online) == ("a", True)


def test_the_page_hears_of_what_it_asked_for_once_that_is_durable(site: Site) -> None:
    """Before the commit a browser that has signed in is unknown to the page; of a lost turn it hears as an error."""
    with_run(site)
    with site.serving() as service:
        seat = PageSeat(service, lambda request: None, listener=None)
        with service.store.turn():
            asked = seat._call(lambda: "signed in")
            seat.attend((), 0.0)
            assert not asked.done()
        assert asked.result(0) == "signed in"
        lost = seat._call(lambda: "signed in")
        with contextlib.suppress(ZeroDivisionError), service.store.turn():
            seat.attend((), 0.0)
            raise ZeroDivisionError
        assert not lost.done()
        seat.attend((), 0.0)
        with pytest.raises(MachineError, match="try again"):
            lost.result(0)


def test_a_token_is_shown_once_and_known_by_its_hash() -> None:
    """The list has no secret; a removed token is gone."""
    tokens = StoredTokens(SqliteStore())
    added = tokens.answer(messages.AddToken(name="wall", role="read"))
    assert isinstance(added, messages.AddedToken)
    assert len(added.token) > 40
    listed = tokens.answer(messages.ListTokens())
    assert isinstance(listed, messages.TokenList)
    assert [(line.name, line.role, line.used_s) for line in listed.tokens] == [("wall", "read", 0)]
    tokens.answer(messages.RemoveToken(name="wall"))
    assert tokens.answer(messages.ListTokens()) == messages.TokenList(tokens=())
