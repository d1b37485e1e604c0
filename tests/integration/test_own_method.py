"""`coordinator simulate --method FILE.py:OBJECT` with real worker processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.cli import main as cli

FLAGS = ["--name", "t", "--model", "mlp", "--devices", "2", "--rounds", "1", "--data", "digits", "--workers", "1"]
FLAGS += ["--set", "model.hidden=[16]", "--set", "train.max-steps=2"]
IMPORTS = """\
import torch
from edge_client.methods.base import Method, PlainClient, Term
from edge_client.methods.entry import Entry
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.cards.fedavg import FedAvgParameters
"""
MINE = """
class Mine(PlainClient):
    def after_step(self, params, learning_rate):
        pass
"""
WRONG = """
class Typo(PlainClient):
    def terms(self, batch, phase):
        yield Term(name="x", each=self.job.modell(batch.x))

class Folding(CoverageServer):
    def fold_tensor(self, name, old, frozen):
        return old + torch.zeros(7, 7, 7)

def method(own):
    return Method(name="x", paper="none", parameters=own, client=PlainClient, server=Folding())

folding = Entry(FedAvgParameters, method)
"""


def write(folder: Path, text: str) -> Path:
    """A method's file."""
    path = folder / "mine.py"
    path.write_text(IMPORTS + text, encoding="utf-8")
    return path


def test_a_method_of_ones_own_runs_beside_others_and_a_changed_file_is_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What changes nothing of FedAvg makes its model, bit for bit. Results of the old file are not the new one's."""
    out = tmp_path / "out"
    mine = f"{write(tmp_path, MINE)}:Mine"
    assert cli.main(["simulate", *FLAGS, "--method", f"fedavg,{mine}", "--out", str(out)]) == 0
    models = {path.parent.name: json.loads(path.read_bytes())["model_sha256"] for path in out.glob("*/result.json")}
    name = next(name for name in models if name.startswith("mine-"))
    assert models == {"fedavg-seed-1": models[name], name: models[name]}
    alone = ["simulate", *FLAGS, "--method", mine, "--out", str(out / name)]
    capsys.readouterr()
    assert cli.main(alone) == 0
    assert "is finished already" in capsys.readouterr().err
    write(tmp_path, MINE.replace("pass", "[param.mul_(0.9) for param in params.values()]"))
    assert cli.main(alone) == 8
    assert f'method.name: "{name.removesuffix("-seed-1")}" there, "mine-' in capsys.readouterr().err
    assert cli.main(["compare", str(out)]) == 0
    assert name.removesuffix("-seed-1") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("object_", "message"),
    [
        ("Typo", "mine.py, line 9: on a device: AttributeError: 'Job' object has no attribute 'modell'"),
        pytest.param(
            "folding",
            "mine.py, line 13: the server's fold: RuntimeError: The size of tensor a (64) must match",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_its_errors_name_file_and_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], object_: str, message: str
) -> None:
    """On a device and on the server; one line, and no stack trace."""
    path = write(tmp_path, WRONG)
    code = cli.main(["simulate", *FLAGS, "--method", f"{path}:{object_}", "--out", str(tmp_path / "out")])
    told = capfd.readouterr().err
    assert code == 9
    assert message in told
    assert "Traceback" not in told


def test_a_fleet_does_not_run_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a run file that names the file, nor the one that a simulation of it leaves."""
    file = tmp_path / "run.toml"
    told = []
    for name in ("./mine.py:Mine", "mine-0a1b2c3d4e5f"):
        model = 'model = { name = "mlp", input = [1, 8, 8] }'
        file.write_text(f'name = "t"\nmethod = "{name}"\nclasses = ["a", "b"]\n{model}\n', encoding="utf-8")
        assert cli.main(["run", "start", str(file), "--state-dir", str(tmp_path)]) == 3
        told.append(capsys.readouterr().err)
    assert "--method ./mine.py:Mine); a fleet runs those of `coordinator methods list`" in told[0]
    assert "it comes from a Python file, which only a simulation tries" in told[1]
