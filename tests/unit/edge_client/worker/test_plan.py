"""The plans that a worker makes: in real processes, which measure their rows, and from rows made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost_rows import rows
from worker_runs import (
    change_order,
    fork_worker,
    image_run,
    make_work,
    npz_images,
    read_update,
)

from edge_client.config.run_file import RunFile
from edge_client.errors import NothingFitsError
from edge_client.measuring.plan_search import PlanSearch
from edge_client.records import PlanRules, TrainingPlan, from_map, to_map
from edge_client.worker.plan import Planner, knowledge_bytes, memory_key
from tests.rows import run_file


def test_a_plan_that_no_longer_fits_is_made_anew(tmp_path: Path) -> None:
    """Made for 2 GB, given to a device that has 300 MB now; one that still fits is kept, and its peak measured."""
    device = npz_images(tmp_path)
    given = {"microbatch": 512, "budget_bytes": 2 * 10**9, "predicted_bytes": 1_900_000_000}
    options: dict[str, Any] = {"device_file": device, "budget_bytes": 300_000_000, "evaluate": False}
    work = make_work(tmp_path / "w", run=image_run(512), plan=given, **options)
    assert fork_worker(work) == 0, (work / "stderr").read_text()
    made = read_update(work)[0].plan
    assert made is not None
    assert made.private_predicted_bytes <= made.private_budget_bytes == 300_000_000
    assert made.microbatch < 512
    kept = {"microbatch": 3, "budget_bytes": 2 * 10**9, "predicted_bytes": 300_000_000}
    work = make_work(tmp_path / "kept", run=image_run(512), plan=kept, **options)
    assert fork_worker(work) == 0
    told = read_update(work)[0].plan
    assert told is not None
    assert (told.microbatch, told.private_budget_bytes) == (3, 2 * 10**9)
    assert told.private_predicted_bytes <= 300_000_000


def _planned(work: Path) -> TrainingPlan:
    """The plan that a worker would train with."""
    change_order(work, train=False, evaluate=False)
    assert fork_worker(work) == 0, (work / "stderr").read_text()
    plan = read_update(work)[0].plan
    assert plan is not None
    return plan


def test_a_plan_stays_below_what_went_over_the_budget_before(tmp_path: Path) -> None:
    """In this lease, or in another run of the same model with another name, seed and learning rate; not of any model.

    A plan of the assignment is not above it either, and not one that does not say what it needs; nor one that was made
    when there was much less memory than now.
    """
    options: dict[str, Any] = {"device_file": npz_images(tmp_path), "budget_bytes": 400_000_000}
    first = make_work(tmp_path / "first", run=image_run(512), **options)
    change_order(first, plan={"microbatch": 3, "budget_bytes": 300_000_000, "predicted_bytes": 1, "training_bytes": 1})
    whole = _planned(first)  # not 3: made for 300 MB
    assert 3 < whole.microbatch < 512
    ceiling = whole.training_bytes * 97 // 100  # rehearsals of one plan differ by up to 1.5 %
    smaller = make_work(tmp_path / "smaller", run=image_run(512), plan=to_map(whole), **options)
    change_order(smaller, ceiling_bytes=ceiling)
    assert _planned(smaller).microbatch == whole.microbatch // 2
    key = _key(first)
    other = image_run(512) | {"seed": 9, "name": "other"}
    other["train"] = {**other["train"], "lr": 0.7}
    later = make_work(tmp_path / "later", run=other, **options, ceilings={key: ceiling})
    change_order(later, plan={**to_map(whole), "training_bytes": 0})
    assert _planned(later).microbatch == whole.microbatch // 2
    assert _key(later) == key
    different = make_work(tmp_path / "different", run=image_run(256), **options)
    assert _key(different) != key


def _key(work: Path) -> str:
    return memory_key(from_map(RunFile, json.loads((work / "run.json").read_text())), "full")


def _planner(base_bytes: int = 1000, ceiling_bytes: int | None = None) -> Planner:
    """With the rows of `cost_rows` in megabytes: 16, 8 or 4 samples at a time need 1983, 1767 or 1359 MB."""
    search = PlanSearch(run=run_file(train={"batch": 16}), rules=PlanRules(), rows=rows(scale=10**6), num_samples=64)
    return Planner(search=search, base_bytes=base_bytes, ceiling_bytes=ceiling_bytes, of_training=False)


def test_the_offered_plan_is_kept_while_it_fits() -> None:
    """Also a small one; not if it needs more than the budget, or was made for less than nine tenths of it."""
    planner, budget = _planner(), 3 * 10**9
    small = TrainingPlan(microbatch=2, budget_bytes=budget, predicted_bytes=budget, training_bytes=5)
    assert planner.first_plan(small, budget) == small
    assert planner.first_plan(None, budget).microbatch == 16
    for changes in ({"predicted_bytes": budget + 1}, {"budget_bytes": budget * 9 // 10 - 1}, {"slice": "width:1/2"}):
        assert planner.first_plan(replace(small, **changes), budget).microbatch == 16


def test_a_plan_stays_below_the_ceiling() -> None:
    """What a plan of 16 samples needs went over the budget here: 8 at a time, and what is offered must be less, too."""
    budget = 3 * 10**9
    ceiling = _planner().new_plan(budget).training_bytes
    planner = _planner(ceiling_bytes=ceiling)
    assert planner.new_plan(budget).microbatch == 8
    offered = TrainingPlan(microbatch=3, budget_bytes=budget, predicted_bytes=1, training_bytes=ceiling)
    assert planner.first_plan(offered, budget).microbatch == 8
    assert planner.first_plan(replace(offered, training_bytes=0), budget).microbatch == 8  # it does not say
    assert planner.first_plan(replace(offered, training_bytes=ceiling - 1), budget).microbatch == 3


def test_less_memory_makes_smaller_pieces_and_too_little_makes_none() -> None:
    """1.5 GB are enough for 4 samples at a time, 1 MB for nothing."""
    planner = _planner()
    plan = planner.new_plan(3 * 10**9)
    assert planner.smaller_plan(plan, 3 * 10**9 // 2).microbatch == 4
    with pytest.raises(NothingFitsError):
        planner.smaller_plan(plan, 10**6)


@pytest.mark.parametrize(("codec", "expected"), [("fp32", 2**20), ("fp16", 2**21), ("bf16", 2**21), ("int8", 2**22)])
def test_knowledge_is_float32_in_memory(codec: str, expected: int) -> None:
    """A file of 1 MiB; what takes less than that in memory counts as nothing."""
    assert knowledge_bytes(2**20, codec) == expected
    assert knowledge_bytes(2**18 - 1, codec) == 0
