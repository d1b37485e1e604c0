"""The verbs of `coordinator page`: a link for a browser, and the tokens of screens and scripts.

Tokens can be changed while no coordinator runs; a link needs one.
"""

from __future__ import annotations

import argparse
import time
from typing import TypeVar

from coordinator import control
from coordinator.cli.options import add_state_dir, formatted, listing, show, show_list
from coordinator.columns import align, duration
from coordinator.dashboard import messages
from coordinator.dashboard.messages import AddToken, ListTokens, MakeLink, PageRequest, RemoveToken, TokenLine
from coordinator.requests.devices import stored_without_coordinator
from coordinator.state import STATE_KIND, STATE_VERSION

__all__ = ["link_options", "token_add_options", "token_list_options", "token_remove_options"]

A = TypeVar("A")


def link_options(parser: argparse.ArgumentParser) -> None:
    """`page link`."""
    formatted(add_state_dir(parser)).set_defaults(do=_link)
    parser.add_argument("--read", action="store_true", help="whoever opens it may look, and change nothing")


def token_add_options(parser: argparse.ArgumentParser) -> None:
    """`page token add`."""
    formatted(add_state_dir(parser)).set_defaults(do=_add)
    parser.add_argument("name", metavar="NAME", help="who or what uses it, such as wall-screen")
    parser.add_argument("--operate", action="store_true", help="it may also start, stop, export and deploy")


def token_list_options(parser: argparse.ArgumentParser) -> None:
    """`page token list`."""
    listing(add_state_dir(parser))
    parser.set_defaults(do=_list)


def token_remove_options(parser: argparse.ArgumentParser) -> None:
    """`page token remove`."""
    add_state_dir(parser).set_defaults(do=_remove)
    parser.add_argument("name", metavar="NAME", help="a token of coordinator page token list")


def _link(options: argparse.Namespace) -> None:
    link = messages.ask(options.state_dir, MakeLink(role="read" if options.read else "operate"))
    show(options, link, lambda made: made.url)


def _add(options: argparse.Namespace) -> None:
    added = _ask(options, AddToken(name=options.name, role="operate" if options.operate else "read"))
    show(options, added, lambda made: made.token)


def _list(options: argparse.Namespace) -> None:
    rows = _ask(options, ListTokens()).tokens
    show_list(options, rows, _table, name=lambda row: row.name)


def _table(rows: tuple[TokenLine, ...] | list[TokenLine] | object) -> str:
    assert isinstance(rows, (tuple, list))
    if not rows:
        return "no tokens yet; make one with: coordinator page token add NAME"
    cells = [
        [row.name, row.role, f"{duration(time.time() - row.used_s)} ago" if row.used_s else "never"] for row in rows
    ]
    return align(["token", "may", "last used"], cells)


def _remove(options: argparse.Namespace) -> None:
    print(f"removed {_ask(options, RemoveToken(name=options.name)).name}")


def _ask(options: argparse.Namespace, request: PageRequest[A]) -> A:
    """Ask the running coordinator; without one, its store."""
    try:
        return messages.ask(options.state_dir, request)
    except control.NotRunningError:
        from coordinator.dashboard.seat import StoredTokens

        with stored_without_coordinator(options.state_dir, kind=STATE_KIND, version=STATE_VERSION) as store:
            answer: A = StoredTokens(store).answer(messages.checked(request))  # type: ignore[assignment]
            return answer
