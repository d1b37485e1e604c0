"""Sizes and durations as people write them, and as they are shown."""

from __future__ import annotations

import re

from edge_client.errors import InputError

__all__ = ["format_bytes", "parse_bytes", "parse_duration"]

_SIZE = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DURATION = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Parse a size such as `512MB`, `1.5GiB` or `4096` into bytes."""
    match = re.fullmatch(r"\s*(\d{1,18})(?:\.(\d{1,18}))?\s*([A-Za-z]*)\s*", text)
    if not match or match[3].upper() not in _SIZE:
        raise InputError(f"expected a size such as 512MB or 1.5GiB, got {text[:80]!r}")
    whole, decimals = match[1], match[2] or ""
    exact: int = int(whole + decimals) * _SIZE[match[3].upper()] // 10 ** len(decimals)
    return exact


def format_bytes(count: int) -> str:
    """Format a size as `1.5 MB`, with at most three digits and decimal units."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def parse_duration(text: str) -> float:
    """Parse a duration such as `90s`, `30min` or `1.5h` into seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if not match or match[2] not in _DURATION:
        raise InputError(f"expected a duration such as 90s, 30min or 2h, got {text!r}")
    return float(match[1]) * _DURATION[match[2]]
