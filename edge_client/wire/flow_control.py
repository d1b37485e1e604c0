"""How much is under way to a device at most: the numbers on which a device and its coordinator must agree."""

from __future__ import annotations

__all__ = ["ASK_AGAIN_AFTER_S", "PULL_WINDOW_BYTES", "REPORT_HEARD_AFTER_CHUNKS", "SHARED_WINDOW_CHUNKS"]

PULL_WINDOW_BYTES = 2 << 20  # a device asks for this much at a time; the coordinator queues no more for it
ASK_AGAIN_AFTER_S = 4.0  # without any chunk that a device asked for: it asks for them again
SHARED_WINDOW_CHUNKS = 32  # under way on the shared topic to its slowest listener, 4 MiB
REPORT_HEARD_AFTER_CHUNKS = SHARED_WINDOW_CHUNKS // 4  # how often a listener says how far it is
