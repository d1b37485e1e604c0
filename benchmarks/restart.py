"""How soon a coordinator serves again after a restart: with nothing stored, with 10,000 rounds of ten devices, and
with 10,000 enrolled devices beside them.

Serving: the control socket answers and the broker accepts a connection.
"""

from __future__ import annotations

import hashlib
import socket
import tempfile
import time
from pathlib import Path

from benchmarks.federation import SMALL, Federation, run_file, scratch
from benchmarks.figures import Figure
from coordinator.store.rows import DeviceRow, LeaseRow, ModelRow, RoundRow, RunRow, UpdateRow
from coordinator.store.sqlite import SqliteStore
from edge_client.records import Report, TrainingPlan, to_map
from edge_client.transport.blobs import BlobStore

__all__ = ["a_round", "fill", "measure"]

_DEVICES = 10
_PLAN = TrainingPlan(microbatch=16, budget_bytes=10**9, predicted_bytes=10**8)


def measure(*, quick: bool) -> list[Figure]:
    """Seconds from the process's start."""
    rounds = 1000 if quick else 10_000
    repeats = 3 if quick else 7
    empty, filled, large = (
        _restarts(0, repeats),
        _restarts(rounds, repeats),
        _restarts(rounds, repeats, enrolled=rounds),
    )
    floor = sorted(empty)[len(empty) // 2]
    return [
        Figure(name="restart, empty store", unit="s", values=empty, at_most=2),
        Figure(name=f"restart, {rounds} rounds", unit="s", values=filled, at_most=2),
        Figure(name=f"restart, {rounds} rounds, {rounds} enrolled devices", unit="s", values=large, at_most=2),
        Figure(name="ratio", unit="", values=tuple(seconds / floor for seconds in filled), at_most=1.5),
    ]


def _restarts(rounds: int, repeats: int, *, enrolled: int = _DEVICES) -> tuple[float, ...]:
    with tempfile.TemporaryDirectory(dir=scratch()) as folder:
        with Federation(Path(folder)) as federation:
            federation.start()
            federation.enrol(_DEVICES)
        if rounds:
            fill(Path(folder) / "coordinator", rounds, enrolled=enrolled)
        found = []
        for _ in range(repeats):
            began = time.monotonic()
            with Federation(Path(folder)) as federation:
                federation.start()
                socket.create_connection(("127.0.0.1", federation.broker_port())).close()
                found.append(time.monotonic() - began)
        return tuple(found)


def fill(state_dir: Path, rounds: int, *, enrolled: int) -> None:
    """A run in the middle of its life, through the store's own methods but for the sync of every commit."""
    store = SqliteStore(state_dir / "state.db", sync=False)  # filling with it on takes minutes and leaves the same file
    more = range(_DEVICES, enrolled)
    store.devices.add(*(DeviceRow(name=f"e{n:05}", key=_hash(f"key {n}"), password=_hash(f"word {n}")) for n in more))
    file = run_file(hidden=SMALL, rounds=2 * rounds, devices=_DEVICES)
    store.runs.add(RunRow(id="bench-1", file=to_map(file)))
    store.runs.start(_model(0), _hash("settings"), 500)
    with store.turn():
        for number in range(1, rounds + 1):
            a_round(store, number)
    store.close()
    blobs = BlobStore(state_dir / "blobs", state_dir / "tmp")
    for text in ("settings", f"model {rounds}"):  # those that a start looks at
        blobs.write(text.encode(), _hash(text), point="bench")


def a_round(store: SqliteStore, number: int) -> list[UpdateRow]:
    """All rows of one round, from its opening to its announcement; returns its updates."""
    leases = [_lease(number, index) for index in range(_DEVICES)]
    row = RoundRow(run="bench-1", number=number, attempt=1, goal=_DEVICES, quorum=_DEVICES, remaining_s=60.0)
    store.rounds.open(row, leases)
    updates = [_update(lease) for lease in leases]
    for update in updates:
        store.updates.save(update, None, update.lease)
    store.rounds.freeze("bench-1", number, 1, _hash(f"set {number}"))
    store.rounds.commit(number, 1, _model(number))
    store.rounds.announce("bench-1", number, 1)
    return updates


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _model(version: int) -> ModelRow:
    sha256 = _hash(f"model {version}")
    return ModelRow(
        run="bench-1",
        version=version,
        sha256=sha256,
        length=4000,
        sent_sha256=sha256,
        sent_length=4000,
        set_hash=_hash(f"set {version}"),
    )


def _lease(number: int, index: int) -> LeaseRow:
    return LeaseRow(
        id=_hash(f"lease {number} {index}")[:32],
        issue=_DEVICES * number + index,
        epoch=1,
        run="bench-1",
        round=number,
        attempt=1,
        device=f"d{index:03}",
        train=True,
        evaluate=False,
        version=number - 1,
        plan=_PLAN,
    )


def _update(lease: LeaseRow) -> UpdateRow:
    return UpdateRow(
        run=lease.run,
        round=lease.round,
        attempt=1,
        device=lease.device,
        lease=lease.id,
        sha256=_hash(f"update {lease.id}"),
        length=4000,
        num_samples=100,
        norm=0.1,
        report=Report(num_samples=100, steps=7, payload="params", plan=_PLAN, peak_bytes=10**8, seconds=1.5),
    )
