"""Where the broker listens, and what it is called, from what was typed and what the machine has."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from coordinator.server.addresses import Place, choose, split_listen, usable_addresses
from edge_client.errors import InputError

V4, V6 = socket.AF_INET, socket.AF_INET6
LOOPBACK = {"lo": [(V4, "127.0.0.1"), (V6, "::1")]}


Interfaces = dict[str, list[tuple[int, str]]]


def _machine(patch: pytest.MonkeyPatch, interfaces: Interfaces, down: tuple[str, ...] = ()) -> None:
    """A machine with these interfaces."""
    entries = {
        name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
        for name, addresses in (LOOPBACK | interfaces).items()
    }
    stats = {name: SimpleNamespace(isup=name not in down) for name in entries}
    patch.setattr(psutil, "net_if_addrs", lambda: entries)
    patch.setattr(psutil, "net_if_stats", lambda: stats)


def _choose(listen: str | None, *names: str) -> Place:
    return choose(listen, names, retype="coordinator start --listen 0.0.0.0")


@pytest.mark.parametrize(
    ("listen", "typed", "listens", "names"),
    [
        (None, ["192.168.1.10"], "0.0.0.0", ["192.168.1.10"]),
        (None, ["fed.example", "10.0.0.1", "fed.example"], "0.0.0.0", ["fed.example", "10.0.0.1"]),
        (None, ["localhost"], "127.0.0.1", ["localhost"]),
        (None, ["fd00::1", "10.0.0.1"], "::", ["fd00::1", "10.0.0.1"]),
        (None, ["::1"], "::1", ["::1"]),
        ("127.0.0.1", ["tunnel.example"], "127.0.0.1", ["tunnel.example"]),
        ("192.168.1.10", [], "192.168.1.10", ["192.168.1.10"]),
        ("::", ["fd00::1"], "::", ["fd00::1"]),
    ],
)
def test_what_was_typed_decides(listen: str | None, typed: list[str], listens: str, names: list[str]) -> None:
    """Nothing is looked up; names that only this machine knows open no port to others."""
    place = _choose(listen, *typed)
    assert (place.listen, list(place.names), place.is_automatic) == (listens, names, False)


def test_the_only_address_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback, link-local and interfaces that are down do not count, nor IPv6 beside IPv4."""
    interfaces = {"eth0": [(V4, "10.1.2.3"), (V6, "fd00::3"), (V6, "fe80::1%eth0")], "docker0": [(V4, "172.17.0.1")]}
    _machine(monkeypatch, interfaces | {"usb0": [(V4, "169.254.7.7")]}, down=("docker0",))
    for listen in ("0.0.0.0", None):
        place = _choose(listen)
        assert (place.listen, place.names, place.is_automatic) == ("0.0.0.0", ("10.1.2.3",), True)
        assert place.here == "127.0.0.1"


def test_ipv6_is_taken_where_there_is_no_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """One global address."""
    _machine(monkeypatch, {"eth0": [(V6, "fd00::3"), (V6, "fe80::1%eth0")]})
    assert usable_addresses() == [("eth0", "fd00::3")]


def test_several_addresses_are_listed_as_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready to type, with the interface as a comment."""
    _machine(monkeypatch, {"eth0": [(V4, "10.1.2.3")], "wlan0": [(V4, "192.168.1.10")]})
    with pytest.raises(InputError) as caught:
        _choose("0.0.0.0")
    assert str(caught.value).splitlines() == [
        "this machine has several addresses; say which one devices connect to:",
        "  coordinator start --listen 0.0.0.0 --advertise 10.1.2.3    # eth0",
        "  coordinator start --listen 0.0.0.0 --advertise 192.168.1.10    # wlan0",
    ]


def test_who_typed_no_address_may_also_stay_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of the choices."""
    _machine(monkeypatch, {"eth0": [(V4, "10.1.2.3")], "wlan0": [(V4, "192.168.1.10")]})
    with pytest.raises(InputError) as caught:
        choose(None, (), retype="coordinator start")
    assert str(caught.value).splitlines()[1:] == [
        "  coordinator start --advertise 10.1.2.3    # eth0",
        "  coordinator start --advertise 192.168.1.10    # wlan0",
        "  coordinator start --listen 127.0.0.1    # devices on this machine only",
    ]


def test_no_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a network."""
    _machine(monkeypatch, {})
    with pytest.raises(InputError, match=r"no address to advertise.*--advertise NAME"):
        _choose("::")


@pytest.mark.parametrize(
    "name", ["", "host:8883", "mqtts://host", "a b", "-a", "0.0.0.0", "::", "x" * 64, "a..b", "192.168.1.300"]
)
def test_what_no_device_could_connect_to_is_refused(name: str) -> None:
    """Before anything is made."""
    with pytest.raises(InputError, match="--advertise"):
        _choose(None, name)


def test_a_tunnel_to_loopback_is_not_loopback() -> None:
    """Devices elsewhere send their passwords through it: encrypted, unless somebody says otherwise."""
    assert _choose("127.0.0.1", "localhost").is_loopback
    assert not _choose("127.0.0.1", "tunnel.example").is_loopback


def test_the_certificate_has_all_names_and_those_of_loopback() -> None:
    """The advertised ones, the one it listens on, and this machine's own."""
    assert _choose("10.0.0.1", "fed.example").certified == ["fed.example", "10.0.0.1", "localhost", "127.0.0.1", "::1"]
    assert _choose(None, "fed.example").certified == ["fed.example", "localhost", "127.0.0.1", "::1"]


@pytest.mark.parametrize(
    ("typed", "port", "meant"),
    [
        ("127.0.0.1:8883", None, ("127.0.0.1", 8883)),
        ("127.0.0.1:0", 0, ("127.0.0.1", 0)),
        ("[::1]:8883", None, ("::1", 8883)),
        ("::1", 8883, ("::1", 8883)),  # an address in IPv6 without a port
        ("127.0.0.1", 8883, ("127.0.0.1", 8883)),
        (None, 8883, (None, 8883)),
        ("127.0.0.1:http", None, ("127.0.0.1:http", None)),  # refused later, with this machine's addresses
    ],
)
def test_an_address_to_listen_on_may_have_its_port(
    typed: str | None, port: int | None, meant: tuple[object, ...]
) -> None:
    """As everybody writes it; IPv6 takes brackets there."""
    assert split_listen(typed, port) == meant


def test_two_ports_are_one_too_many() -> None:
    """Neither wins."""
    with pytest.raises(InputError, match=r"--listen 127.0.0.1:8883 and --port 1883 name two ports"):
        split_listen("127.0.0.1:8883", 1883)
