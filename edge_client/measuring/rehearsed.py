"""What a plan took when it was tried before its first use, and how that is remembered: records, key, file. No torch.

A plan meets few numbers of samples at a time, its shapes: whole batches, the last batch of an epoch, the pieces of the
evaluation. What one device measured for a plan and its shapes holds as long as nothing that the key names changes.
Covers: which shapes to rehearse, the prediction that follows, the files in the cache. Does not cover: the rehearsal
(`rehearsal`), which plan is tried next (`worker.plan`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edge_client import __version__
from edge_client.errors import PayloadError
from edge_client.records import Between, Count, Hash, Positive, TrainingPlan, from_map, to_map

__all__ = ["Rehearsed", "Shapes", "find", "keep", "key_of", "pieces_met", "shapes_of"]

_log = logging.getLogger(__name__)

_FORMAT = 1
_MAX_FILE_BYTES = 2**16
_MB = 10**6
# bounds over 65 pairs of models and plans: later epochs take up to 2 % more than the third step
_MARGIN = 1.03
_LONG_MARGIN = 1.08  # caches of a hundred convolutions still grow after the second epoch
_SLACK_BYTES = _MB
_LONG_EPOCHS = 2
_MANY_CONVOLUTIONS = 100
_RESERVED_MARGIN = 1.05
_PLAN_FIELDS = ("slice", "groups", "skipped", "microbatch", "recompute", "channels_last", "dtype", "buffered")
_CACHE_SETTINGS = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")

Seconds = Annotated[float, Between(0, 1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """How many samples go through the model at a time."""

    batch: Positive  # of a step; shortened to as few pieces as show everything
    last: Count = 0  # of the last step of an epoch; 0: all steps are alike
    evaluated: tuple[Positive, ...] = ()  # pieces of the evaluation before the training

    @property
    def num_samples(self) -> int:
        """Of an epoch that has each kind of step once."""
        return self.batch + self.last


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a plan took on this device, above the warm process."""

    format: Annotated[int, Between(_FORMAT, _FORMAT)] = _FORMAT
    key: Hash
    peak_bytes: Count  # of private memory; where it ended at its limit, at least this
    reserved_bytes: Count = 0  # growth of virtual memory, which the kernel's limit counts
    over: bool = False  # it ended at its limit
    accelerator_bytes: Count = 0  # that torch reserved on an accelerator, the model's weights included
    num_convolutions: Count = 0
    sample_s: Seconds = 0.0  # per sample and epoch, in all phases together
    step_s: Seconds = 0.0  # per batch and epoch, on top of that
    epoch_s: Seconds = 0.0  # of a whole epoch, measured in a round; 0: there was none yet

    def predicted_bytes(self, epochs: int) -> int:
        """What training for so many epochs adds at most."""
        is_long = epochs > _LONG_EPOCHS and self.num_convolutions > _MANY_CONVOLUTIONS
        return int(self.peak_bytes * (_LONG_MARGIN if is_long else _MARGIN)) + _SLACK_BYTES

    @property
    def limit_bytes(self) -> int:
        """What the kernel must let the process reserve."""
        return int(self.reserved_bytes * _RESERVED_MARGIN) + _SLACK_BYTES

    def epoch_seconds(self, num_samples: int, batch: int) -> float:
        """Of an epoch on so many samples: as it was in a round, else as the steps of the rehearsal tell."""
        return self.epoch_s or num_samples * self.sample_s + math.ceil(num_samples / batch) * self.step_s


def pieces_met(num_samples: int, size: int) -> tuple[int, ...]:
    """The sizes of consecutive pieces of `size`: whole ones and the rest."""
    sizes = (min(size, num_samples), num_samples % size)
    return tuple(dict.fromkeys(length for length in sizes if length))


def shapes_of(
    plan: TrainingPlan, batch: int, num_samples: int, *, evaluated: tuple[int, ...] = (), shorten: bool = True
) -> Shapes:
    """What a plan meets with so many training samples; many equal pieces of a batch are two.

    `shorten`: not where a method does something with the whole batch at once.
    """
    size = plan.microbatch
    if num_samples <= batch:
        return Shapes(batch=_shortened(num_samples, size, 2) if shorten else num_samples, evaluated=evaluated)
    last = num_samples % batch
    if not shorten:
        return Shapes(batch=batch, last=last, evaluated=evaluated)
    return Shapes(batch=_shortened(batch, size, 2), last=_shortened(last, size, 1), evaluated=evaluated)


def _shortened(num_samples: int, size: int, most_pieces: int) -> int:
    """So many samples with at most so many whole pieces, and the same rest."""
    return size * min(num_samples // size, most_pieces) + num_samples % size


def key_of(model_key: str, plan: TrainingPlan, shapes: Shapes, *more: object) -> str:
    """Of what a rehearsal measures; `model_key` stands for model, method, classes, threads, torch, kind of machine.

    `more`: plain data that belongs to it as well, such as the optimizer.
    """
    whole = to_map(plan)
    identity = [
        _FORMAT,
        __version__,
        model_key,
        {name: whole[name] for name in (*_PLAN_FIELDS, "num_models")},
        to_map(shapes),
        processor(),
        {name: os.environ.get(name, "") for name in _CACHE_SETTINGS},
        *more,
    ]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


@functools.cache
def processor() -> str:
    """The processor's name and what it can do: kernels are chosen by it."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            facts = [line.partition(":") for line in file]
    except OSError:
        return ""
    wanted = ("model name", "flags", "Features", "CPU part")  # of x86, both, ARM, ARM
    return "; ".join(dict.fromkeys(value.strip() for name, _, value in facts if name.strip() in wanted))


def find(folder: Path, key: str) -> Rehearsed | None:
    """What was measured before; None if nothing was, or its file makes no sense."""
    path = _path(folder, key)
    try:
        with open(path, "rb") as file:
            rehearsed = from_map(Rehearsed, json.loads(file.read(_MAX_FILE_BYTES)), where=str(path))
        if rehearsed.key != key:
            raise PayloadError("key", f"expected {key}, got {rehearsed.key}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, PayloadError) as error:
        _log.warning("%s: not usable as a rehearsal, ignored (%s)", path, str(error)[:200])
        return None
    return rehearsed


def keep(folder: Path, rehearsed: Rehearsed) -> None:
    """By rename, without a sync: a rehearsal can be repeated. A disk that takes nothing is logged."""
    path = _path(folder, rehearsed.key)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(to_map(rehearsed)), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("cannot keep what a rehearsal measured in %s: %s", folder, error.strerror)


def _path(folder: Path, key: str) -> Path:
    return folder / f"rehearsed-{key}.json"
