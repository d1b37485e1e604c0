"""The schema of `device.toml`, with which a device's owner names its data and limits what fedfit may do there.

Covers: the keys, and the rules that involve several of them. Does not cover: the parser (`tables`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edge_client.config.tables import Auto, Bytes, Unit, described, parse_table, read_toml
from edge_client.errors import InputError
from edge_client.records import Between, Count, Id, Matches, Positive, Text, is_id

__all__ = ["DataSection", "DeviceFile", "LimitsSection", "ShareSection", "load_device_file"]

_MAX_LABELS = 64
_MAX_LABEL_BYTES = 8192
_MAX_TASKS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    source: Annotated[str, Matches(r"(?s)[a-z0-9-]{0,32}(:.{0,2000})?")] = described(
        "digits, idx, npz, csv, image-folder, cifar10, cifar100, fashion-mnist or har; SOURCE:PATH is short for source "
        "and train; without it only tasks find the data",
        "",
    )
    train: Text = described("path of the training data", "")
    test: Text = described("path of the test data", "")
    test_fraction: Annotated[float, Between(0, 0.9)] = described(
        "part of the training data kept for tests, if no test", 0.2
    )
    partition: Text = described(
        "how a shared data set is divided among its devices: iid, dirichlet:ALPHA, balanced-dirichlet:ALPHA, "
        "pathological:LABELS, key, key:NAME or file:PATH",
        "",
    )
    part: tuple[Count, Positive] = described("which part of how many, such as [0, 4]", (0, 1))
    seed: Count = described("seed of the partition, the same on all its devices", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSection:
    memory: Annotated[int, Auto(), Unit("bytes"), Between(0, 2**53)] | None = described(
        "what a worker process may use; auto: from this device's free memory", None
    )
    accelerator: Annotated[str, Matches(r"[a-z]{1,16}(:[0-9]{1,3})?")] = described(
        "where to train: none, the CPU; auto, a GPU that torch can use, or the CPU if there is none; or a device by "
        "name, such as cuda:0",
        "none",
        later=True,
    )
    accelerator_memory: Annotated[int, Auto(), Unit("bytes"), Between(0, 2**53)] | None = described(
        "what a worker may use of an accelerator's separate memory; auto: from what is free there. Where it shares the "
        "host's memory, limits.memory counts for both",
        None,
        later=True,
    )
    workers: Annotated[int, Between(1, 64)] = described(
        "workers that share this host's accelerators at most: each takes the next one, and its share of the memory",
        1,
        later=True,
    )
    disk: Bytes = described("what fedfit may keep on disk", 4 * 10**9)
    calibrate: bool = described(
        "whether this device may measure a model that it has not seen, once, beside its budget's plan; otherwise it "
        "plans with the coordinator's measurement",
        True,
    )
    reconnect: Annotated[float, Unit("seconds"), Between(1, 3600)] = described(
        "longest wait before it tries to reach the broker again; waits begin below a second and double", 60.0
    )
    deploy: bool = described(
        "whether the coordinator may put a model here for this device's programs (STATE/deployed/current.onnx)", True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSection:
    metrics: bool = described("whether results on this device's test data go to the coordinator", True)
    class_statistics: bool = described("whether class means, and which classes there are, may leave", True)
    input_statistics: bool = described(
        "whether the sums of this device's inputs, from which a run's mean and deviation follow, may leave; they stay "
        "here, too, with fewer samples than min-count, and with noise",
        True,
        later=True,
    )
    min_count: Annotated[int, Between(10, 10**9)] = described("samples that a class needs for its mean to leave", 32)
    clip: Annotated[float, Between(0, 10**6)] = described(
        "length that one sample's features or logits may have in a class mean; 0: any", 0.0
    )
    noise: Annotated[float, Between(0, 10**6)] = described(
        "Gaussian noise on class means, in units of what one sample can change in them; needs clip; 0: none", 0.0
    )
    epsilon: Annotated[float, Between(0, 10**6)] = described(
        "what all noisy class means together may cost, at a delta of 1e-5; then the device declines; needs noise; "
        "0: no bound",
        0.0,
    )
    features: bool = described("whether features of single samples of this device's data may leave", False)
    drafts: bool = described("whether its model's outputs for samples that the coordinator sent may leave", False)
    logs: Annotated[str, Matches(r"none|errors")] = described(
        "whether a failure's last log lines go to the coordinator", "errors"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFile:
    """A device's data and limits; no run can exceed them."""

    data: DataSection | None = described("where the data is", None)
    rename: Mapping[str, Text] = described("this device's class name -> the run's", dict)
    labels: Mapping[str, Text] = described("labels by which a run may choose devices (devices.where)", dict)
    limits: LimitsSection = described("memory, disk and waiting", LimitsSection)
    share: ShareSection = described("what may leave the device beside updates", ShareSection)
    tasks: Mapping[Id, Text] = described(
        "the only code of yours that a run may name: NAME -> /path/FILE.py:OBJECT; empty: built-in models only", dict
    )


def load_device_file(path: Path) -> DeviceFile:
    """Read and check a device file; raises `InputError`."""
    file = parse_table(DeviceFile, read_toml(path), source=str(path))
    _check_tasks(file, path)
    _check_sharing(file.share, path)
    _check_labels(file, path)
    return file


def _check_tasks(file: DeviceFile, path: Path) -> None:
    for name, location in file.tasks.items():
        if not is_id(name) or not re.fullmatch(r"/.+\.py:[A-Za-z_]\w*", location):
            raise InputError(
                f'{path}: tasks.{name}: expected NAME = "/path/FILE.py:OBJECT" with an absolute path, got {location!r}'
            )
    if len(file.tasks) > _MAX_TASKS:
        raise InputError(f"{path}: tasks: expected at most {_MAX_TASKS}, got {len(file.tasks)}")


def _check_sharing(share: ShareSection, path: Path) -> None:
    if share.noise > 0 and share.clip == 0:
        raise InputError(f"{path}: share.noise needs share.clip: without it one sample can change a mean without bound")
    if share.epsilon > 0 and share.noise == 0:
        raise InputError(f"{path}: share.epsilon needs share.noise: without it there is no cost to bound")


def _check_labels(file: DeviceFile, path: Path) -> None:
    label_bytes = len(json.dumps(dict(file.labels), ensure_ascii=False).encode())
    if len(file.labels) > _MAX_LABELS or label_bytes > _MAX_LABEL_BYTES:
        raise InputError(
            f"{path}: labels: expected at most {_MAX_LABELS} labels and {_MAX_LABEL_BYTES} bytes, "
            f"got {len(file.labels)} and {label_bytes}; they travel in one message"
        )
