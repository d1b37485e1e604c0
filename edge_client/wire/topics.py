"""Every MQTT topic of fedfit, built and parsed here only.

fl/v1/{fed}/all/round       retained pointer to the newest model; carries no authority
fl/v1/{fed}/all/down        chunks to all devices that listen; one listens only while it fetches, when it is asked to
fl/v1/{fed}/coord/state     retained, with a will: the coordinator is there, and in which epoch
fl/v1/{fed}/dev/{d}/state   retained, with a will: a hint that the device is there
fl/v1/{fed}/dev/{d}/cmd     control messages to the device
fl/v1/{fed}/dev/{d}/up      control messages from the device
fl/v1/{fed}/dev/{d}/down    chunks to the device
fl/v1/{fed}/dev/{d}/data    chunks from the device
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.errors import PayloadError
from edge_client.records import is_id

__all__ = ["Topics"]

_FROM_DEVICE = ("state", "up", "data")
_TO_DEVICE = ("cmd", "down")


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one federation."""

    federation: str

    def __post_init__(self) -> None:
        if not is_id(self.federation):
            raise ValueError(f"federation id {self.federation!r} is not [A-Za-z0-9_-]{{1,64}}")

    @property
    def _root(self) -> str:
        return f"fl/v1/{self.federation}"

    @property
    def everything(self) -> str:
        """The filter of all topics of the federation; for the coordinator's own account only."""
        return f"{self._root}/#"

    @property
    def announcement(self) -> str:
        """The topic that announces the newest model."""
        return f"{self._root}/all/round"

    @property
    def shared_down(self) -> str:
        """The topic of chunks for several devices."""
        return f"{self._root}/all/down"

    @property
    def coordinator_state(self) -> str:
        """The topic of the coordinator's presence."""
        return f"{self._root}/coord/state"

    def device(self, name: str, channel: str) -> str:
        """One of a device's own topics: state, up, data, cmd or down."""
        if not is_id(name) or channel not in _FROM_DEVICE + _TO_DEVICE:
            raise ValueError(f"no topic for device {name!r}, channel {channel!r}")
        return f"{self._root}/dev/{name}/{channel}"

    def device_publishes(self, name: str) -> tuple[str, ...]:
        """All that a device may publish to; exact topics, never a wildcard."""
        return tuple(self.device(name, channel) for channel in _FROM_DEVICE)

    def device_subscribes(self, name: str) -> tuple[str, ...]:
        """What a device subscribes to on every connection."""
        topics = tuple(self.device(name, channel) for channel in _TO_DEVICE)
        return (*topics, self.coordinator_state, self.announcement)

    def device_may_subscribe(self, name: str) -> tuple[str, ...]:
        """All that a device may subscribe to; exact topics, never a wildcard."""
        return (*self.device_subscribes(name), self.shared_down)

    def coordinator_subscribes(self) -> tuple[str, ...]:
        """The topics that the coordinator subscribes to: everything that devices publish."""
        return tuple(f"{self._root}/dev/+/{channel}" for channel in _FROM_DEVICE)

    def parse_device(self, topic: str) -> tuple[str, str]:
        """Device and channel of a topic below `dev/`; raises `PayloadError` for any other."""
        head, _, rest = topic.partition(f"{self._root}/dev/")
        name, _, channel = rest.partition("/")
        if head or not is_id(name) or channel not in _FROM_DEVICE + _TO_DEVICE:
            raise PayloadError("topic", f"not a device topic of this federation: {topic[:120]!r}")
        return name, channel
