"""What a worker does, step by step: load, plan, warm up, evaluate, train, write. Imports torch.

Covers: the files of an assignment, the order of things, and what this device's owner allows: tasks by name and hash,
results that may leave. Does not cover: the process around it (`worker`), the loop (`training`), what is learnt
(`methods`), the model (`run_model`).
The tensors of an update depend on the order alone, bit for bit; its meta also holds measurements, which vary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from edge_client import durable, faults
from edge_client.config.files import DataSection, DeviceFile, format_bytes
from edge_client.config.run_file import RunFile
from edge_client.config.task_files import split_place
from edge_client.data.labels import UnknownClassError
from edge_client.data.sources import Samples, divide, open_data
from edge_client.data.user_dataset import as_set
from edge_client.device import guard, meter
from edge_client.device.probe import native_bf16
from edge_client.errors import (
    FedfitError,
    InputError,
    MachineError,
    NoSuchNameError,
    NothingFitsError,
    PayloadError,
    is_out_of_memory,
)
from edge_client.knowledge.kinds import Knowledge, as_read, named_tensors
from edge_client.knowledge.kinds import parse as parse_knowledge
from edge_client.knowledge.schema import HELD_BACK, PUBLIC_PART, TOLD_PART, Limits
from edge_client.measuring.calibration import job_for
from edge_client.measuring.fitting import CalibrationNeededError, Fitting, find_rows, sent_rows
from edge_client.methods import registry as methods
from edge_client.methods import user_methods as own
from edge_client.methods.base import Client, Job, Method, Outcome
from edge_client.methods.coverage import kept as kept_names
from edge_client.methods.coverage import left_out
from edge_client.methods.slices import WHOLE_MODEL, architecture
from edge_client.models.contract import Model
from edge_client.models.layout import allows_bf16, to_channels_last
from edge_client.models.slicing import SliceSpec, parse
from edge_client.planning.base_memory import base_bytes
from edge_client.planning.cost import evaluation_batch
from edge_client.planning.rows import ModelRows
from edge_client.records import Evaluation, Report, TrainingPlan, WorkOrder, from_map, to_map
from edge_client.task.run_model import Recipe, load_weights, recipe
from edge_client.task.task import Device, Source, Task, data_table, read_source
from edge_client.training import optimizers
from edge_client.training.evaluate import Result, evaluate
from edge_client.training.loop import Settings, Trained, generator, train
from edge_client.training.optimizers import Optimizer
from edge_client.training.seeds import derive
from edge_client.training.warmup import warm_up
from edge_client.user_code import UserCode
from edge_client.wire.container import (
    CONFUSION,
    EXTRA_PREFIX,
    MODEL_PREFIX,
    Entry,
    payload_kind,
    read_header,
)
from edge_client.wire.tensors import ContainerReader, codec_for, read_entry, write_container
from edge_client.worker import live_files as notes
from edge_client.worker import received_model as received
from edge_client.worker.allowance import Allowance
from edge_client.worker.privacy import Gate, Ledger, fresh_noise
from edge_client.worker.received_model import STORED_STATE

__all__ = [
    "CalibrationNeededError",
    "DeclinedError",
    "Kept",
    "StoredKnowledge",
    "StoredTensors",
    "carry_out",
    "memory_key",
    "read_state",
    "write_state",
]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_PROGRESS_EVERY_S = 0.5
_LIMIT_SLACK_BYTES = 16 * 2**20  # RLIMIT_DATA counts virtual memory: arenas and guard pages that are never resident
_KERNEL_BYTES = 3 * 2**20  # of a convolution: 0.25 MB for each of forward, two backwards, and about four batch sizes
# what the loop changes from batch to batch; other changes of a plan wait until the method has done its phase
_AT_ONCE = ("microbatch", "buffered", "budget_bytes", "predicted_bytes", "training_bytes")
_NOTEWORTHY_BYTES = 2**20  # of knowledge: less hides in what processes differ by
_MOST_TOLD = 10**7  # rows of a table that the coordinator sent
_STACK_BYTES = 8 * 2**20  # of a thread, counted as a whole and hardly used


class DeclinedError(FedfitError):
    """This device will not do the assignment; `code` is short and stable, the message is for people."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Kept:
    """What a process that does many assignments does once: what follows from files that never change.

    Nothing that an assignment changes is kept, so that each begins as in a process of its own, warmed up.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once(self, what: str, key: object, make: Callable[[], T]) -> T:
        """What `make` makes, or made before of an equal `key`, a record or plain data."""
        name = f"{what} {json.dumps(to_map(key), sort_keys=True)}"
        if name not in self._made:
            self._made[name] = make()
        made: T = self._made[name]
        return made


def carry_out(order: WorkOrder, workdir: Path, kept: Kept | None = None) -> None:
    """Carry out `order` and leave `update.bin` and `update.json` in `workdir`; raises `DeclinedError`."""
    work = _Work(order, workdir, kept or Kept())
    with _asking(work.run.method.name):
        _carry_out(order, work)


def _carry_out(order: WorkOrder, work: _Work) -> None:
    work.progress("load", 0, 1, 0.0)
    training_plan = work.load()
    if not (order.train or order.evaluate):
        work.progress("load", 1, 1, 0.0)
        work.write(training_plan, None, None, Outcome())
        return
    client = work.begin(training_plan)
    work.progress("load", 1, 1, 0.0)
    result = work.evaluate(client, training_plan)
    trained, outcome = work.train(client, training_plan)
    work.write(work.plan, result, trained, outcome)  # memory may have become less meanwhile


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


@contextmanager
def _asking(method: str) -> Iterator[None]:
    """Of a method of one's own, which a simulation tries, errors name its file and are this device's reason."""
    code = own.around(method, "on a device")
    if isinstance(code, nullcontext):
        yield
    else:
        with _declining("bad_method", "unknown_method"), code:
            yield


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
        path = self._part("run")
        self.run, self.settings = kept.once("run", str(path), lambda: _read_settings(path))
        self.device: DeviceFile = from_map(DeviceFile, order.device_file, where="device file")
        self.gate = Gate(share=self.device.share, ledger=Ledger(Path(order.ledger)))
        self.recipe: Recipe
        self.cut: SliceSpec  # of the model, what this device trains
        self.rung: str
        self.method: Method
        self.model: Model
        self.train_data: Samples
        self.test_data: Samples
        self.plan: TrainingPlan  # in force
        self.allowance = Allowance(order.budget_bytes, workdir)
        self.replans = order.replans
        self.extra: Mapping[str, Tensor] = {}  # the method's tensors, as they were received
        self.held_back: list[str] = []  # knowledge that stays here: why
        self.fitting: Fitting
        self.warm_bytes = 0  # measured; what is planned with is `base_bytes`
        self.base_bytes = 0

    def load(self) -> TrainingPlan:
        """What a plan needs, in an order that fails early."""
        run, order = self.run, self.order
        if order.evaluate and not order.train and not self.device.share.metrics:
            raise DeclinedError("not_shared", "this device's owner keeps its test results (share.metrics = false)")
        with _declining("bad_method", "unknown_method"):
            self.method = methods.of_run(run)
        self._ask_the_gate()
        with _declining("bad_task", "bad_task"):
            self.recipe = recipe(run, self._task_source())
        with _declining("bad_model", "unknown_model"):
            self.cut, self.rung = parse(self.method.slices.network(order.slice)), architecture(order.slice)
            sizes = self.kept.once("sizes", self._key(), lambda: self.recipe.parameter_sizes(self.cut))
        room_bytes = _LIMIT_SLACK_BYTES + order.threads * _STACK_BYTES
        self._limit(room_bytes)  # what is compressed is unpacked, what a task returns is in memory: bounded, too
        with _declining("bad_data", "bad_data"), self._fitting("its data"):
            self._open_data()
        with _declining("nothing_fits", "nothing_fits"):
            self._check_weights(sizes)
        rows, half = self._find_rows(), self._find_half()
        self._limit(room_bytes)  # building runs one sample: bounded, too
        with _declining("bad_model", "unknown_model"):
            self.model = self._build()
        guard.lift_limit()  # the threads and libraries that the warm-up loads are not the model's
        self._lay_out(rows, half)
        with _declining("bad_model", "bad_model"), self.recipe.user_code("a first step on zeros"):
            self.kept.once("warm", self._key(), lambda: warm_up(self.model, self._settings(None)))
        self._seed()  # loads libraries, 2 MB the first time in a process, which are no training's; `begin` seeds again
        self.warm_bytes = meter.rss_bytes()
        self.base_bytes = self._base(rows)
        self._begin_allowance()
        with _declining("nothing_fits", "nothing_fits"):
            self.plan = self._plan()
        return self.plan

    def _ask_the_gate(self) -> None:
        """What this device's owner does not let out is told before anything is trained."""
        rules = methods.knowledge(self.run.method.name, self.run.method.parameters)
        only_evaluates = self.order.evaluate and not self.order.train  # a dry run does neither, and wants to know
        refused = self.gate.refusal(rules.kinds) if rules is not None and not only_evaluates else None
        if refused is not None:
            raise DeclinedError(refused.code, refused.detail)

    def _key(self) -> list[str]:
        """Of what is the same in all assignments of a run that train as much of the model."""
        return [self.order.parts["run"], self.rung]

    def _check_weights(self, sizes: Sequence[int]) -> None:
        """A model whose weights alone do not fit is never made."""
        needed = meter.rss_bytes() + 4 * sum(sizes)
        if needed > self.allowance.budget_bytes:
            raise NothingFitsError(
                f"its parameters alone need {format_bytes(needed)} with the process, the budget is "
                f"{format_bytes(self.allowance.budget_bytes)}; set limits.memory to more, or take a smaller model"
            )

    def _find_rows(self, dtype: str = "fp32") -> ModelRows | None:
        """What this model's units cost; raises `CalibrationNeededError` the first time, where that is allowed."""
        task = self.device.tasks.get(self.run.task.name) if self.run.task is not None else None
        job = job_for(self.run, self.method.plans, self.train_data.shape, task=task, cut=self.rung, dtype=dtype)
        note = self.workdir / "calibration.json"
        tried = note.exists() and _read_json(note).get("key") == job.key
        room = self.allowance.budget_bytes - meter.rss_bytes()
        may_measure = self.device.limits.calibrate and not tried
        sent = sent_rows(self.settings, self.rung) if dtype == "fp32" else None
        return self.kept.once("rows", job.key, lambda: find_rows(job, sent, may_measure=may_measure, room_bytes=room))

    def _find_half(self) -> ModelRows | None:
        """The same in bf16, where the run allows it and this processor has it."""
        return self._find_rows("bf16") if self.run.train.dtype == "auto" and native_bf16() else None

    def _lay_out(self, rows: ModelRows | None, half: ModelRows | None) -> None:
        """The layout that the rows were measured in, and room for the method to plan with."""
        self.fitting = Fitting.of(
            self.run,
            self.method.plans,
            self.model,
            rung=self.rung,
            rows=rows,
            half=half if half is not None and allows_bf16(self.model) else None,
            num_samples=len(self.train_data),
            disk_bytes=min(durable.free_bytes(self.workdir) // 2, self.device.limits.disk),
            sample_bytes=self.method.knowledge.sample_bytes(self.model),
        )
        if self.fitting.rows.channels_last:
            to_channels_last(self.model)

    def _base(self, rows: ModelRows | None) -> int:
        """The base memory of this worker, for its plans."""
        data_bytes = self.train_data.held_bytes + self.test_data.held_bytes
        return base_bytes(rows, warm_bytes=self.warm_bytes, data_bytes=data_bytes, knowledge_bytes=self._told_bytes())

    def _told_bytes(self) -> int:
        """What knowledge that came takes in memory as float32; next to nothing for class means."""
        wider = {"fp32": 1, "int8": 4}.get(self.run.rounds.codec, 2)
        num_bytes = wider * sum(path.stat().st_size for path in self._told_paths())
        return num_bytes if num_bytes >= _NOTEWORTHY_BYTES else 0

    def _begin_allowance(self) -> None:
        """The process is warm: what it uses from now on is training."""
        if self.order.training_budget_bytes is not None:
            self.allowance.budget_bytes = self.base_bytes + self.order.training_budget_bytes
        self._check_base()

    def begin(self, training_plan: TrainingPlan) -> Client:
        """What training needs beside the plan."""
        self._note_trial()
        self.model.recompute = training_plan.recompute
        self.allowance.begin()
        self._limit(self._slack_bytes())
        load_weights(self.model, self._received())
        self.extra = StoredTensors(self._received(), EXTRA_PREFIX)
        client = self.method.client()
        with _declining("bad_method", "unknown_method"):
            client.begin(self._job(training_plan))
        self._seed()
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

    def _seed(self, *purpose: str) -> None:
        """The global generators that a user's code may draw from; ours are made from the seed where they are used."""
        torch.manual_seed(derive(self.order.seed, "torch", *purpose))
        random.seed(derive(self.order.seed, "random", *purpose))
        np.random.seed(derive(self.order.seed, "numpy", *purpose) % 2**32)

    def _build_another(self, purpose: str) -> Model:
        """A model of this kind with random weights of its own; `begin` seeds the global generators afterwards."""
        self._seed("model", purpose)
        model = self.recipe.build(self.train_data.shape, self.cut)
        if self.fitting.rows.channels_last:
            to_channels_last(model)
        model.recompute = self.model.recompute
        return model

    @contextmanager
    def _fitting(self, what: str) -> Iterator[None]:
        """Under the limit: what does not fit is no bug."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            budget = format_bytes(self.order.budget_bytes)
            raise NothingFitsError(f"{what} alone needs more than the budget of {budget}; see limits.memory") from error

    def _build(self) -> Model:
        """Under the limit; a built-in model's size was checked before, a task's shows only here."""
        with self._fitting("making the model") if self.run.task is not None else nullcontext():
            return self.recipe.build(self.train_data.shape, self.cut)

    def _plan(self) -> TrainingPlan:
        """The plan of the assignment while it fits: the budget may be another one than when it was made."""
        fresh = self._fresh(self.allowance.budget_bytes)
        given = self.order.plan
        return given if given is not None and self._still_fits(given) else fresh

    def _fresh(self, budget_bytes: int) -> TrainingPlan:
        room, of_training = max(0, budget_bytes - self.base_bytes), self.order.training_budget_bytes is not None
        return self.fitting.plan(self.base_bytes, room, self._ceiling(), of_training=of_training)

    def _still_fits(self, given: TrainingPlan) -> bool:
        """Not more than is allowed now, nor than what failed here; not made for much less memory than there is."""
        budget, ceiling = self.allowance.budget_bytes, self._ceiling()
        below = ceiling is None or 0 < given.training_bytes < ceiling
        same = given.slice == self.rung
        return same and given.predicted_bytes <= budget and below and 10 * given.budget_bytes >= 9 * budget

    def _ceiling(self) -> int | None:
        """What a plan must stay below, because as much went over the budget here: in this lease, or in earlier work."""
        known = (self.order.ceiling_bytes, self.order.ceilings.get(memory_key(self.run, self.rung)))
        return min((num_bytes for num_bytes in known if num_bytes is not None), default=None)

    def _note_trial(self) -> None:
        """Whatever becomes of this process: the daemon knows what it tried."""
        key = memory_key(self.run, self.rung)
        trial = notes.Trial(key=key, budget_bytes=self.allowance.budget_bytes, plan=self.plan)
        with durable.disk_errors(f"cannot write into {self.workdir}"):
            notes.write_trial(self.workdir, trial)

    def _check_base(self) -> None:
        """No plan helps if the process itself is too large."""
        if self.base_bytes > self.allowance.budget_bytes:
            used, budget = format_bytes(self.base_bytes), format_bytes(self.allowance.budget_bytes)
            detail = f"a worker uses {used} before it trains, the budget is {budget}; see limits.memory"
            raise DeclinedError("nothing_fits", detail)

    def _slack_bytes(self) -> int:
        """What may be reserved and is hardly used, such as code made for each convolution and size of batch."""
        num_convs = sum(isinstance(part, nn.modules.conv._ConvNd) for part in self.model.modules())
        return _LIMIT_SLACK_BYTES + num_convs * _KERNEL_BYTES

    def _limit(self, slack_bytes: int) -> None:
        self.allowance.limit(slack_bytes)

    def _less(self) -> TrainingPlan | None:
        """Asked before every batch: a smaller plan, if there is less memory than before and this one does not fit."""
        budget = self.allowance.look()
        if budget is None:
            return None
        before = self.plan
        if before.predicted_bytes <= budget:
            self._go_by(replace(before, budget_bytes=budget))
            return None
        smaller = self._replan(budget)
        if smaller is None:
            return None
        self.replans += 1
        _log.info("only %s are left: %s, from now on %s", format_bytes(budget), before.describe(), smaller.describe())
        if replace(before, **{name: getattr(smaller, name) for name in _AT_ONCE}) == smaller:
            self._go_by(smaller)
        return smaller

    def _go_by(self, plan: TrainingPlan) -> None:
        """The plan is in force: what goes wrong from now on is its fault, and the limit is that of its budget."""
        if plan == self.plan:
            return
        self.plan = plan
        self.model.recompute = plan.recompute
        self.allowance.shrink(plan.budget_bytes, self._slack_bytes())
        self._note_trial()

    def _replan(self, budget_bytes: int) -> TrainingPlan | None:
        """A plan for less memory: smaller pieces, at once; or another way to train, from the method's next phase on.

        None if nothing fits: then the worker goes on as it is.
        """
        room = max(0, budget_bytes - self.base_bytes)
        try:
            return self.fitting.shrink(self.plan, self.base_bytes, room, self._ceiling()) or self._fresh(budget_bytes)
        except NothingFitsError as error:
            _log.warning("only %s are left, and no smaller plan fits: %s", format_bytes(budget_bytes), error)
            return None

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
                microbatch=evaluation_batch(self.fitting.rows, training_plan.training_bytes, training_plan.microbatch),
                channels_last=training_plan.channels_last,
                dtype=training_plan.dtype,
                progress=progress,
            )
        faults.point("worker.evaluated")
        return result

    def train(self, client: Client, training_plan: TrainingPlan) -> tuple[Trained | None, Outcome]:
        """Local training, if the order asks for it."""
        if not self.order.train:
            return None, Outcome()
        faults.point("worker.train.begin")
        settings = self._settings(training_plan)

        def progress(step: int, total: int, loss: float) -> None:
            faults.point("worker.train.step")
            self.progress("train", step, total, loss)

        with _declining("bad_data", "bad_data"), self.recipe.user_code("training"):
            trained = train(
                self.model,
                client,
                self.train_data,
                settings,
                progress=progress,
                replan=self._less,
                in_force=self._go_by,
            )
            outcome = client.end()
        if outcome.knowledge:
            known = self.gate.let_out(
                outcome.knowledge, run=self.order.run, round=self.order.round, noise=fresh_noise()
            )
            outcome = replace(outcome, knowledge=self._readable(known))
        self.allowance.check()
        faults.point("worker.trained")
        return trained, outcome

    def _readable(self, items: Sequence[Knowledge]) -> tuple[Knowledge, ...]:
        """Without what the coordinator would refuse, and the whole update with it; it is told why that lacks."""
        limits, left = methods.knowledge_limits(self.run), list[Knowledge]()
        for item in items:
            try:
                as_read([*left, item], limits, codec=self.run.rounds.codec, source="this device")
            except PayloadError as error:
                self.held_back.append(f"{error.code}: {error.detail}")
                _log.warning("%r stays here: %s", item.kind, error)
            else:
                left.append(item)
        return tuple(left)

    def _settings(self, training_plan: TrainingPlan | None) -> Settings:
        """How the loop trains; without a plan: how it warms up."""
        section = self.run.train
        return Settings(
            batch=section.batch,
            microbatch=training_plan.microbatch if training_plan is not None else section.batch,
            learning_rate=self.order.learning_rate,
            seed=self.order.seed,
            optimizer=section.optimizer,
            momentum=section.momentum,
            weight_decay=section.weight_decay,
            max_steps=section.max_steps,
            buffered=training_plan is not None and training_plan.buffered,
            folder=self.workdir,
            channels_last=self.fitting.rows.channels_last,
            dtype=training_plan.dtype if training_plan is not None else "fp32",
        )

    def write(
        self, training_plan: TrainingPlan, result: Result | None, trained: Trained | None, outcome: Outcome
    ) -> None:
        """Method state, then the update, then its manifest: a manifest means that all is there."""
        self.progress("write", 0, 1, 0.0)
        with durable.disk_errors(f"writing the update in {self.workdir}"):
            if self.order.train and self.order.method_state:
                write_state(Path(self.order.method_state), outcome.state, self.order.slice)
            if self.order.method_state and (self.order.train or self.order.evaluate):
                received.note(self.order, self._part("run"), self._received())
            report = self._report(training_plan, result, trained, outcome)
            sha256, length = self._write_update(report, result, outcome)
            manifest = {"sha256": sha256, "length": length, "num_samples": report.num_samples}
            durable.write_bytes(self.workdir / "update.json", json.dumps(manifest).encode(), point="worker.manifest")
        self.progress("write", 1, 1, 0.0)

    def _part(self, key: str) -> Path:
        if key not in self.order.parts:
            raise PayloadError("malformed", f"the assignment has no part {key!r}, only {', '.join(self.order.parts)}")
        return Path(self.order.parts[key])

    def _received(self) -> Path:
        """The model, or the slice of it that this device trains."""
        return self._part("model" if self.order.slice == WHOLE_MODEL else f"slice:{self.order.slice}")

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
            shape, rename, own = run.model.input, self.device.rename, section
            self.train_data, self.test_data = self.kept.once(
                "data", [own, run.classes, shape, rename], lambda: open_data(own, run.classes, shape, rename)
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

    def _job(self, training_plan: TrainingPlan) -> Job:
        order = self.order
        return Job(
            model=self.model,
            round=order.round,
            num_rounds=order.num_rounds,
            epochs=self.run.train.epochs,
            learning_rate=order.learning_rate,
            class_counts=self.train_data.class_counts(len(self.run.classes)),
            slice=order.slice,
            plan=training_plan,
            rng=lambda purpose: generator(order.seed, "method", purpose),
            state=read_state(Path(order.method_state), order.slice) if order.method_state else {},
            extra=self.extra,
            kept=kept_names(read_header(self._received()).meta),
            received=StoredTensors(self._received(), MODEL_PREFIX, whole=EXTRA_PREFIX),
            build=self._build_another,
            data=self.train_data,
            knowledge=StoredKnowledge(self._told_paths(), codec=self.run.rounds.codec, classes=len(self.run.classes)),
            told_count=self.gate.told_count,
            clip_norm=self.gate.clip_norm,
            optimizer=self._another_optimizer,
        )

    def _told_paths(self) -> list[Path]:
        parts = self.order.parts.items()
        return [Path(path) for key, path in parts if key == PUBLIC_PART or key.startswith(TOLD_PART)]

    def _another_optimizer(self) -> Optimizer:
        section = self.run.train
        return optimizers.make(section.optimizer, momentum=section.momentum, weight_decay=section.weight_decay)

    def _report(
        self, training_plan: TrainingPlan, result: Result | None, trained: Trained | None, outcome: Outcome
    ) -> Report:
        scalars = dict(outcome.scalars)
        if trained is not None and math.isfinite(trained.mean_loss):
            scalars["loss"] = trained.mean_loss
        if trained is not None:
            scalars["replans"] = float(self.replans)
        return Report(
            num_samples=len(self.train_data) if trained is not None else 0,
            num_held=len(self.train_data),
            num_test=len(self.test_data),
            steps=trained.steps if trained is not None else 0,
            payload=payload_kind(self.run.rounds.codec) if trained is not None else "none",
            plan=training_plan,
            peak_bytes=self.allowance.peak_bytes(),
            base_bytes=self.warm_bytes,
            seconds=round(time.monotonic() - self.started, 3),
            scalars=scalars,
            versions={"python": platform.python_version(), "torch": str(torch.__version__)[:64]},
            evaluation=_evaluation(result),
        )

    def _trained_tensors(self, report: Report, outcome: Outcome) -> list[tuple[str, Tensor]]:
        """The model's and the method's tensors, without those that stay here or were not trained."""
        if report.payload == "none":
            return []
        rules, trained = self.method.plans, self.model.state_dict()
        names = [MODEL_PREFIX + name for name in trained] + [EXTRA_PREFIX + name for name in self.extra]
        lacking = left_out(names, report.plan, rules, read_header(self._received()).meta)
        values = {MODEL_PREFIX + name: tensor for name, tensor in trained.items()}
        values |= {EXTRA_PREFIX + name: tensor for name, tensor in outcome.extra.items()}
        return [
            (name, values[name] if name in values else self.extra[name.removeprefix(EXTRA_PREFIX)])
            for name in names
            if name not in lacking
        ]

    def _write_update(self, report: Report, result: Result | None, outcome: Outcome) -> tuple[str, int]:
        entries = self._trained_tensors(report, outcome)
        entries += named_tensors(outcome.knowledge)
        table = [(name, codec_for(t, self.run.rounds.codec), tuple(t.shape)) for name, t in entries]
        if result is not None:
            entries.append((CONFUSION, result.confusion))
            table.append((CONFUSION, "i64", tuple(result.confusion.shape)))
        meta = to_map(report) | ({HELD_BACK: "; ".join(self.held_back)} if self.held_back else {})
        temporary = self.workdir / ".update.bin.tmp"
        faults.point("worker.update.write")
        if report.payload == "delta":
            with ContainerReader(self._received()) as received:
                sent = set(received.names())
                tensors = (t - received.tensor(name) if name in sent else t for name, t in entries)
                written = write_container(temporary, meta, table, tensors)
        else:
            written = write_container(temporary, meta, table, (t for _, t in entries))
        durable.publish(temporary, self.workdir / "update.bin", point="worker.update")
        return written


def memory_key(run: RunFile, rung: str) -> str:
    """What the memory of training depends on beside the plan; the same in another run of the same model."""
    section = run.section(rung)
    model = to_map(section) | {"init": ""} if section is not None else None
    task = run.task.sha256 if run.task is not None else None
    workload = (run.train.batch, run.train.optimizer, run.train.momentum, run.train.threads)
    text = json.dumps([model, task, rung, len(run.classes), to_map(run.method), workload], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_settings(path: Path) -> tuple[RunFile, Mapping[str, Any]]:
    """The run, and all that came with it."""
    settings = _read_json(path)
    return from_map(RunFile, settings, where="run"), settings


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise PayloadError("malformed", f"{path.name} is not JSON: {error}") from error


class StoredTensors(Mapping[str, Tensor]):
    """Those of a file whose names begin with `prefix`, by the rest of their names; each is read when it is asked for.

    Peers, control variates and earlier models are as large as the model, and not all of them are needed at once. With
    `whole`, also those whose names begin with that, by their whole names.
    """

    def __init__(self, path: Path, prefix: str = "", *, whole: str | None = None) -> None:
        self._path = path
        self._entries: dict[str, Entry] = {}
        if path.exists():
            header = read_header(path)
            self._offset = header.data_offset
            known = (prefix,) if whole is None else (prefix, whole)
            found = (entry for entry in header.entries if entry.name.startswith(known))
            self._entries = {entry.name.removeprefix(prefix): entry for entry in found}

    def __getitem__(self, name: str) -> Tensor:
        entry = self._entries[name]
        fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read_entry(fd, self._offset, entry)
        finally:
            os.close(fd)

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # without reading it

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class StoredKnowledge(Iterable[Knowledge]):
    """What the coordinator told, from files: read, and found sound, in every pass over it."""

    def __init__(self, paths: Sequence[Path], *, codec: str, classes: int) -> None:
        self._paths, self._codec, self._classes = paths, codec, classes

    def __iter__(self) -> Iterator[Knowledge]:
        for path in self._paths:
            limits = Limits(num_classes=self._classes, max_rows=_MOST_TOLD, max_bytes=path.stat().st_size)
            with ContainerReader(path) as reader:
                yield from parse_knowledge(
                    reader.header.entries,
                    lambda entry: reader.tensor(entry.name),
                    limits,
                    codec=self._codec,
                    source="the coordinator",
                )


def read_state(folder: Path, cut: str = WHOLE_MODEL) -> Mapping[str, Tensor]:
    """What the method kept in this device's last round that is not known not to count; nothing of another slice.

    An assignment tells what counted before its worker begins (`workers.count_method_state`).
    """
    stored = sorted(folder.glob(f"{STORED_STATE}*"), key=lambda path: path.stat().st_mtime_ns)
    path = stored[-1] if stored else folder / "current"
    if path.exists() and read_header(path).meta.get("slice", WHOLE_MODEL) != cut:
        return {}
    return StoredTensors(path)


def write_state(folder: Path, state: Mapping[str, Tensor], cut: str = WHOLE_MODEL) -> None:
    """Keep `state` as `next`; it becomes `current` if its update counts, or a repeated round would apply it twice."""
    (folder / "next").unlink(missing_ok=True)  # of an assignment that was given up
    if not state:
        return
    folder.mkdir(parents=True, exist_ok=True)
    table = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in state.items()]
    temporary = folder / ".next.tmp"
    try:
        faults.point("worker.state.write")
        write_container(temporary, {"slice": cut}, table, state.values())
        durable.publish(temporary, folder / "next", point="worker.state")
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _evaluation(result: Result | None) -> Evaluation | None:
    if result is None:
        return None
    return Evaluation(num_samples=result.num_samples, num_correct=result.num_correct, loss_sum=result.finite_loss_sum)


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
