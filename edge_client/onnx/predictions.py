"""Writes a model's predictions into a file for people (.csv) or programs (.npz)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client import durable
from edge_client.errors import InputError

__all__ = ["check_out", "write_predictions"]

_SUFFIXES = (".csv", ".npz")


def check_out(path: Path | None) -> None:
    """Check the file name before the work; raises `InputError` for another suffix."""
    if path is not None and path.suffix not in _SUFFIXES:
        raise InputError(f"--out: expected a file that ends with {' or '.join(_SUFFIXES)}, got {str(path)!r}")


def write_predictions(
    path: Path,
    logits: NDArray[np.float32],
    labels: NDArray[np.int64] | None,
    classes: Sequence[str] = (),
) -> None:
    """`sample,prediction,label` per line, by the names of the classes where there are any; or arrays and the logits."""
    answers = logits.argmax(axis=1)
    with durable.disk_errors(f"writing {path}"):
        if path.suffix == ".npz":
            known: dict[str, Any] = {} if labels is None else {"labels": labels}
            named: dict[str, Any] = {"classes": np.array(classes)} if classes else {}
            np.savez(path, logits=logits, predictions=answers, **known, **named)
            return
        columns = [range(len(answers)), _texts(answers, classes)]
        columns += [_texts(labels, classes)] if labels is not None else []
        head = "sample,prediction" + ("" if labels is None else ",label")
        text = "".join(f"{','.join(map(str, row))}\n" for row in zip(*columns, strict=True))
        path.write_text(f"{head}\n{text}", encoding="utf-8")


def _texts(numbers: NDArray[np.int64], classes: Sequence[str]) -> list[str]:
    return [_quoted(classes[number]) if classes else str(number) for number in numbers.tolist()]


def _quoted(text: str) -> str:
    """As CSV wants it."""
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"\r\n') else text
