"""Memory that libraries take and torch does not see, as the kernel counts it.

Libraries keep code and tables for every number of samples that they have met. It is measured before anything is
profiled, because a process that has used the profiler has memory to spare.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_client.device import meter
from edge_client.device.private_memory import ProcessMemory, process_memory
from edge_client.measuring.step_runner import StepRunner, activation_bytes

__all__ = ["Growth", "HiddenMemory", "measure_hidden"]

_LARGE_BATCHES = (128, 64, 32)  # for what libraries keep: with them if the activations are small
_LARGE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Growth:
    """What the process has grown by: until each block was trained, where each is trained by itself; and in all."""

    until: tuple[int, ...]
    whole: int

    def __add__(self, other: Growth) -> Growth:
        return self._combined(other, lambda one, two: one + two)

    def larger(self, other: Growth) -> Growth:
        """Number by number, the larger one."""
        return self._combined(other, max)

    def _combined(self, other: Growth, both: Callable[[int, int], int]) -> Growth:
        until = tuple(both(one, two) for one, two in zip(self.until, other.until, strict=True))
        return Growth(until, both(self.whole, other.whole))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivateGrowth:
    """The same in private memory, without the pages of libraries, which recurrent layers read many of.

    Recurrent layers also have many tensors that are too small to go back to the system: what lasts after a large batch
    are places for them, which the next batch uses again.
    """

    lasting_bytes: int  # after the small batch, before the large one
    peak_bytes: int  # of a step with the large batch
    small_peak_bytes: int  # of one with the small batch


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenMemory:
    """What the kernel counts, on top of the warm process."""

    batch: int  # of the largest step
    peak_bytes: int  # of a step of the whole model
    small_batch: int
    private: PrivateGrowth
    lasting: Growth  # after training with two numbers of samples, of which one is the last of an epoch
    rest_bytes: int  # that a single sample at the end of an epoch takes more than a few
    size: Growth  # that one number of samples more takes


def measure_hidden(runner: StepRunner) -> HiddenMemory:
    """As a worker does: evaluate, then train, with all numbers of samples that a batch may end with."""
    small, large = runner.batches[0], _large_batch(runner)
    base, private_base = meter.rss_bytes(), process_memory().private_bytes
    runner.evaluate(large, small)
    evaluated = meter.rss_bytes() - base
    few = _growth(runner, small)
    lasting_bytes = process_memory().private_bytes - private_base
    small_peak = _peak(runner, small)
    many = _growth(runner, large)
    large_peak = _peak(runner, large)
    peak_bytes = large_peak.peak_rss_bytes - base
    odd, lone = _growth(runner, small // 2 + 1), _growth(runner, runner.model.min_batch)
    both = few + many
    return HiddenMemory(
        batch=large,
        peak_bytes=peak_bytes - runner.copied_bytes,
        small_batch=small,
        private=PrivateGrowth(
            lasting_bytes=lasting_bytes,
            peak_bytes=large_peak.peak_rss_bytes - large_peak.file_bytes - private_base - runner.copied_bytes,
            small_peak_bytes=small_peak.peak_rss_bytes - small_peak.file_bytes - private_base - runner.copied_bytes,
        ),
        lasting=Growth(tuple(evaluated + until for until in both.until), evaluated + both.whole),
        rest_bytes=max(0, lone.whole - few.whole),
        size=odd.larger(lone),
    )


def _peak(runner: StepRunner, batch: int) -> ProcessMemory:
    """After a step with so many samples, whose peak is in it."""
    meter.reset_peak()
    runner.train(batch, ())
    return process_memory()


def _growth(runner: StepRunner, batch: int) -> Growth:
    """By training with so many samples at a time, for the first time."""
    before = meter.rss_bytes()
    groups = runner.single_blocks()
    until = runner.train(batch, groups) if groups else []
    runner.train(batch, ())
    return Growth(tuple(max(0, after - before) for after in until), max(0, meter.rss_bytes() - before))


def _large_batch(runner: StepRunner) -> int:
    per_sample = activation_bytes(runner.model)
    fitting = (batch for batch in _LARGE_BATCHES if batch * per_sample <= _LARGE_BYTES)
    return max(runner.batches[1], next(fitting, 0))
