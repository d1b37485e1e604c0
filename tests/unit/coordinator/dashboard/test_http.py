"""HTTP on asyncio streams: several requests on a connection, compression, files, and viewers that do not read."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from coordinator.dashboard import http
from coordinator.dashboard.http import HttpError, HttpRequest, HttpResponse

Answer = Callable[[HttpRequest], Awaitable[HttpResponse]]


def _refuse(error: HttpError) -> HttpResponse:
    return HttpResponse(status=error.status, body=error.code.encode())


def _talk(answer: Answer, sent: bytes) -> bytes:
    """All that comes back for these bytes."""

    async def talk() -> bytes:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await http.serve(reader, writer, answer, _refuse)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        server.close()
        return received

    return asyncio.run(talk())


async def _echo(request: HttpRequest) -> HttpResponse:
    return HttpResponse(body=f"{request.method} {request.path} {dict(request.query)}".encode() + request.body)


def test_requests_follow_each_other_on_one_connection() -> None:
    """Sent together, answered in order; a path is unquoted, a repeated parameter is kept."""
    sent = b"GET /a%20b?x=1&x=2 HTTP/1.1\r\nHost: h\r\n\r\nPOST /c HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nhi"
    received = _talk(_echo, sent)
    assert received.count(b"HTTP/1.1 200") == 2
    assert b"GET /a b {'x': ('1', '2')}" in received
    assert received.endswith(b"POST /c {}hi")


def test_a_long_answer_is_compressed_for_those_who_can_read_that() -> None:
    """A thousand bytes and more; with the length of what is sent."""

    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(body=b"fedfit " * 1000)

    head, _, body = _talk(answer, b"GET / HTTP/1.1\r\nHost: h\r\nAccept-Encoding: gzip\r\n\r\n").partition(b"\r\n\r\n")
    assert gzip.decompress(body) == b"fedfit " * 1000
    assert f"content-length: {len(body)}".encode() in head
    _, _, plain = _talk(answer, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").partition(b"\r\n\r\n")
    assert plain == b"fedfit " * 1000


def test_a_file_is_sent_in_pieces(tmp_path: Path) -> None:
    """One megabyte, byte for byte."""
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(range(256)) * 4096)

    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(file=path, content_type="application/octet-stream")

    _, _, body = _talk(answer, b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").partition(b"\r\n\r\n")
    assert body == path.read_bytes()


def test_a_viewer_that_does_not_read_is_dropped() -> None:
    """After a megabyte that was not sent; the stream is closed, so it is not counted as a viewer any more."""
    produced, closed = [0], asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while True:
                produced[0] += 1
                yield b"x" * 65_536
                await asyncio.sleep(0)
        finally:
            closed.set()

    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(content_type="text/event-stream", stream=pieces())

    async def stare() -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await http.serve(reader, writer, answer, _refuse)

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1)
        writer.write(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        await asyncio.wait_for(closed.wait(), 20)
        writer.transport.abort()
        server.close()

    asyncio.run(stare())
    # a megabyte that waits here, and what the kernel and the other side took: some megabytes
    assert 16 <= produced[0] <= 500
