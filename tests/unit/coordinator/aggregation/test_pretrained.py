"""Files of weights that somebody else made: read without running code, mapped by name, refused in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coordinator.aggregation import foreign_weights, pretrained
from coordinator.aggregation.first_model import check_first_model
from coordinator.aggregation.foreign_weights import read_weights
from edge_client.config.run_file import ModelSection, RunFile
from edge_client.errors import InputError
from edge_client.models.contract import Model, from_sequential

CODES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64"}


def safetensors(tensors: dict[str, Tensor]) -> bytes:
    """By hand: the length of the table, the table, the values."""
    table, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.flatten().contiguous().view(torch.uint8).tolist())
        place = [len(data), len(data) + len(raw)]
        table[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += raw
    head = json.dumps({"__metadata__": {"format": "pt"}, **table}).encode()
    return struct.pack("<Q", len(head)) + head + data


def net(classes: int = 3) -> Model:
    torch.manual_seed(classes)
    layers = OrderedDict(stem=nn.Linear(4, 5), block=nn.BatchNorm1d(5), head=nn.Linear(5, classes))
    return from_sequential(nn.Sequential(layers), input_shape=(4,))


def run_from(path: Path) -> RunFile:
    section = ModelSection(name="mlp", input=(4,), init=f"file:{path.name}")
    return pretrained.resolved(RunFile(name="r", classes=("a", "b", "c"), model=section), path.parent / "run.toml")


def test_safetensors_of_every_type_are_read(tmp_path: Path) -> None:
    """Halves become float32 with the same values; whole numbers stay."""
    tensors = {
        "a": torch.randn(2, 3),
        "b": torch.randn(4).half(),
        "c": torch.randn(4).bfloat16(),
        "d": torch.tensor(7),
    }
    (tmp_path / "w.safetensors").write_bytes(safetensors(tensors))
    read = read_weights(tmp_path / "w.safetensors")
    assert all(torch.equal(read[name].double(), tensor.double()) for name, tensor in tensors.items())
    assert [read[name].dtype for name in "abcd"] == [torch.float32] * 3 + [torch.int64]


def _table(entry: dict[str, Any], data: bytes = b"\0" * 16) -> bytes:
    head = json.dumps({"a": entry, "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(head)) + head + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]" + b"x",
        _table({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}),  # overlaps
        _table({"dtype": "F32", "shape": [2], "data_offsets": [8, 24]}),  # beyond the end
        _table({"dtype": "F32", "shape": [3], "data_offsets": [8, 16]}),  # another size than the shape's
        _table({"dtype": "F32", "shape": [-2], "data_offsets": [8, 16]}),
        _table({"dtype": "F32", "shape": [True], "data_offsets": [8, 12]}),
        _table({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [8, 16]}),
        _table({"dtype": "F64", "shape": [1], "data_offsets": [8, 16]}),
    ],
)
def test_hostile_safetensors_are_one_line(tmp_path: Path, content: bytes) -> None:
    """Lengths, places, shapes and types are checked before anything is read."""
    (tmp_path / "w.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"w\.safetensors: ") as refused:
        read_weights(tmp_path / "w.safetensors")
    assert "\n" not in str(refused.value)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/fedfit-evil",)


def test_code_in_a_file_of_torch_does_not_run(tmp_path: Path) -> None:
    """A pickle that calls os.system, a whole module, text, and a tensor of 10^9 elements of stride 0."""
    cases: dict[str, Any] = {"evil": Evil(), "module": nn.Linear(2, 2), "stride": {"a": torch.zeros(1).expand(10**9)}}
    for name, value in cases.items():
        torch.save(value, tmp_path / f"{name}.pth")
    (tmp_path / "text.pth").write_text("hello\n" * 100)
    (tmp_path / "weights.zip").write_bytes(b"x")
    for name in (*(f"{case}.pth" for case in cases), "text.pth"):
        with pytest.raises(InputError, match=r"not a file of weights .*save model.state_dict\(\)"):
            read_weights(tmp_path / name)
    assert not Path("/tmp/fedfit-evil").exists()
    with pytest.raises(InputError, match="expected a file of weights"):
        read_weights(tmp_path / "weights.zip")


def test_an_old_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`weights_only` had a hole before 2.6."""
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pth")
    monkeypatch.setattr(foreign_weights.torch, "__version__", "2.5.1+cpu")
    with pytest.raises(InputError, match=r"needs torch 2\.6 on the server, it has 2\.5\.1"):
        read_weights(tmp_path / "a.pth")


def test_weights_are_mapped_by_name_and_the_head_is_left_out(tmp_path: Path) -> None:
    """A file of 1000 classes below a prefix and inside `state_dict`: all but the head is taken, which is told."""
    source, model = net(1000), net(3)
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{n}": t for n, t in source.state_dict().items()}}, tmp_path / "w.pth"
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = pretrained.load(model, run_from(tmp_path / "w.pth"))
    assert told == "w.pth: 7 of 9 tensors; left out head.weight, head.bias"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name.startswith("head") else source.state_dict()[name])


def test_what_does_not_match_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """Other names, another shape in the middle: one line, and nothing is half loaded."""
    state = net().state_dict()
    other_name = {name.replace("stem", "_stem"): tensor for name, tensor in state.items()}
    other_shape = {**state, "stem.weight": torch.zeros(5, 9)}
    for content, message in (
        (other_name, r"7 of 9 names match; file: _stem\.weight, model: stem\.weight"),
        (other_shape, r"'stem\.weight' is \[5, 9\], the run's model has \[5, 4\]"),
    ):
        (tmp_path / "w.safetensors").write_bytes(safetensors(content))
        model = net(2)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(InputError, match=message):
            pretrained.load(model, run_from(tmp_path / "w.safetensors"))
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_hash_of_the_file_is_part_of_the_run(tmp_path: Path) -> None:
    """Another file under the same name, a missing one, and a hash that stands in the run file."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors(dict(net().state_dict())))
    run = run_from(path)
    assert run.model is not None
    assert len(run.model.init_sha256) == 64
    path.write_bytes(safetensors(dict(net(2).state_dict())))
    with pytest.raises(InputError, match="another file than when the run was started"):
        pretrained.load(net(), run)
    with pytest.raises(InputError, match="init-sha256 is"):
        pretrained.resolved(dataclasses.replace(run), tmp_path / "run.toml")
    with pytest.raises(InputError, match="cannot be read"):
        run_from(tmp_path / "nothing.pth")


def test_a_run_is_checked_with_its_weights_before_it_starts(tmp_path: Path) -> None:
    """What `run start` does: an mlp of four inputs does not have the names of this file."""
    (tmp_path / "w.safetensors").write_bytes(safetensors(dict(net().state_dict())))
    with pytest.raises(InputError, match="names match"):
        check_first_model(run_from(tmp_path / "w.safetensors"), None)
