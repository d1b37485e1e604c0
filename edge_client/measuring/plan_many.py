"""The plans of many models for one device, as a table: what `edge-client plan --models` prints.

Does not cover: one plan (`plan_from_options`), the models that patterns stand for (`models.library`).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

from edge_client.config.quantities import format_bytes
from edge_client.errors import FedfitError
from edge_client.measuring import plan_from_options
from edge_client.models import library

__all__ = ["describe", "plan_all"]


def plan_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model, as soon as it is known; one that does not fit, or cannot be built, says why."""
    for name in library.expand(options.models):
        one = copy.copy(options)
        one.model = name
        try:
            _, choice = plan_from_options.find_plan(one)
        except FedfitError as error:
            yield {"model": name, "fits": False, "reason": str(error)}
        else:
            yield {"model": name, **plan_from_options.to_json(choice), "plan": choice.plan.describe()}


def describe(row: dict[str, Any], width: int) -> str:
    """One row of the table."""
    if not row["fits"]:
        return f"{row['model']:<{width}}  no    {row['reason']}"
    training = format_bytes(row["predicted_training_bytes"])
    return f"{row['model']:<{width}}  yes   {training:>9}  {row['relative_time']:>5.2f}  {row['plan']}"
