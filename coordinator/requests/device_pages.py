"""Lists of devices: which of them match, in pages, from a picture of the federation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from coordinator.control_messages import DeviceLine, DeviceList, ListDevices
from coordinator.requests.devices import compare_versions
from coordinator.server.picture import Picture, PicturedDevice
from edge_client.errors import InputError

__all__ = ["page"]

# what a device may report, and what the coordinator knows without it; "online" is any but the last two
STATES = ("idle", "fetching", "working", "offering", "online", "offline", "suspended")
_SHOWN = 5  # of the labels that there are


def page(picture: Picture, request: ListDevices) -> DeviceList:
    """The devices that were asked for, sorted by name; raises `InputError` for what no device can match."""
    matching = _matching(picture, request)
    rows = [device for device in matching if device.name > request.after]
    if request.after and matching and not rows:
        raise InputError(f"--after {request.after!r}: the last of {len(matching)} devices is {matching[-1].name!r}")
    shown = rows[: request.limit] if request.limit else rows
    return DeviceList(
        devices=tuple(_line(device, picture) for device in shown),
        num_matching=len(matching),
        next=shown[-1].name if len(shown) < len(rows) else "",
        counts=dict(Counter(device.state for device in matching)),
    )


def _matching(picture: Picture, request: ListDevices) -> Sequence[PicturedDevice]:
    devices = list(picture.devices.values())
    if request.state:
        if request.state not in STATES:
            raise InputError(f"--state: expected one of {', '.join(STATES)}, got {request.state!r}")
        devices = [device for device in devices if _is_in(device, request.state)]
    for key, value in request.labels.items():
        _check_label(picture, key, value)
        devices = [device for device in devices if device.labels.get(key) == value]
    return devices


def _is_in(device: PicturedDevice, state: str) -> bool:
    return device.is_online if state == "online" else device.state == state


def _check_label(picture: Picture, key: str, value: str) -> None:
    labels = [device.labels for device in picture.devices.values()]
    values = Counter(known[key] for known in labels if key in known)
    if not values:
        keys = Counter(known for one in labels for known in one)
        raise InputError(f"--label {key}={value}: no device has a label {key!r}; known: {_listed(keys)}")
    if value not in values:
        raise InputError(f"--label {key}={value}: no device has this value; known: {_listed(values)}")


def _listed(known: Mapping[str, int]) -> str:
    names = sorted(known)
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest if names else "none"


def _line(device: PicturedDevice, picture: Picture) -> DeviceLine:
    return DeviceLine(
        id=device.name,
        online=device.is_online,
        seen_s_ago=round(max(0.0, picture.taken_s - device.seen_s), 1) if device.seen_s is not None else None,
        client=device.client,
        client_is=compare_versions(device.client) if device.client is not None else None,
        plan=device.plan,
        budget_bytes=device.budget_bytes,
        labels=device.labels,
        state="suspended: flooding" if device.state == "suspended" else device.reported,
        phase=device.phase,
        step=device.step,
        total=device.total,
        loss=device.loss,
    )
