"""The schema of `run.toml`: what to train, on which devices, and when to stop.

Covers: the keys, and the rules that involve several of them. Does not cover: the parser (`tables`). The daemon never
imports this module: a run file passes through it as bytes for its workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from edge_client.config.tables import Auto, Options, Seconds, described, parse_table, read_toml
from edge_client.errors import InputError
from edge_client.records import Between, Count, Id, Matches, Positive, SliceText, Text

__all__ = [
    "FILE_INIT",
    "MethodSection",
    "ModelSection",
    "OtherModel",
    "RoundsSection",
    "RunFile",
    "SimulateSection",
    "TaskSection",
    "check_run_file",
    "load_run_file",
    "refuse_user_method",
]

Init = Annotated[str, Matches(r"random|run:[A-Za-z0-9_-]{1,64}(@(last|best|\d{1,9}))?|file:[^\x00-\x1f]{1,1024}")]
FILE_INIT = "file:"
Budget = Annotated[str, Matches(r"[0-9.]{1,20} ?[A-Za-z]{0,3}(\*[1-9][0-9]{0,5})?")]
_MAX_RUN_NAME = 48  # an id has 64 characters at most, with "-dry-" and a number
_ANOTHER = "model:"  # what a slice begins with that is another model
_MAX_OTHER_NAME = 58  # a slice has 64 characters at most
_AUTO_STEPS = 50  # of a device in a round, which epochs = "auto" comes close to
_MOST_AUTO_EPOCHS = 10
_INIT_HELP = (
    "starting weights: random, or run:ID for the last model of a run, run:ID@best, run:ID@VERSION; file:PATH for a "
    ".safetensors or .pth beside the run file"
)
_INIT_HASH_HELP = "of the file of starting weights; filled in when the run starts, checked if it stands there"


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodSection:
    name: Annotated[str, Matches(r"[a-z0-9+_-]{1,64}")] = described(
        "a published method, or one over another, such as fedepth+fedprox (coordinator methods list)", "fedavg"
    )
    parameters: Options = described("the method's own parameters, such as mu for fedprox", dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    name: Annotated[str, Matches(r"[a-z0-9_-]{1,64}|[a-z]{1,16}:[A-Za-z0-9_.-]{1,80}")] = described(
        "a built-in model: small-cnn, mlp, har-cnn, preresnet20, resnet10 to resnet152, densenet121 to densenet201, "
        "vit-t-16, vit-s-8 to vit-s-12, har-transformer (coordinator models list); or a library's, such as "
        "timm:mobilenetv3_small_100 or torchvision:resnet18, where it is installed"
    )
    input: tuple[Annotated[int, Between(1, 65536)], ...] = described(
        "shape of one sample: channels, height, width; of sensors channels, length"
    )
    init: Init = described(_INIT_HELP, "random")
    init_sha256: Annotated[str, Matches(r"([0-9a-f]{64})?")] = described(_INIT_HASH_HELP, "", later=True)
    options: Options = described("the model's own options", dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherModel:
    name: Annotated[str, Matches(r"[a-z0-9_-]{0,64}")] = described(
        "a built-in model; without it the one that the table is called by", ""
    )
    options: Options = described("the model's own options", dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    name: Id = described("a task that the devices' owners allow in their device.toml")
    file: Text = described("the task on this server, FILE.py:OBJECT beside the run file; without it NAME.py:task", "")
    init: Init = described(_INIT_HELP, "random")
    init_sha256: Annotated[str, Matches(r"([0-9a-f]{64})?")] = described(_INIT_HASH_HELP, "", later=True)
    sha256: Annotated[str, Matches(r"([0-9a-f]{64})?")] = described(
        "of the task's file; filled in when the run starts, checked if it stands there", ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSection:
    batch: Annotated[int, Between(1, 65536)] = described("samples per step", 32)
    epochs: Annotated[int, Auto(), Between(1, 1000)] | None = described(
        'passes over a device\'s data per round; "auto": as many as make about 50 steps, 1 to 10', 1
    )
    max_steps: Positive | None = described("end a round's training after so many steps", None)
    optimizer: Annotated[str, Matches(r"sgd|adam")] = described("sgd or adam", "sgd")
    lr: Annotated[float, Between(0, 1000)] = described("learning rate", 0.05)
    momentum: Annotated[float, Between(0, 1)] = described("momentum of sgd", 0.0)
    weight_decay: Annotated[float, Between(0, 10)] = described("L2 penalty", 0.0)
    schedule: Annotated[str, Matches(r"constant|cosine|exponential:0*\.\d{1,9}|exponential:1(\.0*)?")] = described(
        "learning rate over the rounds: constant, cosine (to 0 at stop.rounds), exponential:FACTOR (per round)",
        "constant",
    )
    warm_up: bool = described(
        "in the first round step s of S has the rate lr * s / S; later rounds have the schedule's", False, later=True
    )
    normalise: bool = described(
        "the model subtracts a mean from each channel of its inputs and divides by a standard deviation; both come "
        "from sums over all devices' samples, which the devices report before the first round",
        False,
        later=True,
    )
    dtype: Annotated[str, Matches(r"fp32|auto")] = described(
        "of activations; auto: half the bytes on a device on which fp32 does not fit: bf16 where its processor or "
        "accelerator has it, fp16 on an accelerator without",
        "fp32",
    )
    deterministic: bool = described(
        "whether accelerators use kernels that give the same bits every time, and products of float32 in full; part of "
        "the result's bits",
        True,
        later=True,
    )
    threads: Annotated[int, Between(1, 1024)] = described("CPU threads of a worker; part of the result's bits", 1)

    def epochs_of(self, num_samples: int) -> int:
        """How many times a device with `num_samples` samples passes over them in a round."""
        if self.epochs is not None:
            return self.epochs
        steps_per_epoch = max(1, math.ceil(num_samples / self.batch))
        return max(1, min(self.most_epochs, round(_AUTO_STEPS / steps_per_epoch)))

    @property
    def most_epochs(self) -> int:
        """The largest number of passes that any device makes in a round."""
        return self.epochs if self.epochs is not None else _MOST_AUTO_EPOCHS


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSection:
    """The first rule that is reached ends the run."""

    rounds: Annotated[int, Between(1, 1_000_000)] = described("rounds to train at most", 10)
    metric: Annotated[str, Matches(r"accuracy|balanced-accuracy|macro-f1|loss")] = described(
        "what target, patience and the best version go by", "accuracy"
    )
    target: float | None = described("end when the metric reaches this value", None)
    patience: Positive | None = described("end when so many evaluations in a row brought no better value", None)
    hours: Annotated[float, Between(0.0001, 24 * 366)] | None = described("end after so many hours of running", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSection:
    min: Annotated[int, Between(1, 1_000_000)] = described("a round starts and counts with at least so many devices", 1)
    fraction: Annotated[float, Between(0.0001, 1)] = described(
        "share of the devices that are there, chosen per round", 1.0
    )
    where: tuple[Annotated[str, Matches(r"(?s)[A-Za-z0-9_.-]{1,64}=.{0,128}")], ...] = described(
        'only devices that have all these labels, such as ["line=a"]', ()
    )
    misfit: Annotated[str, Matches(r"skip|fail")] = described(
        "a device on which nothing fits: skip leaves it out, fail ends the run", "skip"
    )
    max_samples: Positive = described("largest number of samples a device may claim", 10_000_000)
    max_weight_ratio: Annotated[int, Between(1, 1_000_000_000)] = described(
        "a device counts for at most this times the (lower) median number of samples in its round", 10
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSection:
    deadline: Seconds = described("a round ends after this time with the devices that answered", 1800.0)
    codec: Annotated[str, Matches(r"fp32|fp16|bf16|int8")] = described(
        "how weights travel: fp32, fp16, bf16, int8", "fp32"
    )
    max_norm_ratio: Annotated[float, Between(1, 1e9)] = described(
        "an update is refused if it moves the model more than this times the usual (median of committed rounds, "
        "of its architecture; before there are any the norm of the model, plus 1)",
        20.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSection:
    on: Annotated[str, Matches(r"(?s)devices|simulate|npz:/.{1,1024}")] = described(
        "where the test data is: devices, or npz:PATH of a file on the server; simulate: the whole test set of "
        "simulate.data, what `coordinator simulate` takes unless the file says otherwise",
        "devices",
    )
    every: Count = described("rounds between two evaluations; 0: never", 1)
    similarity: Count = described(
        "rounds between two comparisons of the devices' models on the server's test data, for the run's report; "
        "the first round and the last of stop.rounds are compared, too; 0: never",
        10,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateSection:
    data: Text = described("what the virtual devices share: digits, or SOURCE:PATH such as npz:/data/a.npz", "")
    partition: Text = described("how they share it: iid, dirichlet:ALPHA, pathological:CLASSES and more", "iid")
    devices: Annotated[int, Between(1, 100_000)] = described("how many there are", 10)
    training_budgets: tuple[Budget, ...] = described(
        'memory that training may take on each: ["40MB", "80MB"] in turns, or ["40MB*6", "80MB*4"]; none: no limit', ()
    )
    accelerator: Annotated[str, Matches(r"[a-z]{1,16}(:[0-9]{1,3})?")] = described(
        "where they train, as limits.accelerator of a device: none, auto or a name such as cuda:0", "none", later=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run: what to train, on which devices, and when to stop."""

    name: Id = described("runs become NAME-1, NAME-2, ...")
    seed: Annotated[int, Between(0, 2**31)] = described("everything random follows from it", 1)
    method: MethodSection = described("how the devices learn together", MethodSection)
    model: ModelSection | None = described("what they train: a built-in model, or", None)
    task: TaskSection | None = described("a task: model and data as Python functions of one's own", None)
    classes: tuple[Annotated[str, Matches(r"(?s).{1,128}")], ...] = described("the label order; devices map by name")
    slices: tuple[SliceText, ...] = described(
        'what a device may train, the largest first: parts of the model, such as ["full", "depth:1.1.2.2", '
        '"width:1/2"], or other models by name, such as ["full", "densenet121"]: the first that trains whole batches '
        "in its memory; none: what the method says",
        (),
    )
    models: Mapping[str, OtherModel] = described(
        'options of other models among the slices, such as { tiny = { name = "small-cnn", width = 8 } } for '
        '["full", "tiny"]; a built-in model with its defaults needs no entry',
        dict,
    )
    sharing: Annotated[str, Matches(r"auto|position|architecture")] = described(
        "what devices with different slices have in common: every tensor at its position in the model, or nothing: "
        "each architecture is a model of its own; auto: architecture for felo, velo and wherever slices names other "
        "models, position for all others",
        "auto",
    )
    train: TrainSection = described("training on a device", TrainSection)
    stop: StopSection = described("when the run ends", StopSection)
    devices: DevicesSection = described("who takes part", DevicesSection)
    rounds: RoundsSection = described("how a round goes", RoundsSection)
    evaluate: EvaluateSection = described("how the model is judged", EvaluateSection)
    simulate: SimulateSection | None = described("virtual devices; read by `coordinator simulate` only", None)

    @property
    def init(self) -> str:
        """Where the initial weights come from."""
        section = self.model or self.task
        return section.init if section is not None else "random"

    def section(self, slice_name: str = "full") -> ModelSection | None:
        """The built-in model to which a slice belongs; None if the run trains a task's model."""
        if not slice_name.startswith(_ANOTHER):
            return self.model
        name = slice_name.removeprefix(_ANOTHER)
        other = self.models.get(name, OtherModel())
        shape = self.model.input if self.model is not None else ()  # of a task, only its data may know it
        return ModelSection(name=other.name or name, input=shape, options=other.options)

    @property
    def what(self) -> str:
        """The name of the model or task, as people read it."""
        return self.what_is("full")

    def what_is(self, slice_name: str) -> str:
        """The name of the model to which a slice belongs, as people read it."""
        section = self.section(slice_name)
        return section.name if section is not None else f"task {self.task.name}" if self.task is not None else ""


def load_run_file(path: Path) -> RunFile:
    """Read and check a run file; raises `InputError`."""
    table = read_toml(path)
    refuse_user_method(table, str(path))
    file = parse_table(RunFile, table, source=str(path))
    try:
        check_run_file(file)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return file


def refuse_user_method(table: Mapping[str, Any], source: str) -> None:
    """Reject a run file whose method is a Python file, which only simulations accept; raises `InputError`."""
    method = table.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    if isinstance(name, str) and ".py" in name:
        raise InputError(
            f"{source}: method: {name!r} is in a Python file, which only a simulation tries (coordinator simulate "
            f"{source} --method {name}); a fleet runs those of `coordinator methods list`"
        )


def check_run_file(file: RunFile) -> None:
    """Check the rules that involve several keys; raises `InputError`."""
    if (file.model is None) == (file.task is None):
        came = "neither" if file.model is None else "both"
        raise InputError(f"expected either model or task, got {came}")
    if len(file.name) > _MAX_RUN_NAME:
        raise InputError(
            f"name: expected at most {_MAX_RUN_NAME} characters, got {len(file.name)}; runs become NAME-1, NAME-2, ..."
        )
    if len(set(file.classes)) != len(file.classes) or len(file.classes) < 2:
        raise InputError(f"classes: expected two or more different names, got {list(file.classes)!r}")
    for name in file.models:
        if not re.fullmatch(rf"[A-Za-z0-9_-]{{1,{_MAX_OTHER_NAME}}}", name) or name == "full":
            raise InputError(
                f"models: expected names of 1 to {_MAX_OTHER_NAME} letters, digits, - and _, not full, got {name!r}"
            )
        if not {name, _ANOTHER + name} & set(file.slices):
            raise InputError(f"models: {name!r} is not among the slices, so no device would train it; name it there")
    for rule in ("target", "patience"):
        if getattr(file.stop, rule) is not None and file.evaluate.every == 0:
            raise InputError(f"stop.{rule} needs evaluations; set evaluate.every to 1 or more")
    metric, target = file.stop.metric, file.stop.target
    if target is not None and not (target >= 0 if metric == "loss" else 0 <= target <= 1):
        wanted = "0 or more" if metric == "loss" else "0 to 1"
        raise InputError(f"stop.target: expected {wanted} for {metric}, got {target:g}; it would never be reached")
