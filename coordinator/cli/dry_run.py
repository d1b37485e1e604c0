"""`coordinator run start --dry-run`: what each device would train, or why it cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coordinator.cli.methods import SliceTraffic
from coordinator.columns import align, plain
from coordinator.control_messages import DeviceLine
from coordinator.run_details import Candidate, FailedLease, RunDetails, RunDevice
from edge_client.config.quantities import format_bytes

__all__ = ["DryRun", "DryRunDevice", "describe", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunDevice:
    """A device with its plan, or with the reason why it cannot train (`code`, `detail` and `log`)."""

    id: str
    budget_bytes: int | None
    plan: str
    predicted_bytes: int | None
    num_samples: int | None
    num_test: int | None
    bytes_down: int | None
    bytes_up: int | None
    bytes_once: int | None
    code: str
    detail: str
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The answers of all enrolled devices."""

    run: str
    num_able: int
    devices: tuple[DryRunDevice, ...]


def evaluate(data: RunDetails, devices: Sequence[DeviceLine], traffic: Mapping[str, SliceTraffic]) -> DryRun:
    """A row for each enrolled device; `traffic` by slice, as far as it is known."""
    plans = {device.id: device for device in data.devices}
    declined = {lease.device: lease for lease in data.failures}
    barred = {candidate.id: candidate for candidate in data.barred}
    rows = tuple(
        _with_plan(plans[row.id], traffic) if row.id in plans else _without_plan(row, declined, barred)
        for row in devices
    )
    return DryRun(run=data.file.name, num_able=sum(row.code == "" for row in rows), devices=rows)


def _with_plan(device: RunDevice, traffic: Mapping[str, SliceTraffic]) -> DryRunDevice:
    moved = traffic.get(device.plan_details.slice) if device.plan_details else None
    return DryRunDevice(
        id=device.id,
        budget_bytes=device.budget_bytes,
        plan=device.plan,
        predicted_bytes=device.predicted_bytes,
        num_samples=device.num_samples,
        num_test=device.num_test,
        bytes_down=moved.bytes_down if moved else None,
        bytes_up=moved.bytes_up if moved else None,
        bytes_once=moved.bytes_once if moved else None,
        code="",
        detail="",
        log=(),
    )


def _without_plan(
    row: DeviceLine, declined: Mapping[str, FailedLease], barred: Mapping[str, Candidate]
) -> DryRunDevice:
    lease = declined.get(row.id)
    problem: FailedLease | Candidate | None = lease or barred.get(row.id)
    if problem is None and row.online:
        late = "it came when the others had been asked already; try again"
        problem = Candidate(id=row.id, code="not_asked", detail=late)
    elif problem is None:
        problem = Candidate(id=row.id, code="offline", detail="not connected")
    return DryRunDevice(
        id=row.id,
        budget_bytes=None,
        plan="",
        predicted_bytes=None,
        num_samples=None,
        num_test=None,
        bytes_down=None,
        bytes_up=None,
        bytes_once=None,
        code=problem.code,
        detail=problem.detail,
        log=lease.log if lease is not None else (),
    )


def describe(result: DryRun) -> str:
    """The table, and a line for each device that cannot train."""
    if not result.devices:
        return "no devices yet; add one with: coordinator device add NAME"
    able = [row for row in result.devices if not row.code]
    table = align(
        ["device", "budget", "plan", "predicted peak", "samples", "test", "down/round", "up/round"],
        [
            [
                row.id,
                format_bytes(row.budget_bytes or 0),
                row.plan,
                format_bytes(row.predicted_bytes or 0),
                row.num_samples,
                row.num_test,
                *("?" if moved is None else format_bytes(moved) for moved in (row.bytes_down, row.bytes_up)),
            ]
            for row in able
        ],
        right=(1, 3, 4, 5, 6, 7),
    )
    problems = [f"{row.id} cannot: {row.code}: {plain(row.detail)}" for row in result.devices if row.code]
    once = [format_bytes(row.bytes_once) for row in able if row.bytes_once]
    note = f"once, to each device, on top: {', '.join(dict.fromkeys(once))} down" if once else ""
    count = f"{len(able)} of {len(result.devices)} devices can train; nothing was trained"
    return "\n\n".join(piece for piece in (table if able else "", note, "\n".join(problems), count) if piece)
