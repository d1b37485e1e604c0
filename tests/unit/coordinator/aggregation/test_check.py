"""The check of an update's values: what counts, and what is refused with which code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from aggregator_jobs import (
    check,
    report_meta,
    save,
)
from torch import Tensor


def test_check_measures_weights_against_the_base(tmp_path: Path) -> None:
    """(4, 5) - (1, 1) = (3, 4): norm 5; counters do not count."""
    base = save(tmp_path / "base", {"w": torch.tensor([1.0, 1.0]), "n": torch.tensor(1)})
    meta = report_meta("params", steps=8)
    update = save(tmp_path / "u", {"w": torch.tensor([4.0, 5.0]), "n": torch.tensor(9)}, meta=meta)
    assert check(base, update) == {"id": 1, "ok": True, "norm": 5.0}
    assert check(base, update, 5.0)["ok"]


def test_check_measures_a_delta_as_it_is(tmp_path: Path) -> None:
    """Over two tensors: sqrt(3*3 + 4*4) = 5."""
    base = save(tmp_path / "base", {"w": torch.tensor([100.0]), "v": torch.tensor([100.0])})
    update = save(tmp_path / "u", {"w": torch.tensor([3.0]), "v": torch.tensor([4.0])}, meta=report_meta("delta"))
    assert check(base, update)["norm"] == 5.0


def test_check_refuses_an_update_that_moves_too_far(tmp_path: Path) -> None:
    """Norm 5 against a limit of 4.9."""
    base = save(tmp_path / "base", {"w": torch.tensor([0.0, 0.0])})
    update = save(tmp_path / "u", {"w": torch.tensor([3.0, 4.0])}, meta=report_meta("params"))
    reply = check(base, update, 4.9)
    assert (reply["ok"], reply["code"]) == (False, "norm")
    assert "5" in reply["detail"]


@pytest.mark.parametrize("payload", ["params", "delta"])
def test_check_bounds_the_first_round_by_the_model_itself(tmp_path: Path, payload: str) -> None:
    """Base (3, 4) has norm 5: with a ratio of 2 at most 2 * (5 + 1) = 12 is accepted; counters do not count."""
    base = save(tmp_path / "base", {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(1000)})
    for moved, ok in ((12.0, True), (12.1, False)):
        start = torch.tensor([3.0, 4.0]) if payload == "params" else torch.zeros(2)
        counter = torch.tensor(1000 if payload == "params" else 0)
        values = {"w": start + torch.tensor([moved, 0.0]), "n": counter}
        reply = check(base, save(tmp_path / "u", values, meta=report_meta(payload)), max_ratio=2.0)
        assert reply["ok"] == ok
        assert ok or (reply["code"], "at most 12 is accepted" in reply["detail"]) == ("norm", True)


def test_check_prefers_what_is_usual_to_the_size_of_the_model(tmp_path: Path) -> None:
    """Norm 5 against a usual limit of 4, while the ratio alone would allow 20 * (0 + 1)."""
    base = save(tmp_path / "base", {"w": torch.zeros(2)})
    update = save(tmp_path / "u", {"w": torch.tensor([3.0, 4.0])}, meta=report_meta("params"))
    assert check(base, update, max_ratio=20.0)["ok"]
    assert check(base, update, 4.0, max_ratio=20.0)["code"] == "norm"


@pytest.mark.parametrize(
    ("payload", "counter", "ok"),
    [("params", 112, True), ("params", 113, False), ("delta", 12, True), ("delta", 13, False), ("delta", -101, False)],
)
def test_check_refuses_a_counter_that_the_steps_cannot_explain(
    tmp_path: Path, payload: str, counter: int, ok: bool
) -> None:
    """100 batches before, 4 steps of at most 3 passes: 112 at most. The largest one is kept, so one lie would stay."""
    base = save(tmp_path / "base", {"n": torch.tensor(100)})
    update = save(tmp_path / "u", {"n": torch.tensor(counter)}, meta=report_meta(payload, steps=4))
    reply = check(base, update, max_passes=3)
    assert reply["ok"] == ok
    assert ok or reply["code"] == "range"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("payload", ["params", "delta"])
def test_check_refuses_values_that_are_not_finite(tmp_path: Path, bad: float, payload: str) -> None:
    """One is enough, also without a limit on the norm."""
    base = save(tmp_path / "base", {"w": torch.zeros(100)})
    values = torch.zeros(100)
    values[57] = bad
    reply = check(base, save(tmp_path / "u", {"w": values}, meta=report_meta(payload)))
    assert (reply["ok"], reply["code"]) == (False, "not_finite")
    assert "'model/w'" in reply["detail"]


@pytest.mark.parametrize("matrix", [[[1, -1], [0, 2]], [[1, 2**60], [0, 2]]])
def test_check_refuses_impossible_counts(tmp_path: Path, matrix: list[list[int]]) -> None:
    """Nobody answers minus one question."""
    base = save(tmp_path / "base", {"w": torch.zeros(1)})
    update = save(tmp_path / "u", {"evaluation/confusion": torch.tensor(matrix)}, meta=report_meta("none", 0))
    assert check(base, update)["code"] == "range"


def test_check_accepts_an_evaluation_without_a_model(tmp_path: Path) -> None:
    """Nothing moved: norm 0."""
    base = save(tmp_path / "base", {"w": torch.zeros(1)})
    update = save(tmp_path / "u", {"evaluation/confusion": torch.tensor([[5, 1], [0, 2]])}, meta=report_meta("none", 0))
    assert check(base, update) == {"id": 1, "ok": True, "norm": 0.0}


@pytest.mark.parametrize(("values", "code"), [({"w": torch.zeros(2)}, "shape"), ({"x": torch.zeros(1)}, "names")])
def test_check_does_not_trust_the_intake(tmp_path: Path, values: dict[str, Tensor], code: str) -> None:
    """A table that does not fit the base is an answer, not a crash."""
    base = save(tmp_path / "base", {"w": torch.zeros(1)})
    assert check(base, save(tmp_path / "u", values, meta=report_meta("params")))["code"] == code


def test_a_plan_without_tensors_passes_the_check(tmp_path: Path) -> None:
    """It moves nothing: its norm is 0, whatever the bounds."""
    base = save(tmp_path / "base", {"w": torch.tensor([3.0])})
    update = save(tmp_path / "u", {}, meta={"num_samples": 0})
    assert check(base, update, 0.0) == {"id": 1, "ok": True, "norm": 0.0}


def test_values_of_a_methods_tensors_are_checked(tmp_path: Path) -> None:
    """They are folded like the model's."""
    base = save(tmp_path / "base", {"w": torch.zeros(1), "extra/h": torch.zeros(2)})
    bad = save(tmp_path / "u", {"extra/h": torch.tensor([0.0, float("nan")])}, meta=report_meta("params"))
    reply = check(base, bad)
    assert (reply["code"], "'extra/h'" in reply["detail"]) == ("not_finite", True)
