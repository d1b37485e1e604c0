"""Topics, both ways."""

from __future__ import annotations

import pytest

from edge_client.errors import PayloadError
from edge_client.wire.topics import Topics

TOPICS = Topics("fed")


@pytest.mark.parametrize("channel", ["state", "up", "data", "cmd", "down"])
def test_a_devices_topic_is_parsed_as_it_was_built(channel: str) -> None:
    """fl/v1/fed/dev/jetson-1/up and its siblings; seven levels at most."""
    topic = TOPICS.device("jetson-1", channel)
    assert topic == f"fl/v1/fed/dev/jetson-1/{channel}"
    assert TOPICS.parse_device(topic) == ("jetson-1", channel)
    assert topic.count("/") <= 7


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "fl/v1/fed/dev/a",
        "fl/v1/fed/dev/a/",
        "fl/v1/fed/dev//up",
        "fl/v1/fed/dev/a/up/more",
        "fl/v1/fed/dev/a/other",
        "fl/v1/other/dev/a/up",
        "fl/v2/fed/dev/a/up",
        "x/fl/v1/fed/dev/a/up",
        "fl/v1/fed/dev/+/up",
        "fl/v1/fed/dev/a\n/up",
        "fl/v1/fed/dev/ä/up",
        "fl/v1/fed/all/round",
        "fl/v1/fed/dev/fl/v1/fed/dev/a/up",
    ],
)
def test_any_other_topic_is_refused(topic: str) -> None:
    """Whatever a broker delivers."""
    with pytest.raises(PayloadError, match="not a device topic"):
        TOPICS.parse_device(topic)


def test_a_device_may_use_exactly_its_own_topics() -> None:
    """Never a wildcard; what it publishes it does not hear."""
    publishes, subscribes = TOPICS.device_publishes("a"), TOPICS.device_may_subscribe("a")
    assert set(publishes) == {f"fl/v1/fed/dev/a/{channel}" for channel in ("state", "up", "data")}
    own = {f"fl/v1/fed/dev/a/{channel}" for channel in ("cmd", "down")}
    assert set(subscribes) == own | {"fl/v1/fed/coord/state", "fl/v1/fed/all/round", "fl/v1/fed/all/down"}
    assert set(TOPICS.device_subscribes("a")) == set(subscribes) - {"fl/v1/fed/all/down"}  # only while it fetches
    assert not any("+" in topic or "#" in topic for topic in (*publishes, *subscribes))
    assert not set(publishes) & set(subscribes)


def test_a_name_that_is_no_id_has_no_topic() -> None:
    """Our own mistake: a `ValueError`."""
    for name, channel in (("a/b", "up"), ("", "up"), ("a", "sideways")):
        with pytest.raises(ValueError, match="no topic"):
            TOPICS.device(name, channel)
    with pytest.raises(ValueError, match="federation"):
        Topics("a/b")
