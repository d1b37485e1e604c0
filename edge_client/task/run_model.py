"""The model that a run trains: built in, or of a task. Devices and server make it here, so that both make the same.

Covers: building it, with the whole contract where the shape of a sample is known, and filling it with weights.
Does not cover: whether a device allows the task (`assignment`), which is decided before anything here is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from edge_client.config.run_file import RunFile
from edge_client.errors import InputError, PayloadError
from edge_client.models import registry, user_module
from edge_client.models.contract import Model
from edge_client.models.found_units.model import FoundModel
from edge_client.models.found_units.result import FoundUnits
from edge_client.models.normalised import normalise_inputs
from edge_client.models.slicing import FULL, SliceSpec, shorten
from edge_client.task.task import Source, Task
from edge_client.user_code import UserCode
from edge_client.wire.container import MODEL_PREFIX
from edge_client.wire.tensors import ContainerReader

__all__ = ["Recipe", "fill", "load_weights", "recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to make the model of a run."""

    run: RunFile
    task: Task | None = None
    path: str = ""  # of the task's file, for messages
    units: FoundUnits | None = None  # of the model, as the server found them

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """The shape of one sample; None: that of the data."""
        if self.run.model is not None:
            return self.run.model.input
        assert self.task is not None
        return tuple(self.task.input) if self.task.input is not None else None

    def user_code(self, doing: str) -> AbstractContextManager[object]:
        """Guard our code that runs the model or reads the data; without a task every error in it is ours."""
        return UserCode(self.path, doing, user_lines_only=True) if self.task is not None else nullcontext()

    def parameter_sizes(self, spec: SliceSpec = FULL) -> list[int]:
        """Elements of each parameter and buffer, before memory is taken for them; empty for a task's model."""
        section, shape = self.run.section(str(spec)), self.input_shape
        if section is None or shape is None:
            return []
        return registry.parameter_sizes(
            section.name,
            input_shape=shape,
            num_classes=len(self.run.classes),
            options=section.options,
            spec=FULL if spec.model else spec,
        )

    def build(self, input_shape: Sequence[int], spec: SliceSpec = FULL) -> Model:
        """The model, a slice of it or another, with random weights from torch's global generator, for such samples."""
        model = self._build(input_shape, spec)
        return normalise_inputs(model) if self.run.train.normalise else model

    def _build(self, input_shape: Sequence[int], spec: SliceSpec) -> Model:
        num_classes = len(self.run.classes)
        section = self.run.section(str(spec))
        if section is not None:
            return registry.build(
                section.name,
                input_shape=input_shape,
                num_classes=num_classes,
                options=section.options,
                spec=FULL if spec.model else spec,
                units=self.units if section is self.run.model else None,
            )
        assert self.task is not None
        with UserCode(self.path, "model()"):
            module = self.task.model(num_classes)
            model = user_module.adopt(
                module, self.task.units, input_shape=input_shape, num_classes=num_classes, found=self.units
            )
            return model if spec == FULL else shorten(model, spec)

    def skeleton(self, input_shape: Sequence[int]) -> Model:
        """The units in order; a built-in model has no memory for values yet, a task's has what its function made."""
        num_classes = len(self.run.classes)
        if self.run.model is not None:
            section = self.run.model
            return registry.skeleton(
                section.name, input_shape=input_shape, num_classes=num_classes, options=section.options
            )
        assert self.task is not None
        with UserCode(self.path, "model()"):
            module = self.task.model(num_classes)
            model = user_module.parts(module, self.task.units)
            if not isinstance(model, FoundModel):
                return model
            return user_module.adopt(module, None, input_shape=input_shape, num_classes=num_classes, found=self.units)

    def build_weights(self) -> Model:
        """The model as far as it can be made without data: enough for names and first values of its tensors."""
        if self.input_shape is not None:
            return self.build(self.input_shape)
        assert self.task is not None
        if self.run.train.normalise:
            raise InputError(
                f"{self.path}: train.normalise needs the shape of a sample: Task(input=(3, 96, 96)); "
                "or set normalise = false"
            )
        with UserCode(self.path, "model()"):
            model = user_module.parts(self.task.model(len(self.run.classes)), self.task.units)
        user_module.check_shapes(model)
        return model


def recipe(run: RunFile, source: Source | None) -> Recipe:
    """The recipe of a run; `source` is its task's file, if it trains a task. Raises `InputError`."""
    if run.task is None:
        return Recipe(run=run)
    if source is None:
        raise InputError(f"the run trains the task {run.task.name!r}, and its file was not given")
    if source.sha256 != run.task.sha256:
        raise InputError(
            f"{source.path}: expected the task with sha256 {run.task.sha256 or '(none in the run)'}, "
            f"got {source.sha256}; start a new run with this file, or put the old one back"
        )
    return Recipe(run=run, task=source.load(), path=source.path)


def load_weights(model: nn.Module, path: Path) -> None:
    """Copy the tensors of a container into the model; both must have exactly the same names and shapes."""
    with ContainerReader(path) as reader:
        fill(model, ((name, reader.tensor(name)) for name in reader.names(MODEL_PREFIX)))


def fill(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors, by their names in a container, into the model; others than the model's are left alone.

    Raises `PayloadError` unless the model's names and shapes are exactly those that come.
    """
    state = model.state_dict()
    missing = set(state)
    unknown: set[str] = set()
    for name, value in tensors:
        if not name.startswith(MODEL_PREFIX):
            continue
        model_name = name.removeprefix(MODEL_PREFIX)
        if model_name not in state:
            unknown.add(model_name)
        elif value.shape != state[model_name].shape:
            shape, expected = tuple(value.shape), tuple(state[model_name].shape)
            raise PayloadError("shape", f"tensor {model_name!r} is {shape}, expected {expected}")
        else:
            state[model_name].copy_(value)
            missing.discard(model_name)
    if missing or unknown:
        differ = sorted(missing | unknown)
        raise PayloadError("names", f"received model and this device's differ in {len(differ)} tensors ({differ[0]!r})")
