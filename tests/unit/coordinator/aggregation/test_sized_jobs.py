"""The aggregator's jobs of methods that combine models of different sizes: what is cut, put back, and judged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from rows import run_file
from torch import Tensor

from edge_client.config.run_file import RunFile
from edge_client.methods import coverage, registry
from edge_client.models import registry as models
from edge_client.models.contract import Model
from edge_client.models.slicing import parse
from edge_client.records import to_map
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

HIDDEN = [4, 4]
SIZES = {
    "inclusivefl": ("full", "depth:1.0"),
    "scalefl": ("full", "exit:1-width:1/2"),
    "splitmix": ("full", "width:1/2"),
}


def _run(method: str) -> RunFile:
    parameters = {"bases": 4} if method == "splitmix" else {}
    model = {"name": "mlp", "input": [3], "hidden": HIDDEN}
    made = {"name": method, **parameters}
    return run_file(model=model, classes=["a", "b"], method=made, slices=list(SIZES[method]))


def _answer(job: str, run: RunFile, folder: Path, **fields: Any) -> dict[str, Any]:
    reply = do_job({"id": 1, "job": job, "run": to_map(run), "model": str(folder / "m"), **fields})
    assert reply["ok"], reply
    return reply


def _init(run: RunFile, folder: Path) -> None:
    reply = do_job({"id": 1, "job": "init", "run": to_map(run), "out": str(folder / "m")})
    assert reply["ok"], reply


def _tensors(path: Path) -> dict[str, Tensor]:
    with ContainerReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def _built(cut: str) -> Model:
    return models.build("mlp", input_shape=(3,), num_classes=2, options={"hidden": HIDDEN}, spec=parse(cut))


def _own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model/"): value for name, value in tensors.items() if name.startswith("model/")}


@pytest.mark.parametrize("method", SIZES)
def test_each_size_is_sent_taken_back_and_judged(method: str, tmp_path: Path) -> None:
    """A device gets what its network has. It sends everything + 1: what it has moves by 1, and nothing else does."""
    run = _run(method)
    _init(run, tmp_path)
    made, first = registry.of_run(run), _tensors(tmp_path / "m")
    cut = SIZES[method][1]
    _answer("encode", run, tmp_path, slice=cut, out=str(tmp_path / "sent"))
    sent = _tensors(tmp_path / "sent")
    model = _built(made.slices.network(cut))
    model.load_state_dict(_own(sent))
    moved = {name: value + 1 for name, value in sent.items()}
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in moved.items()]
    write_container(tmp_path / "u", {"num_samples": 1, "payload": "params", "steps": 1}, table, moved.values())
    updates = [{"device": "a", "path": str(tmp_path / "u"), "num_samples": 1, "slice": cut}]
    _answer("fold", run, tmp_path, round=1, base=str(tmp_path / "m"), updates=updates, out=str(tmp_path / "next"))
    folded = _tensors(tmp_path / "next")
    grown = {name: float((folded[name] - value).sum()) for name, value in first.items()}
    sums = set(made.travel.notes(_built("full")).get("own", ()))  # SplitMix: sums of what lies beside
    own = sum(total for name, total in grown.items() if name.removeprefix("model/") not in sums)
    assert own == pytest.approx(sum(value.numel() for value in sent.values()), rel=1e-4)


def _judged(run: RunFile, folder: Path, x: np.ndarray, y: np.ndarray) -> dict[str, tuple[int, float]]:
    np.savez(folder / "test.npz", x=x, y=y)
    reply = _answer("evaluate", run, folder, data=str(folder / "test.npz"))
    return {row["slice"]: (row["num_correct"], row["loss_sum"]) for row in reply["results"]}


def _cross_entropy(logits: Tensor, y: np.ndarray) -> float:
    labels = torch.from_numpy((y == "b").astype(np.int64))
    return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))


@pytest.mark.parametrize("method", SIZES)
def test_each_size_is_judged_with_what_is_its_own(method: str, tmp_path: Path) -> None:
    """The same loss as that of the network that a device of the size builds; SplitMix: of the mean of its bases."""
    run = _run(method)
    _init(run, tmp_path)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 3)).astype(np.float32), np.array(["a", "b", "b", "a", "b", "a"])
    judged = _judged(run, tmp_path, x, y)
    made = registry.of_run(run)
    for cut in SIZES[method]:
        _answer("encode", run, tmp_path, slice=cut, out=str(tmp_path / "sent"))
        sent = _tensors(tmp_path / "sent")
        others = sorted({name.split("/")[2] for name in sent if name.startswith("extra/base/")})
        bases = [_own(sent)]
        for number in others:
            start = f"extra/base/{number}/"
            bases.append({n.removeprefix(start): value for n, value in sent.items() if n.startswith(start)})
        with torch.no_grad():
            logits = []
            for weights in bases:
                model = _built(made.slices.network(cut))
                model.load_state_dict(weights)
                logits.append(model.eval()(torch.from_numpy(x)))
        assert judged[cut][1] == pytest.approx(_cross_entropy(torch.stack(logits).mean(dim=0), y), rel=1e-5)
        wanted = {"full": 3, "width:1/2": 1} if method == "splitmix" else {}
        assert len(others) == wanted.get(cut, 0)


def test_as_one_network_the_model_of_splitmix_answers_as_all_bases(tmp_path: Path) -> None:
    """The largest logit of the sum is that of the mean."""
    run = _run("splitmix")
    _init(run, tmp_path)
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.choice(["a", "b"], size=40)
    whole = _built("full")
    whole.load_state_dict(_own(_tensors(tmp_path / "m")))
    with torch.no_grad():
        answers = whole.eval()(torch.from_numpy(x)).argmax(dim=1).numpy()
    assert _judged(run, tmp_path, x, y)["full"][0] == int((answers == (y == "b")).sum())


DEEP = ("full", "depth:1.1.0", "depth:1.0.0")


def _deep_run(method: str, slices: tuple[str, ...] = DEEP, sharing: str = "position", **parameters: Any) -> RunFile:
    model = {"name": "mlp", "input": [3], "hidden": [4, 4, 4]}
    made = {"name": method, **parameters}
    return run_file(model=model, classes=["a", "b"], method=made, slices=list(slices), sharing=sharing)


@pytest.mark.parametrize(
    ("sharing", "kept"),
    [
        ("position", dict.fromkeys(DEEP[:2], ("model/block2.", "model/block3.", "model/head."))),
        (
            "architecture",
            {"full": ("model/block3.", "model/head."), "depth:1.1.0": ("model/block2.", "model/head.")},
        ),
    ],
)
def test_what_fedper_keeps_is_told_with_each_size(tmp_path: Path, sharing: str, kept: dict[str, Any]) -> None:
    """Two personal units: what all sizes share is block1; of a size that is a model of its own, its own last two."""
    run = _deep_run("fedper", DEEP[:2], sharing, personal=2)
    _init(run, tmp_path)
    for cut in DEEP[:2]:
        _answer("encode", run, tmp_path, slice=cut, out=str(tmp_path / "sent"))
        with ContainerReader(tmp_path / "sent") as reader:
            assert coverage.never_returned(reader.header.meta) == kept[cut]


@pytest.mark.parametrize(
    ("method", "said", "expected"),
    [
        ("felo", "auto", "architecture"),
        ("velo", "auto", "architecture"),
        ("felo", "position", "position"),
        ("fedin", "auto", "position"),
        ("fedavg", "auto", "position"),
        ("fedavg", "architecture", "architecture"),
        ("inclusivefl", "auto", "position"),
    ],
)
def test_what_is_shared_unless_a_run_says_it(tmp_path: Path, method: str, said: str, expected: str) -> None:
    """Felo and Velo average among devices of one architecture: the server has a model for each of three sizes."""
    run = _deep_run(method, sharing=said)
    assert registry.sharing(run) == expected
    _init(run, tmp_path)
    own = {name.partition("/")[0] for name in _tensors(tmp_path / "m") if name.startswith("slice:")}
    assert own == ({f"slice:{cut}" for cut in DEEP[1:]} if expected == "architecture" else set())


def test_a_size_of_its_own_that_shares_nothing_is_refused(tmp_path: Path) -> None:
    """Three personal units of the whole model's four are fine, of a slice's two they are all."""
    run = _deep_run("fedper", sharing="architecture", personal=3)
    reply = do_job({"id": 1, "job": "init", "run": to_map(run), "out": str(tmp_path / "m")})
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert "personal = 3 shares nothing, the model has 3 units with parameters" in reply["detail"]


def _started(run: RunFile, other: RunFile, folder: Path, values: Callable[[str], float]) -> dict[str, Tensor]:
    """The first tensors of a run that begins with another's, whose tensors have these values, by name."""
    _init(other, folder)
    with ContainerReader(folder / "m") as reader:
        tensors = {name: torch.full_like(reader.tensor(name), values(name)) for name in reader.names()}
        table = [(name, codec_for(value, "fp32"), value.shape) for name, value in tensors.items()]
        write_container(folder / "start", reader.header.meta, table, tensors.values())
    job = {"id": 1, "job": "init", "run": to_map(run), "start_run": to_map(other), "start": str(folder / "start")}
    reply = do_job({**job, "out": str(folder / "begun")})
    assert reply["ok"], reply
    return _tensors(folder / "begun")


def _sizes(run: RunFile, folder: Path) -> dict[str, dict[str, set[float]]]:
    """Size -> unit -> the values that a device of it gets."""
    found: dict[str, dict[str, set[float]]] = {}
    for cut in DEEP:
        reply = {"id": 1, "job": "encode", "run": to_map(run), "model": str(folder / "begun"), "slice": cut}
        assert do_job({**reply, "out": str(folder / "sent")})["ok"]
        for name, value in _own(_tensors(folder / "sent")).items():
            found.setdefault(cut, {}).setdefault(name.partition(".")[0], set()).update(value.flatten().tolist())
    return found


_OF_SIZE = {"model/": 1.0, "slice:depth:1.1.0/": 2.0, "slice:depth:1.0.0/": 3.0}
_OF_SIZE |= {"extra/depth:1.1.0/": 4.0, "extra/depth:1.0.0/": 5.0}


def _of_size(name: str) -> float:
    return next(value for beginning, value in _OF_SIZE.items() if name.startswith(beginning))


@pytest.mark.parametrize(
    ("other", "run", "middle", "small"),
    [
        # each architecture goes on with its own model
        ("architecture", "architecture", (2, 2, 2), (3, 3)),
        # the head of each size, and block2, which is not in all of them, are its own, block1 is the whole model's
        ("architecture", "inclusivefl", (1, 2, 2), (1, 3)),
        ("inclusivefl", "inclusivefl", (1, 4, 4), (1, 5)),
        ("inclusivefl", "architecture", (1, 4, 4), (1, 5)),
        # one model: smaller ones are cut out of it
        ("position", "architecture", (1, 1, 1), (1, 1)),
        ("position", "inclusivefl", (1, 1, 1), (1, 1)),
        # no middle size there
        ("one", "architecture", (1, 1, 1), (3, 3)),
        ("one", "inclusivefl", (1, 1, 1), (1, 3)),
    ],
)
def test_sizes_begin_with_those_of_another_run(
    tmp_path: Path, other: str, run: str, middle: tuple[int, ...], small: tuple[int, ...]
) -> None:
    """The other run's whole model is 1, its models of the middle and the small size 2 and 3, InclusiveFL's own 4, 5."""
    runs = {
        "architecture": _deep_run("fedavg", sharing="architecture"),
        "position": _deep_run("fedavg"),
        "inclusivefl": _deep_run("inclusivefl"),
        "one": _deep_run("fedavg", ("full", "depth:1.0.0"), sharing="architecture"),
    }
    _started(runs[run], runs[other], tmp_path, _of_size)
    found = _sizes(runs[run], tmp_path)
    assert {value for values in found["full"].values() for value in values} == {1.0}
    assert found["depth:1.1.0"] == dict(zip(("block1", "block2", "head"), map(_set, middle), strict=True))
    assert found["depth:1.0.0"] == dict(zip(("block1", "head"), map(_set, small), strict=True))


def _set(value: int) -> set[float]:
    return {float(value)}


@pytest.mark.parametrize(
    ("method", "bases", "ok"), [("fedavg", 0, False), ("splitmix", 2, False), ("splitmix", 4, True)]
)
def test_bases_begin_only_with_as_many_bases(tmp_path: Path, method: str, bases: int, ok: bool) -> None:
    """One network, or two, cut into four would have weights between them that no device ever trains."""
    model = {"name": "mlp", "input": [3], "hidden": HIDDEN}
    made = {"name": method, **({"bases": bases} if bases else {})}
    other = run_file(model=model, classes=["a", "b"], method=made)
    _init(other, tmp_path)
    job = {"id": 1, "job": "init", "run": to_map(_run("splitmix")), "start_run": to_map(other)}
    reply = do_job({**job, "start": str(tmp_path / "m"), "out": str(tmp_path / "begun")})
    assert reply["ok"] is ok
    assert ok or "start from a run with the same method and bases, or leave init out" in reply["detail"]
