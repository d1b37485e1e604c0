"""A CSV file as a sample set: a header line, numbers in all columns but one, one sample per line.

Opening it reads every line once: the number of columns, every number and every label are checked, with the line named.
A column may tell whose a row is: it is the key of a partition then, and no part of the sample.
Kept are where each line begins and how long it is; rows are parsed again when they are read.
Does not cover: line breaks inside quotes, other separators than the comma.
"""

from __future__ import annotations

import array
import csv
import io
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client.data.arrays import Indices, Rows
from edge_client.data.labels import Labels
from edge_client.data.sample_set import Convert, Keys, find_key
from edge_client.errors import InputError

__all__ = ["CsvSet"]

_MAX_LINE_BYTES = 16 * 2**20
_MAX_NAMES = 10_000
_MAX_FLOAT = 3.4e38  # of float32
_BOM = b"\xef\xbb\xbf"


class CsvSet:
    """Samples of a CSV file."""

    def __init__(self, path: Path, shape: tuple[int, ...] | None = None, key: str | None = None) -> None:
        self.where = str(path)
        self._path = path
        self._starts = array.array("q")
        self._lengths = array.array("q")
        self._label_column = 0
        self._key_column: int | None = None
        self._left_out: list[int] = []  # columns that are no part of a sample, from the right
        self._key = key
        self._key_name = ""
        self._key_numbers: dict[str, int] = {}
        self._keys = array.array("q")
        self.keys: Keys = {}
        self.num_columns = 0  # of numbers
        try:
            with open(path, "rb") as file:
                self.labels = self._scan(file)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        self.shape: tuple[int, ...] | None = shape if shape is not None else (self.num_columns,)
        self.held_bytes = 8 * 3 * len(self._starts) + 8 * len(self._keys)  # with the labels

    def _scan(self, file: io.BufferedReader) -> Labels:
        lines = self._lines(file)
        self._read_header(next(lines, (1, 0, b""))[2])
        numbers: dict[str, int] = {}
        label_numbers = array.array("q")
        for line_number, start, line in lines:
            fields = self._fields(line, line_number)
            label_numbers.append(self._number_of(fields[self._label_column], numbers, line_number, "label"))
            if self._key_column is not None:
                key = fields[self._key_column]
                self._keys.append(self._number_of(key, self._key_numbers, line_number, self._key_name))
            self._numbers(self._values(fields), line_number)
            self._starts.append(start)
            self._lengths.append(len(line))
        names = sorted(numbers)
        order = np.empty(len(names), dtype=np.int64)
        for position, name in enumerate(names):
            order[numbers[name]] = position
        values = (
            order[np.frombuffer(label_numbers, dtype=np.int64)] if len(label_numbers) else np.zeros(0, dtype=np.int64)
        )
        return Labels(values=values, names=tuple(names), text=True)

    def _lines(self, file: io.BufferedReader) -> Iterator[tuple[int, int, bytes]]:
        """Number (from 1), position and bytes of each line that is not empty."""
        number, start = 0, 0
        while line := file.readline(_MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > _MAX_LINE_BYTES:
                raise InputError(f"{self._path}, line {number}: longer than {_MAX_LINE_BYTES} bytes; is it a CSV file?")
            if line.strip():
                yield number, start, line
            start += len(line)

    def _read_header(self, line: bytes) -> None:
        self._width = 0
        names = [name.strip() for name in self._fields(line.removeprefix(_BOM), 1)]
        if len(names) < 2:
            raise InputError(
                f"{self._path}, line 1: expected a header with at least two columns separated by commas, "
                f"got {line[:60].decode('utf-8', 'replace').strip() or 'nothing'!r}"
            )
        if all(_is_number(name) for name in names):
            raise InputError(f"{self._path}, line 1: expected the columns' names, got numbers; add a header line")
        labels = [number for number, name in enumerate(names) if name.lower() == "label"]
        if len(labels) > 1:
            raise InputError(f"{self._path}, line 1: expected one column 'label', got {len(labels)}; rename the others")
        if self._key is not None:
            self._key_column = self._find_key(names, self._key)
        others = [number for number in range(len(names)) if number != self._key_column]
        self._label_column = labels[0] if labels else others[-1]
        self._left_out = sorted({*range(len(names))} - {*others} | {self._label_column}, reverse=True)
        self._width = len(names)
        self.num_columns = len(names) - len(self._left_out)
        if not self.num_columns:
            raise InputError(f"{self._path}, line 1: expected a column of numbers beside label and key, got none")

    def _find_key(self, names: list[str], key: str) -> int:
        columns = {other: number for number, name in enumerate(names) for other in (name.lower(), name)}
        self._key_name = find_key(columns.keys() - {"label", "Label"}, key, f"{self._path}, line 1")
        self.keys = {self._key_name: self._key_texts}
        return columns[self._key_name]

    def _values(self, fields: list[str]) -> list[str]:
        """The columns that make a sample."""
        for column in self._left_out:
            del fields[column]
        return fields

    def _fields(self, line: bytes, number: int) -> list[str]:
        try:
            text = line.decode("utf-8").rstrip("\r\n")
            fields = next(csv.reader([text], strict=True), []) if '"' in text else text.split(",")
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"{self._path}, line {number}: cannot be read as CSV in UTF-8 ({error})") from error
        if self._width and len(fields) != self._width:
            raise InputError(
                f"{self._path}, line {number}: expected {self._width} columns as in the header, got {len(fields)}"
            )
        return fields

    def _numbers(self, fields: list[str], line_number: int) -> list[float]:
        try:
            numbers = [float(text) for text in fields]
            if all(-_MAX_FLOAT <= number <= _MAX_FLOAT for number in numbers):
                return numbers
        except ValueError:
            pass
        bad = next(text for text in fields if not _is_number(text))
        raise InputError(f"{self._path}, line {line_number}: expected a finite number, got {bad[:40]!r}")

    def _number_of(self, text: str, numbers: dict[str, int], line_number: int, column: str) -> int:
        text = text.strip()
        if not text or len(text) > 128:
            raise InputError(f"{self._path}, line {line_number}: expected a {column}, got {text[:40]!r}")
        if text not in numbers and len(numbers) >= _MAX_NAMES:
            raise InputError(
                f"{self._path}: the {column} column has more than {_MAX_NAMES} different values; name it {column}"
            )
        return numbers.setdefault(text, len(numbers))

    def _key_texts(self) -> NDArray[Any]:
        return np.array([*self._key_numbers], dtype=np.str_)[np.frombuffer(self._keys, dtype=np.int64)]

    def rows(self, indices: Indices, shape: tuple[int, ...]) -> tuple[Rows, Convert]:
        """Rows by position in the file."""
        if math.prod(shape) != self.num_columns:
            raise InputError(
                f"{self._path}: the model's input {list(shape)} needs {math.prod(shape)} columns of numbers, "
                f"the file has {self.num_columns}"
            )
        return _CsvRows(self, indices), _unchanged

    def read(self, fd: int, row: int) -> list[float]:
        """The numbers of one row."""
        line = os.pread(fd, self._lengths[row], self._starts[row])
        if len(line) != self._lengths[row]:
            raise InputError(f"{self._path} has changed while it was read; begin again")
        return self._numbers(self._values(self._fields(line, row + 2)), row + 2)

    def open(self) -> int:
        """A descriptor to read from."""
        try:
            return os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InputError(f"cannot read {self._path}: {error.strerror}") from error


def _unchanged(raw: NDArray[Any]) -> NDArray[np.float32]:
    return raw


def _is_number(text: str) -> bool:
    try:
        return abs(float(text)) <= _MAX_FLOAT
    except ValueError:
        return False


class _CsvRows:
    def __init__(self, table: CsvSet, chosen: Indices) -> None:
        self._table = table
        self._chosen = chosen
        self.held_bytes = chosen.nbytes

    def take(self, indices: Indices) -> NDArray[Any]:
        out = np.empty((len(indices), self._table.num_columns), dtype=np.float32)
        fd = self._table.open()
        try:
            for place, row in enumerate(self._chosen[indices]):
                out[place] = self._table.read(fd, int(row))
        finally:
            os.close(fd)
        return out
