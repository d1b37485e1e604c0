"""Fleet results from confusion matrices that fit on a hand."""

from __future__ import annotations

import pytest
from rows import evaluation_row

from coordinator.rounds.evaluation import summarize
from coordinator.store.rows import SERVER


def test_two_devices_add_up_to_one_matrix() -> None:
    """a: [[4, 1], [2, 3]], b: [[0, 2], [0, 8]]; together [[4, 3], [2, 11]] of 20.

    accuracy 15/20; recall 4/7 and 11/13; F1 of 0: 8/(7 + 6) = 8/13, of 1: 22/(13 + 14) = 22/27; loss (3.5 + 6.5)/20.
    """
    a = evaluation_row("a", confusion=(4, 1, 2, 3), num_samples=10, num_correct=7, loss_sum=3.5)
    b = evaluation_row("b", confusion=(0, 2, 0, 8), num_samples=10, num_correct=8, loss_sum=6.5)
    result = summarize(0, [a, b], 2)
    assert result is not None
    assert (result.version, result.num_devices, result.num_samples) == (0, 2, 20)
    assert result.accuracy == 0.75
    assert result.loss == 0.5
    assert result.recall == pytest.approx((4 / 7, 11 / 13))
    assert result.balanced_accuracy == pytest.approx((4 / 7 + 11 / 13) / 2)
    assert result.macro_f1 == pytest.approx((8 / 13 + 22 / 27) / 2)


def test_the_server_has_each_test_sample_once() -> None:
    """It judges two slices on the same 10 samples, 7 and 8 right: 10 samples, no device, 15 of 20 answers right."""
    full = evaluation_row(SERVER, confusion=(4, 1, 2, 3), num_samples=10, num_correct=7, slice="full")
    half = evaluation_row(SERVER, confusion=(0, 2, 0, 8), num_samples=10, num_correct=8, slice="width:1/2")
    result = summarize(0, [full, half], 2)
    assert result is not None
    assert (result.num_devices, result.num_samples, result.accuracy) == (0, 10, 0.75)


def test_rows_are_the_truth_and_columns_the_answer() -> None:
    """Three samples of class 0, all called 1: recall of 0 is 0, class 1 was never there."""
    result = summarize(1, [evaluation_row(version=1, confusion=(0, 3, 0, 0), num_samples=3, num_correct=0)], 2)
    assert result is not None
    assert result.recall == (0.0, None)
    assert result.balanced_accuracy == 0.0
    assert result.macro_f1 == 0.0


def test_a_class_that_nobody_has_is_left_out_of_the_means() -> None:
    """[[2, 0, 0], [0, 0, 0], [1, 0, 3]]: recalls 1, none, 3/4; F1 4/5 (2*2/(2+3)) and 6/7 (2*3/(4+3))."""
    row = evaluation_row(confusion=(2, 0, 0, 0, 0, 0, 1, 0, 3), num_samples=6, num_correct=5)
    result = summarize(0, [row], 3)
    assert result is not None
    assert result.recall == (1.0, None, 0.75)
    assert result.balanced_accuracy == 0.875
    assert result.macro_f1 == pytest.approx((4 / 5 + 6 / 7) / 2)


def test_nobody_or_nothing_is_no_result() -> None:
    """No rows, and rows without samples."""
    assert summarize(0, [], 2) is None
    assert summarize(0, [evaluation_row(num_samples=0, num_correct=0, loss_sum=0.0, confusion=(0,) * 4)], 2) is None


def test_three_counts_per_class_give_the_same_numbers() -> None:
    """65 classes, of which two occur, with the matrix [[4, 3], [2, 11]] of the first test.

    True positives 4 and 11, false positives 2 and 3, false negatives 3 and 2: the recalls 4/7, 11/13 and the F1 8/13,
    22/27 as there; the other 63 classes have no recall.
    """
    rest = (0,) * 63
    a = evaluation_row("a", confusion=(4, 3, *rest, 2, 1, *rest, 1, 2, *rest), num_samples=10, num_correct=7)
    b = evaluation_row("b", confusion=(0, 8, *rest, 0, 2, *rest, 2, 0, *rest), num_samples=10, num_correct=8)
    result = summarize(0, [a, b], 65)
    assert result is not None
    assert result.accuracy == 0.75
    assert result.recall[:2] == pytest.approx((4 / 7, 11 / 13))
    assert result.recall[2:] == (None,) * 63
    assert result.balanced_accuracy == pytest.approx((4 / 7 + 11 / 13) / 2)
    assert result.macro_f1 == pytest.approx((8 / 13 + 22 / 27) / 2)
