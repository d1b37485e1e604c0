"""What the workers of a run have in common, done once in their template: code is loaded and kernels are made.

The run's settings are read, its method is looked up, its model is built and makes a step on zeros; the model is then
dropped, so that the template holds neither weights nor gradients. A worker does all of it again, and finds the code and
the kernels there: the bits of its update are the same, because nothing of what it computes comes from here.
Not of tasks: their code may do anything, and a thread of theirs would end the template's use. One thread, on the CPU.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from edge_client.config.run_file import RunFile
from edge_client.device import guard, meter
from edge_client.errors import FedfitError, is_out_of_memory
from edge_client.methods import registry as methods
from edge_client.models.layout import allows_channels_last, to_channels_last
from edge_client.models.slicing import parse
from edge_client.records import from_map
from edge_client.task.run_model import recipe
from edge_client.training.loop import Settings
from edge_client.training.warmup import warm_up
from edge_client.worker.order_files import read_json

__all__ = ["prepare"]

_log = logging.getLogger(__name__)


def prepare(run: Path, slice_name: str, budget_bytes: int) -> None:
    """Do it, within the memory that a worker may use; what goes wrong is for a worker to report."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    guard.limit_growth(max(0, budget_bytes - meter.rss_bytes()))
    try:
        _make_a_step(from_map(RunFile, read_json(run), where="run"), slice_name)
    except FedfitError as error:
        _log.info("nothing is prepared: %s", error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        _log.info("nothing is prepared: %s", error)
    finally:
        guard.lift_limit()


def _make_a_step(run: RunFile, slice_name: str) -> None:
    method = methods.of_run(run)
    if run.model is None:
        return
    spec = parse(method.slices.network(slice_name))
    model = recipe(run, None).build(run.model.input, spec)
    channels_last = allows_channels_last(model)
    if channels_last:
        to_channels_last(model)
    train = run.train
    settings = Settings(
        batch=train.batch,
        microbatch=train.batch,
        learning_rate=0.0,
        seed=0,
        optimizer=train.optimizer,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        channels_last=channels_last,
    )
    warm_up(model, settings)
