"""`edge-client infer --model FILE.onnx`, on files that this project did not write."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typed import ok, typed

from edge_client.errors import InputError
from edge_client.onnx.file import Facts, OnnxModel, add_facts

# each sample of 1x1x3 is its own logits: the predictions below are the positions of the largest value
X = np.array([[0.9, 0.1, 0.0], [0.0, 0.2, 0.9], [0.1, 0.8, 0.0], [0.3, 0.0, 0.4]], dtype=np.float32).reshape(4, 1, 1, 3)
SAID = [0, 2, 1, 2]
LABELS = np.array(["ok", "dent", "ok", "dent"])  # 3 of 4 are as predicted, with the classes below
CLASSES = ("ok", "scratch", "dent")


def write(path: Path, *, classes: tuple[str, ...] = CLASSES, shape: tuple[int, ...] = (1, 1, 3), rank: int = 2) -> Path:
    """A graph of one Flatten, by onnx's own helpers."""
    flat = helper.make_node("Flatten", ["in"], ["out"], axis=1)
    given = helper.make_tensor_value_info("in", TensorProto.FLOAT, ["n", *shape])
    come = helper.make_tensor_value_info("out", TensorProto.FLOAT, ["n", int(np.prod(shape))][:rank])
    graph = helper.make_graph([flat], "flat", [given], [come])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, str(path))
    if classes:
        add_facts(path, Facts(run="defects-1", classes=classes, input=shape))
    return path


def data(path: Path, x: np.ndarray = X, y: np.ndarray | None = LABELS) -> Path:
    np.savez(path, x=x, **({} if y is None else {"y": y}))
    return path


def test_it_tells_predictions_accuracy_latency_and_memory(tmp_path: Path) -> None:
    """Samples 0, 1 and 3 have the label of their largest value: 0.75; names in the csv, arrays in the npz."""
    model, named = write(tmp_path / "m.onnx"), f"npz:{data(tmp_path / 'd.npz')}"
    common = ["--model", model, "--data", named]
    done = typed("edge_client", "infer", *common, "--format", "json", "--out", tmp_path / "p.csv")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["num_samples"], found["accuracy"], found["batch"]) == (4, 0.75, 1)
    assert 0 < found["latency_p50_ms"] <= found["latency_p99_ms"]
    assert found["base_bytes"] > 10**6
    assert (tmp_path / "p.csv").read_text().splitlines() == [
        "sample,prediction,label",
        "0,ok,ok",
        "1,dent,dent",
        "2,scratch,ok",
        "3,dent,dent",
    ]
    typed("edge_client", "infer", *common, "--batch", 3, "--out", tmp_path / "p.npz")
    arrays = dict(np.load(tmp_path / "p.npz"))
    assert arrays["predictions"].tolist() == SAID
    assert arrays["labels"].tolist() == [0, 2, 0, 2]
    assert arrays["classes"].tolist() == list(CLASSES)
    assert np.array_equal(arrays["logits"], X.reshape(4, 3))


def test_torch_is_not_loaded(tmp_path: Path) -> None:
    """Neither by the command nor by what reads the data: onnxruntime and numpy are all that a device needs."""
    model, named = write(tmp_path / "m.onnx"), f"npz:{data(tmp_path / 'd.npz')}"
    code = (
        "import sys; from edge_client.cli.main import main; "
        f"code = main(['infer', '--model', {str(model)!r}, '--data', {named!r}]); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 samples, accuracy 0.7500\none sample at a time: p50 ")


def test_a_path_alone_and_data_without_labels(tmp_path: Path) -> None:
    """What lies there is recognised; without labels there are predictions and no accuracy."""
    model = write(tmp_path / "m.onnx")
    data(tmp_path / "labelled.npz")
    data(tmp_path / "bare.npz", y=None)
    places = (tmp_path / "labelled.npz", tmp_path / "bare.npz", f"npz:{tmp_path / 'bare.npz'}")
    done = [typed("edge_client", "infer", "--model", model, "--data", place, "--format", "json") for place in places]
    assert [json.loads(one.stdout)["accuracy"] for one in done] == [0.75, None, None]
    said = typed("edge_client", "infer", "--model", model, "--data", places[1], "--out", tmp_path / "p.csv").stdout
    assert "no labels" in said
    assert (tmp_path / "p.csv").read_text().splitlines()[:2] == ["sample,prediction", "0,ok"]


def test_a_file_of_others_is_asked_by_positions(tmp_path: Path) -> None:
    """Without names in it, labels are positions: 0, 2, 1 and 0 against 0, 2, 1 and 2."""
    model = write(tmp_path / "m.onnx", classes=())
    named = f"npz:{data(tmp_path / 'd.npz', y=np.array([0, 2, 1, 0]))}"
    done = typed("edge_client", "infer", "--model", model, "--data", named, "--format", "json")
    assert json.loads(done.stdout)["accuracy"] == 0.75


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-30])
    return path


def renamed(path: Path) -> Path:
    """Names of its metadata that are no UTF-8, which protocol buffers promise."""
    path.write_bytes(path.read_bytes().replace(b"fedfit.run", b"fedfit.\xff\xff\xff"))
    return path


def text(path: Path) -> Path:
    path.write_text("no model at all\n" * 50)
    return path


BAD: list[tuple[Callable[[Path], Path], Callable[[Path], Path], str]] = [
    (lambda p: p, data, "m.onnx does not exist; expected an ONNX file"),
    (text, data, "expected an ONNX file, got something else, or a part of one"),
    (lambda p: cut(write(p)), data, "expected an ONNX file, got something else, or a part of one"),
    (lambda p: renamed(write(p)), data, "expected an ONNX file, got something else, or a part of one"),
    (lambda p: write(p, rank=1), data, "expected an output of floats [batch, classes], got tensor(float) ["),
    (lambda p: write(p, classes=("a", "b")), data, "metadata is damaged: 2 names of classes and 3 outputs"),
    (lambda p: write(p, classes=("ok", "scratch", "hole")), data, "tells apart 'ok', 'scratch', 'hole'; "),
    (write, lambda p: data(p, y=np.array([0, 1, 2, 3])), "tells apart 3 classes ('ok', 'scratch', 'dent'), "),
    (write, lambda p: data(p, x=X.repeat(2, axis=2)), "takes samples of [1, 1, 3], those of "),
    (write, lambda p: data(p, x=X[:0], y=LABELS[:0]), "none"),
    (write, lambda p: p, "does not exist"),
]


@pytest.mark.parametrize(("model", "given", "said"), BAD, ids=range(len(BAD)))
def test_what_cannot_be_asked_is_told_in_a_line(
    tmp_path: Path, model: Callable[[Path], Path], given: Callable[[Path], Path], said: str
) -> None:
    """Exit code 3, and no traceback."""
    named = f"npz:{given(tmp_path / 'd.npz')}"
    done = typed("edge_client", "infer", "--model", model(tmp_path / "m.onnx"), "--data", named)
    assert (done.returncode, said in done.stderr, done.stderr.count("\n")) == (3, True, 1), done.stderr
    assert done.stdout == ""


def test_whatever_happened_to_a_file_there_is_one_error(tmp_path: Path) -> None:
    """Cut short anywhere, or with any byte changed: it is asked, or an `InputError` in one line says why not."""
    whole, path = write(tmp_path / "m.onnx").read_bytes(), tmp_path / "damaged.onnx"
    rng = random.Random(1)
    damaged = [whole[:length] for length in range(0, len(whole), 7)]
    for _ in range(150):
        place = rng.randrange(len(whole))
        damaged.append(whole[:place] + bytes([rng.randrange(256)]) + whole[place + 1 :])
    refused = []
    for content in damaged:
        path.write_bytes(content)
        try:
            OnnxModel(path).run(X)
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > len(damaged) // 3
    assert all(told.startswith(f"{path}: ") and "\n" not in told for told in refused)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--run-model", "x.bin"], "--run-model: not with an ONNX file"),
        (["--depthwise"], "--depthwise: not with an ONNX file"),
        (["--set", "width=3"], "--set: not with an ONNX file"),
        (["--batch", "0"], "--batch: expected 1 to 65536 samples"),
        (["--threads", "0"], "--threads: expected 1 to 1024"),
        (["--out", "x.txt"], "--out: expected a file that ends with .csv or .npz"),
    ],
)
def test_options_that_mean_nothing_are_refused(tmp_path: Path, more: list[str], said: str) -> None:
    """Instead of being passed over."""
    done = typed("edge_client", "infer", "--model", write(tmp_path / "m.onnx"), "--data", "digits", *more)
    assert (done.returncode, said in done.stderr) == (3, True), done.stderr


def test_weights_without_their_file_are_told_of_both_ways() -> None:
    """`--run-model` is needed for a built-in model only."""
    done = typed("edge_client", "infer", "--model", "mlp", "--data", "digits")
    assert (done.returncode, "--run-model" in done.stderr, "FILE.onnx" in done.stderr) == (3, True, True)


def test_without_onnxruntime_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without the extra: exit code 4 and the line to type."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)  # as Python marks what cannot be imported
    done = typed("edge_client", "infer", "--model", write(tmp_path / "m.onnx"), "--data", "digits")
    assert (done.returncode, "pip install 'fedfit[infer]'" in done.stderr) == (4, True), done.stderr


def test_a_deployed_model_is_asked_by_its_place(tmp_path: Path) -> None:
    """The same answers as by its file; where none is deployed, 3 and a line with what to type on the server."""
    at = ("--state-dir", tmp_path, "--data", f"npz:{data(tmp_path / 'd.npz')}", "--format", "json")
    none = typed("edge_client", "infer", "--deployed", *at)
    assert (none.returncode, none.stderr.count("\n")) == (3, 1)
    assert "no model is deployed on this device" in none.stderr
    assert "coordinator run deploy RUN" in none.stderr
    (tmp_path / "deployed").mkdir()
    write(tmp_path / "deployed/current.onnx")
    said = json.loads(ok("edge_client", "infer", "--deployed", *at))
    by_file = json.loads(ok("edge_client", "infer", "--model", tmp_path / "deployed/current.onnx", *at))
    assert (said["accuracy"], said["num_samples"]) == (by_file["accuracy"], by_file["num_samples"])
    both = typed("edge_client", "infer", "--deployed", "--model", "m.onnx", *at)
    assert both.returncode == 2
