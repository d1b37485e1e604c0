"""Methods from a Python file: their names, what may stand in the file, and every mistake in it named with its line."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from linear import Samples, linear_model, local_round

from edge_client.errors import FedfitError, InputError, NoSuchNameError
from edge_client.methods import registry, user_methods
from edge_client.methods.base import PlanRules

FILE = '''\
"""Weights that shrink after every step."""
from dataclasses import dataclass
from functools import partial

from edge_client.methods.base import Method, PlainClient, PlanRules
from edge_client.methods.entry import Entry
from edge_client.methods.fedavg import CoverageServer


class Halved(PlainClient):
    share = 0.5

    def after_step(self, params, learning_rate):
        for param in params.values():
            param.mul_(self.share)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    share: float = 0.25


class Shrunk(Halved):
    def __init__(self, parameters):
        self.share = parameters.share


def method(parameters):
    client = partial(Shrunk, parameters)
    return Method(name="any", paper="none", parameters=parameters, client=client, server=CoverageServer())


shrunk = Entry(Parameters, method, plans=lambda own: PlanRules(weight_copies=1))
number = 3
bare = Entry(dict, method)
wrong_plans = Entry(Parameters, method, plans=lambda own: own.nothing)
no_plans = Entry(Parameters, method, plans=lambda own: 3)
no_method = Entry(Parameters, lambda own: None)


@dataclass(frozen=True, kw_only=True)
class Required:
    share: float


@dataclass(frozen=True, kw_only=True)
class Text:
    share: float = "much"


required = Entry(Required, method)
text = Entry(Text, method)
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """The file."""
    path = tmp_path / "mine.py"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing stays in the environment of the process."""
    yield
    assert "FEDFIT_OWN_METHODS" not in os.environ


def weights(name: str, **parameters: float) -> torch.Tensor:
    """After two steps from (0, 0) on x=1, y=0 with lr 1."""
    made = registry.get(name, parameters)
    return local_round(made, linear_model([0.0, 0.0]), Samples([1.0], [0]), steps=2)["0.weight"].flatten()


def test_a_class_is_what_devices_do_and_a_name_has_the_hash_of_the_file(mine: Path) -> None:
    """Gradient (p0 - 1, p1), w halved after each step: (.5, -.5) / 2; p0 = 1/(1 + e^-.5) = .622459, so that
    (.25 + .377541) / 2 = .313770."""
    sha256 = hashlib.sha256(FILE.encode()).hexdigest()
    with user_methods.register(f"fedavg,{mine}:Halved,inco+{mine}:Halved") as names:
        assert names == f"fedavg,halved-{sha256[:12]},inco+halved-{sha256[:12]}"
        found = weights(names.split(",")[1])
        assert registry.trains_as(names.split(",")[2]) == f"halved-{sha256[:12]}"  # measured once for each file
    torch.testing.assert_close(found, torch.tensor([0.3137703, -0.3137703]), rtol=1e-5, atol=0)


def test_the_file_that_the_page_shows_works(tmp_path: Path) -> None:
    """w times .99 after each step: (.495, -.495); p0 = 1/(1 + e^-.99) = .729088, so (.495 + .270912) .99 = .758253."""
    page = (Path(__file__).parents[4] / "docs" / "how-to/new-method.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(page.split("```python\n")[1].split("```")[0], encoding="utf-8")
    with user_methods.register(f"{tmp_path / 'mine.py'}:Mine") as name:
        torch.testing.assert_close(weights(name), torch.tensor([0.758253, -0.758253]), rtol=1e-5, atol=0)


def test_an_entry_has_parameters_and_rules(mine: Path) -> None:
    """With share 1 it is FedAvg bit for bit; one that is not a number names the field."""
    with user_methods.register(f"{mine}:shrunk") as name:
        assert torch.equal(weights(name, share=1.0), weights("fedavg"))
        assert not torch.equal(weights(name), weights("fedavg"))
        assert registry.plan_rules(name, {}) == PlanRules(weight_copies=1)
        with pytest.raises(InputError, match=r"share: expected float, got str$"):
            registry.validate(name, {"share": "much"})


def test_a_changed_file_is_another_method(mine: Path) -> None:
    """Under its new hash; whoever looks for the old one is told."""
    with user_methods.register(f"{mine}:Halved") as before:
        mine.write_text(FILE + "\n# another line\n", encoding="utf-8")
        with pytest.raises(InputError, match=r"mine\.py has changed since this simulation began; type the command"):
            registry.validate(before, {})
    with user_methods.register(f"{mine}:Halved") as after:
        assert before != after
        registry.validate(after, {})


@pytest.mark.parametrize("name", ["halved-0a1b2c3d4e5f", "inco+halved-0a1b2c3d4e5f"])
def test_nobody_but_a_simulation_knows_it(name: str) -> None:
    """A device that is sent such a name, or a coordinator that is asked to run it on a fleet."""
    with pytest.raises(NoSuchNameError, match="it comes from a Python file, which only a simulation tries"):
        registry.validate(name, {})


def test_it_is_forgotten_after_the_simulation(mine: Path) -> None:
    """Also when that ended with an error."""
    with pytest.raises(NoSuchNameError, match="none"), user_methods.register(f"{mine}:Halved") as name:
        registry.validate(f"{name}+none", {})
    with pytest.raises(NoSuchNameError, match="only a simulation tries"):
        registry.validate(name, {})


@pytest.mark.parametrize(
    ("object_", "message"),
    [
        ("number", "number: expected a class that derives from PlainClient (edge_client.methods.base), or an Entry"),
        ("nothing", "no object 'nothing'; it has dataclass, partial, Method"),
        ("bare", "bare: expected parameters as a dataclass, got <class 'dict'>"),
        ("required", "required: expected a default for the parameter 'share', got none"),
        ("text", "text: share: expected float, got str"),
        ("wrong_plans", ", line 36: plans: AttributeError: 'Parameters' object has no attribute 'nothing'"),
        ("no_plans", "no_plans: expected plans to return PlanRules, got 3"),
        ("no_method", "no_method: expected load to return Method, got None"),
    ],
)
def test_what_is_no_method_says_so(mine: Path, object_: str, message: str) -> None:
    """File, line where there is one, what was expected and what came."""
    with (
        user_methods.register(f"{mine}:{object_}") as name,
        pytest.raises(InputError, match=re.escape(message)) as caught,
    ):
        registry.get(name, {})
    assert str(caught.value).startswith(str(mine))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "mine.py, line 1: the method cannot be loaded: SyntaxError: invalid syntax"),
        ("\nimport nothing_here\n", "mine.py, line 2: the method cannot be loaded: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "mine.py, line 1: the method cannot be loaded: SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_load_names_its_line(mine: Path, text: str, message: str) -> None:
    """Whatever it raises."""
    mine.write_text(text, encoding="utf-8")
    with user_methods.register(f"{mine}:Halved") as name, pytest.raises(InputError, match=re.escape(message)):
        registry.validate(name, {})


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("none.py:Mine", "cannot read the method .*none.py: No such file"),
        ("mine.py", "expected a method of one's own as FILE.py:OBJECT, got 'mine.py'"),
        ("mine.py:2nd", "expected a method of one's own as FILE.py:OBJECT, got 'mine.py:2nd'"),
        ("fedavg,./mine.py:a.b", "expected a method of one's own as FILE.py:OBJECT, got './mine.py:a.b'"),
    ],
)
def test_what_is_typed_wrong_is_told(typed: str, message: str) -> None:
    """Before anything is loaded."""
    with pytest.raises(InputError, match=message), user_methods.register(typed):
        pass


def test_errors_of_its_code_name_the_file_and_those_of_others_stay(mine: Path) -> None:
    """Ours that it caused, too, without a line; the end of memory and fedfit's own errors pass."""
    with user_methods.register(f"{mine}:Halved") as name:
        for doing in (name, f"inco+{name}"):
            told = r"mine\.py: on a device: KeyError: 'x'"
            with pytest.raises(InputError, match=told), user_methods.guard(doing, "on a device"):
                raise KeyError("x")
        with pytest.raises(MemoryError), user_methods.guard(name, "on a device"):
            raise MemoryError
        with pytest.raises(FedfitError, match=r"^as it is$"), user_methods.guard(name, "on a device"):
            raise FedfitError("as it is")
        with pytest.raises(KeyError), user_methods.guard("fedavg", "on a device"):
            raise KeyError("x")
        with pytest.raises(KeyError), user_methods.guard(name, "on the server", user_lines_only=True):
            raise KeyError("x")
