"""The aggregator's job `calibrate`: what the units of a run's model cost on this machine."""

from __future__ import annotations

import logging

from coordinator.aggregation.jobs import CalibrateJob, Calibration
from coordinator.aggregation.task_source import recipe_of, task_place
from edge_client import durable
from edge_client.errors import InputError, MachineError
from edge_client.measuring.calibration import calibrated, job_for
from edge_client.methods import registry

__all__ = ["calibrate"]

_log = logging.getLogger(__name__)


def calibrate(job: CalibrateJob) -> Calibration:
    """Measure every slice; without rows if only devices know the shape of a sample, or this machine cannot measure."""
    shape = recipe_of(job.run, job.task).input_shape
    if shape is None:
        return Calibration(rows={})
    rules = registry.plan_rules(job.run.method.name, job.run.method.parameters)
    task = f"{job.task}:{task_place(job.run)[1]}" if job.task is not None else None
    try:
        rows = {
            architecture: calibrated(
                job_for(job.run, rules, shape, task=task, slice_name=architecture), durable.cache_dir()
            )
            for architecture in registry.architectures(job.run)
        }
    except (InputError, MachineError) as error:
        _log.warning("devices will measure the model themselves: %s", error)
        return Calibration(rows={})
    return Calibration(rows=rows)
