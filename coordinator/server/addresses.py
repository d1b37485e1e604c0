"""Where the broker listens and under which names devices reach it, from the options and this machine's addresses."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from edge_client.errors import InputError

__all__ = ["Place", "bracketed", "check_listen", "choose", "is_loopback", "split_listen", "usable_addresses"]

_ALL = ("0.0.0.0", "::")
_LOOPBACK = "127.0.0.1"
_NAME = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"  # one part of a host name


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The address that the broker listens on, and the names that the bundles hold."""

    listen: str
    names: tuple[str, ...]
    is_automatic: bool = False  # nobody typed the name: it is the only address of this machine

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it; through a tunnel, others do."""
        return all(is_loopback(host) for host in (self.listen, *self.names))

    @property
    def here(self) -> str:
        """The broker's address as seen from this machine."""
        return {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(self.listen, self.listen)

    @property
    def certified(self) -> list[str]:
        """All names that the broker's certificate must have."""
        typed = () if self.listen in _ALL else (self.listen,)
        return list(dict.fromkeys((*self.names, *typed, "localhost", _LOOPBACK, "::1")))


def split_listen(typed: str | None, port: int | None) -> tuple[str | None, int | None]:
    """`--listen ADDRESS` or `--listen ADDRESS:PORT`, and `--port`, as address and port; raises `InputError`."""
    parts = re.fullmatch(r"(?:\[(?P<six>[^\]]*)\]|(?P<name>[^:]*)):(?P<port>\d{1,5})", typed or "")
    if parts is None:
        return typed, port
    number = int(parts["port"])
    if port not in (None, number):
        raise InputError(f"--listen {typed} and --port {port} name two ports; type one of them")
    return parts["six"] or parts["name"], number


def choose(listen: str | None, advertise: Sequence[str], *, retype: str) -> Place:
    """Choose the addresses; `retype` is the command as it was typed, for errors that ask to type it again."""
    names = tuple(dict.fromkeys(advertise))
    for name in names:
        _check_name(name)
    if listen is None and names:
        outside = any(not is_loopback(name) for name in names)
        of_six = any(":" in name for name in names)  # 0.0.0.0 excludes them; :: includes both
        everywhere = "::" if of_six else "0.0.0.0"
        return Place(listen=everywhere if outside else "::1" if of_six else _LOOPBACK, names=names)
    if listen is not None and (names or listen not in _ALL):
        return Place(listen=listen, names=names or (listen,))
    address = _the_only_address(retype)
    return Place(listen=listen or ("::" if ":" in address else "0.0.0.0"), names=(address,), is_automatic=True)


def _the_only_address(retype: str) -> str:
    addresses = usable_addresses()
    if not addresses:
        raise InputError(
            "no address to advertise: this machine has none that others reach; connect it to a network, or name the "
            f"one that devices will use: {retype} --advertise NAME; devices on this machine only: --listen {_LOOPBACK}"
        )
    if len(addresses) > 1:
        choices = "\n".join(f"  {retype} --advertise {address}    # {interface}" for interface, address in addresses)
        here = f"  {retype} --listen {_LOOPBACK}    # devices on this machine only"
        lines = choices if "--listen" in retype else f"{choices}\n{here}"
        raise InputError(f"this machine has several addresses; say which one devices connect to:\n{lines}")
    return addresses[0][1]


def check_listen(listen: str, *, option: str = "--listen") -> None:
    """Raise `InputError` unless this machine can listen on the address; a port is not taken."""
    problem = "none"
    try:
        for family, kind, _, _, place in socket.getaddrinfo(listen, 0, type=socket.SOCK_STREAM) if listen else ():
            try:
                with socket.socket(family, kind) as probe:
                    probe.bind(place)
                return
            except OSError as error:
                problem = error.strerror or str(error)
    except (OSError, UnicodeError) as error:  # a name that nobody knows, or that is no name
        problem = str(error)
    have = ", ".join((*_ALL, _LOOPBACK, *(address for _, address in usable_addresses())))
    raise InputError(f"{option} {listen!r}: expected an address of this machine ({have}), got {problem}")


def usable_addresses() -> list[tuple[str, str]]:
    """(interface, address) of this machine that others may reach: IPv4, and IPv6 only where there is no IPv4."""
    stats = psutil.net_if_stats()
    by_family: dict[socket.AddressFamily, list[tuple[str, str]]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for interface, addresses in sorted(psutil.net_if_addrs().items()):
        up = interface in stats and stats[interface].isup
        for entry in addresses:
            if up and entry.family in by_family and _is_usable(entry.address):
                by_family[entry.family].append((interface, entry.address))
    return by_family[socket.AF_INET] or by_family[socket.AF_INET6]


def _is_usable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a link-local one with its interface: fe80::1%eth0
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified)


def _check_name(name: str) -> None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        # a name that ends in a number is a mistyped address: 192.168.1.300
        if len(name) > 253 or not re.fullmatch(rf"{_NAME}(\.{_NAME})*", name) or name.rpartition(".")[2].isdigit():
            raise InputError(f"--advertise: expected a host name or an IP address without port, got {name!r}") from None
        return
    if address.is_unspecified:
        raise InputError(f"--advertise {name}: expected an address that devices connect to; {name} means all addresses")


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host
