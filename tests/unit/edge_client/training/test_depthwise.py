"""A trained model group by group: the outputs of a plain forward pass, one group in memory at a time; its command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typed import in_a_process, typed

from edge_client.errors import NothingFitsError, PayloadError
from edge_client.models import registry
from edge_client.models.contract import Model
from edge_client.training.depthwise import UnitSize, fit_groups, predict_depthwise, release, survey
from edge_client.wire.container import MODEL_PREFIX
from edge_client.wire.tensors import codec_for, write_container

MIB = 2**20
SHAPE = (3, 8, 8)
MODELS: dict[str, dict[str, Any]] = {
    "preresnet20": {},  # whose BatchNorms keep no statistics
    "resnet10": {"base_width": 8, "small_stem": True},
    "vit-t-16": {"patch": 4, "width": 24, "depth": 2, "heads": 2},
    "mlp": {"hidden": [8, 8]},
    "small-cnn": {},
}


class Noise:
    """Eleven samples."""

    def __init__(self) -> None:
        self.x = torch.randn(11, *SHAPE, generator=torch.Generator().manual_seed(1))
        self.labels = torch.zeros(11, dtype=torch.int64)

    def __len__(self) -> int:
        return 11

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.labels[indices]


def _build(name: str, **options: Any) -> Model:
    torch.manual_seed(2)
    model = registry.build(name, input_shape=SHAPE, num_classes=5, options=MODELS[name] | options)
    with torch.no_grad():
        for tensor in model.buffers():  # running statistics that say something
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return model.eval()


def _weights(model: Model) -> Callable[[str], Tensor]:
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return lambda name: values[name].clone()


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_a_plain_forward_pass(tmp_path: Path, name: str) -> None:
    """Bit for bit, in batches of 4, 4 and 3; the model's own values are gone before and after."""
    model, data = _build(name), Noise()
    weights = _weights(model)
    with torch.no_grad():
        expected = [model(data.x[start : start + 4]) for start in (0, 4, 8)]
    release(model)
    for groups in ([[unit] for unit in model.order], [list(model.order)], [list(model.order[:2]), model.order[2:]]):
        found = list(predict_depthwise(model, weights, data, groups, tmp_path, 4))
        assert [len(logits) for logits in found] == [4, 4, 3]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert all(tensor.is_meta for tensor in model.parameters())
    assert list(tmp_path.iterdir()) == []


def test_only_one_group_has_its_weights(tmp_path: Path) -> None:
    """Each value is asked for once, group after group, and only after the earlier group's are gone."""
    model = _build("mlp")
    weights, asked = _weights(model), []
    release(model)

    def watched(name: str) -> Tensor:
        unit = name.partition(".")[0]
        loaded = {n.partition(".")[0] for n, tensor in model.named_parameters() if not tensor.is_meta}
        assert loaded <= {unit}
        asked.append(name)
        return weights(name)

    list(predict_depthwise(model, watched, Noise(), [[unit] for unit in model.order], tmp_path, 4))
    assert asked == [name for name, _ in model.named_parameters()]


def test_a_value_of_another_shape_is_refused(tmp_path: Path) -> None:
    """It would be of another model."""
    model = _build("mlp")
    release(model)
    with pytest.raises(PayloadError, match=r"is \[2\], expected \["):
        list(predict_depthwise(model, lambda name: torch.zeros(2), Noise(), [model.order], tmp_path, 4))


def test_units_are_surveyed() -> None:
    """192 -> 8 -> 8 -> 5 floats: weights and biases; of a sample the input and what each layer puts out."""
    model = _build("mlp")
    weights = _weights(model)
    release(model)
    sizes = {unit.name: unit.weight_bytes for unit in survey(model, weights, SHAPE)}
    assert [size for size in sizes.values() if size] == [4 * (192 * 8 + 8), 4 * (8 * 8 + 8), 4 * (8 * 5 + 5)]


def _sizes() -> list[UnitSize]:
    units = [("a", 10, 4), ("b", 20, 1), ("c", 5, 2)]
    return [
        UnitSize(name=name, weight_bytes=weight * MIB, activation_bytes=active * MIB) for name, weight, active in units
    ]


@pytest.mark.parametrize(
    ("budget_mib", "groups", "batch"),
    [
        (60, [["a", "b", "c"]], 4),  # 1.05 x (35 + 16) + 5
        (58, [["a", "b"], ["c"]], 4),  # 1.05 x (30 + 16) + 5
        (33, [["a"], ["b"], ["c"]], 4),  # 26, 24 and 13, times 1.05, and 5
        (32, [["a"], ["b"], ["c"]], 2),  # 18, 22, 9
        (28, [["a"], ["b"], ["c"]], 1),  # 14, 21, 7
    ],
)
def test_groups_are_as_large_as_fits(budget_mib: int, groups: list[list[str]], batch: int) -> None:
    """Weights of all units of a group and the activations of its largest, 5 % and 5 MiB for a thread's tables."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert fit_groups(_build("mlp"), _sizes(), 4, budget_mib * MIB) == (groups, batch)
        with pytest.raises(NothingFitsError) as caught:
            fit_groups(_build("mlp"), _sizes(), 4, 27 * MIB)
        assert caught.value.least_bytes == pytest.approx((1.05 * 21 + 5) * MIB, abs=1)
        with pytest.raises(NothingFitsError, match="they change the outputs of this model"):
            fit_groups(_build("preresnet20"), _sizes(), 4, 32 * MIB)
    finally:
        torch.set_num_threads(threads)


def _save(model: Model, path: Path) -> Path:
    state = {MODEL_PREFIX + name: tensor for name, tensor in model.state_dict().items()}
    table = [(name, codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in state.items()]
    write_container(path, {}, table, state.values())
    return path


def _images(folder: Path) -> Path:
    """40 images in 5 classes."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 256, (40, *SHAPE), dtype=np.uint8)
    np.savez(folder / "images.npz", x=x, y=np.arange(40) % 5)
    return folder / "images.npz"


def test_infer_says_the_same_with_and_without_groups(tmp_path: Path) -> None:
    """Logits and predictions on disk are those of the whole model; the accuracy is their share of labels."""
    saved = _save(_build("small-cnn"), tmp_path / "model.bin")
    common = ("--model", "small-cnn", "--run-model", saved, "--data", f"npz:{_images(tmp_path)}", "--batch", 16)
    found = {}
    for way in ((), ("--depthwise",)):
        out = tmp_path / f"{len(way)}.npz"
        done = typed("edge_client", "infer", *common, *way, "--out", out, "--format", "json")
        assert done.returncode == 0, done.stderr
        found[way] = (json.loads(done.stdout), dict(np.load(out)))
    (whole, one), (split, other) = found.values()
    assert (len(whole["groups"]), len(split["groups"]) > 2) == (1, True)
    assert np.array_equal(one["logits"], other["logits"])
    assert np.array_equal(one["predictions"], one["logits"].argmax(1))
    assert whole["accuracy"] == split["accuracy"] == np.mean(one["predictions"] == np.arange(40) % 5)


def test_infer_stays_inside_its_budget(tmp_path: Path) -> None:
    """An mlp of 0.3, 4, 4 and 4 million floats, 49 MB: by groups it takes 24 MB at most, at once more than 45."""
    options = {"hidden": [2000, 2000, 2000, 2000]}
    saved = _save(_build("mlp", **options), tmp_path / "model.bin")
    common = ["--model", "mlp", "--set", "hidden=[2000,2000,2000,2000]", "--run-model", saved, "--format", "json"]
    common += ["--data", f"npz:{_images(tmp_path)}"]
    inside, whole = (
        json.loads(in_a_process("edge_client", "infer", *common, *more).stdout) for more in (["--budget", "24MB"], [])
    )
    assert len(inside["groups"]) >= 3
    assert inside["peak_bytes"] <= 24 * 10**6
    assert whole["peak_bytes"] > 45 * 10**6


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"--run-model": "nothing.bin"}, 3, "--run-model: cannot read"),
        ({"--run-model": "images.npz"}, 3, "--run-model: "),
        ({"--model": "mlp"}, 3, "is of another model: they differ in"),
        ({"--model": "mpl"}, 7, "mlp"),
        ({"--out": "x.txt"}, 3, "--out: expected a file that ends with .csv or .npz"),
        ({"--threads": "0"}, 3, "--threads: expected 1 to 1024"),
        ({"--batch": "0"}, 3, "--batch: expected 1 to 65536 samples"),
        ({"--classes": "4"}, 3, "has 5 classes, got 4"),
        ({"--budget": "0"}, 3, "--budget: expected more than 0 bytes"),
        ({"--budget": "1MB"}, 6, "nothing fits: the largest unit needs"),
    ],
)
def test_infer_tells_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], code: int, said: str
) -> None:
    """One line, and the exit code of its kind."""
    monkeypatch.chdir(tmp_path)
    _save(_build("small-cnn"), tmp_path / "model.bin")
    _images(tmp_path)
    given = {"--model": "small-cnn", "--run-model": "model.bin", "--data": "npz:images.npz"} | change
    done = typed("edge_client", "infer", *(word for pair in given.items() for word in pair))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert len(done.stderr.splitlines()) == 1
