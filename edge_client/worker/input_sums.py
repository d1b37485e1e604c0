"""What a worker does in the round before the first: it adds up its training inputs and writes a report. Imports torch.

Covers: making the sums, and whether the device's owner lets them leave. Does not cover: what follows from them
(`edge_client.data.input_sums`).
"""

from __future__ import annotations

import logging
import platform
import time
from pathlib import Path

import torch

from edge_client import durable
from edge_client.config.device_file import ShareSection
from edge_client.data.input_sums import FEWEST_SAMPLES
from edge_client.device import meter
from edge_client.records import InputSums, Report
from edge_client.training.contract import Data
from edge_client.training.loop import pieces_of
from edge_client.worker.allowance import LIMIT_SLACK_BYTES, Allowance
from edge_client.worker.declined import declines
from edge_client.worker.device_data import open_device_data
from edge_client.worker.model_building import must_fit
from edge_client.worker.order_files import Assignment
from edge_client.worker.process_cache import ProcessCache
from edge_client.worker.progress import Progress
from edge_client.worker.run_setup import set_up
from edge_client.worker.update import write_manifest, write_update

__all__ = ["add_up", "report_sums", "why_withheld"]

_log = logging.getLogger(__name__)

_BATCH = 64  # samples in memory at a time


def report_sums(
    assignment: Assignment, workdir: Path, allowance: Allowance, cache: ProcessCache, progress: Progress, began: float
) -> None:
    """Leave a report with the sums in `workdir`, or one without them if the owner keeps them; nothing is trained."""
    order = assignment.order
    progress.report("load", 0, 1)
    setup = set_up(assignment, cache)
    allowance.limit(LIMIT_SLACK_BYTES)
    with declines("bad_data"), must_fit("its data", order.budget_bytes):
        data = open_device_data(assignment, setup.recipe, cache)
        progress.report("load", 1, 1)
        withheld = why_withheld(assignment.device.share, len(data.train))
        with setup.recipe.user_code("reading samples"):
            sums = add_up(data.train) if not withheld else None
    if withheld:
        _log.warning("the sums of this device's inputs stay here: %s", withheld)
    report = Report(
        num_samples=0,
        num_held=len(data.train),
        num_test=len(data.test),
        peak_bytes=allowance.peak_bytes(),
        base_bytes=meter.rss_bytes(),
        seconds=round(time.monotonic() - began, 3),
        versions={"python": platform.python_version(), "torch": str(torch.__version__)[:64]},
        phases=progress.durations(),
        input_sums=sums,
    )
    with durable.disk_errors(f"writing the update in {workdir}"):
        manifest = write_update(
            workdir, report, [], codec=assignment.run.rounds.codec, confusion=None, withheld=(), model_file=None
        )
        write_manifest(workdir, manifest)


def why_withheld(share: ShareSection, num_samples: int) -> str:
    """Why sums of so many samples do not leave the device; empty if they may."""
    least = max(FEWEST_SAMPLES, share.min_count)
    if not share.input_statistics:
        return "share.input-statistics = false in device.toml"
    if share.noise > 0:
        return "share.noise asks for noise on what leaves, and these sums would have none"
    if num_samples < least:
        return f"they would be those of {num_samples} samples, at least {least} are needed (share.min-count)"
    return ""


def add_up(data: Data) -> InputSums | None:
    """The sums of all samples in float64; None for inputs that are not finite, which training will report."""
    sums = squares = torch.zeros(0, dtype=torch.float64)
    count = 0
    for piece in pieces_of(torch.arange(len(data)), _BATCH):
        x, _ = data.batch(piece)
        values = x.double().transpose(0, 1).reshape(x.shape[1], -1)
        if not count:
            sums = squares = torch.zeros(len(values), dtype=torch.float64)
        count += values.shape[1]
        sums = sums + values.sum(dim=1)
        squares = squares + values.square().sum(dim=1)
    if not bool(torch.isfinite(squares).all()):
        _log.warning("the inputs of this device are not finite; its sums stay out of the run's normalisation")
        return None
    return InputSums(count=count, sums=tuple(sums.tolist()), squares=tuple(squares.tolist()))
