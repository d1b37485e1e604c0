"""The store's twin in memory: plain dicts, gone with the process. For simulation and unit tests.

Each call changes all that it should or nothing, as a transaction does, and fails where a constraint of the database
would. Rows are copied on their way in, and their maps on their way out: nobody shares them with the store.
Does not cover: indexes. Most queries look at every row of a table, which is fast for thousands of rows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from sqlite3 import IntegrityError  # what both stores raise for a bug of ours
from typing import Any, Generic, TypeVar

from coordinator.store.base import (
    OPEN_LEASE,
    WANTED_DEPLOYMENT,
    DeploymentRow,
    DeviceRow,
    EvaluationRow,
    LeaseRow,
    LeftOutRow,
    ModelRow,
    PartRow,
    RoundRow,
    RunRow,
    UpdateRow,
)
from coordinator.store.sqlite import SqliteStore
from edge_client import durable, faults
from edge_client.errors import ConflictError, NoSuchNameError
from edge_client.records import Report, TrainingPlan, from_map, to_map

__all__ = ["MemoryStore"]

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

_Journal = list[tuple[dict[Any, Any], Any, Any]]  # table, key, what was there before (None: nothing)
_COUNTED = ("COMMITTED", "ANNOUNCED")
_OPEN_ROUND = ("RUNNING", "FROZEN")
_FAILED = ("declined", "refused", "expired")


class _Table(Generic[K, R]):
    """Rows by their key; every change can be undone from the journal."""

    def __init__(self, journal: _Journal) -> None:
        self.rows: dict[K, R] = {}
        self._journal = journal

    def insert(self, key: K, row: R) -> None:
        if key in self.rows:
            raise IntegrityError(f"{type(row).__name__} {key!r} exists already")
        self.put(key, row)

    def put(self, key: K, row: R) -> None:
        self._journal.append((self.rows, key, self.rows.get(key)))
        self.rows[key] = _own(row)

    def change(self, key: K | None, **changes: Any) -> None:
        """A key that nobody has is no error, as in SQL."""
        if key in self.rows:
            self.put(key, dataclasses.replace(self.rows[key], **changes))  # type: ignore[type-var]

    def delete(self, key: K | None) -> None:
        if key in self.rows:
            self._journal.append((self.rows, key, self.rows.pop(key)))


class MemoryStore:
    """Implements `coordinator.store.base.Store`; used by one thread."""

    def __init__(self) -> None:
        self._journal: _Journal = []
        self._meta: _Table[str, str] = _Table(self._journal)
        self._devices: _Table[str, DeviceRow] = _Table(self._journal)
        self._runs: _Table[int, RunRow] = _Table(self._journal)  # by age
        self._models: _Table[tuple[str, int], ModelRow] = _Table(self._journal)
        self._parts: _Table[tuple[str, str], PartRow] = _Table(self._journal)
        self._rounds: _Table[tuple[str, int, int], RoundRow] = _Table(self._journal)
        self._leases: _Table[int, LeaseRow] = _Table(self._journal)  # by issue
        self._issues: _Table[str, int] = _Table(self._journal)  # id -> issue
        self._updates: _Table[str, UpdateRow] = _Table(self._journal)  # by lease
        self._counted: _Table[tuple[str, int, int, str], str] = _Table(self._journal)  # run, round, attempt, device
        self._evaluations: _Table[tuple[str, int, str, str], EvaluationRow] = _Table(self._journal)
        self._traffic: _Table[tuple[str, str], tuple[int, int]] = _Table(self._journal)
        self._left_out: _Table[tuple[str, str, str], LeftOutRow] = _Table(self._journal)  # run, device, code
        self._remembered: _Table[tuple[str, str], Mapping[str, Any]] = _Table(self._journal)
        self._deployments: _Table[tuple[str, str], DeploymentRow] = _Table(self._journal)  # id, device

    @contextmanager
    def _transaction(self, point: str) -> Iterator[None]:
        """All or nothing. Points as the database has: `store.<point>.commit`, `store.<point>.committed`."""
        done = False
        with durable.disk_errors(f"cannot save ({point})"):
            try:
                yield
                faults.point(f"store.{point}.commit")
                done = True
            finally:
                while self._journal:
                    table, key, before = self._journal.pop()
                    if not done:
                        table.pop(key, None)
                        if before is not None:
                            table[key] = before
            faults.point(f"store.{point}.committed")

    # the federation and its devices

    def next_epoch(self, wall_s: int) -> int:
        """Higher than all before."""
        epoch = max(int(self._meta.rows.get("epoch", "0")) + 1, wall_s)
        with self._transaction("epoch"):
            self._meta.put("epoch", str(epoch))
        return epoch

    def federation(self, fresh: str) -> str:
        """The federation's id."""
        if "federation" not in self._meta.rows:
            with self._transaction("federation"):
                self._meta.put("federation", fresh)
        return self._meta.rows["federation"]

    def setting(self, key: str) -> str:
        """What was kept under `key`; empty if nothing was."""
        return self._meta.rows.get(f"setting.{key}", "")

    def set_setting(self, key: str, value: str) -> None:
        """Keep a small text."""
        if self.setting(key) != value:
            with self._transaction("setting"):
                self._meta.put(f"setting.{key}", value)

    def devices(self) -> list[DeviceRow]:
        """All enrolled devices, by name."""
        return [_fresh(row) for _, row in sorted(self._devices.rows.items())]

    def add_device(self, *devices: DeviceRow, replace: bool = False) -> None:
        """Enrol devices, all or none; `ConflictError` if a name is taken."""
        with self._transaction("device"):
            for device in devices:
                if device.name in self._devices.rows and not replace:
                    raise ConflictError(f"device {device.name!r} exists already; choose another name")
                self._devices.put(device.name, device)

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Replace a device's labels."""
        with self._transaction("device"):
            self._devices.change(self._known(name), labels=labels)

    def remove_device(self, name: str) -> None:
        """Forget a device, its secrets, and what was deployed to it."""
        with self._transaction("device"):
            self._devices.delete(self._known(name))
            for key in [key for key in self._deployments.rows if key[1] == name]:
                self._deployments.delete(key)

    def _known(self, name: str) -> str:
        if name not in self._devices.rows:
            raise NoSuchNameError.of("device", name, list(self._devices.rows))
        return name

    # runs and models

    def add_run(self, run: RunRow) -> None:
        """A new run."""
        with self._transaction("run"):
            if self._age(run.id) is not None:
                raise IntegrityError(f"run {run.id!r} exists already")
            self._runs.insert(max(self._runs.rows, default=0) + 1, run)

    def _age(self, run_id: str) -> int | None:
        return next((age for age, run in self._runs.rows.items() if run.id == run_id), None)

    def remove_run(self, run_id: str) -> None:
        """Forget a run and everything of it."""
        with self._transaction("run"):
            for lease in [row for row in self._leases.rows.values() if row.run == run_id]:
                self._issues.delete(lease.id)
                self._leases.delete(lease.issue)
            for update in [row for row in self._updates.rows.values() if row.run == run_id]:
                self._delete_update(update.lease)
            tables: tuple[_Table[Any, Any], ...] = (
                self._models,
                self._parts,
                self._rounds,
                self._evaluations,
                self._traffic,
                self._left_out,
                self._remembered,
            )
            for table in tables:
                for key in [key for key in table.rows if key[0] == run_id]:
                    table.delete(key)
            for deployed in [key for key, row in self._deployments.rows.items() if row.run == run_id]:
                self._deployments.delete(deployed)
            self._runs.delete(self._age(run_id))

    def save_score(self, run_id: str, version: int, score: float, best_version: int) -> None:
        """What the run's metric says of a version, and which version it likes best now."""
        with self._transaction("score"):
            self._models.change((run_id, version), score=score)
            self._runs.change(self._age(run_id), best_version=best_version)

    def scores(self, run_id: str) -> dict[int, float]:
        """Version -> score, oldest first."""
        return {model.version: model.score for model in self.models(run_id) if model.score is not None}

    def remember_device(self, run_id: str, device: str, info: Mapping[str, Any]) -> None:
        """What a device was when it first took part; the first word stays."""
        with self._transaction("run-device"):
            if (run_id, device) not in self._remembered.rows:
                self._remembered.put((run_id, device), info)

    def remembered_devices(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Device -> what it was."""
        found = sorted(key for key in self._remembered.rows if key[0] == run_id)
        return {key[1]: dict(copy.deepcopy(self._remembered.rows[key])) for key in found}

    def next_run_number(self, name: str) -> int:
        """The number that makes NAME-n new."""
        tails = [run.id[len(name) + 1 :] for run in self._runs.rows.values() if run.id.startswith(f"{name}-")]
        return max((int(tail) for tail in tails if tail.isdigit()), default=0) + 1

    def runs(self) -> list[RunRow]:
        """All runs, oldest first."""
        return [_fresh(row) for _, row in sorted(self._runs.rows.items())]

    def run(self, run_id: str) -> RunRow | None:
        """One run."""
        age = self._age(run_id)
        return _fresh(self._runs.rows[age]) if age is not None else None

    def first_run(self, state: str) -> RunRow | None:
        """The oldest run in a state."""
        return next((run for run in self.runs() if run.state == state), None)

    def set_run_state(self, run_id: str, state: str, reason: str = "") -> None:
        """How a run stands."""
        with self._transaction("run-state"):
            self._runs.change(self._age(run_id), state=state, reason=reason)

    def fail_run(self, run_id: str, reason: str) -> None:
        """The run has failed, and with it its open round and leases, together."""
        with self._transaction("run-state"):
            self._runs.change(self._age(run_id), state="failed", reason=reason)
            for key, round_ in list(self._rounds.rows.items()):
                if round_.run == run_id and round_.state in _OPEN_ROUND:
                    self._rounds.change(key, state="ABANDONED", reason=reason)
            for issue, lease in list(self._leases.rows.items()):
                if lease.run == run_id and lease.state in OPEN_LEASE:
                    self._leases.change(issue, state="cancelled", code="abandoned", detail="the run failed")

    def add_initial_model(self, model: ModelRow, settings_sha256: str, settings_length: int) -> None:
        """Version 0 and the run's settings: the run can begin."""
        settings = {"settings_sha256": settings_sha256, "settings_length": settings_length}
        with self._transaction("initial"):
            self._insert_model(model)
            self._runs.change(self._age(model.run), state="running", **settings)

    def _insert_model(self, model: ModelRow) -> None:
        self._needs_run(model.run)
        self._models.insert((model.run, model.version), model)

    def _needs_run(self, run_id: str) -> None:
        if self._age(run_id) is None:
            raise IntegrityError(f"there is no run {run_id!r}")

    def last_model(self, run_id: str) -> ModelRow | None:
        """The newest version."""
        return next(reversed(self.models(run_id)), None)

    def model(self, run_id: str, version: int) -> ModelRow | None:
        """One version."""
        return self._models.rows.get((run_id, version))

    def models(self, run_id: str) -> list[ModelRow]:
        """All versions, oldest first."""
        return [row for key, row in sorted(self._models.rows.items()) if key[0] == run_id]

    def add_part(self, part: PartRow) -> list[PartRow]:
        """A slice of the newest version; those of older versions are forgotten, and returned."""
        with self._transaction("part"):
            if self._age(part.run) is None:
                raise IntegrityError(f"there is no run {part.run!r}")
            old = [row for row in self.parts(part.run) if row.version < part.version]
            for row in old:
                self._parts.delete((row.run, row.slice))
            self._parts.put((part.run, part.slice), part)
        return old

    def parts(self, run_id: str) -> list[PartRow]:
        """The slices of the newest version that were cut so far."""
        return [row for key, row in sorted(self._parts.rows.items()) if key[0] == run_id]

    # rounds and leases

    def open_round(self, round_: RoundRow, leases: Sequence[LeaseRow]) -> None:
        """A round and its leases, together."""
        with self._transaction("open"):
            self._needs_run(round_.run)
            self._rounds.insert((round_.run, round_.number, round_.attempt), round_)
            self._insert_leases(leases)

    def add_leases(self, leases: Sequence[LeaseRow]) -> None:
        """Substitutes in a running round."""
        with self._transaction("leases"):
            self._insert_leases(leases)

    def _insert_leases(self, leases: Sequence[LeaseRow]) -> None:
        for lease in leases:
            self._leases.insert(lease.issue, lease)
            self._issues.insert(lease.id, lease.issue)

    def next_issue(self) -> int:
        """The number of the next lease."""
        return max(self._leases.rows, default=0) + 1

    def last_round(self, run_id: str) -> RoundRow | None:
        """The newest round's newest attempt."""
        return next(reversed(self.rounds(run_id)), None)

    def rounds(self, run_id: str) -> list[RoundRow]:
        """All attempts of all rounds, oldest first."""
        return [row for key, row in sorted(self._rounds.rows.items()) if key[0] == run_id]

    def leases(self, run_id: str, number: int, attempt: int) -> list[LeaseRow]:
        """The leases of an attempt, in the order of issue."""
        wanted = (run_id, number, attempt)
        return [row for row in self._by_issue() if (row.run, row.round, row.attempt) == wanted]

    def _by_issue(self, *, newest_first: bool = False) -> list[LeaseRow]:
        return [row for _, row in sorted(self._leases.rows.items(), reverse=newest_first)]

    def lease(self, lease_id: str) -> LeaseRow | None:
        """One lease."""
        issue = self._issues.rows.get(lease_id)
        return self._leases.rows[issue] if issue is not None else None

    def set_lease(
        self, lease_id: str, state: str, *, code: str = "", detail: str = "", log: Sequence[str] = ()
    ) -> None:
        """How a lease stands."""
        with self._transaction("lease"):
            self._change_lease(lease_id, state=state, code=code, detail=detail, log=tuple(log))

    def _change_lease(self, lease_id: str, **changes: Any) -> None:
        self._leases.change(self._issues.rows.get(lease_id), **changes)

    def recent_failures(self, device: str, limit: int) -> list[LeaseRow]:
        """A device's newest leases that brought nothing and have a reason, newest first."""
        newest = self._by_issue(newest_first=True)
        return [row for row in newest if row.device == device and row.state in _FAILED][:limit]

    def run_failures(self, run_id: str, limit: int) -> list[LeaseRow]:
        """The same of a run."""
        newest = self._by_issue(newest_first=True)
        return [row for row in newest if row.run == run_id and row.state in _FAILED][:limit]

    def save_deadline(
        self, run_id: str, number: int, attempt: int, *, remaining_s: float, extended: bool, elapsed_s: float
    ) -> None:
        """How long the round still has and the run was active."""
        times = {"remaining_s": remaining_s, "extended": extended, "elapsed_s": elapsed_s}
        with self._transaction("deadline"):
            self._rounds.change((run_id, number, attempt), **times)

    # updates

    def save_update(
        self,
        update: UpdateRow | None,
        evaluation: EvaluationRow | None,
        lease_id: str,
        traffic: Mapping[str, tuple[int, int]] = {},
    ) -> None:
        """The update's row, its evaluation, its lease's end and what travelled for it, together."""
        with self._transaction("update"):
            if update is not None:
                self._counted.insert((update.run, update.round, update.attempt, update.device), update.lease)
                self._updates.insert(update.lease, update)
            if evaluation is not None:
                self._put_evaluation(evaluation)
            self._change_lease(lease_id, state="stored", code="", detail="")
            lease = self.lease(lease_id)
            if lease is not None:
                self._count(lease.run, traffic)

    def _put_evaluation(self, evaluation: EvaluationRow) -> None:
        key = (evaluation.run, evaluation.version, evaluation.device, evaluation.slice)
        self._evaluations.put(key, evaluation)

    def save_evaluation(self, evaluation: EvaluationRow) -> None:
        """A result that came without an update: the server's own."""
        with self._transaction("evaluation"):
            self._put_evaluation(evaluation)

    def drop_update(self, update: UpdateRow) -> None:
        """Forget an update whose blob is lost; its lease is offered again, in a round that is running again."""
        key = (update.run, update.round, update.attempt)
        with self._transaction("update"):
            self._delete_update(update.lease)
            self._change_lease(update.lease, state="offered", code="", detail="")
            if key in self._rounds.rows and self._rounds.rows[key].state == "FROZEN":
                self._rounds.change(key, state="RUNNING")

    def _delete_update(self, lease_id: str) -> None:
        update = self._updates.rows.get(lease_id)
        if update is not None:
            self._counted.delete((update.run, update.round, update.attempt, update.device))
            self._updates.delete(lease_id)

    def updates(self, run_id: str, number: int, attempt: int) -> list[UpdateRow]:
        """The stored updates of an attempt, sorted by device."""
        wanted = (run_id, number, attempt)
        found = [row for row in self._updates.rows.values() if (row.run, row.round, row.attempt) == wanted]
        return sorted(found, key=lambda row: row.device)

    def recent_updates(self, run_id: str, limit: int) -> list[UpdateRow]:
        """The newest updates of a run, oldest first."""
        found = [row for row in self._updates.rows.values() if row.run == run_id]
        found.sort(key=lambda row: row.device)
        found.sort(key=lambda row: (row.round, row.attempt), reverse=True)  # stable: by device within an attempt
        return found[:limit][::-1]

    def num_updates(self, run_id: str) -> dict[int, int]:
        """Round -> how many updates its model was made of."""
        counted = sorted(row.round for row in self._in_rounds(_COUNTED) if row.run == run_id)
        return {number: len(list(same)) for number, same in itertools.groupby(counted)}

    def update_of_lease(self, lease_id: str) -> UpdateRow | None:
        """The update that a lease brought."""
        return self._updates.rows.get(lease_id)

    def last_counted_lease(self, run_id: str, device: str) -> str | None:
        """The newest lease of a device whose update went into a committed model."""
        counted = [row for row in self._in_rounds(_COUNTED) if row.run == run_id and row.device == device]
        newest = max(counted, key=lambda row: row.round, default=None)
        return newest.lease if newest is not None else None

    def _in_rounds(self, states: Sequence[str]) -> Iterator[UpdateRow]:
        """The updates whose attempt is in one of these states."""
        for update in self._updates.rows.values():
            round_ = self._rounds.rows.get((update.run, update.round, update.attempt))
            if round_ is not None and round_.state in states:
                yield update

    def freeze(self, run_id: str, number: int, attempt: int, set_hash: str) -> None:
        """The set of updates is final; its hash comes again with the model that is made of it."""
        with self._transaction("freeze"):
            self._rounds.change((run_id, number, attempt), state="FROZEN")

    def commit_round(self, number: int, attempt: int, model: ModelRow, left_out: Sequence[LeftOutRow] = ()) -> None:
        """The new version, the end of its round and what knowledge it was made without, together."""
        with self._transaction("round"):
            self._insert_model(model)
            for row in left_out:
                self._left_out.put((row.run, row.device, row.code), row)
            self._rounds.change((model.run, number, attempt), state="COMMITTED")

    def announce(self, run_id: str, number: int, attempt: int) -> None:
        """The devices have been told; what has travelled for the run by now is kept with the round."""
        with self._transaction("announce"):
            moved = self.traffic(run_id).values()
            up, down = sum(up for up, _ in moved), sum(down for _, down in moved)
            self._rounds.change((run_id, number, attempt), state="ANNOUNCED", bytes_up=up, bytes_down=down)

    def abandon(self, run_id: str, number: int, attempt: int, reason: str) -> None:
        """The attempt ends without a model; its updates stay on record and count nowhere."""
        with self._transaction("abandon"):
            self._rounds.change((run_id, number, attempt), state="ABANDONED", reason=reason)

    def left_out(self, run_id: str) -> list[LeftOutRow]:
        """What a run could not use, by device and code."""
        return [row for key, row in sorted(self._left_out.rows.items()) if key[0] == run_id]

    # what follows from it

    def evaluations(self, run_id: str, version: int | None = None) -> list[EvaluationRow]:
        """Results by version and device."""
        found = sorted(key for key in self._evaluations.rows if key[0] == run_id and version in (None, key[1]))
        return [self._evaluations.rows[key] for key in found]

    def evaluated_versions(self, run_id: str) -> list[int]:
        """The versions that somebody judged, oldest first."""
        return sorted({key[1] for key in self._evaluations.rows if key[0] == run_id})

    def last_plans(self, run_id: str) -> dict[str, TrainingPlan]:
        """The plan that each device last trained with in this run, in the last 50 rounds."""
        last = self.last_model(run_id)
        since = max(0, (last.version if last else 0) - 50)
        rows = [row for row in self._updates.rows.values() if row.run == run_id and row.round >= since]
        rows.sort(key=lambda row: (row.round, row.attempt))
        newest = {row.device: row.report.plan for row in rows}
        return {device: plan for device, plan in newest.items() if plan is not None}

    def recent_norms(self, run_id: str, rounds: int) -> dict[str, list[float]]:
        """Slice -> norms of the updates of the newest committed rounds: the usual size of a change."""
        last = self.last_model(run_id)
        since = (last.version if last else 0) - rounds
        found = [row for row in self._in_rounds(_COUNTED) if row.run == run_id and row.round > since]
        norms: dict[str, list[float]] = {}
        for row in sorted(found, key=lambda row: (row.round, row.device)):
            norms.setdefault(self._leases.rows[self._issues.rows[row.lease]].slice, []).append(row.norm)
        return norms

    def drop_rate(self, run_id: str, leases: int) -> float:
        """Share of the newest finished leases that brought nothing."""
        unfinished = (*OPEN_LEASE, "cancelled")
        trained = [row.state for row in self._by_issue(newest_first=True) if row.run == run_id and row.train]
        ended = [state for state in trained if state not in unfinished][:leases]
        return sum(state != "stored" for state in ended) / len(ended) if ended else 0.0

    def add_traffic(self, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None:
        """Count what travelled, as published: device -> (bytes up, bytes down)."""
        with self._transaction("traffic"):
            self._count(run_id, moved)

    def _count(self, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None:
        for device, (up, down) in moved.items():
            before = self._traffic.rows.get((run_id, device), (0, 0))
            self._traffic.put((run_id, device), (before[0] + up, before[1] + down))

    def traffic(self, run_id: str) -> dict[str, tuple[int, int]]:
        """Device -> (bytes up, bytes down)."""
        return {key[1]: row for key, row in sorted(self._traffic.rows.items()) if key[0] == run_id}

    # deployments

    def trained_slices(self, run_id: str) -> dict[str, str]:
        """Device -> the slice that it trained last in a run."""
        stored = (row for row in self._by_issue() if row.run == run_id and row.train and row.state == "stored")
        return {row.device: row.slice for row in stored}

    def next_deployment(self) -> int:
        """The issue of the next deployment."""
        return max((row.issue for row in self._deployments.rows.values()), default=0) + 1

    def add_deployment(self, rows: Sequence[DeploymentRow]) -> list[DeploymentRow]:
        """A deployment to these devices; returns what was pending on them, which is superseded now."""
        devices = {row.device for row in rows}
        before = [row for row in self.wanted_deployments() if row.device in devices and row.state == "pending"]
        with self._transaction("deployment"):
            for old in before:
                self._deployments.change((old.id, old.device), state="superseded")
            for row in rows:
                self._deployments.insert((row.id, row.device), row)
        return before

    def deployments(self, run_id: str | None = None) -> list[DeploymentRow]:
        """All of a run, or all, the oldest first, and by device."""
        found = [row for row in self._deployments.rows.values() if run_id in (None, row.run)]
        return sorted(found, key=lambda row: (row.issue, row.device, row.id))

    def wanted_deployments(self) -> list[DeploymentRow]:
        """Those that are pending or active."""
        return [row for row in self.deployments() if row.state in WANTED_DEPLOYMENT]

    def set_deployment(
        self, deployment: str, device: str, state: str, *, code: str = "", detail: str = ""
    ) -> list[DeploymentRow]:
        """What became of a deployment on a device; returns what was active there, if it is superseded now."""
        active = [row for row in self.wanted_deployments() if (row.device, row.state) == (device, "active")]
        before = [row for row in active if row.id != deployment and state == "active"]
        with self._transaction("deployed"):
            for old in before:
                self._deployments.change((old.id, old.device), state="superseded")
            self._deployments.change((deployment, device), state=state, code=code, detail=detail)
        return before

    # blobs

    def needed_blobs(self, keep_models: int) -> set[str]:
        """Every blob that a row needs: settings and newest models of all runs, updates of rounds not committed."""
        needed = {row.sha256 for row in self._in_rounds(_OPEN_ROUND)}
        for run in self._runs.rows.values():
            needed |= {sha256 for sha256 in (run.settings_sha256, run.task_sha256) if sha256}
            models = self.models(run.id)
            for model in models:
                if model.version > models[-1].version - keep_models or model.version == run.best_version:
                    needed |= {model.sha256, model.sent_sha256}
            needed |= {part.sha256 for part in self.parts(run.id) if run.state == "running"}
        return needed | {row.sha256 for row in self.wanted_deployments()}

    def is_needed(self, sha256: str, keep_models: int) -> bool:
        """Whether a row still needs this blob."""
        return sha256 in self.needed_blobs(keep_models)

    def backup(self, path: Path) -> None:
        """A copy of everything into a new file, as `SqliteStore` keeps it."""
        with durable.disk_errors(f"cannot copy the store to {path}"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        with contextlib.closing(SqliteStore(path)) as other:
            if "epoch" in self._meta.rows:
                other.next_epoch(int(self._meta.rows["epoch"]))
            if "federation" in self._meta.rows:
                other.federation(self._meta.rows["federation"])
            for key, value in self._meta.rows.items():
                if key.startswith("setting."):
                    other.set_setting(key.removeprefix("setting."), value)
            other.add_device(*self.devices())
            for run in self.runs():
                self._copy_run(run, other)
            other.add_deployment(self.deployments())

    def _copy_run(self, run: RunRow, other: SqliteStore) -> None:
        """Rows as they are: calls that would change another row name one that does not exist."""
        other.add_run(run)
        nothing, left_out = -1, self.left_out(run.id)
        for model in self.models(run.id):
            other.commit_round(nothing, nothing, model, left_out)
        for part in self.parts(run.id):
            other.add_part(part)
        for round_ in self.rounds(run.id):
            other.open_round(round_, self.leases(run.id, round_.number, round_.attempt))
        for update in (row for row in self._updates.rows.values() if row.run == run.id):
            other.save_update(update, None, lease_id="")
        for evaluation in self.evaluations(run.id):
            other.save_evaluation(evaluation)
        other.add_traffic(run.id, self.traffic(run.id))
        for device, info in self.remembered_devices(run.id).items():
            other.remember_device(run.id, device, info)

    def close(self) -> None:
        """Nothing is open."""


def _own(row: R) -> R:
    """The row as it would come back from a database: sequences as tuples, maps and reports as copies, no NaN."""
    if isinstance(row, Mapping):
        return _plain(row)  # type: ignore[no-any-return]
    if not dataclasses.is_dataclass(row) or isinstance(row, type):
        return row
    values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
    for name, value in values.items():
        if isinstance(value, float) and math.isnan(value):
            if name != "score":  # the only number that may be missing
                raise IntegrityError(f"{type(row).__name__}.{name} is not a number")
            values[name] = None
        elif isinstance(value, Mapping):
            values[name] = _plain(value)
        elif isinstance(value, (list, tuple)):
            values[name] = tuple(_plain(value))
        elif isinstance(value, Report):
            values[name] = from_map(Report, _plain(value))
    return type(row)(**values)


def _plain(value: object) -> Any:
    return json.loads(json.dumps(to_map(value)))


def _fresh(row: R) -> R:
    """The row with maps of its own."""
    maps = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}  # type: ignore[arg-type]
    copies = {name: copy.deepcopy(value) for name, value in maps.items() if isinstance(value, Mapping)}
    return dataclasses.replace(row, **copies)  # type: ignore[type-var]
