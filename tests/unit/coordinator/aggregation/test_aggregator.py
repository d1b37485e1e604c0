"""The aggregator's jobs, and its process: answers in order, errors as answers, faults where they are named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from torch import Tensor

from coordinator.aggregation.frozen import FrozenSet, FrozenUpdate
from coordinator.conductor.intake import Expected, check_header
from edge_client import durable
from edge_client.config.files import parse_table
from edge_client.config.run_file import RunFile
from edge_client.errors import PayloadError
from edge_client.methods import registry
from edge_client.methods.coverage import left_out
from edge_client.records import TrainingPlan, from_map, to_map
from edge_client.wire.container import read_header
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

ROOT = Path(__file__).parents[4]
RUN: dict[str, Any] = to_map(
    parse_table(
        RunFile,
        {"name": "t", "seed": 5, "model": {"name": "mlp", "input": [2], "hidden": [3]}, "classes": ["a", "b"]},
        source="test",
    )
)

_INT8 = RUN | {"rounds": RUN["rounds"] | {"codec": "int8"}}


def _save(
    path: Path, values: Mapping[str, Tensor], *, codec: str = "fp32", meta: Mapping[str, Any] | None = None
) -> Path:
    names = [name if "/" in name else f"model/{name}" for name in values]
    table = [(name, codec_for(v, codec), v.shape) for name, v in zip(names, values.values(), strict=True)]
    write_container(path, meta or {}, table, iter(values.values()))
    return path


def _load(path: Path) -> dict[str, Tensor]:
    with ContainerReader(path) as reader:
        return {name.removeprefix("model/"): reader.tensor(name) for name in reader.names()}


def _report(payload: str, num_samples: int = 10, steps: int = 0) -> dict[str, Any]:
    return {"num_samples": num_samples, "payload": payload, "steps": steps}


def _check(base: Path, update: Path, max_norm: float | None = None, **more: Any) -> dict[str, Any]:
    job = {"id": 1, "job": "check", "base": str(base), "update": str(update), "max_norm": max_norm}
    return do_job(job | more)


def _fold_job(model: Path, updates: list[tuple[str, Path, int]], out: Path, base: Path | None = None) -> dict[str, Any]:
    return {
        "id": 2,
        "job": "fold",
        "run": RUN,
        "round": 3,
        "model": str(model),
        "base": str(base or model),
        "updates": [{"device": d, "path": str(p), "num_samples": n} for d, p, n in updates],
        "out": str(out),
    }


def test_init_is_a_function_of_the_seed(tmp_path: Path) -> None:
    """The same seed twice: the same bytes; another seed: others. An mlp 2-3-2 has 6 + 3 + 6 + 2 = 17 parameters."""
    replies = [
        do_job({"id": i, "job": "init", "run": RUN | {"seed": seed}, "out": str(tmp_path / f"{i}")})
        for i, seed in enumerate([5, 5, 6])
    ]
    assert all(reply["ok"] for reply in replies)
    assert replies[0]["sha256"] == replies[1]["sha256"] != replies[2]["sha256"]
    assert replies[0]["sha256"] == durable.sha256_file(tmp_path / "0")
    assert replies[0]["length"] == (tmp_path / "0").stat().st_size
    with ContainerReader(tmp_path / "0") as reader:
        assert reader.header.meta == {}
        assert all(name.startswith("model/") for name in reader.names())
    assert sum(value.numel() for value in _load(tmp_path / "0").values()) == 17


def test_encode_keeps_names_and_order_and_applies_the_rule(tmp_path: Path) -> None:
    """int8: row (127, -127) has scale 1 and is exact; the vector is fp32, the counter i64."""
    model = _save(
        tmp_path / "m", {"w": torch.tensor([[127.0, -127.0]]), "b": torch.tensor([0.1]), "n": torch.tensor(3)}
    )
    reply = do_job({"id": 1, "job": "encode", "run": _INT8, "model": str(model), "out": str(tmp_path / "o")})
    assert reply["ok"]
    with ContainerReader(tmp_path / "o") as reader:
        assert [(e.name, e.codec) for e in reader.header.entries] == [
            ("model/w", "int8"),
            ("model/b", "fp32"),
            ("model/n", "i64"),
        ]
    assert _load(tmp_path / "o")["w"].tolist() == [[127.0, -127.0]]


def test_check_measures_weights_against_the_base(tmp_path: Path) -> None:
    """(4, 5) - (1, 1) = (3, 4): norm 5; counters do not count."""
    base = _save(tmp_path / "base", {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(1)})
    meta = _report("params", steps=8)
    update = _save(tmp_path / "u", {"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(9)}, meta=meta)
    assert _check(base, update) == {"id": 1, "ok": True, "norm": 5.0}
    assert _check(base, update, 5.0)["ok"]


def test_check_measures_a_delta_as_it_is(tmp_path: Path) -> None:
    """Over two tensors: sqrt(3*3 + 4*4) = 5."""
    base = _save(tmp_path / "base", {"w": torch.tensor([100.0]), "v": torch.tensor([100.0])})
    update = _save(tmp_path / "u", {"w": torch.tensor([3.0]), "v": torch.tensor([4.0])}, meta=_report("delta"))
    assert _check(base, update)["norm"] == 5.0


def test_check_refuses_an_update_that_moves_too_far(tmp_path: Path) -> None:
    """Norm 5 against a limit of 4.9."""
    base = _save(tmp_path / "base", {"w": torch.tensor([0.0, 0.0])})
    update = _save(tmp_path / "u", {"w": torch.tensor([3.0, 4.0])}, meta=_report("params"))
    reply = _check(base, update, 4.9)
    assert (reply["ok"], reply["code"]) == (False, "norm")
    assert "5" in reply["detail"]


@pytest.mark.parametrize("payload", ["params", "delta"])
def test_check_bounds_the_first_round_by_the_model_itself(tmp_path: Path, payload: str) -> None:
    """Base (3, 4) has norm 5: with a ratio of 2 at most 2 * (5 + 1) = 12 is accepted; counters do not count."""
    base = _save(tmp_path / "base", {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(1000)})
    for moved, ok in ((12.0, True), (12.1, False)):
        start = torch.tensor([3.0, 4.0]) if payload == "params" else torch.zeros(2)
        counter = torch.tensor(1000 if payload == "params" else 0)
        values = {"w": start + torch.tensor([moved, 0.0]), "n": counter}
        reply = _check(base, _save(tmp_path / "u", values, meta=_report(payload)), max_ratio=2.0)
        assert reply["ok"] == ok
        assert ok or (reply["code"], "at most 12 is accepted" in reply["detail"]) == ("norm", True)


def test_check_prefers_what_is_usual_to_the_size_of_the_model(tmp_path: Path) -> None:
    """Norm 5 against a usual limit of 4, while the ratio alone would allow 20 * (0 + 1)."""
    base = _save(tmp_path / "base", {"w": torch.zeros(2)})
    update = _save(tmp_path / "u", {"w": torch.tensor([3.0, 4.0])}, meta=_report("params"))
    assert _check(base, update, max_ratio=20.0)["ok"]
    assert _check(base, update, 4.0, max_ratio=20.0)["code"] == "norm"


@pytest.mark.parametrize(
    ("payload", "counter", "ok"),
    [("params", 112, True), ("params", 113, False), ("delta", 12, True), ("delta", 13, False), ("delta", -101, False)],
)
def test_check_refuses_a_counter_that_the_steps_cannot_explain(
    tmp_path: Path, payload: str, counter: int, ok: bool
) -> None:
    """100 batches before, 4 steps of at most 3 passes: 112 at most. The largest one is kept, so one lie would stay."""
    base = _save(tmp_path / "base", {"n": torch.tensor(100)})
    update = _save(tmp_path / "u", {"n": torch.tensor(counter)}, meta=_report(payload, steps=4))
    reply = _check(base, update, max_passes=3)
    assert reply["ok"] == ok
    assert ok or reply["code"] == "range"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("payload", ["params", "delta"])
def test_check_refuses_values_that_are_not_finite(tmp_path: Path, bad: float, payload: str) -> None:
    """One is enough, also without a limit on the norm."""
    base = _save(tmp_path / "base", {"w": torch.zeros(100)})
    values = torch.zeros(100)
    values[57] = bad
    reply = _check(base, _save(tmp_path / "u", {"w": values}, meta=_report(payload)))
    assert (reply["ok"], reply["code"]) == (False, "not_finite")
    assert "'model/w'" in reply["detail"]


@pytest.mark.parametrize("matrix", [[[1, -1], [0, 2]], [[1, 2**60], [0, 2]]])
def test_check_refuses_impossible_counts(tmp_path: Path, matrix: list[list[int]]) -> None:
    """Nobody answers minus one question."""
    base = _save(tmp_path / "base", {"w": torch.zeros(1)})
    update = _save(tmp_path / "u", {"evaluation/confusion": torch.tensor(matrix)}, meta=_report("none", 0))
    assert _check(base, update)["code"] == "range"


def test_check_accepts_an_evaluation_without_a_model(tmp_path: Path) -> None:
    """Nothing moved: norm 0."""
    base = _save(tmp_path / "base", {"w": torch.zeros(1)})
    update = _save(tmp_path / "u", {"evaluation/confusion": torch.tensor([[5, 1], [0, 2]])}, meta=_report("none", 0))
    assert _check(base, update) == {"id": 1, "ok": True, "norm": 0.0}


@pytest.mark.parametrize(("values", "code"), [({"w": torch.zeros(2)}, "shape"), ({"x": torch.zeros(1)}, "names")])
def test_check_does_not_trust_the_intake(tmp_path: Path, values: dict[str, Tensor], code: str) -> None:
    """A table that does not fit the base is an answer, not a crash."""
    base = _save(tmp_path / "base", {"w": torch.zeros(1)})
    assert _check(base, _save(tmp_path / "u", values, meta=_report("params")))["code"] == code


def test_fold_is_the_weighted_mean(tmp_path: Path) -> None:
    """(10 * 1 + 30 * 5) / 40 = 4; (10 * 2 + 30 * 2) / 40 = 2; counters: the larger of 7 and 4."""
    model = _save(tmp_path / "m", {"w": torch.tensor([0.0, 0.0]), "n": torch.tensor(1)})
    a = _save(tmp_path / "a", {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(7)}, meta=_report("params"))
    b = _save(tmp_path / "b", {"w": torch.tensor([5.0, 2.0]), "n": torch.tensor(4)}, meta=_report("params"))
    reply = do_job(_fold_job(model, [("a", a, 10), ("b", b, 30)], tmp_path / "out"))
    assert reply["ok"]
    assert reply["sha256"] == durable.sha256_file(tmp_path / "out")
    new = _load(tmp_path / "out")
    assert list(new) == ["w", "n"]
    assert new["w"].tolist() == [4.0, 2.0]
    assert int(new["n"]) == 7


def test_fold_does_not_depend_on_the_order_of_arrival(tmp_path: Path) -> None:
    """Five random updates in two orders: the same bytes, because devices are sorted; seed 1."""
    generator = torch.Generator().manual_seed(1)
    model = _save(tmp_path / "m", {"w": torch.zeros(1000)})
    updates = [
        (
            f"d{i}",
            _save(tmp_path / f"d{i}", {"w": torch.randn(1000, generator=generator)}, meta=_report("params")),
            7 * i + 1,
        )
        for i in range(5)
    ]
    first = do_job(_fold_job(model, updates, tmp_path / "one"))
    second = do_job(_fold_job(model, updates[::-1], tmp_path / "two"))
    assert first["sha256"] == second["sha256"]


def test_steps_below_the_rounding_of_the_codec_add_up(tmp_path: Path) -> None:
    """int8 of a row with peak 127 has steps of 1; 20 deltas of 0.1 on a weight of 10 make 12, not 10.

    Row of the model (127, 10), of the delta (0, 0.1): its scale is 0.1 / 127, so that the delta itself is exact up to
    float32. Added to the sent copy instead, 10.1 would be rounded back to 10 in every round.
    """
    model = _save(tmp_path / "m0", {"w": torch.tensor([[127.0, 10.0]])})
    delta = _save(tmp_path / "d", {"w": torch.tensor([[0.0, 0.1]])}, codec="int8", meta=_report("delta"))
    for r in range(20):
        sent = tmp_path / f"sent{r}"
        do_job({"id": 0, "job": "encode", "run": _INT8, "model": str(model), "out": str(sent)})
        reply = do_job(_fold_job(model, [("a", delta, 10)], tmp_path / f"m{r + 1}", base=sent))
        assert reply["ok"]
        model = tmp_path / f"m{r + 1}"
    assert _load(model)["w"].flatten().tolist() == pytest.approx([127.0, 12.0], rel=1e-5)


def test_a_variance_pushed_below_zero_by_a_delta_counts_as_zero(tmp_path: Path) -> None:
    """0.1 - 0.5 becomes 0; the mean of 0 and 0.1 + 0.3 = 0.4 is 0.2."""
    model = _save(tmp_path / "m", {"bn.running_var": torch.tensor([0.1])})
    a = _save(tmp_path / "a", {"bn.running_var": torch.tensor([-0.5])}, meta=_report("delta"))
    b = _save(tmp_path / "b", {"bn.running_var": torch.tensor([0.3])}, meta=_report("delta"))
    assert do_job(_fold_job(model, [("a", a, 1), ("b", b, 1)], tmp_path / "out"))["ok"]
    assert float(_load(tmp_path / "out")["bn.running_var"]) == pytest.approx(0.2)


def test_a_fold_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    """An update that was never checked; the half-written model is gone."""
    model = _save(tmp_path / "m", {"a": torch.zeros(2), "w": torch.zeros(2)})
    bad = _save(tmp_path / "u", {"a": torch.zeros(2), "w": torch.tensor([1.0, float("inf")])}, meta=_report("params"))
    reply = do_job(_fold_job(model, [("a", bad, 1)], tmp_path / "out"))
    assert (reply["ok"], reply["code"]) == (False, "not_finite")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("job", "code"),
    [
        ({"job": "dance"}, "malformed"),
        ({"job": ["fold"]}, "malformed"),
        ({"job": "encode", "run": RUN, "model": "/nowhere", "out": "/nowhere/o"}, "machine"),
        ({"job": "encode", "run": RUN, "model": "/nowhere", "slice": "a b", "out": "/nowhere/o"}, "malformed"),
        ({"job": "init", "out": "/nowhere/o"}, "malformed"),
        ({"job": "init", "run": RUN, "out": "/nowhere/o"}, "machine"),
        (
            {"job": "init", "run": RUN | {"model": RUN["model"] | {"name": "brain"}}, "out": "/nowhere/o"},
            "unknown_name",
        ),
        ({"job": "init", "run": RUN | {"model": RUN["model"] | {"options": {"x": 1}}}, "out": "/nowhere/o"}, "input"),
    ],
)
def test_what_cannot_be_done_is_an_answer(job: dict[str, Any], code: str) -> None:
    """The process goes on; the coordinator decides."""
    reply = do_job({"id": 7} | job)
    assert (reply["id"], reply["ok"], reply["code"]) == (7, False, code)
    assert reply["detail"]


def test_a_frozen_set_gives_absolute_values_sorted_and_again(tmp_path: Path) -> None:
    """Weights as they are, a delta of 0.5 on a base of 2 as 2.5; an evaluation has no column; samples as stored."""
    base = _save(tmp_path / "base", {"w": torch.tensor([2.0])})
    updates = [
        FrozenUpdate(
            device="c", path=_save(tmp_path / "c", {"w": torch.tensor([0.5])}, meta=_report("delta")), num_samples=3
        ),
        FrozenUpdate(
            device="a", path=_save(tmp_path / "a", {"w": torch.tensor([9.0])}, meta=_report("params")), num_samples=4
        ),
        FrozenUpdate(
            device="b",
            path=_save(tmp_path / "b", {"evaluation/confusion": torch.zeros(1, 1).long()}, meta=_report("none", 0)),
            num_samples=0,
        ),
    ]
    frozen = FrozenSet(base, updates)
    assert [(h.device, h.num_samples) for h in frozen.headers] == [("a", 4), ("b", 0), ("c", 3)]
    for _ in range(2):
        assert [(h.device, float(x), where) for h, x, where in frozen.column("w")] == [
            ("a", 9.0, None),
            ("c", 2.5, None),
        ]


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors with /proc")
def test_a_frozen_set_of_many_updates_opens_one_file_at_a_time(tmp_path: Path) -> None:
    """300 updates read twice; while a column is half read, one descriptor more than before is the most."""
    path = _save(tmp_path / "u", {"w": torch.tensor([1.0])}, meta=_report("params"))
    frozen = FrozenSet(path, [FrozenUpdate(device=f"d{i}", path=path, num_samples=1) for i in range(300)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert max(len(os.listdir("/proc/self/fd")) for _ in frozen.column("w")) <= before + 1


def test_a_delta_that_does_not_fit_the_base_is_refused(tmp_path: Path) -> None:
    """Adding a [1] to a [2] would broadcast."""
    base = _save(tmp_path / "base", {"w": torch.zeros(2)})
    bad = _save(tmp_path / "u", {"w": torch.zeros(1)}, meta=_report("delta"))
    frozen = FrozenSet(base, [FrozenUpdate(device="a", path=bad, num_samples=1)])
    with pytest.raises(PayloadError, match="shape"):
        list(frozen.column("w"))


def test_one_device_twice_is_misuse(tmp_path: Path) -> None:
    """Exactly once, or the mean is wrong."""
    path = _save(tmp_path / "u", {"w": torch.zeros(2)}, meta=_report("params"))
    with pytest.raises(ValueError, match="one update per device"):
        FrozenSet(path, [FrozenUpdate(device="a", path=path, num_samples=1)] * 2)


def _process(lines: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "coordinator.aggregation.process"],
        input="".join(line + "\n" for line in lines),
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_process_answers_every_job_in_order_and_ends_with_its_input(tmp_path: Path) -> None:
    """Three jobs, the second refused; nothing but answers on standard output."""
    init = {"id": "a", "job": "init", "run": RUN, "out": str(tmp_path / "m")}
    encode = {"id": "c", "job": "encode", "run": _INT8, "model": str(tmp_path / "m"), "out": str(tmp_path / "e")}
    done = _process([json.dumps(job) for job in (init, {"id": "b", "job": "dance"}, encode)])
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(reply["id"], reply["ok"]) for reply in replies] == [("a", True), ("b", False), ("c", True)]
    assert replies[2]["sha256"] == durable.sha256_file(tmp_path / "e")
    assert done.returncode == 0


def test_a_bug_ends_the_process_with_a_traceback() -> None:
    """A line that is no JSON can only come from a bug of ours."""
    done = _process(["{"])
    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("point", ["begin", "middle", "written"])
def test_a_kill_during_a_fold_gives_no_answer(tmp_path: Path, point: str) -> None:
    """The point is hit in round 3, once; the log remembers it, so that the next process does the fold."""
    model = _save(tmp_path / "m", {"a": torch.zeros(3), "b": torch.zeros(3)})
    update = _save(tmp_path / "u", {"a": torch.ones(3), "b": torch.ones(3)}, meta=_report("params"))
    job = json.dumps(_fold_job(model, [("a", update, 1)], tmp_path / "out"))
    fault = {"FEDFIT_FAULT": f"kill:aggregator.fold.{point}@3", "FEDFIT_FAULT_LOG": str(tmp_path / "log")}
    done = _process([job], **fault)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert (tmp_path / "log").read_text() == f"kill:aggregator.fold.{point}@3\n"
    if point == "middle":
        assert json.loads(_process([job], **fault).stdout)["ok"]


def test_a_full_disk_during_a_fold_is_an_answer(tmp_path: Path) -> None:
    """It passes alone; the half-written file is gone and the same job works again."""
    model = _save(tmp_path / "m", {"a": torch.zeros(3), "b": torch.zeros(3)})
    update = _save(tmp_path / "u", {"a": torch.ones(3), "b": torch.ones(3)}, meta=_report("params"))
    job = json.dumps(_fold_job(model, [("a", update, 1)], tmp_path / "out"))
    done = _process([job, job], FEDFIT_FAULT="enospc:aggregator.fold.middle")
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (first["ok"], first["code"]) == (False, "disk_full")
    assert second["ok"]


def test_malloc_is_pinned_before_torch_is_loaded() -> None:
    """Importing the module must not load torch: `main` pins malloc first."""
    code = "import sys, coordinator.aggregation.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


TASK = """\
import random
import numpy as np
import torch
from torch import nn
from edge_client import Task

class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem = nn.Flatten()
        self.head = nn.Linear(4, num_classes)
        with torch.no_grad():
            self.head.bias.fill_(random.random() + np.random.random())

    def forward(self, x):
        return self.head(BETWEEN(self.stem(x)))

def data(device):
    raise AssertionError("never called on the server")

mine = Task(model=Net, train_data=data, units=["stem", "head"], INPUT)
"""


def _task_run(tmp_path: Path, between: str = "", input_: str = "", **run: Any) -> dict[str, Any]:
    """The fields `run` and `task` of a job; the task's source lies there as a blob, without a name of its own."""
    source = TASK.replace("BETWEEN", between).replace("INPUT", input_).encode()
    blob = tmp_path / hashlib.sha256(source).hexdigest()
    blob.write_bytes(source)
    task = {"name": "t", "file": "nets.py:mine", "sha256": blob.name}
    table = {"name": "t", "seed": 5, "task": task, "classes": ["a", "b"], **run}
    return {"run": to_map(parse_table(RunFile, table, source="test")), "task": str(blob)}


def _init(tmp_path: Path, name: str, fields: dict[str, Any], start: Path | None = None) -> dict[str, Any]:
    job = {"id": 1, "job": "init", "start": str(start) if start else None, "out": str(tmp_path / name)}
    return do_job(job | fields)


def test_the_first_model_of_a_task_is_a_function_of_the_seed(tmp_path: Path) -> None:
    """Whatever generator the user's code draws from; names are those of the user's module."""
    first, again = (_init(tmp_path, name, _task_run(tmp_path)) for name in ("a", "b"))
    assert first["ok"], first
    assert first["sha256"] == again["sha256"]
    assert first["sha256"] != _init(tmp_path, "c", _task_run(tmp_path, seed=6))["sha256"]
    assert {name: tuple(value.shape) for name, value in _load(tmp_path / "a").items()} == {
        "head.weight": (2, 4),
        "head.bias": (2,),
    }


def test_a_task_is_measured_for_the_devices(tmp_path: Path) -> None:
    """A head of 4 x 2 + 2 floats; nothing if only the devices know the shape of a sample."""
    reply = do_job({"id": 1, "job": "calibrate", **_task_run(tmp_path, input_="input=(4,)")})
    assert reply["ok"], reply
    units = reply["rows"]["full"]["modes"]["plain"]
    assert [(unit["name"], unit["parameter_bytes"]) for unit in units] == [("stem", 0), ("head", 40)]
    assert do_job({"id": 2, "job": "calibrate", **_task_run(tmp_path)})["rows"] == {}


@pytest.mark.parametrize(
    ("between", "input_", "message"),
    [
        ("", "input=(1, 2, 2)", ""),
        ("torch.relu", "input=(1, 2, 2)", "units 'stem' and 'head'"),
        ("torch.relu", "", ""),  # no data, no shape: devices will find it
        ("", "input=(1, 2, 3)", "nets.py, line 16: model(): RuntimeError: mat1 and mat2"),
        ("", "input=7", "Task: input: expected a list"),
    ],
)
def test_a_task_is_checked_on_the_server_as_far_as_it_can_be(
    tmp_path: Path, between: str, input_: str, message: str
) -> None:
    """With `Task.input` also its units against its forward(); errors call the file as the run does."""
    reply = _init(tmp_path, "m", _task_run(tmp_path, between, input_))
    if not message:
        assert reply["ok"], reply
    else:
        assert reply["code"] == "input"
        assert message in reply["detail"]


def test_a_task_with_another_hash_than_the_runs_is_not_run(tmp_path: Path) -> None:
    """Both hashes are named; a run of a task without its file is refused, too."""
    fields = _task_run(tmp_path)
    Path(fields["task"]).write_text("raise SystemExit(1)")
    reply = _init(tmp_path, "m", fields)
    assert reply["code"] == "input"
    assert hashlib.sha256(b"raise SystemExit(1)").hexdigest() in reply["detail"]
    assert fields["run"]["task"]["sha256"] in reply["detail"]
    assert _init(tmp_path, "m", fields | {"task": None})["code"] == "input"


def test_a_run_may_start_from_another_runs_model(tmp_path: Path) -> None:
    """Its tensors, bit for bit, in the order of the new run's model."""
    assert _init(tmp_path, "plain", {"run": RUN})["ok"]
    plain = _load(tmp_path / "plain")
    values = {name: torch.arange(plain[name].numel()).reshape(plain[name].shape) / 7 for name in reversed(plain)}
    reply = _init(tmp_path, "m", {"run": RUN}, _save(tmp_path / "start", values))
    assert reply["ok"], reply
    started = _load(tmp_path / "m")
    assert list(started) == list(plain)
    assert all(torch.equal(started[name], values[name]) for name in plain)
    assert reply["sha256"] == durable.sha256_file(tmp_path / "m") != durable.sha256_file(tmp_path / "start")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values.pop(max(values)), "it has no"),
        (lambda values: values.update(extra=torch.zeros(1)), "it has 'extra', the run's model has not"),
        (lambda values: values.update({max(values): torch.zeros(9)}), "is [9], the run's model has"),
    ],
)
def test_a_start_that_is_another_model_is_refused_with_the_first_difference(
    tmp_path: Path, change: Any, message: str
) -> None:
    """A missing tensor, one too many, another shape; nothing is written."""
    assert _init(tmp_path, "plain", {"run": RUN})["ok"]
    values = _load(tmp_path / "plain")
    change(values)
    reply = _init(tmp_path, "m", {"run": RUN}, _save(tmp_path / "start", values))
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert message in reply["detail"]
    assert not (tmp_path / "m").exists()


def _evaluate(tmp_path: Path, fields: dict[str, Any], **arrays: np.ndarray) -> dict[str, Any]:
    np.savez(tmp_path / "test.npz", **arrays)
    job = {"id": 1, "job": "evaluate", "model": str(tmp_path / "m"), "data": str(tmp_path / "test.npz")}
    return do_job(job | fields)


def test_a_model_is_judged_on_the_servers_own_test_data(tmp_path: Path) -> None:
    """Weights [[0, 0, 0, 1], [1, 0, 0, 0]]: the answer is b where the first pixel is brighter than the last.

    Logits (0, 1), (1, 0), (1, 0) for truths b, a, b: 2 of 3, loss 2 log(1 + 1/e) + log(1 + e).
    """
    fields = _task_run(tmp_path)
    _save(tmp_path / "m", {"head.weight": torch.tensor([[0.0, 0, 0, 1], [1, 0, 0, 0]]), "head.bias": torch.zeros(2)})
    x = np.array([[[1, 0], [0, 0]], [[0, 0], [0, 1]], [[0, 0], [0, 1]]], dtype=np.float32)
    (reply,) = _evaluate(tmp_path, fields, x=x, y=np.array(["b", "a", "b"]))["results"]
    loss = 2 * math.log(1 + math.exp(-1)) + math.log(1 + math.e)
    assert reply["loss_sum"] == pytest.approx(loss, rel=1e-6)
    assert {key: reply[key] for key in ("num_samples", "num_correct", "confusion")} == {
        "num_samples": 3,
        "num_correct": 2,
        "confusion": [1, 0, 1, 1],
    }


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((1, 2), np.float32), "y": np.array(["c"])}, "class 'c' not in the run"),
        ({"x": np.zeros((1, 3), np.float32), "y": np.array([0])}, "the model's input is [2], the samples are [3]"),
        ({"x": np.zeros((1, 2), np.float32)}, "expected an array 'y'"),
    ],
)
def test_test_data_that_does_not_fit_the_run_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    """As on a device; here the file is the server's."""
    assert _init(tmp_path, "m", {"run": RUN})["ok"]
    reply = _evaluate(tmp_path, {"run": RUN}, **arrays)
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert message in reply["detail"]


def test_test_data_without_samples_judges_nothing(tmp_path: Path) -> None:
    """The run goes on; a comparison of models has nothing to look at, and says so."""
    fields = _task_run(tmp_path)
    _save(tmp_path / "m", {"head.weight": torch.zeros(2, 4), "head.bias": torch.zeros(2)})
    none = {"x": np.zeros((0, 2, 2), np.float32), "y": np.zeros(0, np.int64)}
    (reply,) = _evaluate(tmp_path, fields, **none)["results"]
    assert (reply["num_samples"], reply["num_correct"], reply["loss_sum"], reply["confusion"]) == (0, 0, 0.0, [0] * 4)
    probe = {"id": 1, "job": "probe", "round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m")}
    compared = do_job({**probe, "updates": [], "data": str(tmp_path / "test.npz"), **fields})
    assert (compared["ok"], compared["code"]) == (False, "input")
    assert "expected at least one test sample, got none" in compared["detail"]


def test_a_plan_without_tensors_passes_the_check(tmp_path: Path) -> None:
    """It moves nothing: its norm is 0, whatever the bounds."""
    base = _save(tmp_path / "base", {"w": torch.tensor([3.0])})
    update = _save(tmp_path / "u", {}, meta={"num_samples": 0})
    assert _check(base, update, 0.0) == {"id": 1, "ok": True, "norm": 0.0}


def _deep_run(method: str | dict[str, Any], **changes: Any) -> dict[str, Any]:
    model = {"name": "preresnet20", "input": [1, 8, 8], "width": 1, "track-running-stats": True}
    table = {"name": "t", "seed": 5, "method": method, "model": model, "classes": ["a", "b"], **changes}
    return dict(to_map(parse_table(RunFile, table, source="test")))


def test_a_methods_own_tensors_are_made_with_the_model(tmp_path: Path) -> None:
    """m-FeDepth: heads of block1 to block8 behind the model; the model itself is FeDepth's and FedAvg's, bit for bit.

    The heads are a function of the seed, too; the name of the stem stands in the meta where a plan may leave it out.
    """
    files = {
        name: _init(tmp_path, name, {"run": _deep_run(method, seed=seed)})
        for name, method, seed in (
            ("avg", "fedavg", 5),
            ("deep", "fedepth", 5),
            ("m", "m-fedepth", 5),
            ("again", "m-fedepth", 5),
            ("other", "m-fedepth", 6),
        )
    }
    assert all(reply["ok"] for reply in files.values()), files
    assert files["m"]["sha256"] == files["again"]["sha256"]
    plain, deep, heads, other = (_load(tmp_path / name) for name in ("avg", "deep", "m", "other"))
    assert [name for name in heads if not name.startswith("extra/")] == list(plain) == list(deep)
    assert all(torch.equal(heads[name], plain[name]) for name in plain)
    extras = [name for name in heads if name.startswith("extra/")]
    assert {name.split(".")[0] for name in extras} == {f"extra/block{number}" for number in range(1, 9)}
    assert not torch.equal(heads["extra/block1.linear.weight"], other["extra/block1.linear.weight"])
    metas = [read_header(tmp_path / name).meta for name in ("avg", "deep", "m")]
    assert metas == [{}, {"stem": "stem"}, {"stem": "stem"}]
    encode = {"id": 1, "job": "encode", "run": _INT8, "model": str(tmp_path / "m"), "out": str(tmp_path / "e")}
    assert do_job(encode)["ok"]
    assert read_header(tmp_path / "e").meta == {"stem": "stem"}
    assert list(_load(tmp_path / "e")) == list(heads)


def test_a_start_without_a_methods_tensors_gets_fresh_ones(tmp_path: Path) -> None:
    """A FedAvg model as the start of m-FeDepth: its weights, new heads; one of m-FeDepth gives its heads, too."""
    assert _init(tmp_path, "m", {"run": _deep_run("m-fedepth")})["ok"]
    fresh = _load(tmp_path / "m")
    ones = {name: torch.ones_like(value) for name, value in fresh.items()}
    plain = {name: value for name, value in ones.items() if not name.startswith("extra/")}
    for name, start, expected in (("a", ones, ones), ("b", plain, fresh | plain)):
        reply = _init(tmp_path, name, {"run": _deep_run("m-fedepth")}, _save(tmp_path / f"start {name}", start))
        assert reply["ok"], reply
        came = _load(tmp_path / name)
        assert list(came) == list(fresh)
        assert all(torch.equal(came[key], value) for key, value in expected.items())
    assert _init(tmp_path, "c", {"run": _deep_run("fedavg")}, tmp_path / "start a")["ok"]
    assert list(_load(tmp_path / "c")) == list(plain)


def test_a_task_without_a_shape_cannot_have_auxiliary_heads(tmp_path: Path) -> None:
    """They are as wide as its activations; with Task(input=...) they can be made."""
    reply = _init(tmp_path, "m", _task_run(tmp_path, method="m-fedepth"))
    assert (reply["code"], "tell it, Task(input=(3, 96, 96))" in reply["detail"]) == ("input", True)
    assert _init(tmp_path, "m", _task_run(tmp_path, input_="input=(1, 2, 2)", method="m-fedepth"))["ok"]
    assert _init(tmp_path, "m", _task_run(tmp_path, method="fedepth"))["ok"]


def _constant(like: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(old, int(value) if old.dtype == torch.int64 else value) for name, old in like.items()}


@pytest.mark.parametrize(("averaging", "expected"), [("masked", 3.0), ("plain", 2.25)])
def test_the_mean_of_a_tensor_is_over_those_who_trained_it(tmp_path: Path, averaging: str, expected: float) -> None:
    """From files to a file, all values 0: n=10 trains blocks 2 to 9 to 1 in two groups, n=30 everything to 3.

    Both: (10 + 90) / 40 = 2.5. block1 and the stem: 3.0; plain, the first one sends its 0, 90 / 40 = 2.25.
    The head of block5, where the first one's group ends: 1.0 (plain: 0.25); of block2, which nobody used: stays 0.
    Counters are the largest. Both updates pass intake and check; what they moved is measured over what they have.
    """
    run = _deep_run({"name": "m-fedepth", "averaging": averaging})
    rules = registry.plan_rules("m-fedepth", {"averaging": averaging})
    assert _init(tmp_path, "init", {"run": run})["ok"]
    model = tmp_path / "model"
    old = _constant(_load(tmp_path / "init"), 0.0)
    _save(model, old, meta={"stem": "stem"})
    whole = {"microbatch": 1, "budget_bytes": 0, "predicted_bytes": 0}
    groups = [[f"block{n}" for n in range(2, 6)], [f"block{n}" for n in range(6, 10)]]
    plans = [whole | {"groups": groups, "skipped": ["block1"]}, whole]
    updates: list[tuple[str, Path, int]] = []
    for device, num_samples, value, plan in (("a", 10, 1.0, plans[0]), ("b", 30, 3.0, plans[1])):
        report = {**_report("params", num_samples, steps=4), "plan": plan}
        parsed = from_map(TrainingPlan, plan)
        names, meta = [_stored(name) for name in old], {"stem": "stem"}
        lacking = left_out(names, parsed, rules, meta)
        trained = left_out(names, parsed, dataclasses.replace(rules, masked=True), meta)
        sent = {name: v if _stored(name) in trained else v + int(value) for name, v in old.items()}
        path = _save(tmp_path / device, {n: v for n, v in sent.items() if _stored(n) not in lacking}, meta=report)
        want = Expected(
            device=device, round=1, base=read_header(model), codec="fp32", train=True, evaluate=False,
            num_samples=num_samples, max_samples=100, num_classes=2, epochs=1, rules=rules,
        )  # fmt: skip
        assert check_header(path, want).plan == parsed
        moved = sum(v.numel() for n, v in sent.items() if _stored(n) not in trained and v.is_floating_point())
        assert _check(model, path)["norm"] == pytest.approx(value * math.sqrt(moved))
        updates.append((device, path, num_samples))
    reply = do_job(_fold_job(model, updates, tmp_path / "out") | {"run": run})
    assert reply["ok"], reply
    new = _load(tmp_path / "out")
    assert list(new) == list(old)
    values = {name: set(value.flatten().tolist()) for name, value in new.items()}
    assert values["block2.conv1.weight"] == values["head.linear.weight"] == {2.5}
    assert values["stem.conv.weight"] == values["block1.conv1.weight"] == {expected}
    assert values["extra/block5.linear.weight"] == {1.0 if averaging == "masked" else 0.25}
    assert values["extra/block2.linear.weight"] == {0.0}
    assert values["block1.norm1.num_batches_tracked"] == {3}
    assert read_header(tmp_path / "out").meta == {"stem": "stem"}


def _stored(name: str) -> str:
    return name if name.startswith("extra/") else f"model/{name}"


def test_deltas_of_a_methods_tensors_are_added_to_its_own(tmp_path: Path) -> None:
    """0.5 on 2 is 2.5; the other one lacks it: the mean is over one."""
    model = _save(tmp_path / "m", {"w": torch.zeros(1), "extra/h": torch.tensor([2.0])})
    a = _save(tmp_path / "a", {"w": torch.ones(1), "extra/h": torch.tensor([0.5])}, meta=_report("delta"))
    b = _save(tmp_path / "b", {"w": torch.ones(1)}, meta=_report("delta"))
    assert _check(model, a)["norm"] == pytest.approx(math.sqrt(1.25))
    assert do_job(_fold_job(model, [("a", a, 1), ("b", b, 3)], tmp_path / "out"))["ok"]
    assert {name: value.tolist() for name, value in _load(tmp_path / "out").items()} == {"w": [1.0], "extra/h": [2.5]}


def test_values_of_a_methods_tensors_are_checked(tmp_path: Path) -> None:
    """They are folded like the model's."""
    base = _save(tmp_path / "base", {"w": torch.zeros(1), "extra/h": torch.zeros(2)})
    bad = _save(tmp_path / "u", {"extra/h": torch.tensor([0.0, float("nan")])}, meta=_report("params"))
    reply = _check(base, bad)
    assert (reply["code"], "'extra/h'" in reply["detail"]) == ("not_finite", True)


def test_an_evaluation_does_not_see_a_methods_tensors(tmp_path: Path) -> None:
    """The same result with and without auxiliary heads in the file."""
    x = np.random.default_rng(1).random((4, 1, 8, 8), np.float32)
    results = []
    for name, method in (("deep", "fedepth"), ("heads", "m-fedepth")):
        (tmp_path / name).mkdir()
        run = {"run": _deep_run(method)}
        assert _init(tmp_path / name, "m", run)["ok"]
        results.append(_evaluate(tmp_path / name, run, x=x, y=np.array([0, 1, 0, 1])))
    assert results[0]["ok"], results[0]
    assert results[0] == results[1]


SLICED = to_map(
    parse_table(
        RunFile,
        {
            "name": "t",
            "model": {"name": "mlp", "input": [2], "hidden": [4]},
            "classes": ["a", "b"],
            "slices": ["full", "width:1/2"],
        },
        source="test",
    )
)


def _cut(tmp_path: Path, run: dict[str, Any], cut: str) -> Path:
    out = tmp_path / cut.replace("/", "-")
    job = {"id": 1, "job": "encode", "run": run, "model": str(tmp_path / "m"), "slice": cut, "out": str(out)}
    reply = do_job(job)
    assert reply["ok"], reply
    return out


def _fold_slices(tmp_path: Path, run: dict[str, Any], values: Mapping[str, float]) -> dict[str, Tensor]:
    """Every device sends its slice full of one number; the folded model."""
    updates = []
    for cut, value in values.items():
        sent = _load(_cut(tmp_path, run, cut))
        path = _save(
            tmp_path / f"u-{value}", {n: torch.full_like(v, value) for n, v in sent.items()}, meta=_report("params")
        )
        updates.append({"device": f"d{value:g}", "path": str(path), "num_samples": 10, "slice": cut})
    out = tmp_path / "folded"
    job = {"job": "fold", "run": run, "round": 1, "model": str(tmp_path / "m"), "base": "", "updates": updates}
    reply = do_job({"id": 1, **job, "out": str(out)})
    assert reply["ok"], reply
    return _load(out)


def test_a_slice_is_cut_and_put_back_at_its_place(tmp_path: Path) -> None:
    """4 hidden units, the slice has the first two: where both devices are, (1 + 3) / 2; elsewhere 1."""
    assert do_job({"id": 0, "job": "init", "run": SLICED, "out": str(tmp_path / "m")})["ok"]
    whole, half = _load(tmp_path / "m"), _load(_cut(tmp_path, SLICED, "width:1/2"))
    assert torch.equal(half["block1.linear.weight"], whole["block1.linear.weight"][:2])
    assert torch.equal(half["head.weight"], whole["head.weight"][:, :2])
    assert torch.equal(half["head.bias"], whole["head.bias"])
    folded = _fold_slices(tmp_path, SLICED, {"full": 1.0, "width:1/2": 3.0})
    assert folded["block1.linear.weight"].tolist() == [[2.0, 2.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0]]
    assert folded["head.weight"].tolist() == [[2.0, 2.0, 1.0, 1.0]] * 2
    assert folded["head.bias"].tolist() == [2.0, 2.0]


def test_what_no_slice_covers_keeps_its_bits(tmp_path: Path) -> None:
    """Only the half takes part."""
    do_job({"id": 0, "job": "init", "run": SLICED, "out": str(tmp_path / "m")})
    before = _load(tmp_path / "m")["block1.linear.weight"]
    after = _fold_slices(tmp_path, SLICED, {"width:1/2": 3.0})["block1.linear.weight"]
    assert after[:2].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert torch.equal(after[2:], before[2:])


def test_architectures_may_share_nothing(tmp_path: Path) -> None:
    """Each slice is a model of its own, and begins as the part of the first model that it is."""
    run = SLICED | {"sharing": "architecture"}
    do_job({"id": 0, "job": "init", "run": run, "out": str(tmp_path / "m")})
    first = _load(tmp_path / "m")
    own = "slice:width:1/2/model/block1.linear.weight"
    assert torch.equal(first[own], first["block1.linear.weight"][:2])
    folded = _fold_slices(tmp_path, run, {"full": 1.0, "width:1/2": 3.0})
    assert folded["block1.linear.weight"].tolist() == [[1.0, 1.0]] * 4
    assert folded[own].tolist() == [[3.0, 3.0]] * 2
    alone = _fold_slices(tmp_path, run, {"width:1/2": 5.0})
    assert torch.equal(alone["block1.linear.weight"], first["block1.linear.weight"])
    assert alone[own].tolist() == [[5.0, 5.0]] * 2


def test_every_slice_is_judged(tmp_path: Path) -> None:
    """All weights 0 and a bias for b: both are right about the two of three samples that are b's."""
    do_job({"id": 0, "job": "init", "run": SLICED, "out": str(tmp_path / "m")})
    zeros = {name: torch.zeros_like(value) for name, value in _load(tmp_path / "m").items()}
    _save(tmp_path / "m", zeros | {"head.bias": torch.tensor([0.0, 1.0])})
    x, y = np.zeros((3, 2), dtype=np.float32), np.array(["b", "a", "b"])
    results = _evaluate(tmp_path, {"run": SLICED}, x=x, y=y)["results"]
    assert [(r["slice"], r["num_correct"], r["num_samples"]) for r in results] == [("full", 2, 3), ("width:1/2", 2, 3)]


def test_a_slice_that_the_model_has_not_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    """An mlp with one block has no two stages."""
    run = SLICED | {"slices": ["full", "depth:1.1"]}
    reply = do_job({"id": 0, "job": "init", "run": run, "out": str(tmp_path / "m")})
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert "no blocks that can be left out" in reply["detail"]
