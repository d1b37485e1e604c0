"""Predicted peaks, added up by hand from the rows in `cost_rows`: bound(x) = 1.01 x + 0.75 MiB."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_rows import BLOCKS, rows

from edge_client.planning.cost import (
    Shape,
    Workload,
    evaluation_batch,
    measured_bytes,
    relative_time,
    training_bytes,
)

ALL = 640  # parameters
SGD = Workload(batch=10)


def bound(raw: float) -> int:
    """What is told of a moment: one percent and a mebibyte more."""
    return int(raw * 1.01 + 3 * 2**18)


def test_everything_at_once_is_worst_in_the_backward_of_the_third_block() -> None:
    """60 held + 42 per sample, 300 own gradients and the head's 40: 1360; the second has 25 + 55, 200 and 340: 1340."""
    assert measured_bytes(rows(), None, 10) == 1360
    assert training_bytes(rows(), SGD, Shape(microbatch=10)) == bound(1360 + 11)


def test_with_one_sample_gradients_count_more_than_activations() -> None:
    """The first block: 55 + 100 own gradients + 540 of later units = 695, above the 640 of the step itself."""
    assert training_bytes(rows(), Workload(batch=1), Shape(microbatch=1)) == bound(695 + 11)


@pytest.mark.parametrize(
    ("changes", "extra"),
    [
        ({"momentum": 0.9}, ALL),
        ({"optimizer": "adam"}, 2 * ALL),
        ({"weight_copies": 2}, 2 * ALL),
        ({"fixed_bytes": 77}, 77),
    ],
)
def test_copies_of_all_parameters_and_what_else_is_kept_come_on_top(changes: dict[str, object], extra: int) -> None:
    """Momentum keeps one, Adam two, a method as many as it says, and so many bytes more."""
    workload = Workload(batch=10, **changes)  # type: ignore[arg-type]
    assert training_bytes(rows(), workload, Shape(microbatch=10)) == bound(1360 + 11 + extra)


@pytest.mark.parametrize(
    ("changes", "copies"),
    [({}, 0), ({"weight_decay": 0.1}, 1), ({"step_copies": 3}, 3)],
)
def test_a_step_copies_one_parameter_at_a_time(changes: dict[str, object], copies: int) -> None:
    """640 gradients and copies of the largest, which has 300; against the 695 of the pass."""
    workload = Workload(batch=1, **changes)  # type: ignore[arg-type]
    assert training_bytes(rows(), workload, Shape(microbatch=1)) == bound(max(640 + copies * 300, 695) + 11)


def test_a_method_with_two_optimizers_keeps_two_states() -> None:
    """Momentum keeps one copy of all parameters in each."""
    workload = Workload(batch=10, momentum=0.9, optimizers=2)
    assert training_bytes(rows(), workload, Shape(microbatch=10)) == bound(1360 + 11 + 2 * ALL)


@pytest.mark.parametrize(
    ("again", "kept", "worst"),
    [(2, 2 * 20, 1360), (50, 50 * 20, 640 + 500 + 750)],
)
def test_samples_that_go_through_again_come_when_all_gradients_are_there(again: int, kept: int, worst: int) -> None:
    """2: 100 between units, block3 2 x 42 + 300, 640 gradients: 1124, below the pass of 10. 50, 10 at a time: 500

    between units, block2 550 + 200. 20 per sample that the first units put out are kept; a third size: 4 more.
    """
    found = training_bytes(rows(), Workload(batch=10, second_pass=again), Shape(microbatch=10))
    assert found == bound(kept + worst + 11 + 4)


def test_what_a_method_adds_to_a_pass_counts_per_sample() -> None:
    """Ten samples of 7 bytes on top of the pass."""
    found = training_bytes(rows(), Workload(batch=10, sample_bytes=7), Shape(microbatch=10))
    assert found == bound(1360 + 70 + 11)


def test_gradients_that_are_kept_apart_come_on_top() -> None:
    """One sample: both sets of 640 gradients, and the third block's pass, which makes some to add: 60 + 42 + 300.

    Above the 640 and a first pass of 695; 20 are kept.
    """
    found = training_bytes(rows(), Workload(batch=1, second_pass=1, separate_gradients=True), Shape(microbatch=1))
    assert found == bound(20 + 2 * 640 + 402 + 11)


def test_adam_with_weight_decay_copies_twice() -> None:
    """The gradient with its penalty, and the denominator; two copies of all are its state."""
    workload = Workload(batch=1, optimizer="adam", weight_decay=0.1)
    assert training_bytes(rows(), workload, Shape(microbatch=1)) == bound(640 + 2 * 300 + 2 * ALL + 11)


def test_gradients_of_earlier_pieces_wait() -> None:
    """Two pieces of 10: 640 wait; the third block adds 60 + 42 per sample and 300 that are made anew: 1320."""
    assert training_bytes(rows(), Workload(batch=20), Shape(microbatch=10)) == bound(640 + 1320 + 11)


def test_pieces_of_a_third_size_need_code_of_their_own() -> None:
    """Of 25 samples 10, 10 and 5, and at the end of an epoch perhaps 7: libraries keep 4 more, until block2 2 more."""
    assert training_bytes(rows(), Workload(batch=25), Shape(microbatch=10)) == bound(640 + 1320 + 11 + 4)
    shape = Shape(microbatch=10, groups=(("block2",),))
    assert training_bytes(rows(), Workload(batch=25), shape) == bound(240 + 800 + 2 + 2)


@pytest.mark.parametrize(("num_samples", "more"), [(0, 0), (40, 0), (31, 6), (32, 0), (51, 6)])
def test_a_single_sample_at_the_end_of_an_epoch_needs_other_code(num_samples: int, more: int) -> None:
    """In pieces of 10: 31 are 20, 10 and 1; 51 are 40, 10 and 1."""
    workload = Workload(batch=20, num_samples=num_samples)
    assert training_bytes(rows(), workload, Shape(microbatch=10)) == bound(640 + 1320 + 11 + more)


def test_the_first_group_has_the_stem_and_the_head() -> None:
    """5 + 50 per sample, 100 own gradients and the head's 40: 690; its library bytes are its own."""
    assert training_bytes(rows(), SGD, Shape(microbatch=10, groups=(("block1",),))) == bound(690 + 1)


def test_a_later_group_starts_from_nothing() -> None:
    """60 per sample, 200 own gradients and the head's 40: 840; the frozen units need 30 per sample: 300."""
    assert training_bytes(rows(), SGD, Shape(microbatch=10, groups=(("block2",),))) == bound(840 + 2)


def test_a_group_of_several_blocks_is_put_together() -> None:
    """Block2: 60 per sample, 200, and 340 of block3 and head: 1140; block3 itself: 72 per sample, 300, 40: 1060."""
    assert training_bytes(rows(), SGD, Shape(microbatch=10, groups=(("block2", "block3"),))) == bound(1140 + 11)


def test_what_libraries_keep_for_blocks_that_were_trained_together_stays() -> None:
    """Two samples: block3 alone 60 each, 300 and 40: 460; 3 until then, and 8 that handing on takes: 11 - 3."""
    groups = (("block1", "block2"), ("block3",))
    assert training_bytes(rows(), Workload(batch=2), Shape(microbatch=2, groups=groups)) == bound(460 + 11)
    assert training_bytes(rows(), Workload(batch=2), Shape(microbatch=2, groups=groups[1:])) == bound(460 + 3)


def test_the_worst_group_counts() -> None:
    """690, 840, 60 per sample + 300 + 40: 940; with momentum the third keeps 340 more."""
    groups = tuple((name,) for name in BLOCKS)
    assert training_bytes(rows(), SGD, Shape(microbatch=10, groups=groups)) == bound(940 + 3)
    momentum = Workload(batch=10, momentum=0.9)
    assert training_bytes(rows(), momentum, Shape(microbatch=10, groups=groups)) == bound(940 + 340 + 3)


def test_a_group_that_adds_keeps_its_own_gradients_and_no_others() -> None:
    """Of block2 and head 240 wait; 60 per sample and 200 that are made anew."""
    shape = Shape(microbatch=10, groups=(("block2",),))
    assert training_bytes(rows(), Workload(batch=20), shape) == bound(240 + 800 + 2)


@pytest.mark.parametrize(
    ("changes", "buffered", "frozen"),
    [
        ({}, False, 16 * 300 + 40 * 200),  # 16 at a time, and room for 40 outputs
        ({"has_batch_statistics": True}, False, 40 * 300),  # the whole microbatch, whose output is the last unit's own
        ({}, True, 40 * 200),  # read from the disk, as a whole
    ],
)
def test_frozen_units_run_in_chunks(changes: dict[str, bool], buffered: bool, frozen: int) -> None:
    """Of 40 samples: block1 needs 300 and puts out 200 each, ten times as much as it does elsewhere here."""
    made = rows(**changes)
    big = replace(made.modes["plain"][1], evaluate=((300.0, 0.0),), out_bytes=200)
    plain = (made.modes["plain"][0], big, *made.modes["plain"][2:])
    made = replace(made, modes={"plain": plain})
    shape = Shape(microbatch=40, groups=(("block2",),), buffered=buffered)
    assert training_bytes(made, Workload(batch=40), shape) == bound(max(frozen, 60 * 40 + 240) + 2)


def test_a_second_model_holds_its_activations_meanwhile() -> None:
    """Its weights; its 95 + 2 per sample while the first goes back; its gradients are fewer; libraries twice."""
    expected = 640 + 1360 + 970 + 2 * 11
    assert training_bytes(rows(), SGD, Shape(microbatch=10, num_models=2)) == bound(expected)


def test_rows_of_another_machine_have_a_margin() -> None:
    """On top of the usual one."""
    assert training_bytes(rows(margin=1.5), SGD, Shape(microbatch=10)) == int(1.01 * 1.5 * 1371 + 3 * 2**18)


def test_an_evaluation_takes_no_more_than_was_allowed() -> None:
    """30 per sample at most: 8 of 32 fit into 250, 4 into 150; one sample always runs."""
    assert [evaluation_batch(rows(), most, 32) for most in (1000, 250, 150, 1)] == [32, 8, 4, 1]


def test_time_counts_forward_passes_of_frozen_units() -> None:
    """One step: 3 x (15 + 40 + 45 + 40 + 12) = 456. By blocks: heads 3 x 36, stem 45, blocks 375; before them 55, 100.

    With outputs on disk each frozen unit runs once: 55, then 45; in four epochs a quarter of that each.
    """
    groups = tuple((name,) for name in BLOCKS)
    one, four = Workload(batch=1), Workload(batch=1, epochs=4)
    assert relative_time(rows(), one, Shape(microbatch=1)) == 1
    assert relative_time(rows(), one, Shape(microbatch=1, groups=groups)) == pytest.approx((528 + 155) / 456)
    buffered = Shape(microbatch=1, groups=groups, buffered=True)
    assert relative_time(rows(), one, buffered) == pytest.approx((528 + 100) / 456)
    assert relative_time(rows(), four, buffered) == pytest.approx((528 + 25) / 456)
