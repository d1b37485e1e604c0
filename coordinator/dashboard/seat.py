"""The page's seat in the coordinator's loop: the listening socket, the calls of the page's thread, the picture.

Until the first visitor comes, the page is this object and a socket: what serves it is imported then. Everything that
the thread wants to know or do passes through a queue that the loop empties in every turn.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.dashboard import messages
from coordinator.dashboard.access import LINK_S, Links, digest
from coordinator.dashboard.log_ring import LogRing
from coordinator.dashboard.picture import WATCH_S, Change, Picture
from coordinator.store.base import Store
from coordinator.store.rows import PageTokenRow
from edge_client.errors import FedfitError, InputError, MachineError, NoSuchNameError

if TYPE_CHECKING:
    from coordinator.dashboard.server import PageServer
    from coordinator.server.service import Service

__all__ = ["PageSeat", "StoredTokens"]

log = logging.getLogger(__name__)

T = TypeVar("T")
Command = Callable[[dict[str, Any]], object]


class StoredTokens:
    """The tokens in a store: what `coordinator page token` asks."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def answer(self, request: messages.PageRequest[Any]) -> object:
        """Add, list or remove; raises a `FedfitError` that the person gets to read."""
        match request:
            case messages.AddToken(name=name, role=role):
                token = f"fedfit_{secrets.token_urlsafe(32)}"
                row = PageTokenRow(name=name, sha256=digest(token), role=role, created_s=int(time.time()))
                self._store.page_access.add_token(row)
                return messages.AddedToken(name=name, role=role, token=token)
            case messages.ListTokens():
                lines = (
                    messages.TokenLine(name=row.name, role=row.role, created_s=row.created_s, used_s=row.used_s)
                    for row in self._store.page_access.tokens()
                )
                return messages.TokenList(tokens=tuple(lines))
            case messages.RemoveToken(name=name):
                if not self._store.page_access.remove_token(name):
                    known = [row.name for row in self._store.page_access.tokens()]
                    raise NoSuchNameError.of("token", name, known)
                return messages.RemovedToken(name=name)
        raise InputError("this needs a running coordinator: coordinator start")


@dataclass(slots=True)
class _Call:
    do: Callable[[], object]
    result: Future[Any]
    answer: object = None
    error: FedfitError | None = None

    def run(self) -> None:
        """Do it; who waits for it hears nothing yet."""
        try:
            self.answer = self.do()
        except FedfitError as error:
            self.error = error

    def tell(self) -> None:
        """Let who waits for it go on."""
        if self.error is not None:
            self.result.set_exception(self.error)
        else:
            self.result.set_result(self.answer)


class PageSeat:
    """Holds the page's place in the loop; all methods but `_call`'s callers are of the loop's thread."""

    def __init__(
        self,
        service: Service,
        command: Command,
        *,
        listener: socket.socket | None,
        names: Sequence[str] = (),
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """`listener` is None if the page is not served: its tokens can be changed all the same."""
        self._service = service
        self._commands = command
        self._listener = listener
        self._names = tuple(names)
        self._certificate = certificate
        self._server: PageServer | None = None
        self._calls: deque[_Call] = deque()
        self._untold: deque[_Call] = deque()  # done in this turn, which is not durable yet
        self._links = Links()
        self._picture = Picture(service, self._hand_on)
        self._watched_until = 0.0
        self._is_new_watch = False
        self.logs = LogRing(service.in_hand)
        if listener is not None:
            logging.getLogger().addHandler(self.logs)

    # the loop

    def fds(self) -> list[int]:
        """What to watch: the socket, until somebody comes."""
        return [self._listener.fileno()] if self._listener is not None and self._server is None else []

    def attend(self, ready: Sequence[int], now: float) -> None:
        """Do what the page's thread has asked for, and look at the fleet while somebody watches.

        The page's thread reads what is committed: it hears of what was done once that is durable, or a browser that has
        just signed in would be unknown. What a turn has left here was rolled back.
        """
        while self._untold:
            call = self._untold.popleft()
            call.error = MachineError("the coordinator could not write this down; try again in a moment")
            call.tell()
        if self._listener is not None and self._server is None and self._listener.fileno() in ready:
            self._open()
        while self._calls:
            call = self._calls.popleft()
            if not call.result.set_running_or_notify_cancel():
                continue
            call.run()
            self._untold.append(call)
            self._service.store.after_commit(self._tell)
        if self._is_new_watch:
            self._is_new_watch = False
            self._picture.begin_anew()
        if now < self._watched_until:
            self._picture.look(now)
            if self._picture.is_under_way:
                self._service.wake()  # the next slice, after what else there is to do

    def _tell(self) -> None:
        self._untold.popleft().tell()

    def close(self) -> None:
        """End the thread and stop listening."""
        logging.getLogger().removeHandler(self.logs)
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()

    def _open(self) -> None:
        """Somebody is here: import what serves, and hand the socket over."""
        assert self._listener is not None
        try:
            from coordinator.dashboard.server import PageServer, Place, Seat
        except ImportError as error:
            log.error("the page needs %s: pip install 'fedfit[coordinator]', or start with --no-page", error.name)
            self._listener.close()
            self._listener = None
            return
        service, access = self._service, self._service.store.page_access
        seat = Seat(
            command=lambda request: self._call(lambda: self._commands(request)),
            note=lambda row: self._call(lambda: self._note(row)),
            add_session=lambda row: self._call(lambda: access.add_session(row, int(time.time()))),
            end_session=lambda sha256: self._call(lambda: access.end_session(sha256)),
            token_used=lambda sha256, at_s: self._call(lambda: access.token_used(sha256, at_s)),
            watch=self._watch,
        )
        certificate, key = self._certificate or (None, None)
        place = Place(
            names=self._names,
            port=self.port,
            federation=service.federation,
            state_dir=service.state_dir,
            brokers=service.brokers,
            certificate=certificate,
            key=key,
        )
        self._server = PageServer(self._listener, place, seat, self._links, self.logs)
        self._server.start()

    def _note(self, row: Any) -> None:
        log.info("page: %s: %s %s", row.name, row.action, row.detail)
        self._service.store.page_access.add_action(row)

    def _hand_on(self, change: Change) -> None:
        if self._server is not None:
            self._server.take(change)

    # called by the page's thread

    def _call(self, do: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        self._calls.append(_Call(do, result))
        self._service.wake()
        return result

    def _watch(self) -> None:
        now = time.monotonic()
        if now >= self._watched_until:
            self._is_new_watch = True
            self._watched_until = now + WATCH_S
            self._service.wake()
        self._watched_until = now + WATCH_S

    # people

    @property
    def port(self) -> int:
        """The port of the page."""
        assert self._listener is not None
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        """The page's address."""
        scheme = "https" if self._certificate is not None else "http"
        host = self._names[0]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}/"

    def link(self, role: str = "operate") -> str:
        """An address that signs one browser in."""
        return f"{self.url}#t={self._links.make(role)}"

    def answer(self, asked: Mapping[str, Any]) -> object:
        """Answer a request about the page as it arrived; None if it is about something else."""
        request = messages.parse(asked)
        if request is None:
            return None
        if isinstance(request, messages.MakeLink):
            if self._listener is None:
                raise MachineError("this coordinator serves no page; start it with --page HOST:PORT")
            return messages.PageLink(url=self.link(request.role), role=request.role, minutes=LINK_S // 60)
        return StoredTokens(self._service.store).answer(request)
