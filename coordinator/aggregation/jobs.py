"""The jobs of the coordinator's child processes and their answers: a record each, and their form on a pipe.

The aggregator (`coordinator.aggregation.process`) does all jobs except two: `coordinator.aggregation.export_job` does
`ExportJob`, and a worker of a simulation does `WorkJob`. Every job has one type of answer, which the table `_KINDS`
lists, or is answered with a `Failure`. All paths are absolute.

    to the child      {"id": 7, "job": "encode", "run": {...}, "model": "/...", "out": "/..."}
    from the child    {"id": 7, "ok": true, "sha256": "...", "length": 1234}
                      {"id": 7, "ok": false, "code": "disk_full", "detail": "..."}

Covers: the records and their JSON lines, for both ends of the pipe. Parent and child are of one version, so these lines
may change with it. Does not cover: the processes (`job_child`). Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from coordinator.results.similarity_record import Findings
from edge_client import records
from edge_client.config.run_file import RunFile
from edge_client.errors import (
    DiskFullError,
    FedfitError,
    InputError,
    MachineError,
    NoSuchNameError,
    PayloadError,
)
from edge_client.knowledge.schema import Limits
from edge_client.methods.base import LeftOut
from edge_client.onnx.file import Facts
from edge_client.planning.rows import ModelRows
from edge_client.records import Between, Count, Hash, Positive

__all__ = [
    "AnswerLine",
    "CalibrateJob",
    "Calibration",
    "CheckJob",
    "CheckedUpdate",
    "EncodeJob",
    "EvaluateJob",
    "ExportJob",
    "ExportedModel",
    "Failure",
    "FoldJob",
    "FoldedModel",
    "InitJob",
    "Job",
    "NormaliseJob",
    "ProbeJob",
    "ProbedUpdate",
    "QuantizationLoss",
    "ServerEvaluation",
    "SliceEvaluation",
    "StudyJob",
    "StudyStarted",
    "StudyTimes",
    "TellJob",
    "UpdateRef",
    "WorkJob",
    "WorkerExit",
    "WrittenFile",
    "answer_line",
    "encode_job",
    "is_small",
    "name_of",
    "read_answer",
]

A = TypeVar("A")

_CODES: tuple[tuple[type[FedfitError], str], ...] = (  # a subclass stands before its base
    (DiskFullError, "disk_full"),
    (MachineError, "machine"),
    (NoSuchNameError, "unknown_name"),
    (InputError, "input"),
    (FedfitError, "failed"),
)


class Job(Generic[A]):
    """Something that a child process does; `A` is the type of its answer."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a job was refused or did not work."""

    code: str  # of a `PayloadError`, one of `_CODES`, or `crashed`
    detail: str

    @classmethod
    def of(cls, error: FedfitError) -> Failure:
        """The failure that an error of the child stands for."""
        if isinstance(error, PayloadError):
            return cls(code=error.code, detail=error.detail)
        return cls(code=next(code for kind, code in _CODES if isinstance(error, kind)), detail=str(error))

    def error(self) -> FedfitError:
        """The error to raise in the parent; `MachineError` for a code that stands for no class of errors."""
        kinds = {code: kind for kind, code in _CODES if kind is not FedfitError}
        return kinds.get(self.code, MachineError)(self.detail)


# answers


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """The container that a job has written at its `out`."""

    sha256: Hash
    length: Positive


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the units of each slice cost; empty if only the devices can measure it."""

    rows: Mapping[str, ModelRows]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyStarted:
    """The study goes on in the background; the fold of the next round waits for its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedUpdate:
    """An update whose values may be used."""

    norm: float  # of its delta


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyTimes:
    """When the study of a version ran, and how long the fold waited for it."""

    began_s: float  # since the epoch
    ended_s: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedModel(WrittenFile):
    """The next model of a run."""

    left_out: tuple[LeftOut, ...] = ()  # knowledge that could not be used, and why
    study: StudyTimes | None = None  # None if the method makes nothing beside the rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceEvaluation:
    """The result of one slice on the server's test data."""

    slice: records.SliceText
    num_samples: Count
    num_correct: Count
    loss_sum: float
    confusion: tuple[int, ...]  # row by row, as `records.Evaluation` describes the matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvaluation:
    """The results of all slices of a run."""

    results: tuple[SliceEvaluation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationLoss:
    """The accuracy of an exported model before and after quantization to int8, on the same samples."""

    data: str
    num_samples: Count
    fp32_bytes: Count
    fp32_accuracy: float
    accuracy: float
    accuracy_lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel(Facts):
    """An ONNX file that was written and compared with torch."""

    onnx: str  # its path
    onnx_sha256: Hash
    bytes: Positive
    max_difference: float  # between torch's outputs and onnxruntime's
    largest_output: float
    relative_difference: float
    int8: QuantizationLoss | None = None  # None without int8, or without test data


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """How a worker process with this assignment alone would have ended."""

    code: int


# jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class InitJob(Job[WrittenFile]):
    """Make the first model of a run and its method's tensors: functions of the seed, or taken from another run."""

    run: RunFile
    task: str | None = None  # path of the task's source
    start: str | None = None  # path of the model whose tensors are taken instead of random ones
    start_run: RunFile | None = None  # the run which that model belongs to
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateJob(Job[Calibration]):
    """Measure what a run's model costs, so that devices of this machine's kind need not (`measuring.calibration`)."""

    run: RunFile
    task: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeJob(Job[WrittenFile]):
    """Encode a slice of a model as it travels to the devices."""

    run: RunFile
    task: str | None = None
    model: str
    slice: records.SliceText = "full"
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellJob(Job[WrittenFile]):
    """Write the knowledge that the devices of a slice, or one device, get before a round."""

    run: RunFile
    model: str
    slice: records.SliceText = "full"
    device: str = ""
    public: bool = False  # only the shared samples
    round: Count
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyJob(Job[StudyStarted]):
    """Start the study of a version, which the method makes while devices train the next round."""

    run: RunFile
    model: str
    version: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckJob(Job[CheckedUpdate]):
    """Look at every value of an update whose header was accepted."""

    base: str
    update: str
    max_norm: Annotated[float, Between(0, 1e300)] | None = None
    max_ratio: Annotated[float, Between(0, 1e300)] | None = None  # without max_norm: times (norm of the base + 1)
    knowledge: Limits | None = None  # the limits of knowledge beside the model; None: not checked
    codec: str = "fp32"  # of the run
    max_passes: Positive = 1  # forward passes of one step; a counter of batches grows by one in each
    round: Count | None = None  # for fault points that name one


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRef:
    """An update of the frozen set."""

    device: records.Id
    path: str
    num_samples: Count
    slice: records.SliceText = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldJob(Job[FoldedModel]):
    """Make the next model out of the frozen set."""

    run: RunFile
    task: str | None = None
    round: Count
    model: str
    base: str  # the model as it was sent; deltas are added to `model` itself, see `coordinator/aggregation/frozen.py`
    updates: tuple[UpdateRef, ...]
    num_devices: Count = 0  # of the run: devices that could be chosen for this round, or ever were
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NormaliseJob(Job[FoldedModel]):
    """Put the mean and the scale of the devices' inputs into the first model of a run."""

    model: str
    sums: tuple[records.InputSums, ...]
    weights: tuple[float, ...]  # of each device, 0 to 1
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateJob(Job[ServerEvaluation]):
    """Evaluate a model on test data of the server."""

    run: RunFile
    task: str | None = None
    model: str
    data: str  # path of an npz file
    round: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedUpdate:
    """An update of the frozen set whose device's model is compared with others."""

    device: records.Id
    path: str
    slice: records.SliceText = "full"
    method_state: str | None = None  # of a simulated device: the folder of the tensors that never leave it


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob(Job[Findings]):
    """Compare the models that devices sent, on test data of the server."""

    run: RunFile
    task: str | None = None
    round: Count
    model: str  # the model that was folded out of the updates
    base: str  # the model that their deltas belong to
    updates: tuple[ProbedUpdate, ...]
    data: str  # path of an npz file


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob(Job[ExportedModel]):
    """Write a slice of a run's model as an ONNX file."""

    run: RunFile
    name: str  # of the run, for people
    version: Count
    task: str | None = None  # path of the task's source
    model: str  # path of the container
    sha256: str
    architecture: records.SliceText
    input: tuple[int, ...] | None = None  # shape of a sample, if the task does not name it
    int8: bool = False
    data: str = ""  # to measure the accuracy of int8 on; empty: there is none
    out: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkJob(Job[WorkerExit]):
    """Do the assignment in a folder of `edge_client.client.workers.write_order`."""

    folder: str


# the codec


@dataclass(frozen=True, slots=True)
class _Kind(Generic[A]):
    """The name of a job on the pipe and the type of its answer; the type checker sees that both classes fit."""

    name: str
    job: type[Job[A]]
    answer: type[A]


_KINDS: tuple[_Kind[Any], ...] = (
    _Kind("init", InitJob, WrittenFile),
    _Kind("calibrate", CalibrateJob, Calibration),
    _Kind("encode", EncodeJob, WrittenFile),
    _Kind("tell", TellJob, WrittenFile),
    _Kind("study", StudyJob, StudyStarted),
    _Kind("check", CheckJob, CheckedUpdate),
    _Kind("fold", FoldJob, FoldedModel),
    _Kind("normalise", NormaliseJob, FoldedModel),
    _Kind("evaluate", EvaluateJob, ServerEvaluation),
    _Kind("probe", ProbeJob, Findings),
    _Kind("export", ExportJob, ExportedModel),
    _Kind("work", WorkJob, WorkerExit),
)
_BY_NAME: Mapping[str, _Kind[Any]] = {kind.name: kind for kind in _KINDS}
_BY_JOB: Mapping[type, _Kind[Any]] = {kind.job: kind for kind in _KINDS}


def name_of(job: Job[A]) -> str:
    """The name of a job on the pipe and in the log."""
    return _BY_JOB[type(job)].name


def is_small(job: Job[A]) -> bool:
    """Whether a job takes so little time that several travel to the child at once."""
    return isinstance(job, CheckJob)


def encode_job(number: int, job: Job[A]) -> bytes:
    """The line that asks a child for a job; its answer has the same number."""
    return json.dumps({"id": number, "job": name_of(job), **records.to_map(job)}).encode() + b"\n"


def answer_line(line: str, do: Callable[[Job[Any]], object]) -> str:
    """The child's side: decode a job, do it and encode the answer, which is of the job's type or a `Failure`.

    A line that is no job is answered with a `malformed` failure. Raises `ValueError` if it is not even JSON.
    """
    fields = json.loads(line)
    number, name = fields.pop("id", None), fields.pop("job", None)
    answer: object
    try:
        job = _decoded(name, fields)
    except PayloadError as error:
        answer = Failure.of(error)
    else:
        answer = do(job)
    encoded = {"id": number, "ok": not isinstance(answer, Failure), **records.to_map(answer)}
    return json.dumps(encoded, allow_nan=False) + "\n"


def _decoded(name: object, fields: Mapping[str, Any]) -> Job[Any]:
    if not isinstance(name, str) or name not in _BY_NAME:
        raise PayloadError("malformed", f"unknown job {name!r}; known: {', '.join(_BY_NAME)}")
    return records.from_map(_BY_NAME[name].job, fields, where=f"job {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLine:
    """A line of a child; the job that it answers decides how it is decoded."""

    number: object  # of the job
    is_ok: bool
    fields: Mapping[str, Any]

    def answer_to(self, job: Job[A]) -> A | Failure:
        """The answer as a record; raises `PayloadError` if it has not the form of answers to this job."""
        kind: _Kind[A] = _BY_JOB[type(job)]
        where = f"answer to {kind.name!r}"
        if not self.is_ok:
            return records.from_map(Failure, self.fields, where=where)
        return records.from_map(kind.answer, self.fields, where=where)


def read_answer(line: bytes | str) -> AnswerLine:
    """A line of a child; raises `ValueError` for one that is not a JSON object."""
    fields = json.loads(line)
    if not isinstance(fields, dict):
        raise ValueError(f"expected a JSON object, got {type(fields).__name__}")
    return AnswerLine(number=fields.pop("id", None), is_ok=fields.pop("ok", None) is True, fields=fields)
