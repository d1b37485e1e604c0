"""Which slice of a run's model each device trains: the largest that trains whole batches in its memory.

Where not even the smallest does, the device trains that one in smaller batches. A device on which a slice does not fit
after all (its data are in memory, too) gets the next smaller one. The label `slice=SLICE` sets the slice of a device.

Covers: the choice, from the costs that were measured before the run began. No torch.
Does not cover: microbatches and the rest of a plan, which the device decides
(`edge_client/measuring/plan_search.py`).
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
        counts_private: Callable[[str], bool] = lambda device: False,
    ) -> None:
        """`budget_of` returns the memory of a device: for its whole worker, or for training alone if `of_training`.

        `counts_private` tells whether that is private memory; older clients count RSS.
        """
        self.architectures = methods.architectures(file)
        self._file = file
        self._turn = methods.slicing(file.method.name, file.method.parameters).turn
        self._budget_of = budget_of
        self._labels_of = labels_of
        rules = methods.plan_rules(file.method.name, file.method.parameters)
        workload = Workload.of(file.train, rules)
        self._counts_private = counts_private
        self._training = {name: whole_batch_bytes(costs, workload) for name, costs in rows.items()}
        self._base: Mapping[str, ModelRows] = {} if of_training else rows
        self._too_large: dict[str, int] = {}  # device -> how many architectures, from the largest on, did not fit

    def of(self, device: str, *, round_: int, seed: int) -> str:
        """The slice of a device in a round."""
        turn = Turn(rungs=self.architectures, round=round_, device=device, seed=seed)
        return self._turn(self.architecture(device), turn)

    def architecture(self, device: str) -> str:
        """The architecture that a device trains: the largest that fits, or the smallest."""
        if len(self.architectures) == 1:
            return self.architectures[0]
        label = self._label_of(device)
        if label in self.architectures:
            return label
        if label is not None:
            log.warning("%s: its label slice=%s is none of the run's: %s", device, label, ", ".join(self.architectures))
        candidates = self.architectures[min(self._too_large.get(device, 0), len(self.architectures) - 1) :]
        budget = self._budget_of(device)
        is_private = self._counts_private(device)
        fitting = (name for name in candidates if budget is None or self._needed(name, is_private) <= budget)
        return next(fitting, candidates[-1])

    def _needed(self, name: str, is_private: bool) -> int:
        """What a worker takes that trains this architecture; 0 if nobody measured it."""
        rows = self._base.get(name)
        base = 0
        if rows is not None:
            base = rows.worker_bytes if is_private else rows.base_bytes
            base += BASE_STEP_BYTES
        return self._training.get(name, 0) + base

    def give_less(self, device: str, slice_name: str) -> bool:
        """A slice did not fit on a device: whether there is a smaller one for it."""
        name = architecture(slice_name)
        if name not in self.architectures or self._label_of(device) in self.architectures:
            return False
        self._too_large[device] = max(self._too_large.get(device, 0), self.architectures.index(name) + 1)
        return self._too_large[device] < len(self.architectures)

    def _label_of(self, device: str) -> str | None:
        """The slice of a device's label, as the run writes it; a label that names no slice as it is."""
        label = self._labels_of(device).get(LABEL)
        try:
            return label if label is None else str(methods.named(self._file, label))
        except FedfitError:
            return label
