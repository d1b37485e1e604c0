"""Which accelerator a worker takes, and the planner that it gets there.

Where several workers share a host (`limits.workers`), each holds a place by a lock: place i has accelerator i modulo
their number, and its share of the memory. Covers: choosing and making. Does not cover: the order (`loading`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os

import torch

from edge_client import durable
from edge_client.device.accelerator import CPU, Accelerator, Choice, choose, count
from edge_client.errors import InputError
from edge_client.measuring import allocation_recording
from edge_client.measuring.plan_search import PlanSearch
from edge_client.models.contract import Model
from edge_client.planning.allocation_sequence import AllocationSequence
from edge_client.records import TrainingPlan
from edge_client.worker.accelerator_memory import AcceleratorMemory
from edge_client.worker.accelerator_plan import AcceleratorPlanner, without_hidden
from edge_client.worker.declined import DeclinedError, declines
from edge_client.worker.order_files import Assignment
from edge_client.worker.plan import lowest_ceiling
from edge_client.worker.process_cache import ProcessCache
from edge_client.worker.run_setup import RunSetup

__all__ = ["accelerator_memory", "accelerator_planner", "choose_free"]

_FLOAT_BYTES = 4
_held: dict[str, int] = {}  # places of this process: descriptors of their locks


def choose_free(wish: str, *, workers: int) -> Choice:
    """The accelerator that the owner wants, with a context; of several the next free one, where workers share them.

    `auto` falls back to the CPU, with the reason. Raises `InputError`.
    """
    choice = choose(wish)
    if choice.accelerator is CPU:
        return choice
    accelerator = choice.accelerator
    if workers > 1 and ":" not in wish:
        number = _place(accelerator.kind, workers) % count(accelerator.kind)
        accelerator = choose(f"{accelerator.kind}:{number}").accelerator
    try:
        accelerator.take()
    except InputError as error:
        if wish != "auto":
            raise
        return Choice(accelerator=CPU, reason=str(error))
    return Choice(accelerator=accelerator)


def _place(kind: str, workers: int) -> int:
    """The first place that no other worker holds; the last one is shared if all are taken."""
    folder = durable.cache_dir()
    durable.make_dir(folder)
    for number in range(workers):
        name = str(folder / f"{kind}-place-{number}.lock")
        if name in _held:
            return number
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
        _held[name] = fd  # until the process ends
        return number
    return workers - 1


def accelerator_memory(assignment: Assignment, device: Accelerator) -> AcceleratorMemory | None:
    """The memory of a warm worker's device; None for the CPU."""
    if device is CPU:
        return None
    limits = assignment.device.limits
    if device.memory == "unified" and limits.accelerator_memory is not None:
        raise DeclinedError(
            "no_accelerator",
            f"limits.accelerator-memory: {device.kind} shares the host's memory; remove it, and set limits.memory to "
            "what both may use together",
        )
    on_device = -(-limits.workers // count(device.kind))
    memory = AcceleratorMemory(device, assignment.workdir, limit_bytes=limits.accelerator_memory, workers=on_device)
    with declines("nothing_fits"):
        memory.warm()
    return memory


def accelerator_planner(
    assignment: Assignment,
    setup: RunSetup,
    model: Model,
    *,
    search: PlanSearch,
    memory: AcceleratorMemory,
    host_bytes: int,
    key: str,
    cache: ProcessCache,
) -> AcceleratorPlanner:
    """The planner for a warm model on an accelerator; it records allocations when it needs them."""
    order, run = assignment.order, assignment.run
    task = assignment.device.tasks.get(run.task.name) if run.task is not None else None
    model_key = hashlib.sha256(json.dumps([key, str(torch.__version__), setup.architecture]).encode()).hexdigest()

    def sequences(plan: TrainingPlan) -> AllocationSequence | None:
        job = allocation_recording.job_for(run, model_key, model.input_shape, plan, task=task)
        found: AllocationSequence | None = cache.once(
            "allocations", job.key, lambda: allocation_recording.find(job, durable.cache_dir())
        )
        return found

    search.rows = without_hidden(search.rows)
    search.half = without_hidden(search.half) if search.half is not None else None
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    sample_bytes = _FLOAT_BYTES * int(torch.Size(model.input_shape).numel())
    return AcceleratorPlanner(
        search=search,
        memory=memory,
        fingerprint=memory.device.fingerprint()[:200],
        host_bytes=host_bytes,
        batch_bytes=run.train.batch * sample_bytes,
        largest_bytes=max(sizes, default=0),
        weight_bytes=sum(sizes),
        ceiling_bytes=lowest_ceiling(assignment, key),
        ceilings=[one for one in order.accelerator_ceilings if one.key == key],
        training_budget_bytes=order.training_budget_bytes,
        sequences=sequences,
    )
