"""Which shapes a rehearsal goes through, what follows from its peak, and how it is remembered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.measuring import rehearsed
from edge_client.measuring.rehearsed import Rehearsed, Shapes, find, keep, key_of, pieces_met, shapes_of
from edge_client.records import TrainingPlan

PLAN = TrainingPlan(microbatch=12, budget_bytes=0, predicted_bytes=0)
KEY = "a" * 64


def test_many_equal_pieces_of_a_batch_are_two() -> None:
    """100 = 8 x 12 + 4 becomes 12 + 12 + 4. 230 samples leave 30 = 2 x 12 + 6 for the last batch: 12 + 6."""
    assert shapes_of(PLAN, 100, 230) == Shapes(batch=28, last=18)


def test_a_short_batch_is_as_it_is() -> None:
    """32 = 12 + 12 + 8; 43 samples leave 11."""
    assert shapes_of(PLAN, 32, 43, evaluated=(12, 4)) == Shapes(batch=32, last=11, evaluated=(12, 4))


def test_a_method_that_looks_at_whole_batches_gets_them() -> None:
    """230 = 2 x 100 + 30."""
    assert shapes_of(PLAN, 100, 230, shorten=False) == Shapes(batch=100, last=30)


def test_a_device_with_few_samples_has_one_kind_of_step() -> None:
    """20 samples are less than a batch of 32; 64 are two whole ones."""
    assert shapes_of(PLAN, 32, 20) == Shapes(batch=20)
    assert shapes_of(PLAN, 32, 64) == Shapes(batch=32)


def test_the_last_kind_of_step_is_smaller_than_a_whole_one() -> None:
    """Else the loop, which only knows whole batches and a rest, would divide the samples differently."""
    for microbatch in range(1, 40):
        plan = replace(PLAN, microbatch=microbatch)
        for num_samples in range(1, 150):
            shapes = shapes_of(plan, 40, num_samples)
            assert shapes.last < shapes.batch
            assert shapes.last % microbatch == (num_samples % 40 if num_samples > 40 else 0) % microbatch


def test_pieces_of_an_evaluation() -> None:
    """100 in pieces of 24 are 24 and 4; fewer than a piece are one; 48 have no rest."""
    assert pieces_met(100, 24) == (24, 4)
    assert pieces_met(7, 24) == (7,)
    assert pieces_met(48, 24) == (24,)
    assert pieces_met(0, 24) == ()


def test_the_prediction_has_the_margins_that_were_measured() -> None:
    """100 MB x 1.03 + 1 MB; for many epochs of a model with more than 100 convolutions x 1.08 + 1 MB."""
    one = Rehearsed(key=KEY, peak_bytes=100 * 10**6, reserved_bytes=200 * 10**6, num_convolutions=120)
    assert one.predicted_bytes(epochs=2) == 104 * 10**6
    assert one.predicted_bytes(epochs=3) == 109 * 10**6
    assert replace(one, num_convolutions=20).predicted_bytes(epochs=3) == 104 * 10**6
    assert one.limit_bytes == 211 * 10**6


def test_seconds_of_an_epoch_until_one_was_measured() -> None:
    """70 samples in batches of 32 are three steps: 70 x 0.01 + 3 x 0.1 = 1.0 s; then what a round took."""
    one = Rehearsed(key=KEY, peak_bytes=1, sample_s=0.01, step_s=0.1)
    assert one.epoch_seconds(70, 32) == pytest.approx(1.0)
    assert replace(one, epoch_s=4.0).epoch_seconds(70, 32) == 4.0


@pytest.mark.parametrize(
    "other",
    [
        (KEY[::-1].replace("a", "b"), PLAN, Shapes(batch=32), "sgd"),
        (KEY, replace(PLAN, microbatch=8), Shapes(batch=32), "sgd"),
        (KEY, replace(PLAN, recompute="units"), Shapes(batch=32), "sgd"),
        (KEY, PLAN, Shapes(batch=32, last=1), "sgd"),
        (KEY, PLAN, Shapes(batch=32), "adam"),
    ],
    ids=["model", "microbatch", "recompute", "shapes", "optimizer"],
)
def test_what_changes_the_peak_changes_the_key(other: tuple[str, TrainingPlan, Shapes, str]) -> None:
    """And a budget, which changes nothing, does not."""
    model, plan, shapes, optimizer = other
    key = key_of(KEY, PLAN, Shapes(batch=32), "sgd")
    assert key_of(KEY, replace(PLAN, budget_bytes=5), Shapes(batch=32), "sgd") == key
    assert key_of(model, plan, shapes, optimizer) != key


def test_settings_of_the_caches_below_torch_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rehearsal with another capacity met other peaks."""
    before = key_of(KEY, PLAN, Shapes(batch=32))
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1")
    assert key_of(KEY, PLAN, Shapes(batch=32)) != before


def test_a_rehearsal_is_remembered(tmp_path: Path) -> None:
    """Nothing before, the record after, nothing for another key."""
    one = Rehearsed(key=KEY, peak_bytes=7, over=True)
    assert find(tmp_path / "cache", KEY) is None
    keep(tmp_path / "cache", one)
    assert find(tmp_path / "cache", KEY) == one
    assert find(tmp_path / "cache", "b" * 64) is None


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', "{" * 9000, "\x00"])
def test_a_damaged_file_is_measured_again(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is ignored with one warning."""
    (tmp_path / f"rehearsed-{KEY}.json").write_text(text)
    assert find(tmp_path, KEY) is None
    assert caplog.text.count("not usable as a rehearsal") == 1


def test_a_full_disk_costs_the_memory_of_it_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the folder should be is a file."""
    (tmp_path / "cache").write_text("")
    keep(tmp_path / "cache", Rehearsed(key=KEY, peak_bytes=7))
    assert "cannot keep what a rehearsal measured" in caplog.text


def test_the_processor_is_known() -> None:
    """Kernels are chosen by it."""
    assert len(rehearsed.processor()) > 0
