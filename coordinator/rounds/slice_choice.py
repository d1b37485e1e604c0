"""Which slice of a run's model each device trains: the largest that trains whole batches in its memory.

Where not even the smallest does, the device tries that in smaller pieces. A device on which a slice does not fit after
all (its data are in memory, too) gets the next smaller one. The label `slice=SLICE` decides for a device by hand.

Covers: the choice, from the rows that the run's calibration brought; free of torch.
Does not cover: microbatches and all else that a plan has, which the device decides
(`edge_client/measuring/fitting.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from edge_client.config.run_file import RunFile
from edge_client.errors import FedfitError
from edge_client.methods import registry as methods
from edge_client.methods.slices import Turn, architecture
from edge_client.planning.base_memory import BASE_STEP_BYTES
from edge_client.planning.cost import Workload
from edge_client.planning.planner import whole_batch_bytes
from edge_client.planning.rows import ModelRows

__all__ = ["LABEL", "SliceChoice"]

log = logging.getLogger(__name__)

LABEL = "slice"


class SliceChoice:
    """The slices of one run."""

    def __init__(
        self,
        file: RunFile,
        rows: Mapping[str, ModelRows],
        *,
        budget_of: Callable[[str], int | None],
        labels_of: Callable[[str], Mapping[str, str]],
        of_training: bool,
    ) -> None:
        """`budget_of` tells a device's memory, for all of its worker, or `of_training` alone (simulations)."""
        self.rungs = methods.rungs(file)
        self._file = file
        self._turn = methods.slicing(file.method.name, file.method.parameters).turn
        self._budget_of = budget_of
        self._labels_of = labels_of
        rules = methods.plan_rules(file.method.name, file.method.parameters)
        workload = Workload.of(file.train, rules)
        self._needed = {
            rung: whole_batch_bytes(found, workload) + (0 if of_training else found.base_bytes + BASE_STEP_BYTES)
            for rung, found in rows.items()
        }
        self._too_large: dict[str, int] = {}  # device -> rungs from the largest on that did not fit after all

    def of(self, device: str, *, round_: int, seed: int) -> str:
        """The slice of a device in a round."""
        turn = Turn(rungs=self.rungs, round=round_, device=device, seed=seed)
        return self._turn(self.rung(device), turn)

    def rung(self, device: str) -> str:
        """How much of the model a device trains."""
        if len(self.rungs) == 1:
            return self.rungs[0]
        asked = self._by_hand(device)
        if asked in self.rungs:
            return asked
        if asked is not None:
            log.warning("%s: its label slice=%s is none of the run's: %s", device, asked, ", ".join(self.rungs))
        left = self.rungs[min(self._too_large.get(device, 0), len(self.rungs) - 1) :]
        budget = self._budget_of(device)
        fitting = (rung for rung in left if budget is None or self._needed.get(rung, 0) <= budget)
        return next(fitting, left[-1])

    def give_less(self, device: str, cut: str) -> bool:
        """A slice did not fit on a device: whether there is a smaller one for it."""
        rung = architecture(cut)
        if rung not in self.rungs or self._by_hand(device) in self.rungs:
            return False
        self._too_large[device] = max(self._too_large.get(device, 0), self.rungs.index(rung) + 1)
        return self._too_large[device] < len(self.rungs)

    def _by_hand(self, device: str) -> str | None:
        """The slice of a device's label, as the run writes it."""
        asked = self._labels_of(device).get(LABEL)
        try:
            return asked if asked is None else str(methods.named(self._file, asked))
        except FedfitError:
            return asked
