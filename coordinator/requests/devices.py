"""What people ask about devices, and the answers: enrol, label, list, show, remove.

Covers: the running coordinator (`DeviceCommands`), and the store alone when none runs (`without_coordinator`).
Does not cover: the order of a change (`coordinator.server.enrolment`), what is shown (`coordinator.cli`).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.broker.broker import new_password
from coordinator.control_messages import (
    AddDevices,
    AddedDevices,
    DeploymentLine,
    DeviceDetails,
    DeviceFailure,
    DeviceLabels,
    LabelDevice,
    RemovedDevices,
    RemoveDevices,
    Request,
    ShowDevice,
)
from coordinator.store.base import Store
from coordinator.store.rows import DeviceRow, LeaseRow
from coordinator.store.sqlite import SqliteStore
from edge_client import __version__, durable
from edge_client.client.identity import Bundle
from edge_client.errors import ConflictError, InputError, MachineError, NoSuchNameError
from edge_client.records import is_id

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = [
    "DeviceCommands",
    "StoredDevices",
    "bundle_for",
    "changed_labels",
    "check_labels",
    "compare_versions",
    "new_device",
    "stored_without_coordinator",
    "without_coordinator",
]

_LABEL_KEY = r"[A-Za-z0-9_.-]{0,63}[A-Za-z0-9_.]"  # a dash at the end removes it
_MAX_LABEL_VALUE = 128
_MAX_LABELS = 64
_SHOWN_FAILURES = 5


def new_device(name: str, labels: Mapping[str, str] | None = None) -> DeviceRow:
    """A device with fresh secrets."""
    if not is_id(name) or name.startswith("-"):  # no command could name it
        raise InputError(f"device name {name!r}: expected 1 to 64 letters, digits, '-' (not as the first) or '_'")
    return DeviceRow(name=name, key=secrets.token_hex(32), password=new_password(), labels=dict(labels or {}))


def bundle_for(device: DeviceRow, *, federation: str, brokers: tuple[str, ...], ca: str | None) -> Bundle:
    """What the device joins with."""
    return Bundle(
        federation=federation, device=device.name, brokers=brokers, ca=ca, password=device.password, key=device.key
    )


def compare_versions(client: str) -> str:
    """A client's version against ours: same, older or newer; `unknown` if it is none."""
    theirs, ours = _numbers(client), _numbers(__version__)
    if theirs is None or ours is None:
        return "unknown"
    return "same" if theirs == ours else "older" if theirs < ours else "newer"


def _numbers(version: str) -> tuple[int, ...] | None:
    match = re.match(r"(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else None


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise `InputError` for labels by which no run could choose devices."""
    for key, value in labels.items():
        if not re.fullmatch(_LABEL_KEY, key) or len(value) > _MAX_LABEL_VALUE:
            raise InputError(
                f"label {f'{key}={value}'[:200]!r}: expected KEY=VALUE with 1 to 64 letters, digits, '.', '_' or '-' "
                f"(not as the last) in the key and at most {_MAX_LABEL_VALUE} characters in the value"
            )
    if len(labels) > _MAX_LABELS:
        raise InputError(f"expected at most {_MAX_LABELS} labels, got {len(labels)}")


def changed_labels(labels: Mapping[str, str], put: Mapping[str, str], drop: Sequence[str]) -> dict[str, str]:
    """The coordinator's labels of a device after a change; dropping a label that is not there changes nothing."""
    changed = {key: value for key, value in {**labels, **put}.items() if key not in drop or key in put}
    check_labels(changed)
    return changed


def _fresh(
    names: Sequence[str], labels: Mapping[str, str] | None, enrolled: Sequence[DeviceRow], *, again: bool
) -> list[DeviceRow]:
    """New rows of these names: of devices that nobody has yet, or (`again`) of those that are enrolled."""
    check_labels(labels or {})
    known = {device.name: device for device in enrolled}
    rows = []
    for name in dict.fromkeys(names):
        row = new_device(name, labels)
        if again and name not in known:
            raise NoSuchNameError.of("device", name, list(known))
        if not again and name in known:
            raise ConflictError(
                f"device {name!r} exists already; choose another name, or give it fresh secrets with --replace"
            )
        rows.append(replace(row, labels=known[name].labels) if again and labels is None else row)
    return rows


def _enrolled(name: str, store: Store) -> DeviceRow:
    """The row of an enrolled device; raises `NoSuchNameError`, which names the known ones."""
    row = store.devices.get(name)
    if row is None:
        raise NoSuchNameError.of("device", name, [device.name for device in store.devices.all()])
    return row


class DeviceCommands:
    """Requests about devices to a running coordinator."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def answers(self) -> Mapping[type[Request[Any]], Callable[[Any], object]]:
        """What answers each request."""
        return {
            AddDevices: self._add,
            ShowDevice: self._show,
            LabelDevice: self._label,
            RemoveDevices: self._remove,
        }

    def _add(self, request: AddDevices) -> AddedDevices:
        """Enrol devices, or give enrolled ones fresh secrets: their old bundles end at once."""
        service = self._service
        rows = _fresh(request.names, request.labels, service.store.devices.all(), again=request.replace)
        service.enrolment.add(rows, replace=request.replace)
        bundles = (
            bundle_for(row, federation=service.federation, brokers=service.brokers, ca=service.ca) for row in rows
        )
        return AddedDevices(bundles=tuple(bundles), external=service.enrolment.is_external)

    def _show(self, request: ShowDevice) -> DeviceDetails:
        service, now = self._service, time.monotonic()
        row = _enrolled(request.name, service.store)
        present = service.roster.presence(row.name)
        failures = service.store.leases.device_failures(row.name, _SHOWN_FAILURES)
        return DeviceDetails(
            **self._facts(row, service.roster.online(now), now),
            labels_given=row.labels,
            labels_own=present.labels if present else {},
            profile=present.profile if present else None,
            free_bytes=present.free_bytes if present else None,
            tasks=present.tasks if present else {},
            brokers=service.brokers,
            deployed=self._deployed(row.name, now),
            failures=tuple(_failure(lease) for lease in failures),
        )

    def _facts(self, row: DeviceRow, online: frozenset[str], now: float) -> dict[str, Any]:
        """The arguments of `DeviceLine`, with which those of `DeviceDetails` begin."""
        roster = self._service.roster
        present = roster.presence(row.name)
        is_suspended = roster.is_suspended(row.name, now)
        beat = present.heartbeat if present and not is_suspended else None
        plan = self._service.conductor.plan_of(row.name)
        return {
            "id": row.name,
            "online": row.name in online,
            "seen_s_ago": round(now - present.last_seen, 1) if present else None,
            "client": present.client if present else None,
            "client_is": compare_versions(present.client) if present else None,
            "plan": plan.describe() if plan is not None else "",
            "budget_bytes": present.profile.budget_bytes if present else None,
            "labels": roster.labels_of(row.name),
            "state": "suspended: flooding" if is_suspended else beat.state if beat else None,
            "phase": beat.phase if beat else "",
            "step": beat.step if beat else 0,
            "total": beat.total if beat else 0,
            "loss": beat.loss if beat else None,
        }

    def _deployed(self, name: str, now: float) -> DeploymentLine | None:
        """The newest model that the device was to use."""
        rows = [row for row in self._service.store.deployments.all() if row.device == name]
        return self._service.deployments.describe(rows[-1], self._service.roster.online(now)) if rows else None

    def _label(self, request: LabelDevice) -> DeviceLabels:
        """Change the coordinator's labels of a device, which override those of the device's file."""
        service = self._service
        labels = _enrolled(request.name, service.store).labels
        service.enrolment.set_labels(request.name, changed_labels(labels, request.put, request.drop))
        return DeviceLabels(id=request.name, labels=service.roster.labels_of(request.name))

    def _remove(self, request: RemoveDevices) -> RemovedDevices:
        """Forget devices; all, or none and an error."""
        names = tuple(dict.fromkeys(request.names))
        for name in names:
            _enrolled(name, self._service.store)
        self._service.enrolment.remove(names)
        return RemovedDevices(removed=names, external=self._service.enrolment.is_external)


def _failure(lease: LeaseRow) -> DeviceFailure:
    return DeviceFailure(
        run=lease.run,
        round=lease.round,
        state=lease.state,
        code=lease.code,
        detail=lease.detail,
        log=tuple(lease.log),
    )


class StoredDevices:
    """The same changes on the store of a coordinator that does not run; its next start knows them."""

    def __init__(self, store: SqliteStore) -> None:
        self._store = store

    def add(self, request: AddDevices) -> AddedDevices:
        """Enrol devices, or give enrolled ones fresh secrets."""
        store = self._store
        rows = _fresh(request.names, request.labels, store.devices.all(), again=request.replace)
        brokers = tuple(store.settings.get("brokers").split())
        if not brokers:  # every start before this one failed: nobody knows yet where devices would connect to
            raise MachineError("this coordinator has never served: start it, then add devices: coordinator start")
        store.devices.add(*rows, replace=request.replace)
        federation, ca = store.settings.federation(""), store.settings.get("ca") or None
        bundles = (bundle_for(row, federation=federation, brokers=brokers, ca=ca) for row in rows)
        return AddedDevices(bundles=tuple(bundles), external=self._is_external)

    def label(self, request: LabelDevice) -> DeviceLabels:
        """Change the coordinator's labels of a device; those of the device's file are unknown."""
        labels = changed_labels(_enrolled(request.name, self._store).labels, request.put, request.drop)
        self._store.devices.set_labels(request.name, labels)
        return DeviceLabels(id=request.name, labels=labels)

    def remove(self, request: RemoveDevices) -> RemovedDevices:
        """Forget devices; all, or none and an error."""
        names = tuple(dict.fromkeys(request.names))
        for name in names:
            _enrolled(name, self._store)
        for name in names:
            self._store.devices.remove(name)
        return RemovedDevices(removed=names, external=self._is_external)

    @property
    def _is_external(self) -> bool:
        return bool(self._store.settings.get("external"))


@contextlib.contextmanager
def without_coordinator(state_dir: Path, *, kind: str, version: int) -> Iterator[StoredDevices]:
    """The devices of a coordinator that does not run, locked meanwhile."""
    with stored_without_coordinator(state_dir, kind=kind, version=version) as store:
        yield StoredDevices(store)


@contextlib.contextmanager
def stored_without_coordinator(state_dir: Path, *, kind: str, version: int) -> Iterator[SqliteStore]:
    """The store of a coordinator that does not run, locked meanwhile."""
    if not durable.is_there(state_dir / "version"):
        raise MachineError(
            f"there is no coordinator in {state_dir} yet; start it once: coordinator start --state-dir {state_dir}"
        )
    with durable.as_owner(state_dir):
        lock = durable.claim_state_dir(state_dir, kind=kind, version=version)
        store = SqliteStore(state_dir / "state.db")
        try:
            yield store
        finally:
            store.close()
            os.close(lock)
