"""Which cost rows a plan is made from.

In this order: measured here before (the cache), sent with the run if they are of this kind of machine, measured now,
sent with the run by another kind of machine (with a margin). Where there are none, shapes alone give a looser bound.
Does not cover: measuring (`calibration`), the plan (`plan_search`).
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Mapping
from dataclasses import replace

import torch

from edge_client import durable
from edge_client.errors import FedfitError, PayloadError
from edge_client.measuring.calibration import CalibrationJob
from edge_client.planning.rows import ROWS_KEY, ModelRows, load_rows
from edge_client.records import from_map

__all__ = ["CalibrationNeededError", "find_rows", "sent_rows"]

_log = logging.getLogger(__name__)

_FOREIGN_MARGIN = 1.15  # kernels of another processor or build of torch may need other buffers
_CALIBRATION_BYTES = 160 * 10**6  # that a calibration needs beyond torch itself: the profiler, small batches


class CalibrationNeededError(FedfitError):
    """The worker must make room for a calibration first; `job` says of what."""

    def __init__(self, job: CalibrationJob) -> None:
        super().__init__("this model has not been measured here yet")
        self.job = job


def sent_rows(settings: Mapping[str, object], architecture: str) -> ModelRows | None:
    """The rows of an architecture that came with the run, if any that make sense."""
    tables = settings.get(ROWS_KEY)
    if not isinstance(tables, Mapping) or architecture not in tables:
        return None
    try:
        return from_map(ModelRows, tables[architecture], where="rows of the run")
    except PayloadError as error:
        _log.warning("the run's cost rows are not usable, ignored: %s", error.detail[:200])
        return None


def find_rows(job: CalibrationJob, sent: ModelRows | None, *, may_measure: bool, room_bytes: int) -> ModelRows | None:
    """The best rows there are without building the model; None: only shapes are left.

    Raises `CalibrationNeededError` where measuring is allowed and has room.
    """
    cached = load_rows(durable.cache_dir() / f"{job.key}.json", key=job.key)
    if cached is not None and cached.private_base_bytes:  # older versions did not measure it
        return cached
    if sent is not None and sent.key == job.key:
        return sent
    if may_measure and room_bytes >= _CALIBRATION_BYTES:
        raise CalibrationNeededError(replace(job, limit_bytes=room_bytes))
    if cached is not None:
        return cached
    if sent is not None:
        _log.warning(
            "cost rows are those of %s with torch %s, this is %s with torch %s: planned with a margin of %d %%",
            *(sent.machine, sent.torch, platform.machine(), torch.__version__),
            round(100 * (_FOREIGN_MARGIN - 1)),
        )
        return replace(sent, margin=_FOREIGN_MARGIN)
    return None
