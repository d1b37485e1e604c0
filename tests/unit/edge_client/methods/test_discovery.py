"""Cards of methods are found where they lie: adding a method adds its file and its card, and changes nothing else."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from federation import Federation
from linear import Samples, linear_model

from edge_client.errors import NoSuchNameError
from edge_client.methods import cards, discovery, registry
from edge_client.records import PlanRules

METHODS = Path(cards.__path__[0]).parent
CARD = '''\
"""The card of a method whose steps are halved."""
from dataclasses import dataclass

from edge_client.methods.card import Card
from edge_client.records import PlanRules


@dataclass(frozen=True, kw_only=True)
class HalvedParameters:
    share: float = 0.5


def load(parameters):
    from edge_client.methods.halved_steps import method

    return method(parameters)


CARD = Card(
    name="halved-steps",
    paper="nobody, 2026",
    parameters=HalvedParameters,
    load=load,
    plans=lambda parameters: PlanRules(weight_copies=1),
)
'''
METHOD = '''\
"""Weights that shrink after every step."""
from functools import partial

from edge_client.methods.base import Method, PlainClient
from edge_client.methods.fedavg import CoverageServer


class HalvedClient(PlainClient):
    def __init__(self, share):
        self.share = share

    def after_step(self, params, learning_rate):
        for param in params.values():
            param.mul_(self.share)


def method(parameters):
    return Method(client=partial(HalvedClient, parameters.share), server=CoverageServer())
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose `cards` belong to the package, too; nothing of it stays."""
    (tmp_path / "cards").mkdir()
    packages = [importlib.import_module("edge_client.methods"), cards]
    for package, folder in zip(packages, (tmp_path, tmp_path / "cards"), strict=True):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    before = set(sys.modules)
    discovery.built_in.cache_clear()
    yield tmp_path
    discovery.built_in.cache_clear()
    for name in set(sys.modules) - before:
        package_name, _, module = name.rpartition(".")
        if package_name in ("edge_client.methods", "edge_client.methods.cards"):
            del sys.modules[name]
            vars(sys.modules[package_name]).pop(module, None)


def test_a_method_is_its_file_and_its_card(outside: Path) -> None:
    """Gradient of CE at w = (0, 0), x = 1, y = 0 is (-.5, .5): with rate 1 w = (.5, -.5), halved (.25, -.25)."""
    (outside / "cards" / "halved_steps.py").write_text(CARD, encoding="utf-8")
    (outside / "halved_steps.py").write_text(METHOD, encoding="utf-8")
    assert {"fedepth+halved-steps", "halved-steps", "inco+halved-steps"} <= {*registry.names()}
    assert registry.paper("inco+halved-steps").endswith("; nobody, 2026")
    assert registry.plan_rules("halved-steps", {}) == PlanRules(weight_copies=1)
    fleet = Federation(
        method="halved-steps",
        build=lambda: linear_model([0.0, 0.0]),
        data={"a": Samples([1.0], [0]), "b": Samples([1.0], [0])},
        settings={"learning_rate": 1.0},
        num_classes=2,
    )
    torch.testing.assert_close(fleet.round()["0.weight"].flatten(), torch.tensor([0.25, -0.25]))


def test_without_them_nobody_knows_it() -> None:
    """What the test above added is gone; each built-in method has a card of its own."""
    with pytest.raises(NoSuchNameError, match="halved-steps"):
        registry.validate("halved-steps", {})
    modules = {path.stem for path in (METHODS / "cards").glob("*.py")} - {"__init__"}
    assert {name.replace("-", "_") for name in discovery.built_in()} == modules


@pytest.mark.parametrize("text", ["", CARD, CARD.replace("CARD = Card(", "card = Card(")])
def test_a_module_of_the_package_is_a_card(outside: Path, text: str) -> None:
    """One without a card, or with another method's, is a mistake that names its module."""
    (outside / "cards" / "other.py").write_text(text, encoding="utf-8")
    with pytest.raises(TypeError, match=r"edge_client\.methods\.cards\.other: expected CARD, the Card of a method"):
        registry.names()


def test_cards_are_found_in_an_archive_and_load_no_torch(tmp_path: Path) -> None:
    """As they lie in a zip file, where there is no folder to list; every query but `get` and `of_run` is asked."""
    root = METHODS.parents[1]
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in sorted((root / "edge_client").rglob("*.py")):
            archive.write(path, path.relative_to(root))
    code = (
        "import sys; from edge_client.methods import registry as r\n"
        "for name in r.names():\n"
        "    r.plan_rules(name, {}), r.slicing(name, {}), r.knowledge(name, {}), r.exchange(name, {}), r.paper(name)\n"
        "    r.has_global_model(name, {}), r.trains_as(name), r.usual_model(name), r.parameter_types(name)\n"
        "print(r.__file__, 'torch' in sys.modules, *r.names())"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "all.zip")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    file, torch_loaded, *names = done.stdout.split()
    assert ("all.zip" in file, torch_loaded) == (True, "False")
    assert names == registry.names()
