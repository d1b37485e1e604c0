"""How a device leaves: what it says to a coordinator over a real broker, what it removes, and what stays."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from device_world import KEY, WORK
from sites import BrokerSite, connected

from edge_client import durable
from edge_client.client.identity import STATE_KIND, STATE_VERSION, Bundle
from edge_client.client.leaving import leave, say_goodbye
from edge_client.errors import ConflictError
from edge_client.transport.base import Received
from edge_client.wire.messages import (
    Decline,
    Goodbye,
    Hello,
    Message,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)


def _bundle(site: BrokerSite) -> Bundle:
    password = site.passwords["d1"]
    assert password is not None
    return Bundle(federation="f1", device="d1", brokers=(f"mqtt://127.0.0.1:{site.port}",), password=password, key=KEY)


@contextmanager
def _coordinator(site: BrokerSite, answers: Callable[[Message], list[Message]]) -> Iterator[list[Message]]:
    """A coordinator in a thread that answers each message of the device as the test wants; yields what it heard."""
    heard: list[Message] = []
    ended = threading.Event()
    client = connected(site, "coordinator", (site.topics.device("d1", "up"),))

    def work() -> None:
        seq = num_read = 0
        while not ended.is_set():
            client.transport.poll(0.01)
            for event in client.events[num_read:]:
                num_read += 1
                if not isinstance(event, Received):
                    continue
                opened = open_message(event.payload, key=bytes.fromhex(KEY), context=context_up("f1", "d1"))
                heard.append(opened.message)
                for answer in answers(opened.message):
                    session = "" if isinstance(answer, Welcome) else "s"
                    sealed = seal_message(
                        answer, session=session, seq=seq, key=bytes.fromhex(KEY), context=context_down("f1", "d1")
                    )
                    seq += 1
                    client.transport.publish(site.topics.device("d1", "cmd"), sealed)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield heard
    finally:
        ended.set()
        thread.join()


def _welcome(message: Message) -> list[Message]:
    if not isinstance(message, Hello):
        return []
    return [Welcome(boot=message.boot, hello=message.hello, session="s", epoch=1, heartbeat_s=60.0)]


@pytest.mark.broker
def test_work_that_comes_with_the_welcome_is_given_back_before_the_goodbye(broker_site: BrokerSite) -> None:
    """Otherwise the coordinator would wait for a device that is gone."""

    def answers(message: Message) -> list[Message]:
        return [*_welcome(message), WORK] if isinstance(message, Hello) else []

    with _coordinator(broker_site, answers) as heard:
        assert say_goodbye(_bundle(broker_site), within_s=20.0)
    assert [type(message) for message in heard] == [Hello, Decline, Goodbye]
    decline = heard[1]
    assert isinstance(decline, Decline)
    assert (decline.lease, decline.code) == (WORK.lease, "leaving")


@pytest.mark.broker
def test_without_an_answer_there_is_no_goodbye(broker_site: BrokerSite) -> None:
    """The coordinator is silent; a broker that nobody runs is noticed at once."""
    with _coordinator(broker_site, lambda message: []) as heard:
        assert not say_goodbye(_bundle(broker_site), within_s=0.5)
    assert [type(message) for message in heard] in ([], [Hello])  # the half second may be over before it connects


def test_leaving_removes_the_identity_and_the_work_and_nothing_that_is_the_owners(tmp_path: Path) -> None:
    """Nobody listens on port 1: the device leaves all the same; device.toml and the deployed model stay."""
    bundle = Bundle(federation="f1", device="d1", brokers=("mqtt://127.0.0.1:1",), password="p" * 20, key=KEY)
    os.close(durable.claim_state_dir(tmp_path, kind=STATE_KIND, version=STATE_VERSION))
    for name in (
        "identity/bundle.json",
        "work/l1/order.json",
        "blobs/x",
        "state.json",
        "device.toml",
        "deployed/m.onnx",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    assert leave(tmp_path, bundle) is False
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"device.toml", "deployed/m.onnx", "lock", "version"}  # the last two: the directory is a client's
    assert not (tmp_path / "identity").exists()


def test_a_running_client_is_not_pulled_away(tmp_path: Path) -> None:
    """It holds the state directory; nothing is removed."""
    lock = durable.claim_state_dir(tmp_path, kind=STATE_KIND, version=STATE_VERSION)
    (tmp_path / "state.json").write_text("{}")
    bundle = Bundle(federation="f1", device="d1", brokers=("mqtt://127.0.0.1:1",), password="p" * 20, key=KEY)
    with pytest.raises(ConflictError, match="stop it first"):
        leave(tmp_path, bundle)
    assert (tmp_path / "state.json").exists()
    os.close(lock)
