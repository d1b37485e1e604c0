"""The way of an update from its offer to its row: offered, uploaded, its header checked, its values checked, stored.

Every step may end it with a receipt. The bytes become a blob before a row names them; what is refused is deleted.
Covers: what an update must look like (with `intake`), the bounds of its values.
Does not cover: fetching the bytes (`fleet.uploads`), looking at the values (`aggregation.check`, in the aggregator),
whether the update counts (`rounds`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.aggregation.jobs import CheckedUpdate, CheckJob, Failure
from coordinator.conductor import intake
from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.model_parts import ModelParts
from coordinator.conductor.retention import Retention
from coordinator.conductor.run_jobs import RunJobs, raise_machine_error
from coordinator.fleet.uploads import FinishedUpload, Uploads
from coordinator.rounds import events
from coordinator.rounds.events import Event
from coordinator.store.base import Store
from coordinator.store.rows import LeaseRow
from edge_client import durable, faults
from edge_client.data.input_sums import SUMS_ROUND
from edge_client.errors import PayloadError
from edge_client.logs import about
from edge_client.methods import registry as methods
from edge_client.records import Report
from edge_client.transport.blobs import BlobStore
from edge_client.wire.container import Header, read_header
from edge_client.wire.messages import Message, Offer, Receipt

__all__ = ["Arrivals"]

log = logging.getLogger(__name__)

_NORM_ROUNDS = 5
_HEADROOM = 1.05  # an update may be this much longer than what was sent, for its report
_HEADROOM_BYTES = 65_536
_MAX_SENT_HEADERS = 32  # slices of a model, and what is left of the versions before


class Arrivals:
    """The updates of the active run; without one, an offer gets the answer that the store has for it."""

    def __init__(
        self,
        *,
        store: Store,
        blobs: BlobStore,
        uploads: Uploads,
        jobs: RunJobs,
        parts: ModelParts,
        retention: Retention,
        send: Callable[[str, Message], None],
        handle: Callable[[Event, float], None],
    ) -> None:
        """`handle` passes an event to the machine of the active run."""
        self._store = store
        self._blobs = blobs
        self._uploads = uploads
        self._jobs = jobs
        self._parts = parts
        self._retention = retention
        self._send = send
        self._handle = handle
        self._sent_headers: dict[str, Header] = {}  # of the newest version's parts, by hash
        self._norm_bounds: tuple[tuple[str, int], dict[str, float]] | None = None  # (run, version), bound of a slice

    def offered(self, run: ActiveRun | None, device: str, offer: Offer, now: float) -> None:
        """A device has an update: fetch it, or answer what became of it."""
        faults.point("coordinator.offer")
        if self._retention.is_held(offer.lease) or self._uploads.is_open(device, offer):
            return
        lease = run.open_lease(device, offer.lease) if run is not None else None
        if run is None or lease is None:
            self._send(device, self._past_receipt(device, offer))
            return
        if self._parts.missing(run, lease):
            return  # a part that the update is checked against was lost and is made again: the device offers again
        run.clock.note_lease(lease.id, "offer")
        self._handle(events.Accepted(lease.id), now)
        problem = self._problem_of_offer(run, lease, offer)
        if problem is not None:
            self._refuse(offer, problem, now)
        else:
            self._uploads.expect(device, offer)

    def _problem_of_offer(self, run: ActiveRun, lease: LeaseRow, offer: Offer) -> PayloadError | None:
        knowledge_bytes = methods.knowledge_limits(run.file).max_bytes
        matrix_bytes = 8 * len(run.file.classes) ** 2
        sent_bytes = self._parts.model_ref(run, lease).length
        limit = int(_HEADROOM * sent_bytes) + _HEADROOM_BYTES + matrix_bytes + knowledge_bytes
        max_samples = run.file.devices.max_samples
        if (offer.run, offer.round) != (lease.run, lease.round):
            detail = f"offer for {offer.run} round {offer.round}, the lease is of {lease.run} round {lease.round}"
            return PayloadError("malformed", detail)
        if not 0 < offer.length <= limit:
            return PayloadError("too_large", f"update of {offer.length} bytes, at most {limit} are expected")
        if not 0 <= offer.num_samples <= max_samples:
            return PayloadError("sample_count", f"{offer.num_samples} samples, expected 1 to {max_samples}")
        return None

    def _past_receipt(self, device: str, offer: Offer) -> Receipt:
        """The answer to an offer whose lease is not open: the same as the first time."""

        def receipt(status: str, code: str = "ok", detail: str = "") -> Receipt:
            return Receipt(lease=offer.lease, sha256=offer.sha256, status=status, code=code, detail=detail)

        lease = self._store.leases.get(offer.lease)
        if lease is None or lease.device != device:
            return receipt("late", "unknown_lease", "nobody waits for it")
        if lease.state == "stored":
            update = self._store.updates.of_lease(lease.id)
            if update is not None and update.sha256 != offer.sha256:
                return receipt("refused", "equivocation", "another update was stored")
            return receipt("accepted")
        if lease.state == "refused":
            return receipt("refused", lease.code, lease.detail)
        return receipt("late", "late", lease.detail or "the round is over")

    def _refuse(self, offer: Offer, error: PayloadError, now: float) -> None:
        lease = self._store.leases.get(offer.lease)
        whose = about(device=lease.device, run=lease.run, round=lease.round) if lease is not None else {}
        log.warning("refused the update of lease %s: %s", offer.lease, error, extra=whose)
        detail = error.detail[:1000]
        self._handle(events.Refused(lease=offer.lease, sha256=offer.sha256, code=error.code, detail=detail), now)

    def arrived(self, run: ActiveRun | None, arrived: FinishedUpload, now: float) -> None:
        """An upload has ended: check it against its assignment, then let the aggregator look at its values."""
        offer = arrived.offer
        lease = run.open_lease(arrived.device, offer.lease) if run is not None else None
        if run is None or lease is None:
            self._retention.drop(offer.sha256)
            self._send(arrived.device, self._past_receipt(arrived.device, offer))
            return
        run.clock.note_lease(lease.id, "arrive")
        try:
            if arrived.path is None:
                raise arrived.error or PayloadError("hash", "the update never had its hash")
            with durable.disk_errors(f"cannot read the update of {arrived.device!r}"):
                report = intake.check_header(arrived.path, self._expected(run, lease, offer))
                confusion = intake.read_confusion(arrived.path, report)
        except PayloadError as error:
            self._retention.drop(offer.sha256)
            self._refuse(offer, error, now)
            return
        self._retention.hold(offer.lease, offer.sha256)
        run.clock.note_phases(lease.id, report.phases)
        job = self._check_job(run, lease, arrived.path)
        self._jobs.submit(job, lambda answer: self._checked(run, offer, report, confusion, answer))

    def _expected(self, run: ActiveRun, lease: LeaseRow, offer: Offer) -> intake.Expected:
        file = run.file
        return intake.Expected(
            device=lease.device,
            round=lease.round,
            base=self._sent_header(self._parts.model_ref(run, lease).sha256),
            codec=file.rounds.codec,
            train=lease.train,
            evaluate=lease.evaluate,
            sums=lease.round == SUMS_ROUND,
            num_samples=offer.num_samples,
            max_samples=file.devices.max_samples,
            num_classes=len(file.classes),
            epochs=file.train.most_epochs,
            rules=methods.plan_rules(file.method.name, file.method.parameters),
            knowledge=methods.knowledge_limits(file) if run.knowledge is not None else None,
            slice=lease.slice,
        )

    def _sent_header(self, sha256: str) -> Header:
        """The table of what was sent, read once: every update of a round is compared with it."""
        header = self._sent_headers.get(sha256)
        if header is None:
            if len(self._sent_headers) >= _MAX_SENT_HEADERS:  # of older versions
                self._sent_headers.clear()
            header = self._sent_headers[sha256] = read_header(self._blobs.path(sha256))
        return header

    def _check_job(self, run: ActiveRun, lease: LeaseRow, update: Path) -> CheckJob:
        file = run.file
        return CheckJob(
            base=str(self._blobs.path(self._parts.model_ref(run, lease).sha256)),
            update=str(update),
            max_norm=self._max_norm(run, lease.slice),
            max_ratio=file.rounds.max_norm_ratio,
            max_passes=file.train.batch,
            round=lease.round,
            knowledge=methods.knowledge_limits(file),
            codec=file.rounds.codec,
        )

    def _max_norm(self, run: ActiveRun, slice_name: str) -> float | None:
        """How far an update may move a slice; None where nothing is usual yet: the aggregator takes the model's norm.

        Bounds come from committed rounds only, so that a repeated round has the same ones; one for each slice, because
        a wide model moves much farther than a narrow one beside it.
        """
        version = (run.id, run.machine.version)
        if self._norm_bounds is None or self._norm_bounds[0] != version:
            recent = self._store.updates.recent_norms(run.id, _NORM_ROUNDS)
            usual = {name: [norm for norm in norms if norm > 0] for name, norms in recent.items()}
            ratio = run.file.rounds.max_norm_ratio
            bounds = {name: statistics.median(norms) * ratio for name, norms in usual.items() if norms}
            self._norm_bounds = (version, bounds)
        return self._norm_bounds[1].get(slice_name)

    def _checked(
        self, run: ActiveRun, offer: Offer, report: Report, confusion: tuple[int, ...], answer: CheckedUpdate | Failure
    ) -> None:
        now = time.monotonic()
        run.clock.note_lease(offer.lease, "check")
        self._retention.release(offer.lease)
        faults.point("coordinator.checked")
        if isinstance(answer, Failure):
            raise_machine_error(answer)
            self._retention.drop(offer.sha256)
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
        # an update that counts has a row now and stays; an evaluation is a row itself, and nobody needs a late one
        self._retention.drop(offer.sha256)
