"""Text in aligned columns, for tables that people read in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

__all__ = ["align", "duration", "fold", "plain"]


def align(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """A table with padded columns; those in `right` are numbers."""
    cells = [[plain(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: list[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *(line(row) for row in cells[1:])])


_LEAST_FOLDED = 12


def fold(
    headers: Sequence[str], rows: Sequence[Sequence[object]], *, columns: int | None, texts: Mapping[int, int]
) -> str:
    """A table of at most `columns` characters, if its `texts` (place -> share of the room) can be broken into lines."""
    cells = [[plain(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    over = sum(widths) + 2 * (len(widths) - 1) - columns if columns else 0
    while over > 0:
        able = [i for i in texts if widths[i] > _LEAST_FOLDED]
        if not able:
            break
        widths[max(able, key=lambda i: widths[i] / texts[i])] -= 1
        over -= 1
    return align(headers, [line for row in cells[1:] for line in _broken(row, widths)])


def _broken(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """A row as lines whose cells are as narrow as words allow."""
    cells = [
        textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        for cell, width in zip(row, widths, strict=True)
    ]
    return [[cell[i] if i < len(cell) else "" for cell in cells] for i in range(max(map(len, cells)))]


def plain(cell: object) -> str:
    """One line without control characters: what devices say may not move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(cell).split()))


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
