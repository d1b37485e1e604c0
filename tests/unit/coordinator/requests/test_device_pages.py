"""Pages of devices: which match, where a page ends, and what is known when nothing can match."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.control_messages import DeviceList, ListDevices
from coordinator.requests.device_pages import page
from coordinator.server.picture import Picture, PicturedDevice
from edge_client.errors import InputError


def _device(number: int) -> PicturedDevice:
    """Even ones are idle, odd ones offline; each third is on line b, the others on line a."""
    is_online = number % 2 == 0
    return PicturedDevice(
        name=f"d{number:02}",
        changed_in=1,
        state="idle" if is_online else "offline",
        is_online=is_online,
        seen_s=None,
        labels={"line": "b" if number % 3 == 0 else "a"},
    )


DEVICES = {device.name: device for device in map(_device, range(10))}
PICTURE = Picture(
    number=1,
    names_changed_in=1,
    taken_s=0.0,
    federation="f",
    epoch=1,
    brokers=(),
    is_connected=True,
    paused="",
    run=None,
    devices=DEVICES,
    num_online=5,
    counts={"idle": 5, "offline": 5},
    memory=(),
)


def _page(**asked: Any) -> DeviceList:
    return page(PICTURE, ListDevices(**asked))


def test_pages_of_four_have_all_devices_once() -> None:
    """4, 4 and 2 of ten; the last page names no next one."""
    names, after, sizes = list[str](), "", list[int]()
    while True:
        answer = _page(limit=4, after=after)
        names += [line.id for line in answer.devices]
        sizes.append(len(answer.devices))
        assert (answer.num_matching, answer.counts) == (10, {"idle": 5, "offline": 5})
        after = answer.next
        if not after:
            break
    assert (sizes, names) == ([4, 4, 2], list(DEVICES))


def test_without_a_limit_there_is_one_page() -> None:
    """As before there were pages."""
    answer = _page()
    assert (len(answer.devices), answer.next) == (10, "")


def test_states_and_labels_choose_devices() -> None:
    """0, 3, 6 and 9 are on line b, of which 0 and 6 are online."""
    answer = _page(state="online", labels={"line": "b"}, limit=1)
    assert ([line.id for line in answer.devices], answer.num_matching, answer.next) == (["d00"], 2, "d00")
    assert _page(state="offline").num_matching == 5
    assert _page(state="working").devices == ()  # a known state that nobody is in


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"after": "zz"}, "--after 'zz': the last of 10 devices is 'd09'"),
        (
            {"state": "busy"},
            "--state: expected one of idle, fetching, working, offering, online, offline, suspended, got",
        ),
        ({"labels": {"site": "x"}}, "--label site=x: no device has a label 'site'; known: line"),
        ({"labels": {"line": "c"}}, "--label line=c: no device has this value; known: a, b"),
    ],
)
def test_what_cannot_match_is_refused_with_what_is_known(asked: dict[str, Any], message: str) -> None:
    """One line."""
    with pytest.raises(InputError) as raised:
        _page(**asked)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
