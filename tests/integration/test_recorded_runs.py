"""A refactor keeps the bits: models of the demo and of every method are those that `tests/recorded_runs.json` has."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from recorded_runs import DEMO, FLAGS, ROUNDS, demo_sha256, machine, outcomes_of, read_record

from edge_client.methods import registry

# slices of weights, knowledge, blocks in turn
QUICK = ("heterofl", "felo", "fedepth")


def _recorded_hashes() -> dict[str, str]:
    _, hashes = read_record()
    if machine() not in hashes:
        pytest.skip(f"no hashes are recorded for {machine()}; python tests/recorded_runs.py of a tree to trust does it")
    return hashes[machine()]


def _check(methods: Sequence[str]) -> None:
    outcomes = outcomes_of(methods)
    bytes_down, _ = read_record()
    assert {name: outcome.rounds for name, outcome in outcomes.items()} == dict.fromkeys(methods, ROUNDS)
    for name, outcome in outcomes.items():
        assert outcome.bytes_down == pytest.approx(bytes_down[name], rel=0.01)  # costs travel as text: digits differ
    recorded = _recorded_hashes()
    assert {name: outcome.model_sha256 for name, outcome in outcomes.items()} == {n: recorded[n] for n in methods}


def test_every_method_and_the_demo_are_recorded() -> None:
    """Whoever adds a method records two rounds of it; every machine has all of them."""
    bytes_down, hashes = read_record()
    assert sorted(FLAGS) == sorted(bytes_down) == [name for name in registry.names() if "+" not in name]
    assert [machine for machine, runs in hashes.items() if runs.keys() != {*FLAGS, DEMO}] == []


def test_models_and_bytes_of_some_methods_are_the_recorded_ones() -> None:
    """One for each way to share the work; the others are slow."""
    _check(QUICK)


@pytest.mark.slow
def test_models_and_bytes_of_all_other_methods_are_the_recorded_ones() -> None:
    """Twenty methods."""
    _check([method for method in FLAGS if method not in QUICK])


@pytest.mark.slow
@pytest.mark.broker
def test_the_model_of_the_demo_is_the_recorded_one() -> None:
    """Whoever trained which part when: the plans follow from the budgets, the model from the plans."""
    recorded = _recorded_hashes()
    assert demo_sha256() == recorded[DEMO]
