"""HTTP/1.1 on asyncio streams with h11: reads requests within limits, writes answers and streams of events.

Covers: one connection. Does not cover: what is answered (`server`), who may ask (`access`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import h11

__all__ = ["MAX_UNSENT_BYTES", "HttpError", "HttpRequest", "HttpResponse", "serve"]

_MAX_HEADER_BYTES = 16 << 10
_MAX_BODY_BYTES = 64 << 10
_HEADER_S = 10.0
_IDLE_S = 75.0
_SEND_S = 30.0
MAX_UNSENT_BYTES = 1 << 20  # of a viewer that does not read
_FILE_PIECE_BYTES = 256 << 10
_COMPRESS_FROM = 1024  # bytes


class HttpError(Exception):
    """An answer that is an error; `code` is stable, the message is for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request as it arrived. Names of headers are in lower case."""

    method: str
    path: str
    query: Mapping[str, tuple[str, ...]]
    headers: Mapping[str, str]
    body: bytes
    peer: str

    def header(self, name: str) -> str:
        """A header's value; empty if there is none."""
        return self.headers.get(name, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """An answer; `stream` instead of a body sends pieces until the viewer leaves."""

    status: int = 200
    body: bytes = b""
    compressed: bytes | None = None  # the body as gzip, if somebody has made it already
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()
    stream: AsyncIterator[bytes] | None = field(default=None, repr=False)
    file: Path | None = None  # sent instead of the body


Answer = Callable[[HttpRequest], Awaitable[HttpResponse]]


async def serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: Answer,
    refuse: Callable[[HttpError], HttpResponse],
) -> None:
    """Answer the requests of one connection until it ends; `refuse` makes the answer to one that breaks the rules."""
    connection = _Connection(reader, writer)
    with contextlib.suppress(ConnectionError, TimeoutError, asyncio.TimeoutError, ssl.SSLError, h11.LocalProtocolError):
        while True:
            try:
                request = await connection.request()
            except h11.RemoteProtocolError as error:
                status = error.error_status_hint
                await connection.send(refuse(HttpError(status, "bad_request", "this is no HTTP request")), None)
                return
            except HttpError as error:
                await connection.send(refuse(error), None)
                return
            if request is None:
                return
            await connection.send(await answer(request), request)
            if not connection.next_request():
                return


class _Connection:
    """One connection, request by request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEADER_BYTES)
        peer = writer.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self._is_first = True

    async def request(self) -> HttpRequest | None:
        """The next request; None if the other side has closed."""
        head = await self._head()
        if head is None:
            return None
        if self._http.they_are_waiting_for_100_continue:
            raise HttpError(417, "expectation", "expected a request without Expect")
        body = await asyncio.wait_for(self._body(), _HEADER_S)
        target = urlsplit(head.target.decode("ascii", "replace"))
        query: dict[str, tuple[str, ...]] = {}
        for key, value in parse_qsl(target.query, keep_blank_values=True, max_num_fields=100):
            query[key] = (*query.get(key, ()), value)
        headers: dict[str, str] = {}
        for raw, raw_value in head.headers:
            text = raw.decode("ascii")
            if text in headers and text in ("host", "origin", "authorization", "cookie"):
                raise HttpError(400, "bad_request", f"expected one header {text}, got several")
            headers[text] = raw_value.decode("latin-1")
        return HttpRequest(
            method=head.method.decode("ascii"),
            path=unquote(target.path, errors="replace"),
            query=query,
            headers=headers,
            body=body,
            peer=self._peer,
        )

    async def _head(self) -> h11.Request | None:
        if self._is_first:
            event = await asyncio.wait_for(self._next_event(), _HEADER_S)
            self._is_first = False
        else:
            if not self._http.trailing_data[0]:
                data = await asyncio.wait_for(self._reader.read(65_536), _IDLE_S)
                self._http.receive_data(data)
            event = await asyncio.wait_for(self._next_event(), _HEADER_S)
        return event if isinstance(event, h11.Request) else None

    async def _next_event(self) -> object:
        while True:
            event = self._http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self._http.receive_data(await self._reader.read(65_536))

    async def _body(self) -> bytes:
        body = bytearray()
        while True:
            event = await self._next_event()
            if isinstance(event, h11.Data):
                body += event.data
                if len(body) > _MAX_BODY_BYTES:
                    raise HttpError(413, "too_long", f"expected a body of at most {_MAX_BODY_BYTES} bytes")
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
            else:
                raise ConnectionError

    def next_request(self) -> bool:
        """Whether the connection can be used again."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def send(self, response: HttpResponse, request: HttpRequest | None) -> None:
        """Send an answer; raises `ConnectionError` if the viewer is gone or too slow."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        headers = [("content-type", response.content_type), *response.headers]
        if response.stream is not None:
            self._write(h11.Response(status_code=response.status, headers=[*headers, ("connection", "close")]))
            await self._stream(response.stream)
            return
        if response.file is not None:
            await self._send_file(response, response.file, headers)
            return
        body = response.body
        takes_gzip = request is not None and "gzip" in request.header("accept-encoding")
        if len(body) >= _COMPRESS_FROM and takes_gzip:
            packer = zlib.compressobj(6, wbits=31)
            body = response.compressed or packer.compress(body) + packer.flush()
            headers.append(("content-encoding", "gzip"))
        headers += [("vary", "accept-encoding"), ("content-length", str(len(body)))]
        if request is None:
            headers.append(("connection", "close"))
        self._write(h11.Response(status_code=response.status, headers=headers))
        if request is None or request.method != "HEAD":
            self._write(h11.Data(data=body))
        self._write(h11.EndOfMessage())
        await asyncio.wait_for(self._writer.drain(), _SEND_S)

    async def _send_file(self, response: HttpResponse, path: Path, headers: list[tuple[str, str]]) -> None:
        with open(path, "rb") as file:
            length = os.fstat(file.fileno()).st_size
            headers.append(("content-length", str(length)))
            self._write(h11.Response(status_code=response.status, headers=headers))
            while piece := file.read(_FILE_PIECE_BYTES):
                self._write(h11.Data(data=piece))
                await asyncio.wait_for(self._writer.drain(), _SEND_S)
        self._write(h11.EndOfMessage())

    async def _stream(self, stream: AsyncIterator[bytes]) -> None:
        gone = asyncio.ensure_future(self._reader.read(1))  # a viewer says nothing more: whatever comes is the end
        try:
            iterator = stream.__aiter__()
            while True:
                piece: asyncio.Future[bytes] = asyncio.ensure_future(iterator.__anext__())
                await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    piece.cancel()
                    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                        await piece
                    raise ConnectionError
                try:
                    data = piece.result()
                except StopAsyncIteration:
                    break
                self._write(h11.Data(data=data))
                if self._writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
                    self._writer.transport.abort()
                    raise ConnectionError
            self._write(h11.EndOfMessage())
        finally:
            gone.cancel()
            close = getattr(stream, "aclose", None)
            if close is not None:
                await close()

    def _write(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
