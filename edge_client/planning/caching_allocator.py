"""What CUDA's caching allocator reserves for a sequence of allocations and frees: its rules, without a GPU.

    round up to 512 B | up to 1 MiB: pool of 2 MiB segments | below 10 MiB: segments of 20 MiB | more: rounded to 2 MiB
    the smallest free block that is large enough; split if >= 512 B (small pool) or > 1 MiB (large pool) are left

The rules are those of torch's c10/cuda/CUDACachingAllocator.cpp, whose constants are the same from 2.1 to 2.13.
Does not cover: several streams, expandable segments, CUDA graphs; a worker uses none of them.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

__all__ = ["CachingAllocator", "Event", "OutOfReserveError", "replay", "rounded", "segment_bytes"]

Event = tuple[Hashable, int]  # an allocation's name and bytes; bytes below zero: it is freed

MIB = 2**20
_MIN_BLOCK, _SMALL_SIZE, _SMALL_SEGMENT = 512, MIB, 2 * MIB
_LARGE_SEGMENT, _MIN_OWN_SEGMENT, _ROUND_LARGE = 20 * MIB, 10 * MIB, 2 * MIB


class OutOfReserveError(MemoryError):
    """What the device would refuse."""


def rounded(num_bytes: int) -> int:
    """What an allocation counts as."""
    return max(_MIN_BLOCK, -(-num_bytes // _MIN_BLOCK) * _MIN_BLOCK)


def segment_bytes(size: int) -> int:
    """Of the segment that is reserved for a rounded size."""
    if size <= _SMALL_SIZE:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _MIN_OWN_SEGMENT else -(-size // _ROUND_LARGE) * _ROUND_LARGE


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of a segment, between its neighbours."""

    address: int
    size: int
    free_blocks: list[tuple[int, int, _Block]]  # of its pool, by size, then address
    is_used: bool = False
    before: _Block | None = None
    after: _Block | None = None

    @property
    def entry(self) -> tuple[int, int, _Block]:
        return self.size, self.address, self

    def split(self, size: int) -> _Block:
        """Keep `size` bytes; returns the block of the rest."""
        rest = _Block(self.address + size, self.size - size, self.free_blocks, before=self, after=self.after)
        if rest.after is not None:
            rest.after.before = rest
        self.after, self.size = rest, size
        return rest

    def absorb(self, other: _Block) -> None:
        """Take a neighbour's bytes."""
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


@dataclass(slots=True)
class CachingAllocator:
    """The allocator of one device; `limit_bytes` is what it may reserve."""

    limit_bytes: int | None = None
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    num_retries: int = 0  # how often cached segments were given back to make room
    _next_address: int = 0
    _small: list[tuple[int, int, _Block]] = field(default_factory=list)
    _large: list[tuple[int, int, _Block]] = field(default_factory=list)
    _used: dict[Hashable, _Block] = field(default_factory=dict)

    def allocate(self, name: Hashable, num_bytes: int) -> None:
        """Raises `OutOfReserveError` where the device would, after it has given cached segments back."""
        if num_bytes == 0:
            return
        size = rounded(num_bytes)
        free_blocks = self._small if size <= _SMALL_SIZE else self._large
        at = bisect.bisect_left(free_blocks, (size, -1))
        block = free_blocks.pop(at)[2] if at < len(free_blocks) else self._new_segment(size, free_blocks)
        rest = block.size - size
        if rest >= _MIN_BLOCK if free_blocks is self._small else rest > _SMALL_SIZE:
            self._put(block.split(size))
        block.is_used = True
        self._used[name] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, name: Hashable) -> None:
        """Free an allocation; one of 0 bytes was none."""
        block = self._used.pop(name, None)
        if block is None:
            return
        block.is_used = False
        self.allocated_bytes -= block.size
        for other in (block.before, block.after):
            if other is not None and not other.is_used:
                self._drop(other)
                block.absorb(other)
        self._put(block)

    def empty_cache(self) -> None:
        """Give back the segments in which nothing is used."""
        for free_blocks in (self._large, self._small):
            for entry in [e for e in free_blocks if e[2].before is None and e[2].after is None]:
                free_blocks.remove(entry)
                self.reserved_bytes -= entry[2].size

    def free_sizes(self) -> tuple[list[int], list[int]]:
        """Of the free blocks in the small and in the large pool, ascending."""
        return [entry[0] for entry in self._small], [entry[0] for entry in self._large]

    def _new_segment(self, size: int, free_blocks: list[tuple[int, int, _Block]]) -> _Block:
        wanted = segment_bytes(size)
        if self.limit_bytes is not None and self.reserved_bytes + wanted > self.limit_bytes:
            self.empty_cache()
            self.num_retries += 1
            if self.reserved_bytes + wanted > self.limit_bytes:
                limit = f"{self.limit_bytes} bytes, of which {self.reserved_bytes} are reserved"
                raise OutOfReserveError(f"a segment of {wanted} bytes does not fit in {limit}")
        self.reserved_bytes += wanted
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self._next_address += wanted + MIB  # segments never touch
        return _Block(self._next_address - wanted, wanted, free_blocks)

    def _put(self, block: _Block) -> None:
        bisect.insort(block.free_blocks, block.entry, key=lambda entry: entry[:2])

    def _drop(self, block: _Block) -> None:
        del block.free_blocks[bisect.bisect_left(block.free_blocks, block.entry[:2], key=lambda entry: entry[:2])]


def replay(events: Iterable[Event], *, limit_bytes: int | None = None) -> CachingAllocator:
    """The allocator after these events; raises `OutOfReserveError` where they do not fit."""
    allocator = CachingAllocator(limit_bytes)
    for name, num_bytes in events:
        if num_bytes >= 0:
            allocator.allocate(name, num_bytes)
        else:
            allocator.free(name)
    return allocator
