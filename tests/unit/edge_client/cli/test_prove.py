"""`edge-client prove`: which cases are drawn, what counts as broken, and twenty of them carried out."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from edge_client.cli import prove_command
from edge_client.cli.prove_case import Outcome
from edge_client.measuring import proof_cases, proof_models
from edge_client.measuring.proof_cases import Case

CASE = next(proof_cases.cases(1, 1, ["lstm"]))


def _outcome(result: str, *, measured: int, predicted: int, case: Case = CASE) -> Outcome:
    return Outcome(
        case=case,
        result=result,
        plan="full, microbatch 8",
        budget_bytes=2 * predicted,
        searched_bytes=predicted,
        predicted_bytes=predicted,
        measured_bytes=measured,
    )


def test_the_same_seed_draws_the_same_cases_and_few_cases_are_of_many_models() -> None:
    """Ten cases of ten models, whatever their order; another seed draws others."""
    names = list(proof_models.ARCHITECTURES)[:10]
    one, again, other = (list(itertools.islice(proof_cases.cases(seed, 10, names), 10)) for seed in (1, 1, 2))
    assert one == again != other
    assert {case.architecture for case in one} == set(names)
    assert all(case.num_samples >= case.batch for case in one)


def test_forty_models_of_all_kinds_give_a_logit_for_each_class() -> None:
    """Two sizes each; a backward pass reaches every parameter that is trained."""
    assert len(proof_models.ARCHITECTURES) >= 40
    for name, architecture in proof_models.ARCHITECTURES.items():
        model = architecture.build(1, 10)
        out = model(torch.rand(2, *architecture.input_shape))
        assert out.shape == (2, 10), name
        out.sum().backward()
        assert all(param.grad is not None for param in model.parameters()), name


def test_a_case_above_its_prediction_breaks_the_promise_and_excess_is_told_by_size() -> None:
    """20 predicted, 16 measured: 25 %; 3 predicted, 2 measured: 1 MB more."""
    mb = 10**6
    inside = (
        _outcome("inside", measured=16 * mb, predicted=20 * mb),
        _outcome("inside", measured=2 * mb, predicted=3 * mb),
        Outcome(case=CASE, result="did not fit"),
    )
    proof = prove_command.Proof(seed=1, outcomes=inside, seconds=1.0)
    prove_command.check(proof)
    summary = prove_command.to_json(proof)["summary"]
    assert (summary["cases"], summary["measured"], summary["did_not_fit"]) == (3, 2, 1)
    assert summary["excess"]["mean"] == 0.25
    assert summary["excess_bytes_below_16_mb"]["mean"] == mb
    assert "no case was above" in prove_command.describe(proof)
    broken = replace(proof, outcomes=(*inside, _outcome("above the prediction", measured=9, predicted=8)))
    with pytest.raises(prove_command.BrokenPromiseError, match="1 of 4 cases were above"):
        prove_command.check(broken)
    assert "1 of 4 cases were above" in prove_command.describe(broken)


@pytest.mark.slow
def test_twenty_cases_stay_inside_predictions_and_budgets(tmp_path: Path) -> None:
    """Each planned, rehearsed and trained by a real worker."""
    options = argparse.Namespace(task=None, input=None, count=20, minutes=None, seed=7, out=tmp_path)
    proof = prove_command.run(options)
    prove_command.write(proof, tmp_path)
    prove_command.check(proof)
    written = json.loads((tmp_path / "prove.json").read_text())
    assert written["summary"]["cases"] == 20
    assert written["summary"]["architectures"] == 20
    assert (tmp_path / "prove.png").stat().st_size > 1000
