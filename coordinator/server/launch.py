"""Builds a coordinator from the options of `coordinator start`: lock, store, certificates, broker, connection."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.broker import certificates as pki
from coordinator.broker.broker import DeviceAccess, EmbeddedBroker, TlsFiles, new_password
from coordinator.control import Answer
from coordinator.server import addresses
from coordinator.server.addresses import Place, bracketed, is_loopback
from coordinator.server.broker_accounts import access_of
from coordinator.server.service import Service, ServiceOptions
from coordinator.state import STATE_KIND, STATE_VERSION, default_state_dir
from coordinator.store.sqlite import SqliteStore
from edge_client import durable, logs
from edge_client.client.supervisor import Supervisor
from edge_client.errors import InputError
from edge_client.transport.base import BrokerUrl, Event, Transport, Will, parse_broker_url
from edge_client.transport.mqtt import Backoff, MqttTransport, tls_context
from edge_client.wire.topics import Topics

__all__ = ["StartOptions", "broker_password", "check", "start"]

log = logging.getLogger(__name__)

_USER = "coordinator"
_EMBEDDED_ONLY = ("--listen", "--advertise", "--port", "--tls")
_CREDENTIAL = "broker-password"  # in the folder that systemd hands over (LoadCredential)
# the broker is mostly a child of this process: no need to back off for long
_BACKOFF = Backoff(min_s=0.1, max_s=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options of `coordinator start`."""

    state_dir: Path
    listen: str | None = None  # None: as last time, or all addresses
    port: int | None = None  # None: the usual one; 0: any free one, kept for later starts
    advertise: tuple[str, ...] = ()
    tls: bool = False
    insecure: bool = False
    broker: str | None = None
    broker_ca: Path | None = None
    broker_password_file: Path | None = None  # None: FEDFIT_BROKER_PASSWORD, or what systemd hands over
    heartbeat_s: float = 10.0
    metrics_port: int | None = None  # None: no metrics; 0: any free one
    metrics_listen: str = "127.0.0.1"

    def retyped(self) -> str:
        """The command as it was typed, without `--advertise`."""
        words = ["coordinator", "start"]
        words += ["--listen", self.listen] if self.listen is not None else []
        words += ["--port", str(self.port)] if self.port is not None else []
        words += [name for name, typed in (("--tls", self.tls), ("--insecure", self.insecure)) if typed]
        words += ["--state-dir", str(self.state_dir)] if self.state_dir != default_state_dir() else []
        return shlex.join(words)


def start(options: StartOptions, commands: Callable[[Service], Answer], context: logs.Context | None = None) -> None:
    """Run a coordinator in the foreground until a signal stops it.

    `commands` makes what answers the requests of the control socket; `context` adds the run and round to log lines.
    """
    supervisor = Supervisor.from_environment()  # before there are children, which must not answer for us
    durable.check_not_root(options.state_dir, "fedfit-coordinator")
    check(options)  # before anything is written: a mistyped start leaves nothing behind
    lock = durable.claim_state_dir(options.state_dir, kind=STATE_KIND, version=STATE_VERSION)
    store = SqliteStore(options.state_dir / "state.db")
    try:
        options = _as_last_time(options, store)
        _serve(options, _place(options), store, commands, supervisor, context)
    finally:
        store.close()
        os.close(lock)


def check(options: StartOptions) -> None:
    """Raise for options that a first start would refuse, and write nothing; later starts also use what is stored."""
    if not durable.is_there(options.state_dir / "state.db"):
        _place(options)


def _as_last_time(options: StartOptions, store: SqliteStore) -> StartOptions:
    """Addresses that are not typed are those of the last start, because bundles hold them."""
    if options.broker is not None or options.listen is not None or options.advertise:
        return options
    advertised = tuple(filter(None, store.settings.get("advertise").split("\n")))
    return replace(options, listen=store.settings.get("listen") or None, advertise=advertised)


def _place(options: StartOptions) -> Place | None:
    """Where the embedded broker listens; None for somebody else's broker."""
    if options.port is not None and not 0 <= options.port <= 65_535:
        raise InputError(f"--port: expected 0 to 65535, got {options.port}")
    if options.metrics_port is not None and not 0 <= options.metrics_port <= 65_535:
        raise InputError(f"--metrics-port: expected 0 to 65535, got {options.metrics_port}")
    if options.broker is None:
        external_only = {"--broker-ca": options.broker_ca, "--broker-password-file": options.broker_password_file}
        for name in [name for name, value in external_only.items() if value is not None]:
            raise InputError(f"{name} is of a broker of your own; name it with --broker")
        place = addresses.choose(options.listen, options.advertise, retype=options.retyped())
        addresses.check_listen(place.listen)
        return place
    typed = (options.listen is not None, bool(options.advertise), bool(options.port), options.tls)
    embedded_only = [name for name, is_typed in zip(_EMBEDDED_ONLY, typed, strict=True) if is_typed]
    if embedded_only:
        raise InputError(
            f"{', '.join(embedded_only)}: of fedfit's own broker only; devices connect to the one of --broker"
        )
    _external_url(options)
    if options.broker_ca is not None:
        pki.read_foreign_ca(options.broker_ca)
    return None


def _external_url(options: StartOptions) -> BrokerUrl:
    assert options.broker is not None
    url = parse_broker_url(options.broker)
    if not (url.tls or is_loopback(url.host) or options.insecure):
        raise InputError(f"{options.broker!r} is not encrypted; use mqtts://, or type --insecure if you mean it")
    return url


def _serve(
    options: StartOptions,
    place: Place | None,
    store: SqliteStore,
    commands: Callable[[Service], Answer],
    supervisor: Supervisor,
    context: logs.Context | None,
) -> None:
    topics = Topics(store.settings.federation(os.urandom(6).hex()))
    if place is None:
        broker, brokers, ca, connect = _external(options, topics)
    else:
        broker, brokers, ca, connect = _embedded(options, place, store, topics)
    store.settings.set("brokers", "\n".join(brokers))
    store.settings.set("ca", ca or "")
    store.settings.set("external", "yes" if place is None else "")
    store.settings.set("listen", options.listen or "")
    store.settings.set("advertise", "\n".join(options.advertise))
    if place is not None and place.is_automatic:
        log.info("advertising %s, the only address of this machine; --advertise NAME names another", place.names[0])
    log.info("federation %s, devices connect to %s", topics.federation, ", ".join(brokers))
    service = Service(
        state_dir=options.state_dir,
        store=store,
        broker=broker,
        brokers=brokers,
        ca=ca,
        connect=connect,
        options=ServiceOptions(heartbeat_s=options.heartbeat_s),
        supervisor=supervisor,
    )
    if context is not None:
        context.look = service.in_hand
    try:
        with _metrics(options, service):
            service.run(commands(service))
    finally:
        if broker is not None:
            broker.stop()


@contextlib.contextmanager
def _metrics(options: StartOptions, service: Service) -> Iterator[None]:
    """Serve metrics while the coordinator runs, if `--metrics-port` asks for them."""
    if options.metrics_port is None:
        yield
        return
    from coordinator.server.metrics import Metrics  # loads an HTTP server

    metrics = Metrics(options.metrics_port, options.metrics_listen)
    service.observers.append(metrics.look)
    log.info("metrics on http://%s:%d/metrics", bracketed(options.metrics_listen), metrics.port)
    try:
        yield
    finally:
        metrics.close()


Connect = Callable[[Callable[[Event], None]], Transport]
BrokerAccess = tuple[EmbeddedBroker | None, tuple[str, ...], str | None, Connect]


def _embedded(options: StartOptions, place: Place, store: SqliteStore, topics: Topics) -> BrokerAccess:
    tls = options.tls or not (place.is_loopback or options.insecure)
    known_ca = "" if store.settings.get("external") else store.settings.get("ca")
    identity = pki.ensure_pki(options.state_dir / "pki", place.certified, known_ca=known_ca) if tls else None
    everything = (topics.everything,)
    account = DeviceAccess(name=_USER, password=new_password(), publish=everything, subscribe=everything)
    broker = EmbeddedBroker(
        options.state_dir / "broker",
        coordinator=account,
        devices=[access_of(device, topics) for device in store.devices.all()],
        host=place.listen,
        port=_port(options, store, tls),
        tls=TlsFiles(certificate=identity.server_certificate, key=identity.server_key) if identity else None,
    )
    broker.start()
    store.settings.set("port", str(broker.port))
    ca = identity.ca_pem if identity else None

    def connect(on_event: Callable[[Event], None]) -> Transport:
        return _connection(place.here, broker.port, account.password, ca, tls, topics, on_event)

    scheme = "mqtts" if tls else "mqtt"
    return broker, tuple(f"{scheme}://{bracketed(name)}:{broker.port}" for name in place.names), ca, connect


def _port(options: StartOptions, store: SqliteStore, tls: bool) -> int:
    """The port of the broker; 0 means any free one, but the same as last time, because bundles hold it."""
    if options.port is None:
        return 8883 if tls else 1883
    if options.port == 0:
        return int(store.settings.get("port") or 0)
    return options.port


def _external(options: StartOptions, topics: Topics) -> BrokerAccess:
    url = _external_url(options)
    password = broker_password(options) or url.password or ""
    ca = pki.read_foreign_ca(options.broker_ca) if options.broker_ca is not None else None

    def connect(on_event: Callable[[Event], None]) -> Transport:
        return _connection(url.host, url.port, password, ca, url.tls, topics, on_event, user=url.username)

    shown = f"{'mqtts' if url.tls else 'mqtt'}://{bracketed(url.host)}:{url.port}"
    return None, (shown,), ca, connect


def broker_password(options: StartOptions) -> str:
    """The password of somebody else's broker: from a file, from the environment, or as systemd hands it over."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    file = options.broker_password_file or (Path(folder) / _CREDENTIAL if folder else None)
    if options.broker_password_file is None and "FEDFIT_BROKER_PASSWORD" in os.environ:
        return os.environ["FEDFIT_BROKER_PASSWORD"]
    if file is None or (options.broker_password_file is None and not file.exists()):
        return ""
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError(f"cannot read the broker's password from {file}: {reason}") from error


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
