"""The run that the coordinator works on now: its rows, its round machine, and what is made of its newest version.

Covers: the record that the parts of the conductor share, and building it from what the store knows.
Does not cover: which run is active (`lifecycle`), what becomes of it (`conductor`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.conductor.round_clock import RoundClock
from coordinator.conductor.work_log import WorkLog
from coordinator.fleet.roster import Roster
from coordinator.rounds.events import Snapshot
from coordinator.rounds.instructions import SendAssign
from coordinator.rounds.machine import RunMachine
from coordinator.rounds.slice_choice import SliceChoice
from coordinator.store.base import Store
from coordinator.store.rows import OPEN_LEASE, LeaseRow, LeftOutRow, ModelRow, PartRow, RunRow, UpdateRow
from edge_client.config.run_file import RunFile
from edge_client.knowledge.schema import KnowledgeRules
from edge_client.methods import registry as methods
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.planning.rows import ROWS_KEY, ModelRows
from edge_client.records import from_map
from edge_client.transport.blobs import BlobStore

__all__ = ["NUM_DROP_RATE_LEASES", "ActiveRun", "ActiveRunLoader", "travels_in_parts"]

NUM_DROP_RATE_LEASES = 100  # the drop rate is that of so many newest leases


def travels_in_parts(file: RunFile) -> bool:
    """Whether devices may get different parts of the model, or the server keeps more than they get."""
    has_memory = methods.knowledge(file.method.name, file.method.parameters) is not None
    is_split = methods.slicing(file.method.name, file.method.parameters).split
    return has_memory or is_split or methods.architectures(file) != (WHOLE_MODEL,)


@dataclass(slots=True, kw_only=True)
class ActiveRun:
    """One run from its first round, or from a restart, to its end; a new one is made for the next run."""

    row: RunRow
    file: RunFile
    machine: RunMachine
    model: ModelRow  # the newest version
    in_parts: bool  # whether devices may get different parts of the model
    knowledge: KnowledgeRules | None  # if its devices exchange knowledge
    parts: dict[str, PartRow] = field(default_factory=dict)  # of `model`, by name: a slice, or a key of knowledge
    waiting: dict[str, dict[str, SendAssign]] = field(default_factory=dict)  # part that is being made -> by lease
    left_out: list[LeftOutRow] = field(default_factory=list)  # of the fold that is about to be committed
    described: set[str] = field(default_factory=set)  # devices whose profile is stored
    stop_asked: bool | None = None  # True: at once
    work: WorkLog
    clock: RoundClock = field(default_factory=RoundClock)

    @property
    def id(self) -> str:
        """The id of the run."""
        return self.row.id

    def open_lease(self, device: str, lease_id: str) -> LeaseRow | None:
        """The lease if it is this device's and has not ended."""
        lease = self.machine.leases.get(lease_id)
        return lease if lease is not None and lease.device == device and lease.state in OPEN_LEASE else None

    def slice_name(self, lease_id: str) -> str:
        """The slice that the device of a lease of the open round trains."""
        return self.machine.leases[lease_id].slice


class ActiveRunLoader:
    """Builds an `ActiveRun` from what the store knows."""

    def __init__(self, *, store: Store, blobs: BlobStore, roster: Roster, epoch: int, simulated: bool) -> None:
        self._store = store
        self._blobs = blobs
        self._roster = roster
        self._epoch = epoch
        self._simulated = simulated
        self._issue = store.leases.next_issue()

    def load(self, row: RunRow, now: float) -> ActiveRun:
        """The run with its newest version and its open round."""
        file = from_map(RunFile, row.file)
        model = self._store.models.last(row.id)
        assert model is not None
        in_parts = travels_in_parts(file)
        newest = self._store.updates.newest(row.id)
        snapshot = self._snapshot(row, file, model, newest)
        work = WorkLog(self._roster.changes.note)
        work.load(snapshot.leases, newest.values())
        machine = RunMachine(
            snapshot,
            slices=self._slice_choice(row, file) if in_parts else self._choice(file, {}),
            new_id=lambda: secrets.token_hex(16),
            new_issue=self._next_issue,
            now=now,
        )
        parts = [part for part in self._store.models.parts(row.id) if part.version == model.version]
        return ActiveRun(
            row=row,
            file=file,
            machine=machine,
            model=model,
            in_parts=in_parts,
            knowledge=methods.knowledge(file.method.name, file.method.parameters),
            parts={part.slice: part for part in parts if self._blobs.has(part.sha256)},
            work=work,
        )

    def _snapshot(self, row: RunRow, file: RunFile, model: ModelRow, newest: Mapping[str, UpdateRow]) -> Snapshot:
        store, last = self._store, self._store.rounds.last(row.id)
        return Snapshot(
            run=row.id,
            file=file,
            epoch=self._epoch,
            version=model.version,
            round=last,
            leases=store.leases.of_attempt(row.id, last.number, last.attempt) if last else (),
            updates=store.updates.of_attempt(row.id, last.number, last.attempt) if last else (),
            plans={name: update.report.plan for name, update in newest.items() if update.report.plan is not None},
            drop_rate=store.leases.drop_rate(row.id, NUM_DROP_RATE_LEASES),
            scores=store.models.scores(row.id),
            evaluations=store.evaluations.all(row.id, model.version),
            dry=row.dry,
            simulated=self._simulated,
        )

    def _slice_choice(self, row: RunRow, file: RunFile) -> SliceChoice:
        """With the costs that were measured before the run began, which are in its settings."""
        settings = json.loads(self._blobs.path(row.settings_sha256).read_bytes())
        rows = settings.get(ROWS_KEY) or {}
        return self._choice(file, {name: from_map(ModelRows, costs) for name, costs in rows.items()})

    def _choice(self, file: RunFile, rows: dict[str, ModelRows]) -> SliceChoice:
        return SliceChoice(
            file,
            rows,
            budget_of=self._budget_of,
            labels_of=self._roster.labels_of,
            of_training=self._simulated,
            counts_private=self._counts_private,
        )

    def _budget_of(self, device: str) -> int | None:
        """Of the memory that the model is trained in: its accelerator's, where that has one of its own."""
        present = self._roster.presence(device)
        if present is None:
            return None
        profile = present.profile
        return profile.accelerator_bytes if profile.accelerator_memory == "separate" else profile.budget_bytes

    def _counts_private(self, device: str) -> bool:
        present = self._roster.presence(device)
        return present is not None and present.profile.private_budget_bytes > 0

    def _next_issue(self) -> int:
        self._issue += 1
        return self._issue - 1
