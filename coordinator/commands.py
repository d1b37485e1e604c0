"""What people ask of a running coordinator, and the answers: devices, runs, how things stand."""

from __future__ import annotations

import inspect
import secrets
import time
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coordinator import evaluation
from coordinator.broker import new_password
from coordinator.store.base import DeviceRow, LeaseRow, RunRow
from edge_client.errors import InputError, NoSuchNameError, PayloadError
from edge_client.files import RunFile
from edge_client.identity import Bundle
from edge_client.methods import registry as methods
from edge_client.models import registry as models
from edge_client.records import check_value, from_map, is_id, to_map

if TYPE_CHECKING:
    from coordinator.service import Service

__all__ = ["Commands", "bundle_for", "check_run", "new_device"]

Json = dict[str, Any]

_SHOWN_MODELS = 1001  # with the first one, all of a run of a thousand rounds
_SHOWN_LOGS = 20  # leases that are shown with their log


def new_device(name: str) -> DeviceRow:
    """A device with fresh secrets."""
    if not is_id(name):
        raise InputError(f"device name {name!r}: expected 1 to 64 letters, digits, '-' or '_'")
    return DeviceRow(name=name, key=secrets.token_hex(32), password=new_password())


def bundle_for(device: DeviceRow, *, federation: str, brokers: tuple[str, ...], ca: str | None) -> Bundle:
    """What the device joins with."""
    return Bundle(
        federation=federation, device=device.name, brokers=brokers, ca=ca, password=device.password, key=device.key
    )


def check_run(file: RunFile) -> None:
    """Names and options that only the registries know; raises `InputError` before anything begins."""
    try:
        methods.validate(file.method.name, file.method.parameters)
        models.validate(file.model.name, file.model.input, file.model.options)
    except NoSuchNameError as error:
        raise InputError(str(error)) from None
    if len(set(file.classes)) != len(file.classes) or len(file.classes) < 2:
        raise InputError(f"classes: expected two or more different names, got {list(file.classes)!r}")


class Commands:
    """Requests by name; each takes and returns plain data."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._known: dict[str, Callable[..., Json]] = {
            "status": self._status,
            "device-add": self._device_add,
            "device-list": self._device_list,
            "device-remove": self._device_remove,
            "run-start": self._run_start,
            "run-list": self._run_list,
            "run-show": self._run_show,
            "run-stop": self._run_stop,
        }

    def handle(self, asked: Json) -> Json:
        """Answer one request."""
        name = str(asked.pop("request", ""))
        if name not in self._known:
            raise InputError(f"unknown request {name!r}; known: {', '.join(self._known)}")
        do = self._known[name]
        try:
            inspect.signature(do).bind(**asked)
            types = typing.get_type_hints(do)
            values = {key: check_value(types[key], value, key) for key, value in asked.items()}
        except TypeError as error:  # of a newer command, perhaps
            raise InputError(f"request {name!r}: {error}") from None
        except PayloadError as error:
            raise InputError(f"request {name!r}: {error.detail}") from None
        return do(**values)

    def _status(self) -> Json:
        service = self._service
        machine = service.conductor.machine
        return {
            "federation": service.federation,
            "epoch": service.epoch,
            "brokers": list(service.brokers),
            "online": sorted(service.roster.online(time.monotonic())),
            "enrolled": service.roster.num_enrolled,
            "paused": service.paused,
            "run": machine.run if machine else None,
            "round": machine.number if machine else None,
            "phase": machine.phase if machine else None,
        }

    # devices

    def _device_add(self, names: tuple[str, ...]) -> Json:
        service = self._service
        rows = [new_device(name) for name in names]
        service.add_devices(rows)
        bundles = [
            bundle_for(row, federation=service.federation, brokers=service.brokers, ca=service.ca) for row in rows
        ]
        return {"bundles": [to_map(bundle) for bundle in bundles]}

    def _device_list(self) -> Json:
        now = time.monotonic()
        online = self._service.roster.online(now)
        return {"devices": [self._device(row.name, online, now) for row in self._service.store.devices()]}

    def _device(self, name: str, online: frozenset[str], now: float) -> Json:
        present = self._service.roster.presence(name)
        suspended = self._service.roster.is_suspended(name, now)
        beat = present.heartbeat if present and not suspended else None
        return {
            "id": name,
            "online": name in online,
            "seen_s_ago": round(now - present.last_seen, 1) if present else None,
            "client": present.client if present else None,
            "budget_bytes": present.profile.budget_bytes if present else None,
            "state": "suspended: flooding" if suspended else beat.state if beat else None,
            "phase": beat.phase if beat else "",
            "step": beat.step if beat else 0,
            "total": beat.total if beat else 0,
            "loss": beat.loss if beat else None,
        }

    def _device_remove(self, name: str) -> Json:
        known = [row.name for row in self._service.store.devices()]
        if name not in known:
            raise NoSuchNameError.of("device", name, known)
        self._service.remove_device(name)
        return {"removed": name}

    # runs

    def _run_start(self, file: Json) -> Json:
        try:
            parsed = from_map(RunFile, file, where="run")
        except PayloadError as error:
            raise InputError(error.detail) from None
        check_run(parsed)
        store = self._service.store
        run_id = f"{parsed.name}-{store.next_run_number(parsed.name)}"
        store.add_run(RunRow(id=run_id, file=to_map(parsed)))
        return {"run": run_id}

    def _find(self, name: str) -> RunRow:
        runs = self._service.store.runs()
        if name == "latest" and runs:
            return runs[-1]
        exact = [run for run in runs if run.id == name]
        found = exact or [run for run in runs if run.id.startswith(name)]
        if len(found) != 1:
            raise NoSuchNameError.of("run", name, [run.id for run in runs])
        return found[0]

    def _run_list(self) -> Json:
        store = self._service.store
        rows = []
        for run in store.runs():
            model = store.last_model(run.id)
            rows.append(
                {
                    "run": run.id,
                    "state": run.state,
                    "reason": run.reason,
                    "round": model.version if model else 0,
                    "rounds": run.file["stop"]["rounds"],
                    "method": run.file["method"]["name"],
                    "model": run.file["model"]["name"],
                }
            )
        return {"runs": rows}

    def _run_show(self, run: str, newest: int = 200) -> Json:
        """`newest` evaluations and, of a long run, the newest models: the counts tell how many there are."""
        row = self._find(run)
        store = self._service.store
        models_ = store.models(row.id)
        versions = store.evaluated_versions(row.id)
        return {
            "run": row.id,
            "state": row.state,
            "reason": row.reason,
            "file": dict(row.file),
            "rounds": row.file["stop"]["rounds"],
            "models": [{"version": m.version, "sha256": m.sha256, "bytes": m.length} for m in models_[-_SHOWN_MODELS:]],
            "num_models": len(models_),
            "evaluations": self._evaluations(row, versions[-newest:] if newest > 0 else []),
            "num_evaluations": len(versions),
            "round_rows": [to_map(r) for r in store.rounds(row.id)[-50:]],
            "leases": self._leases(row),
            "devices": self._run_devices(row),
        }

    def _evaluations(self, run: RunRow, versions: list[int]) -> list[Json]:
        judged = ((version, self._service.store.evaluations(run.id, version)) for version in versions)
        results = (evaluation.summarize(version, rows, len(run.file["classes"])) for version, rows in judged)
        return [to_map(result) for result in results if result is not None]

    def _leases(self, run: RunRow) -> list[Json]:
        """The open or newest round's leases, and why some brought nothing."""
        last = self._service.store.last_round(run.id)
        rows: list[LeaseRow] = self._service.store.leases(run.id, last.number, last.attempt) if last else []
        shown = [to_map(lease) for lease in rows]
        for lease in [lease for lease in shown if lease["log"]][_SHOWN_LOGS:]:
            lease["log"] = []
        return shown

    def _run_devices(self, run: RunRow) -> list[Json]:
        """Per device: its newest report, its peak over all rounds, and what it sent and got."""
        store = self._service.store
        traffic = store.traffic(run.id)
        live = self._service.conductor.traffic if self._service.conductor.run else {}
        devices: dict[str, Json] = {}
        for update in store.recent_updates(run.id, 1000):
            entry = devices.setdefault(update.device, {"id": update.device, "peak_bytes": 0})
            plan = update.report.plan
            entry["peak_bytes"] = max(entry["peak_bytes"], update.report.peak_bytes)
            entry["plan"] = plan.describe() if plan else ""
            entry["budget_bytes"] = plan.budget_bytes if plan else 0
            entry["predicted_bytes"] = plan.predicted_bytes if plan else 0
            entry["num_samples"] = update.num_samples
            entry["round"] = update.round
        for name, entry in devices.items():
            up, down = traffic.get(name, (0, 0))
            more = live.get(name, (0, 0)) if self._is_active(run.id) else (0, 0)
            entry["bytes_up"], entry["bytes_down"] = up + more[0], down + more[1]
        return [devices[name] for name in sorted(devices)]

    def _is_active(self, run_id: str) -> bool:
        active = self._service.conductor.run
        return active is not None and active.id == run_id

    def _run_stop(self, run: str, now: bool = False) -> Json:
        row = self._find(run)
        if row.state in ("queued", "running"):
            self._service.conductor.stop(row.id, at_once=now)
        return {"run": row.id}
