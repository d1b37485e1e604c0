"""Sums of a device's inputs, from which a run's mean and standard deviation per channel follow. No torch.

Devices report the count, the sum and the sum of squares of each channel of their training samples, in float64; no
sample leaves a device. Sums of devices add up, so that the result is that of all samples in one place.
Covers: the check of sums (`records.InputSums`) as something that anybody may have sent, the numbers that follow.
Does not cover: making the sums (`worker.input_sums`), when they are asked for (`coordinator.rounds.machine`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edge_client.errors import PayloadError
from edge_client.records import InputSums

__all__ = [
    "FEWEST_SAMPLES",
    "MAX_CHANNELS",
    "MEAN",
    "SCALE",
    "SUMS_ROUND",
    "Normalisation",
    "check_sums",
    "normalisation_of",
]

MEAN, SCALE = "input_mean", "input_scale"  # names of the buffers in a model's first unit
SUMS_ROUND = 0  # the round before the first one, in which devices report sums and train nothing
MAX_CHANNELS = 4096
FEWEST_SAMPLES = 10  # with fewer, sums would reveal single samples
_LARGEST_SQUARE = 1e30  # mean of squares: float32 holds what follows from it
_ROUNDING = 1e-9  # of sums that different machines have made
_CONSTANT = 1e-12  # variance against the mean of squares: what is smaller is rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalisation:
    """What a model subtracts from its inputs, and what it multiplies them by then."""

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    constant: tuple[int, ...] = ()  # channels without variance, which are only shifted


def check_sums(sums: InputSums, *, num_channels: int, num_samples: int, source: str) -> None:
    """Raise `PayloadError` for sums that no samples have; `num_samples` is how many the device says that it has."""
    for what, values in (("sums", sums.sums), ("sums of squares", sums.squares)):
        if len(values) != num_channels:
            raise PayloadError("shape", f"{source}: expected {what} of {num_channels} channels, got {len(values)}")
    if num_samples < FEWEST_SAMPLES or sums.count % num_samples:
        raise PayloadError(
            "sample_count",
            f"{source}: expected sums over {FEWEST_SAMPLES} samples or more, with equally many values of each, "
            f"got {sums.count} values of {num_samples} samples",
        )
    for channel, (total, square) in enumerate(zip(sums.sums, sums.squares, strict=True)):
        if not 0 <= square <= _LARGEST_SQUARE * sums.count:
            raise PayloadError(
                "range",
                f"{source}: expected a sum of squares from 0 to {_LARGEST_SQUARE * sums.count:g} in channel {channel}, "
                f"got {square:g}",
            )
        # the square of a mean is at most the mean of squares
        if (total / sums.count) ** 2 > square / sums.count * (1 + _ROUNDING):
            raise PayloadError("range", f"{source}: no values have the sum {total:g} and the sum of squares {square:g}")


def normalisation_of(devices: Sequence[InputSums], weights: Sequence[float]) -> Normalisation:
    """Mean and reciprocal standard deviation of each channel over all devices, each with a weight from 0 to 1."""
    weighted = list(zip(devices, weights, strict=True))
    total = math.fsum(weight * device.count for device, weight in weighted)
    means, scales, constant = [], [], []
    for channel in range(len(devices[0].sums)):
        mean = math.fsum(weight * device.sums[channel] for device, weight in weighted) / total
        square = math.fsum(weight * device.squares[channel] for device, weight in weighted) / total
        variance = square - mean * mean
        is_constant = variance <= max(_CONSTANT * square, 1e-60)
        means.append(mean)
        scales.append(1.0 if is_constant else 1 / math.sqrt(variance))
        if is_constant:
            constant.append(channel)
    return Normalisation(mean=tuple(means), scale=tuple(scales), constant=tuple(constant))
