"""Which devices a run asks: those that are connected and have not given a lasting reason against it.

Covers: who is available, the cohort of a round, substitutes. Does not cover: labels and tasks (`eligibility`),
the arithmetic of cohorts (`selection`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from coordinator.rounds import selection
from edge_client.config.run_file import DevicesSection

__all__ = ["Candidates", "Cohort", "is_lasting"]

# reasons that stay until the device's owner changes something
_LASTING = frozenset(
    {
        "nothing_fits",
        "no_data",
        "bad_data",
        "unknown_class",
        "bad_model",
        "unknown_model",
        "bad_method",
        "unknown_method",
        "bad_task",
        "task_missing",
        "task_differs",
    }
)


def is_lasting(code: str) -> bool:
    """Whether a device that declined for this reason would decline again."""
    return code in _LASTING


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """The devices that train in a round; it wants `goal` updates and counts with `quorum`."""

    goal: int
    quorum: int
    devices: Sequence[str] = ()


class Candidates:
    """The devices of one run."""

    def __init__(self, *, drop_rate: float, asks_spares: bool) -> None:
        """`asks_spares`: whether more devices are asked than are wanted, because some of them will fail."""
        self.online: frozenset[str] = frozenset()
        self.drop_rate = drop_rate
        self._asks_spares = asks_spares
        self._excluded: dict[str, str] = {}
        self._private: set[str] = set()  # devices that train but do not share their results

    @property
    def excluded(self) -> Mapping[str, str]:
        """Device -> why it is not asked any more."""
        return self._excluded

    def available(self) -> list[str]:
        """The devices that can be asked now, sorted."""
        return sorted(self.online - self._excluded.keys())

    def shares_results(self, device: str) -> bool:
        """Whether a device may be asked to evaluate."""
        return device not in self._private

    def declined(self, device: str, code: str) -> None:
        """A device declined: remember the reason if it is a lasting one."""
        if is_lasting(code):
            self._excluded[device] = code
        elif code == "not_shared":
            self._private.add(device)

    def returned(self, device: str) -> None:
        """A device has restarted: ask it for everything again."""
        self._excluded.pop(device, None)
        self._private.discard(device)

    def removed(self, device: str) -> None:
        """A device is no longer enrolled."""
        self.online -= {device}

    def cohort(self, section: DevicesSection, *, seed: int) -> Cohort:
        """Choose the devices of a round among those that are available."""
        available = self.available()
        goal, quorum = selection.goal_and_quorum(len(available), fraction=section.fraction, minimum=section.min)
        num = goal
        if self._asks_spares:
            num = selection.num_to_ask(goal, quorum, drop_rate=self.drop_rate, available=len(available))
        return Cohort(goal=goal, quorum=quorum, devices=selection.choose(available, num, seed=seed))

    def unasked(self, asked: Collection[str]) -> list[str]:
        """The available devices that are not in `asked`, sorted."""
        return sorted(self.online.difference(asked, self._excluded))
