"""Cost rows made by hand: a stem, three blocks and a head whose lines are small round numbers.

              parameters  largest  out   held  forward  backward   adding     evaluate
    stem               0        0   10      5       15         -        -           12
    block1           100       60   20     25       40  50 + 100   50 + 60          30
    block2           200      200   10     60       45  55 + 200   55 + 200         25
    block3           300      300    8     90       40  42 + 300   42 + 300         20
    head              40       40    2     95       12  14 +  40   14 +  40          5

Per sample, and what does not depend on samples; `held` from the first unit on. As the first of a group block2 holds 30,
needs 50 forward and 60 + 200 backward; behind a block the head needs 5 forward and 7 + 40 backward. Whatever a library
hides is 11 in all, and 1, 2, 3 until a block has been trained alone; a third number of samples takes 4 more in all, and
as much again until a block has been trained alone; a single sample at the end takes 6 more. Everything times `scale`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edge_client.planning.rows import Line, Lines, ModelRows, UnitRow

BLOCKS = ("block1", "block2", "block3")


def rows(*, scale: int = 1, units: bool = False, **changes: Any) -> ModelRows:
    """The rows above; with `units` also a mode that holds a tenth of the activations of blocks."""
    modes = {"plain": _plain(scale)}
    if units:
        modes["units"] = tuple(_recomputed(row) for row in modes["plain"])
    fields: dict[str, Any] = {
        "key": "0" * 64,
        "torch": "2",
        "machine": "m",
        "channels_last": False,
        "batches": (8, 16),
        "base_bytes": 1000,
        "model_bytes": 640 * scale,
        "hidden_bytes": 11 * scale,
        "hidden_size_bytes": 4 * scale,
        "hidden_rest_bytes": 6 * scale,
        "has_batchnorm": False,
        "has_batch_statistics": False,
        "min_batch": 1,
        "modes": modes,
    }
    return ModelRows(**fields | changes)


def _plain(scale: int) -> tuple[UnitRow, ...]:
    return (
        _unit(scale, "stem", "stem", (0, 0), 10, 5, 15, None, None, 12),
        _unit(scale, "block1", "block", (100, 60), 20, 25, 40, (50, 100), (50, 60), 30, hidden=1),
        _unit(scale, "block2", "block", (200, 200), 10, 60, 45, (55, 200), (55, 200), 25, hidden=2),
        _unit(scale, "block3", "block", (300, 300), 8, 90, 40, (42, 300), (42, 300), 20, hidden=3),
        _unit(scale, "head", "head", (40, 40), 2, 95, 12, (14, 40), (14, 40), 5),
    )


def _unit(
    scale: int,
    name: str,
    kind: str,
    parameters: tuple[int, int],
    out: int,
    held: int,
    forward: int,
    backward: tuple[int, int] | None,
    adding: tuple[int, int] | None,
    evaluate: int,
    *,
    hidden: int = 0,
) -> UnitRow:
    def lines(pair: tuple[int, int] | None) -> Lines:
        return () if pair is None else (_line(scale, *pair),)

    is_block = kind == "block"
    return UnitRow(
        name=name,
        kind=kind,
        parameter_bytes=scale * parameters[0],
        largest_bytes=scale * parameters[1],
        out_bytes=scale * out,
        held=_line(scale, held),
        forward=lines((forward, 0)),
        backward=lines(backward),
        adding=lines(adding),
        evaluate=lines((evaluate, 0)),
        forward_s=(float(forward), 0.0),
        backward_s=(2.0 * forward, 0.0),
        alone_held=_line(scale, 30),
        alone_forward=lines((50, 0)) if is_block else (),
        alone_backward=lines((60, parameters[0])) if is_block else (),
        alone_adding=lines((60, parameters[1])) if is_block else (),
        head_forward=lines((5, 0)) if is_block else (),
        head_backward=lines((7, 40)) if is_block else (),
        head_adding=lines((7, 40)) if is_block else (),
        hidden_bytes=scale * hidden,
        hidden_size_bytes=scale * hidden,
    )


def _line(scale: int, slope: float, constant: float = 0) -> Line:
    return scale * slope, scale * constant


def _recomputed(row: UnitRow) -> UnitRow:
    def tenth(lines: Lines) -> Lines:
        return tuple((slope / 10, constant) for slope, constant in lines)

    return replace(
        row,
        held=(row.held[0] / 10, row.held[1]),
        forward=tenth(row.forward),
        backward=tenth(row.backward),
        adding=tenth(row.adding),
        alone_held=(row.alone_held[0] / 10, row.alone_held[1]),
        alone_forward=tenth(row.alone_forward),
        alone_backward=tenth(row.alone_backward),
        alone_adding=tenth(row.alone_adding),
        head_forward=tenth(row.head_forward),
        head_backward=tenth(row.head_backward),
        head_adding=tenth(row.head_adding),
    )
