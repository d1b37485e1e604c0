"""One suite for every transport: the hub in memory, and MQTT on each broker that is there."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import Counter
from typing import Any

import pytest
from sites import FAST, BrokerSite, Client, ExternalSite, HubSite, Site, connected, pump, settle

from edge_client.errors import InputError
from edge_client.transport.base import (
    MAX_PAYLOAD_BYTES,
    BrokerUrl,
    Connected,
    Disconnected,
    Received,
    Will,
    parse_broker_url,
)
from edge_client.transport.inproc import Faults, Hub, matches
from edge_client.transport.mqtt import Backoff, MqttTransport
from edge_client.transport.mqtt_client import MAX_PACKET_BYTES

CHUNK_BYTES = 122_880 + 32


@pytest.fixture
def up(site: Site) -> str:
    """The topic on which `d1` talks."""
    return site.topics.device("d1", "up")


def test_messages_of_one_publisher_arrive_in_order(site: Site, up: str) -> None:
    """200 numbered messages come as they were sent."""
    listener, device = connected(site, "coordinator", (up,)), connected(site, "d1")
    for i in range(200):
        device.transport.publish(up, b"%d" % i)
    pump(lambda: len(listener.received) == 200, listener, device)
    assert listener.received == [(up, b"%d" % i) for i in range(200)]


def test_a_whole_chunk_arrives_bit_for_bit(site: Site, up: str) -> None:
    """The largest message of fedfit, with every byte value in it."""
    payload = random.Random(1).randbytes(CHUNK_BYTES)
    listener, device = connected(site, "coordinator", (up,)), connected(site, "d1")
    device.transport.publish(up, payload)
    pump(lambda: bool(listener.received), listener, device)
    assert listener.received == [(up, payload)]
    assert type(listener.received[0][1]) is bytes


def test_an_empty_message_arrives(site: Site, up: str) -> None:
    """No payload is a payload."""
    listener, device = connected(site, "coordinator", (up,)), connected(site, "d1")
    device.transport.publish(up, b"")
    pump(lambda: bool(listener.received), listener, device)
    assert listener.received == [(up, b"")]


def test_one_level_wildcards_hear_all_devices(site: Site) -> None:
    """`dev/+/up` covers d1 and d2, and no other channel."""
    pattern = site.topics.device("d1", "up").replace("/d1/", "/+/")
    listener = connected(site, "coordinator", (pattern,))
    first, second = connected(site, "d1"), connected(site, "d2")
    first.transport.publish(site.topics.device("d1", "data"), b"other channel")
    first.transport.publish(site.topics.device("d1", "up"), b"1")
    second.transport.publish(site.topics.device("d2", "up"), b"2")
    pump(lambda: len(listener.received) >= 2, listener, first, second)
    assert sorted(listener.received) == [(site.topics.device("d1", "up"), b"1"), (site.topics.device("d2", "up"), b"2")]


def test_a_retained_message_reaches_a_later_subscriber_after_connected(site: Site) -> None:
    """The newest one only, and never before the event that opens the connection."""
    topic = site.topics.announcement
    coordinator = connected(site, "coordinator", (topic,))
    coordinator.transport.publish(topic, b"old", retain=True)
    coordinator.transport.publish(topic, b"new", retain=True)
    pump(lambda: len(coordinator.received) == 2, coordinator)
    device = connected(site, "d1", site.topics.device_subscribes("d1"))
    pump(lambda: bool(device.received), device)
    assert device.events == [Connected(), Received(topic=topic, payload=b"new", retained=True)]
    assert [event.retained for event in coordinator.events if isinstance(event, Received)] == [False, False]


def test_an_empty_retained_message_clears_the_topic(site: Site) -> None:
    """Somebody who comes later gets nothing."""
    topic = site.topics.announcement
    coordinator = connected(site, "coordinator", (topic,))
    coordinator.transport.publish(topic, b"old", retain=True)
    coordinator.transport.publish(topic, b"", retain=True)
    pump(lambda: len(coordinator.received) == 2, coordinator)
    device = connected(site, "d1", (topic,))
    settle(device)
    assert device.received == []


def test_the_will_is_sent_when_a_connection_is_lost(site: Site) -> None:
    """And is retained, if it says so."""
    topic = site.topics.device("d1", "state")
    listener = connected(site, "coordinator", (topic,))
    device = connected(site, "d1", will=Will(topic=topic, payload=b"gone"))
    device.transport.drop()
    pump(lambda: bool(listener.received), listener, device)
    later = connected(site, "coordinator", (topic,))
    pump(lambda: bool(later.received), later)
    assert listener.received == later.received == [(topic, b"gone")]


def test_the_will_is_not_sent_after_a_goodbye(site: Site) -> None:
    """`close` writes what is queued first."""
    topic = site.topics.device("d1", "state")
    listener = connected(site, "coordinator", (topic,))
    device = connected(site, "d1", will=Will(topic=topic, payload=b"gone"))
    device.transport.publish(topic, b"goodbye")
    device.transport.close()
    pump(lambda: bool(listener.received), listener)
    settle(listener)
    assert listener.received == [(topic, b"goodbye")]


def test_a_lost_connection_comes_back_with_its_subscriptions(site: Site) -> None:
    """Connected, Disconnected, Connected; then messages flow again."""
    topics = site.topics.device_subscribes("d1")
    device, coordinator = connected(site, "d1", topics), connected(site, "coordinator")
    device.transport.drop()
    pump(lambda: device.count(Connected) == 2, device)
    for topic in topics:
        coordinator.transport.publish(topic, b"again")
    pump(lambda: len(device.received) == len(topics), device, coordinator)
    assert [type(event) for event in device.events[:3]] == [Connected, Disconnected, Connected]
    assert {topic for topic, _ in device.received} == set(topics)


def test_after_connected_every_topic_is_heard(site: Site) -> None:
    """A message that is sent the moment `Connected` comes is not lost, whichever of the topics it is on."""
    topics = site.topics.device_subscribes("d1")
    coordinator = connected(site, "coordinator")
    device = site.make("d1")
    device.transport.subscribe(topics)
    device.transport.connect()
    pump(lambda: device.count(Connected) == 1, device)
    for topic in reversed(topics):
        coordinator.transport.publish(topic, b"first")
    pump(lambda: len(device.received) == len(topics), device, coordinator)
    assert device.received == [(topic, b"first") for topic in reversed(topics)]


def test_a_topic_can_be_added_to_a_connection(site: Site) -> None:
    """No second `Connected`; the retained message of the new topic comes."""
    topic = site.topics.announcement
    coordinator = connected(site, "coordinator", (topic,))
    coordinator.transport.publish(topic, b"kept", retain=True)
    pump(lambda: bool(coordinator.received), coordinator)
    device = connected(site, "d1", (site.topics.device("d1", "cmd"),))
    device.transport.subscribe((topic,))
    pump(lambda: bool(device.received), device)
    assert device.events == [Connected(), Received(topic=topic, payload=b"kept", retained=True)]


def test_a_topic_can_be_left_and_taken_again(site: Site) -> None:
    """What is published after a word that follows `unsubscribe` does not come; after `subscribe` it does again."""
    shared, up = site.topics.shared_down, site.topics.device("d1", "up")
    coordinator = connected(site, "coordinator", (up,))
    device = connected(site, "d1", (*site.topics.device_subscribes("d1"), shared))
    coordinator.transport.publish(shared, b"1")
    pump(lambda: bool(device.received), device, coordinator)
    device.transport.unsubscribe((shared, "never/asked/for"))
    device.transport.publish(up, b"left")
    pump(lambda: bool(coordinator.received), device, coordinator)
    coordinator.transport.publish(shared, b"2")
    coordinator.transport.publish(site.topics.device("d1", "cmd"), b"after 2")
    pump(lambda: len(device.received) == 2, device, coordinator)
    device.transport.subscribe((shared,))
    device.transport.publish(up, b"back")
    pump(lambda: len(coordinator.received) == 2, device, coordinator)
    coordinator.transport.publish(shared, b"3")
    pump(lambda: len(device.received) == 3, device, coordinator)
    assert [payload for _, payload in device.received] == [b"1", b"after 2", b"3"]
    assert device.count(Connected) == 1


def test_queued_bytes_count_what_is_not_written_yet(site: Site, up: str) -> None:
    """Three chunks are queued, then none."""
    device = connected(site, "d1")
    for _ in range(3):
        device.transport.publish(up, bytes(CHUNK_BYTES))
    assert device.transport.queued_bytes == 3 * CHUNK_BYTES
    pump(lambda: device.transport.queued_bytes == 0, device)


def test_what_is_published_without_a_connection_is_dropped(site: Site, up: str) -> None:
    """Before the first connection and after the end; QoS 0 has no memory, and nobody gets an exception."""
    listener, device = connected(site, "coordinator", (up,)), site.make("d1")
    device.transport.publish(up, b"too early")
    device.transport.connect()
    pump(lambda: device.count(Connected) == 1, device)
    device.transport.publish(up, b"in time")
    pump(lambda: bool(listener.received), listener, device)
    device.transport.close()
    device.transport.publish(up, b"too late")
    settle(listener)
    assert listener.received == [(up, b"in time")]
    assert device.transport.queued_bytes == 0


def test_a_device_does_not_get_what_is_sent_to_another(site: Site) -> None:
    """Its subscription is refused, or stays silent."""
    if isinstance(site, ExternalSite):
        pytest.skip("permissions of this broker are unknown")
    foreign = site.topics.device("d2", "cmd")
    spy, coordinator = site.make("d1"), connected(site, "coordinator")
    spy.transport.subscribe((foreign,))
    spy.transport.connect()
    pump(lambda: bool(spy.events), spy)
    coordinator.transport.publish(foreign, b"secret")
    settle(spy, coordinator)
    assert spy.received == []
    if isinstance(spy.events[0], Disconnected):
        assert spy.events[0].code == "subscription"
        assert foreign in spy.events[0].reason


def test_a_device_cannot_speak_as_another(site: Site, up: str) -> None:
    """Its message vanishes; its connection may go on."""
    if isinstance(site, ExternalSite):
        pytest.skip("permissions of this broker are unknown")
    listener, liar = connected(site, "coordinator", (up,)), connected(site, "d2")
    liar.transport.publish(up, b"I am d1")
    settle(listener, liar)
    assert listener.received == []


def test_poll_tells_which_of_the_callers_descriptors_are_readable(site: Site) -> None:
    """Only the one that has data."""
    device = connected(site, "d1")
    (quiet_in, quiet_out), (ready_in, ready_out) = os.pipe(), os.pipe()
    os.write(ready_out, b"x")
    assert device.transport.poll(5.0, (quiet_in, ready_in)) == [ready_in]
    for fd in (quiet_in, quiet_out, ready_in, ready_out):
        os.close(fd)


def test_a_message_that_no_broker_carries_is_a_bug_of_the_caller(site: Site, up: str) -> None:
    """128 KiB at most, no wildcards; the connection is not touched."""
    listener, device = connected(site, "coordinator", (up,)), connected(site, "d1")
    device.transport.publish(up, bytes(MAX_PAYLOAD_BYTES))
    for topic, payload in ((up, bytes(MAX_PAYLOAD_BYTES + 1)), ("a/+", b""), ("a/#", b""), ("", b"")):
        with pytest.raises(ValueError, match=r"expected a topic without wildcards|at most 131072 travel"):
            device.transport.publish(topic, payload)
    pump(lambda: bool(listener.received), listener, device)
    assert listener.received == [(up, bytes(MAX_PAYLOAD_BYTES))]
    assert device.events == [Connected()]


# MQTT only


@pytest.fixture
def mqtt(site: Site) -> BrokerSite:
    """The sites with a real broker."""
    if isinstance(site, HubSite):
        pytest.skip("there is no network in the hub")
    assert isinstance(site, BrokerSite)
    return site


def test_a_wrong_password_is_told_as_credentials(mqtt: BrokerSite) -> None:
    """And tried again, because a person may mend it."""
    if isinstance(mqtt, ExternalSite):
        pytest.skip("this broker may let everybody in")
    device = mqtt.make("d1", password="not-the-password")
    device.transport.connect()
    pump(lambda: device.count(Disconnected) == 2, device)
    assert [event.code for event in device.events if isinstance(event, Disconnected)] == ["credentials"] * 2


def test_other_threads_publish_and_close_writes_all(mqtt: BrokerSite) -> None:
    """Twenty messages from another thread, closed at once: all arrive, in order."""
    up = mqtt.topics.device("d1", "up")
    listener = connected(mqtt, "coordinator", (up,))
    transport = connected(mqtt, "d1").transport

    def send() -> None:
        for number in range(20):
            transport.publish(up, b"%d" % number)

    sender = threading.Thread(target=send)
    sender.start()
    sender.join()
    transport.close()
    pump(lambda: len(listener.received) == 20, listener)
    assert [payload for _, payload in listener.received] == [b"%d" % i for i in range(20)]


def test_wake_ends_a_wait(mqtt: BrokerSite) -> None:
    """From another thread; without it this poll would wait for the broker's keep-alive."""
    device = connected(mqtt, "d1")
    settle(device, turns=3)
    waker = threading.Timer(0.05, device.transport.wake)
    waker.start()
    assert device.transport.poll(3600.0) == []
    waker.join()


# A peer that is no broker


def serve_once(answer: bytes) -> tuple[int, threading.Thread]:
    """A server that answers the first bytes of one client with `answer` and hangs up when the client does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        peer, _ = listener.accept()
        listener.close()
        peer.recv(4096)
        peer.sendall(answer)
        while peer.recv(4096):
            pass
        peer.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return int(listener.getsockname()[1]), thread


def lonely(port: int) -> Client:
    """A client of a port that is no broker of ours; it tries again only after minutes."""
    slow = Backoff(min_s=600, max_s=600)
    return Client(
        lambda on_event: MqttTransport(host="127.0.0.1", port=port, name="d1", on_event=on_event, backoff=slow)
    )


def test_nobody_there_is_told_as_network_and_tried_again() -> None:
    """A port where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = Client(
        lambda on_event: MqttTransport(host="127.0.0.1", port=port, name="d1", on_event=on_event, backoff=FAST)
    )
    client.transport.connect()
    pump(lambda: client.count(Disconnected) == 3, client)
    assert {event.code for event in client.events if isinstance(event, Disconnected)} == {"network"}


ACCEPTED = b"\x20\x02\x00\x00"


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"\x30\xff\xff\xff\x7f", id="publish-of-256-mib"),
        pytest.param(b"\x30\xff\xff\xff\xff\xff", id="length-of-five-bytes"),
        pytest.param(b"\x30\x01\x00", id="publish-without-topic-length"),
        pytest.param(b"\x30\x03\xff\xff\x00", id="topic-longer-than-packet"),
        pytest.param(b"\x30\x04\x00\x02\xff\xfe", id="topic-not-utf-8"),
        pytest.param(b"\x30\x00", id="publish-empty"),
        pytest.param(b"\x90\x00", id="suback-empty"),
        pytest.param(b"\x90\x03\x00\x01\x55", id="suback-unknown-code"),
        pytest.param(b"\xf0\x00", id="reserved-packet"),
        pytest.param(b"\x20\x00", id="connack-empty"),
        pytest.param(b"\x40\x00", id="puback-empty"),
    ],
)
def test_a_hostile_broker_costs_a_connection_and_nothing_else(packet: bytes) -> None:
    """The connection ends with an event; no exception leaves `poll`."""
    port, server = serve_once(ACCEPTED + packet)
    client = lonely(port)
    client.transport.connect()
    pump(lambda: client.count(Disconnected) == 1, client)
    server.join(20)
    assert client.received == []


@pytest.mark.parametrize("answer", [b"", ACCEPTED], ids=["no-connack", "no-suback"])
def test_a_broker_that_never_completes_the_connection_is_left(answer: bytes) -> None:
    """With a keep-alive of one second; its silence would otherwise look like a connection for ever."""
    port, server = serve_once(answer)
    client = Client(
        lambda on_event: MqttTransport(
            host="127.0.0.1",
            port=port,
            name="d1",
            on_event=on_event,
            backoff=Backoff(min_s=600, max_s=600),
            keepalive_s=1,
        )
    )
    client.transport.subscribe(("t",))
    client.transport.connect()
    pump(lambda: bool(client.events), client)
    server.join(20)
    assert [type(event) for event in client.events] == [Disconnected]


def test_a_refused_protocol_is_told_as_refused() -> None:
    """CONNACK 1; paho on its own would go on with MQTT 3.1."""
    port, server = serve_once(b"\x20\x02\x00\x01")
    client = lonely(port)
    client.transport.connect()
    pump(lambda: client.count(Disconnected) == 1, client)
    server.join(20)
    (event,) = client.events
    assert isinstance(event, Disconnected)
    assert event.code == "refused"


def test_nothing_of_ours_is_larger_than_what_is_read() -> None:
    """The largest payload, a topic of at most 65,535 bytes and its length of 2, below 256 KiB."""
    assert CHUNK_BYTES <= MAX_PAYLOAD_BYTES
    assert MAX_PAYLOAD_BYTES + 65_537 < MAX_PACKET_BYTES


def test_back_off_has_full_jitter_and_a_limit() -> None:
    """Waits 0..1, 0..2, 0..4, ... never above 60; over many draws they fill their range."""
    rng, backoff = random.Random(3), Backoff(min_s=1, max_s=60)
    for attempt, limit in ((0, 1), (1, 2), (2, 4), (5, 32), (6, 60), (1000, 60)):
        waits = [backoff.delay_s(attempt, rng) for _ in range(500)]
        assert 0 <= min(waits) < 0.05 * limit
        assert 0.95 * limit < max(waits) <= limit
    assert all(30 <= backoff.slow_delay_s(0, rng) <= 60 for _ in range(500))
    assert all(1800 <= backoff.slow_delay_s(attempt, rng) <= 3600 for attempt in range(6, 500))


def test_broker_urls() -> None:
    """Ports 1883 and 8883 by default; user and password may be escaped."""
    assert parse_broker_url("mqtt://127.0.0.1") == BrokerUrl(host="127.0.0.1", port=1883, tls=False)
    assert parse_broker_url("mqtts://b.example:9") == BrokerUrl(host="b.example", port=9, tls=True)
    assert parse_broker_url("mqtts://u:p%40@[::1]") == BrokerUrl(
        host="::1", port=8883, tls=True, username="u", password="p@"
    )


@pytest.mark.parametrize("url", ["", "localhost", "http://h", "mqtt://", "mqtt://h:0", "mqtt://h:99999", "mqtt://h/x"])
def test_what_is_no_broker_url_is_refused(url: str) -> None:
    """The message shows what was expected and what came."""
    with pytest.raises(InputError, match="expected a broker such as"):
        parse_broker_url(url)


def test_a_refused_broker_url_does_not_show_its_password() -> None:
    """It ends up in terminals and logs."""
    with pytest.raises(InputError) as caught:
        parse_broker_url("http://user:secret@host")
    assert "secret" not in str(caught.value)


# The hub's own


@pytest.mark.parametrize(
    ("pattern", "topic", "covered"),
    [
        ("a/b", "a/b", True),
        ("a/b", "a/b/c", False),
        ("a/+/c", "a/b/c", True),
        ("a/+", "a", False),
        ("a/+", "a/b/c", False),
        ("a/#", "a/b/c", True),
        ("a/#", "a", True),
        ("a/#", "b", False),
        ("#", "$SYS/x", False),
        ("+/x", "$SYS/x", False),
        ("+", "", True),
    ],
)
def test_subscriptions_follow_mqtt(pattern: str, topic: str, covered: bool) -> None:
    """Examples from section 4.7 of MQTT 3.1.1."""
    assert matches(pattern, topic) is covered


def deliver(faults: Faults, seed: int) -> list[bytes]:
    hub = Hub(faults=faults, rng=random.Random(seed))
    listener = Client(lambda on_event: hub.transport("a", on_event))
    sender = Client(lambda on_event: hub.transport("b", on_event))
    listener.transport.subscribe(("t",))
    for client in (listener, sender):
        client.transport.connect()
    hub.poll()
    for i in range(1000):
        sender.transport.publish("t", b"%04d" % i)
    hub.poll()
    return [payload for _, payload in listener.received]


def test_hub_faults_follow_the_seed() -> None:
    """The same seed loses the same messages; another seed others."""
    faults = Faults(drop=0.1, duplicate=0.1, reorder=0.1, corrupt=0.1)
    assert deliver(faults, 1) == deliver(faults, 1) != deliver(faults, 2)


def test_each_hub_fault_does_what_it_says() -> None:
    """1,000 messages, 20 %: the binomial's standard deviation is 12.6, so 140 to 260 is within 4.7 of them."""
    sent = [b"%04d" % i for i in range(1000)]
    lost = deliver(Faults(drop=0.2), 1)
    assert 740 <= len(lost) <= 860
    assert lost == [message for message in sent if message in set(lost)]
    doubled = Counter(deliver(Faults(duplicate=0.2), 1))
    assert set(doubled) == set(sent)
    assert 140 <= sum(count == 2 for count in doubled.values()) <= 260
    shuffled = deliver(Faults(reorder=0.2), 1)
    assert sorted(shuffled) == sent != shuffled
    damaged = [(a, b) for a, b in zip(sent, deliver(Faults(corrupt=0.2), 1), strict=True) if a != b]
    assert 140 <= len(damaged) <= 260
    flipped = [int.from_bytes(a, "big") ^ int.from_bytes(b, "big") for a, b in damaged]
    assert all(bits.bit_count() == 1 for bits in flipped)


def test_a_hub_wakes_whoever_polls_it() -> None:
    """The descriptors are the caller's: so is what ends its waiting."""
    woken: list[str] = []
    hub = Hub(on_wake=lambda: woken.append("yes"))
    hub.transport("d1", lambda event: None).wake()
    assert woken == ["yes"]


def test_a_hub_is_busy_until_everybody_has_heard_everything() -> None:
    """Two that answer each other ten times, and a third who has nothing to do and is never asked."""
    hub, heard = Hub(), Counter[str]()

    def client(name: str, other: str) -> None:
        def hear(event: object) -> None:
            if isinstance(event, Received) and heard[name] < 10:
                heard[name] += 1
                transport.publish(other, b"again")

        transport = hub.transport(name, hear)
        transport.subscribe((name,))
        transport.connect()
        clients[name] = transport

    clients: dict[str, Any] = {}
    client("a", "b")
    client("b", "a")
    client("c", "a")
    hub.poll()
    assert not hub.busy
    clients["a"].publish("b", b"first")
    assert hub.busy
    hub.poll()
    assert not hub.busy
    assert heard == Counter(a=10, b=10)
    for transport in clients.values():
        transport.close()
    assert not hub.busy
