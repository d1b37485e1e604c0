"""The first model of a run: a function of the seed, with the tensors of its method; what is refused before a run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from aggregator_jobs import (
    INT8,
    RUN,
    SLICED,
    deep_run,
    do_job,
    init,
    load,
    task_run,
)

from edge_client import durable
from edge_client.wire.container import read_header
from edge_client.wire.tensors import ContainerReader


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
    assert sum(value.numel() for value in load(tmp_path / "0").values()) == 17


def test_the_first_model_of_a_task_is_a_function_of_the_seed(tmp_path: Path) -> None:
    """Whatever generator the user's code draws from; names are those of the user's module."""
    first, again = (init(tmp_path, name, task_run(tmp_path)) for name in ("a", "b"))
    assert first["ok"], first
    assert first["sha256"] == again["sha256"]
    assert first["sha256"] != init(tmp_path, "c", task_run(tmp_path, seed=6))["sha256"]
    assert {name: tuple(value.shape) for name, value in load(tmp_path / "a").items()} == {
        "head.weight": (2, 4),
        "head.bias": (2,),
    }


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
    reply = init(tmp_path, "m", task_run(tmp_path, between, input_))
    if not message:
        assert reply["ok"], reply
    else:
        assert reply["code"] == "input"
        assert message in reply["detail"]


def test_a_task_with_another_hash_than_the_runs_is_not_run(tmp_path: Path) -> None:
    """Both hashes are named; a run of a task without its file is refused, too."""
    fields = task_run(tmp_path)
    Path(fields["task"]).write_text("raise SystemExit(1)")
    reply = init(tmp_path, "m", fields)
    assert reply["code"] == "input"
    assert hashlib.sha256(b"raise SystemExit(1)").hexdigest() in reply["detail"]
    assert fields["run"]["task"]["sha256"] in reply["detail"]
    assert init(tmp_path, "m", fields | {"task": None})["code"] == "input"


def test_a_methods_own_tensors_are_made_with_the_model(tmp_path: Path) -> None:
    """m-FeDepth: heads of block1 to block8 behind the model; the model itself is FeDepth's and FedAvg's, bit for bit.

    The heads are a function of the seed, too; the name of the stem stands in the meta where a plan may leave it out.
    """
    files = {
        name: init(tmp_path, name, {"run": deep_run(method, seed=seed)})
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
    plain, deep, heads, other = (load(tmp_path / name) for name in ("avg", "deep", "m", "other"))
    assert [name for name in heads if not name.startswith("extra/")] == list(plain) == list(deep)
    assert all(torch.equal(heads[name], plain[name]) for name in plain)
    extras = [name for name in heads if name.startswith("extra/")]
    assert {name.split(".")[0] for name in extras} == {f"extra/block{number}" for number in range(1, 9)}
    assert not torch.equal(heads["extra/block1.linear.weight"], other["extra/block1.linear.weight"])
    metas = [read_header(tmp_path / name).meta for name in ("avg", "deep", "m")]
    assert metas == [{}, {"stem": "stem"}, {"stem": "stem"}]
    encode = {"id": 1, "job": "encode", "run": INT8, "model": str(tmp_path / "m"), "out": str(tmp_path / "e")}
    assert do_job(encode)["ok"]
    assert read_header(tmp_path / "e").meta == {"stem": "stem"}
    assert list(load(tmp_path / "e")) == list(heads)


def test_a_task_without_a_shape_cannot_have_auxiliary_heads(tmp_path: Path) -> None:
    """They are as wide as its activations; with Task(input=...) they can be made."""
    reply = init(tmp_path, "m", task_run(tmp_path, method="m-fedepth"))
    assert (reply["code"], "tell it, Task(input=(3, 96, 96))" in reply["detail"]) == ("input", True)
    assert init(tmp_path, "m", task_run(tmp_path, input_="input=(1, 2, 2)", method="m-fedepth"))["ok"]
    assert init(tmp_path, "m", task_run(tmp_path, method="fedepth"))["ok"]


def test_a_slice_that_the_model_has_not_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    """An mlp with one block has no two stages."""
    run = SLICED | {"slices": ["full", "depth:1.1"]}
    reply = do_job({"id": 0, "job": "init", "run": run, "out": str(tmp_path / "m")})
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert "no blocks that can be left out" in reply["detail"]
