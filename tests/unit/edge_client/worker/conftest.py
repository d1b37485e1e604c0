"""One trained round that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_runs import fork_worker, make_work


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One round on the digits with SGD, evaluated before it was trained."""
    work = make_work(tmp_path_factory.mktemp("worker") / "w")
    assert fork_worker(work) == 0, (work / "stderr").read_text()
    return work
