"""A state directory as a coordinator leaves it after a run with many devices, filled without any device."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rows import (
    device_row,
    digest,
    evaluation_row,
    lease_row,
    model_row,
    report,
    round_row,
    run_file,
    run_row,
    update_row,
)

from coordinator.state import STATE_KIND, STATE_VERSION
from coordinator.store.base import Store
from coordinator.store.sqlite import SqliteStore
from edge_client import durable
from edge_client.records import TrainingPlan

__all__ = ["fill"]

_MB = 1_000_000


def fill(
    state_dir: Path, *, devices: int, rounds: int = 2, first: Callable[[Store], None] = lambda store: None
) -> list[str]:
    """Fill it with a finished run, after `first` has added what is older; returns the devices' names.

    Device number n has a budget of 200 to 1199 MB and a peak of 50 to 99 % of it; every tenth has the label line=b.
    """
    os.close(durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION))
    store = SqliteStore(state_dir / "state.db", sync=False)
    names = [f"device-{number:05}" for number in range(devices)]
    store.devices.add(
        *(device_row(name, labels={"line": "b" if number % 10 == 0 else "a"}) for number, name in enumerate(names))
    )
    first(store)
    file = run_file(name="filled", stop={"rounds": rounds})
    store.runs.add(run_row("filled-1", file, created_s=1_700_000_000))
    store.runs.start(model_row(0, "filled-1"), digest("settings"), 8)
    issue = 0
    for number in range(1, rounds + 1):
        leases = []
        for name in names:
            issue += 1
            leases.append(lease_row(issue, name, run="filled-1", round=number, version=number - 1))
        store.rounds.open(round_row(number, run="filled-1", goal=devices, quorum=1), leases)
        for place, (name, lease) in enumerate(zip(names, leases, strict=True)):
            budget = (200 + place % 1000) * _MB
            plan = TrainingPlan(microbatch=8, budget_bytes=budget, predicted_bytes=budget * 95 // 100)
            update = update_row(
                name,
                lease.id,
                run="filled-1",
                round=number,
                report=report(plan=plan, peak_bytes=budget * (50 + place % 50) // 100),
            )
            right = 4 + number
            confusion = (2, 3, 5 - (right - 2), right - 2)
            evaluation = evaluation_row(
                name, version=number, run="filled-1", num_correct=right, confusion=confusion, loss_sum=5.0 - number
            )
            store.updates.save(update, evaluation, lease.id, moments={"assign": 0.0, "accept": 0.1, "offer": 2.0})
        store.rounds.commit(number, 1, model_row(number, "filled-1"))
        store.rounds.announce("filled-1", number, 1, {"freeze": 2.0, "fold": 2.1, "commit": 2.2, "announce": 2.3})
        store.models.save_score("filled-1", number, (4 + number) / 10, number)
    store.runs.set_state("filled-1", "finished", f"{rounds} rounds")
    store.close()
    return names
