"""What is allocated between named marks in a stretch of code, from torch's profiler, at two batch sizes.

The code calls `mark` at the places that matter; `profiled` tells how many bytes were in use at each of them, and after
every allocation in between. Two traces of the same code at two batches give lines in the number of samples.
Covers: recording and reading traces. Does not cover: what runs meanwhile (`step_runner`), what follows (`unit_costs`).
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from edge_client.planning.rows import Line, line_through

__all__ = ["BATCH", "Trace", "TracePair", "mark", "marks_gradient", "profiled"]

BATCH = "batch"  # the mark where a piece of a batch begins, with its samples
_PREFIX = "fedfit/"

_Allocation = tuple[int, str, int]  # nanoseconds, mark ("" for an allocation), bytes (0 for a mark)

_clock: list[float] = []  # processor time at each mark: a busy machine does not make a unit slower


def mark(name: str) -> None:
    """Name this place in the trace that is being recorded, if there is one."""
    with profiler.record_function(_PREFIX + name):
        _clock.append(time.thread_time())


def marks_gradient(name: str) -> Callable[[Tensor], None]:
    """A hook that marks where a tensor's gradient is complete."""
    return lambda grad: mark(name)


@dataclass(slots=True)
class Trace:
    """Bytes in use at each mark and after each allocation before it, and the time of the mark."""

    marks: list[str] = field(default_factory=list)
    live: list[float] = field(default_factory=list)
    moments: list[list[float]] = field(default_factory=list)  # since the mark before
    seconds: list[float] = field(default_factory=list)

    def add(self, name: str, live: float, moments: list[float], seconds: float) -> None:
        """Append a mark."""
        self.marks.append(name)
        self.live.append(live)
        self.moments.append(moments)
        self.seconds.append(seconds)

    def position(self, name: str) -> int:
        """Of the first mark with this name."""
        return self.marks.index(name)

    def between(self, start: str, end: str) -> list[float]:
        """In use at the first mark, and after each allocation until the second."""
        first, last = self.position(start), self.position(end)
        return [self.live[first], *(m for moments in self.moments[first + 1 : last + 1] for m in moments)]

    def parts(self) -> list[Trace]:
        """One trace per piece, each from its samples on and above what was in use then."""
        starts = [number for number, name in enumerate(self.marks) if name == BATCH]
        ends = [*starts[1:], len(self.marks)]
        return [self._part(start, end) for start, end in zip(starts, ends, strict=True)]

    def _part(self, start: int, end: int) -> Trace:
        rows = slice(start, end)
        floor = self.live[start]
        return Trace(
            self.marks[rows],
            [live - floor for live in self.live[rows]],
            [[moment - floor for moment in moments] for moments in self.moments[rows]],
            self.seconds[rows],
        )


@dataclass(frozen=True, slots=True)
class TracePair:
    """The same piece at two batches: lines through both."""

    batches: tuple[int, int]
    small: Trace
    large: Trace

    def has(self, name: str) -> bool:
        """Whether the piece came to this mark."""
        return name in self.small.marks

    def live(self, name: str) -> Line:
        """Bytes in use at a mark."""
        small, large = (trace.live[trace.position(name)] for trace in (self.small, self.large))
        return line_through(self.batches, small, large)

    def moments(self, start: str, end: str) -> list[Line]:
        """Bytes in use at the first mark, and after every allocation until the second; none without a first mark."""
        if not self.has(start):
            return []
        small, large = self.small.between(start, end), self.large.between(start, end)
        if len(small) != len(large):  # another kernel was chosen: the worst of both will do
            small, large = [max(small)], [max(large)]
        return [line_through(self.batches, one, other) for one, other in zip(small, large, strict=True)]

    def seconds(self, start: str, end: str) -> Line:
        """Time from mark to mark."""
        if not self.has(start):
            return 0.0, 0.0
        traces = (self.small, self.large)
        spans = [trace.seconds[trace.position(end)] - trace.seconds[trace.position(start)] for trace in traces]
        return line_through(self.batches, *spans)


@contextmanager
def profiled() -> Iterator[Trace]:
    """Record what the body allocates; the trace is complete after it."""
    trace = Trace()
    _clock.clear()
    with profiler.profile(profile_memory=True) as profile:
        yield trace
    events: list[_Allocation] = []
    norms: list[tuple[int, int]] = []  # when each BatchNorm's backward ran
    for event in profile.kineto_results.events():
        start, name = _start_ns(event), event.name()
        if name == "[memory]":
            events.append((start, "", event.nbytes()))
        elif name.startswith(_PREFIX):
            events.append((start, name.removeprefix(_PREFIX), 0))
        elif name == "aten::native_batch_norm_backward":
            norms.append((start, start + _duration_ns(event)))
    events.sort(key=lambda event: event[0])
    _drop_first_buffers(events, norms)
    live, moments = 0.0, list[float]()
    for _, name, num_bytes in events:
        live += num_bytes
        if num_bytes > 0:
            moments.append(live)
        if name:
            trace.add(name, live, moments, _clock[len(trace.marks)])
            moments = []


def _start_ns(event: Any) -> int:
    return int(event.start_ns() if hasattr(event, "start_ns") else event.start_us() * 1000)


def _duration_ns(event: Any) -> int:
    return int(event.duration_ns() if hasattr(event, "duration_ns") else event.duration_us() * 1000)


def _drop_first_buffers(events: list[_Allocation], norms: Sequence[tuple[int, int]]) -> None:
    """Let each BatchNorm's backward free its first result buffer before it takes the second, as memory sees it.

    It makes room for its result twice and drops the first, which it never wrote to. Both together would be the worst
    moment of many models.
    """
    times = [start for start, _, _ in events]
    for start, end in norms:
        inside = range(bisect.bisect_left(times, start), bisect.bisect_right(times, end) - 1)
        sizes: set[int] = set()
        for number in inside:
            size = events[number][2]
            if size > 0 and size in sizes and events[number + 1][2] == -size:
                events[number], events[number + 1] = events[number + 1], events[number]
                break
            sizes.add(size)
