"""The contract of the store: one protocol per group of rows, and `Store`, which holds one of each.

Each method that writes takes effect as a whole or not at all. It is durable when it returns, or inside of a turn
(`Store.turn`) when the turn ends: a turn of the coordinator's loop is one durable transaction, and what it tells others
waits for that (`Store.after_commit`). Methods that read see all that was written before, also inside of a turn.

The callers keep the order that makes a crash harmless: blob before row, row before receipt, commit before announcement.
Rows are records of `rows`; the tests in `tests/contracts` run over every implementation. `turn.GroupCommit` has the
turn's rules for any engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from coordinator.store.rows import (
    DeploymentRow,
    DeviceRow,
    EvaluationRow,
    LeaseRow,
    LeftOutRow,
    ModelRow,
    PageActionRow,
    PageSessionRow,
    PageTokenRow,
    PartRow,
    RoundRow,
    RunRow,
    UpdateRow,
)

__all__ = [
    "BlobReferences",
    "Deployments",
    "Devices",
    "Evaluations",
    "Leases",
    "Models",
    "PageAccess",
    "Rounds",
    "Runs",
    "Settings",
    "Store",
    "Traffic",
    "Updates",
]


class Settings(Protocol):
    """What the coordinator remembers about itself."""

    def next_epoch(self, wall_s: int) -> int:
        """Take the next epoch, max(last + 1, wall clock): higher than all before, even in a restored older copy."""

    def federation(self, fresh: str) -> str:
        """Return the federation's id, which is `fresh` from the very first call on."""

    def get(self, key: str) -> str:
        """Return a setting; empty if it was never set."""

    def set(self, key: str, value: str) -> None:
        """Keep a small text over restarts."""


class Devices(Protocol):
    """The enrolled devices."""

    def all(self) -> list[DeviceRow]:
        """Return every device, sorted by name."""

    def get(self, name: str) -> DeviceRow | None:
        """Return one device."""

    def add(self, *devices: DeviceRow, replace: bool = False) -> None:
        """Enrol devices, all or none; `ConflictError` if a name is taken and not to be replaced."""

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Replace a device's labels; `NoSuchNameError` if there is no such device."""

    def remove(self, name: str) -> None:
        """Forget a device, its secrets and its deployments; `NoSuchNameError` if there is no such device."""


class Runs(Protocol):
    """The runs, and the devices that took part in each. To change a run that does not exist is no error."""

    def add(self, run: RunRow) -> None:
        """Add a run to the end of the queue."""

    def remove(self, run_id: str) -> None:
        """Forget a run and everything that belongs to it; only dry runs end so."""

    def next_number(self, name: str) -> int:
        """Return the number that makes the id NAME-number new."""

    def all(self) -> list[RunRow]:
        """Return every run, oldest first."""

    def counts(self) -> dict[str, int]:
        """Return how many runs are in each state; dry ones do not count."""

    def get(self, run_id: str) -> RunRow | None:
        """Return one run."""

    def oldest(self, state: str) -> RunRow | None:
        """Return the oldest run in a state."""

    def start(self, model: ModelRow, settings_sha256: str, settings_length: int) -> None:
        """Save version 0 and the blob of the run's settings, and set the run running, together."""

    def set_state(self, run_id: str, state: str, reason: str = "") -> None:
        """Change how a run stands."""

    def fail(self, run_id: str, reason: str) -> None:
        """End a run as failed, and with it its open round and leases, together: nobody needs their blobs any more."""

    def save_device_info(self, run_id: str, device: str, info: Mapping[str, Any]) -> None:
        """Save what a device was when it first took part in a run; later calls for the same device change nothing."""

    def device_info(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Return what `save_device_info` saved, by device."""


class Models(Protocol):
    """The versions of each run's model, and the parts in which the newest one travels."""

    def last(self, run_id: str) -> ModelRow | None:
        """Return the newest version."""

    def get(self, run_id: str, version: int) -> ModelRow | None:
        """Return one version."""

    def all(self, run_id: str) -> list[ModelRow]:
        """Return every version, oldest first."""

    def scored_after(self, run_id: str, version: int, limit: int) -> list[ModelRow]:
        """Return the first versions after this one that have a score, oldest first."""

    def save_score(self, run_id: str, version: int, score: float, best_version: int) -> None:
        """Save the run's metric for a version, and which version is the best one now."""

    def scores(self, run_id: str) -> dict[int, float]:
        """Return the score of each version that has one, oldest first."""

    def add_part(self, part: PartRow) -> list[PartRow]:
        """Add a part of the newest version; returns the parts of older versions, which are forgotten."""

    def parts(self, run_id: str) -> list[PartRow]:
        """Return the parts of the newest version that were made so far, sorted by slice."""


class Rounds(Protocol):
    """The attempts of rounds. To change an attempt that does not exist is no error."""

    def open(self, round_: RoundRow, leases: Sequence[LeaseRow]) -> None:
        """Add an attempt and its leases, together."""

    def last(self, run_id: str) -> RoundRow | None:
        """Return the newest attempt of the newest round."""

    def all(self, run_id: str) -> list[RoundRow]:
        """Return every attempt of every round, oldest first."""

    def save_deadline(
        self, run_id: str, number: int, attempt: int, *, remaining_s: float, extended: bool, elapsed_s: float
    ) -> None:
        """Save how long the attempt still has and how long the run was active, in case the coordinator dies now."""

    def freeze(self, run_id: str, number: int, attempt: int, set_hash: str) -> None:
        """Make the set of updates final; an update that comes later is late."""

    def commit(self, number: int, attempt: int, model: ModelRow, left_out: Sequence[LeftOutRow] = ()) -> None:
        """Save the new version, the end of its attempt and the knowledge that it was made without, together."""

    def announce(self, run_id: str, number: int, attempt: int, moments: Mapping[str, float] = {}) -> None:
        """Note that the devices know the new version, the times of the round, and the run's bytes by then."""

    def abandon(self, run_id: str, number: int, attempt: int, reason: str) -> None:
        """End an attempt without a model; its updates stay on record and count nowhere."""

    def left_out(self, run_id: str) -> list[LeftOutRow]:
        """Return the knowledge that a run could not use, sorted by device and code."""


class Leases(Protocol):
    """The leases of rounds. To change a lease that does not exist is no error."""

    def add(self, leases: Sequence[LeaseRow]) -> None:
        """Add substitutes to a running round."""

    def next_issue(self) -> int:
        """Return the number of the next lease."""

    def get(self, lease_id: str) -> LeaseRow | None:
        """Return one lease."""

    def of_attempt(self, run_id: str, number: int, attempt: int) -> list[LeaseRow]:
        """Return the leases of an attempt, in the order of issue."""

    def set_state(
        self, lease_id: str, state: str, *, code: str = "", detail: str = "", log: Sequence[str] = ()
    ) -> None:
        """Change how a lease stands, with the reason and the last lines of the device's log."""

    def device_failures(self, device: str, limit: int) -> list[LeaseRow]:
        """Return a device's newest leases that failed (declined, refused or expired), newest first."""

    def run_failures(self, run_id: str, limit: int) -> list[LeaseRow]:
        """Return a run's newest leases that failed (declined, refused or expired), newest first."""

    def drop_rate(self, run_id: str, leases: int) -> float:
        """Return the share of a run's newest finished leases that brought no update; 0 if none has finished."""

    def trained_slices(self, run_id: str) -> dict[str, str]:
        """Return the slice that each device trained last in a run."""


class Updates(Protocol):
    """The updates of devices. A second update of a device in one attempt is a bug of ours: `sqlite3.IntegrityError`."""

    def save(
        self,
        update: UpdateRow | None,
        evaluation: EvaluationRow | None,
        lease_id: str,
        traffic: Mapping[str, tuple[int, int]] = {},
        *,
        moments: Mapping[str, float] = {},
        phases: Mapping[str, float] = {},
        body: bytes | None = None,
    ) -> None:
        """Save an update, its evaluation, the end and the times of its lease, and what travelled (`Traffic`).

        `body` has the bytes of a small update, which `body` returns until the round is announced or abandoned.
        """

    def body(self, lease_id: str) -> bytes | None:
        """Return the bytes of the update that a lease brought, if they were saved with it and its round is open."""

    def drop(self, update: UpdateRow) -> None:
        """Forget an update whose blob is lost, and offer its lease again; a frozen round runs again."""

    def of_attempt(self, run_id: str, number: int, attempt: int) -> list[UpdateRow]:
        """Return the updates of an attempt, sorted by device."""

    def of_lease(self, lease_id: str) -> UpdateRow | None:
        """Return the update that a lease brought."""

    def recent(self, run_id: str, limit: int) -> list[UpdateRow]:
        """Return a run's newest updates, oldest first."""

    def counts(self, run_id: str) -> dict[int, int]:
        """Return how many updates the model of each round was made of; rounds without a model are left out."""

    def last_counted_lease(self, run_id: str, device: str) -> str | None:
        """Return a device's newest lease whose update went into a committed model."""

    def newest(self, run_id: str) -> dict[str, UpdateRow]:
        """Return the newest update of each device in a run, if it is of one of the last 50 rounds."""

    def recent_norms(self, run_id: str, rounds: int) -> dict[str, list[float]]:
        """Return the norms of the updates of the newest committed rounds, by slice: the usual size of a change."""


class Evaluations(Protocol):
    """The evaluations of versions, one for each device (or the server) and slice."""

    def save(self, evaluation: EvaluationRow) -> None:
        """Save an evaluation that came without an update, as the server's does. A repeated one replaces the first."""

    def all(self, run_id: str, version: int | None = None) -> list[EvaluationRow]:
        """Return the evaluations of a run, or of one version, sorted by version, device and slice."""

    def versions(self, run_id: str) -> list[int]:
        """Return the versions that have an evaluation, oldest first."""


class Traffic(Protocol):
    """The bytes that were published, as totals for each run and device."""

    def add(self, run_id: str, moved: Mapping[str, tuple[int, int]]) -> None:
        """Add to the totals of a run: device -> (bytes up, bytes down)."""

    def by_device(self, run_id: str) -> dict[str, tuple[int, int]]:
        """Return the totals of a run: device -> (bytes up, bytes down)."""


class Deployments(Protocol):
    """The deployments of exported models, one row for each device."""

    def next_issue(self) -> int:
        """Return the number of the next deployment."""

    def add(self, rows: Sequence[DeploymentRow]) -> list[DeploymentRow]:
        """Add a deployment to these devices; returns what was pending on them, which is superseded now.

        What is active on them stays so until something else is.
        """

    def all(self, run_id: str | None = None) -> list[DeploymentRow]:
        """Return the deployments of a run, or of all runs, sorted by issue and device."""

    def wanted(self) -> list[DeploymentRow]:
        """Return those that are pending or active: at most one of each per device, and the pending one is newer."""

    def set_state(
        self, deployment: str, device: str, state: str, *, code: str = "", detail: str = ""
    ) -> list[DeploymentRow]:
        """Save what became of a deployment on a device; returns what was active there, if it is superseded now."""


class PageAccess(Protocol):
    """Who may use the page: tokens, the browsers that signed in, and what was done there. Secrets are hashes."""

    def tokens(self) -> list[PageTokenRow]:
        """Return all tokens, sorted by name."""

    def add_token(self, token: PageTokenRow) -> None:
        """Add a token; `ConflictError` if the name is taken."""

    def remove_token(self, name: str) -> bool:
        """Remove a token, and with it all sessions that it began; False if there is none of this name."""

    def token_used(self, sha256: str, at_s: int) -> None:
        """Note when a token was used."""

    def token(self, sha256: str) -> PageTokenRow | None:
        """Return the token with this hash."""

    def add_session(self, session: PageSessionRow, now_s: int) -> None:
        """Add a session, and forget those that have expired."""

    def session(self, sha256: str, now_s: int) -> PageSessionRow | None:
        """Return the session with this hash, unless it has expired."""

    def end_session(self, sha256: str) -> None:
        """Forget a session."""

    def add_action(self, action: PageActionRow) -> None:
        """Note what somebody did; the newest thousand are kept."""

    def actions(self, limit: int) -> list[PageActionRow]:
        """Return what was done, newest first."""


class BlobReferences(Protocol):
    """Which blobs the rows still refer to."""

    def needed(self, keep_models: int) -> set[str]:
        """Return the blobs that must stay.

        These are the settings and tasks of runs, their newest `keep_models` versions and their best one, the updates
        of open rounds, the parts of running runs, and what is deployed or is to be.
        """

    def is_needed(self, sha256: str, keep_models: int) -> bool:
        """Whether one blob must stay."""


class Store(Protocol):
    """Everything that the coordinator must not forget.

    A broken constraint is a bug of ours: `sqlite3.IntegrityError`.
    """

    @property
    def settings(self) -> Settings: ...
    @property
    def devices(self) -> Devices: ...
    @property
    def runs(self) -> Runs: ...
    @property
    def models(self) -> Models: ...
    @property
    def rounds(self) -> Rounds: ...
    @property
    def leases(self) -> Leases: ...
    @property
    def updates(self) -> Updates: ...
    @property
    def evaluations(self) -> Evaluations: ...
    @property
    def traffic(self) -> Traffic: ...
    @property
    def deployments(self) -> Deployments: ...
    @property
    def page_access(self) -> PageAccess: ...
    @property
    def blob_references(self) -> BlobReferences: ...

    def turn(self) -> AbstractContextManager[None]:
        """Make one durable transaction of all that is written inside; at its end, do what waits for it, in order.

        The transaction begins at the first write. An error inside, or at the commit, rolls back all of it, drops what
        waits, and is raised: the caller's memory is ahead of the store then, so it starts over from the store. Turns
        are not nested.
        """

    def after_commit(self, action: Callable[[], None]) -> None:
        """Do this as soon as all that was written so far is durable: at once outside of a turn, else at its end."""

    def backup(self, path: Path) -> None:
        """Copy everything that is committed into a new file, consistently, while the store is in use.

        Not inside of a turn.
        """

    def close(self) -> None: ...
