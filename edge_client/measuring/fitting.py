"""How a worker finds its plan: cost rows from somewhere, what the warm process takes, and the planner.

Rows, in this order: measured here before (the cache), sent with the run if they are of this kind of machine, measured
now, sent with the run by another kind of machine (with a margin), and at last from shapes alone.
Covers: choosing the rows, asking the planner. Does not cover: measuring (`calibration`), the search (`planning`).
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.errors import FedfitError, PayloadError
from edge_client.measuring.calibration import CalibrationJob
from edge_client.models.contract import Model
from edge_client.models.layout import allows_channels_last
from edge_client.planning import planner
from edge_client.planning.cost import Workload
from edge_client.planning.rows import ROWS_KEY, ModelRows, load_rows
from edge_client.planning.shapes import rows_from_shapes
from edge_client.records import PlanRules, TrainingPlan, from_map

__all__ = ["CalibrationNeededError", "Fitting", "find_rows", "sent_rows"]

_log = logging.getLogger(__name__)

_FOREIGN_MARGIN = 1.15  # kernels of another processor or build of torch may need other buffers
_CALIBRATION_BYTES = 160 * 10**6  # that a calibration needs beyond torch itself: the profiler, small batches


class CalibrationNeededError(FedfitError):
    """The worker must make room for a calibration first; `job` says of what."""

    def __init__(self, job: CalibrationJob) -> None:
        super().__init__("this model has not been measured here yet")
        self.job = job


def sent_rows(settings: Mapping[str, Any], rung: str) -> ModelRows | None:
    """The rows of a slice that came with the run, if any that make sense."""
    given = settings.get(ROWS_KEY)
    if not isinstance(given, Mapping) or rung not in given:
        return None
    try:
        return from_map(ModelRows, given[rung], where="rows of the run")
    except PayloadError as error:
        _log.warning("the run's cost rows are not usable, ignored: %s", error.detail[:200])
        return None


def find_rows(job: CalibrationJob, sent: ModelRows | None, *, may_measure: bool, room_bytes: int) -> ModelRows | None:
    """The best rows there are without building the model; None: only shapes are left.

    Raises `CalibrationNeededError` where measuring is allowed and has room.
    """
    known = load_rows(durable.cache_dir() / f"{job.key}.json", key=job.key)
    if known is not None:
        return known
    if sent is not None and sent.key == job.key:
        return sent
    if may_measure and room_bytes >= _CALIBRATION_BYTES:
        raise CalibrationNeededError(replace(job, limit_bytes=room_bytes))
    if sent is not None:
        _log.warning(
            "cost rows are those of %s with torch %s, this is %s with torch %s: planned with a margin of %d %%",
            *(sent.machine, sent.torch, platform.machine(), torch.__version__),
            round(100 * (_FOREIGN_MARGIN - 1)),
        )
        return replace(sent, margin=_FOREIGN_MARGIN)
    return None


@dataclass(slots=True, kw_only=True)
class Fitting:
    """What the plans of one assignment are made from."""

    run: RunFile
    rules: PlanRules
    rung: str = "full"  # the slice that is trained
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
        rung: str,
        rows: ModelRows | None,
        half: ModelRows | None,
        num_samples: int,
        disk_bytes: int,
        sample_bytes: int = 0,
    ) -> Fitting:
        """With rows from shapes if there are no better ones."""
        if rows is None:
            _log.warning("this model was not measured: planned from shapes, which needs more room than the truth")
            rows = rows_from_shapes(model, channels_last=allows_channels_last(model))
        return cls(
            run=run,
            rules=rules,
            rung=rung,
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

        `of_training`: that is what a person typed, and hears of.
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
            variants={self.rung: self.rows},
            halves={} if self.half is None else {self.rung: self.half},
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
        more = {"num_samples": self.num_samples, "sample_bytes": self.sample_bytes}
        return Workload.of(self.run.train, self.rules, **more)

    def plan(
        self, base_bytes: int, training_bytes: int, ceiling_bytes: int | None = None, *, of_training: bool = False
    ) -> TrainingPlan:
        """Only the plan."""
        return self.choose(base_bytes, training_bytes, ceiling_bytes, of_training=of_training).plan
