"""Carries out what the round machine decides for the active run: rows, blobs, jobs of the aggregator, messages.

    devices and people ──events──> RunMachine ──instructions──> Conductor ──> one of its parts

Each part has one job: `Lifecycle` (queue, first model, recovery, end), `Assignments` and `ModelParts` (what devices
get), `Arrivals` (updates on their way in), `Commits`, `Comparisons` and `ServerEvaluations` (what a round makes),
`Retention` (which blobs stay). They share the record `ActiveRun` and nothing else.

Covers: passing events to the machine, and its instructions to the parts, each durable before the next begins.
Does not cover: deciding (`rounds`), connections and presence (`server`, `fleet`), what people ask (`requests`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from coordinator.aggregation.job_child import JobChild
from coordinator.conductor.active_run import NUM_DROP_RATE_LEASES, ActiveRun, ActiveRunLoader
from coordinator.conductor.arrivals import Arrivals
from coordinator.conductor.assignments import Assignments
from coordinator.conductor.commits import Commits
from coordinator.conductor.comparisons import Comparisons
from coordinator.conductor.lifecycle import Lifecycle
from coordinator.conductor.model_files import ModelFiles
from coordinator.conductor.model_parts import ModelParts
from coordinator.conductor.obstacles import Obstacles
from coordinator.conductor.retention import Retention
from coordinator.conductor.run_jobs import RunJobs
from coordinator.conductor.server_evaluations import ServerEvaluations
from coordinator.conductor.update_rows import UpdateRows
from coordinator.fleet.downloads import Downloads
from coordinator.fleet.roster import Roster
from coordinator.fleet.traffic import TrafficMeter
from coordinator.fleet.uploads import FinishedUpload, Uploads
from coordinator.rounds import events
from coordinator.rounds.eligibility import Obstacle
from coordinator.rounds.instructions import (
    Abandon,
    AddLeases,
    Announce,
    CloseLease,
    Commit,
    Finish,
    Fold,
    Freeze,
    Instruction,
    Judge,
    OpenRound,
    SaveDeadline,
    SaveScore,
    SaveUpdate,
    SendAssign,
    SendCancel,
    SendReceipt,
)
from coordinator.rounds.machine import RunMachine
from coordinator.store.base import Store
from coordinator.store.rows import ModelRow, RunRow
from edge_client import faults
from edge_client.config.run_file import RunFile
from edge_client.logs import about
from edge_client.records import TrainingPlan
from edge_client.transport.blobs import BlobStore
from edge_client.wire.messages import Cancel, Decline, Message, Offer, Receipt

__all__ = ["Conductor"]

log = logging.getLogger(__name__)

# reasons in the row of a running run that somebody wants to end -> whether at once
_STOP_AFTER = "asked to stop after its round"
_STOP_NOW = "asked to stop now"
_STOP_ASKED = {_STOP_AFTER: False, _STOP_NOW: True}


class Conductor:
    """The active run and those that wait for it."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        uploads: Uploads,
        downloads: Downloads,
        traffic: TrafficMeter,
        aggregation: JobChild,
        send: Callable[[str, Message], None],
        announce: Callable[[str], None],
        roster: Roster,
        epoch: int,
        simulated: bool = False,
        test_data: str = "",
        device_folders: Path | None = None,
    ) -> None:
        """Of a simulation: `test_data` is the npz file of its test set, `device_folders` the folder of its devices."""
        self._store = store
        self._roster = roster
        self._uploads = uploads
        self._send = send
        self._active: ActiveRun | None = None
        self._last: ActiveRun | None = None
        self._boots: dict[str, str] = {}
        self._obstacles = Obstacles(roster)
        self._loader = ActiveRunLoader(store=store, blobs=blobs, roster=roster, epoch=epoch, simulated=simulated)
        self._traffic = traffic
        self._update_rows = UpdateRows(store=store, blobs=blobs, roster=roster, traffic=traffic)
        self._retention = Retention(store=store, blobs=blobs, uploads=uploads, downloads=downloads)
        self._jobs = jobs = RunJobs(aggregation, fail=lambda run_id, reason: self._lifecycle.fail(run_id, reason))
        self._models = models = ModelFiles(store=store, blobs=blobs, jobs=jobs)
        self._lifecycle = Lifecycle(
            store=store,
            blobs=blobs,
            jobs=jobs,
            models=models,
            retention=self._retention,
            begin=lambda run: self._activate(run, time.monotonic()),
            ended=self._close,
        )
        parts = ModelParts(store=store, blobs=blobs, jobs=jobs, models=models, retention=self._retention)
        self._assignments = Assignments(
            store=store,
            parts=parts,
            send=send,
            delayed=lambda lease: self._handle(events.AssignmentDelayed(lease), time.monotonic()),
            epoch=epoch,
        )
        self._arrivals = Arrivals(
            store=store,
            blobs=blobs,
            uploads=uploads,
            jobs=jobs,
            parts=parts,
            retention=self._retention,
            send=send,
            handle=self._handle,
        )
        self._evaluations = ServerEvaluations(
            store=store,
            blobs=blobs,
            jobs=jobs,
            models=models,
            retention=self._retention,
            handle=self._handle,
            simulated_data=test_data,
        )
        comparisons = Comparisons(
            store=store,
            blobs=blobs,
            jobs=jobs,
            models=models,
            simulated=simulated,
            simulated_data=test_data,
            device_folders=device_folders,
        )
        self._commits = Commits(
            store=store,
            blobs=blobs,
            jobs=jobs,
            models=models,
            comparisons=comparisons,
            retention=self._retention,
            announce=announce,
            save_traffic=self.save_traffic,
            handle=self._handle,
        )

    # what others read

    @property
    def run(self) -> RunRow | None:
        """The active run."""
        return self._active.row if self._active is not None else None

    @property
    def machine(self) -> RunMachine | None:
        """The machine of the active run, to read from."""
        return self._active.machine if self._active is not None else None

    @property
    def shown(self) -> ActiveRun | None:
        """The active run, or the one that was active last since this process began; to read from."""
        return self._active or self._last

    @property
    def selecting(self) -> bool:
        """Whether a run is between two rounds."""
        return self._active is not None and self._active.machine.round is None

    def obstacle(self, file: RunFile, device: str) -> Obstacle | None:
        """Why a run does not ask a device that is there; None if it may."""
        is_active = self._active is not None and file is self._active.file
        return (self._obstacles if is_active else Obstacles(self._roster)).of(file, device)

    def model_named(self, name: str, *, option: str = "init") -> ModelRow:
        """A version by `RUN`, `RUN@last`, `RUN@best` or `RUN@VERSION`; raises `InputError` that names the option."""
        return self._models.named(name, option=option)

    def plan_of(self, device: str) -> TrainingPlan | None:
        """How a device trains in the open run, or trained in the last one since this process began."""
        return self.shown.machine.plans.get(device) if self.shown is not None else None

    def may_pull(self, device: str, sha256: str) -> int | None:
        """The length of a blob that this device may fetch now, or None."""
        return self._assignments.may_pull(self._active, device, sha256) if self._active is not None else None

    # runs

    def recover(self, now: float) -> None:
        """Go on where the store says; call this once, before anything else."""
        run = self._lifecycle.recover()
        if run is not None:
            self._activate(run, now)

    def tick(self, online: frozenset[str], num_enrolled: int, now: float) -> None:
        """Let time pass."""
        if self._active is not None and self._active.stop_asked is not None:
            at_once, self._active.stop_asked = self._active.stop_asked, None
            self._handle(events.StopAsked(at_once), now)
        if self._active is not None:
            barred = self._obstacles.barred(self._active.file, online)
            asked = online - barred if barred else online
            self._handle(events.Tick(asked, num_enrolled - len(barred)), now)
        else:
            self._lifecycle.prepare_next()

    def stop(self, run_id: str, *, at_once: bool) -> None:
        """End a run after its round, or at once."""
        if self._active is not None and self._active.id == run_id:
            self._store.runs.set_state(run_id, "running", _STOP_NOW if at_once else _STOP_AFTER)
            self._active.stop_asked = at_once  # the next tick does it; a restart finds it in the row
        else:
            self._lifecycle.cancel(run_id)

    def forget(self, run: RunRow) -> None:
        """Remove a run that has ended, with all its rows and the blobs that nobody else needs."""
        self._retention.forget_run(run)

    def release(self, sha256: str) -> None:
        """Remove a blob that a deployment used, unless it is needed for something else."""
        self._retention.drop(sha256)

    def _activate(self, row: RunRow, now: float) -> None:
        run = self._active = self._loader.load(row, now)
        self._roster.changes.note_all()
        self._traffic.take_all()  # what moved before is no part of this run
        faults.in_round(run.machine.number)
        run.stop_asked = _STOP_ASKED.get(row.reason)
        self._jobs.warm_up()
        self._carry_out(run, run.machine.handle(events.Resumed(), now))
        if self._active is run:  # otherwise all its rounds were done: it is over
            self._assignments.repair(run)

    def _close(self) -> None:
        """A run is over: the answer to one of its jobs would find no run here, or the next one."""
        self._jobs.forget()
        self._retention.drop_held()
        run, self._active = self._active, None
        self._roster.changes.note_all()
        if run is not None:
            self._last = run
            self._retention.drop_parts(run.id)

    def save_traffic(self) -> None:
        """Write down what travelled since the last time."""
        if self._active is not None and self._traffic.moved:
            self._store.traffic.add(self._active.id, self._traffic.take_all())

    # events: what devices report

    def accepted(self, device: str, lease: str, now: float) -> None:
        """A device took its lease."""
        if self._active is not None and self._is_open(device, lease):
            self._active.clock.note_lease(lease, "accept")
            self._handle(events.Accepted(lease), now)

    def declined(self, device: str, decline: Decline, now: float) -> None:
        """A device will not do its lease."""
        if self._is_open(device, decline.lease):
            self._handle(
                events.Declined(lease=decline.lease, code=decline.code, detail=decline.detail, log=decline.log), now
            )

    def holding(self, device: str, lease: str | None, *, finished: bool, now: float) -> None:
        """A device reported its lease; one that is over is cancelled, unless it is `finished`, which gets `late`."""
        self._handle(events.Holding(device, lease), now)
        if lease is not None and not finished and not self._is_open(device, lease):
            self._send(device, Cancel(lease=lease, code="over"))

    def greeted(self, device: str, boot: str, now: float) -> None:
        """A device said hello; with another boot id it has restarted."""
        if self._boots.get(device) != boot:
            self._boots[device] = boot
            self._roster.changes.note(device)
            self._handle(events.Returned(device), now)

    def removed(self, device: str, now: float) -> None:
        """A device is no longer enrolled: nobody waits for it."""
        self._handle(events.Removed(device), now)

    def offered(self, device: str, offer: Offer, now: float) -> None:
        """A device has an update: fetch it, or answer what became of it."""
        self._arrivals.offered(self._active, device, offer, now)

    def arrived(self, arrived: FinishedUpload, now: float) -> None:
        """An upload has ended."""
        self._arrivals.arrived(self._active, arrived, now)

    def _is_open(self, device: str, lease: str) -> bool:
        return self._active is not None and self._active.open_lease(device, lease) is not None

    def _handle(self, event: events.Event, now: float) -> None:
        run = self._active
        if run is not None:
            self._carry_out(run, run.machine.handle(event, now))

    # instructions

    def _carry_out(self, run: ActiveRun, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case OpenRound():
                    self._open_round(run, instruction)
                case AddLeases(leases):
                    self._store.leases.add(leases)
                    run.work.opened(leases, is_new_attempt=False)
                case SendAssign():
                    self._assignments.offer(run, instruction)
                case CloseLease():
                    self._close_lease(instruction)
                    run.work.closed(instruction)
                case SendCancel(device, lease):
                    self._uploads.drop(device)
                    self._send(device, Cancel(lease=lease))
                case SaveUpdate():
                    self._update_rows.save(run, instruction)
                case SaveScore():
                    self._evaluations.save_score(run, instruction)
                case Judge(version):
                    self._evaluations.judge(run, version)
                case SendReceipt():
                    self._send(instruction.device, _receipt(instruction))
                case Freeze(round_, set_hash):
                    run.clock.note("freeze")
                    self._store.rounds.freeze(round_.run, round_.number, round_.attempt, set_hash)
                case Fold():
                    self._commits.fold(run, instruction)
                case Commit():
                    self._commit(run, instruction)
                case Announce():
                    self._commits.announce(run, instruction)
                case Abandon():
                    self._abandon(run, instruction)
                case SaveDeadline():
                    self._save_deadline(instruction)
                case Finish(state, reason):
                    self.save_traffic()
                    self._lifecycle.finish(run.id, state, reason)

    def _open_round(self, run: ActiveRun, opened: OpenRound) -> None:
        round_ = opened.round
        faults.in_round(round_.number)
        run.clock.begin()
        self._store.rounds.open(round_, opened.leases)
        run.work.opened(opened.leases)
        last = "plans" if run.row.dry else "last evaluation"
        what = f"round {round_.number}" if round_.goal else last
        whose = about(run=round_.run, round=round_.number)
        log.info("run %s %s: asks %d devices", round_.run, what, len(opened.leases), extra=whose)

    def _close_lease(self, closed: CloseLease) -> None:
        self._store.leases.set_state(closed.lease, closed.state, code=closed.code, detail=closed.detail, log=closed.log)
        if closed.state in ("declined", "refused", "expired"):
            lease = self._store.leases.get(closed.lease)  # the machine may be past its round
            device = lease.device if lease else "?"
            whose = about(device=device, run=lease.run, round=lease.round) if lease else {}
            detail = f": {closed.detail!r}" if closed.detail else ""
            log.warning("%s: %s (%s%s)", device, closed.state, closed.code, detail, extra=whose)

    def _commit(self, run: ActiveRun, commit: Commit) -> None:
        self._commits.commit(run, commit)
        self._observe_drop_rate(run)
        self._commits.study(run)
        number, sha256 = commit.round.number, commit.model.sha256[:12]
        log.info("run %s round %d: committed %s", run.id, number, sha256, extra=about(run=run.id, round=number))

    def _abandon(self, run: ActiveRun, abandoned: Abandon) -> None:
        round_, reason = abandoned.round, abandoned.reason
        self._store.rounds.abandon(round_.run, round_.number, round_.attempt, reason)
        self._retention.drop_updates(round_)
        self._observe_drop_rate(run)
        whose = about(run=round_.run, round=round_.number)
        log.warning("run %s round %d: abandoned, %s", round_.run, round_.number, reason, extra=whose)

    def _observe_drop_rate(self, run: ActiveRun) -> None:
        rate = self._store.leases.drop_rate(run.id, NUM_DROP_RATE_LEASES)
        self._handle(events.DropRateObserved(rate), time.monotonic())

    def _save_deadline(self, saved: SaveDeadline) -> None:
        round_ = saved.round
        self._store.rounds.save_deadline(
            round_.run,
            round_.number,
            round_.attempt,
            remaining_s=round_.remaining_s,
            extended=round_.extended,
            elapsed_s=round_.elapsed_s,
        )


def _receipt(instruction: SendReceipt) -> Receipt:
    return Receipt(
        lease=instruction.lease,
        sha256=instruction.sha256,
        status=instruction.status,
        code=instruction.code,
        detail=instruction.detail,
    )
