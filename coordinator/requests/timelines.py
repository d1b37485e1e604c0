"""The timeline of a run's rounds, from the times that the store has of them."""

from __future__ import annotations

from coordinator.store.base import Store
from coordinator.store.rows import LeaseRow, RoundRow
from coordinator.timeline import DeviceTimeline, RoundTimeline, RunTimeline, device_spans, round_spans
from edge_client.errors import InputError

__all__ = ["of_run"]


def of_run(store: Store, run_id: str, *, newest: int, number: int | None = None) -> RunTimeline:
    """The newest rounds of a run, or all attempts of one; raises `InputError` if there is no such round."""
    rows = store.rounds.all(run_id)
    chosen = rows[-newest:] if number is None else [row for row in rows if row.number == number]
    if number is not None and not chosen:
        numbers = f"1 to {rows[-1].number}" if rows else "none yet"
        raise InputError(f"--round: run {run_id!r} has no round {number}; its rounds are {numbers}")
    return RunTimeline(run=run_id, rounds=tuple(_round(store, row) for row in chosen))


def _round(store: Store, row: RoundRow) -> RoundTimeline:
    leases = store.leases.of_attempt(row.run, row.number, row.attempt)
    return RoundTimeline(
        round=row.number,
        attempt=row.attempt,
        state=row.state,
        only_evaluates=row.goal == 0,
        pause_s=row.moments.get("pause"),
        spans=round_spans(row.moments),
        devices=tuple(_device(lease) for lease in sorted(leases, key=lambda lease: (lease.device, lease.issue))),
    )


def _device(lease: LeaseRow) -> DeviceTimeline:
    return DeviceTimeline(
        device=lease.device,
        train=lease.train,
        state=lease.state,
        spans=device_spans(lease.moments, lease.phases),
    )
