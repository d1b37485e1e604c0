"""`coordinator simulate` with real worker processes: the same model whoever trains it, whenever it was killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from page import Page
from simulations import shared_processes, simulated

from coordinator.aggregation.jobs import Job, ProbeJob
from coordinator.cli import main as cli
from coordinator.results.run_folders import read_run
from coordinator.simulation import data as simulation_data
from coordinator.simulation.simulation import Processes
from edge_client.errors import InputError, NothingFitsError
from edge_client.wire.container import read_header
from edge_client.wire.tensors import ContainerReader

Json = dict[str, Any]

NAMES = {
    "accuracy",
    "accuracy_per_round",
    "accuracy_per_architecture",
    "bytes_up",
    "bytes_down",
    "rounds",
    "devices",
    "model_sha256",
    "seconds",
}
# half of six devices in each of three rounds; a few steps are enough to tell models apart
FLAGS = ["--name", "t", "--model", "mlp", "--devices", "6", "--rounds", "3", "--data", "digits"]
FLAGS += ["--partition", "dirichlet:0.5", "--participation", "0.5"]
FLAGS += ["--set", "model.hidden=[16]", "--set", "train.max-steps=3"]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """One worker for all runs that need no command."""
    with shared_processes() as processes:
        yield processes


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds, by two workers."""
    out = tmp_path_factory.mktemp("grid")
    grid = ["--method", "fedavg,fedprox", "--seed", "1,2", "--set", "mu=5", "--workers", "2", "--out", str(out)]
    assert cli.main(["simulate", *FLAGS, *grid]) == 0
    return out


def read(folder: Path) -> Json:
    """A run's result."""
    found: Json = json.loads((folder / "result.json").read_bytes())
    return found


def run(folder: Path, processes: Processes, *more: str, **changes: Any) -> Json:
    """The same run by the one worker of this file; `more` are values of --set."""
    fields: Json = {"name": "t", "model": "mlp", "devices": 6, "rounds": 3, "data": "digits"}
    fields |= {"partition": "dirichlet:0.5", "participation": 0.5}
    fields |= {"set": ["model.hidden=[16]", "train.max-steps=3", *more]}
    return simulated(folder, processes, **fields | changes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> Path:
    """Seed 1 of the grid's FedAvg, by one worker."""
    folder = tmp_path_factory.mktemp("alone")
    run(folder, processes)
    return folder / "run"


def test_the_model_depends_on_the_run_and_not_on_the_number_of_workers(grid: Path, alone: Path) -> None:
    """Four runs, four models; one worker makes the same as two, to the last bit, and as many bytes travel."""
    results = {path.name: read(path) for path in sorted(grid.iterdir())}
    assert list(results) == ["fedavg-seed-1", "fedavg-seed-2", "fedprox-seed-1", "fedprox-seed-2"]
    assert len({result["model_sha256"] for result in results.values()}) == 4
    same = ("model_sha256", "accuracy_per_round", "bytes_up", "bytes_down")
    assert [read(alone)[key] for key in same] == [results["fedavg-seed-1"][key] for key in same]


def test_a_result_has_everything_and_its_folder_no_more_than_that(alone: Path) -> None:
    """Three rounds of three devices; sums of lines; the model's file is the model."""
    result = read(alone)
    assert result.keys() >= NAMES
    lines = [json.loads(line) for line in (alone / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert [line["accuracy"] for line in lines] == result["accuracy_per_round"]
    assert result["accuracy"] == lines[-1]["accuracy"] == result["accuracy_per_architecture"]["full"]
    assert (result["rounds"], result["devices"]) == (3, 6)
    for way in ("bytes_up", "bytes_down"):
        assert result[way] == sum(line[way] for line in lines) == sum(row[way] for row in result["per_device"])
    assert all(len(line["devices"]) == 3 and line["failures"] == [] for line in lines)
    (first, *_) = lines[0]["devices"]
    assert {"device", "plan", "predicted", "peak", "budget", "samples"} <= first.keys()
    assert 0 < first["base"] <= first["peak"]
    files = sorted(path.name for path in alone.iterdir())
    assert files == ["model.bin", "result.json", "rounds.jsonl", "run.toml", "similarity.json"]


def test_bytes_are_those_of_the_wire(alone: Path) -> None:
    """Each of nine assignments moves the model down and an update up, plus frames, messages and settings: 1 to 4 kB.

    Before them, each of six devices gets the model to report the sums of its inputs, without an update.
    """
    _check_bytes(read(alone), alone / "model.bin")


def _check_bytes(result: Json, model: Path) -> None:
    payload = read_header(model).total_bytes
    for way, num_payloads in (("bytes_up", 9), ("bytes_down", 9 + 6)):
        assert num_payloads * payload < result[way] < num_payloads * payload + 9 * 4000


def test_models_are_compared_as_the_devices_made_them(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four devices, two with half of an mlp 4-8-3: HSIC by numpy over the hidden layer of each update's weights, on all
    40 test samples. The page has the figures; bytes against FedAvg by hand: the model has 32 + 8 + 24 + 3 = 67 numbers.
    """
    rng = np.random.default_rng(1)
    x = rng.normal(size=(160, 1, 2, 2)).astype(np.float32)
    y = np.arange(160) % 3
    np.savez(tmp_path / "d.npz", x_train=x[40:], y_train=y[40:], x_test=x[:40], y_test=y[:40])
    weights: dict[str, dict[str, np.ndarray]] = {}  # device -> tensor -> values
    submit = processes.aggregator.submit

    def keep(job: Job[Any], then: Callable[[Any], None]) -> None:
        """The updates are gone when the round is over."""
        for update in job.updates if isinstance(job, ProbeJob) else ():
            with ContainerReader(Path(update.path)) as reader:
                weights[update.device] = {name: reader.tensor(name).numpy() for name in reader.names("model/")}
        submit(job, then)

    monkeypatch.setattr(processes.aggregator, "submit", keep)
    fields: Json = {"name": "t", "model": "mlp", "devices": 4, "rounds": 1, "data": f"npz:{tmp_path / 'd.npz'}"}
    fields |= {"slices": "full,width:1/2", "set": ["model.hidden=[8]", "train.normalise=false"]}
    result = simulated(tmp_path, processes, **fields)
    found = read_run(tmp_path / "run").similarity
    assert found.last is not None
    assert [(one.device, one.slice) for one in found.last.devices] == [
        *((f"d000{number}", "full") for number in (1, 2)),
        *((f"d000{number}", "width:1/2") for number in (3, 4)),
    ]
    hidden = [_hidden(x[:40], weights[one.device]) for one in found.last.devices]
    expected = [[_hsic_cka(first, second) for second in hidden] for first in hidden]
    assert np.asarray(found.last.stages[1].cka, dtype=float) == pytest.approx(np.array(expected), abs=1e-5)
    assert result["whole_model_bytes"] - 4 * 67 == pytest.approx(200, abs=64)  # the table of four tensors
    assert cli.main(["run", "report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    for piece in ("similarity of the devices' stages after round 1", "t-SNE of features after round 1"):
        assert piece in page.images()
    share = 100 * (result["bytes_up"] + result["bytes_down"]) / (2 * 4 * result["whole_model_bytes"])
    assert f"{share:.1f} % of the" in page.text


def _hidden(x: np.ndarray, own: dict[str, np.ndarray]) -> np.ndarray:
    made = x.reshape(len(x), 4) @ own["model/block1.linear.weight"].T + own["model/block1.linear.bias"]
    hidden: np.ndarray = np.maximum(made, 0).astype(np.float64)
    return hidden


def _hsic_cka(x: np.ndarray, y: np.ndarray) -> float:
    """tr(KHLH) / sqrt(tr(KHKH) tr(LHLH)), H = I - 1/n."""
    h = np.eye(len(x)) - 1 / len(x)
    k, t = h @ x @ x.T @ h, h @ y @ y.T @ h
    return float(np.trace(k @ t) / np.sqrt(np.trace(k @ k) * np.trace(t @ t)))


def test_an_update_may_be_as_large_as_is_usual_for_its_architecture(processes: Processes, tmp_path: Path) -> None:
    """An mlp of 512 hidden units moves by about 0.2 in a round, of 16 by 0.03: twice that is not its bound."""
    fields: Json = {"name": "t", "model": "mlp", "devices": 6, "rounds": 2, "data": "digits"}
    changed = ["model.hidden=[512]", "train.max-steps=3", "rounds.max-norm-ratio=2"]
    simulated(tmp_path, processes, **fields, slices="full,width:1/32", set=changed)
    lines = (tmp_path / "run" / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
    assert [len(json.loads(line)["devices"]) for line in lines] == [6, 6]


def test_devices_that_judge_see_what_the_server_sees(alone: Path, processes: Processes, tmp_path: Path) -> None:
    """Their shares make up the whole test set, all of them answer, and judging changes no model."""
    judged = run(tmp_path, processes, "evaluate.on=devices")
    server = read(alone)
    assert judged["model_sha256"] == server["model_sha256"]
    assert judged["accuracy_per_round"] == pytest.approx(server["accuracy_per_round"])
    lines = [json.loads(line) for line in (tmp_path / "run/rounds.jsonl").read_text().splitlines()]
    assert all(len(line["accuracy_per_device"]) == 6 for line in lines)
    assert judged["bytes_up"] > server["bytes_up"]


def test_what_is_finished_is_shown_and_not_done_again(
    grid: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing starts: the results are printed as they are, also those of seed 1 alone."""
    monkeypatch.setattr(simulation_data, "prepare", lambda *_: pytest.fail("a finished run was begun again"))
    command = ["simulate", *FLAGS, "--method", "fedavg,fedprox", "--set", "mu=5", "--out", str(grid)]
    assert cli.main([*command, "--seed", "1,2", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["method"], one["seed"]) for one in shown] == [
        (method, seed) for method in ("fedavg", "fedprox") for seed in (1, 2)
    ]
    assert shown[0]["model_sha256"] == read(grid / "fedavg-seed-1")["model_sha256"]
    assert cli.main([*command, "--seed", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4  # head, rule, two methods


def test_what_simulations_leave_can_be_compared_and_reported_on(
    grid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rows of two seeds whose means are those of the results; a page about all, and one about a run."""
    assert cli.main(["compare", str(grid), "--format", "json", "--target", "0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["settings"] for row in found["rows"]] == [
        {"method.name": "fedavg"},
        {"method.name": "fedprox", "method.mu": 5},
    ]
    for row in found["rows"]:
        results = [read(Path(folder)) for folder in row["folders"]]
        assert row["seeds"] == [1, 2]
        assert row["last"]["values"] == [result["accuracy"] for result in results]
        assert row["best"]["values"] == [result["best_accuracy"] for result in results]
        assert row["bytes_up"] == sum(result["bytes_up"] for result in results) / 2
        assert row["peak"]["peak_bytes"] == max(result["peak_bytes"]["training"] for result in results)
        assert (row["to_target"]["num"], row["to_target"]["rounds"]) == (2, 1)
    for folder, pieces in ((grid, ("fedprox, mu 5", "torch")), (grid / "fedavg-seed-1", ("Bytes moved", "torch"))):
        assert cli.main(["run", "report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
        assert all(piece in (tmp_path / "page.html").read_text(encoding="utf-8") for piece in pieces)


def test_a_changed_run_is_refused(grid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8, what changed, and what to do."""
    command = ["simulate", *FLAGS, "--rounds", "4", "--method", "fedavg,fedprox", "--seed", "1,2", "--set", "mu=5"]
    assert cli.main([*command, "--out", str(grid)]) == 8
    told = capsys.readouterr().err
    assert "holds a run of another file (stop.rounds: 3 there, 4 now); name another folder with --out" in told


KILLS = (
    "kill:store.initial.commit",  # while the first model is made
    "kill:aggregator.probe,kill:store.update.committed:2@2",  # the aggregator, then between two updates of a round
    "kill:store.round.committed@2",  # between commit and announcement
    "kill:simulate.result.write",  # when everything is done
)


def test_a_simulation_that_is_killed_again_and_again_ends_with_the_same_model(
    alone: Path, processes: Processes, tmp_path: Path
) -> None:
    """kill -9, four times; the same command goes on: same model and results, a line per round, every byte counted.

    Also the models of rounds 1 and 3 were compared, and are as alike as in the run that nobody killed.
    """
    assert [_killed(tmp_path, fault) for fault in KILLS] == [-signal.SIGKILL] * len(KILLS)
    resumed = run(tmp_path, processes)
    assert resumed["model_sha256"] == read(alone)["model_sha256"]
    assert resumed["accuracy_per_round"] == read(alone)["accuracy_per_round"]
    assert len((tmp_path / "run/rounds.jsonl").read_text().splitlines()) == 3
    _check_bytes(resumed, tmp_path / "run/model.bin")
    found, undisturbed = (read_run(folder).similarity for folder in (tmp_path / "run", alone))
    assert [means.round for means in found.means] == [1, 3]
    assert (found.means, found.labels, found.pictures) == (
        undisturbed.means,
        undisturbed.labels,
        undisturbed.pictures,
    )


def _killed(folder: Path, fault: str) -> int:
    """The command on a machine where it is killed at that point; returns its exit code."""
    command = [sys.executable, "-m", "coordinator", "simulate", *FLAGS, "--workers", "1", "--out", str(folder / "run")]
    log = folder / f"{KILLS.index(fault)}.faults"
    environment = os.environ | {"FEDFIT_FAULT": fault, "FEDFIT_FAULT_LOG": str(log)}
    code = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120).returncode
    assert log.read_text().split() == fault.split(",")
    return code


def test_the_first_training_of_a_process_takes_no_more_than_was_planned(tmp_path: Path) -> None:
    """What a process loads once is none of it, so that nobody seems to be over a budget that was kept."""
    named = ["--model", "preresnet20", "--set", "model.width=8", "--set", "train.epochs=1", "--data", "digits"]
    named += ["--devices", "1", "--rounds", "1", "--training-budgets", "7MB", "--workers", "1"]
    command = [sys.executable, "-m", "coordinator", "simulate", *named, "--out", str(tmp_path / "run")]
    subprocess.run(command, capture_output=True, check=True, timeout=120)
    line = json.loads((tmp_path / "run/rounds.jsonl").read_text().splitlines()[0])
    (trained,) = line["devices"]
    assert 0 < trained["peak"] - trained["base"] <= trained["predicted_training"] <= trained["budget"]


def test_devices_that_cannot_take_part_end_a_simulation(processes: Processes, tmp_path: Path) -> None:
    """A model of 5 kB does not train in 1 kB: all six decline, three of them as substitutes; nobody waits."""
    with pytest.raises(NothingFitsError, match=r"round 1 of .* failed on 6 devices; d000\d: .* a training budget of "):
        run(tmp_path, processes, training_budgets="1KB")


def test_a_device_on_which_nothing_fits_is_left_out_and_named(processes: Processes, tmp_path: Path) -> None:
    """The first of six has 1 kB, the others have enough: they train, and it is told once."""
    result = run(tmp_path, processes, training_budgets="1KB*1,40MB*5", participation=1.0)
    failures = [line["failures"] for line in map(json.loads, (tmp_path / "run/rounds.jsonl").read_text().splitlines())]
    assert [[failed["device"] for failed in found] for found in failures] == [["d0001"], [], []]
    rounds = {row["device"]: (row["rounds"], row["failure"]) for row in result["per_device"]}
    assert rounds == {"d0001": (0, "nothing_fits"), **{f"d000{i}": (3, "") for i in range(2, 7)}}


def test_what_a_person_wrote_is_refused_as_such(processes: Processes, tmp_path: Path) -> None:
    """Shared samples that are not there: exit code 3, not that of a run that failed."""
    with pytest.raises(InputError, match=r"run: method 'fedmd': public: .*: nowhere.npz does not exist"):
        run(tmp_path, processes, "public=npz:nowhere.npz", method="fedmd")


def test_the_others_train_where_nothing_fits_on_most_devices(processes: Processes, tmp_path: Path) -> None:
    """Four of six have 1 kB: the round counts with the two others, as a fleet's would."""
    result = run(tmp_path, processes, training_budgets="1KB*4,40MB*2", participation=1.0, rounds=1)
    assert [row["rounds"] for row in result["per_device"]] == [0, 0, 0, 0, 1, 1]


def test_devices_that_hold_all_of_a_model_get_all_of_its_bases(processes: Processes, tmp_path: Path) -> None:
    """SplitMix, an MLP 64-16-10 as four bases 64-4-10: 4 x (64 x 4 + 4 + 4 x 10 + 10) x 4 = 4,960 bytes and headers."""
    result = run(tmp_path, processes, "bases=4", method="splitmix", slices="full")
    assert result["rounds"] == 3
    per_device = result["bytes_up"] / (3 * 3)
    assert 4960 < per_device < 4960 + 4000


BAD = {
    "unknown key": (["--set", "train.epoch=2"], 3, "unknown key 'train.epoch'; did you mean 'epochs'?"),
    "more devices than samples": (["--devices", "2000"], 3, "1438 samples"),
    "an empty device": (["--partition", "dirichlet:0.001", "--devices", "140"], 3, "dirichlet:0.001"),
    "no such data": (["--data", "npz:/nowhere.npz"], 3, "/nowhere.npz does not exist"),
    "no such source": (["--data", "digit"], 3, "unknown data source 'digit'"),
    "no such file": (["none.toml"], 3, "cannot read none.toml"),
    "no workers": (["--workers", "0"], 3, "--workers: expected 1 or more, got 0"),
}


@pytest.mark.parametrize("what", list(BAD))
def test_bad_input_is_one_line_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Exit code and message; no run was begun."""
    arguments, code, told = BAD[what]
    assert cli.main(["simulate", *FLAGS, *arguments, "--out", str(tmp_path / "out")]) == code
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("refused", "code"),
    [
        (["--method", "fedmd", "--set", "public=npz:nowhere.npz"], 3),
        (["--training-budgets", "1KB"], 6),
    ],
)
def test_a_refused_run_leaves_nothing(tmp_path: Path, refused: list[str], code: int) -> None:
    """What only the aggregator or a device can tell: its folder is free for the mended run."""
    assert cli.main(["simulate", *FLAGS, *refused, "--out", str(tmp_path / "out")]) == code
    assert not (tmp_path / "out").exists()


def test_nothing_of_others_is_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with a data set in it, named with --out: refused, and several runs below it leave it as it was."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.csv").write_text("1,2")
    assert cli.main(["simulate", *FLAGS, "--out", str(tmp_path)]) == 8
    assert "is not empty and holds no simulation" in capsys.readouterr().err
    bad = ["--method", "fedmd,fedavg", "--set", "public=npz:nowhere.npz"]
    assert cli.main(["simulate", *FLAGS, *bad, "--out", str(tmp_path)]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert cli.main(["simulate", *FLAGS, "--seed", "1,2", "--rounds", "1", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "data/mine.csv").read_text() == "1,2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "fedavg-seed-1", "fedavg-seed-2"]


def test_a_run_file_with_a_simulate_table_is_a_simulation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags change it; an unknown key of the table names the nearest one, and a fleet's coordinator takes the file."""
    path = tmp_path / "run.toml"
    path.write_text('name = "f"\nmodel = "mlp"\n[simulate]\ndata = "digits"\ndevises = 3\n')
    assert cli.main(["simulate", str(path)]) == 3
    assert "unknown key 'simulate.devises'; did you mean 'devices'?" in capsys.readouterr().err
