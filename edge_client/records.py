"""What flows between the parts of fedfit: frozen dataclasses, and their strict form as plain maps.

`to_map` makes plain dicts, lists and scalars (for msgpack and JSON); `from_map` takes such data from anywhere and
returns the record or raises `PayloadError`: exact keys, exact types (a bool is not an int), ranges from the
annotations, finite floats. A key that starts with `x-` is ignored, so that a newer peer may add one. A field that
earlier versions do not know is declared with `later`, which says how they stay able to read the record.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union

from edge_client.decoding import Between, Matches, MismatchError, decoder, fields_of
from edge_client.errors import PayloadError

__all__ = [
    "MATRIX_CLASSES",
    "Between",
    "Ceiling",
    "Count",
    "DeviceProfile",
    "Evaluation",
    "Fingerprint",
    "Hash",
    "Id",
    "InputSums",
    "Matches",
    "MemoryKind",
    "PartRef",
    "PlanRules",
    "Positive",
    "Report",
    "SliceText",
    "Text",
    "TrainingPlan",
    "WorkOrder",
    "check_value",
    "from_map",
    "is_id",
    "later",
    "to_map",
]

R = TypeVar("R")

_SCALARS = frozenset({str, int, float, bool, bytes, type(None)})

MATRIX_CLASSES = 64  # above so many classes a confusion matrix would be larger than many a model


Id = Annotated[str, Matches(r"[A-Za-z0-9_-]{1,64}")]  # device, run, lease: safe as a topic level and as a file name
Hash = Annotated[str, Matches(r"[0-9a-f]{64}")]  # SHA-256
Text = Annotated[str, Matches(r"(?s).{0,2000}")]  # for people
SliceText = Annotated[str, Matches(r"[A-Za-z0-9_.:/-]{1,64}")]  # a part of a model: `models.slicing`
Fingerprint = Annotated[str, Matches(r"(?s).{0,200}")]  # of an accelerator: equal ones allocate alike
MemoryKind = Annotated[str, Matches(r"|separate|unified")]  # of an accelerator; empty: there is none
Count = Annotated[int, Between(0, 2**53)]
Positive = Annotated[int, Between(1, 2**53)]


def later(default: Any, *, key: str = "") -> Any:
    """Declare a field that earlier versions do not know.

    It is left out of the map while it has its default, so that they read the record as before. With a `key` that starts
    with `x-` it is written under that key, which they ignore: for what must be sent to a peer of any version.
    """
    return dataclasses.field(default=default, metadata={"later": True, "key": key})


def is_id(text: str) -> bool:
    """Whether `text` may name a device, a run or a federation."""
    return re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """The properties and the budget of a device, as it reports them itself."""

    budget_bytes: Count  # a worker whose RSS stays below is inside of it
    memory_bytes: Count = 0
    cores: Count = 0
    kind: Annotated[str, Matches(r"[a-z0-9-]{1,32}")] = "host"
    machine: Annotated[str, Matches(r"(?s).{0,64}")] = ""
    private_budget_bytes: Count = later(0, key="x-private-budget")  # of a worker's private memory; 0: it counts RSS
    accelerator: Fingerprint = later("", key="x-accelerator")  # that it trains on; empty: the CPU
    accelerator_memory: MemoryKind = later("", key="x-accelerator-memory")  # separate: a second budget
    accelerator_bytes: Count = later(0, key="x-accelerator-budget")  # of separate memory, that a worker may use


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How a device trains inside its budget; part of the assignment, so that a repeat trains the same way."""

    slice: SliceText = "full"  # how much of the model; which part of it may change from round to round
    groups: tuple[tuple[Text, ...], ...] = ()  # blocks trained one group after another; none: all at once
    skipped: tuple[Text, ...] = ()  # first blocks that are never trained here; the stem then is not either
    microbatch: Positive
    recompute: Annotated[str, Matches(r"fused|units")] | None = None  # activations made again in backward
    channels_last: bool = False  # memory layout of images; part of the result's bits
    dtype: Annotated[str, Matches(r"fp32|bf16|fp16")] = "fp32"  # of activations; weights are always fp32
    buffered: bool = False  # outputs of the frozen units are kept on disk instead of computed for every batch
    num_models: Annotated[int, Between(1, 8)] = 1  # above 1: models that teach each other, for a device with surplus
    budget_bytes: Count  # RSS of the whole worker process; without file pages until it was carried out
    predicted_bytes: Count  # peak RSS of the whole worker process; the same
    training_bytes: Count = 0  # of these, what training adds to a warmed-up worker
    private_budget_bytes: Count = later(0, key="x-private-budget")  # of a worker's private memory; 0: made for RSS
    private_predicted_bytes: Count = later(0, key="x-private-predicted")  # peak of a worker's private memory
    spare_bytes: Count = later(0, key="x-spare")  # of what is predicted: freed memory that stays with the process
    accelerator: Fingerprint = later("", key="x-accelerator")  # that the plan was made for; empty: the CPU
    # of what torch reserves there, with context and libraries; 0: its memory is the host's, in whose sum it is
    accelerator_budget_bytes: Count = later(0, key="x-accelerator-budget")
    accelerator_predicted_bytes: Count = later(0, key="x-accelerator-predicted")

    def describe(self) -> str:
        """The plan in short, such as `full, microbatch 16` or `4 groups, microbatch 32, recompute`."""
        parts = [self.slice if self.slice != "full" or not self.groups else f"{len(self.groups)} groups"]
        if self.slice != "full" and self.groups:
            parts.append(f"{len(self.groups)} groups")
        parts += [f"skips {len(self.skipped)}"] if self.skipped else []
        parts.append(f"microbatch {self.microbatch}")
        parts += ["recompute"] if self.recompute else []
        parts += [self.dtype] if self.dtype != "fp32" else []
        parts += [f"{self.num_models} models"] if self.num_models > 1 else []
        parts += [f"on {self.accelerator.partition(',')[0]}"] if self.accelerator else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRules:
    """What a planner may choose for a device beside microbatch, recomputation and dtype."""

    groups: bool = False  # blocks may be trained group by group
    partial: bool = False  # first blocks that do not fit may stay untrained
    auxiliary: bool = False  # each group but the last has a head of its own instead of the model's
    max_models: int = 1  # models that a device with surplus memory trains side by side
    weight_copies: int = 0  # of all weights, that a device keeps while it trains
    step_copies: int = 0  # of one parameter, that a device makes after a pass
    fixed_bytes: int = 0  # at most, that a device keeps beside copies of all weights, whatever the model
    again: int = 0  # samples that go through the model once more in a step, unit by unit, when all gradients are there
    separate_gradients: bool = False  # the gradients of those are kept beside the others, and the pass is a whole one
    optimizers: int = 1  # that each have a state
    recomputes: bool = True  # units may be made again in backward; not where the method looks inside of them
    cost: str = "measured"  # or table-1: groups by the rule of FeDepth's authors, to compare results with theirs
    masked: bool = True  # an update lacks what its plan leaves untrained; otherwise that is sent as it came


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """A plan of so many `training_bytes` went over the budget on this device, though it was predicted to fit."""

    key: Hash  # of the model and how it is trained: the same in another run
    training_bytes: Positive
    budget_bytes: Count  # as it was then: with more it might have fitted
    memory: Annotated[str, Matches(r"host|accelerator")] = later("host")  # that was too small


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRef:
    """A blob that belongs to an assignment; equal keys in a round are one blob, fetched once and kept by its hash."""

    key: Annotated[str, Matches(r"[A-Za-z0-9_.:@/-]{1,160}")]
    sha256: Hash
    length: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A model's result on a device's own test data; its counts per class are the tensor `evaluation/confusion`.

    That is the matrix [C, C], rows the truth; above `MATRIX_CLASSES` classes [3, C]: true positives, false positives,
    false negatives.
    """

    num_samples: Count
    num_correct: Count
    loss_sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSums:
    """Of each channel of all training samples of a device, in float64; of a table, of each feature."""

    count: Positive  # values in a channel: samples times positions
    sums: tuple[float, ...]
    squares: tuple[float, ...]  # sums of squares


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker reports beside its tensors: the `meta` of an update's container."""

    num_samples: Count  # trained on; 0 when nothing was trained
    num_held: Count = 0  # training samples that the device has
    num_test: Count = 0  # test samples that it has
    steps: Count = 0
    payload: Annotated[str, Matches(r"params|delta|none")] = "none"  # what the `model/` tensors are
    plan: TrainingPlan | None = None
    peak_bytes: Count = 0  # VmHWM of the whole worker process; after a change of plan: since then
    base_bytes: Count = 0  # its RSS before it trained, warmed up
    private_peak_bytes: Count = later(0, key="x-private-peak")  # of anonymous and swapped memory; 0: not measured
    private_base_bytes: Count = later(0, key="x-private-base")  # the same before it trained
    # of what torch reserved on the accelerator, with context and libraries; 0: it trained on the CPU
    accelerator_peak_bytes: Count = later(0, key="x-accelerator-peak")
    accelerator_base_bytes: Count = later(0, key="x-accelerator-base")  # the same before it trained
    seconds: float = 0.0
    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict)
    versions: Mapping[str, Annotated[str, Matches(r"(?s).{0,64}")]] = dataclasses.field(default_factory=dict)
    evaluation: Evaluation | None = None
    # seconds of each phase of the work, in the order of their beginning (`worker.progress`); None of older clients
    phases: Mapping[str, float] | None = later(None, key="x-phases")
    input_sums: InputSums | None = later(None, key="x-input-sums")  # in round 0 of a run that normalises its inputs

    @property
    def memory(self) -> MemoryUse:
        """What the worker used, against its plan: private memory, or RSS where the client is older."""
        plan, is_private = (
            self.plan,
            self.private_peak_bytes > 0 and (self.plan is None or self.plan.private_budget_bytes > 0),
        )
        if is_private:
            return MemoryUse(
                peak_bytes=self.private_peak_bytes,
                base_bytes=self.private_base_bytes,
                predicted_bytes=plan.private_predicted_bytes if plan is not None else 0,
                budget_bytes=plan.private_budget_bytes if plan is not None else 0,
            )
        return MemoryUse(
            peak_bytes=self.peak_bytes,
            base_bytes=self.base_bytes,
            predicted_bytes=plan.predicted_bytes if plan is not None else 0,
            budget_bytes=plan.budget_bytes if plan is not None else 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """What a worker used, was predicted to use and was allowed to use; 0: not known."""

    peak_bytes: int
    base_bytes: int
    predicted_bytes: int
    budget_bytes: int

    @property
    def is_inside(self) -> bool:
        """Whether it stayed inside its budget; without one it did."""
        return not self.budget_bytes or self.peak_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkOrder:
    """`work/<lease>/order.json`: everything that a worker needs to know; paths are absolute and on this device.

    An order neither to train nor to evaluate asks for the plan alone: `parts` then has no `model`.
    """

    lease: Id
    run: Id
    round: Count
    num_rounds: Count
    train: bool
    evaluate: bool
    seed: Annotated[int, Between(0, 2**63 - 1)]
    learning_rate: float
    threads: Annotated[int, Between(1, 1024)] = 1
    slice: SliceText = "full"  # of the run's model; what `parts` holds
    plan: TrainingPlan | None = None  # none: the worker plans
    budget_bytes: Count  # of the worker's private memory
    training_budget_bytes: Count | None = None  # instead: of what training adds to a warmed-up worker
    ceiling_bytes: Count | None = None  # a plan whose training_bytes were these went over the budget here: plan less
    ceilings: Mapping[str, Count] = dataclasses.field(default_factory=dict)  # the same of earlier work: key -> bytes
    accelerator_ceilings: tuple[Ceiling, ...] = ()  # the same of the accelerator's memory, with their budgets
    replans: Count = 0  # workers of this lease that went over the budget before
    device: Id
    parts: Mapping[str, str]  # part key -> path of its blob
    device_file: Mapping[str, Any]  # the device's resolved device.toml
    ledger: str = ""  # file that says what this device has released with noise
    method_state: str  # folder whose `current` is read and whose `next` is written (`workers.settle_method_state`)
    phases: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds of what came before the worker
    starts_at: float | None = None  # the system's monotonic clock when its process was asked for


def to_map(record: Any) -> Any:
    """Plain dicts, lists and scalars of a record; the inverse of `from_map`."""
    if type(record) in _SCALARS:
        return record
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = ((field, getattr(record, field.name)) for field in fields_of(type(record)).values())
        return {field.key: to_map(value) for field, value in fields if not (field.later and value == field.default)}
    if isinstance(record, Mapping):
        return {key: to_map(value) for key, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [to_map(item) for item in record]
    return record


def from_map(cls: type[R], data: object, *, where: str = "") -> R:
    """Decode and check plain data from a peer or a file."""
    try:
        return typing.cast(R, decoder(typing.cast(Any, cls))(data))
    except (MismatchError, PayloadError, TypeError, ValueError):
        return _from_map(cls, data, where)


def _from_map(cls: type[R], data: object, where: str) -> R:
    """Decode the data field by field, for a message about the first field that does not fit."""
    where = where or cls.__name__.lower()
    if not isinstance(data, Mapping):
        raise PayloadError("malformed", f"{where}: expected a map, got {type(data).__name__}")
    known = fields_of(typing.cast(Any, cls))
    values = {}
    for key, value in data.items():
        if not isinstance(key, str):
            raise PayloadError("malformed", f"{where}: expected text keys, got {type(key).__name__}")
        if key in known:
            field = known[key]
            values[field.name] = check_value(field.annotation, value, f"{where}.{key}")
        elif not key.startswith("x-"):
            raise PayloadError("malformed", f"{where}: unknown key {key[:40]!r}")
    lacking = [field.name for field in known.values() if field.required and field.name not in values]
    if lacking:
        raise PayloadError("malformed", f"{where}: missing {', '.join(lacking)}")
    return cls(**values)


def check_value(annotation: Any, value: object, where: str) -> Any:
    """`value` as the annotated type, or a `PayloadError`; what `from_map` does for one field."""
    if typing.get_origin(annotation) is Annotated:
        base, *limits = typing.get_args(annotation)
        checked = check_value(base, value, where)
        for limit in limits:
            _check_limit(limit, checked, where)
        return checked
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = (a for a in typing.get_args(annotation) if a is not type(None))
        return check_value(inner, value, where)
    if origin is tuple:
        return _check_tuple(typing.get_args(annotation), value, where)
    if origin in (dict, Mapping):
        return _check_mapping(typing.get_args(annotation)[1], value, where)
    if annotation is Any:
        return value
    if dataclasses.is_dataclass(annotation):
        return _from_map(typing.cast(type, annotation), value, where)
    return _check_scalar(annotation, value, where)


def _check_limit(limit: object, value: Any, where: str) -> None:
    if isinstance(limit, Between) and not limit.low <= value <= limit.high:
        raise PayloadError("range", f"{where}: expected {limit.low:.16g} to {limit.high:.16g}, got {value!r}")
    if isinstance(limit, Matches) and not re.fullmatch(limit.pattern, value):
        raise PayloadError("malformed", f"{where}: {value[:80]!r} does not match {limit.pattern}")


def _check_tuple(items: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise PayloadError("malformed", f"{where}: expected a list, got {type(value).__name__}")
    if len(items) == 2 and items[1] is Ellipsis:
        return tuple(check_value(items[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(items):
        raise PayloadError("malformed", f"{where}: expected {len(items)} items, got {len(value)}")
    return tuple(check_value(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(items, value, strict=True)))


def _check_mapping(item: Any, value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise PayloadError("malformed", f"{where}: expected a map with text keys, got {type(value).__name__}")
    return {key: check_value(item, v, f"{where}.{key[:40]}") for key, v in value.items()}


def _check_scalar(annotation: type, value: object, where: str) -> Any:
    if annotation is float and type(value) in (int, float):
        number = float(typing.cast(float, value)) if abs(typing.cast(float, value)) < 1e300 else math.nan
        if not math.isfinite(number):
            raise PayloadError("not_finite", f"{where}: expected a finite number, got {value!r:.40}")
        return number
    if type(value) is not annotation:
        raise PayloadError("malformed", f"{where}: expected {annotation.__name__}, got {type(value).__name__}")
    return value
