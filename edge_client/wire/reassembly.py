"""The receiving half of a transfer, without I/O: which chunks are here, and which to ask for now.

The receiver pulls: it asks for ranges of chunks, at most a window of bytes at a time, and again for what did not come.
The sender keeps no state, so that either side, or the broker, may die at any moment and the transfer goes on from the
chunks that are here. The window starts small, doubles while the link keeps up and halves when it stalls: a fast link
gets megabytes ahead, a slow one never has more than about two seconds of bytes in its queues.

Does not cover: files (`edge_client.transport.blobs`), the hash of the whole (`blobs` too), who may send (session,
roster).
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_client.errors import PayloadError
from edge_client.wire.chunks import CHUNK_BYTES, Chunk, chunk_length, num_chunks, transfer_id
from edge_client.wire.flow_control import ASK_AGAIN_AFTER_S, REPORT_HEARD_AFTER_CHUNKS

__all__ = ["Range", "Reassembly", "expand"]

Range = tuple[int, int]  # first index, how many

_FIRST_WINDOW = 4  # chunks
_KEEPS_UP_S = 1.0  # a full window that arrives faster than this may double
_LONGEST_STALL_S = 60.0
_MAX_RANGES = 64  # in one message, so that it stays far below 16 KiB
_REPEATS = 64  # chunks that a broker may deliver twice, or that were asked for before a restart of ours


def expand(ranges: tuple[Range, ...], total: int) -> Iterator[int]:
    """The chunk indices of a request, each below `total`; raises `PayloadError` for a range outside."""
    for first, count in ranges:
        if first < 0 or count < 1 or first + count > total:
            raise PayloadError("range", f"chunks {first}+{count} of {total}")
        yield from range(first, first + count)


class Reassembly:
    """Book-keeping of one incoming blob."""

    def __init__(self, *, sha256: str, length: int, max_window_bytes: int, have: bytes = b"") -> None:
        """`have` is the state that `bitmap` returned before a restart: one byte per chunk, 1 if it is here."""
        self.sha256 = sha256
        self.length = length
        self.transfer = transfer_id(sha256)
        self.num_chunks = num_chunks(length)
        self._have = bytearray(have) if len(have) == self.num_chunks else bytearray(self.num_chunks)
        self.num_missing = self._have.count(0)
        self._asked: set[int] = set()
        self._cursor = 0
        self._max_window = max(1, max_window_bytes // CHUNK_BYTES)
        self._window = min(_FIRST_WINDOW, self._max_window)
        self._window_began = 0.0
        self._since_window = 0
        self._progress_at = 0.0
        self._stall_s = ASK_AGAIN_AFTER_S
        self._may_repeat = _REPEATS
        self.heard: int | None = None  # on the shared topic: 1 + the last index; None: does not listen
        self._num_unsaid = 0

    @property
    def complete(self) -> bool:
        """Whether every chunk is here; the hash of the whole is still to be checked."""
        return self.num_missing == 0

    @property
    def outstanding_bytes(self) -> int:
        """Asked for and not here yet: what the peer may still send."""
        return len(self._asked) * CHUNK_BYTES

    @property
    def wants_more(self) -> bool:
        """Whether the next `request` asks for something, if its allowance is large enough."""
        return self._room > 0 and 2 * len(self._asked) <= self._window

    @property
    def _room(self) -> int:
        return min(self._window, self.num_missing) - len(self._asked)

    def has(self, index: int) -> bool:
        """Whether there is such a chunk, and it is here."""
        return index < self.num_chunks and bool(self._have[index])

    def bitmap(self) -> bytes:
        """One byte per chunk, to be kept over a restart."""
        return bytes(self._have)

    def accept(self, chunk: Chunk, now: float) -> int | None:
        """The file offset at which this chunk's body belongs, or None if it is here already; raises `PayloadError`.

        A chunk that is missing is taken, whether it was asked for or not: it may be one that was given up too early.
        Only those may come twice, and a few more; further ones are `unasked`.
        """
        if chunk.transfer != self.transfer:
            raise PayloadError("transfer", "chunk of another transfer")
        if chunk.index >= self.num_chunks or len(chunk.body) != chunk_length(self.length, chunk.index):
            raise PayloadError("range", f"chunk {chunk.index} with {len(chunk.body)} bytes does not fit {self.length}")
        self._asked.discard(chunk.index)
        if self._have[chunk.index]:
            if self._may_repeat == 0:
                raise PayloadError("unasked", f"chunk {chunk.index} is here already")
            self._may_repeat -= 1
            return None
        self._have[chunk.index] = 1
        self.num_missing -= 1
        self._note_progress(now)
        return chunk.index * CHUNK_BYTES

    def _note_progress(self, now: float) -> None:
        self._progress_at = now
        self._stall_s = ASK_AGAIN_AFTER_S
        self._since_window += 1
        if self._since_window >= self._window:
            if now - self._window_began < _KEEPS_UP_S:
                self._window = min(2 * self._window, self._max_window)
            self._since_window = 0
            self._window_began = now

    def listen(self) -> None:
        """This device listens on the shared topic from now on; the next pull, due at once, says so."""
        if self.heard is None:
            self.heard, self._num_unsaid = 0, REPORT_HEARD_AFTER_CHUNKS

    def unlisten(self) -> None:
        """This device does not listen on the shared topic any more."""
        self.heard = None

    def note_shared_chunk(self, index: int) -> bool:
        """A chunk came on the shared topic: whether it is missing here."""
        if index >= self.num_chunks:
            return False
        if self.heard is not None:
            self.heard = index + 1
            self._num_unsaid += 1
        return not self._have[index]

    def pull(self, now: float) -> tuple[Range, ...] | None:
        """The ranges of the pull that is due now, possibly none; None if no pull is due. `heard` goes with it."""
        ranges = self.request(now)
        if not ranges and (self.heard is None or self._num_unsaid < REPORT_HEARD_AFTER_CHUNKS):
            return None
        self._num_unsaid = 0
        return ranges

    def request(self, now: float, *, allowance_bytes: int | None = None, whole: bool = False) -> tuple[Range, ...]:
        """Ranges to ask for now, if any; `allowance_bytes` is what others leave of a shared limit.

        `whole`: all that the window has room for, or nothing yet.
        """
        self.stalled(now)
        room = self._room
        if allowance_bytes is not None:
            allowed = allowance_bytes // CHUNK_BYTES
            room = 0 if whole and room > allowed else min(room, allowed)
        if room < 1 or not self.wants_more:
            return ()
        if not self._asked:
            self._progress_at = self._window_began = now
        return self._take(room)

    def stalled(self, now: float) -> bool:
        """Whether nothing came for too long. Then ask again, for less, and wait longer if that does not come either."""
        if not self._asked or now - self._progress_at < self._stall_s:
            return False
        self._give_up()
        self._window = max(1, self._window // 2)
        self._since_window = 0
        self._stall_s = min(2 * self._stall_s, _LONGEST_STALL_S)
        return True

    def forget(self, index: int) -> None:
        """Ask again for a chunk that was accepted but could not be stored."""
        self._have[index] = 0
        self.num_missing += 1
        self._cursor = min(self._cursor, index)

    def lost_connection(self) -> None:
        """Ask for all outstanding chunks again at the next `request`: they will not arrive."""
        self._give_up()
        self._stall_s = ASK_AGAIN_AFTER_S

    def _give_up(self) -> None:
        """Give up the outstanding chunks, which are asked for again and may therefore arrive twice."""
        self._may_repeat += len(self._asked)
        self._asked.clear()
        self._cursor = 0

    def restart(self) -> None:
        """Begin again, because the complete blob did not have the right hash."""
        self._have = bytearray(self.num_chunks)
        self.num_missing = self.num_chunks
        self.lost_connection()

    def _take(self, room: int) -> tuple[Range, ...]:
        ranges: list[Range] = []
        index = self._cursor
        while room > 0 and index < self.num_chunks:
            if self._have[index] or index in self._asked:
                index += 1
                continue
            first = index
            while room > 0 and index < self.num_chunks and not self._have[index] and index not in self._asked:
                self._asked.add(index)
                index += 1
                room -= 1
            ranges.append((first, index - first))
            if len(ranges) == _MAX_RANGES:
                break
        self._cursor = index
        return tuple(ranges)
