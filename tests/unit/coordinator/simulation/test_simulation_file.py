"""From flags and run files to what a simulation does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main as cli
from coordinator.results.training_budgets import budgets_of
from coordinator.run_check import warnings_of
from coordinator.simulation.run_options import Flags, Missing, combinations, complete
from edge_client.config.run_file import RunFile, SimulateSection
from edge_client.config.tables import parse_table, to_table
from edge_client.errors import InputError

DIGITS = Missing(shape=(1, 8, 8), classes=tuple("0123456789"))


def resolved(**flags: Any) -> RunFile:
    """The only run of these flags, on the digits unless they say otherwise."""
    (one,) = combinations(Flags(**{"model": "mlp", "data": "digits", **flags}))
    return complete(one, DIGITS)


def test_flags_are_keys_of_the_run_file() -> None:
    """Each flag at its place; input and classes come from the data, training settings from nobody's file."""
    file = resolved(
        method="fedprox",
        model="small-cnn",
        devices=20,
        rounds=3,
        partition="dirichlet:0.5",
        training_budgets="40MB,80MB",
        participation=0.5,
        seed="7",
        set=["mu=0.25", "train.lr=0.1", "rounds.codec=fp16", "model.width=8"],
    )
    assert (file.method.name, file.method.parameters) == ("fedprox", {"mu": 0.25})
    assert file.model is not None
    assert (file.model.name, file.model.input, file.model.options) == ("small-cnn", (1, 8, 8), {"width": 8})
    assert (file.seed, file.stop.rounds, file.devices.fraction, file.rounds.codec) == (7, 3, 0.5, "fp16")
    assert (file.train.lr, file.train.epochs, file.train.momentum) == (0.1, None, 0.9)
    assert file.simulate == SimulateSection(
        data="digits", partition="dirichlet:0.5", devices=20, training_budgets=("40MB", "80MB")
    )
    assert (file.name, file.evaluate.on) == ("fedprox-small-cnn-digits", "simulate")


def test_a_file_says_what_no_flag_does(tmp_path: Path) -> None:
    """Its own defaults hold (1 epoch), its evaluate.on stays, a flag wins over it."""
    path = tmp_path / "run.toml"
    path.write_text(
        'name = "mine"\nmethod = { name = "fedprox", mu = 0.5 }\nmodel = { name = "mlp", input = [64], hidden = [4] }\n'
        'evaluate = { on = "devices" }\nsimulate = { data = "digits", devices = 4 }\n'
    )
    file = resolved(file=path, model=None, data=None, rounds=2)
    assert (file.name, file.method.parameters, file.train.epochs) == ("mine", {"mu": 0.5}, 1)
    assert file.model is not None
    assert (file.model.input, file.model.options, file.evaluate.on) == ((64,), {"hidden": [4]}, "devices")
    assert (file.stop.rounds, file.simulate and file.simulate.devices) == (2, 4)
    assert resolved(file=path, model="mlp", data=None).model == file.model
    other = resolved(file=path, method="fedavg", model="small-cnn", data=None, set=["model.input=[1,8,8]"])
    assert (other.method.parameters, other.model and other.model.options) == ({}, {})


@pytest.mark.parametrize(
    ("method", "settings", "expected"),
    [
        ("local", [], "devices"),
        ("fedper", [], "devices"),
        ("fedper", ["personal=0"], "simulate"),
        ("moon", [], "simulate"),
    ],
)
def test_models_that_live_on_devices_are_judged_there(method: str, settings: list[str], expected: str) -> None:
    """The server has nothing that it could judge; FedPer without personal layers is FedAvg."""
    assert resolved(method=method, set=settings).evaluate.on == expected


def test_methods_and_seeds_make_a_grid() -> None:
    """Two by three, methods first; mu is fedprox's alone; all have one name."""
    made = combinations(Flags(model="mlp", data="digits", method="fedavg,fedprox", seed="1,2,3", set=["mu=0.1"]))
    assert [(one.method, one.seed) for one in made] == [(m, s) for m in ("fedavg", "fedprox") for s in (1, 2, 3)]
    files = [complete(one, DIGITS) for one in made]
    assert [file.method.parameters for file in files] == [{}] * 3 + [{"mu": 0.1}] * 3
    assert {file.name for file in files} == {"mlp-digits"}


@pytest.mark.parametrize(
    ("budgets", "devices", "expected"),
    [
        ((), 3, (None, None, None)),
        (("40MB", "80MB"), 5, (40_000_000, 80_000_000, 40_000_000, 80_000_000, 40_000_000)),
        (("40MB*2", "1GiB*1"), 3, (40_000_000, 40_000_000, 2**30)),
        (("40MB*2", "80MB"), 3, (40_000_000, 40_000_000, 80_000_000)),
    ],
)
def test_budgets_in_turns_or_counted(budgets: tuple[str, ...], devices: int, expected: tuple[int | None, ...]) -> None:
    """By hand: in turns without a star; with one, so many of each, in that order."""
    assert budgets_of(SimulateSection(data="digits", devices=devices, training_budgets=budgets)) == expected


def test_counted_budgets_tell_how_many_devices_there_are() -> None:
    """10 + 6, unless a number is typed."""
    file = resolved(training_budgets="40MB*10,80MB*6")
    assert file.simulate is not None
    assert file.simulate.devices == 16


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("train.lr=0.1", ("train", "lr"), 0.1),
        ("train.max-steps=7", ("train", "max_steps"), 7),
        ("train.max_steps=7", ("train", "max_steps"), 7),
        ("train.optimizer=adam", ("train", "optimizer"), "adam"),
        ('train.optimizer="adam"', ("train", "optimizer"), "adam"),
        ("rounds.deadline=2h", ("rounds", "deadline"), 7200.0),
        ('devices.where=["line=a"]', ("devices", "where"), ("line=a",)),
        ("stop.target = 0.9", ("stop", "target"), 0.9),
    ],
)
def test_set_takes_values_as_the_file_does(typed: str, key: tuple[str, str], value: object) -> None:
    """TOML, or plain text where that is none."""
    assert getattr(getattr(resolved(set=[typed]), key[0]), key[1]) == value


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"set": ["train.epoch=3"]}, "unknown key 'train.epoch'; did you mean 'epochs'?"),
        ({"set": ["lr"]}, "--set: expected KEY=VALUE such as train.lr=0.1 or mu=0.01, got 'lr'"),
        ({"set": ["mu=1"]}, "method 'fedavg' has no parameters of its own, got mu = 1; remove it"),
        ({"set": ["nu=1"], "method": "fedavg,fedprox"}, "--set nu: none of the methods takes it"),
        ({"set": ["name.x=1"], "name": "n"}, "name.x: expected a table 'name', got 'n'"),
        ({"method": "fedavgg"}, "unknown method 'fedavgg'; known: draftfed, fedavg"),
        ({"method": "fedavg,"}, "--method: expected different values with commas between them, got 'fedavg,'"),
        ({"model": "cnn"}, "unknown model 'cnn'; known: "),
        ({"seed": "1,x"}, "--seed: expected whole numbers such as 1,2,3, got 'x'"),
        ({"seed": "1,1"}, "--seed: expected different values"),
        ({"data": "digit"}, "unknown data source 'digit'"),
        ({"partition": "dirichlet"}, "expected dirichlet:ALPHA"),
        ({"devices": 0}, "simulate.devices: expected 1 to 100000, got 0"),
        ({"devices": 3, "set": ["devices.min=4"]}, "devices.min = 4, and there are 3 devices"),
        ({"set": ["model.init=run:a-1"]}, "a simulation knows no runs of a coordinator"),
        ({"participation": 1.5}, "devices.fraction: expected 0.0001 to 1, got 1.5"),
        ({"devices": 3, "training_budgets": "40MB*2"}, "40MB*2 are 2 budgets for 3 devices"),
        ({"training_budgets": "40XB"}, "expected a size such as 512MB or 1.5GiB, got '40XB'"),
        ({"training_budgets": "lots"}, "simulate.training-budgets[0]: 'lots' does not match"),
    ],
)
def test_what_is_wrong_is_told_before_anything_begins(flags: dict[str, Any], told: str) -> None:
    """One line each, with what was expected."""
    with pytest.raises(InputError) as caught:
        [complete(one, DIGITS) for one in combinations(Flags(**{"model": "mlp", "data": "digits", **flags}))]
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_resolved_file_is_its_own_table() -> None:
    """What is written as run.toml is read as the same run: options and parameters beside the names."""
    file = resolved(method="fedprox", model="small-cnn", set=["mu=0.5", "model.width=8", "stop.target=0.9"])
    table = to_table(file)
    assert table["method"] == {"name": "fedprox", "mu": 0.5}
    assert table["model"]["width"] == 8
    assert "patience" not in table["stop"]
    assert parse_table(RunFile, table, source="test") == file


def test_a_file_without_data_is_told_what_is_missing(tmp_path: Path) -> None:
    """A file for a fleet says nothing of data: that is on the devices."""
    path = tmp_path / "run.toml"
    path.write_text('name = "a"\nmodel = { name = "mlp", input = [64] }\nclasses = ["a", "b"]\n')
    with pytest.raises(InputError, match=r"run.toml: simulate.data is missing: what do the devices train on\?"):
        resolved(file=path, model=None, data=None)


@pytest.mark.parametrize(
    ("method", "more", "expected"),
    [
        ("heterofl", {}, True),
        ("fedrolex", {}, True),
        ("inco+heterofl", {}, True),
        ("fedper", {"slices": "full,width:1/2"}, True),
        ("fedavg", {"slices": "full,width:1/2"}, True),
        ("scalefl", {"slices": "full,exit:3-width:1/2"}, True),
        ("fedavg", {}, False),
        ("fedavg", {"slices": "full,depth:1.1.1.1"}, False),
        ("fedavg", {"slices": "full,width:1/2", "set": ["sharing=architecture"]}, False),
        ("local", {"slices": "full,width:1/2"}, False),
        ("fedproto", {"slices": "full,width:1/2"}, False),
        ("splitmix", {}, False),  # each base has its own
        ("heterofl", {"model": "preresnet20"}, False),
        ("heterofl", {"model": "preresnet20", "set": ["model.track-running-stats=true"]}, True),
        ("heterofl", {"model": "small-cnn"}, False),
        ("heterofl", {"set": ["model.track-running-stats=false", "model.input=[1,40,40]"]}, False),
    ],
)
def test_widths_that_share_running_statistics_are_warned_of(method: str, more: dict[str, Any], expected: bool) -> None:
    """Where tensors of slices of different width are combined, and the model keeps statistics."""
    file = resolved(**{"model": "resnet18", "method": method, **more})
    assert bool(warnings_of(file)) is expected
    assert all("track-running-stats = false" in text for text in warnings_of(file))


@pytest.mark.parametrize("model", ["preresnet20", "resnet10"])
def test_a_command_warns_once_whatever_the_number_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """Four runs in one grid, then a run of a fleet; both end at once: in a file there is no room, and nobody serves."""
    (tmp_path / "file").write_text("")
    grid = ["simulate", "--method", "heterofl,fedrolex", "--seed", "1,2", "--model", model, "--data", "digits"]
    assert cli.main([*grid, "--out", str(tmp_path / "file" / "out")]) == 4
    warned = capsys.readouterr().err.count("warning: slices of different width share the running statistics")
    path = tmp_path / "run.toml"
    path.write_text(
        f'name = "t"\nmethod = "heterofl"\nmodel = {{ name = "{model}", input = [1, 8, 8] }}\nclasses = ["a", "b"]\n'
    )
    assert cli.main(["run", "start", str(path), "--dry-run", "--state-dir", str(tmp_path / "none")]) != 0
    warned += capsys.readouterr().err.count("warning: ")
    assert warned == (2 if model == "resnet10" else 0)
