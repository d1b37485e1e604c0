"""The base memory of a worker as plans use it: private memory of the warm process before it trains, in whole steps.

Two processes that do the same work differ by a few pages. A plan made from the measured bytes would differ from one
repeat to the next, so both the worker and the coordinator, which chooses a slice for it, count in steps. No torch.
"""

from __future__ import annotations

from edge_client.planning.rows import ModelRows

__all__ = ["BASE_STEP_BYTES", "base_bytes"]

BASE_STEP_BYTES = 6 * 10**6  # the base memory of two processes that do the same work differs by less


def base_bytes(rows: ModelRows | None, *, warm_bytes: int, data_bytes: int, knowledge_bytes: int) -> int:
    """The base memory to plan with: what rows measured on this kind of machine and the data say, and steps above it.

    `warm_bytes` were measured in this process, when it had the data in memory and the knowledge not yet.
    """
    expected = data_bytes + (rows.private_base_bytes if rows is not None and rows.margin == 1 else 0)
    return expected + _in_steps(max(0, warm_bytes - expected)) + _in_steps(knowledge_bytes)


def _in_steps(num_bytes: int) -> int:
    return -(-num_bytes // BASE_STEP_BYTES) * BASE_STEP_BYTES
