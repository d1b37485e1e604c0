"""Names that put methods over one another, and the parameters of all their parts."""

from __future__ import annotations

from typing import Any

import pytest

from edge_client.errors import InputError, NoSuchNameError
from edge_client.methods import registry


def test_unknown_methods_and_parameters_are_named() -> None:
    """The coordinator says so before a run starts."""
    with pytest.raises(NoSuchNameError, match=r"unknown method 'fedsgd'; known: .*fedavg, fedepth, fedepth\+fedprox, "):
        registry.validate("fedsgd", {})
    with pytest.raises(InputError, match=r"'fedavg' has no parameters of its own, got mu = 0\.1"):
        registry.validate("fedavg", {"mu": 0.1})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fedavg+fedprox", "'fedavg' cannot be put over another; fedepth, inco, m-fedepth can"),
        ("fedepth+m-fedepth", "one of fedepth, m-fedepth at most"),
        ("fedepth+fedepth", "expected each part once"),
    ],
)
def test_compositions_that_make_no_sense_are_refused(name: str, message: str) -> None:
    """With what would."""
    with pytest.raises(InputError, match=message):
        registry.validate(name, {})


@pytest.mark.parametrize(
    "name", ["scaffold", "fednova", "moon", "fedper", "local", "heterofl", "inclusivefl", "scalefl", "splitmix"]
)
@pytest.mark.parametrize("above", ["fedepth", "m-fedepth"])
def test_methods_that_need_the_whole_model_cannot_be_under_fedepth(name: str, above: str) -> None:
    """They are not listed as pairs, and the refusal says why."""
    assert f"{above}+{name}" not in registry.names()
    with pytest.raises(InputError, match=f"'{name}' cannot be under '{above}': its rule is for a model whose parts"):
        registry.validate(f"{above}+{name}", {})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("moon", {"mu": -1}, "mu: expected 0 to 1000, got -1.0; mu in the paper: weight of the contrastive loss"),
        ("moon", {"temperature": 0}, "temperature: expected 0.001 to 1000, got 0.0; tau in the paper: divides the"),
        ("fedper", {"personal": -1}, "personal: expected 0 to 1000, got -1; K_P in the paper: last units"),
        ("scaffold", {"correction": 1}, "correction: expected bool, got int 1; c - c_i in the paper: correct each"),
        ("local", {"mu": 1}, "'local' has no parameters of its own, got mu = 1"),
    ],
)
def test_parameters_out_of_range_name_field_value_range_and_symbol(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    """The coordinator says so before a run starts."""
    with pytest.raises(InputError) as caught:
        registry.validate(name, parameters)
    assert message in str(caught.value)
