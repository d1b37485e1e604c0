"""Reads the batches of CIFAR's Python version without unpickling: a dict of texts, lists and an array of bytes.

A pickle is a program; this is an interpreter for the few of its steps that such a file needs (protocols 2 to 4, as
Python 2 and 3 write them). The only names it knows are those with which numpy describes an array of bytes, and it calls
none of them: an array becomes a note of where in the file its bytes are. Every other step, name or form is refused.
Does not cover: pickles of anything else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from edge_client.errors import InputError

__all__ = ["PickledArray", "read_batch"]

_MAX_STEPS = 2_000_000  # a batch has some 50,000, CIFAR-100's training file 300,000
_MAX_TEXT_BYTES = 1024
_MAX_FILE_BYTES = 4 * 10**9
_RECONSTRUCT = (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"))
_NDARRAY, _DTYPE = ("numpy", "ndarray"), ("numpy", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledArray:
    """An array of bytes inside the file."""

    shape: tuple[int, ...]
    offset: int


class _Refused(Exception):
    """A step that no batch has."""


@dataclass(frozen=True, slots=True)
class _Bytes:
    """A string of bytes: short ones may be texts, all of them stay in the file."""

    offset: int
    length: int
    text: str | None


@dataclass(frozen=True, slots=True)
class _Name:
    """What a pickle calls: noted, never looked up."""

    pair: tuple[str, str]


@dataclass(slots=True)
class _Array:
    """What numpy's `_reconstruct` would make; its contents come later."""

    contents: PickledArray | None = None


class _ByteType:
    """numpy's dtype of one unsigned byte."""


def read_batch(path: Path) -> dict[str, object]:
    """The dict of a batch by its keys: texts, numbers, lists, `PickledArray`; raises `InputError` for anything else."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if size > _MAX_FILE_BYTES:
                raise _Refused(f"{size} bytes, at most {_MAX_FILE_BYTES} were expected")
            return _Machine(file, size).run()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except _Refused as error:
        raise InputError(f"{path}: expected a batch of CIFAR's Python version: {error}; fetch it again") from error


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._stack: list[Any] = []
        self._marks: list[int] = []  # how high the stack was at each step that begins something
        self._memo: dict[int, Any] = {}

    def run(self) -> dict[str, object]:
        """All steps, to the last one."""
        for _ in range(_MAX_STEPS):
            code = self._read(1)
            if code == b".":
                return self._result()
            step = _STEPS.get(code)
            if step is None:
                raise _Refused(f"step {code!r} at byte {self._file.tell() - 1} makes something that no batch has")
            step(self)
        raise _Refused(f"more than {_MAX_STEPS} steps")

    def _result(self) -> dict[str, object]:
        batch = self.pop()
        if not isinstance(batch, dict):
            raise _Refused("it holds no dict")
        return {_text(key): _finished(value) for key, value in batch.items()}

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise _Refused("it ends too early")
        return data

    def _number(self, form: str) -> int:
        return int(struct.unpack(f"<{form}", self._read(struct.calcsize(form)))[0])

    def pop(self) -> Any:
        """The top of the stack."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise _Refused("a step has nothing to work on")
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind):
            raise _Refused(f"expected a {kind.__name__.strip('_').lower()} at byte {self._file.tell()}")
        return self._stack[-1]

    def _to_mark(self) -> list[Any]:
        if not self._marks:
            raise _Refused("a step has no beginning")
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def protocol(self) -> None:
        version = self._number("B")
        if not 2 <= version <= 4:
            raise _Refused(f"protocol {version}, 2 to 4 are known")

    def skip(self, size: int) -> None:
        self._read(size)

    def begin(self) -> None:
        self._marks.append(len(self._stack))

    def push(self, value: object) -> None:
        self._stack.append(value)

    def new(self, kind: Callable[[], object]) -> None:
        self._stack.append(kind())

    def integer(self, form: str) -> None:
        self._stack.append(self._number(form))

    def string(self, form: str) -> None:
        """Bytes, or a text of Python 2."""
        length, start = self._number(form), self._file.tell()
        if not 0 <= length <= self._size - start:
            raise _Refused("it ends too early")
        text = self._read(length).decode("latin-1") if length <= _MAX_TEXT_BYTES else None
        self._file.seek(start + length)
        self._stack.append(_Bytes(start, length, text))

    def unicode(self, form: str) -> None:
        length = self._number(form)
        if length > _MAX_TEXT_BYTES:
            raise _Refused(f"a text of {length} bytes")
        try:
            self._stack.append(self._read(length).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _Refused("a text that is not UTF-8") from error

    def remember(self, form: str) -> None:
        place = self._number(form) if form else len(self._memo)
        self._memo[place] = self._top(object)

    def recall(self, form: str) -> None:
        place = self._number(form)
        if place not in self._memo:
            raise _Refused("it goes back to something that is not there")
        self._stack.append(self._memo[place])

    def tuple_of(self, count: int | None) -> None:
        items = self._to_mark() if count is None else [self.pop() for _ in range(count)][::-1]
        self._stack.append(tuple(items))

    def append(self, many: bool) -> None:
        items = self._to_mark() if many else [self.pop()]
        self._top(list).extend(items)

    def set_items(self, many: bool) -> None:
        items = self._to_mark() if many else [self.pop(), self.pop()][::-1]
        if len(items) % 2:
            raise _Refused("a key without a value")
        self._top(dict).update({_text(key): value for key, value in zip(items[::2], items[1::2], strict=True)})

    def name(self) -> None:
        """A name as two lines."""
        lines = [self._file.readline(_MAX_TEXT_BYTES).decode("latin-1").rstrip("\n") for _ in range(2)]
        self._stack.append(_known(lines[0], lines[1]))

    def name_from_stack(self) -> None:
        attribute, module = self.pop(), self.pop()
        self._stack.append(_known(_text(module), _text(attribute)))

    def call(self) -> None:
        """numpy's two calls: an empty array, and the type of bytes."""
        arguments, called = self.pop(), self.pop()
        pair = called.pair if isinstance(called, _Name) else None
        if pair in _RECONSTRUCT and isinstance(arguments, tuple) and arguments[:1] == (_Name(_NDARRAY),):
            self._stack.append(_Array())
        elif pair == _DTYPE and isinstance(arguments, tuple) and arguments and _text(arguments[0]) in ("u1", "|u1"):
            self._stack.append(_ByteType())
        else:
            raise _Refused("it calls something else than numpy's array of bytes")

    def fill(self) -> None:
        """An array gets its shape and its bytes; that of the type of bytes is known."""
        state = self.pop()
        if not isinstance(state, tuple):
            raise _Refused("an object without a state")
        if self._stack and isinstance(self._stack[-1], _ByteType):
            return
        array = self._top(_Array)
        array.contents = _contents(state)


def _known(module: str, attribute: str) -> _Name:
    if (module, attribute) not in (*_RECONSTRUCT, _NDARRAY, _DTYPE):
        raise _Refused(f"it names {f'{module}.{attribute}'[:80]!r}, which no batch needs")
    return _Name((module, attribute))


def _contents(state: tuple[Any, ...]) -> PickledArray:
    """(version, shape, type, columns first, bytes) of an array; the first pickles had no version."""
    shape, kind, fortran, data = state[-4:] if len(state) in (4, 5) else (None,) * 4
    fits = isinstance(shape, tuple) and all(type(size) is int and 0 <= size < 2**31 for size in shape)
    if not fits or not isinstance(kind, _ByteType) or fortran not in (0, False) or not isinstance(data, _Bytes):
        raise _Refused("an array that is not of bytes in rows")
    assert isinstance(shape, tuple)
    if math.prod(shape) != data.length:
        raise _Refused(f"an array of shape {shape} in {data.length} bytes")
    return PickledArray(shape=shape, offset=data.offset)


def _text(value: object) -> str:
    text = value.text if isinstance(value, _Bytes) else value
    if not isinstance(text, str):
        raise _Refused("something else where a text was expected")
    return text


def _finished(value: object) -> object:
    if isinstance(value, _Bytes):
        return _text(value)
    if isinstance(value, _Array) and value.contents is None:
        raise _Refused("an array without contents")
    return value.contents if isinstance(value, _Array) else value


_STEPS: Mapping[bytes, Callable[[_Machine], None]] = {
    b"\x80": _Machine.protocol,
    b"\x95": partial(_Machine.skip, size=8),  # the length of what follows
    b"(": _Machine.begin,
    b"N": partial(_Machine.push, value=None),
    b"\x88": partial(_Machine.push, value=True),
    b"\x89": partial(_Machine.push, value=False),
    b")": partial(_Machine.push, value=()),
    b"]": partial(_Machine.new, kind=list),
    b"}": partial(_Machine.new, kind=dict),
    b"J": partial(_Machine.integer, form="i"),
    b"K": partial(_Machine.integer, form="B"),
    b"M": partial(_Machine.integer, form="H"),
    b"U": partial(_Machine.string, form="B"),
    b"T": partial(_Machine.string, form="i"),
    b"C": partial(_Machine.string, form="B"),
    b"B": partial(_Machine.string, form="I"),
    b"\x8e": partial(_Machine.string, form="Q"),
    b"X": partial(_Machine.unicode, form="I"),
    b"\x8c": partial(_Machine.unicode, form="B"),
    b"q": partial(_Machine.remember, form="B"),
    b"r": partial(_Machine.remember, form="I"),
    b"\x94": partial(_Machine.remember, form=""),
    b"h": partial(_Machine.recall, form="B"),
    b"j": partial(_Machine.recall, form="I"),
    b"\x85": partial(_Machine.tuple_of, count=1),
    b"\x86": partial(_Machine.tuple_of, count=2),
    b"\x87": partial(_Machine.tuple_of, count=3),
    b"t": partial(_Machine.tuple_of, count=None),
    b"a": partial(_Machine.append, many=False),
    b"e": partial(_Machine.append, many=True),
    b"s": partial(_Machine.set_items, many=False),
    b"u": partial(_Machine.set_items, many=True),
    b"c": _Machine.name,
    b"\x93": _Machine.name_from_stack,
    b"R": _Machine.call,
    b"b": _Machine.fill,
}
