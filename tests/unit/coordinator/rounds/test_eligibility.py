"""Which devices a run may ask."""

from __future__ import annotations

import pytest
from rows import digest, run_file

from coordinator.rounds.eligibility import obstacle
from edge_client.config.run_file import RunFile


def _task_run() -> RunFile:
    return run_file(model=None, task={"name": "defects", "sha256": digest("source")})


def test_a_run_without_conditions_asks_everybody() -> None:
    """No labels, no tasks."""
    assert obstacle(run_file(), labels={}, tasks={}) is None


@pytest.mark.parametrize(
    ("labels", "detail"),
    [
        ({"line": "a", "site": "x"}, None),
        ({"line": "b", "site": "x"}, "the run wants line=a, the device has line=b"),
        ({"site": "x"}, "the run wants line=a, the device has no label 'line'"),
    ],
)
def test_all_labels_of_where_must_match(labels: dict[str, str], detail: str | None) -> None:
    """A device needs line=a and site=x."""
    found = obstacle(run_file(devices={"where": ["line=a", "site=x"]}), labels=labels, tasks={})
    assert (found and found.detail) == detail


def test_a_task_must_be_allowed_and_the_same_file() -> None:
    """The hash that the device told in its hello is compared with the run's."""
    file = _task_run()
    missing = obstacle(file, labels={}, tasks={})
    assert missing is not None
    assert missing.code == "task_missing"
    differs = obstacle(file, labels={}, tasks={"defects": digest("another")})
    assert differs is not None
    assert differs.code == "task_differs"
    assert digest("another")[:12] in differs.detail
    assert digest("source")[:12] in differs.detail
    assert obstacle(file, labels={}, tasks={"defects": digest("source")}) is None
