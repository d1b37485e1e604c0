"""The aggregator's job `probe`: similarities of devices' models against numpy on their weights."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from rows import report
from torch import Tensor
from torch.nn import functional as F

from coordinator.aggregation.comparison import _pooled, _spread
from coordinator.results.similarity_record import Findings
from coordinator.store.rows import SERVER
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.records import from_map, to_map
from edge_client.wire.tensors import ContainerReader, codec_for, write_container
from edge_client.worker.method_state import write_state

CLASSES = ["a", "b", "c"]
Weights = dict[str, Tensor]


def run_of(**tables: Any) -> dict[str, Any]:
    """An mlp 5-4-4-3: what its stem (the input), block 1 and block 2 put out are its stages."""
    model = {"name": "mlp", "input": [5], "hidden": [4, 4]}
    made: dict[str, Any] = to_map(
        parse_table(RunFile, {"name": "t", "model": model, "classes": CLASSES} | tables, source="test")
    )
    return made


def weights(seed: int, *, widths: tuple[int, ...] = (5, 4, 4, 3)) -> Weights:
    """Random ones, by their names in the model."""
    rng = torch.Generator().manual_seed(seed)
    made = {}
    names = ("block1.linear", "block2.linear", "head")
    for name, (inputs, outputs) in zip(names, itertools.pairwise(widths), strict=True):
        made[f"{name}.weight"] = torch.randn(outputs, inputs, generator=rng)
        made[f"{name}.bias"] = torch.randn(outputs, generator=rng)
    return made


def save(path: Path, values: Mapping[str, Tensor], *, codec: str = "fp32", payload: str = "") -> Path:
    """A container; with a payload, an update."""
    meta = to_map(report(payload=payload)) if payload else {}
    table = [(f"model/{name}", codec_for(value, codec), value.shape) for name, value in values.items()]
    write_container(path, meta, table, iter(values.values()))
    return path


@pytest.fixture
def samples(tmp_path: Path) -> np.ndarray:
    """Forty, all of which are used; in the npz file `test.npz`."""
    x = np.random.default_rng(1).normal(size=(40, 5)).astype(np.float32)
    np.savez(tmp_path / "test.npz", x=x, y=np.arange(40) % 3)
    return x


def probe(folder: Path, run: dict[str, Any], **updates: Any) -> dict[str, Any]:
    """Device -> its update's file, or more about it; `before` and `after` are the server's models."""
    told = [{"device": name, **(own if isinstance(own, dict) else {"path": str(own)})} for name, own in updates.items()]
    job = {"id": 1, "job": "probe", "run": run, "round": 2, "updates": told, "data": str(folder / "test.npz")}
    return do_job(job | {"model": str(folder / "after"), "base": str(folder / "before")})


def found_by(folder: Path, run: dict[str, Any], **updates: Any) -> Findings:
    reply = probe(folder, run, **updates)
    assert reply.pop("ok"), reply
    del reply["id"]
    return from_map(Findings, reply)


def outputs(x: np.ndarray, own: Weights) -> list[np.ndarray]:
    """Of the two hidden layers, by numpy."""
    found = []
    for name in ("block1.linear", "block2.linear"):
        x = np.maximum(x @ own[f"{name}.weight"].numpy().T + own[f"{name}.bias"].numpy(), 0)
        found.append(x)
    return found


def hsic_cka(x: np.ndarray, y: np.ndarray) -> float:
    """tr(KHLH) / sqrt(tr(KHKH) tr(LHLH)), H = I - 1/n."""
    h = np.eye(len(x)) - 1 / len(x)
    k, t = h @ x @ x.T @ h, h @ y @ y.T @ h
    return float(np.trace(k @ t) / np.sqrt(np.trace(k @ k) * np.trace(t @ t)))


def test_similarities_are_those_of_the_devices_weights(tmp_path: Path, samples: np.ndarray) -> None:
    """Two devices: HSIC over what their hidden layers put out, both computed by numpy; the first stage is the input."""
    a, b = weights(1), weights(2)
    for name in ("before", "after"):
        save(tmp_path / name, weights(3))
    found = found_by(
        tmp_path,
        run_of(),
        a=save(tmp_path / "a", a, payload="params"),
        b=save(tmp_path / "b", b, payload="params"),
    )
    assert [stage.name for stage in found.comparison.stages] == ["stem", "stage 1", "stage 2"]
    assert [(one.device, one.slice) for one in found.comparison.devices] == [("a", "full"), ("b", "full")]
    assert (found.comparison.round, found.comparison.num_samples) == (2, 40)
    expected = [1.0, *(hsic_cka(x, y) for x, y in zip(outputs(samples, a), outputs(samples, b), strict=True))]
    for stage, value in zip(found.comparison.stages, expected, strict=True):
        assert np.asarray(stage.cka, dtype=float) == pytest.approx(np.array([[1, value], [value, 1]]), abs=1e-5)
    assert 0 < expected[1] < 0.99


def test_equal_weights_are_one_whichever_way_they_came(tmp_path: Path, samples: np.ndarray) -> None:
    """As weights, and as a change of the server's model; a tensor that is not there is as it was sent."""
    base, trained = weights(1), weights(2)
    save(tmp_path / "before", base)
    save(tmp_path / "after", base)
    partly = {name: value for name, value in trained.items() if not name.startswith("head")}
    change = {name: value - base[name] for name, value in trained.items()}
    found = found_by(
        tmp_path,
        run_of(),
        a=save(tmp_path / "a", partly, payload="params"),
        b=save(tmp_path / "b", change, payload="delta"),
    )
    for stage in found.comparison.stages:
        assert np.asarray(stage.cka, dtype=float) == pytest.approx(1.0, abs=1e-5)
    unchanged = {name: torch.zeros_like(value) for name, value in base.items()}
    same = found_by(
        tmp_path,
        run_of(),
        a=save(tmp_path / "a", unchanged, payload="delta"),
        b=save(tmp_path / "b", base, payload="params"),
    )
    assert np.asarray(same.comparison.stages[2].cka, dtype=float) == pytest.approx(1.0, abs=1e-5)


def test_devices_with_parts_of_the_model_are_compared_where_both_have_a_stage(
    tmp_path: Path, samples: np.ndarray
) -> None:
    """One layer less: the second stage of that device has no value. Half of the channels: all stages have one."""
    a, narrow = weights(1), weights(4, widths=(5, 2, 2, 3))
    for name in ("before", "after"):
        save(tmp_path / name, a)
    short = {name: value for name, value in weights(5, widths=(5, 4, 4, 3)).items() if not name.startswith("block2")}
    found = found_by(
        tmp_path,
        run_of(slices=["full", "layers:1", "width:1/2"]),
        a=save(tmp_path / "a", a, payload="params"),
        b={"path": str(save(tmp_path / "b", short, payload="params")), "slice": "layers:1"},
        c={"path": str(save(tmp_path / "c", narrow, payload="params")), "slice": "width:1/2"},
    )
    first, last = found.comparison.stages[1:]
    assert first.cka[0][2] == pytest.approx(hsic_cka(outputs(samples, a)[0], outputs(samples, narrow)[0]), abs=1e-5)
    assert last.cka[1] == (None, None, None)
    assert last.cka[2][0] == pytest.approx(hsic_cka(outputs(samples, a)[1], outputs(samples, narrow)[1]), abs=1e-5)
    assert [(picture.name, picture.slice) for picture in found.pictures] == [
        (SERVER, "full"),
        ("a", "full"),
        ("b", "layers:1"),
    ]


def test_pictures_have_the_distances_of_the_features(tmp_path: Path, samples: np.ndarray) -> None:
    """Four components of four features keep all distances, but for one factor and the rounding to float16."""
    a = weights(1)
    for name in ("before", "after"):
        save(tmp_path / name, a)
    found = found_by(tmp_path, run_of(), b=save(tmp_path / "b", weights(2), payload="params"))
    assert found.labels == tuple(number % 3 for number in range(40))
    server = found.pictures[0]
    points = np.frombuffer(base64.b64decode(server.features), dtype="<f2").reshape(40, server.width).astype(float)
    features = outputs(samples, a)[1]
    distances, wanted = (np.linalg.norm(v[:, None] - v[None], axis=-1) for v in (points, features))
    assert distances / distances.max() == pytest.approx(wanted / wanted.max(), abs=2e-3)


def test_what_a_simulated_device_keeps_for_itself_counts(tmp_path: Path, samples: np.ndarray) -> None:
    """Local sends nothing: two devices with the same own model are alike; one without any is left out."""
    own = {f"model/{name}": value for name, value in weights(7).items()}
    save(tmp_path / "before", weights(1))
    save(tmp_path / "after", weights(1))
    update = save(tmp_path / "update", {}, payload="params")
    told = {}
    for name in ("a", "b", "c"):
        told[name] = {"path": str(update), "method_state": str(tmp_path / name)}
        if name != "c":
            write_state(tmp_path / name, own)
            (tmp_path / name / "next").rename(tmp_path / name / "current")
    found = found_by(tmp_path, run_of(method="local"), **told)
    assert [one.device for one in found.comparison.devices] == ["a", "b"]
    assert np.asarray(found.comparison.stages[2].cka, dtype=float) == pytest.approx(1.0, abs=1e-6)
    assert [picture.name for picture in found.pictures] == ["a", "b"]
    stranger = weights(8)
    write_state(tmp_path / "b", {f"model/{name}": value for name, value in stranger.items()})
    (tmp_path / "b" / "next").rename(tmp_path / "b" / "current")
    other = found_by(tmp_path, run_of(method="local"), **told)
    expected = hsic_cka(outputs(samples, weights(7))[1], outputs(samples, stranger)[1])
    assert other.comparison.stages[2].cka[0][1] == pytest.approx(expected, abs=1e-5)


def test_maps_are_averaged_over_their_positions(tmp_path: Path) -> None:
    """A small-cnn: convolution, ReLU, maximum of 2x2, twice, by torch's functions; then the mean of each channel."""
    run = run_of(model={"name": "small-cnn", "input": [1, 8, 8], "width": 2})
    x = np.random.default_rng(2).normal(size=(12, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "test.npz", x=x, y=np.arange(12) % 3)
    means: dict[str, list[np.ndarray]] = {}
    for seed, name in enumerate(("before", "a", "b")):
        out = tmp_path / f"{name}.model"
        assert do_job({"id": 1, "job": "init", "run": run | {"seed": seed}, "out": str(out)})["ok"]
        with ContainerReader(out) as reader:
            own = {key.removeprefix("model/"): reader.tensor(key) for key in reader.names()}
        save(tmp_path / name, own, payload="" if name == "before" else "params")
        maps, means[name] = torch.from_numpy(x), []
        for unit in ("stem", "block1"):
            made = F.conv2d(maps, own[f"{unit}.conv.weight"], own[f"{unit}.conv.bias"], padding=1)
            maps = F.max_pool2d(F.relu(made), 2)
            means[name].append(maps.mean(dim=(2, 3)).numpy().astype(np.float64))
    save(tmp_path / "after", own)
    found = found_by(tmp_path, run, a=tmp_path / "a", b=tmp_path / "b")
    expected = [hsic_cka(first, second) for first, second in zip(means["a"], means["b"], strict=True)]
    assert [stage.cka[0][1] for stage in found.comparison.stages] == pytest.approx(expected, abs=1e-5)


def test_of_two_axes_both_are_averaged() -> None:
    """[[1, 2], [3, 6]]: means of the rows 1.5 and 4.5, of the columns 2 and 4; a vector stays as it is."""
    assert _pooled(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]])).tolist() == [[1.5, 4.5, 2.0, 4.0]]
    assert _pooled(torch.tensor([[1.0, 2.0]])).tolist() == [[1.0, 2.0]]


def test_stages_are_at_most_six_from_the_first_to_the_last() -> None:
    """Of eleven every second one; of four all."""
    taps = [f"stage_{number}_out" for number in range(11)]
    assert _spread(taps) == taps[::2]
    assert _spread(taps[:4]) == taps[:4]
    assert _spread(taps[:1]) == taps[:1]


def test_devices_that_train_several_networks_are_not_compared(tmp_path: Path, samples: np.ndarray) -> None:
    """SplitMix: no one network stands for a device, nor for the server."""
    for name in ("before", "after", "a"):
        save(tmp_path / name, weights(1), payload="params")
    found = found_by(tmp_path, run_of(method={"name": "splitmix", "bases": 2}), a=tmp_path / "a", b=tmp_path / "a")
    assert (found.comparison.devices, found.comparison.stages, found.pictures) == ((), (), ())


def test_what_cannot_be_compared_is_an_answer(tmp_path: Path, samples: np.ndarray) -> None:
    """Test data that is gone; an update with tensors of another model."""
    save(tmp_path / "before", weights(1))
    save(tmp_path / "after", weights(1))
    odd = save(tmp_path / "odd", weights(2, widths=(5, 7, 4, 3)), payload="params")
    reply = probe(tmp_path, run_of(), a=odd)
    assert (reply["ok"], reply["code"]) == (False, "shape")
    (tmp_path / "test.npz").unlink()
    reply = probe(tmp_path, run_of(), a=save(tmp_path / "a", weights(2), payload="params"))
    assert (reply["ok"], reply["code"]) == (False, "input")
