"""Fetches a deployed model after the parts of a lease, and has it tested while no worker runs.

Most devices never get one: what serves it (`deploying`) is loaded for the first deployment only.
Covers: when it is fetched. Does not cover: what becomes of it (`deploying`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client import durable
from edge_client.client.lease_files import LeaseFiles
from edge_client.client.transfers import ClientTransfers
from edge_client.client.worker_control import WorkerControl
from edge_client.records import PartRef
from edge_client.wire.messages import Deploy, Deployed

if TYPE_CHECKING:
    from edge_client.client.deploying import Deploying

__all__ = ["ModelDelivery"]


class ModelDelivery:
    """The deployments of one device, as its daemon sees them."""

    def __init__(
        self,
        *,
        state_dir: Path,
        is_allowed: bool,
        usual_bytes: int,
        files: LeaseFiles,
        transfers: ClientTransfers,
        worker: WorkerControl,
        send: Callable[[Deployed], None],
    ) -> None:
        """`is_allowed` by the owner; `usual_bytes` is the budget when other programs leave it; `send` may lose it."""
        self._state_dir = state_dir
        self._is_allowed = is_allowed
        self._usual_bytes = usual_bytes
        self._files = files
        self._transfers = transfers
        self._worker = worker
        self._send = send
        self._fetched_sha256 = ""  # the model that is being fetched
        self._deploying: Deploying | None = None

    def resume(self) -> None:
        """Continue the deployments of earlier processes."""
        if durable.is_there(self._state_dir / "deployed"):
            self._deploying = self._load()

    def _load(self) -> Deploying:
        from edge_client.client.deploying import Deploying

        return Deploying(
            state_dir=self._state_dir,
            blobs=self._files.blobs,
            is_allowed=self._is_allowed,
            send=self._send,
            budget_bytes=self._worker.budget_outside_runs,
            usual_bytes=lambda: self._usual_bytes,
            free_bytes=self._files.free_bytes,
            started=self._worker.limit,
        )

    @property
    def parts(self) -> list[PartRef]:
        """The blob of the wanted model, which must not be removed."""
        wanted = self._deploying.wanted if self._deploying is not None else None
        return [wanted] if wanted is not None else []

    @property
    def fds(self) -> list[int]:
        """The file descriptor to watch: it becomes readable when the running test ends."""
        return self._deploying.fds if self._deploying is not None else []

    @property
    def is_testing(self) -> bool:
        """Whether no worker may start now."""
        return self._deploying is not None and self._deploying.is_testing

    def begin_session(self) -> None:
        """Report the state of the deployment again: reports of the session before may be lost."""
        if self._deploying is not None:
            self._deploying.greeted()

    def deploy(self, deploy: Deploy) -> None:
        """The coordinator deploys a model."""
        self._deploying = self._deploying or self._load()
        self._deploying.asked(deploy)

    def cancel(self, deployment: str) -> None:
        """The coordinator cancelled a deployment; ids of leases, which share the message, are ignored."""
        if self._deploying is not None:
            self._deploying.cancelled(deployment)

    def read(self, ready: Sequence[int], now: float) -> None:
        """Take the result of the test, if its descriptor is `ready`."""
        if self._deploying is not None and any(fd in ready for fd in self._deploying.fds):
            self._deploying.test_ended(now)

    def continue_deployment(self, now: float, *, may_test: bool) -> None:
        """Do the next step of a deployment, if there is one: fetch the model, or test it."""
        deploying = self._deploying
        if deploying is None:
            return
        deploying.tick(now, may_test=may_test)
        part = deploying.fetched
        self._abandon_other(part.sha256 if part is not None else "")
        if part is None or self._transfers.is_fetching(part.sha256) or self._files.blobs.verified(part.sha256):
            return
        self._fetched_sha256 = part.sha256
        self._transfers.fetch(part, point="deployed.part", disk_full=deploying.disk_is_full)

    def _abandon_other(self, sha256: str) -> None:
        """Stop fetching a model that was replaced by another one, or that has to wait."""
        if self._fetched_sha256 not in ("", sha256):
            self._transfers.abandon(self._fetched_sha256)
            self._fetched_sha256 = ""

    def close(self) -> None:
        """End the test that runs."""
        if self._deploying is not None:
            self._deploying.close()
