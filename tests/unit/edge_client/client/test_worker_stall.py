"""When a worker counts as one that hangs."""

from __future__ import annotations

from edge_client.client.worker_stall import StallWatch


class _Idle:
    """A worker whose lines and CPU time the test sets."""

    def __init__(self) -> None:
        self.pid, self.num_lines, self.cpu_s = 5, 0, 0.0

    def cpu_seconds(self) -> float | None:
        return self.cpu_s


def test_a_worker_hangs_that_says_nothing_and_uses_no_time_for_ten_minutes() -> None:
    """A line at 300 s and one CPU second at 600 s begin the ten minutes again; a new worker begins its own."""
    stall, worker = StallWatch(), _Idle()
    moments = {300.0: (1, 0.0), 600.0: (1, 1.0), 1100.0: (1, 1.5), 1199.0: (1, 1.5), 1210.0: (1, 1.5), 1230.0: (1, 1.6)}
    stalled = {0.0: stall.has_stalled(worker, 0.0)}
    for now, (worker.num_lines, worker.cpu_s) in moments.items():
        stalled[now] = stall.has_stalled(worker, now)
    assert [now for now, has_stalled in stalled.items() if has_stalled] == [1210.0]
    worker.pid = 6
    assert not stall.has_stalled(worker, 5000.0)
