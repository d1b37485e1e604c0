"""What a worker does, step by step: load, plan, warm up, evaluate, train, write. Imports torch.

Covers: the files of an assignment, the order of things, and what this device's owner allows: tasks by name and hash,
results that may leave. Does not cover: the process around it (`worker`), the loop (`training`), what is learnt
(`methods`), the model (`run_model`).
The tensors of an update depend on the order alone, bit for bit; its meta also holds measurements, which vary.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edge_client import durable, faults
from edge_client.data.given import as_set
from edge_client.data.labels import UnknownClassError
from edge_client.data.sources import Samples, divide, open_data
from edge_client.device import guard, meter
from edge_client.errors import FedfitError, InputError, MachineError, NoSuchNameError, NothingFitsError, PayloadError
from edge_client.files import DataSection, DeviceFile, format_bytes
from edge_client.methods import registry as methods
from edge_client.methods.base import Client, Job, Method, Outcome
from edge_client.models.contract import Model
from edge_client.planning.cost import Workload
from edge_client.planning.planner import check_fixed, plan
from edge_client.records import Evaluation, Report, TrainingPlan, WorkOrder, from_map, to_map
from edge_client.run_file import RunFile
from edge_client.run_model import Recipe, load_weights, recipe
from edge_client.task import Device, Source, Task, UserCode, data_table, read_source
from edge_client.task_files import split_place
from edge_client.training import optimizers
from edge_client.training.evaluate import Result, evaluate
from edge_client.training.loop import Settings, Trained, generator, train
from edge_client.training.objectives import cross_entropy
from edge_client.training.seeds import derive
from edge_client.wire.container import MODEL_PREFIX, payload_kind
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

__all__ = ["DeclinedError", "Kept", "carry_out", "read_state", "write_state"]

_PROGRESS_EVERY_S = 0.5
_LIMIT_SLACK_BYTES = 16 * 2**20  # RLIMIT_DATA counts virtual memory: arenas and guard pages that are never resident
_STACK_BYTES = 8 * 2**20  # of a thread, counted as a whole and hardly used


class DeclinedError(FedfitError):
    """This device will not do the assignment; `code` is short and stable, the message is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Kept:
    """What a process that does many assignments opens once: the data of built-in sources, by what names it.

    Nothing that an assignment changes is kept, so that each begins as in a process of its own.
    """

    def __init__(self) -> None:
        self._data: dict[str, tuple[Samples, Samples]] = {}

    def data(
        self, section: DataSection, classes: Sequence[str], shape: Sequence[int], rename: Mapping[str, str]
    ) -> tuple[Samples, Samples]:
        """As `open_data`."""
        key = json.dumps([to_map(section), list(classes), list(shape), dict(rename)], sort_keys=True)
        if key not in self._data:
            self._data[key] = open_data(section, classes, shape, rename)
        return self._data[key]


def carry_out(order: WorkOrder, workdir: Path, kept: Kept | None = None) -> None:
    """Carry out `order` and leave `update.bin` and `update.json` in `workdir`; raises `DeclinedError`."""
    work = _Work(order, workdir, kept or Kept())
    work.progress("load", 0, 1, 0.0)
    training_plan = work.load()
    if not (order.train or order.evaluate):
        work.progress("load", 1, 1, 0.0)
        work.write(training_plan, None, None, Outcome())
        return
    client = work.begin()
    work.progress("load", 1, 1, 0.0)
    result = work.evaluate(client, training_plan)
    trained, outcome = work.train(client, training_plan)
    work.write(training_plan, result, trained, outcome)


@contextmanager
def _declining(code: str, unknown: str) -> Iterator[None]:
    """Turn what this device cannot use into the reason that it gives."""
    try:
        yield
    except UnknownClassError as error:
        raise DeclinedError("unknown_class", str(error)) from error
    except NoSuchNameError as error:
        raise DeclinedError(unknown, str(error)) from error
    except NothingFitsError as error:
        raise DeclinedError("nothing_fits", str(error)) from error
    except InputError as error:
        raise DeclinedError(code, str(error)) from error


class _Work:
    """The state of one assignment, from step to step."""

    def __init__(self, order: WorkOrder, workdir: Path, kept: Kept) -> None:
        self.order = order
        self.workdir = workdir
        self.kept = kept
        self.progress = _Progress()
        self.started = time.monotonic()
        torch.set_num_threads(order.threads)
        if torch.get_num_interop_threads() != 1:  # it can be set once in a process
            torch.set_num_interop_threads(1)
        self.run: RunFile = from_map(RunFile, _read_json(self._part("run")), where="run")
        self.device: DeviceFile = from_map(DeviceFile, order.device_file, where="device file")
        self.recipe: Recipe
        self.method: Method
        self.model: Model
        self.train_data: Samples
        self.test_data: Samples
        self.held_bytes = 0
        self.base_bytes = 0

    def load(self) -> TrainingPlan:
        """What a plan needs, in an order that fails early."""
        run, order = self.run, self.order
        if order.evaluate and not order.train and not self.device.share.metrics:
            raise DeclinedError("not_shared", "this device's owner keeps its test results (share.metrics = false)")
        with _declining("bad_method", "unknown_method"):
            self.method = methods.get(run.method.name, run.method.parameters)
        before_bytes = meter.rss_bytes()
        with _declining("bad_task", "bad_task"):
            self.recipe = recipe(run, self._task_source())
        with _declining("bad_model", "unknown_model"):
            sizes = self.recipe.parameter_sizes()
        room_bytes = _LIMIT_SLACK_BYTES + order.threads * _STACK_BYTES
        self._limit(room_bytes)  # what is compressed is unpacked, what a task returns is in memory: bounded, too
        with _declining("bad_data", "bad_data"), self._fitting("its data"):
            self._open_data()
        self.held_bytes = self.train_data.held_bytes + self.test_data.held_bytes
        if run.task is not None:  # what the user's code loads and keeps is nowhere written down: measured
            self.held_bytes = max(self.held_bytes, meter.rss_bytes() - before_bytes)
        with _declining("nothing_fits", "nothing_fits"):
            check_fixed(sizes, self._workload(), budget_bytes=order.budget_bytes)
        self._limit(room_bytes)  # building runs one sample: bounded, too
        with _declining("bad_model", "unknown_model"):
            self.model = self._build()
        with _declining("nothing_fits", "nothing_fits"):
            training_plan = self._plan()
        guard.lift_limit()  # the threads and libraries that the warm-up loads are not the model's
        return training_plan

    def begin(self) -> Client:
        """What training needs beside the plan; measures a warm process."""
        with _declining("bad_model", "bad_model"), self.recipe.user_code("a first step on zeros"):
            self._warm_up()
        self.base_bytes = meter.rss_bytes()
        self._limit(_LIMIT_SLACK_BYTES)
        load_weights(self.model, self._part("model"))
        self._seed()
        client = self.method.client()
        client.begin(self._job())
        return client

    def _task_source(self) -> Source | None:
        """The run's task as this device's owner allows it; nothing of it is run before its hash is the run's."""
        section = self.run.task
        if section is None:
            return None
        place = self.device.tasks.get(section.name)
        if place is None:
            raise DeclinedError(
                "task_missing",
                f"task {section.name!r} is not allowed on this device; put its file there, write into device.toml, "
                f'and start the client again: tasks = {{ {section.name} = "/path/{section.name}.py:task" }}',
            )
        try:
            source = read_source(*split_place(place))
        except InputError as error:
            raise DeclinedError("task_missing", f"{error}; it is tasks.{section.name} of device.toml") from error
        if source.sha256 != section.sha256:
            raise DeclinedError(
                "task_differs",
                f"{source.path} has sha256 {source.sha256}, the run's task {section.name!r} has "
                f"{section.sha256 or 'none'}; copy the server's file here",
            )
        return source

    def _seed(self) -> None:
        """The global generators that a user's code may draw from; ours are made from the seed where they are used."""
        torch.manual_seed(derive(self.order.seed, "torch"))
        random.seed(derive(self.order.seed, "random"))
        np.random.seed(derive(self.order.seed, "numpy") % 2**32)

    @contextmanager
    def _fitting(self, what: str) -> Iterator[None]:
        """Under the limit: what does not fit is no bug."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not meter.is_out_of_memory(error):
                raise
            budget = format_bytes(self.order.budget_bytes)
            raise NothingFitsError(f"{what} alone needs more than the budget of {budget}; see limits.memory") from error

    def _build(self) -> Model:
        """Under the limit; a built-in model's size was checked before, a task's shows only here."""
        with self._fitting("making the model") if self.run.task is not None else nullcontext():
            return self.recipe.build(self.train_data.shape)

    def _plan(self) -> TrainingPlan:
        """The plan of the assignment while it fits: the budget may be smaller than when it was made."""
        fresh = plan(self.model, self._workload(), budget_bytes=self.order.budget_bytes)
        given = self.order.plan
        return given if given is not None and given.predicted_bytes <= self.order.budget_bytes else fresh

    def _limit(self, slack_bytes: int) -> None:
        guard.limit_growth(max(0, self.order.budget_bytes - meter.rss_bytes()) + slack_bytes)

    def evaluate(self, client: Client, training_plan: TrainingPlan) -> Result | None:
        """The received model on this device's test samples, before it is trained."""
        if not self.order.evaluate or not self.device.share.metrics or len(self.test_data) == 0:
            return None

        def progress(step: int, total: int, loss: float) -> None:
            self.progress("evaluate", step, total, loss)

        with _declining("bad_data", "bad_data"), self.recipe.user_code("evaluation"):
            result = evaluate(
                self.model,
                client.predict,
                self.test_data,
                num_classes=len(self.run.classes),
                microbatch=training_plan.microbatch,
                progress=progress,
            )
        faults.point("worker.evaluated")
        return result

    def train(self, client: Client, training_plan: TrainingPlan) -> tuple[Trained | None, Outcome]:
        """Local training, if the order asks for it."""
        if not self.order.train:
            return None, Outcome()
        faults.point("worker.train.begin")
        section = self.run.train
        settings = Settings(
            batch=section.batch,
            microbatch=training_plan.microbatch,
            learning_rate=self.order.learning_rate,
            seed=self.order.seed,
            optimizer=section.optimizer,
            momentum=section.momentum,
            weight_decay=section.weight_decay,
            max_steps=section.max_steps,
        )

        def progress(step: int, total: int, loss: float) -> None:
            faults.point("worker.train.step")
            self.progress("train", step, total, loss)

        with _declining("bad_data", "bad_data"), self.recipe.user_code("training"):
            trained = train(self.model, client, self.train_data, settings, progress=progress)
        outcome = client.end()
        faults.point("worker.trained")
        return trained, outcome

    def write(
        self, training_plan: TrainingPlan, result: Result | None, trained: Trained | None, outcome: Outcome
    ) -> None:
        """Method state, then the update, then its manifest: a manifest means that all is there."""
        self.progress("write", 0, 1, 0.0)
        with durable.disk_errors(f"writing the update in {self.workdir}"):
            if self.order.train and self.order.method_state:
                write_state(Path(self.order.method_state), outcome.state)
            report = self._report(training_plan, result, trained, outcome)
            sha256, length = self._write_update(report, result)
            manifest = {"sha256": sha256, "length": length, "num_samples": report.num_samples}
            durable.write_bytes(self.workdir / "update.json", json.dumps(manifest).encode(), point="worker.manifest")
        self.progress("write", 1, 1, 0.0)

    def _part(self, key: str) -> Path:
        if key not in self.order.parts:
            raise PayloadError("malformed", f"the assignment has no part {key!r}, only {', '.join(self.order.parts)}")
        return Path(self.order.parts[key])

    def _open_data(self) -> None:
        section, run = self.device.data, self.run
        if self.recipe.task is not None:
            section = section or DataSection()
            self.train_data, self.test_data = self._task_data(self.recipe.task, section)
            source = run.what
        else:
            if section is None or not section.source:
                raise DeclinedError("no_data", "this device has no data; name it in the data section of device.toml")
            assert run.model is not None
            self.train_data, self.test_data = self.kept.data(
                section, run.classes, run.model.input, self.device.rename
            )
            source = f"data source {section.source!r}"
        only_evaluates = self.order.evaluate and not self.order.train
        if not only_evaluates and len(self.train_data) == 0:
            raise DeclinedError("no_data", f"{source} has no training samples for this device")
        if only_evaluates and len(self.test_data) == 0:
            raise DeclinedError("no_data", f"{source} has no test samples for this device; set data.test-fraction")

    def _task_data(self, task: Task, section: DataSection) -> tuple[Samples, Samples]:
        path, classes = self.recipe.path, self.run.classes
        device = Device(
            name=self.order.device, data=data_table(section), classes=classes, labels=dict(self.device.labels)
        )
        with UserCode(path, "train_data()"):
            train_set = as_set(task.train_data(device), path, "train_data()")
        test_set = None
        if task.test_data is not None:
            with UserCode(path, "test_data()"):
                given = task.test_data(device)
                test_set = as_set(given, path, "test_data()") if given is not None else None
        return divide(train_set, test_set, section, classes, self.recipe.input_shape, self.device.rename)

    def _workload(self) -> Workload:
        section = self.run.train
        return Workload(
            batch=section.batch,
            optimizer=section.optimizer,
            momentum=section.momentum,
            held_bytes=self.held_bytes,
        )

    def _warm_up(self) -> None:
        """A step on zeros loads the libraries' pages and starts their threads; weights are loaded after it."""
        self.model.train()
        x = torch.zeros(2, *self.model.input_shape)
        cross_entropy(self.model(x), torch.zeros(2, dtype=torch.int64)).sum().backward()  # type: ignore[no-untyped-call]
        section = self.run.train
        optimizer = optimizers.make(section.optimizer, momentum=section.momentum, weight_decay=section.weight_decay)
        for name, param in self.model.named_parameters():
            if param.grad is not None:
                optimizer.step(name, param, param.grad, 0.0)
            param.grad = None

    def _job(self) -> Job:
        order = self.order
        return Job(
            model=self.model,
            round=order.round,
            num_rounds=order.num_rounds,
            epochs=self.run.train.epochs,
            learning_rate=order.learning_rate,
            class_counts=self.train_data.class_counts(len(self.run.classes)),
            rng=lambda purpose: generator(order.seed, "method", purpose),
            state=read_state(Path(order.method_state)) if order.method_state else {},
        )

    def _report(
        self, training_plan: TrainingPlan, result: Result | None, trained: Trained | None, outcome: Outcome
    ) -> Report:
        scalars = dict(outcome.scalars)
        if trained is not None and math.isfinite(trained.mean_loss):
            scalars["loss"] = trained.mean_loss
        return Report(
            num_samples=len(self.train_data) if trained is not None else 0,
            num_held=len(self.train_data),
            num_test=len(self.test_data),
            steps=trained.steps if trained is not None else 0,
            payload=payload_kind(self.run.rounds.codec) if trained is not None else "none",
            plan=training_plan,
            peak_bytes=meter.peak_rss_bytes(),
            base_bytes=self.base_bytes,
            seconds=round(time.monotonic() - self.started, 3),
            scalars=scalars,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)[:64]},
            evaluation=_evaluation(result),
        )

    def _write_update(self, report: Report, result: Result | None) -> tuple[str, int]:
        entries: list[tuple[str, Tensor]] = []
        if report.payload != "none":
            entries = [(MODEL_PREFIX + name, tensor) for name, tensor in self.model.state_dict().items()]
        table = [(name, codec_for(t, self.run.rounds.codec), tuple(t.shape)) for name, t in entries]
        if result is not None:
            entries.append(("evaluation/confusion", result.confusion))
            table.append(("evaluation/confusion", "i64", tuple(result.confusion.shape)))
        temporary = self.workdir / ".update.bin.tmp"
        faults.point("worker.update.write")
        if report.payload == "delta":
            with ContainerReader(self._part("model")) as received:
                tensors = (t - received.tensor(name) if name.startswith(MODEL_PREFIX) else t for name, t in entries)
                written = write_container(temporary, to_map(report), table, tensors)
        else:
            written = write_container(temporary, to_map(report), table, (t for _, t in entries))
        durable.publish(temporary, self.workdir / "update.bin", point="worker.update")
        return written


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PayloadError("malformed", f"{path.name} is not JSON: {error}") from error


def read_state(folder: Path) -> dict[str, Tensor]:
    """What the method kept in this device's last counted round."""
    if not (folder / "current").exists():
        return {}
    with ContainerReader(folder / "current") as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def write_state(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Keep `state` as `next`; it becomes `current` at the receipt only, or a repeated round would apply it twice."""
    (folder / "next").unlink(missing_ok=True)  # of an assignment that was given up
    if not state:
        return
    folder.mkdir(parents=True, exist_ok=True)
    table = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in state.items()]
    temporary = folder / ".next.tmp"
    try:
        faults.point("worker.state.write")
        write_container(temporary, {}, table, state.values())
        durable.publish(temporary, folder / "next", point="worker.state")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _evaluation(result: Result | None) -> Evaluation | None:
    if result is None:
        return None
    return Evaluation(
        num_samples=result.num_samples, num_correct=result.num_correct, loss_sum=result.finite_loss_sum
    )


@dataclass(slots=True)
class _Progress:
    """JSON lines to the daemon; the first and the last of a phase always, others twice a second at most."""

    fd: int = -1
    phase: str = ""
    due: float = 0.0

    def __post_init__(self) -> None:
        text = os.environ.get("FEDFIT_PROGRESS_FD", "")
        if text.isdigit():
            self.fd = int(text)
            os.set_blocking(self.fd, False)  # a slow reader loses lines; it does not hold up the training

    def __call__(self, phase: str, step: int, total: int, loss: float) -> None:
        now = time.monotonic()
        if self.fd < 0 or (phase == self.phase and step != total and now < self.due):
            return
        self.phase, self.due = phase, now + _PROGRESS_EVERY_S
        shown = loss if math.isfinite(loss) else None
        line = json.dumps({"phase": phase, "step": step, "total": total, "loss": shown}) + "\n"
        try:
            os.write(self.fd, line.encode())
        except BlockingIOError:
            pass
        except OSError:  # the reader is gone
            self.fd = -1
