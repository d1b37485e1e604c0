"""Knowledge in the aggregator and at the intake: what is kept, what travels, what a hostile device cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from rows import run_file
from torch import Tensor

from coordinator.conductor.intake import Expected, check_header
from edge_client.config.run_file import RunFile
from edge_client.errors import PayloadError
from edge_client.knowledge.kinds import ClassTable, DraftSet, FeaturePairs, Knowledge, SampleLogits, named_tensors
from edge_client.methods import registry
from edge_client.records import from_map, to_map
from edge_client.wire.container import read_header
from edge_client.wire.tensors import ContainerReader, codec_for, write_container


def _run(method: str, **more: Any) -> dict[str, Any]:
    """An mlp of 4 inputs, 3 hidden and 2 classes."""
    model = {"name": "mlp", "input": [1, 2, 2], "hidden": [3]}
    return to_map(run_file(**{"model": model, "method": {"name": method, **more.pop("parameters", {})}, **more}))


def _answer(job: str, out: Path, **fields: Any) -> dict[str, Any]:
    return do_job({"id": 1, "job": job, "out": str(out), **fields})


def _tensors(path: Path) -> dict[str, Tensor]:
    with ContainerReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def _table(label: str, value: float, count: int = 40) -> ClassTable:
    return ClassTable(
        label=label, counts=torch.tensor([count, 0]), values=torch.full((1, 2 if label == "logit" else 3), value)
    )


def _update(path: Path, model: Path, *items: Knowledge, weights: bool = True, **more: object) -> Path:
    """As a device sends it."""
    sent = {name: t for name, t in _tensors(model).items() if name.startswith("model/")} if weights else {}
    named = [*sent.items(), *named_tensors(items)]
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in named]
    meta = {"num_samples": 10, "payload": "params", "steps": 1, **more}
    write_container(path, meta, table, (value for _, value in named))
    return path


def _fold(tmp_path: Path, run: dict[str, Any], round_: int, model: Path, **updates: Path) -> Path:
    out = tmp_path / f"v{round_}"
    listed = [{"device": name, "path": str(path), "num_samples": 10} for name, path in updates.items()]
    fields = {"run": run, "round": round_, "model": str(model), "base": str(model), "updates": listed}
    reply = _answer("fold", out, **fields)
    assert reply["ok"], reply
    return out


def test_what_devices_said_is_kept_beside_the_model_and_told_as_means(tmp_path: Path) -> None:
    """Devices say 1 and 3 for class 0: 2; then one says 5: 4. The model part has no memory, what is told no model."""
    run = _run("felo")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    a, b = (_update(tmp_path / n, tmp_path / "m", _table("logit", v)) for n, v in (("a", 1.0), ("b", 3.0)))
    first = _fold(tmp_path, run, 1, tmp_path / "m", a=a, b=b)
    second = _fold(tmp_path, run, 2, first, a=_update(tmp_path / "a2", first, _table("logit", 5.0)))
    for version, expected in ((first, 2.0), (second, 4.0)):
        reply = _answer("tell", tmp_path / "told", run=run, model=str(version), round=2)
        assert reply["ok"], reply
        told = _tensors(tmp_path / "told")
        assert sorted(told) == ["knowledge/class/logit/counts", "knowledge/class/logit/values"]
        assert told["knowledge/class/logit/values"].tolist() == [[expected, expected]]
    assert any(name.startswith("memory/") for name in _tensors(second))
    assert _answer("encode", tmp_path / "sent", run=run, model=str(second))["ok"]
    assert {name.partition("/")[0] for name in _tensors(tmp_path / "sent")} == {"model"}


def test_before_anybody_said_something_nothing_is_told(tmp_path: Path) -> None:
    """A container without tensors."""
    run = _run("felo")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    assert _answer("tell", tmp_path / "told", run=run, model=str(tmp_path / "m"), round=1)["ok"]
    assert _tensors(tmp_path / "told") == {}


def test_shared_samples_are_part_of_the_first_version(tmp_path: Path) -> None:
    """Read once, told as a part of their own; without a source the run does not begin."""
    np.savez(tmp_path / "p.npz", x=np.zeros((5, 2, 2), dtype=np.float32), y=np.zeros(5, dtype=np.int64))
    reply = _answer("init", tmp_path / "m", run=_run("fedmd"))
    assert not reply["ok"]
    assert "needs shared samples: name them" in reply["detail"]
    run = _run("fedmd", parameters={"public": f"npz:{tmp_path / 'p.npz'}"})
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    assert _answer("tell", tmp_path / "p", run=run, model=str(tmp_path / "m"), round=1, public=True)["ok"]
    assert _tensors(tmp_path / "p")["knowledge/public/values"].shape == (5, 1, 2, 2)


def test_a_fold_tells_whose_knowledge_it_was_made_without(tmp_path: Path) -> None:
    """a has class 'no' alone, b had nothing to tell; a method without knowledge misses none."""
    run = _run("felo")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    a, b = _update(tmp_path / "a", tmp_path / "m", _table("logit", 1.0)), _update(tmp_path / "b", tmp_path / "m")
    listed = [{"device": path.name, "path": str(path), "num_samples": 10} for path in (a, b)]
    fields = {"round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m"), "updates": listed}
    told = _answer("fold", tmp_path / "v1", run=run, **fields)["left_out"]
    assert [(found["device"], found["code"]) for found in told] == [("a", "missing_class"), ("b", "silent")]
    assert told[0]["detail"].endswith("having no or too few samples: 'yes'")
    plain = _answer("fold", tmp_path / "v2", run=_run("fedavg"), **fields)
    assert plain["left_out"] == []


@pytest.mark.parametrize(("said", "expected"), [("range: far", "range: far"), ("w" * 400, "w" * 300), (7, None)])
def test_what_a_device_kept_because_it_would_be_refused_is_told_in_its_words(
    said: object, expected: str | None, tmp_path: Path
) -> None:
    """Cut at 300 characters; what is no text counts as silence. It told its logits all the same."""
    run = _run("felo")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    both = torch.tensor([40, 40])
    logits = ClassTable(label="logit", counts=both, values=torch.zeros(2, 2))
    update = _update(tmp_path / "a", tmp_path / "m", logits, **{"x-held-back": said})
    listed = [{"device": "a", "path": str(update), "num_samples": 10}]
    fields = {"round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m"), "updates": listed}
    told = _answer("fold", tmp_path / "v1", run=run, **fields)["left_out"]
    assert told == ([] if expected is None else [{"device": "a", "code": "held_back", "detail": expected}])


def _pairs(width: int) -> FeaturePairs:
    return FeaturePairs(inputs=torch.ones(2, width), outputs=torch.ones(2, 3))


def _logits(first: int, classes: int = 2) -> SampleLogits:
    return SampleLogits(ids=torch.arange(first, first + 4), values=torch.ones(4, classes))


def _drafts(first: int) -> DraftSet:
    convs = {1: torch.ones(4, 3), 2: torch.ones(4, 3)}
    ids = torch.arange(first, first + 4)
    return DraftSet(ids=ids, depths=torch.tensor([2]), convs=convs, logits=torch.ones(4, 2))


ODD = {
    "a signature that nobody else has": ("fedin", _pairs(3), _pairs(9), "signature"),
    "answers for another batch": ("fedmd", _logits(0), _logits(4), "other_samples"),
    "another number of classes": ("fedmd", _logits(0), _logits(0, 5), "class_count"),
    "drafts of another batch": ("draftfed", _drafts(0), _drafts(4), "other_samples"),
}


@pytest.mark.parametrize(("method", "usual", "odd", "code"), ODD.values(), ids=ODD)
def test_the_knowledge_of_one_device_that_does_not_fit_is_named_and_that_of_the_others_counts(
    method: str, usual: Knowledge, odd: Knowledge, code: str, tmp_path: Path
) -> None:
    """a, who comes first, is odd; b and c say ones: what the server knows then are ones, of the usual shape alone."""
    np.savez(tmp_path / "p.npz", x=np.zeros((8, 2, 2), dtype=np.float32), y=np.zeros(8, dtype=np.int64))
    window = {"fedmd": {"samples": 4}, "draftfed": {"draft-batch": 4}}.get(method)
    own = {"public": f"npz:{tmp_path / 'p.npz'}", "public-samples": 8, **window} if window is not None else {}
    run = _run(method, parameters=own, model={"name": "mlp", "input": [1, 2, 2], "hidden": [3, 3]})
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    said = {"a": odd, "b": usual, "c": usual}
    updates = [_update(tmp_path / n, tmp_path / "m", item, weights=method == "fedin") for n, item in said.items()]
    listed = [{"device": path.name, "path": str(path), "num_samples": 10} for path in updates]
    fields = {"round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m"), "updates": listed}
    reply = _answer("fold", tmp_path / "v1", run=run, **fields)
    assert reply["ok"], reply
    assert [(found["device"], found["code"]) for found in reply["left_out"]] == [("a", code)]
    kept = {name: t for name, t in _tensors(tmp_path / "v1").items() if name.startswith("memory/")}
    told = [t for name, t in kept.items() if name.endswith(("/in", "/out", "/values", "/logits", "/conv_1"))]
    assert told
    assert all(value.eq(1).all() for value in told)
    assert not any("9" in name or "5" in str(tuple(t.shape)) for name, t in kept.items())


def test_of_an_empty_set_of_shared_samples_nothing_travels(tmp_path: Path) -> None:
    """The run begins, devices get a container without tensors, and the fold says once why: not of each device."""
    np.savez(tmp_path / "p.npz", x=np.zeros((0, 2, 2), dtype=np.float32), y=np.zeros(0, dtype=np.int64))
    run = _run("draftfed", parameters={"public": f"npz:{tmp_path / 'p.npz'}"})
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    assert _answer("tell", tmp_path / "p", run=run, model=str(tmp_path / "m"), round=1, public=True)["ok"]
    assert _tensors(tmp_path / "p") == {}
    fields = {"round": 1, "model": str(tmp_path / "m"), "base": str(tmp_path / "m")}
    update = _update(tmp_path / "a", tmp_path / "m", weights=False)
    listed = [{"device": "a", "path": str(update), "num_samples": 10}]
    told = _answer("fold", tmp_path / "v1", run=run, updates=listed, **fields)["left_out"]
    assert [(found["device"], found["code"]) for found in told] == [("", "no_public")]


HOSTILE = [
    (_table("logit", float("nan")), "not_finite"),
    (_table("logit", 1e7), "range"),
    (_table("logit", 1.0, count=9), "range"),
    (_table("logit", 1.0, count=-1), "range"),
]


@pytest.mark.parametrize(("item", "code"), HOSTILE, ids=["nan", "huge", "too few", "negative"])
def test_values_that_would_spoil_a_mean_are_refused(item: ClassTable, code: str, tmp_path: Path) -> None:
    """The check job names the reason; a mean of fewer than ten samples is no mean that may leave a device."""
    run = _run("felo")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    limits = registry.knowledge_limits(from_map(RunFile, run))
    update = _update(tmp_path / "u", tmp_path / "m", item)
    base = {"base": str(tmp_path / "m"), "update": str(update), "knowledge": to_map(limits)}
    reply = do_job({"id": 1, "job": "check", **base})
    assert (reply["ok"], reply["code"]) == (False, code)


def _expected(run: dict[str, Any], model: Path, **changes: Any) -> Expected:
    file = from_map(RunFile, run)
    fields: dict[str, Any] = {
        "device": "a",
        "round": 1,
        "base": read_header(model),
        "codec": "fp32",
        "train": True,
        "evaluate": False,
        "num_samples": 10,
        "max_samples": 100,
        "num_classes": 2,
        "epochs": 1,
        "rules": registry.plan_rules(file.method.name, file.method.parameters),
        "knowledge": registry.knowledge_limits(file),
    }
    return Expected(**(fields | changes))


def test_the_intake_takes_knowledge_whole_or_none_of_it(tmp_path: Path) -> None:
    """A device with too few samples of everything sends none, and its weights count."""
    run = _run("felo")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    for items in ((), (_table("logit", 1.0),), (_table("feature", 1.0), _table("logit", 1.0))):
        check_header(_update(tmp_path / "u", tmp_path / "m", *items), _expected(run, tmp_path / "m"))


def test_methods_without_weights_refuse_weights(tmp_path: Path) -> None:
    """FedHe takes class means alone: a model in an update is refused by name."""
    run = _run("fedhe")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    assert _answer("encode", tmp_path / "sent", run=run, model=str(tmp_path / "m"))["ok"]
    expected = _expected(run, tmp_path / "sent")
    check_header(_update(tmp_path / "u", tmp_path / "sent", _table("logit", 1.0), weights=False), expected)
    with pytest.raises(PayloadError, match="names: update from 'a' for round 1 has 4 tensors, assignment listed 0"):
        check_header(_update(tmp_path / "u", tmp_path / "sent", _table("logit", 1.0)), expected)


def test_knowledge_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    """Of a kind that the method does not take, in a run without, and after an evaluation alone."""
    run = _run("fedhe")
    assert _answer("init", tmp_path / "m", run=run)["ok"]
    feature = _update(tmp_path / "f", tmp_path / "m", _table("feature", 1.0), weights=False)
    with pytest.raises(PayloadError, match="brings 'class/feature'; the run's method takes class/logit"):
        check_header(feature, _expected(run, tmp_path / "m"))
    logit = _update(tmp_path / "l", tmp_path / "m", _table("logit", 1.0), weights=False)
    with pytest.raises(PayloadError, match="and the run's method takes none"):
        check_header(logit, _expected(run, tmp_path / "m", knowledge=None))
    with pytest.raises(PayloadError, match="and nothing was trained"):
        check_header(logit, _expected(run, tmp_path / "m", train=False, evaluate=True))
