"""Logging of the two `start` commands: each line names the device, the run and the round that it concerns.

    plain   2026-11-17 06:12:01,052 INFO    [jetson-01 defects-3 12] worker 4711 started
    json    {"time": "...", "level": "info", "device": "jetson-01", "run": "defects-3", "round": 12, "message": ...}

A missing one is `-`, or null. A process sets its device, and how to look up its run and round, once; a line about
another device, run or round says so itself (`about`). Does not cover: a worker's log, which is in the folder of its
lease.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FORMATS", "Context", "about", "configure"]

FORMATS = ("plain", "json")


def _nothing() -> tuple[str, int]:
    return "", 0


@dataclass(slots=True)
class Context:
    """The device, run and round of all lines of this process that do not name others."""

    device: str = ""
    look: Callable[[], tuple[str, int]] = _nothing  # the run and the round in hand, when a line is written


def about(*, device: str | None = None, run: str | None = None, round: int | None = None) -> dict[str, object]:
    """The `extra` of a log line about another device, run or round: `log.info(..., extra=about(device=...))`."""
    fields = {"device": device, "run": run, "round": round}
    return {f"about_{key}": value for key, value in fields.items() if value is not None}


def configure(style: str, context: Context, *, level: int = logging.INFO) -> None:
    """Log to standard error from now on, in one of `FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json(context) if style == "json" else _Plain(context))
    logging.basicConfig(level=level, handlers=[handler])


class _About(logging.Formatter):
    def __init__(self, context: Context) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(where)s %(message)s")
        self._context = context

    def where(self, record: logging.LogRecord) -> tuple[str, str, int]:
        """The device, run and round of a log line; empty or 0 if there is none."""
        run, number = self._context.look()
        fields = record.__dict__
        device, run = fields.get("about_device", self._context.device), fields.get("about_run", run)
        return device, run, fields.get("about_round", number)


class _Plain(_About):
    def format(self, record: logging.LogRecord) -> str:
        device, run, number = self.where(record)
        record.where = f"[{device or '-'} {run or '-'} {number or '-'}]"
        return super().format(record)


class _Json(_About):
    def format(self, record: logging.LogRecord) -> str:
        device, run, number = self.where(record)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "device": device or None,
            "run": run or None,
            "round": number or None,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
