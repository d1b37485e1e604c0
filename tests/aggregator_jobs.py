"""The aggregator's jobs in the process of the test, through the codec of its pipe."""

from __future__ import annotations

import json
from typing import Any

from coordinator.aggregation import process
from coordinator.aggregation.jobs import answer_line

__all__ = ["do_job"]


def do_job(job: dict[str, Any]) -> dict[str, Any]:
    """The answer as it travels; `job` as it travels, with any number."""
    answer: dict[str, Any] = json.loads(answer_line(json.dumps({"id": 0, **job}), process.do))
    return answer
