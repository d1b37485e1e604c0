"""The coordinator's state directory: what marks it as one, where it usually is, and how much of the past it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from edge_client import durable

__all__ = ["RETAINED_MODELS", "STATE_KIND", "STATE_VERSION", "default_state_dir"]

STATE_KIND: Final = "coordinator"
STATE_VERSION: Final = 1
RETAINED_MODELS: Final = 10  # the newest models of each run; the best one and the exported ones stay as well


def default_state_dir() -> Path:
    """`$FEDFIT_STATE_DIR`, or the usual place of a coordinator's state."""
    return durable.default_state_dir(STATE_KIND, variable="FEDFIT_STATE_DIR")
