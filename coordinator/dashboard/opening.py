"""How `coordinator start` opens the page: its socket before anything else, then its certificate, then its seat.

Nothing that serves is imported here; the page's first visitor does that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.control import Answer
from coordinator.dashboard import address
from coordinator.dashboard.address import PageAddress
from coordinator.dashboard.seat import PageSeat
from edge_client.errors import InputError, MachineError

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["PageOptions", "PreparedPage", "prepare"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions:
    """The options of `coordinator start` about the page, as they were typed."""

    page: str | None = None  # None: the usual place
    cert: Path | None = None
    key: Path | None = None
    no_page: bool = False
    is_read_by_programs: bool = False  # what the coordinator prints, as with --log-format json


class PreparedPage:
    """A page whose place is taken, and which waits for its coordinator."""

    def __init__(
        self, options: PageOptions, place: PageAddress, listener: socket.socket | None, *, problem: str = ""
    ) -> None:
        """`problem` says why the page has no place; it is logged when the coordinator has started."""
        self._options = options
        self._problem = problem
        self._place = place
        self._listener = listener
        self._seat: PageSeat | None = None

    def join(self, service: Service, command: Answer) -> Answer:
        """Give the page its seat in the coordinator's loop; returns what answers the control socket."""
        names = self._place.names(tuple(filter(None, service.store.settings.get("advertise").split("\n"))))
        certificate = self._certificate(service, names) if self._listener is not None else None
        seat = PageSeat(service, command, listener=self._listener, names=names, certificate=certificate)
        service.guests.append(seat)
        self._seat = seat
        if self._listener is not None:
            self._announce(seat)
        elif self._problem:
            log.warning("%s", self._problem)

        def answer(asked: dict[str, Any]) -> object:
            about_page = seat.answer(asked)
            return about_page if about_page is not None else command(asked)

        return answer

    def _certificate(self, service: Service, names: tuple[str, ...]) -> tuple[Path, Path] | None:
        """The files for TLS: those that were named, or of our own CA; None on loopback."""
        options = self._options
        if options.cert is not None and options.key is not None:
            return options.cert, options.key
        if self._place.is_loopback:
            return None
        from coordinator.broker import certificates

        settings = service.store.settings
        known_ca = "" if settings.get("external") else settings.get("ca")
        certified = [*names, *(() if self._place.host in ("0.0.0.0", "::") else (self._place.host,))]
        pki = certificates.ensure_pki(
            service.state_dir / "pki", list(dict.fromkeys(certified)), known_ca=known_ca, server="page"
        )
        log.info("the page's certificate: SHA-256 %s", certificates.fingerprint(pki.server_certificate))
        return pki.server_certificate, pki.server_key

    def _announce(self, seat: PageSeat) -> None:
        """A link is for the person who typed the command; the log of a service, or one in JSON, is read by others."""
        if self._options.is_read_by_programs or "INVOCATION_ID" in os.environ or "JOURNAL_STREAM" in os.environ:
            log.info("the page is at %s; for a link type: coordinator page link", seat.url)
        else:
            print(f"Live page: {seat.link()}", flush=True)


@contextlib.contextmanager
def prepare(options: PageOptions) -> Iterator[PreparedPage]:
    """Take the page's place; raises what is wrong with it, if its owner named it."""
    if options.no_page and options.page is not None:
        raise InputError("--page and --no-page exclude each other; type one of them")
    if (options.cert is None) != (options.key is None):
        raise InputError("--page-cert and --page-key belong together; type both")
    for name, file in (("--page-cert", options.cert), ("--page-key", options.key)):
        if file is not None and not file.is_file():
            raise InputError(f"{name} {file}: expected a PEM file, there is none")
    place = address.parse(options.page) if options.page is not None else address.DEFAULT
    listener, problem = None, ""
    if not options.no_page:
        try:
            listener = address.listen(place)
        except MachineError as error:
            if options.page is not None:
                raise
            problem = str(error)
    try:
        yield PreparedPage(options, place, listener, problem=problem)
    finally:
        if listener is not None:
            listener.close()
