"""What an accelerator's allocator would reserve for a plan: a recorded sequence of allocations, scaled and replayed.

    sizes    each allocation takes per_sample x samples + constant bytes; its samples are those of its part of a step
    pieces   whole ones of a batch | the last one of a batch | of an epoch | frozen units' chunks
    replay   the sequence at a plan's sizes goes through the allocator's rules; the peak of what it reserves counts

Reserved bytes are neither linear nor monotonous in the batch, so every candidate is replayed, none interpolated.
Covers: the record, its sizes, its file's form. Does not cover: recording (`measuring.allocation_recording`), the rules
of the allocator (`caching_allocator`), which plan is chosen (`worker.accelerator_plan`). No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from edge_client.errors import PayloadError
from edge_client.planning.caching_allocator import CachingAllocator, Event
from edge_client.records import Between, Count, Hash, Matches, Positive

__all__ = [
    "CHUNK",
    "FORMAT",
    "GIVEN_BACK",
    "PIECES",
    "WORKSPACE_BYTES",
    "AllocationSequence",
    "Recorded",
    "Sizes",
    "bound_bytes",
    "pair",
    "reserved",
]

FORMAT = 1
PIECES = ("whole", "rest", "last", "chunk")  # whose samples an allocation depends on
GIVEN_BACK = 0  # instead of an allocation's number: segments that nothing uses are given back
CHUNK = 16  # samples at a time through frozen units, unless they mix samples
# Beside what a CPU's kernels allocate: libraries' workspaces, which open a segment of their own. Kernels of another
# device allocate otherwise; the share was chosen, and holds on the test accelerator.
WORKSPACE_BYTES = 20 * 2**20
_FOREIGN_SHARE = 1.1

_Number = Annotated[float, Between(-(2.0**53), 2.0**53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Samples that go through at a time by a plan."""

    microbatch: int
    rest: int = 0  # of the last piece of a batch; 0: all are whole
    last: int = 0  # of the last piece of an epoch

    @classmethod
    def of(cls, *, batch: int, microbatch: int, num_samples: int) -> Sizes:
        """Of a training on so many samples; 0: their number is not known."""
        last_batch = num_samples % batch
        return cls(microbatch=microbatch, rest=batch % microbatch, last=last_batch % microbatch)

    def samples(self, piece: str) -> int:
        """Of an allocation that belongs to this kind of piece; one that the plan does not have is a whole one."""
        chunk = min(CHUNK, self.microbatch)
        counts = {"whole": self.microbatch, "rest": self.rest, "last": self.last, "chunk": chunk}
        return counts[piece] or self.microbatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One run of the steps: what was allocated and freed, in order."""

    events: tuple[tuple[int, int, str], ...]  # number of the allocation, bytes (below 0: it is freed), its piece
    samples: dict[str, int]  # of each piece


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSequence:
    """The steps of one way to train, for any number of samples."""

    format: Annotated[int, Between(FORMAT, FORMAT)] = FORMAT
    key: Hash
    lasting: tuple[Positive, ...]  # that are there before the first step: weights and buffers
    numbers: tuple[Count, ...]  # of an allocation, at each event; the second time it is freed
    pieces: Annotated[str, Matches(r"[0-3]*")]  # of each event, an index into PIECES
    per_sample: tuple[_Number, ...]  # bytes, of each event that allocates
    constant: tuple[_Number, ...]

    def events(self, sizes: Sizes) -> Iterator[Event]:
        """The sequence at these sizes."""
        yield from ((("lasting", number), size) for number, size in enumerate(self.lasting))
        samples = [sizes.samples(piece) for piece in PIECES]
        alive: set[int] = set()
        sized = iter(zip(self.per_sample, self.constant, strict=True))
        for number, piece in zip(self.numbers, self.pieces, strict=True):
            if number == GIVEN_BACK:
                yield GIVEN_BACK, 0
            elif number in alive:
                alive.remove(number)
                yield number, -1
            else:
                alive.add(number)
                slope, constant = next(sized)
                yield number, max(1, round(slope * samples[int(piece)] + constant))


def reserved(sequence: AllocationSequence, sizes: Sizes) -> CachingAllocator:
    """The allocator after the sequence; `peak_reserved_bytes` is what counts."""
    allocator = CachingAllocator()
    for name, num_bytes in sequence.events(sizes):
        if name == GIVEN_BACK:
            allocator.empty_cache()
        elif num_bytes > 0:
            allocator.allocate(name, num_bytes)
        else:
            allocator.free(name)
    return allocator


def bound_bytes(sequence: AllocationSequence, sizes: Sizes) -> int:
    """What is reserved at most, before anything was measured on the accelerator itself."""
    return int(_FOREIGN_SHARE * reserved(sequence, sizes).peak_reserved_bytes) + WORKSPACE_BYTES


def pair(key: str, lasting: Sequence[int], small: Recorded, large: Recorded) -> AllocationSequence:
    """One sequence from the same steps at two numbers of samples; raises `PayloadError` if they are not the same."""
    if [(number, size > 0) for number, size, _ in small.events] != [(n, size > 0) for n, size, _ in large.events]:
        raise PayloadError("differs", "two sizes of the same step allocate in another order")
    lines = []
    for (_, one, piece), (_, other, _) in zip(small.events, large.events, strict=True):
        if one > 0:
            few, many = small.samples[piece], large.samples[piece]
            slope = max(0.0, (other - one) / (many - few))
            lines.append((slope, max(one - slope * few, other - slope * many)))
    return AllocationSequence(
        key=key,
        lasting=tuple(size for size in lasting if size > 0),
        numbers=tuple(number for number, _, _ in small.events),
        pieces="".join(str(PIECES.index(piece)) for _, _, piece in small.events),
        per_sample=tuple(slope for slope, _ in lines),
        constant=tuple(constant for _, constant in lines),
    )
