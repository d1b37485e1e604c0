"""Other built-in models among the slices of a run: what they are called, and that each is a model of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aggregator_jobs import do_job
from rows import run_file
from torch import Tensor, nn

from coordinator.cli import main as cli
from coordinator.cli.methods import describe_method
from coordinator.rounds.slice_choice import SliceChoice
from coordinator.run_check import check_run
from edge_client.config.key_descriptions import describe
from edge_client.config.run_file import RunFile, load_run_file
from edge_client.config.tables import to_table
from edge_client.config.toml_text import toml_value
from edge_client.errors import FedfitError, InputError, NoSuchNameError
from edge_client.measuring.calibration import job_for
from edge_client.methods import registry
from edge_client.models import registry as models
from edge_client.models.slicing import SliceSpec, index_map, parse
from edge_client.records import from_map, to_map
from edge_client.task.run_model import Recipe, recipe
from edge_client.task.task import Task
from edge_client.wire.tensors import ContainerReader, codec_for, write_container
from edge_client.worker.plan import memory_key

TINY = {"tiny": {"name": "small-cnn", "width": 2}}
SLICES = ["full", "tiny", "mlp"]


def mixed(**changes: Any) -> RunFile:
    """A ResNet10 beside a small CNN with an option, and an MLP with its defaults."""
    model = {"name": "resnet10", "input": [1, 8, 8], "base-width": 2}
    return run_file(**{"model": model, "slices": SLICES, "models": TINY} | changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("full", "full"),
        ("resnet10", "full"),
        ("tiny", "model:tiny"),
        ("model:tiny", "model:tiny"),
        ("densenet121", "model:densenet121"),
        ("model:resnet10", "model:resnet10"),
        ("width:1/2", "width:1/2"),
    ],
)
def test_a_model_is_called_by_its_name(text: str, expected: str) -> None:
    """The run's own names come first, then its model, then built-in ones; a longer form tells them from slices."""
    spec = registry.named(mixed(), text)
    assert str(spec) == expected
    assert parse(expected) == spec


def test_a_name_of_the_run_is_not_a_slice_of_the_family() -> None:
    """`resnet10` is a slice of ResNet26, unless the run says what it calls so."""
    family = run_file(model={"name": "resnet26", "input": [1, 8, 8]}, slices=["full", "resnet10"])
    assert registry.architectures(family) == ("full", "depth:1.1.1.1")
    own = run_file(
        model={"name": "resnet26", "input": [1, 8, 8]},
        slices=["full", "resnet10"],
        models={"resnet10": {"base-width": 4}},
    )
    assert registry.architectures(own) == ("full", "model:resnet10")
    section = own.section("model:resnet10")
    assert section is not None
    assert (section.name, section.input, section.options) == ("resnet10", (1, 8, 8), {"base_width": 4})


@pytest.mark.parametrize("method", ["draftfed", "fedmd", "fedhe", "fedproto", "fedgkt", "local", "felo", "fedavg"])
def test_each_architecture_is_a_model_of_its_own(method: str) -> None:
    """Without being told; what is no part of one model has no positions in it."""
    run = mixed(method=method)
    assert registry.architectures(run) == ("full", "model:tiny", "model:mlp")
    assert registry.sharing(run) == "architecture"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sharing": "position"}, 'sharing: "position" combines the parts of one model'),
        ({"method": "inco"}, "'inco' trains slices of depth or layers or width, got 'model:tiny'"),
        ({"method": "heterofl"}, "'heterofl' trains slices of width, got 'model:tiny'"),
        ({"method": "fedepth"}, "'fedepth' trains the whole model, got 'model:tiny'"),
        ({"method": "scalefl"}, "'scalefl' trains slices of exit or width, got 'model:tiny'"),
        ({"slices": ["full", "tiny", "model:nope"]}, "unknown model 'nope'"),
        ({"slices": ["full", "tiny", "har-cnn"]}, "model 'har-cnn' needs an input of channels, length"),
        ({"slices": ["full", "tiny", "model:tiny"]}, "slices: expected different ones"),
        ({"slices": ["full", "mlp"]}, "models: 'tiny' is not among the slices"),
        ({"models": {"tiny": {"name": "small-cnn", "widht": 2}}}, "unknown key 'widht'; did you mean 'width'?"),
        ({"models": {"tiny": "smal-cnn"}}, "unknown model 'smal-cnn'"),
        ({"models": {"full": "mlp"}, "slices": ["full"]}, "not full, got 'full'"),
        ({"models": {"x" * 59: "mlp"}, "slices": ["x" * 59]}, "expected names of 1 to 58 letters"),
    ],
)
def test_what_cannot_be_is_said_before_a_run(changes: dict[str, Any], said: str) -> None:
    """As `run start` and `simulate` do."""
    with pytest.raises(InputError, match=re.escape(said)):
        check_run(mixed(**changes))


def test_a_table_of_models_is_read_written_and_described(tmp_path: Path) -> None:
    """`tiny = "small-cnn"` is short for a table; a number for one is refused by its place."""
    run = mixed()
    path = tmp_path / "run.toml"
    path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in to_table(run).items()))
    assert load_run_file(path) == run
    assert from_map(RunFile, to_map(run)) == run
    assert mixed(models={"tiny": "small-cnn"}).models["tiny"].name == "small-cnn"
    with pytest.raises(InputError, match=r"models\.tiny: expected a table, got 5"):
        mixed(models={"tiny": 5})
    rows = {row.key: row.type for row in describe(RunFile)}
    assert rows["models"] == "table of tables"
    assert rows["models.NAME.name"] == "text"
    assert rows["models.NAME.*"] == "any"


def test_another_model_is_no_part_of_this_one() -> None:
    """Nothing silently takes the whole model instead."""
    made = recipe(mixed(), None)
    with pytest.raises(InputError, match="is another model, no part of this one"):
        index_map(made.build((1, 8, 8)), SliceSpec(model="tiny"))
    with pytest.raises(InputError, match="is another model, no part of 'mlp'"):
        models.build("mlp", input_shape=(4,), num_classes=2, options={}, spec=SliceSpec(model="tiny"))
    with pytest.raises(NoSuchNameError, match="unknown slice of resnet10 'mlp'"):
        models.parse_slice("resnet10", "mlp")


def test_what_is_built_is_the_other_model() -> None:
    """small-cnn of width 2 on 1x8x8: 1*2*9+2 + 2*4*9+4 + 4*2*2*2+2 = 130 parameters; its sizes are known before."""
    made, cut = recipe(mixed(), None), SliceSpec(model="tiny")
    assert sum(param.numel() for param in made.build((1, 8, 8), cut).parameters()) == 130
    assert sum(made.parameter_sizes(cut)) == 130


def test_a_task_may_have_other_models_beside_its_own() -> None:
    """It has no slices of width, and needs none."""
    task = Task(
        model=lambda n: nn.Sequential(nn.Flatten(), nn.Linear(64, n)), train_data=lambda device: None, input=(1, 8, 8)
    )
    run = mixed(model=None, task={"name": "mine"})
    check_run(run)
    made = Recipe(run=run, task=task)
    assert registry.architectures(run) == ("full", "model:tiny", "model:mlp")
    assert sum(param.numel() for param in made.build((1, 8, 8)).parameters()) == 64 * 2 + 2
    assert sum(param.numel() for param in made.build((1, 8, 8), parse("model:tiny")).parameters()) == 130
    assert sum(made.parameter_sizes(parse("model:tiny"))) == 130
    assert (run.what, run.what_is("model:tiny")) == ("task mine", "small-cnn")


def calibration_key(run: RunFile, cut: str) -> str:
    """Of rows that were measured once."""
    return job_for(run, registry.plan_rules("fedavg", {}), (1, 8, 8), slice_name=cut).key


@pytest.mark.parametrize("key", [memory_key, calibration_key])
def test_what_was_measured_belongs_to_the_other_model(key: Any) -> None:
    """Its own options change it, those of the run's model do not."""
    wider = {"name": "resnet10", "input": [1, 8, 8], "base-width": 4}
    assert key(mixed(), "model:tiny") == key(mixed(model=wider), "model:tiny")
    assert key(mixed(), "full") != key(mixed(model=wider), "full")
    other = mixed(models={"tiny": {"name": "small-cnn", "width": 3}})
    assert key(mixed(), "model:tiny") != key(other, "model:tiny")
    assert key(mixed(), "full") == key(other, "full")


def test_a_label_may_be_a_models_name() -> None:
    """As people type it, and as the run writes it."""
    labels = {"a": {"slice": "tiny"}, "b": {"slice": "model:mlp"}, "c": {"slice": "resnet10"}, "d": {"slice": "odd"}}
    choice = SliceChoice(mixed(), {}, budget_of=lambda _: None, labels_of=lambda name: labels[name], of_training=True)
    assert [choice.architecture(name) for name in "abcd"] == ["model:tiny", "model:mlp", "full", "full"]
    assert not choice.give_less("a", "model:tiny")
    assert choice.give_less("d", "full")


def answer(job: str, run: RunFile, **fields: Any) -> dict[str, Any]:
    reply = do_job({"id": 1, "job": job, "run": to_map(run), **fields})
    assert reply["ok"], reply
    return reply


def tensors(path: Path) -> dict[str, Tensor]:
    with ContainerReader(path) as reader:
        return {name: reader.tensor(name) for name in reader.names()}


def begun(run: RunFile, path: Path) -> dict[str, Tensor]:
    answer("init", run, out=str(path))
    return tensors(path)


def write(path: Path, values: dict[str, Tensor]) -> Path:
    table = [(name, codec_for(value, "fp32"), value.shape) for name, value in values.items()]
    write_container(path, {"num_samples": 1, "payload": "params", "steps": 1}, table, values.values())
    return path


def sent(run: RunFile, model: Path, cut: str) -> dict[str, Tensor]:
    """What a device with this slice gets."""
    answer("encode", run, model=str(model), slice=cut, out=str(model.with_name("sent")))
    return tensors(model.with_name("sent"))


def shapes(name: str, **options: Any) -> dict[str, tuple[int, ...]]:
    """Of the tensors of a built-in model, as they travel."""
    model = models.build(name, input_shape=(1, 8, 8), num_classes=2, options=options)
    return {f"model/{key}": tuple(value.shape) for key, value in model.state_dict().items()}


def test_every_model_begins_with_weights_that_follow_from_the_seed(tmp_path: Path) -> None:
    """A device gets exactly the tensors of its model; another seed gives others."""
    first = begun(mixed(), tmp_path / "a")
    again, other = begun(mixed(), tmp_path / "b"), begun(mixed(seed=2), tmp_path / "c")
    assert all(value.equal(again[name]) for name, value in first.items())
    weights = [name for name in first if name.startswith("slice:model:tiny/") and name.endswith("weight")]
    assert weights
    assert not any(first[name].equal(other[name]) for name in weights)
    for cut, expected in (
        ("full", shapes("resnet10", base_width=2)),
        ("model:tiny", shapes("small-cnn", width=2)),
        ("model:mlp", shapes("mlp")),
    ):
        assert {name: tuple(value.shape) for name, value in sent(mixed(), tmp_path / "a", cut).items()} == expected


def test_scaffold_has_control_variates_of_every_model(tmp_path: Path) -> None:
    """One for each tensor that travels, zero at first."""
    begun(mixed(method="scaffold"), tmp_path / "m")
    got = sent(mixed(method="scaffold"), tmp_path / "m", "model:tiny")
    controls = {name: value for name, value in got.items() if name.startswith("extra/control/")}
    assert {name.removeprefix("extra/control/") for name in controls} == {
        name.removeprefix("model/") for name in shapes("small-cnn", width=2)
    }
    assert not any(value.any() for value in controls.values())


def test_devices_of_one_model_share_with_each_other_alone(tmp_path: Path) -> None:
    """Tiny: 2 of 10 samples and 4 of 30 make (20 + 120) / 40 = 3.5; the ResNet's one device + 1; nobody has the MLP."""
    run = mixed()
    first = begun(run, tmp_path / "m")
    own = {cut: sent(run, tmp_path / "m", cut) for cut in ("full", "model:tiny")}
    updates = {
        "a": ("full", 10, {name: value + 1 for name, value in own["full"].items()}),
        "b": ("model:tiny", 10, {name: torch.full_like(value, 2) for name, value in own["model:tiny"].items()}),
        "c": ("model:tiny", 30, {name: torch.full_like(value, 4) for name, value in own["model:tiny"].items()}),
    }
    rows = [
        {"device": name, "path": str(write(tmp_path / name, values)), "num_samples": count, "slice": cut}
        for name, (cut, count, values) in updates.items()
    ]
    paths = {"model": str(tmp_path / "m"), "base": str(tmp_path / "m"), "out": str(tmp_path / "n")}
    answer("fold", run, round=1, updates=rows, **paths)
    after = tensors(tmp_path / "n")
    assert list(after) == list(first)
    for name, value in after.items():
        if name.startswith("slice:model:tiny/"):
            assert value.unique().tolist() == [3.5], name
        elif name.startswith("slice:model:mlp/"):
            assert value.equal(first[name]), name
        else:
            assert torch.allclose(value.double(), first[name].double() + 1), name


def test_every_model_is_judged(tmp_path: Path) -> None:
    """A tiny model of zeros and a bias for `yes` answers yes to all: 2 of 3 are right."""
    run = mixed()
    values = begun(run, tmp_path / "m")
    bias = next(name for name in reversed(values) if name.startswith("slice:model:tiny/") and name.endswith("bias"))
    for name, value in values.items():
        if name.startswith("slice:model:tiny/"):
            value.copy_(torch.tensor([0.0, 1.0]) if name == bias else torch.zeros_like(value))
    with ContainerReader(tmp_path / "m") as reader:
        table = [(name, codec_for(value, "fp32"), value.shape) for name, value in values.items()]
        write_container(tmp_path / "n", reader.header.meta, table, values.values())
    x = np.random.default_rng(0).normal(size=(3, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "test.npz", x=x, y=np.array(["yes", "no", "yes"]))
    reply = answer("evaluate", run, model=str(tmp_path / "n"), data=str(tmp_path / "test.npz"))
    judged = {row["slice"]: row["num_correct"] for row in reply["results"]}
    assert list(judged) == ["full", "model:tiny", "model:mlp"]
    assert judged["model:tiny"] == 2


def started(run: RunFile, other: RunFile, folder: Path) -> dict[str, Any]:
    """A run that begins with another's, all of whose tensors are 7."""
    values = {name: torch.full_like(value, 7) for name, value in begun(other, folder / "o").items()}
    job = {"id": 1, "job": "init", "run": to_map(run), "start_run": to_map(other), "out": str(folder / "b")}
    return do_job({**job, "start": str(write(folder / "s", values))})


def test_a_run_goes_on_with_the_other_models_of_another(tmp_path: Path) -> None:
    """Tiny is there and begins with its weights; the MLP is not and begins anew."""
    assert started(mixed(), mixed(slices=["full", "tiny"]), tmp_path)["ok"]
    for name, value in tensors(tmp_path / "b").items():
        if name.startswith("slice:model:mlp/"):
            assert not (value == 7).any(), name
        else:
            assert (value == 7).all(), name


def test_another_model_of_the_same_name_is_no_start(tmp_path: Path) -> None:
    """What the run calls tiny was wider there."""
    reply = started(mixed(), mixed(models={"tiny": {"name": "small-cnn", "width": 3}}), tmp_path)
    assert (reply["ok"], reply["code"]) == (False, "input")
    assert "the slice 'model:tiny' is another model there" in reply["detail"]


def test_the_bytes_of_drafts_are_those_of_each_model() -> None:
    """Numbers per sample that DraftFed's specification has for 32x32: ResNet50 18,442, DenseNet121 17,418; 128 samples.

    Both ways the same. Once, down: the first weights, 6,964,106 with 83,648 running statistics as float32 and counters
    of 121 BatchNorms of 8 bytes, and 512 samples of 3,072 numbers.
    """
    told = describe_method(
        "draftfed",
        {"public": "digits", "public-samples": 512},
        model="resnet50",
        input_shape=(3, 32, 32),
        num_classes=10,
        codec="fp32",
        slices=("full", "densenet121"),
    )
    payloads = {"full": 4 * 128 * 18_442, "model:densenet121": 4 * 128 * 17_418}
    assert [row["slice"] for row in told["slices"]] == list(payloads)
    for row in told["slices"]:
        for way in ("bytes_up", "bytes_down"):
            assert 0 < row[way] - payloads[row["slice"]] <= payloads[row["slice"]] * 0.01 + 512, way
    once = 4 * (6_964_106 + 83_648) + 8 * 121 + 4 * 512 * 3_072
    assert 0 < told["slices"][1]["bytes_once"] - once <= once * 0.01


def test_a_command_shows_the_bytes_of_other_models(capsys: pytest.CaptureFixture[str]) -> None:
    """And says what it does not know."""
    flags = ["methods", "show", "felo", "--model", "small-cnn", "--slices", "full,mlp"]
    assert cli.main(flags) == 0
    assert "model:mlp" in capsys.readouterr().out
    assert cli.main([*flags[:-1], "full,model:nope"]) == 7
    assert "unknown model 'nope'" in capsys.readouterr().err


def test_devices_are_told_what_they_do_not_know() -> None:
    """A coordinator that names a model which is not built in gets the one error that a device declines with."""
    with pytest.raises(FedfitError, match="unknown model 'nope'"):
        recipe(mixed(), None).parameter_sizes(parse("model:nope"))
