"""What a part of the conductor needs, all of it real: a store in memory, blobs on disk, a child process for jobs."""

from __future__ import annotations

import hashlib
import json
import os
import select
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rows import model_row, run_file, run_row

from coordinator.aggregation.job_child import JobChild
from coordinator.conductor.active_run import ActiveRun, ActiveRunLoader
from coordinator.conductor.model_files import ModelFiles
from coordinator.conductor.model_parts import ModelParts
from coordinator.conductor.retention import Retention
from coordinator.conductor.run_jobs import RunJobs
from coordinator.fleet.downloads import Downloads
from coordinator.fleet.roster import Roster
from coordinator.fleet.uploads import FinishedUpload, Uploads
from coordinator.rounds.events import Event
from coordinator.store.rows import LeaseRow, RoundRow
from coordinator.store.sqlite import SqliteStore
from edge_client.transport.blobs import BlobStore
from edge_client.wire.messages import Message

__all__ = ["EPOCH", "Bench"]

EPOCH = 9


class Bench:
    """The surroundings of one part; what it sends, the events it raises and the runs it ends are collected."""

    def __init__(self, folder: Path, answers: Mapping[str, Any] | None = None) -> None:
        """`answers` of the aggregator, by the name of a job; see `answering_child`."""
        self.folder = folder
        self.sent: list[tuple[str, Message]] = []
        self.events: list[Event] = []
        self.failed: list[tuple[str, str]] = []
        self.arrived: list[FinishedUpload] = []
        self.store = SqliteStore()
        self.blobs = BlobStore(folder / "blobs", folder / "tmp")
        self.uploads = Uploads(self.blobs, arrived=self.arrived.append)
        self.downloads = Downloads(self.blobs)
        self.roster = Roster("f1", [], epoch=EPOCH, heartbeat_s=1.0)
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "ANSWERS": json.dumps(answers or {}), "JOBS": str(folder / "jobs")}
        self.aggregation = JobChild("answering_child", name="the aggregator", environment=environment)
        self.jobs = RunJobs(self.aggregation, fail=lambda run_id, reason: self.failed.append((run_id, reason)))
        self.retention = Retention(store=self.store, blobs=self.blobs, uploads=self.uploads, downloads=self.downloads)
        self.models = ModelFiles(store=self.store, blobs=self.blobs, jobs=self.jobs)
        self.parts = ModelParts(
            store=self.store, blobs=self.blobs, jobs=self.jobs, models=self.models, retention=self.retention
        )

    def close(self) -> None:
        """End the child process and the threads."""
        self.aggregation.close()
        self.uploads.close()
        self.store.close()

    def put(self, data: str | bytes) -> str:
        """Make a blob; returns its hash."""
        data = data.encode() if isinstance(data, str) else data
        sha256 = hashlib.sha256(data).hexdigest()
        self.blobs.write(data, sha256, point="test")
        return sha256

    def damage(self, sha256: str) -> None:
        """Give a blob other bytes than its name says."""
        self.blobs.remove(sha256)
        self.blobs.path(sha256).write_text("damaged")

    def send(self, device: str, message: Message) -> None:
        """Collect a message."""
        self.sent.append((device, message))

    def handle(self, event: Event, now: float) -> None:
        """Collect an event."""
        self.events.append(event)

    def add_run(self, *, model: str | bytes = "model", dry: bool = False, **tables: Any) -> None:
        """Write the run r-1 with version 0, which is sent as it is."""
        sha256, settings = self.put(model), self.put("{}")
        self.store.runs.add(run_row("r-1", run_file(**tables), dry=dry))
        length = len(model)
        first = model_row(0, sha256=sha256, length=length, sent_sha256=sha256, sent_length=length)
        self.store.runs.start(first, settings, 2)

    def active_run(self, round_: RoundRow | None = None, *leases: LeaseRow) -> ActiveRun:
        """The run r-1, in this round with these leases."""
        if round_ is not None:
            self.store.rounds.open(round_, leases)
        row = self.store.runs.get("r-1")
        assert row is not None
        loader = ActiveRunLoader(store=self.store, blobs=self.blobs, roster=self.roster, epoch=EPOCH, simulated=False)
        return loader.load(row, 0.0)

    def answer_jobs(self) -> None:
        """Wait until the aggregator has answered every job."""
        until = time.monotonic() + 20
        while not self.aggregation.idle:
            assert time.monotonic() < until
            assert self.aggregation.fd is not None
            select.select([self.aggregation.fd], [], [], 1)
            self.aggregation.read(0.0)

    def asked_jobs(self) -> list[dict[str, Any]]:
        """The jobs that reached the aggregator."""
        path = self.folder / "jobs"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
