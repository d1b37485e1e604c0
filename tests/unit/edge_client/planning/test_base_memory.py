"""The base memory that plans count with, for rows of a worker of 1000 bytes and steps of 6 MB."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_rows import rows

from edge_client.planning.base_memory import BASE_STEP_BYTES, base_bytes

STEP = BASE_STEP_BYTES


@pytest.mark.parametrize(
    ("warm_bytes", "expected"), [(0, 1500), (1500, 1500), (1501, 1500 + STEP), (1500 + STEP, 1500 + STEP)]
)
def test_what_a_process_takes_above_its_rows_and_data_counts_in_steps(warm_bytes: int, expected: int) -> None:
    """1000 bytes of rows and 500 of data are expected; one byte more is a whole step, and less changes nothing."""
    measured = replace(rows(), private_base_bytes=1000)
    assert base_bytes(measured, warm_bytes=warm_bytes, data_bytes=500, knowledge_bytes=0) == expected


def test_rows_of_another_machine_say_nothing_about_this_process() -> None:
    """Without rows, or with rows that need a margin, all but the data is counted in steps: 2 steps for 7 MB."""
    foreign = replace(rows(), private_base_bytes=1000, margin=1.15)
    for source in (None, foreign):
        assert base_bytes(source, warm_bytes=7 * 10**6, data_bytes=0, knowledge_bytes=0) == 2 * STEP


def test_knowledge_that_is_read_later_counts_in_steps_of_its_own() -> None:
    """One byte of it is a step, on top of the step that the process takes."""
    assert base_bytes(None, warm_bytes=1, data_bytes=0, knowledge_bytes=1) == 2 * STEP
