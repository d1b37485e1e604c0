"""New leases: which slice a device trains in a round, with which plan, under which number.

Covers: the rows. Does not cover: who gets one (`candidates`), what becomes of it (`attempt`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from coordinator.rounds.events import Snapshot
from coordinator.rounds.selection import seed_of
from coordinator.store.rows import LeaseRow, RoundRow
from edge_client.records import TrainingPlan

__all__ = ["LeaseIssuer", "Slices"]


class Slices(Protocol):
    """Who trains how much of the model."""

    def of(self, device: str, *, round_: int, seed: int) -> str:
        """The slice of a device in a round."""

    def give_less(self, device: str, slice_name: str) -> bool:
        """A slice did not fit on a device: whether there is a smaller one for it."""


class LeaseIssuer:
    """Issues the leases of one run."""

    def __init__(
        self, snapshot: Snapshot, *, slices: Slices, new_id: Callable[[], str], new_issue: Callable[[], int]
    ) -> None:
        self._run = snapshot.run
        self._seed = snapshot.file.seed
        self._epoch = snapshot.epoch
        self._plans = dict(snapshot.plans)
        self._slices = slices
        self._new_id = new_id
        self._new_issue = new_issue

    @property
    def plans(self) -> Mapping[str, TrainingPlan]:
        """How each device trained last in this run."""
        return self._plans

    def remember_plan(self, device: str, plan: TrainingPlan) -> None:
        """A device trained with this plan: its next lease suggests it again."""
        self._plans[device] = plan

    def has_smaller_slice(self, lease: LeaseRow) -> bool:
        """The slice of a lease did not fit: whether its device can be asked for a smaller one."""
        return self._slices.give_less(lease.device, lease.slice)

    def issue_all(
        self,
        round_: RoundRow,
        trainers: Iterable[str],
        others: Iterable[str],
        *,
        version: int,
        evaluators: AbstractSet[str],
    ) -> tuple[LeaseRow, ...]:
        """The leases of a new round; a trainer may be an evaluator, too."""
        training = dict.fromkeys(trainers, True) | dict.fromkeys(others, False)
        return tuple(
            self.issue(round_, device, version=version, train=train, evaluate=device in evaluators)
            for device, train in training.items()
        )

    def issue(self, round_: RoundRow, device: str, *, version: int, train: bool, evaluate: bool) -> LeaseRow:
        """A new lease of a device in a round; issue numbers grow with every lease."""
        return LeaseRow(
            id=self._new_id(),
            issue=self._new_issue(),
            epoch=self._epoch,
            run=self._run,
            round=round_.number,
            attempt=round_.attempt,
            device=device,
            train=train,
            evaluate=evaluate,
            version=version,
            slice=self._slices.of(
                device, round_=max(1, round_.number), seed=seed_of(self._seed, round_.number, f"slice/{device}")
            ),
            plan=self._plans.get(device),
        )
