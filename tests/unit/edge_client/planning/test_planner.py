"""What is chosen inside a budget, from the rows in `cost_rows` in megabytes, with batches of 16.

    everything at once            1972 + 11    block3 backward: (60 + 42) 16 + 300 + 40
      in two pieces of 8          1756 + 11    640 gradients wait; (60 + 42) 8 + 300
      in four pieces of 4         1348 + 11    640 + (60 + 42) 4 + 300
      recomputed units             728 + 11    block1: (0.5 + 5) 16 + 100 + 540
    block1 | block2 | block3      1020 + 1 | 1200 + 2 | 1300 + 3
    block1 and 2 | block2 and 3   1520 + 10 | 1500 + 11

A prediction is 1.01 of that, and 0.75 MiB.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from cost_rows import BLOCKS, rows

from edge_client.config.quantities import parse_bytes
from edge_client.errors import InputError, NothingFitsError
from edge_client.planning.cost import Workload
from edge_client.planning.planner import Candidate, Choice, Request, choose, microbatches
from edge_client.planning.rows import ModelRows
from edge_client.records import PlanRules

MB = 10**6
SINGLES = tuple((name,) for name in BLOCKS)
GROUPS = PlanRules(groups=True)


def bound(raw: int) -> int:
    """A prediction."""
    return int(raw * MB * 1.01 + 3 * 2**18)


def request(limit: int, made: ModelRows | None = None, rules: PlanRules | None = None, **changes: Any) -> Request:
    """For a worker of 1000 bytes."""
    fields: dict[str, Any] = {
        "variants": {"full": made or rows(scale=MB)},
        "workload": Workload(batch=16),
        "rules": rules or PlanRules(),
        "base_bytes": 1000,
        "training_bytes": limit,
    }
    return Request(**fields | changes)


def way(choice: Choice) -> tuple[object, ...]:
    """The parts that most tests are about."""
    shape = choice.chosen.shape
    return shape.microbatch, shape.recompute, shape.groups, shape.skipped


def test_everything_at_once_if_it_fits() -> None:
    """To the byte; the plan tells budget and prediction of the whole process."""
    plan = choose(request(bound(1983))).plan
    assert (plan.microbatch, plan.groups, plan.recompute, plan.slice) == (16, (), None, "full")
    assert (plan.training_bytes, plan.predicted_bytes) == (bound(1983), 1000 + bound(1983))
    assert plan.budget_bytes == 1000 + bound(1983)
    assert choose(request(bound(1983) - 1)).plan.microbatch == 8


def test_microbatches_are_halves() -> None:
    """Odd ones are cut down; none is not a batch."""
    assert microbatches(50) == [50, 25, 12, 6, 3, 1]
    for batch in (0, -4):
        with pytest.raises(InputError, match=f"at least one sample, got {batch}"):
            microbatches(batch)


def test_batchnorm_keeps_the_batch_whole() -> None:
    """1400: four pieces would do (1374), recomputing 16 at once as well (748), with the statistics of the batch."""
    assert way(choose(request(1400 * MB, rows(scale=MB, units=True, has_batchnorm=True)))) == (16, "units", (), ())


def test_units_are_not_made_again_where_a_method_looks_inside_of_them() -> None:
    """The same room: four pieces, though the statistics are theirs."""
    looks = Workload(batch=16, recomputes=False)
    made = rows(scale=MB, units=True, has_batchnorm=True)
    assert way(choose(request(1400 * MB, made, workload=looks))) == (4, None, (), ())


def test_without_batchnorm_the_fastest_comes_first() -> None:
    """Pieces cost hardly anything, a second forward pass a third."""
    choice = choose(request(1400 * MB, rows(scale=MB, units=True)))
    assert way(choice) == (4, None, (), ())
    assert choice.alternatives[0].training_bytes <= 1400 * MB


def test_groups_are_as_long_as_they_fit() -> None:
    """1560 take two blocks (1548) and then one; 1330 one each (1317 the last)."""
    pairs = (("block1", "block2"), ("block3",))
    assert way(choose(request(1560 * MB, rows(scale=MB, has_batchnorm=True), GROUPS))) == (16, None, pairs, ())
    assert way(choose(request(1330 * MB, rows(scale=MB, has_batchnorm=True), GROUPS))) == (16, None, SINGLES, ())


def test_groups_come_before_smaller_batches_and_before_whole_units_again() -> None:
    """What the method is for."""
    made = rows(scale=MB, units=True, has_batchnorm=False)
    assert way(choose(request(1330 * MB, made, GROUPS))) == (16, None, SINGLES, ())


def test_one_by_one_if_pairs_leave_too_little_room_for_later_blocks() -> None:
    """Libraries keep 103 in all, 3 of it for block3, which alone needs 90 x 16 + 340: 1783; behind a pair, 1883.

    The pair is the smaller one: 1520 + 2 + 100.
    """
    made = rows(scale=MB, has_batchnorm=True, hidden_bytes=103 * MB)
    plain = list(made.modes["plain"])
    plain[3] = replace(plain[3], alone_backward=((90.0 * MB, 300.0 * MB),))
    made = replace(made, modes={"plain": tuple(plain)})
    assert way(choose(request(bound(1883), made, GROUPS)))[2] == (("block1", "block2"), ("block3",))
    assert way(choose(request(bound(1883) - 1, made, GROUPS)))[2] == SINGLES
    assert way(choose(request(bound(1783), made, GROUPS)))[2] == SINGLES


def _heavy_first_block() -> ModelRows:
    """As before, but block1 needs 500 per sample backward: 505 with what is held."""
    made = rows(scale=MB, has_batchnorm=True)
    plain = list(made.modes["plain"])
    plain[1] = replace(plain[1], backward=((500.0 * MB, 100.0 * MB),), adding=((500.0 * MB, 60.0 * MB),))
    return replace(made, modes={"plain": tuple(plain)})


def test_partial_training_is_better_than_statistics_of_few_samples() -> None:
    """1400: block1 fits with 2 at a time (140 wait, 505 x 2 + 60), which is below 8; without it 16 at a time fit.

    Two at a time leave room for block2 and block3 together (540 wait).
    """
    partial = replace(GROUPS, partial=True)
    found = way(choose(request(1400 * MB, _heavy_first_block(), partial)))
    assert found == (16, None, (("block2",), ("block3",)), ("block1",))
    pairs = (("block1",), ("block2", "block3"))
    assert way(choose(request(1400 * MB, _heavy_first_block(), GROUPS))) == (2, None, pairs, ())


def test_partial_training_is_the_last_resort() -> None:
    """4200: block1 fits with 8 at a time (140 + 505 x 8 + 60 + 1, times 1.01), so it is trained."""
    partial = replace(GROUPS, partial=True)
    size, _, groups, skipped = way(choose(request(4300 * MB, _heavy_first_block(), partial)))
    assert (size, groups[0][0], skipped) == (8, "block1", ())  # type: ignore[index]


def test_a_ceiling_is_not_reached_again() -> None:
    """A plan of 1983 went over: the next one is below it, whatever the budget."""
    choice = choose(request(9999 * MB, ceiling_bytes=bound(1983)))
    assert (choice.plan.microbatch, choice.plan.training_bytes) == (8, bound(1767))


@pytest.mark.parametrize("rules", [PlanRules(), GROUPS, PlanRules(groups=True, partial=True)])
@pytest.mark.parametrize("has_batchnorm", [True, False])
def test_where_nothing_fits_the_smallest_budget_is_told_and_works(rules: PlanRules, has_batchnorm: bool) -> None:
    """Typed as it was printed; a kilobyte less does not."""
    made = rows(scale=MB, units=True, has_batchnorm=has_batchnorm)
    with pytest.raises(NothingFitsError, match=r"a budget of \d+ bytes would do") as caught:
        choose(request(100, made, rules))
    least = caught.value.least_bytes
    assert least is not None
    assert f"a budget of {least} bytes would do" in str(caught.value)
    assert choose(request(least - 1000, made, rules)).plan.training_bytes <= least - 1000
    with pytest.raises(NothingFitsError):
        choose(request(least - 1000 - 1024, made, rules))


def test_where_nothing_fits_a_training_budget_it_is_told_as_one_and_works() -> None:
    """In megabytes, rounded up, without the worker; as it is typed."""
    made = rows(scale=MB, units=True)
    with pytest.raises(NothingFitsError, match=r"is 100 B; a training budget of [\d.]+MB would do") as caught:
        choose(request(100, made, of_training=True))
    told = re.search(r"budget of (\S+) would do", str(caught.value))
    assert told is not None
    assert choose(request(parse_bytes(told[1]), made)).plan.training_bytes <= parse_bytes(told[1])


def test_the_smallest_budget_is_told_under_a_ceiling_as_well() -> None:
    """The message names the plan that went over."""
    with pytest.raises(NothingFitsError, match="went over it"):
        choose(request(100, ceiling_bytes=bound(1983)))


@pytest.mark.parametrize(("disk", "buffered"), [(3 * 10**9, True), (3 * 10**9 - 1, False), (0, False)])
def test_outputs_lie_on_disk_if_two_files_have_room(disk: int, buffered: bool) -> None:
    """100 samples: 20 MB each behind block1; while 10 MB each behind block2 are written, both are there."""
    plan = choose(request(1330 * MB, rules=GROUPS, num_samples=100, disk_bytes=disk)).plan
    assert (plan.groups, plan.buffered) == (SINGLES, buffered)


def test_models_that_teach_each_other_where_memory_is_left_over() -> None:
    """Two: 640 weights, 1972 + 97 x 16 and 2 x 11; else one."""
    rules = replace(GROUPS, max_models=2)
    needed = bound(640 + 1972 + 97 * 16 + 22)
    assert choose(request(needed, rules=rules)).plan.num_models == 2
    assert choose(request(needed - 1, rules=rules)).plan.num_models == 1


def test_a_batch_below_what_the_model_needs_is_refused() -> None:
    """A BatchNorm has no statistics of one value."""
    with pytest.raises(InputError, match="at least 2 samples at a time, got 1"):
        choose(request(10**12, rows(scale=MB, min_batch=2), workload=Workload(batch=1)))


def test_pieces_are_never_smaller_than_the_model_needs() -> None:
    """At least 4: what needs less is not offered."""
    with pytest.raises(NothingFitsError):
        choose(request(bound(1359) - 1, rows(scale=MB, min_batch=4)))
    assert choose(request(bound(1359), rows(scale=MB, min_batch=4))).plan.microbatch == 4


def test_smaller_slices_come_behind_the_full_model() -> None:
    """A slice that needs a tenth: chosen where the full model does not fit with the whole batch."""
    variants = {"full": rows(scale=MB, has_batchnorm=True), "width:1/2": rows(scale=MB // 10, has_batchnorm=True)}
    assert choose(request(bound(1983), variants=variants)).plan.slice == "full"
    small = choose(request(1000 * MB, variants=variants))
    assert (small.plan.slice, small.plan.microbatch) == ("width:1/2", 16)
    assert isinstance(small.chosen, Candidate)
