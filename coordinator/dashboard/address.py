"""Where the page listens, and the names under which it may be opened: `--page HOST:PORT`."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.broker.broker import port_holder
from coordinator.server.addresses import bracketed, check_listen, is_loopback, usable_addresses
from edge_client.errors import InputError, MachineError

__all__ = ["DEFAULT", "PageAddress", "listen", "parse"]

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """The address that the page listens on."""

    host: str
    port: int  # 0: any free one

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return is_loopback(self.host)

    def names(self, advertised: Sequence[str]) -> tuple[str, ...]:
        """The names and addresses under which the page may be opened; the first is the one to print."""
        if self.is_loopback:
            return tuple(dict.fromkeys((self.host, "localhost", "127.0.0.1")))
        here = [address for _, address in usable_addresses()] if self.host in _EVERYWHERE else [self.host]
        local = ["localhost", _EVERYWHERE[self.host]] if self.host in _EVERYWHERE else []
        return tuple(dict.fromkeys((*advertised, *here, *local)))


DEFAULT = PageAddress(host="127.0.0.1", port=8765)


def parse(typed: str) -> PageAddress:
    """`HOST:PORT` as it is typed; raises `InputError`."""
    parts = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[^:\[\]]+)):(?P<port>\d{1,5})", typed)
    if parts is None or int(parts["port"]) > 65_535 or (parts["name"] or "x").isdigit():  # 8765:127 is turned round
        raise InputError(f"--page {typed!r}: expected HOST:PORT, such as 127.0.0.1:8765")
    return PageAddress(host=parts["six"] or parts["name"], port=int(parts["port"]))


def listen(address: PageAddress) -> socket.socket:
    """A listening socket; raises `InputError` for an address of another machine, `MachineError` for a taken port."""
    check_listen(address.host, option="--page")
    family, kind, protocol, _, place = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(64)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        where = f"{bracketed(address.host)}:{address.port}"
        raise MachineError(
            f"cannot serve the page on {where}: {error.strerror}{port_holder(address.port)}; "
            "name another place with --page HOST:PORT, or start with --no-page"
        ) from error
    return listener
