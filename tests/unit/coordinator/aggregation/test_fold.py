"""The next model out of a round's updates: means by hand, the order of the updates, models that are not finite."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from aggregator_jobs import (
    INT8,
    check,
    deep_run,
    do_job,
    fold_job,
    init,
    load,
    report_meta,
    save,
)
from torch import Tensor

from coordinator.conductor.intake import Expected, check_header
from edge_client import durable
from edge_client.methods import registry
from edge_client.methods.coverage import missing_tensors
from edge_client.records import TrainingPlan, from_map
from edge_client.wire.container import read_header


def test_fold_is_the_weighted_mean(tmp_path: Path) -> None:
    """(10 * 1 + 30 * 5) / 40 = 4; (10 * 2 + 30 * 2) / 40 = 2; counters: the larger of 7 and 4."""
    model = save(tmp_path / "m", {"w": torch.tensor([0.0, 0.0]), "n": torch.tensor(1)})
    a = save(tmp_path / "a", {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(7)}, meta=report_meta("params"))
    b = save(tmp_path / "b", {"w": torch.tensor([5.0, 2.0]), "n": torch.tensor(4)}, meta=report_meta("params"))
    reply = do_job(fold_job(model, [("a", a, 10), ("b", b, 30)], tmp_path / "out"))
    assert reply["ok"]
    assert reply["sha256"] == durable.sha256_file(tmp_path / "out")
    new = load(tmp_path / "out")
    assert list(new) == ["w", "n"]
    assert new["w"].tolist() == [4.0, 2.0]
    assert int(new["n"]) == 7


def test_fold_does_not_depend_on_the_order_of_arrival(tmp_path: Path) -> None:
    """Five random updates in two orders: the same bytes, because devices are sorted; seed 1."""
    generator = torch.Generator().manual_seed(1)
    model = save(tmp_path / "m", {"w": torch.zeros(1000)})
    updates = [
        (
            f"d{i}",
            save(tmp_path / f"d{i}", {"w": torch.randn(1000, generator=generator)}, meta=report_meta("params")),
            7 * i + 1,
        )
        for i in range(5)
    ]
    first = do_job(fold_job(model, updates, tmp_path / "one"))
    second = do_job(fold_job(model, updates[::-1], tmp_path / "two"))
    assert first["sha256"] == second["sha256"]


def test_steps_below_the_rounding_of_the_codec_add_up(tmp_path: Path) -> None:
    """int8 of a row with peak 127 has steps of 1; 20 deltas of 0.1 on a weight of 10 make 12, not 10.

    Row of the model (127, 10), of the delta (0, 0.1): its scale is 0.1 / 127, so that the delta itself is exact up to
    float32. Added to the sent copy instead, 10.1 would be rounded back to 10 in every round.
    """
    model = save(tmp_path / "m0", {"w": torch.tensor([[127.0, 10.0]])})
    delta = save(tmp_path / "d", {"w": torch.tensor([[0.0, 0.1]])}, codec="int8", meta=report_meta("delta"))
    for r in range(20):
        sent = tmp_path / f"sent{r}"
        do_job({"id": 0, "job": "encode", "run": INT8, "model": str(model), "out": str(sent)})
        reply = do_job(fold_job(model, [("a", delta, 10)], tmp_path / f"m{r + 1}", base=sent))
        assert reply["ok"]
        model = tmp_path / f"m{r + 1}"
    assert load(model)["w"].flatten().tolist() == pytest.approx([127.0, 12.0], rel=1e-5)


def test_a_variance_pushed_below_zero_by_a_delta_counts_as_zero(tmp_path: Path) -> None:
    """0.1 - 0.5 becomes 0; the mean of 0 and 0.1 + 0.3 = 0.4 is 0.2."""
    model = save(tmp_path / "m", {"bn.running_var": torch.tensor([0.1])})
    a = save(tmp_path / "a", {"bn.running_var": torch.tensor([-0.5])}, meta=report_meta("delta"))
    b = save(tmp_path / "b", {"bn.running_var": torch.tensor([0.3])}, meta=report_meta("delta"))
    assert do_job(fold_job(model, [("a", a, 1), ("b", b, 1)], tmp_path / "out"))["ok"]
    assert float(load(tmp_path / "out")["bn.running_var"]) == pytest.approx(0.2)


def test_a_fold_that_is_not_finite_is_not_written(tmp_path: Path) -> None:
    """An update that was never checked; the half-written model is gone."""
    model = save(tmp_path / "m", {"a": torch.zeros(2), "w": torch.zeros(2)})
    values = {"a": torch.zeros(2), "w": torch.tensor([1.0, float("inf")])}
    bad = save(tmp_path / "u", values, meta=report_meta("params"))
    reply = do_job(fold_job(model, [("a", bad, 1)], tmp_path / "out"))
    assert (reply["ok"], reply["code"]) == (False, "not_finite")
    assert not (tmp_path / "out").exists()


def _constant(like: Mapping[str, Tensor], value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(old, int(value) if old.dtype == torch.int64 else value) for name, old in like.items()}


@pytest.mark.parametrize(("averaging", "expected"), [("masked", 3.0), ("plain", 2.25)])
def test_the_mean_of_a_tensor_is_over_those_who_trained_it(tmp_path: Path, averaging: str, expected: float) -> None:
    """From files to a file, all values 0: n=10 trains blocks 2 to 9 to 1 in two groups, n=30 everything to 3.

    Both: (10 + 90) / 40 = 2.5. block1 and the stem: 3.0; plain, the first one sends its 0, 90 / 40 = 2.25.
    The head of block5, where the first one's group ends: 1.0 (plain: 0.25); of block2, which nobody used: stays 0.
    Counters are the largest. Both updates pass intake and check; what they moved is measured over what they have.
    """
    run = deep_run({"name": "m-fedepth", "averaging": averaging})
    rules = registry.plan_rules("m-fedepth", {"averaging": averaging})
    assert init(tmp_path, "init", {"run": run})["ok"]
    model = tmp_path / "model"
    old = _constant(load(tmp_path / "init"), 0.0)
    save(model, old, meta={"stem": "stem"})
    whole = {"microbatch": 1, "budget_bytes": 0, "predicted_bytes": 0}
    groups = [[f"block{n}" for n in range(2, 6)], [f"block{n}" for n in range(6, 10)]]
    plans = [whole | {"groups": groups, "skipped": ["block1"]}, whole]
    updates: list[tuple[str, Path, int]] = []
    for device, num_samples, value, plan in (("a", 10, 1.0, plans[0]), ("b", 30, 3.0, plans[1])):
        report = {**report_meta("params", num_samples, steps=4), "plan": plan}
        parsed = from_map(TrainingPlan, plan)
        names, meta = [_stored(name) for name in old], {"stem": "stem"}
        lacking = missing_tensors(names, parsed, rules, meta)
        trained = missing_tensors(names, parsed, dataclasses.replace(rules, masked=True), meta)
        sent = {name: v if _stored(name) in trained else v + int(value) for name, v in old.items()}
        path = save(tmp_path / device, {n: v for n, v in sent.items() if _stored(n) not in lacking}, meta=report)
        want = Expected(
            device=device, round=1, base=read_header(model), codec="fp32", train=True, evaluate=False,
            num_samples=num_samples, max_samples=100, num_classes=2, epochs=1, rules=rules,
        )  # fmt: skip
        assert check_header(path, want).plan == parsed
        moved = sum(v.numel() for n, v in sent.items() if _stored(n) not in trained and v.is_floating_point())
        assert check(model, path)["norm"] == pytest.approx(value * math.sqrt(moved))
        updates.append((device, path, num_samples))
    reply = do_job(fold_job(model, updates, tmp_path / "out") | {"run": run})
    assert reply["ok"], reply
    new = load(tmp_path / "out")
    assert list(new) == list(old)
    values = {name: set(value.flatten().tolist()) for name, value in new.items()}
    assert values["block2.conv1.weight"] == values["head.linear.weight"] == {2.5}
    assert values["stem.conv.weight"] == values["block1.conv1.weight"] == {expected}
    assert values["extra/block5.linear.weight"] == {1.0 if averaging == "masked" else 0.25}
    assert values["extra/block2.linear.weight"] == {0.0}
    assert values["block1.norm1.num_batches_tracked"] == {3}
    assert read_header(tmp_path / "out").meta == {"stem": "stem"}


def _stored(name: str) -> str:
    return name if name.startswith("extra/") else f"model/{name}"


def test_deltas_of_a_methods_tensors_are_added_to_its_own(tmp_path: Path) -> None:
    """0.5 on 2 is 2.5; the other one lacks it: the mean is over one."""
    model = save(tmp_path / "m", {"w": torch.zeros(1), "extra/h": torch.tensor([2.0])})
    a = save(tmp_path / "a", {"w": torch.ones(1), "extra/h": torch.tensor([0.5])}, meta=report_meta("delta"))
    b = save(tmp_path / "b", {"w": torch.ones(1)}, meta=report_meta("delta"))
    assert check(model, a)["norm"] == pytest.approx(math.sqrt(1.25))
    assert do_job(fold_job(model, [("a", a, 1), ("b", b, 3)], tmp_path / "out"))["ok"]
    assert {name: value.tolist() for name, value in load(tmp_path / "out").items()} == {"w": [1.0], "extra/h": [2.5]}
