"""A bad network for the tests: a TCP proxy that cuts, delays, throttles, slices and stalls, as told while it runs.

with Proxy() as proxy:                      # devices connect to proxy.address
    proxy.target = ("127.0.0.1", port)      # may be named, or change, later
    proxy.link = Link(delay_s=0.2)          # from now on, for connections that exist too
    proxy.cuts = iter([1, 7, 63])           # the next connections end after so many bytes, both ways counted
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_READ_BYTES = 16_384
_QUEUE_PIECES = 16  # beyond it the sender feels the back-pressure, as on a real slow link

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What every connection suffers."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None  # each direction
    slice_bytes: int = _READ_BYTES
    stalled: Direction | None = None  # up: from the device to the broker
    cut_every_s: float | None = None


class _Connection:
    """One connection through the proxy, in the loop's thread."""

    def __init__(self, proxy: Proxy, device: asyncio.StreamWriter, broker: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.writers = (device, broker)
        self.left = next(proxy.cuts, None)

    def cut(self) -> None:
        for writer in self.writers:
            writer.transport.abort()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction) -> None:
        """Copy one direction until either side ends."""
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUE_PIECES)
        deliver = asyncio.ensure_future(self._deliver(pieces, writer, direction))
        try:
            while data := await reader.read(_READ_BYTES):
                await pieces.put((asyncio.get_running_loop().time() + self.proxy.link.delay_s, data))
            await pieces.put((0.0, b""))
            await deliver
        finally:
            deliver.cancel()

    async def _deliver(
        self, pieces: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        while True:
            due, data = await pieces.get()
            if not data:
                return
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            while data:
                data = await self._slice(data, writer, direction)

    async def _slice(self, data: bytes, writer: asyncio.StreamWriter, direction: Direction) -> bytes:
        link = self.proxy.link
        while link.stalled == direction:
            await asyncio.sleep(0.02)
            link = self.proxy.link
        size = min(link.slice_bytes, len(data) if self.left is None else self.left)
        if link.bytes_per_s is not None:
            await asyncio.sleep(min(size, len(data)) / link.bytes_per_s)
        writer.write(data[:size])
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        self.proxy.num_bytes += len(data[:size])
        if self.left is not None:
            self.left -= len(data[:size])
            if self.left <= 0:
                self.proxy.num_cuts += 1
                self.cut()
                return b""
        return data[size:]


class Proxy:
    """See the module's docstring; all attributes may be set from the test's thread."""

    def __init__(self) -> None:
        self.target: tuple[str, int] | None = None
        self.link = Link()
        self.cuts: Iterator[int | None] = iter(())
        self.num_cuts = self.num_bytes = self.num_connections = 0
        self.port = 0
        self._connections: set[_Connection] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="proxy", daemon=True)

    @property
    def address(self) -> str:
        """host:port for the devices."""
        return f"127.0.0.1:{self.port}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    def cut_all(self) -> None:
        """End every connection now."""
        self._loop.call_soon_threadsafe(self._cut_now)

    def _cut_now(self) -> None:
        for connection in list(self._connections):
            self.num_cuts += 1
            connection.cut()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        cutting = asyncio.ensure_future(self._cut_regularly())
        await self._end.wait()
        cutting.cancel()
        server.close()
        self._cut_now()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _cut_regularly(self) -> None:
        while True:
            await asyncio.sleep(self.link.cut_every_s or 0.5)
            if self.link.cut_every_s is not None:
                self._cut_now()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        connection = None
        try:
            assert self.target is not None
            broker_reader, broker_writer = await asyncio.open_connection(*self.target)
            connection = _Connection(self, writer, broker_writer)
            self._connections.add(connection)
            ways = [
                asyncio.ensure_future(connection.carry(reader, broker_writer, "up")),
                asyncio.ensure_future(connection.carry(broker_reader, writer, "down")),
            ]
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        except ConnectionError:
            pass  # the broker is not there: the device finds out the same way
        finally:
            writer.transport.abort()
            if connection is not None:
                connection.cut()
                self._connections.discard(connection)
