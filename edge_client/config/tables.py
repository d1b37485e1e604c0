"""The files that people write: how they are read, and `device.toml`, what a device's owner allows.

Each is a tree of frozen dataclasses: types, ranges, defaults and help stand once, at the field, and serve the parser,
the errors and the documentation. Keys are written with dashes, sizes as `512MB` or `1.5GiB`, durations as `90s` or
`30min`. The schema of `run.toml` is in `run_file`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from edge_client import records
from edge_client.errors import InputError, PayloadError
from edge_client.records import Between, Count, Id, Matches, Positive, Text, is_id

__all__ = [
    "DataSection",
    "DescribedKey",
    "DeviceFile",
    "describe",
    "described",
    "format_bytes",
    "load_device_file",
    "parse_bytes",
    "parse_duration",
    "parse_table",
    "read_toml",
    "to_table",
]

T = TypeVar("T")

_SIZE = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_MAX_LABELS = 64
_MAX_LABEL_BYTES = 8192
_MAX_TASKS = 32
_DURATION = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """`512MB`, `1.5GiB` or `4096` as bytes."""
    match = re.fullmatch(r"\s*(\d{1,18})(?:\.(\d{1,18}))?\s*([A-Za-z]*)\s*", text)
    if not match or match[3].upper() not in _SIZE:
        raise InputError(f"expected a size such as 512MB or 1.5GiB, got {text[:80]!r}")
    whole, decimals = match[1], match[2] or ""
    exact: int = int(whole + decimals) * _SIZE[match[3].upper()] // 10 ** len(decimals)
    return exact


def format_bytes(count: int) -> str:
    """`1.5 MB`: three digits at most, decimal units as people expect on a network."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("unreachable")


def parse_duration(text: str) -> float:
    """`90s`, `30min` or `1.5h` as seconds."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    if not match or match[2] not in _DURATION:
        raise InputError(f"expected a duration such as 90s, 30min or 2h, got {text!r}")
    return float(match[1]) * _DURATION[match[2]]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Text with a unit becomes a number."""

    kind: str  # bytes | seconds


@dataclass(frozen=True, slots=True)
class _Auto:
    """The text `auto` stands for None: fedfit chooses."""


@dataclass(frozen=True, slots=True)
class _Rest:
    """Collects the keys of a table that the dataclass does not name: a method's parameters, a model's options."""


Bytes = Annotated[int, _Unit("bytes"), Between(0, 2**53)]
Seconds = Annotated[float, _Unit("seconds"), Between(0.001, 366 * 86400)]
Fraction = Annotated[float, Between(0, 1)]
Options = Annotated[Mapping[str, Any], _Rest()]


# keys of the files that this version does not serve: refused by name, so that nobody believes they have an effect
_NOT_YET: Mapping[str, Sequence[str]] = {
    "train": ("augment",),
    "limits": ("accelerator",),
}


def described(help_text: str, default: Any = dataclasses.MISSING) -> Any:
    """A key of a file: a dataclass field with its help, and its default unless it is required."""
    if default is dataclasses.MISSING:
        return field(metadata={"help": help_text})
    if isinstance(default, type) or callable(default):
        return field(default_factory=default, metadata={"help": help_text})
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    source: Annotated[str, Matches(r"(?s)[a-z0-9-]{0,32}(:.{0,2000})?")] = described(
        "digits, idx, npz, csv, image-folder, cifar10, cifar100, fashion-mnist or har; SOURCE:PATH is short for source "
        "and train; without it only tasks find the data",
        "",
    )
    train: Text = described("path of the training data", "")
    test: Text = described("path of the test data", "")
    test_fraction: Annotated[float, Between(0, 0.9)] = described(
        "part of the training data kept for tests, if no test", 0.2
    )
    partition: Text = described(
        "how a shared data set is divided among its devices: iid, dirichlet:ALPHA, balanced-dirichlet:ALPHA, "
        "pathological:LABELS, key, key:NAME or file:PATH",
        "",
    )
    part: tuple[Count, Positive] = described("which part of how many, such as [0, 4]", (0, 1))
    seed: Count = described("seed of the partition, the same on all its devices", 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsSection:
    memory: Annotated[int, _Auto(), _Unit("bytes"), Between(0, 2**53)] | None = described(
        "what a worker process may use; auto: from this device's free memory", None
    )
    disk: Bytes = described("what fedfit may keep on disk", 4 * 10**9)
    calibrate: bool = described(
        "whether this device may measure a model that it has not seen, once, beside its budget's plan; otherwise it "
        "plans with the coordinator's measurement",
        True,
    )
    reconnect: Annotated[float, _Unit("seconds"), Between(1, 3600)] = described(
        "longest wait before it tries to reach the broker again; waits begin below a second and double", 60.0
    )
    deploy: bool = described(
        "whether the coordinator may put a model here for this device's programs (STATE/deployed/current.onnx)", True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSection:
    metrics: bool = described("whether results on this device's test data go to the coordinator", True)
    class_statistics: bool = described("whether class means, and which classes there are, may leave", True)
    min_count: Annotated[int, Between(10, 10**9)] = described("samples that a class needs for its mean to leave", 32)
    clip: Annotated[float, Between(0, 10**6)] = described(
        "length that one sample's features or logits may have in a class mean; 0: any", 0.0
    )
    noise: Annotated[float, Between(0, 10**6)] = described(
        "Gaussian noise on class means, in units of what one sample can change in them; needs clip; 0: none", 0.0
    )
    epsilon: Annotated[float, Between(0, 10**6)] = described(
        "what all noisy class means together may cost, at a delta of 1e-5; then the device declines; needs noise; "
        "0: no bound",
        0.0,
    )
    features: bool = described("whether features of single samples of this device's data may leave", False)
    drafts: bool = described("whether its model's outputs for samples that the coordinator sent may leave", False)
    logs: Annotated[str, Matches(r"none|errors")] = described(
        "whether a failure's last log lines go to the coordinator", "errors"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFile:
    """A device: its data and its limits; no run can widen it."""

    data: DataSection | None = described("where the data is", None)
    rename: Mapping[str, Text] = described("this device's class name -> the run's", dict)
    labels: Mapping[str, Text] = described("labels by which a run may choose devices (devices.where)", dict)
    limits: LimitsSection = described("memory, disk and waiting", LimitsSection)
    share: ShareSection = described("what may leave the device beside updates", ShareSection)
    tasks: Mapping[Id, Text] = described(
        "the only code of yours that a run may name: NAME -> /path/FILE.py:OBJECT; empty: built-in models only", dict
    )


def load_device_file(path: Path) -> DeviceFile:
    """Read and check a device file; raises `InputError`."""
    device = parse_table(DeviceFile, read_toml(path), source=str(path))
    for name, place in device.tasks.items():
        if not is_id(name) or not re.fullmatch(r"/.+\.py:[A-Za-z_]\w*", place):
            raise InputError(
                f'{path}: tasks.{name}: expected NAME = "/path/FILE.py:OBJECT" with an absolute path, got {place!r}'
            )
    if device.share.noise > 0 and device.share.clip == 0:
        raise InputError(f"{path}: share.noise needs share.clip: without it one sample can change a mean without bound")
    if device.share.epsilon > 0 and device.share.noise == 0:
        raise InputError(f"{path}: share.epsilon needs share.noise: without it there is no cost to bound")
    if len(device.tasks) > _MAX_TASKS:
        raise InputError(f"{path}: tasks: expected at most {_MAX_TASKS}, got {len(device.tasks)}")
    label_bytes = len(json.dumps(dict(device.labels), ensure_ascii=False).encode())
    if len(device.labels) > _MAX_LABELS or label_bytes > _MAX_LABEL_BYTES:
        raise InputError(
            f"{path}: labels: expected at most {_MAX_LABELS} labels and {_MAX_LABEL_BYTES} bytes, "
            f"got {len(device.labels)} and {label_bytes}; they travel in one message"
        )
    return device


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; raises `InputError`."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from error


def parse_table(cls: type[T], table: Mapping[str, Any], *, source: str, section: str = "") -> T:
    """One table of a file as its dataclass; every problem names file, section and key."""
    hints = typing.get_type_hints(cls, include_extras=True)
    helps = {f.name: f.metadata.get("help", "") for f in dataclasses.fields(typing.cast(Any, cls))}
    rest = next((name for name, hint in hints.items() if _is_rest(hint)), None)
    values: dict[str, Any] = {rest: {}} if rest else {}
    for key, value in table.items():
        name = key.replace("-", "_")
        place = f"{section}.{key}" if section else key
        if name in values and name != rest:
            raise InputError(f"{source}: {place!r} stands there twice, with a dash and with an underscore")
        if name in hints and name != rest:
            values[name] = _value(hints[name], value, source, place, helps[name])
        elif rest:
            values[rest][name] = value
        elif name in _NOT_YET.get(section, ()):
            raise InputError(f"{source}: {place!r} is not served by this version of fedfit yet; remove it")
        else:
            raise InputError(f"{source}: unknown key {place!r}{_nearest(name, hints)}")
    for f in dataclasses.fields(typing.cast(Any, cls)):
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING:
            raise InputError(f"{source}: {section + '.' if section else ''}{f.name} is missing ({f.metadata['help']})")
    return cls(**values)


def to_table(record: Any) -> dict[str, Any]:
    """The table that `parse_table` would make this record of, with every default; what has no value is left out."""
    hints = typing.get_type_hints(type(record), include_extras=True)
    table: dict[str, Any] = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if _is_rest(hints[f.name]):
            table |= {key.replace("_", "-"): inner for key, inner in value.items()}
        elif dataclasses.is_dataclass(value):
            table[f.name.replace("_", "-")] = to_table(value)
        elif _table_item(hints[f.name]) is not None:
            table[f.name] = {key: to_table(inner) for key, inner in value.items()}
        elif value is not None:
            table[f.name.replace("_", "-")] = list(value) if isinstance(value, tuple) else value
    return table


def _is_rest(hint: Any) -> bool:
    return any(isinstance(extra, _Rest) for extra in getattr(hint, "__metadata__", ()))


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    import difflib  # only for a typo: it would cost every daemon 0.2 MB

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    keys = ", ".join(key.replace("_", "-") for key in known)
    return f"; did you mean {close[0].replace('_', '-')!r}?" if close else f"; known: {keys}"


def _value(hint: Any, value: Any, source: str, place: str, help_text: str) -> Any:
    hint = _without_none(hint)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, str) and "name" in typing.get_type_hints(hint):
            value = {"name": value}  # method = "fedavg" is short for method = { name = "fedavg" }
        if not isinstance(value, Mapping):
            raise InputError(f"{source}: {place}: expected a table, got {value!r}")
        return parse_table(typing.cast(type, hint), value, source=source, section=place)
    if (item := _table_item(hint)) is not None and isinstance(value, Mapping):
        return {key: _value(item, inner, source, f"{place}.{key}", help_text) for key, inner in value.items()}
    try:
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, _Auto) and value == "auto":
                return None
            if isinstance(extra, _Unit) and isinstance(value, str):
                value = parse_bytes(value) if extra.kind == "bytes" else parse_duration(value)
        return records.check_value(hint, value, place)
    except (InputError, PayloadError) as error:
        detail = error.detail if isinstance(error, PayloadError) else f"{place}: {error}"
        raise InputError(f"{source}: {detail} ({help_text})") from None


def _table_item(hint: Any) -> Any:
    """Of a table of tables, what each of them is; None for all else."""
    item = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
    return item if dataclasses.is_dataclass(item) else None


def _without_none(hint: Any) -> Any:
    """`X | None` as X."""
    inner = typing.get_args(hint)
    return next(a for a in inner if a is not type(None)) if type(None) in inner else hint


class DescribedKey(NamedTuple):
    """One key of a file, as the documentation shows it."""

    key: str
    type: str
    default: str
    range: str
    help: str


_TYPE_NAMES = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_NO_LIMIT = 2**53


def describe(cls: type, section: str = "") -> list[DescribedKey]:
    """Every key of a file in its order; a table comes before its own keys, which are written `table.key`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    rows: list[DescribedKey] = []
    for f in dataclasses.fields(typing.cast(Any, cls)):
        hint = _without_none(hints[f.name])
        key = f"{section}*" if _is_rest(hint) else section + f.name.replace("_", "-")
        default = _default_text(hint, f)
        if dataclasses.is_dataclass(hint):
            rows.append(DescribedKey(key, "table", default, "", f.metadata["help"]))
            rows += describe(typing.cast(type, hint), f"{key}.")
        elif (item := _table_item(hint)) is not None:
            rows.append(DescribedKey(key, _type_text(hint), default, "", f.metadata["help"]))
            rows += describe(typing.cast(type, item), f"{key}.NAME.")
        else:
            rows.append(DescribedKey(key, _type_text(hint), default, _range_text(hint), f.metadata["help"]))
    return rows


def _type_text(hint: Any) -> str:
    if _is_rest(hint):
        return "any"
    for extra in getattr(hint, "__metadata__", ()):
        if isinstance(extra, _Unit):
            return "size" if extra.kind == "bytes" else "duration"
    hint = _plain(hint)
    if _table_item(hint) is not None:
        return "table of tables"
    if typing.get_origin(hint) is Mapping:
        return f"table of {_type_text(typing.get_args(hint)[1])}"
    if typing.get_origin(hint) is tuple:
        return f"list of {_type_text(typing.get_args(hint)[0])}s"
    return _TYPE_NAMES[hint]


def _range_text(hint: Any) -> str:
    """The limits of a value, or of each item of a list."""
    if typing.get_origin(_plain(hint)) is tuple:
        return ", ".join(_range_text(item) for item in typing.get_args(_plain(hint)) if item is not Ellipsis)
    extras = getattr(hint, "__metadata__", ())
    unit = " s" if any(isinstance(e, _Unit) and e.kind == "seconds" for e in extras) else ""
    limits = (_limit_text(extra, unit) for extra in extras if isinstance(extra, (Between, Matches)))
    return ", ".join(text for text in limits if text)


def _limit_text(limit: Between | Matches, unit: str) -> str:
    if isinstance(limit, Between):
        high = "or more" if limit.high >= _NO_LIMIT else f"to {limit.high:.15g}{unit}"
        return f"{limit.low:.15g}{unit} {high}"
    if length := re.fullmatch(r"\(\?s\)\.\{(\d+),(\d+)\}", limit.pattern):
        return f"{length[1]} to {length[2]} characters"
    if re.fullmatch(r"[a-z0-9_-]+(\|[a-z0-9_-]+)*", limit.pattern):
        return " or ".join(f"`{word}`" for word in limit.pattern.split("|"))
    return "" if re.search(r"[|(]", limit.pattern) else f"`{limit.pattern}`"  # what is no range: the help tells


def _default_text(hint: Any, f: dataclasses.Field[Any]) -> str:
    if f.default is f.default_factory is dataclasses.MISSING:
        return "required"
    if f.default is dataclasses.MISSING or f.default is None or f.default == "":
        return ""
    if _type_text(hint) == "size":
        return f"`{format_bytes(f.default)}`"
    shown = json.dumps(f.default)
    return f"`{shown} s`" if _type_text(hint) == "duration" else f"`{shown}`"


def _plain(hint: Any) -> Any:
    """An annotated type without its annotations."""
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
