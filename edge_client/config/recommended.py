"""The training settings that `coordinator new` writes, and that `coordinator simulate` uses without a file.

They are one set, so that what a person tries in a simulation is what the devices train. The schema's own defaults are
others (`run_file`): a run file that names no settings trains as it always did.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["TRAINING", "training_in_words"]

# measured on small convolutional networks and MLPs (benchmarks/first_fleet.py); the keys are those of run.toml
TRAINING: Mapping[str, object] = {
    "batch": 32,
    "epochs": "auto",
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "weight-decay": 1e-4,
    "schedule": "cosine",
    "warm-up": True,
    "normalise": True,
}


def training_in_words(table: Mapping[str, object]) -> str:
    """Settings in a line, such as `batch 32, epochs auto, optimizer sgd`."""
    shown = {True: "on", False: "off"}
    words = (f"{key} {shown[value] if isinstance(value, bool) else value}" for key, value in table.items())
    return ", ".join(words)
