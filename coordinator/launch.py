"""Puts a coordinator together from what was typed: lock, store, certificates, broker, connection; then serves."""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coordinator import pki
from coordinator.broker import DeviceAccess, EmbeddedBroker, TlsFiles, new_password
from coordinator.service import STATE_KIND, STATE_VERSION, Service, ServiceOptions, access_of
from coordinator.store.sqlite import SqliteStore
from edge_client import durable
from edge_client.errors import InputError, MachineError
from edge_client.transport.base import Event, Transport, Will, parse_broker_url
from edge_client.transport.mqtt import Backoff, MqttTransport, tls_context
from edge_client.wire.topics import Topics

__all__ = ["StartOptions", "start"]

log = logging.getLogger(__name__)

_USER = "coordinator"
# its broker is its own child, mostly: no need to be polite for long
_BACKOFF = Backoff(min_s=0.1, max_s=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """What `coordinator start` was told."""

    state_dir: Path
    listen: str = "127.0.0.1"
    port: int | None = None  # None: the usual one; 0: any free one, kept for later starts
    advertise: tuple[str, ...] = ()
    tls: bool = False
    insecure: bool = False
    broker: str | None = None
    broker_ca: Path | None = None
    heartbeat_s: float = 10.0


def start(options: StartOptions) -> None:
    """Run a coordinator in the foreground until it is told to stop."""
    lock = durable.claim_state_dir(options.state_dir, kind=STATE_KIND, version=STATE_VERSION)
    store = SqliteStore(options.state_dir / "state.db")
    try:
        _serve(options, store)
    finally:
        store.close()
        os.close(lock)


def _serve(options: StartOptions, store: SqliteStore) -> None:
    topics = Topics(store.federation(os.urandom(6).hex()))
    if options.broker is not None:
        broker, brokers, ca, connect = _external(options, topics)
    else:
        broker, brokers, ca, connect = _embedded(options, store, topics)
    store.set_setting("brokers", "\n".join(brokers))
    store.set_setting("ca", ca or "")
    log.info("federation %s, devices connect to %s", topics.federation, ", ".join(brokers))
    service = Service(
        state_dir=options.state_dir,
        store=store,
        broker=broker,
        brokers=brokers,
        ca=ca,
        connect=connect,
        options=ServiceOptions(heartbeat_s=options.heartbeat_s),
    )
    try:
        service.run()
    finally:
        if broker is not None:
            broker.stop()


Connect = Callable[[Callable[[Event], None]], Transport]
Parts = tuple[EmbeddedBroker | None, tuple[str, ...], str | None, Connect]


def _embedded(options: StartOptions, store: SqliteStore, topics: Topics) -> Parts:
    names = options.advertise or (options.listen,)
    if options.listen in ("0.0.0.0", "::") and not options.advertise:
        raise InputError("--listen on all addresses needs --advertise NAME: the address that devices connect to")
    tls = options.tls or not (_is_loopback(options.listen) or options.insecure)
    reached_as = list(dict.fromkeys((*names, "localhost", "127.0.0.1", "::1")))
    identity = pki.ensure_pki(options.state_dir / "pki", reached_as) if tls else None
    everything = (topics.everything,)
    account = DeviceAccess(name=_USER, password=new_password(), publish=everything, subscribe=everything)
    broker = EmbeddedBroker(
        options.state_dir / "broker",
        coordinator=account,
        devices=[access_of(device, topics) for device in store.devices()],
        host=options.listen,
        port=_port(options, store, tls),
        tls=TlsFiles(certificate=identity.server_certificate, key=identity.server_key) if identity else None,
    )
    broker.start()
    store.set_setting("port", str(broker.port))
    ca = identity.ca_pem if identity else None

    def connect(on_event: Callable[[Event], None]) -> Transport:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.listen, options.listen)
        return _connection(host, broker.port, account.password, ca, tls, topics, on_event)

    scheme = "mqtts" if tls else "mqtt"
    return broker, tuple(f"{scheme}://{_bracketed(name)}:{broker.port}" for name in names), ca, connect


def _port(options: StartOptions, store: SqliteStore, tls: bool) -> int:
    """What was typed; 0 means any free port, but the same one as last time: it stands in the bundles."""
    if options.port is None:
        return 8883 if tls else 1883
    if options.port == 0:
        return int(store.setting("port") or 0)
    return options.port


def _external(options: StartOptions, topics: Topics) -> Parts:
    assert options.broker is not None
    url = parse_broker_url(options.broker)
    if not (url.tls or _is_loopback(url.host) or options.insecure):
        raise InputError(f"{options.broker!r} is not encrypted; use mqtts://, or type --insecure if you mean it")
    password = os.environ.get("FEDFIT_BROKER_PASSWORD", url.password or "")
    try:
        ca = options.broker_ca.read_text(encoding="ascii") if options.broker_ca else None
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"cannot read the broker's CA {options.broker_ca}: {error}") from error

    def connect(on_event: Callable[[Event], None]) -> Transport:
        return _connection(url.host, url.port, password, ca, url.tls, topics, on_event, user=url.username)

    shown = f"{'mqtts' if url.tls else 'mqtt'}://{_bracketed(url.host)}:{url.port}"
    return None, (shown,), ca, connect


def _connection(
    host: str,
    port: int,
    password: str,
    ca: str | None,
    tls: bool,
    topics: Topics,
    on_event: Callable[[Event], None],
    user: str | None = None,
) -> Transport:
    return MqttTransport(
        host=host,
        port=port,
        name=_USER,
        username=user or _USER,
        password=password,
        on_event=on_event,
        tls=tls_context(ca) if tls else None,
        will=Will(topic=topics.coordinator_state, payload=b"offline"),
        backoff=_BACKOFF,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
