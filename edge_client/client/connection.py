"""Connects a device to its federation as its bundle describes, and tests that connection when the device joins.

Covers: all brokers of a bundle, in turn for the daemon, at once for the test.
Does not cover: the connection itself (`transport.mqtt`), messages (`link`).
"""

from __future__ import annotations

import queue
import ssl
import threading
import time
from typing import TypeAlias

from edge_client.client.identity import Bundle
from edge_client.errors import InputError, NetworkError
from edge_client.transport.base import (
    BrokerUrl,
    Connected,
    Disconnected,
    Event,
    OnEvent,
    Transport,
    Will,
    parse_broker_url,
)
from edge_client.transport.mqtt import Backoff, MqttTransport, tls_context
from edge_client.wire.topics import Topics

__all__ = ["check", "connect", "trouble"]

_CHECK_S = 10.0

Answers: TypeAlias = "queue.SimpleQueue[tuple[BrokerUrl, Disconnected | None]]"  # None: it let us in


def connect(bundle: Bundle, on_event: OnEvent, boot: str, *, longest_wait_s: float = 60.0) -> Transport:
    """Open a daemon's connection; `boot` identifies its process, `longest_wait_s` limits the wait between attempts."""
    first, *others = urls = _urls(bundle)
    return MqttTransport(
        host=first.host,
        port=first.port,
        others=[(url.host, url.port) for url in others],
        name=bundle.device,
        on_event=on_event,
        password=bundle.password,
        tls=_tls(bundle, urls),
        will=Will(topic=Topics(bundle.federation).device(bundle.device, "state"), payload=f"offline {boot}".encode()),
        boot_id=boot,
        backoff=Backoff(max_s=longest_wait_s),
    )


def check(bundle: Bundle, *, within_s: float = _CHECK_S) -> None:
    """Connect to the brokers of a bundle once, with its credentials; raises `NetworkError` if none lets us in."""
    problem_and_advice = trouble(bundle, within_s=within_s)
    if problem_and_advice is not None:
        problem, advice = problem_and_advice
        anyway = ", or store the bundle anyway with --no-check" if "no broker" in problem else ""
        colon = "" if problem.endswith("?") else ";"
        raise NetworkError(f"{problem}{colon} nothing was stored: {advice}{anyway}")


def trouble(bundle: Bundle, *, within_s: float = _CHECK_S) -> tuple[str, str] | None:
    """The reason why no broker accepts the device, and what to do about it; None if one accepts it.

    All are tried at the same time, in threads that may be left behind: a name server's silence ends when it likes.
    """
    urls = _urls(bundle)
    tls = _tls(bundle, urls)
    until = time.monotonic() + within_s
    answers: Answers = queue.SimpleQueue()
    for url in urls:
        threading.Thread(target=_answer, args=(answers, url, bundle, tls, until), name="check", daemon=True).start()
    problems = {url: Disconnected(reason=f"no answer from {url.host}:{url.port} in {within_s:g} s") for url in urls}
    for _ in urls:
        try:
            url, problem = answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            break
        if problem is None:
            return None
        problems[url] = problem
    return _explain(bundle, list(problems.values()))


def _urls(bundle: Bundle) -> list[BrokerUrl]:
    urls = [parse_broker_url(broker) for broker in bundle.brokers]
    if len({url.tls for url in urls}) > 1:  # whoever can block the encrypted ones would choose for us
        raise InputError(f"expected brokers that are all mqtts:// or all mqtt://, got {', '.join(bundle.brokers)}")
    return list(dict.fromkeys(urls))


def _tls(bundle: Bundle, urls: list[BrokerUrl]) -> ssl.SSLContext | None:
    return tls_context(bundle.ca) if urls[0].tls else None


def _answer(answers: Answers, url: BrokerUrl, bundle: Bundle, tls: ssl.SSLContext | None, until: float) -> None:
    answers.put((url, _try(url, bundle, tls, until)))


def _try(url: BrokerUrl, bundle: Bundle, tls: ssl.SSLContext | None, until: float) -> Disconnected | None:
    """Try one broker; None if it accepts the device."""
    events: list[Event] = []
    transport = MqttTransport(
        host=url.host, port=url.port, name=bundle.device, on_event=events.append, password=bundle.password, tls=tls
    )
    try:
        transport.connect()
        while not events and time.monotonic() < until:
            transport.poll(until - time.monotonic())
    finally:
        transport.close()
    if events and isinstance(events[0], Connected):
        return None
    silent = Disconnected(reason=f"{url.host}:{url.port} does not complete the connection")
    return next((event for event in events if isinstance(event, Disconnected)), silent)


def _explain(bundle: Bundle, problems: list[Disconnected]) -> tuple[str, str]:
    reasons = "; ".join(problem.reason for problem in problems)
    codes = {problem.code for problem in problems}
    anew = "get a new bundle with: coordinator device add NAME"
    if "credentials" in codes:
        return f"the broker does not let device {bundle.device!r} in ({reasons}); was it removed?", anew
    if "refused" in codes:
        return f"the broker is not the one that this bundle is for ({reasons})", anew
    what = f"no broker of this bundle answers ({reasons}); is the coordinator running, and can this machine reach it?"
    return what, "try again"
