"""Carries out what the round machine decides for the active run: rows, blobs, jobs of the aggregator, messages.

Covers: the queue of runs, intake of updates, folding, announcing, cleaning up.
Does not cover: deciding (`rounds`), connections and presence (`service`, `roster`), what people ask (`commands`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.aggregation.job_child import JobChild
from coordinator.aggregation.jobs import (
    CalibrateJob,
    Calibration,
    CheckedUpdate,
    CheckJob,
    EncodeJob,
    EvaluateJob,
    Failure,
    FoldedModel,
    FoldJob,
    InitJob,
    ProbedUpdate,
    ProbeJob,
    ServerEvaluation,
    StudyJob,
    TellJob,
    UpdateRef,
    WrittenFile,
)
from coordinator.conductor import intake
from coordinator.fleet.roster import Roster
from coordinator.fleet.traffic import TrafficMeter
from coordinator.fleet.transfers import Arrived, Downloads, Uploads
from coordinator.results import similarity_record
from coordinator.results.similarity_record import Compared, Findings
from coordinator.rounds import evaluation, events
from coordinator.rounds.eligibility import Obstacle, obstacle
from coordinator.rounds.frozen_set import counted_samples
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
from coordinator.rounds.selection import seed_of
from coordinator.rounds.slice_choice import SliceChoice
from coordinator.rounds.stopping import learning_rate
from coordinator.state import RETAINED_MODELS
from coordinator.store.base import Store
from coordinator.store.rows import SERVER, EvaluationRow, LeaseRow, LeftOutRow, ModelRow, PartRow, RunRow, UpdateRow
from edge_client import durable, faults
from edge_client.config.run_file import RunFile
from edge_client.errors import InputError, PayloadError
from edge_client.knowledge.schema import PUBLIC_PART, TOLD_PART, KnowledgeRules
from edge_client.logs import about
from edge_client.methods import registry as methods
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.planning.rows import ModelRows
from edge_client.records import PartRef, Report, TrainingPlan, from_map, to_map
from edge_client.transport.blobs import BlobStore
from edge_client.wire.container import read_header
from edge_client.wire.messages import Assign, Cancel, Decline, Message, Offer, Receipt

__all__ = ["Conductor"]

log = logging.getLogger(__name__)

_NORM_ROUNDS = 5
_DROP_LEASES = 100
_HEADROOM = 1.05  # an update may be this much longer than what was sent, for its report
_HEADROOM_BYTES = 65_536
_STOP_AFTER = "asked to stop after its round"
_STOP_NOW = "asked to stop now"

Send = Callable[[str, Message], None]


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
        send: Send,
        announce: Callable[[dict[str, Any]], None],
        roster: Roster,
        epoch: int,
        simulated: bool = False,
        test_data: str = "",
        own_models: Path | None = None,
    ) -> None:
        """Of a simulation: `test_data` is the npz file of its test set, `own_models` the folder of its devices."""
        self._store = store
        self._roster = roster
        self._blobs = blobs
        self._uploads = uploads
        self._downloads = downloads
        self._traffic = traffic
        self._aggregation = aggregation
        self._send = send
        self._announce = announce
        self._epoch = epoch
        self._simulated = simulated
        self._test_data = test_data
        self._own_models = own_models
        self.machine: RunMachine | None = None
        self._last_plans: Mapping[str, TrainingPlan] = {}
        self.run: RunRow | None = None
        self.model: ModelRow | None = None
        self._preparing = ""  # the run whose first model is being made
        self._stop_asked: bool | None = None  # True: at once
        self._checking: dict[str, Offer] = {}  # lease -> its update is here and being checked
        self._norm_bounds: tuple[tuple[str, int], dict[str, float]] | None = None  # (run, version), bound of a slice
        self._rules: KnowledgeRules | None = None  # of the active run, if its devices exchange knowledge
        self._left_out: list[LeftOutRow] = []  # of the fold that is about to be committed
        self._is_cut = False  # whether devices may get different parts of the model
        self._parts: dict[str, PartRow] = {}  # of what is sent: slice or key of knowledge -> how it travels
        self._cutting: dict[str, dict[str, SendAssign]] = {}  # what is being made of these -> leases that wait
        self._issue = store.leases.next_issue()
        self._boots: dict[str, str] = {}
        self._remembered: set[str] = set()  # devices of the active run whose profile is stored

    # runs

    def recover(self, now: float) -> None:
        """Go on where the store says; run once before anything else."""
        run = self._store.runs.oldest("running")
        if run is not None and not self._is_whole(run):
            run = None
        self._clean_up(run)
        if run is not None:
            self._activate(run, now)

    def _is_whole(self, run: RunRow) -> bool:
        """Look at every blob of the open round: a lost update is asked for again, a lost model ends the run.

        A lost part of the model is made again (`_activate`).
        """
        model = self._store.models.last(run.id)
        assert model is not None
        for sha256 in filter(None, (run.settings_sha256, run.task_sha256, model.sha256, model.sent_sha256)):
            if not self._blobs.verified(sha256):
                what = f"blob {sha256[:12]} of version {model.version} is missing or damaged"
                self._fail(run.id, f"damaged: {what}; restore a backup of the state directory")
                return False
        for part in self._store.models.parts(run.id):
            if part.version == model.version and not self._blobs.verified(part.sha256):
                what = "%s of version %d is missing or damaged on disk: making it again"
                log.warning(what, part.slice, part.version, extra=about(run=run.id))
        last = self._store.rounds.last(run.id)
        if last is not None and last.state in ("RUNNING", "FROZEN"):
            for update in self._store.updates.of_attempt(run.id, last.number, last.attempt):
                if not self._blobs.verified(update.sha256):
                    what = "the update of %s is missing or damaged on disk: asking for it again"
                    log.warning(what, update.device, extra=about(device=update.device, run=run.id, round=last.number))
                    self._store.updates.drop(update)
        return True

    def _clean_up(self, run: RunRow | None) -> None:
        last = self._store.rounds.last(run.id) if run is not None else None
        leases = self._store.leases.of_attempt(last.run, last.number, last.attempt) if last is not None else ()
        self._blobs.keep_only(self._store.blob_references.needed(RETAINED_MODELS), {lease.id for lease in leases})

    def tick(self, online: frozenset[str], num_enrolled: int, now: float) -> None:
        """Let time pass."""
        if self._stop_asked is not None:
            at_once, self._stop_asked = self._stop_asked, None
            self._handle(events.StopAsked(at_once), now)
        if self.machine is not None:
            barred = {name for name in online if self.obstacle(self.machine.file, name) is not None}
            self._handle(events.Tick(online - barred, num_enrolled - len(barred)), now)
        elif not self._preparing:
            waiting = self._store.runs.oldest("queued")
            if waiting is not None:
                self._prepare(waiting)

    def obstacle(self, file: RunFile, device: str) -> Obstacle | None:
        """Why a run does not ask a device that is there; None if it may."""
        present = self._roster.presence(device)
        tasks = present.tasks if present is not None else {}
        return obstacle(file, labels=self._roster.labels_of(device), tasks=tasks)

    @property
    def selecting(self) -> bool:
        """Whether a run is between two rounds."""
        return self.machine is not None and self.machine.round is None

    def _prepare(self, run: RunRow) -> None:
        """Make the first model of a run, in the aggregator."""
        self._preparing = run.id
        out = self._blobs.temporary_path(f"init-{run.id}")
        try:
            file, task = from_map(RunFile, run.file), self._task_path(run)
            start, start_run = self._start_of(run)
        except InputError as error:
            self._fail(run.id, f"input: {error}")
            return
        except PayloadError as error:  # of a version that knew other keys
            self._fail(run.id, str(error))
            return
        job = InitJob(run=file, task=task, start=start, start_run=start_run, out=str(out))

        def calibrated(answer: Calibration | Failure) -> None:
            if isinstance(answer, Failure):
                self._job_failed(run, answer)
                return
            begin = partial(self._begin, rows=answer.rows)
            self._aggregation.submit(job, lambda made: self._made(run, 0, out, "", made, begin))

        self._aggregation.submit(CalibrateJob(run=file, task=task), calibrated)

    def _task_path(self, run: RunRow) -> str | None:
        return str(self._blobs.path(run.task_sha256)) if run.task_sha256 else None

    def _start_of(self, run: RunRow) -> tuple[str | None, RunFile | None]:
        """The model that a run goes on from, and its run; raises `InputError` if it is not there any more."""
        init = from_map(RunFile, run.file).init
        if init == "random":
            return None, None
        model = self.model_named(init.removeprefix("run:"))
        other = self._store.runs.get(model.run)
        return str(self._blobs.path(model.sha256)), from_map(RunFile, other.file) if other is not None else None

    def model_named(self, name: str, *, option: str = "init") -> ModelRow:
        """A kept model by `RUN`, `RUN@last`, `RUN@best` or `RUN@VERSION`; raises `InputError` that names the option."""
        run_id, _, which = name.partition("@")
        run = self._store.runs.get(run_id)
        if run is None:
            raise InputError(f"{option}: expected a run of this coordinator, got {run_id!r}; see: coordinator run list")
        version = run.best_version if which == "best" else int(which) if which.isdigit() else None
        if which == "best" and version is None:
            instead = f"use run:{run_id}" if option == "init" else "use last"
            raise InputError(f"{option}: run {run_id!r} has no best version, nothing of it was judged; {instead}")
        model = self._store.models.last(run_id) if version is None else self._store.models.get(run_id, version)
        if model is None or not self._store.blob_references.is_needed(model.sha256, RETAINED_MODELS):
            what = "no model" if version is None else f"no version {version} any more"
            raise InputError(f"{option}: run {run_id!r} has {what}; the last {RETAINED_MODELS} and the best are kept")
        if not self._blobs.verified(model.sha256):
            raise InputError(
                f"{option}: version {model.version} of run {run_id!r} (blob {model.sha256[:12]}) is missing or damaged "
                "on disk; name another version, or restore a backup"
            )
        return model

    def _begin(self, run: RunRow, model: ModelRow, rows: Mapping[str, ModelRows]) -> None:
        """`rows` travel with the run's file: devices of this machine's kind need not measure the model."""
        self._preparing = ""
        settings = json.dumps({**run.file, "x-rows": to_map(rows)}, sort_keys=True).encode()
        sha256 = hashlib.sha256(settings).hexdigest()
        self._blobs.write(settings, sha256, point="settings")
        self._store.runs.start(model, sha256, len(settings))
        started = self._store.runs.get(run.id)
        assert started is not None
        log.info("run %s begins", run.id, extra=about(run=run.id))
        self._activate(started, time.monotonic())

    def _made(
        self,
        run: RunRow,
        version: int,
        out: Path,
        set_hash: str,
        answer: WrittenFile | Failure,
        then: Callable[[RunRow, ModelRow], None],
    ) -> None:
        """A model file is there: make it a blob, then the form in which it travels, then `then`."""
        if isinstance(answer, Failure):
            self._job_failed(run, answer)
            return
        self._blobs.adopt(out, answer.sha256, point="model")
        row = ModelRow(
            run=run.id,
            version=version,
            sha256=answer.sha256,
            length=answer.length,
            sent_sha256=answer.sha256,
            sent_length=answer.length,
            set_hash=set_hash,
        )
        file = from_map(RunFile, run.file)
        if file.rounds.codec == "fp32" or _is_cut(file):
            then(run, row)
            return
        encoded = self._blobs.temporary_path(f"sent-{run.id}")

        def sent(answer: WrittenFile | Failure) -> None:
            if isinstance(answer, Failure):
                self._job_failed(run, answer)
                return
            self._blobs.adopt(encoded, answer.sha256, point="sent")
            then(run, dataclasses.replace(row, sent_sha256=answer.sha256, sent_length=answer.length))

        self._aggregation.submit(self._encoding(run, row.sha256, "full", encoded), sent)

    def _encoding(self, run: RunRow, sha256: str, slice_name: str, out: Path) -> EncodeJob:
        """The job that makes what travels of a model."""
        file, model = from_map(RunFile, run.file), str(self._blobs.path(sha256))
        return EncodeJob(run=file, task=self._task_path(run), model=model, slice=slice_name, out=str(out))

    def _job_failed(self, run: RunRow, failure: Failure) -> None:
        """A full disk passes; anything else ends the run with its reason."""
        _raise_disk_error(failure)
        self._fail(run.id, f"{failure.code}: {failure.detail}")

    def _fail(self, run_id: str, reason: str) -> None:
        """End a run that cannot go on; its open round is abandoned with it."""
        log.error("run %s failed: %s", run_id, reason, extra=about(run=run_id))
        last = self._store.rounds.last(run_id)
        self._store.runs.fail(run_id, reason[:500])
        for update in self._store.updates.of_attempt(run_id, last.number, last.attempt) if last is not None else ():
            self._drop_blob(update.sha256)
        self._close()

    def _activate(self, run: RunRow, now: float) -> None:
        last = self._store.rounds.last(run.id)
        model = self._store.models.last(run.id)
        assert model is not None
        snapshot = events.Snapshot(
            run=run.id,
            file=from_map(RunFile, run.file),
            epoch=self._epoch,
            version=model.version,
            round=last,
            leases=self._store.leases.of_attempt(run.id, last.number, last.attempt) if last else (),
            updates=self._store.updates.of_attempt(run.id, last.number, last.attempt) if last else (),
            plans=self._store.updates.last_plans(run.id),
            drop_rate=self._store.leases.drop_rate(run.id, _DROP_LEASES),
            scores=self._store.models.scores(run.id),
            evaluations=self._store.evaluations.all(run.id, model.version),
            dry=run.dry,
            simulated=self._simulated,
        )
        self.run, self.model = run, model
        self._traffic.take_all()  # what moved before is no part of this run
        self._is_cut = _is_cut(snapshot.file)
        self._rules = methods.knowledge(snapshot.file.method.name, snapshot.file.method.parameters)
        parts = [part for part in self._store.models.parts(run.id) if part.version == model.version]
        self._parts = {part.slice: part for part in parts if self._blobs.has(part.sha256)}
        machine = RunMachine(
            snapshot,
            slices=self._slice_choice(run, snapshot.file),
            new_id=lambda: secrets.token_hex(16),
            new_issue=self._next_issue,
            now=now,
        )
        self.machine = machine
        faults.in_round(machine.number)
        self._stop_asked = {_STOP_AFTER: False, _STOP_NOW: True}.get(run.reason)
        self._aggregation.warm_up()
        self._carry_out(machine.handle(events.Resumed(), now))
        if self.machine is not machine:  # all its rounds were done: it is over
            return
        for lease in [lease for lease in machine.leases.values() if lease.state == "accepted"]:
            if self._lacking(lease):  # others are offered again, which makes what they lack
                self._offer(SendAssign(lease, last.remaining_s if last is not None else 0.0))

    def _slice_choice(self, run: RunRow, file: RunFile) -> SliceChoice:
        settings = json.loads(self._blobs.path(run.settings_sha256).read_bytes()) if self._is_cut else {}
        rows = settings.get("x-rows") or {}
        return SliceChoice(
            file,
            {rung: from_map(ModelRows, found) for rung, found in rows.items()},
            budget_of=self._budget_of,
            labels_of=self._roster.labels_of,
            of_training=self._simulated,
        )

    def _budget_of(self, device: str) -> int | None:
        present = self._roster.presence(device)
        return present.profile.budget_bytes if present is not None else None

    def _next_issue(self) -> int:
        self._issue += 1
        return self._issue - 1

    def stop(self, run_id: str, *, at_once: bool) -> None:
        """End a run after its round, or at once."""
        if self.machine is not None and self.run is not None and self.run.id == run_id:
            self._store.runs.set_state(run_id, "running", _STOP_NOW if at_once else _STOP_AFTER)
            self._stop_asked = at_once  # the next tick does it; a restart finds it in the row
        else:
            self._store.runs.set_state(run_id, "stopped", "stopped before it began")
            if self._preparing == run_id:
                self._forget_jobs()
                self._preparing = ""

    def _forget_jobs(self) -> None:
        """Nobody wants an ended run's answers, and a task's own code may never give one."""
        self._aggregation.forget_jobs()
        unchecked, self._checking = self._checking, {}
        for offer in unchecked.values():
            self._drop_blob(offer.sha256)

    def forget(self, run: RunRow) -> None:
        """Remove a run that has ended, with all its rows and the blobs that nobody else needs."""
        models = self._store.models.all(run.id)
        self._store.runs.remove(run.id)
        blobs = {run.settings_sha256, run.task_sha256}
        blobs |= {sha256 for model in models for sha256 in (model.sha256, model.sent_sha256)}
        for sha256 in sorted(blobs - {""}):
            self._drop_blob(sha256)

    # what devices say

    def accepted(self, device: str, lease: str, now: float) -> None:
        """A device took its lease."""
        if self.open_lease(device, lease) is not None:
            self._handle(events.Accepted(lease), now)

    def declined(self, device: str, decline: Decline, now: float) -> None:
        """A device will not do its lease."""
        if self.open_lease(device, decline.lease) is not None:
            told = events.Declined(lease=decline.lease, code=decline.code, detail=decline.detail, log=decline.log)
            self._handle(told, now)

    def holding(self, device: str, lease: str | None, *, finished: bool, now: float) -> None:
        """A device told what it has in hand; what nobody wants any more is cancelled (a finished one gets `late`)."""
        self._handle(events.Holding(device, lease), now)
        if lease is not None and not finished and self.open_lease(device, lease) is None:
            self._send(device, Cancel(lease=lease, code="over"))

    def greeted(self, device: str, boot: str, now: float) -> None:
        """A device said hello; with another boot id it has started anew."""
        if self._boots.get(device) != boot:
            self._boots[device] = boot
            self._handle(events.Returned(device), now)

    def removed(self, device: str, now: float) -> None:
        """A device is not enrolled any more: nobody waits for it."""
        self._handle(events.Removed(device), now)

    def open_lease(self, device: str, lease_id: str) -> LeaseRow | None:
        """The lease if it is this device's and still open."""
        lease = self.machine.leases.get(lease_id) if self.machine else None
        return lease if lease and lease.device == device and lease.state in ("offered", "accepted") else None

    def may_pull(self, device: str, sha256: str) -> int | None:
        """The length of a blob that this device may fetch now, or None."""
        if self.machine is None or self.run is None or self.model is None:
            return None
        for lease in self.machine.leases.values():
            if lease.device != device or lease.state not in ("offered", "accepted"):
                continue
            if not self._lacking(lease):
                known = {part.sha256: part.length for part in self._parts_of(lease)}
                if sha256 in known:
                    return known[sha256]
        return None

    def offered(self, device: str, offer: Offer, now: float) -> None:
        """A device has an update: take it, or say what became of it."""
        faults.point("coordinator.offer")
        if offer.lease in self._checking or self._uploads.is_open(device, offer):
            return
        lease = self.open_lease(device, offer.lease)
        if lease is None:
            self._send(device, self._past(device, offer))
            return
        if self._lacking(lease):
            return  # what it was made of is lost, and being made again: the device offers again
        self._handle(events.Accepted(lease.id), now)
        assert self.machine is not None
        assert self.model is not None
        known = methods.knowledge_limits(self.machine.file).max_bytes
        matrix = 8 * len(self.machine.file.classes) ** 2
        limit = int(_HEADROOM * self._sent(lease).length) + _HEADROOM_BYTES + matrix + known
        if (offer.run, offer.round) != (lease.run, lease.round):
            detail = f"offer for {offer.run} round {offer.round}, the lease is of {lease.run} round {lease.round}"
            self._refuse(offer, PayloadError("malformed", detail), now)
        elif not 0 < offer.length <= limit:
            detail = f"update of {offer.length} bytes, at most {limit} are expected"
            self._refuse(offer, PayloadError("too_large", detail), now)
        elif not 0 <= offer.num_samples <= self.machine.file.devices.max_samples:
            detail = f"{offer.num_samples} samples, expected 1 to {self.machine.file.devices.max_samples}"
            self._refuse(offer, PayloadError("sample_count", detail), now)
        else:
            self._uploads.expect(device, offer)

    def _past(self, device: str, offer: Offer) -> Receipt:
        """The answer to an offer of a lease that is not open: the same as the first time."""
        lease = self._store.leases.get(offer.lease)
        receipt = {"lease": offer.lease, "sha256": offer.sha256}
        if lease is None or lease.device != device:
            return Receipt(**receipt, status="late", code="unknown_lease", detail="nobody waits for it")
        if lease.state == "stored":
            update = self._store.updates.of_lease(lease.id)
            if update is not None and update.sha256 != offer.sha256:
                return Receipt(**receipt, status="refused", code="equivocation", detail="another update was stored")
            return Receipt(**receipt, status="accepted")
        if lease.state == "refused":
            return Receipt(**receipt, status="refused", code=lease.code, detail=lease.detail)
        return Receipt(**receipt, status="late", code="late", detail=lease.detail or "the round is over")

    def _refuse(self, offer: Offer, error: PayloadError, now: float) -> None:
        lease = self._store.leases.get(offer.lease)
        whose = about(device=lease.device, run=lease.run, round=lease.round) if lease is not None else {}
        log.warning("refused the update of lease %s: %s", offer.lease, error, extra=whose)
        detail = error.detail[:1000]
        self._handle(events.Refused(lease=offer.lease, sha256=offer.sha256, code=error.code, detail=detail), now)

    # intake

    def arrived(self, arrived: Arrived, now: float) -> None:
        """An upload has ended: check it against its assignment, then let the aggregator look at its values."""
        offer = arrived.offer
        lease = self.open_lease(arrived.device, offer.lease)
        if lease is None:
            self._drop_blob(offer.sha256)
            self._send(arrived.device, self._past(arrived.device, offer))
            return
        try:
            if arrived.path is None:
                raise arrived.error or PayloadError("hash", "the update never had its hash")
            with durable.disk_errors(f"cannot read the update of {arrived.device!r}"):
                report = intake.check_header(arrived.path, self._expected(lease, offer))
                confusion = intake.read_confusion(arrived.path, report)
        except PayloadError as error:
            self._drop_blob(offer.sha256)
            self._refuse(offer, error, now)
            return
        self._checking[offer.lease] = offer
        assert self.model is not None
        file = self._file()
        job = CheckJob(
            base=str(self._blobs.path(self._sent(lease).sha256)),
            update=str(arrived.path),
            max_norm=self._max_norm(lease.slice),
            max_ratio=file.rounds.max_norm_ratio,
            max_passes=file.train.batch,
            round=lease.round,
            knowledge=methods.knowledge_limits(file),
            codec=file.rounds.codec,
        )
        self._aggregation.submit(job, lambda answer: self._checked(offer, report, confusion, answer))

    def _expected(self, lease: LeaseRow, offer: Offer) -> intake.Expected:
        assert self.machine is not None
        assert self.model is not None
        return intake.Expected(
            device=lease.device,
            round=lease.round,
            base=read_header(self._blobs.path(self._sent(lease).sha256)),
            codec=self.machine.file.rounds.codec,
            train=lease.train,
            evaluate=lease.evaluate,
            num_samples=offer.num_samples,
            max_samples=self.machine.file.devices.max_samples,
            num_classes=len(self.machine.file.classes),
            epochs=self.machine.file.train.epochs,
            rules=methods.plan_rules(self.machine.file.method.name, self.machine.file.method.parameters),
            knowledge=methods.knowledge_limits(self.machine.file) if self._rules is not None else None,
            slice=lease.slice,
        )

    def _file(self) -> RunFile:
        assert self.machine is not None
        return self.machine.file

    def _max_norm(self, slice_: str) -> float | None:
        """Bounds come from committed rounds only, so that a repeated round has the same ones; one per slice.

        A wide model moves much farther than a narrow one beside it. None where nothing is usual yet: then the
        aggregator measures against the model that was sent.
        """
        assert self.machine is not None
        version = (self.machine.run, self.machine.version)
        if self._norm_bounds is None or self._norm_bounds[0] != version:
            recent = self._store.updates.recent_norms(self.machine.run, _NORM_ROUNDS)
            usual = {cut: [norm for norm in norms if norm > 0] for cut, norms in recent.items()}
            ratio = self.machine.file.rounds.max_norm_ratio
            self._norm_bounds = (version, {cut: statistics.median(own) * ratio for cut, own in usual.items() if own})
        return self._norm_bounds[1].get(slice_)

    def _checked(
        self, offer: Offer, report: Report, confusion: tuple[int, ...], answer: CheckedUpdate | Failure
    ) -> None:
        now = time.monotonic()
        self._checking.pop(offer.lease, None)
        faults.point("coordinator.checked")
        if isinstance(answer, Failure):
            _raise_disk_error(answer)
            self._drop_blob(offer.sha256)
            self._refuse(offer, PayloadError(answer.code, answer.detail), now)
            return
        stored = events.Stored(
            lease=offer.lease,
            sha256=offer.sha256,
            length=offer.length,
            norm=answer.norm,
            report=report,
            confusion=confusion,
        )
        self._handle(stored, now)
        self._drop_blob(
            offer.sha256
        )  # unless it is an update that counts: an evaluation is in its row, a late one is over

    def release(self, sha256: str) -> None:
        """Remove a blob that somebody else kept, unless it is needed all the same."""
        self._drop_blob(sha256)

    def _drop_blob(self, sha256: str) -> None:
        """Two devices may send the same bytes: another one's update may be on its way, or being checked."""
        shared = any(offer.sha256 == sha256 for offer in self._checking.values()) or self._uploads.expects(sha256)
        if not shared and not self._store.blob_references.is_needed(sha256, RETAINED_MODELS):
            self._remove_blob(sha256)

    def _remove_blob(self, sha256: str) -> None:
        self._downloads.blob_removed(sha256)
        self._blobs.remove(sha256)

    # what the machine wants

    def _handle(self, event: events.Event, now: float) -> None:
        if self.machine is not None:
            self._carry_out(self.machine.handle(event, now))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        store = self._store
        for instruction in instructions:
            match instruction:
                case OpenRound(round_, leases):
                    faults.in_round(round_.number)
                    store.rounds.open(round_, leases)
                    last = "plans" if self.run is not None and self.run.dry else "last evaluation"
                    what = f"round {round_.number}" if round_.goal else last
                    whose = about(run=round_.run, round=round_.number)
                    log.info("run %s %s: asks %d devices", round_.run, what, len(leases), extra=whose)
                case AddLeases(leases):
                    store.leases.add(leases)
                case SendAssign():
                    self._offer(instruction)
                case CloseLease(lease_id, state, code, detail, lines):
                    store.leases.set_state(lease_id, state, code=code, detail=detail, log=lines)
                    self._note_end(lease_id, state, code, detail)
                case SendCancel(device, lease_id):
                    self._uploads.drop(device)
                    self._send(device, Cancel(lease=lease_id))
                case SaveUpdate(lease_id, update, judged):
                    self._save_update(lease_id, update, judged)
                    self._remember(lease_id)
                case SaveScore(version, score, best_version):
                    self._save_score(version, score, best_version)
                case Judge(version):
                    self._judge(version)
                case SendReceipt():
                    self._send(instruction.device, _receipt(instruction))
                case Freeze(round_, set_hash):
                    store.rounds.freeze(round_.run, round_.number, round_.attempt, set_hash)
                case Fold():
                    self._fold(instruction)
                case Commit(round_, model):
                    self._tell_left_out(round_.run)
                    store.rounds.commit(round_.number, round_.attempt, model, self._left_out)
                    self.model = model
                    self._parts = {}
                    self._observe_drops()
                    self._study(model)
                    whose = about(run=round_.run, round=round_.number)
                    made = model.sha256[:12]
                    log.info("run %s round %d: committed %s", round_.run, round_.number, made, extra=whose)
                case Announce(round_, version):
                    self._tell_everybody(round_.run, round_.number, round_.attempt, version)
                case Abandon(round_, reason):
                    store.rounds.abandon(round_.run, round_.number, round_.attempt, reason)
                    for update in store.updates.of_attempt(round_.run, round_.number, round_.attempt):
                        self._drop_blob(update.sha256)
                    self._observe_drops()
                    whose = about(run=round_.run, round=round_.number)
                    log.warning("run %s round %d: abandoned, %s", round_.run, round_.number, reason, extra=whose)
                case SaveDeadline(round_):
                    store.rounds.save_deadline(
                        round_.run,
                        round_.number,
                        round_.attempt,
                        remaining_s=round_.remaining_s,
                        extended=round_.extended,
                        elapsed_s=round_.elapsed_s,
                    )
                case Finish(state, reason):
                    self._finish(state, reason)

    def _save_update(self, lease_id: str, update: UpdateRow | None, judged: EvaluationRow | None) -> None:
        """With what travelled for it: whatever becomes of this process, those bytes are counted once."""
        lease = self.machine.leases.get(lease_id) if self.machine else None
        traffic = self._traffic.take(lease.device) if lease is not None else {}
        self._store.updates.save(update, judged, lease_id, traffic)

    def _save_score(self, version: int, score: float, best_version: int) -> None:
        """A best version that is beaten was perhaps kept for that alone."""
        before = self._store.runs.get(self._run_id())
        self._store.models.save_score(self._run_id(), version, score, best_version)
        beaten = before.best_version if before is not None else None
        model = self._store.models.get(self._run_id(), beaten) if beaten not in (None, best_version) else None
        for sha256 in (model.sha256, model.sent_sha256) if model is not None else ():
            self._drop_blob(sha256)

    def _run_id(self) -> str:
        assert self.run is not None
        return self.run.id

    def _remember(self, lease_id: str) -> None:
        """Keep what the device was in this run, once."""
        lease = self.machine.leases.get(lease_id) if self.machine else None
        present = self._roster.presence(lease.device) if lease else None
        if lease is None or present is None or lease.device in self._remembered:
            return
        self._remembered.add(lease.device)
        info = {"client": present.client, "profile": to_map(present.profile)}
        self._store.runs.save_device_info(
            lease.run, lease.device, {**info, "labels": self._roster.labels_of(lease.device)}
        )

    def _judge(self, version: int) -> None:
        """Use the server's own test data on a version."""
        run, model = self.run, self.model
        assert run is not None
        assert model is not None
        blob = str(self._blobs.path(model.sha256))
        job = EvaluateJob(run=self._file(), task=self._task_path(run), model=blob, data=self._test_file())

        def judged(answer: ServerEvaluation | Failure) -> None:
            if isinstance(answer, Failure):
                self._job_failed(run, answer)
                return
            rows = [
                EvaluationRow(
                    run=run.id,
                    version=version,
                    device=SERVER,
                    num_samples=result.num_samples,
                    num_correct=result.num_correct,
                    loss_sum=result.loss_sum,
                    slice=result.slice,
                    confusion=result.confusion,
                )
                for result in answer.results
            ]
            self._tell_untested(rows)
            for row in rows:
                self._store.evaluations.save(row)
            self._handle(events.Judged(rows), time.monotonic())

        self._aggregation.submit(job, judged)

    def _tell_untested(self, rows: Sequence[EvaluationRow]) -> None:
        """Log that the server's test data is none, once: what it says of every version is the same."""
        found = evaluation.untested(rows)
        if found is not None and not self._store.evaluations.versions(found.run):
            log.warning("%s: %s", found.code, found.detail, extra=about(run=found.run, round=found.round))

    def _observe_drops(self) -> None:
        if self.machine is not None:
            rate = self._store.leases.drop_rate(self.machine.run, _DROP_LEASES)
            self._handle(events.DropRateObserved(rate), time.monotonic())

    def _note_end(self, lease_id: str, state: str, code: str, detail: str) -> None:
        if state in ("declined", "refused", "expired"):
            lease = self._store.leases.get(lease_id)  # the machine may be past its round
            device = lease.device if lease else "?"
            whose = about(device=device, run=lease.run, round=lease.round) if lease else {}
            log.warning("%s: %s (%s%s)", device, state, code, f": {detail!r}" if detail else "", extra=whose)

    def _offer(self, instruction: SendAssign) -> None:
        """Send an assignment; if its slice of the model has yet to be cut, as soon as it is there."""
        lease, run, model = instruction.lease, self.run, self.model
        assert run is not None
        assert model is not None
        lacking = self._lacking(lease)
        if not lacking:
            self._send(lease.device, self._assign(lease, instruction.deadline_s))
            return
        assert self.machine is not None
        self._handle(events.AssignmentDelayed(lease.id), time.monotonic())
        name = lacking[0]
        is_begun = name in self._cutting
        self._cutting.setdefault(name, {})[lease.id] = instruction
        if is_begun:
            return
        out = self._blobs.temporary_path(f"part-{hashlib.sha256(name.encode()).hexdigest()[:16]}")
        if name == lease.slice:
            job: EncodeJob | TellJob = self._encoding(run, model.sha256, lease.slice, out)
        else:
            job = TellJob(
                run=self._file(),
                model=str(self._blobs.path(model.sha256)),
                slice=lease.slice,
                device=lease.device,
                public=name == PUBLIC_PART,
                round=lease.round,
                out=str(out),
            )
        self._aggregation.submit(job, lambda answer: self._was_cut(run, model, name, out, answer))

    def _study(self, model: ModelRow) -> None:
        """Let the aggregator make what takes long while devices train."""
        rules = self._rules
        if rules is not None and rules.studies and self.run is not None:
            path = str(self._blobs.path(model.sha256))
            self._aggregation.submit(StudyJob(run=self._file(), model=path, version=model.version), lambda answer: None)

    def _lacking(self, lease: LeaseRow) -> list[str]:
        """What a lease needs and is not there yet."""
        assert self.run is not None
        return [] if self.run.dry else [name for name in self._made_for(lease) if name not in self._parts]

    def _made_for(self, lease: LeaseRow) -> list[str]:
        """What is made of the newest version for a lease: a slice of its model, what its device is told."""
        rules = self._rules
        if rules is None:
            return [lease.slice] if self._is_cut else []
        told = _knowledge_key(lease) if rules.per_device else f"{TOLD_PART}{lease.slice}"
        return [lease.slice, told, *([PUBLIC_PART] if rules.public else [])]

    def _was_cut(self, run: RunRow, model: ModelRow, cut: str, out: Path, answer: WrittenFile | Failure) -> None:
        waiting = self._cutting.pop(cut, {})
        if self.model != model:
            return
        if isinstance(answer, Failure):
            self._job_failed(run, answer)
            return
        part = PartRow(run=run.id, version=model.version, slice=cut, sha256=answer.sha256, length=answer.length)
        self._blobs.adopt(out, part.sha256, point="part")
        for old in self._store.models.add_part(part):
            self._drop_blob(old.sha256)
        self._parts[cut] = part
        for instruction in waiting.values():
            if self.open_lease(instruction.lease.device, instruction.lease.id) is not None:
                self._offer(instruction)

    def _assign(self, lease: LeaseRow, deadline_s: float) -> Assign:
        assert self.machine is not None
        file = self.machine.file
        return Assign(
            lease=lease.id,
            epoch=self._epoch,  # not the lease's: devices may have seen newer leases than a restored coordinator knows
            issue=lease.issue,
            run=lease.run,
            round=lease.round,
            num_rounds=file.stop.rounds,
            version=lease.version,
            train=lease.train,
            evaluate=lease.evaluate,
            seed=seed_of(file.seed, lease.round, lease.device),
            learning_rate=learning_rate(file.train, lease.round, file.stop.rounds),
            threads=file.train.threads,
            slice=lease.slice,
            plan=lease.plan,
            counted=self._store.updates.last_counted_lease(lease.run, lease.device),
            deadline_s=deadline_s,
            parts=self._parts_of(lease),
        )

    def _parts_of(self, lease: LeaseRow) -> tuple[PartRef, ...]:
        assert self.run is not None
        settings = PartRef(key="run", sha256=self.run.settings_sha256, length=self.run.settings_length)
        if self.run.dry:
            return (settings,)
        told = [(name, self._parts[name]) for name in self._made_for(lease) if name != lease.slice]
        known = (PartRef(key=name, sha256=part.sha256, length=part.length) for name, part in told)
        return (settings, self._sent(lease), *known)

    def _sent(self, lease: LeaseRow) -> PartRef:
        """The model as the device of a lease gets it; of a dry run, for which nothing is cut, the whole."""
        assert self.run is not None
        assert self.model is not None
        key = "model" if lease.slice == "full" else f"slice:{lease.slice}"
        if self.run.dry or not self._is_cut:
            return PartRef(key=key, sha256=self.model.sent_sha256, length=self.model.sent_length)
        part = self._parts[lease.slice]
        return PartRef(key=key, sha256=part.sha256, length=part.length)

    def _fold(self, fold: Fold) -> None:
        run, model = self.run, self.model
        assert run is not None
        assert model is not None
        out = self._blobs.temporary_path(f"fold-{run.id}")
        weights = counted_samples(fold.updates, self._file().devices.max_weight_ratio)
        updates = [
            UpdateRef(
                device=update.device,
                path=str(self._blobs.path(update.sha256)),
                num_samples=weight,
                slice=self._slice_of(update.lease),
            )
            for update, weight in zip(fold.updates, weights, strict=True)
        ]
        job = FoldJob(
            run=self._file(),
            task=self._task_path(run),
            round=fold.round.number,
            model=str(self._blobs.path(model.sha256)),
            base=str(self._blobs.path(model.sent_sha256)),
            updates=tuple(updates),
            num_devices=max(fold.round.num_available, len(self._store.runs.device_info(run.id))),
            out=str(out),
        )

        def folded(answer: FoldedModel | Failure) -> None:
            number = fold.round.number
            self._left_out = []
            if isinstance(answer, FoldedModel):
                self._left_out = [
                    LeftOutRow(run=run.id, round=number, device=left.device, code=left.code, detail=left.detail)
                    for left in answer.left_out
                ]
                if answer.study is not None:
                    study = answer.study
                    took = (study.ended_s - study.began_s, study.began_s, study.waited_s)
                    what = (
                        "run %s round %d: a study beside it took %.3f s from %.3f on, its fold waited %.3f s for that"
                    )
                    log.info(what, run.id, number, *took, extra=about(run=run.id, round=number))
            self._made(run, model.version + 1, out, fold.set_hash, answer, committed)

        def committed(_run: RunRow, row: ModelRow) -> None:
            self._compare(fold, row, then=lambda: self._handle(events.Folded(row), time.monotonic()))

        self._aggregation.submit(job, folded)

    def _tell_left_out(self, run_id: str) -> None:
        """Log what is new; the same in every round is told once."""
        known = {(row.device, row.code): row.detail for row in self._store.rounds.left_out(run_id)}
        for row in self._left_out:
            if known.get((row.device, row.code)) != row.detail:
                whose = about(device=row.device or None, run=row.run, round=row.round)
                log.warning("%s: %s: %s", row.device or "all devices", row.code, row.detail, extra=whose)

    def _compare(self, fold: Fold, made: ModelRow, *, then: Callable[[], None]) -> None:
        """Have the models of a round compared, if that is due, while its updates are there; then go on, whatever came.

        A restart folds again, and compares again.
        """
        job = self._probing(fold, made)
        if job is None:
            then()
            return

        def probed(answer: Findings | Failure) -> None:
            run, number = fold.round.run, fold.round.number
            key = similarity_record.setting_of(run)
            kept = similarity_record.parse(self._store.settings.get(key))
            if isinstance(answer, Failure):
                what = "the devices' models could not be compared: %s: %s"
                log.warning(what, answer.code, answer.detail, extra=about(run=run, round=number))
                kept = similarity_record.failed(kept, number, answer.detail)
            else:
                kept = similarity_record.added(kept, answer)
            self._store.settings.set(key, similarity_record.text_of(kept))
            then()

        self._aggregation.submit(job, probed)

    def _probing(self, fold: Fold, made: ModelRow) -> ProbeJob | None:
        """The job that compares the models of a round; None if nobody wants it, or nothing is here to do it with."""
        run, model, file = self.run, self.model, self._file()
        assert run is not None
        assert model is not None
        never = similarity_record.why_never(file, simulated=self._simulated)
        if never or not self._test_file() or not similarity_record.is_due(file, fold.round.number):
            return None
        personal = not methods.has_global_model(file.method.name, file.method.parameters)
        updates = {update.device: update for update in fold.updates}
        every = [Compared(device=u.device, slice=self._slice_of(u.lease)) for u in fold.updates]
        probed = [
            ProbedUpdate(
                device=one.device,
                path=str(self._blobs.path(updates[one.device].sha256)),
                slice=one.slice,
                method_state=self._own_folder(one.device) if personal else None,
            )
            for one in similarity_record.architectures_first(every)
        ]
        return ProbeJob(
            run=file,
            task=self._task_path(run),
            round=fold.round.number,
            model=str(self._blobs.path(made.sha256)),
            base=str(self._blobs.path(model.sha256)),
            updates=tuple(probed),
            data=self._test_file(),
        )

    def _own_folder(self, device: str) -> str | None:
        """Where a virtual device keeps what its method keeps."""
        return str(self._own_models / device / "method-state" / self._run_id()) if self._own_models else None

    def _test_file(self) -> str:
        """The server's test data; of a simulation, also where the devices judge. Empty: it has none."""
        where = self._file().evaluate.on
        return where.removeprefix("npz:") if where.startswith("npz:") else self._test_data

    def _slice_of(self, lease_id: str) -> str:
        assert self.machine is not None
        return self.machine.leases[lease_id].slice

    def _tell_everybody(self, run_id: str, number: int, attempt: int, version: int) -> None:
        assert self.model is not None
        assert self.run is not None
        if not self.run.dry:
            self._announce({"run": run_id, "round": number, "version": version, "sha256": self.model.sha256})
        faults.point("coordinator.announced")
        for update in self._store.updates.of_attempt(run_id, number, attempt):
            self._remove_blob(update.sha256)
        old = self._store.models.get(run_id, version - RETAINED_MODELS)
        if old is not None:
            self._drop_blob(old.sha256)
            self._drop_blob(old.sent_sha256)
        self.save_traffic()
        self._store.rounds.announce(run_id, number, attempt)

    def save_traffic(self) -> None:
        """Write down what travelled since the last time."""
        if self.run is not None and self._traffic.moved:
            self._store.traffic.add(self.run.id, self._traffic.take_all())

    def _finish(self, state: str, reason: str) -> None:
        assert self.run is not None
        self.save_traffic()
        self._store.runs.set_state(self.run.id, state, reason)
        log.info("run %s: %s (%s)", self.run.id, state, reason, extra=about(run=self.run.id))
        self._close()

    def plan_of(self, device: str) -> TrainingPlan | None:
        """How a device trains in the open run, or trained in the last one since this process began."""
        plans = self.machine.plans if self.machine is not None else self._last_plans
        return plans.get(device)

    def _close(self) -> None:
        """A run is over: an answer to one of its jobs would find no run here, or the next one."""
        self._forget_jobs()
        if self.machine is not None:
            self._last_plans = self.machine.plans
        for part in self._store.models.parts(self.run.id) if self.run is not None else ():
            self._drop_blob(part.sha256)
        self.machine = self.run = self.model = None
        self._parts.clear()
        self._cutting.clear()
        self._preparing = ""
        self._stop_asked = None
        self._remembered.clear()


def _is_cut(file: RunFile) -> bool:
    """Whether devices may get different parts of the model, or the server keeps more than they get."""
    has_memory = methods.knowledge(file.method.name, file.method.parameters) is not None
    split = methods.slicing(file.method.name, file.method.parameters).split
    return has_memory or split or methods.rungs(file) != (WHOLE_MODEL,)


def _knowledge_key(lease: LeaseRow) -> str:
    return f"{TOLD_PART}{lease.slice}@{lease.device}"


def _raise_disk_error(failure: Failure) -> None:
    """What this machine did wrong is not the run's fault, nor the device's."""
    if failure.code in ("disk_full", "machine"):
        raise failure.error()


def _receipt(instruction: SendReceipt) -> Receipt:
    return Receipt(
        lease=instruction.lease,
        sha256=instruction.sha256,
        status=instruction.status,
        code=instruction.code,
        detail=instruction.detail,
    )
