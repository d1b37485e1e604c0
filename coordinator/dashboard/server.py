"""The page's own thread: asyncio, the files of the page, who may ask what, and the way into the coordinator's loop.

Covers: checks of every request (host, origin, token or cookie, CSRF, how often), headers, files, sessions.
Does not cover: HTTP itself (`http`), what the API answers (`api`), the loop's end of the calls (`seat`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import mimetypes
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from coordinator.dashboard import routes
from coordinator.dashboard.access import SESSION_S, Links, Rate, Viewer, digest, new_session
from coordinator.dashboard.actions import Actions, LoopCalls
from coordinator.dashboard.answers import ApiError, ApiErrorBody, Done, JobAnswer, SessionAnswer
from coordinator.dashboard.api import Api
from coordinator.dashboard.events import Events, encode
from coordinator.dashboard.history import History
from coordinator.dashboard.http import HttpError, HttpRequest, HttpResponse, serve
from coordinator.dashboard.jobs import Jobs
from coordinator.dashboard.live import LiveModel
from coordinator.dashboard.log_ring import LogRing
from coordinator.dashboard.picture import Change
from coordinator.dashboard.routes import BodyField, Call, Route
from coordinator.store.rows import PageSessionRow
from edge_client.errors import ConflictError, FedfitError, InputError, NoSuchNameError

__all__ = ["PageServer", "Place", "Seat"]

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 64
_USED_EVERY_S = 60
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    ("content-security-policy", _POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("permissions-policy", "interest-cohort=()"),
    ("cache-control", "no-store"),
)
_STATUS = {InputError: 400, NoSuchNameError: 404, ConflictError: 409}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the page is, and what it is about."""

    names: tuple[str, ...]  # under which it may be opened
    port: int
    federation: str
    state_dir: Path
    brokers: tuple[str, ...]
    certificate: Path | None = None  # with a key: TLS
    key: Path | None = None

    @property
    def scheme(self) -> str:
        """http or https."""
        return "https" if self.certificate is not None else "http"

    @property
    def cookie(self) -> str:
        """The cookie's name: federations on one machine, whose ports cookies ignore, have different ones."""
        name = f"fedfit-{self.federation}"
        return f"__Host-{name}" if self.certificate is not None else name


@dataclass(frozen=True, slots=True)
class Seat:
    """What the coordinator's loop does for this thread."""

    command: Callable[[dict[str, Any]], Future[object]]
    note: Callable[[Any], Future[None]]
    add_session: Callable[[PageSessionRow], Future[None]]
    end_session: Callable[[str], Future[None]]
    token_used: Callable[[str, int], Future[None]]
    watch: Callable[[], None]


class PageServer:
    """The thread; `start` it once, hand it every change of the picture, `close` it at the end."""

    def __init__(self, listener: socket.socket, place: Place, seat: Seat, links: Links, logs: LogRing) -> None:
        self._listener = listener
        self._place = place
        self._seat = seat
        self._links = links
        self._logs = logs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._failed_logins = Rate(5, 60.0)
        self._actions = Rate(10, 60.0)
        self._num_connections = 0
        self._noted: dict[str, int] = {}
        self._files = _files()
        self._ended: asyncio.Event | None = None
        self._log_number = logs.newest

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def take(self, change: Change) -> None:
        """A change of the picture, from the coordinator's loop."""
        with contextlib.suppress(RuntimeError):  # the thread has ended
            self._loop.call_soon_threadsafe(self._take, change)

    def close(self) -> None:
        """Say goodbye to all viewers and end the thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(5)

    # the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        place, seat = self._place, self._seat
        self._ended = asyncio.Event()
        self._history = History(place.state_dir / "state.db")
        self._events = Events(int(time.time() * 1000))
        self._live = LiveModel(place.federation, self._history, self._events)
        self._jobs = Jobs(place.state_dir, self._job_changed)
        self._api = Api(
            live=self._live,
            history=self._history,
            events=self._events,
            logs=self._logs,
            brokers=place.brokers,
            watch=seat.watch,
            is_valid=lambda call: self._is_still_valid(call.viewer),
            addresses=tuple(f"{place.scheme}://{_in_url(name)}:{place.port}" for name in place.names),
        )
        actions = Actions(
            live=self._live,
            history=self._history,
            jobs=self._jobs,
            calls=LoopCalls(seat.command, seat.note),
            state_dir=place.state_dir,
        )
        self._routes = self._api.documented = (*self._api.routes, *actions.routes, *self._session_routes())
        context = None
        if place.certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(place.certificate, place.key)
        server = await asyncio.start_server(
            self._connected,
            sock=self._listener,
            ssl=context,
            ssl_handshake_timeout=10.0 if context is not None else None,
        )
        await self._ended.wait()
        server.close()
        self._events.close()
        self._jobs.close()
        await asyncio.sleep(0.05)  # for the goodbyes
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=2)
        self._history.close()

    def _end(self) -> None:
        if self._ended is not None:
            self._ended.set()

    def _take(self, change: Change) -> None:
        if self._ended is not None and not self._ended.is_set():
            self._live.take(change)
            if self._logs.newest != self._log_number:
                self._log_number = self._logs.newest
                self._events.publish("log", encode({"newest": self._log_number}))

    def _job_changed(self, job: JobAnswer) -> None:
        self._events.publish("job", encode({"id": job.id, "kind": job.kind, "run": job.run, "state": job.state}))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_connections >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_connections += 1
        try:
            await serve(reader, writer, self._answer, self._refusal)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._num_connections -= 1
            with contextlib.suppress(ConnectionError, OSError, RuntimeError):
                writer.close()

    # a request

    async def _answer(self, request: HttpRequest) -> HttpResponse:
        try:
            response = await self._checked(request)
        except HttpError as error:
            response = self._refusal(error)
        except FedfitError as error:
            status = next((number for kind, number in _STATUS.items() if isinstance(error, kind)), 503)
            response = self._refusal(HttpError(status, type(error).__name__, str(error)))
        return _with_headers(response)

    def _refusal(self, error: HttpError) -> HttpResponse:
        body = encode(ApiError(error=ApiErrorBody(code=error.code, message=str(error))))
        return _with_headers(HttpResponse(status=error.status, body=body))

    async def _checked(self, request: HttpRequest) -> HttpResponse:
        self._check_host(request)
        if request.path == "/favicon.ico":
            return HttpResponse(status=204)
        if not request.path.startswith(routes.PREFIX):
            return self._file(request)
        route, names = routes.match(self._routes, request.method, request.path.removeprefix(routes.PREFIX))
        self._check_origin(request, is_change=request.method != "GET")
        viewer = Viewer(name="", role="none")
        if route.role != "anybody":
            viewer = self._viewer(request)
            self._check_viewer(request, route, viewer)
        query = routes.parse_query(route.params, request.query)
        body = routes.parse_body(route.body, request) if request.method != "GET" else {}
        answer = await route.handle(Call(viewer=viewer, request=request, path=names, query=query, body=body))
        return answer if isinstance(answer, HttpResponse) else HttpResponse(status=route.status, body=encode(answer))

    def _check_host(self, request: HttpRequest) -> None:
        """A page of another name that leads here could read everything that a browser may read."""
        host = request.header("host").lower()
        allowed = {f"{_in_url(name).lower()}:{self._place.port}" for name in self._place.names}
        if self._place.port == {"http": 80, "https": 443}[self._place.scheme]:
            allowed |= {_in_url(name).lower() for name in self._place.names}
        if host not in allowed:
            raise HttpError(
                421, "wrong_host", f"this page is not served under the name {host[:100]!r}; open {self._addresses()}"
            )

    def _addresses(self) -> str:
        place = self._place
        return " or ".join(f"{place.scheme}://{_in_url(name)}:{place.port}/" for name in place.names[:3])

    def _check_origin(self, request: HttpRequest, *, is_change: bool) -> None:
        origin, expected = request.header("origin"), f"{self._place.scheme}://{request.header('host').lower()}"
        by_token = request.header("authorization") != ""
        if origin.lower() != expected and (origin or (is_change and not by_token)):
            raise HttpError(403, "wrong_origin", f"expected Origin: {expected}")

    def _viewer(self, request: HttpRequest) -> Viewer:
        """Who asks; raises `HttpError` 401."""
        kind, _, secret = request.header("authorization").partition(" ")
        access = self._history.store.page_access
        if kind:
            row = access.token(digest(secret.strip())) if kind.lower() == "bearer" else None
            if row is None:
                self._count_failure(request)
                raise HttpError(401, "wrong_token", "unknown token; make one with: coordinator page token add NAME")
            self._note_use(row.sha256)
            return Viewer(name=row.name, role=row.role)
        cookie = _cookie(request.header("cookie"), self._place.cookie)
        session = access.session(digest(cookie), int(time.time())) if cookie else None
        if session is None:
            raise HttpError(401, "signed_out", "not signed in; open the link that this prints: coordinator page link")
        return Viewer(
            name=session.name,
            role=session.role,
            csrf=session.csrf,
            session=session.sha256,
            expires_s=session.expires_s,
        )

    def _check_viewer(self, request: HttpRequest, route: Route, viewer: Viewer) -> None:
        is_change = request.method != "GET"
        if is_change and viewer.csrf:
            sent = request.header("x-fedfit-csrf")
            if not hmac.compare_digest(sent.encode("utf-8", "replace"), viewer.csrf.encode()):
                raise HttpError(403, "wrong_csrf", "expected the header X-Fedfit-CSRF with the session's value")
        if route.role == "operate" and not viewer.may_operate:
            raise HttpError(403, "read_only", f"{viewer.name} may look, and change nothing")
        if route.role == "operate" and is_change:
            if self._actions.is_exceeded(viewer.name):
                raise HttpError(429, "too_many_actions", "expected at most 10 actions a minute; wait a moment")
            self._actions.count(viewer.name)

    def _is_still_valid(self, viewer: Viewer) -> bool:
        access = self._history.store.page_access
        if viewer.session:
            return access.session(viewer.session, int(time.time())) is not None
        return any(row.name == viewer.name for row in access.tokens())

    def _note_use(self, sha256: str) -> None:
        now = int(time.time())
        if now - self._noted.get(sha256, 0) >= _USED_EVERY_S:
            self._noted[sha256] = now
            self._seat.token_used(sha256, now)

    def _count_failure(self, request: HttpRequest) -> None:
        if self._failed_logins.is_exceeded(request.peer):
            raise HttpError(429, "too_many_attempts", "too many failed attempts; wait a minute")
        self._failed_logins.count(request.peer)

    # sessions

    def _session_routes(self) -> tuple[Route, ...]:
        token = BodyField(name="token", about="a token, or the part of a link behind #t=", required=True)
        return (
            Route(
                method="POST", path="session", handle=self._sign_in, answer=SessionAnswer, role="anybody", body=(token,)
            ),
            Route(method="GET", path="session", handle=self._session, answer=SessionAnswer),
            Route(method="DELETE", path="session", handle=self._sign_out, answer=Done),
        )

    async def _sign_in(self, call: Call) -> HttpResponse:
        """Sign a browser in with a token or a link; the answer sets a cookie."""
        if self._failed_logins.is_exceeded(call.request.peer):
            raise HttpError(429, "too_many_attempts", "too many failed attempts; wait a minute")
        secret, now = str(call.body["token"])[:200], int(time.time())
        role, name = self._links.use(secret), "link"
        if role is None:
            row = self._history.store.page_access.token(digest(secret))
            if row is None:
                self._failed_logins.count(call.request.peer)
                raise HttpError(
                    401,
                    "wrong_token",
                    "this link was used or is too old, or the token is unknown; type: coordinator page link",
                )
            role, name = row.role, row.name
            self._note_use(row.sha256)
        cookie, session = new_session(name, role, now)
        await asyncio.wrap_future(self._seat.add_session(session))
        secure = "; Secure" if self._place.certificate is not None else ""
        header = f"{self._place.cookie}={cookie}; Path=/; HttpOnly; SameSite=Strict; Max-Age={SESSION_S}{secure}"
        body = encode(SessionAnswer(name=name, role=role, csrf=session.csrf, expires_in_s=SESSION_S))
        return HttpResponse(body=body, headers=(("set-cookie", header),))

    async def _session(self, call: Call) -> SessionAnswer:
        """Who is signed in, and what goes into X-Fedfit-CSRF."""
        viewer = call.viewer
        left = max(0, viewer.expires_s - int(time.time())) if viewer.expires_s else SESSION_S
        return SessionAnswer(name=viewer.name, role=viewer.role, csrf=viewer.csrf, expires_in_s=left)

    async def _sign_out(self, call: Call) -> HttpResponse:
        """End the session of this browser."""
        if call.viewer.session:
            await asyncio.wrap_future(self._seat.end_session(call.viewer.session))
        header = f"{self._place.cookie}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"
        return HttpResponse(body=encode(Done()), headers=(("set-cookie", header),))

    # files

    def _file(self, request: HttpRequest) -> HttpResponse:
        name = request.path.lstrip("/") or "index.html"
        if request.method not in ("GET", "HEAD"):
            raise HttpError(405, "method", f"this address does not take {request.method}")
        if name not in self._files:
            raise HttpError(404, "unknown_path", "there is nothing at this address")
        return self._files[name]


def _with_headers(response: HttpResponse) -> HttpResponse:
    return HttpResponse(
        status=response.status,
        body=response.body,
        compressed=response.compressed,
        content_type=response.content_type,
        headers=(*response.headers, *_HEADERS),
        stream=response.stream,
        file=response.file,
    )


def _files() -> dict[str, HttpResponse]:
    """All files of the page, packed once."""
    files = {}
    for entry in resources.files("coordinator.dashboard").joinpath("static").iterdir():
        if entry.is_file():
            body = entry.read_bytes()
            packer = zlib.compressobj(9, wbits=31)
            kind = mimetypes.guess_type(entry.name)[0] or "application/octet-stream"
            text = "; charset=utf-8" if kind.startswith("text/") else ""
            compressed = packer.compress(body) + packer.flush()
            files[entry.name] = HttpResponse(body=body, compressed=compressed, content_type=kind + text)
    return files


def _cookie(header: str, name: str) -> str:
    for pair in header.split(";"):
        key, _, value = pair.strip().partition("=")
        if key == name:
            return value
    return ""


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
