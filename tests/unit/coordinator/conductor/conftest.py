"""A bench for each test of a part of the conductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conductor_bench import Bench


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    """Makes the bench of the test, with these answers of the aggregator by the name of a job."""
    benches: list[Bench] = []

    def make(**answers: Any) -> Bench:
        benches.append(Bench(tmp_path, answers))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()
