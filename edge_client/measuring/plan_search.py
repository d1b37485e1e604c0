"""Plans for one model on one device: the planner, asked with the model's rows, its workload and the method's rules.

Does not cover: where the rows come from (`row_sources`), the search itself (`planning.planner`).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edge_client.config.run_file import RunFile
from edge_client.planning import planner
from edge_client.planning.cost import Workload
from edge_client.planning.rows import ModelRows
from edge_client.records import PlanRules, TrainingPlan

if TYPE_CHECKING:
    from edge_client.models.contract import Model

__all__ = ["PlanSearch"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class PlanSearch:
    """What stays the same in all plans of an assignment, whatever the budget."""

    run: RunFile
    rules: PlanRules
    slice_name: str = "full"  # the slice that is trained
    rows: ModelRows
    half: ModelRows | None = None  # the same in bf16, where that may be used
    num_samples: int = 0
    disk_bytes: int = 0
    sample_bytes: int = 0  # that the method adds to a pass, per sample

    @classmethod
    def of(
        cls,
        run: RunFile,
        rules: PlanRules,
        model: Model,
        *,
        slice_name: str,
        rows: ModelRows | None,
        half: ModelRows | None,
        num_samples: int,
        disk_bytes: int,
        sample_bytes: int = 0,
    ) -> PlanSearch:
        """The search for a model in memory, with rows from its shapes if there are no better ones."""
        if rows is None:
            # torch, which plans from measured rows do without
            from edge_client.models.layout import allows_channels_last
            from edge_client.planning.shapes import rows_from_shapes

            _log.warning("this model was not measured: planned from shapes, which needs more room than the truth")
            rows = rows_from_shapes(model, channels_last=allows_channels_last(model))
        return cls(
            run=run,
            rules=rules,
            slice_name=slice_name,
            rows=rows,
            half=half,
            num_samples=num_samples,
            disk_bytes=disk_bytes,
            sample_bytes=sample_bytes,
        )

    def choose(
        self, base_bytes: int, training_bytes: int, ceiling_bytes: int | None = None, *, of_training: bool = False
    ) -> planner.Choice:
        """The plan for a worker that has `base_bytes` and may grow by `training_bytes`; raises `NothingFitsError`.

        `of_training`: the budget is one of training alone, and errors speak of that.
        """
        request = self._request(base_bytes, training_bytes, ceiling_bytes)
        return planner.choose(replace(request, of_training=of_training))

    def shrink(
        self, plan: TrainingPlan, base_bytes: int, training_bytes: int, ceiling_bytes: int | None = None
    ) -> TrainingPlan | None:
        """The same plan in smaller pieces, if that is enough."""
        return planner.shrink(self._request(base_bytes, training_bytes, ceiling_bytes), plan)

    def _request(self, base_bytes: int, training_bytes: int, ceiling_bytes: int | None) -> planner.Request:
        return planner.Request(
            variants={self.slice_name: self.rows},
            halves={} if self.half is None else {self.slice_name: self.half},
            workload=self.workload(),
            rules=self.rules,
            base_bytes=base_bytes,
            training_bytes=training_bytes,
            ceiling_bytes=ceiling_bytes,
            num_samples=self.num_samples,
            disk_bytes=self.disk_bytes,
        )

    def workload(self) -> Workload:
        """What decides the memory beside the model."""
        return Workload.of(self.run.train, self.rules, num_samples=self.num_samples, sample_bytes=self.sample_bytes)

    def plan(
        self, base_bytes: int, training_bytes: int, ceiling_bytes: int | None = None, *, of_training: bool = False
    ) -> TrainingPlan:
        """The chosen plan, without its alternatives."""
        return self.choose(base_bytes, training_bytes, ceiling_bytes, of_training=of_training).plan
