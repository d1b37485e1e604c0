"""One case of `edge-client prove`: planned from cost rows, then tried and trained by a real worker, as in a run.

The worker is the one that a daemon starts: a fork of a template, or a process of its own. It rehearses the plan, trains
under the kernel's limit and reports its peak. The budget is one of training alone, so that what counts is what training
adds to the warm worker.
Covers: the worker's folder, its end, what follows from its report. Does not cover: which cases there are
(`measuring.proof_cases`), all of them together (`prove_command`).
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edge_client import durable
from edge_client.client import workers
from edge_client.client.template import Template, TemplateError
from edge_client.client.warm_workers import LOADING_S
from edge_client.client.worker_outcome import last_lines
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import FedfitError, MachineError, NothingFitsError
from edge_client.measuring import proof_models
from edge_client.measuring.calibration import calibrated, job_for
from edge_client.measuring.plan_search import PlanSearch
from edge_client.measuring.proof_cases import ZOO, Case
from edge_client.methods import registry as methods
from edge_client.models import registry as models
from edge_client.planning.cost import Shape, training_bytes
from edge_client.records import Report, WorkOrder, from_map, to_map
from edge_client.task.run_model import recipe
from edge_client.task.task import read_source
from edge_client.wire.container import EXTRA_PREFIX, MODEL_PREFIX, read_header
from edge_client.wire.tensors import write_container
from edge_client.worker import exit_codes

__all__ = ["Outcome", "Prover"]

Json = dict[str, Any]

_CLASSES = [str(number) for number in range(10)]
_WORKER_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case; all bytes are of training, above the warm worker."""

    case: Case
    result: str  # inside | above the prediction | above the budget | did not fit | failed
    plan: str = ""
    budget_bytes: int = 0
    searched_bytes: int = 0  # what the search predicted of the plan that was trained
    predicted_bytes: int = 0  # after its rehearsal; with spare memory, if the budget had room for that
    spare_bytes: int = 0
    measured_bytes: int = 0
    rehearsal_s: float = 0.0
    train_s: float = 0.0
    detail: str = ""

    @property
    def is_above(self) -> bool:
        """Whether the promise was broken; what failed proves nothing and counts as broken."""
        return self.result.startswith("above") or self.result == "failed"


class Prover:
    """Carries out cases, one after the other; what is measured of models is kept between them."""

    def __init__(self, folder: Path, *, task: str | None = None, input_shape: tuple[int, ...] | None = None) -> None:
        """`folder` is for files; with a `task`, its model is the only architecture."""
        self._folder = folder
        self._task, self._input_shape = task, input_shape
        self._template: Template | None = None

    def close(self) -> None:
        """End the template."""
        if self._template is not None:
            self._template.end()

    def carry_out(self, case: Case) -> Outcome:
        """Plan, train, measure."""
        with tempfile.TemporaryDirectory(prefix=f"case-{case.number}-", dir=self._folder) as name:
            folder = Path(name)
            try:
                run, device_file, shape, place = self._setting(case, folder)
                budget_bytes, search = self._budget(case, run, shape, place)
            except NothingFitsError as error:
                return Outcome(case=case, result="did not fit", detail=str(error))
            except FedfitError as error:
                return Outcome(case=case, result="failed", detail=str(error))
            work = self._order(case, folder, run, device_file, budget_bytes, place, shape)
            code = self._run_worker(work, cold=case.cold)
            if code == exit_codes.NOT_AS_FORK:
                code = self._run_worker(work, cold=True)
            return _outcome(case, work, code, budget_bytes, search)

    def _setting(self, case: Case, folder: Path) -> tuple[RunFile, Json, tuple[int, ...], str | None]:
        """The run, the device's file, the shape of a sample, and where the task is."""
        table: Json = {
            "name": "prove",
            "classes": _CLASSES,
            "method": {"name": case.method},
            "train": {**case.train, "batch": case.batch, "epochs": case.epochs},
        }
        if case.architecture in ZOO:
            table["model"] = ZOO[case.architecture]
            run = parse_table(RunFile, table, source="the case")
            shape = tuple(table["model"]["input"])
            data = {"train": _npz(folder, "train", shape, case.num_samples), "source": "npz", "test-fraction": 0}
            if case.num_tests:
                data["test"] = _npz(folder, "test", shape, case.num_tests)
            return run, {"data": {key.replace("-", "_"): value for key, value in data.items()}}, shape, None
        place, shape = self._task_file(case)
        path = Path(place.rpartition(":")[0])
        table["task"] = {"name": "prove", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        labels = {"samples": str(case.num_samples), "tests": str(case.num_tests)}
        return (
            parse_table(RunFile, table, source="the case"),
            {"tasks": {"prove": place}, "labels": labels},
            shape,
            place,
        )

    def _task_file(self, case: Case) -> tuple[str, tuple[int, ...]]:
        """A file for each architecture and size, so that what was measured of it is used again."""
        if self._task is None:
            made = f"named({case.architecture!r})"
            shape = proof_models.named(case.architecture).input_shape
        else:
            assert self._input_shape is not None
            shape = self._input_shape
            made = f"Architecture(lambda size, classes: theirs.model(classes), {shape!r}, theirs.units)"
        text = (
            "from edge_client.measuring.proof_models import Architecture, named, task_of\n"
            "from edge_client.task.task import load_task\n"
            + (f"theirs = load_task({self._task!r})\n" if self._task is not None else "")
            + f"task = task_of({made}, {case.size})\n"
        )
        path = self._folder / f"task-{hashlib.sha256(text.encode()).hexdigest()[:16]}.py"
        path.write_text(text, encoding="utf-8")
        return f"{path}:task", shape

    def _budget(self, case: Case, run: RunFile, shape: tuple[int, ...], place: str | None) -> tuple[int, PlanSearch]:
        """As much as the case has room for, between the smallest plan and training everything at once."""
        rules = methods.plan_rules(run.method.name, run.method.parameters)
        rows = calibrated(job_for(run, rules, shape, task=place), durable.cache_dir())
        search = PlanSearch(run=run, rules=rules, rows=rows, num_samples=case.num_samples)
        whole = training_bytes(rows, search.workload(), Shape(microbatch=case.batch))
        try:
            least = search.choose(0, 0, of_training=True).chosen.training_bytes
        except NothingFitsError as error:
            least = error.least_bytes or whole
        return int(least + case.room * (whole - least)), search

    def _order(
        self,
        case: Case,
        folder: Path,
        run: RunFile,
        device_file: Mapping[str, Any],
        budget_bytes: int,
        place: str | None,
        shape: tuple[int, ...],
    ) -> Path:
        work = folder / "work"
        work.mkdir()
        (work / "run.json").write_text(json.dumps(to_map(run)), encoding="utf-8")
        _write_model(work / "model.bin", run, place, shape)
        order = WorkOrder(
            lease="prove",
            run="prove",
            round=1,
            num_rounds=2,
            train=True,
            evaluate=case.num_tests > 0,
            seed=case.number,
            learning_rate=0.001,
            budget_bytes=2**45,
            training_budget_bytes=budget_bytes,
            device="prove",
            parts={"run": str(work / "run.json"), "model": str(work / "model.bin")},
            device_file=device_file,
            method_state=str(work / "state"),
        )
        (work / "order.json").write_text(json.dumps(to_map(order)), encoding="utf-8")
        return work

    def _run_worker(self, work: Path, *, cold: bool) -> int:
        """The exit code of a worker for this folder."""
        (work / "error.json").unlink(missing_ok=True)
        read, write = os.pipe()
        with open(work / "log.txt", "wb") as log, os.fdopen(read, "rb"):
            try:
                process = self._fork(work, write, log.fileno()) if not cold else None
                if process is None:
                    process = workers.spawn(work, write, log.fileno())
            finally:
                os.close(write)
            try:
                return process.wait(_WORKER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise MachineError(f"a worker did not end within {_WORKER_S:g} s") from None

    def _fork(self, work: Path, progress: int, log: int) -> workers.WorkerProcess | None:
        """A fork of the template, which is started where there is none; None where that does not work."""
        if self._template is None or self._template.has_ended:
            self._template = Template()
        until = time.monotonic() + LOADING_S
        while not self._template.is_ready:
            if self._template.has_ended or time.monotonic() > until:
                return None
            select.select([self._template.fd], [], [], 1.0)
            self._template.read()
        try:
            return self._template.fork(work, progress=progress, log_file=log)
        except TemplateError:
            return None


def _npz(folder: Path, name: str, shape: tuple[int, ...], num_samples: int) -> str:
    rng, path = np.random.default_rng(num_samples), folder / f"{name}.npz"
    np.savez(path, x=rng.random((num_samples, *shape), dtype=np.float32), y=np.arange(num_samples) % len(_CLASSES))
    return str(path)


def _write_model(path: Path, run: RunFile, place: str | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    if place is None:
        section = run.model
        assert section is not None
        model: torch.nn.Module = models.build(
            section.name, input_shape=shape, num_classes=len(_CLASSES), options=section.options
        )
    else:
        model = recipe(run, read_source(Path(place.rpartition(":")[0]))).build(shape)
    tensors = {MODEL_PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    extra = methods.of_run(run).travel.extra_tensors(model)  # type: ignore[arg-type]
    tensors |= {EXTRA_PREFIX + name: tensor for name, tensor in extra.items()}
    kinds = {torch.float32: "fp32", torch.int64: "i64"}
    table = [(name, kinds[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
    write_container(path, {}, table, tensors.values())


def _outcome(case: Case, work: Path, code: int, budget_bytes: int, search: PlanSearch) -> Outcome:
    if code != exit_codes.DONE:
        error = json.loads((work / "error.json").read_bytes()) if (work / "error.json").exists() else {}
        detail = error.get("detail") or "; ".join(last_lines(work / "log.txt"))[-500:] or f"exit code {code}"
        if error.get("code") == "nothing_fits":
            return Outcome(case=case, result="did not fit", budget_bytes=budget_bytes, detail=detail)
        result = "above the budget" if code == exit_codes.OVER_BUDGET or code == -9 else "failed"
        return Outcome(case=case, result=result, budget_bytes=budget_bytes, detail=detail)
    report = from_map(Report, read_header(work / "update.bin").meta)
    assert report.plan is not None
    measured = report.private_peak_bytes - report.private_base_bytes
    predicted = report.plan.training_bytes + report.plan.spare_bytes
    if measured > budget_bytes:
        result = "above the budget"
    else:
        result = "inside" if measured <= predicted <= budget_bytes else "above the prediction"
    phases = report.phases or {}
    return Outcome(
        case=case,
        result=result,
        plan=report.plan.describe(),
        budget_bytes=budget_bytes,
        searched_bytes=training_bytes(search.rows, search.workload(), Shape.of(report.plan)),
        predicted_bytes=predicted,
        spare_bytes=report.plan.spare_bytes,
        measured_bytes=measured,
        rehearsal_s=phases.get("rehearse", 0.0),
        train_s=phases.get("train", 0.0),
    )
