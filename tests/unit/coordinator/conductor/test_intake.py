"""What the first gate lets through, and what it says about the rest."""

from __future__ import annotations

import array
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.conductor.intake import CONFUSION, Expected, check_header, read_confusion
from edge_client.errors import PayloadError
from edge_client.methods.base import PlanRules
from edge_client.records import Evaluation, Report
from edge_client.wire.container import TableRow, build_header, parse_header, tensor_bytes

MODEL: list[TableRow] = [
    ("model/conv.weight", "fp32", (4, 1, 3, 3)),
    ("model/conv.bias", "fp32", (4,)),
    ("model/bn.num_batches_tracked", "i64", ()),
    ("model/head.weight", "fp32", (3, 4)),
]
INT8: list[TableRow] = [
    ("model/conv.weight", "int8", (4, 1, 3, 3)),
    ("model/conv.bias", "fp32", (4,)),
    ("model/bn.num_batches_tracked", "i64", ()),
    ("model/head.weight", "int8", (3, 4)),
]
EVALUATION = {"num_samples": 10, "num_correct": 7, "loss_sum": 3.5}
MATRIX: TableRow = (CONFUSION, "i64", (3, 3))


def _container(meta: dict[str, Any], table: list[TableRow]) -> bytes:
    return build_header(meta, table) + bytes(sum(tensor_bytes(codec, shape) for _, codec, shape in table))


def _expected(**changes: Any) -> Expected:
    base = _container({}, MODEL)
    fields: dict[str, Any] = {
        "device": "jetson-3",
        "round": 12,
        "base": parse_header(base, len(base)),
        "codec": "fp32",
        "train": True,
        "evaluate": True,
        "num_samples": 100,
        "max_samples": 1000,
        "num_classes": 3,
        "epochs": 2,
    }
    return Expected(**(fields | changes))


def _refusal(tmp_path: Path, meta: dict[str, Any], table: list[TableRow], expected: Expected) -> PayloadError:
    path = tmp_path / "update.bin"
    path.write_bytes(_container(meta, table))
    with pytest.raises(PayloadError) as caught:
        check_header(path, expected)
    return caught.value


PARAMS = {"num_samples": 100, "steps": 4, "payload": "params"}


@pytest.mark.parametrize("evaluation", [None, EVALUATION])
def test_an_update_as_asked_gives_its_report(tmp_path: Path, evaluation: dict[str, Any] | None) -> None:
    """With and without an evaluation: a device may have no test data."""
    path = tmp_path / "update.bin"
    table = MODEL + ([MATRIX] if evaluation else [])
    path.write_bytes(_container(PARAMS | {"evaluation": evaluation}, table))
    report = check_header(path, _expected())
    assert (report.num_samples, report.steps, report.payload) == (100, 4, "params")
    assert (report.evaluation is None) == (evaluation is None)


def test_a_lossy_run_takes_deltas_with_the_codecs_of_the_rule(tmp_path: Path) -> None:
    """int8: matrices as int8, vectors as fp32, counters as i64."""
    path = tmp_path / "update.bin"
    path.write_bytes(_container(PARAMS | {"payload": "delta"}, INT8))
    assert check_header(path, _expected(codec="int8")).payload == "delta"


def test_a_base_in_the_runs_codec_lists_the_same_tensors(tmp_path: Path) -> None:
    """What was sent in an int8 run is itself an int8 container."""
    base = _container({}, INT8)
    path = tmp_path / "update.bin"
    path.write_bytes(_container(PARAMS | {"payload": "delta"}, INT8))
    expected = _expected(codec="int8", base=parse_header(base, len(base)))
    assert check_header(path, expected).num_samples == 100


def test_evaluation_alone_has_no_model_and_no_samples(tmp_path: Path) -> None:
    """A round that only judges."""
    path = tmp_path / "update.bin"
    path.write_bytes(_container({"num_samples": 0, "evaluation": EVALUATION}, [MATRIX]))
    assert check_header(path, _expected(train=False, num_samples=0)).payload == "none"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """The message that a person reads in the log."""
    error = _refusal(tmp_path, PARAMS, MODEL[:-1], _expected())
    assert error.code == "names"
    assert error.detail == (
        "update from 'jetson-3' for round 12 has 3 tensors, assignment listed 4 (missing: 'head.weight')"
    )


def test_what_a_method_keeps_does_not_come_back(tmp_path: Path) -> None:
    """A container that says that its head stays: an update without it passes, one with it is refused."""
    base = _container({"kept": ["model/head."]}, MODEL)
    expected = _expected(base=parse_header(base, len(base)))
    path = tmp_path / "update.bin"
    path.write_bytes(_container(PARAMS, MODEL[:-1]))
    assert check_header(path, expected).num_samples == 100
    error = _refusal(tmp_path, PARAMS, MODEL, expected)
    assert error.code == "names"
    told = "assignment listed 3 without the 1 that its method or its plan leaves out (unknown: 'head.weight')"
    assert told in error.detail


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    """One too many."""
    error = _refusal(tmp_path, PARAMS, [*MODEL, ("model/extra", "fp32", (1,))], _expected())
    assert (error.code, "unknown: 'extra'" in error.detail) == ("names", True)


def test_a_long_difference_is_cut(tmp_path: Path) -> None:
    """Four missing names: three and a count."""
    error = _refusal(tmp_path, PARAMS, [], _expected())
    assert error.detail.endswith("(missing: 'conv.weight', 'conv.bias', 'bn.num_batches_tracked' and 1 more)")


def test_another_order_is_refused(tmp_path: Path) -> None:
    """The order is part of the schema."""
    error = _refusal(tmp_path, PARAMS, MODEL[::-1], _expected())
    assert (error.code, "another order" in error.detail) == ("names", True)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """A transposed head has as many elements."""
    error = _refusal(tmp_path, PARAMS, [*MODEL[:-1], ("model/head.weight", "fp32", (4, 3))], _expected())
    assert (error.code, "'head.weight' has shape [4, 3], assignment sent [3, 4]" in error.detail) == ("shape", True)


@pytest.mark.parametrize(
    ("row", "codec"),
    [
        (("model/conv.weight", "fp16", (4, 1, 3, 3)), "fp32"),
        (("model/conv.weight", "i64", (4, 1, 3, 3)), "fp32"),
        (("model/conv.weight", "fp32", (4, 1, 3, 3)), "int8"),
    ],
)
def test_another_codec_is_refused(tmp_path: Path, row: TableRow, codec: str) -> None:
    """Also the better one: bytes are part of the plan."""
    rest = INT8[1:] if codec == "int8" else MODEL[1:]
    payload = "delta" if codec == "int8" else "params"
    assert _refusal(tmp_path, PARAMS | {"payload": payload}, [row, *rest], _expected(codec=codec)).code == "dtype"


@pytest.mark.parametrize(("payload", "codec"), [("delta", "fp32"), ("none", "fp32"), ("params", "int8")])
def test_the_other_kind_of_payload_is_refused(tmp_path: Path, payload: str, codec: str) -> None:
    """A delta taken for weights would destroy the model."""
    table = INT8 if codec == "int8" else MODEL
    error = _refusal(tmp_path, PARAMS | {"payload": payload}, table, _expected(codec=codec))
    assert error.code == "malformed"


@pytest.mark.parametrize("claimed", [0, 1001])
def test_a_sample_count_out_of_bounds_is_refused(tmp_path: Path, claimed: int) -> None:
    """It is the weight in the mean: 1 to the run's limit of 1000."""
    error = _refusal(tmp_path, PARAMS | {"num_samples": claimed}, MODEL, _expected(num_samples=claimed))
    assert (error.code, "expected 1 to 1000" in error.detail) == ("sample_count", True)


def test_another_sample_count_than_announced_is_refused(tmp_path: Path) -> None:
    """The announcement was authenticated."""
    assert _refusal(tmp_path, PARAMS, MODEL, _expected(num_samples=99)).code == "sample_count"


def test_samples_without_training_are_refused(tmp_path: Path) -> None:
    """Nothing was asked to be trained."""
    meta = {"num_samples": 5, "evaluation": EVALUATION}
    assert _refusal(tmp_path, meta, [MATRIX], _expected(train=False, num_samples=5)).code == "sample_count"


def test_a_model_without_training_is_refused(tmp_path: Path) -> None:
    """Evaluation only."""
    error = _refusal(tmp_path, PARAMS, MODEL, _expected(train=False))
    assert (error.code, "assignment listed 0" in error.detail) == ("names", True)


@pytest.mark.parametrize(
    ("meta", "others", "code"),
    [
        ({"evaluation": EVALUATION}, [], "names"),
        ({}, [MATRIX], "names"),
        ({}, [("secrets/x", "fp32", (1,))], "names"),
        ({"evaluation": EVALUATION}, [MATRIX, ("evaluation/more", "i64", (1,))], "names"),
        ({"evaluation": EVALUATION}, [(CONFUSION, "fp32", (3, 3))], "dtype"),
        ({"evaluation": EVALUATION}, [(CONFUSION, "i64", (3, 4))], "shape"),
        ({"evaluation": EVALUATION}, [(CONFUSION, "i64", (9,))], "shape"),
        ({"evaluation": EVALUATION | {"num_correct": 11}}, [MATRIX], "evaluation"),
        ({"evaluation": EVALUATION | {"num_samples": 1001}}, [MATRIX], "evaluation"),
        ({"evaluation": EVALUATION | {"loss_sum": -0.1}}, [MATRIX], "evaluation"),
    ],
)
def test_an_evaluation_and_its_matrix_come_together(
    tmp_path: Path, meta: dict[str, Any], others: list[TableRow], code: str
) -> None:
    """One i64 [C, C] if and only if the report has an evaluation; nothing else beside the model."""
    assert _refusal(tmp_path, PARAMS | meta, MODEL + others, _expected()).code == code


def _with_matrix(tmp_path: Path, counts: list[int], row: TableRow = MATRIX) -> tuple[Path, Report]:
    path = tmp_path / "update.bin"
    path.write_bytes(build_header({}, [row]) + array.array("q", counts).tobytes())
    evaluation = Evaluation(num_samples=10, num_correct=7, loss_sum=3.5)
    return path, Report(num_samples=0, evaluation=evaluation)


def test_a_matrix_with_the_counts_of_the_report_is_read(tmp_path: Path) -> None:
    """3 + 2 + 2 = 7 on the diagonal, 10 in all; without an evaluation there is none."""
    counts = [3, 1, 0, 0, 2, 1, 1, 0, 2]
    path, report = _with_matrix(tmp_path, counts)
    assert read_confusion(path, report) == tuple(counts)
    assert read_confusion(path, dataclasses.replace(report, evaluation=None)) == ()


@pytest.mark.parametrize(
    "counts",
    [[3, 1, 0, 0, 2, 1, 1, 0, 3], [3, 1, 1, 0, 1, 1, 1, 0, 2], [3, 2, -1, 0, 2, 1, 1, 0, 2], [0] * 9],
    ids=["one too many", "another trace", "a negative count", "nothing"],
)
def test_a_matrix_with_other_counts_than_the_report_is_refused(tmp_path: Path, counts: list[int]) -> None:
    """The report says 7 of 10; the result of the fleet is the sum of both."""
    with pytest.raises(PayloadError, match="the report 7 of 10") as caught:
        read_confusion(*_with_matrix(tmp_path, counts))
    assert caught.value.code == "evaluation"


def test_more_steps_than_the_samples_allow_are_refused(tmp_path: Path) -> None:
    """100 samples, 2 epochs, at most 64 phases: 12,800 steps of one sample each."""
    path = tmp_path / "update.bin"
    path.write_bytes(_container(PARAMS | {"steps": 12_800}, MODEL))
    assert check_header(path, _expected()).steps == 12_800
    error = _refusal(tmp_path, PARAMS | {"steps": 12_801}, MODEL, _expected())
    assert (error.code, "at most 12800" in error.detail) == ("range", True)


def test_an_evaluation_that_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    """Only what was assigned comes in."""
    error = _refusal(tmp_path, PARAMS | {"evaluation": EVALUATION}, [*MODEL, MATRIX], _expected(evaluate=False))
    assert error.code == "malformed"


@pytest.mark.parametrize(
    ("meta", "code"),
    [
        ({}, "malformed"),
        (PARAMS | {"surprise": 1}, "malformed"),
        (PARAMS | {"num_samples": True}, "malformed"),
        (PARAMS | {"num_samples": -1}, "range"),
        (PARAMS | {"scalars": {"loss": float("nan")}}, "not_finite"),
    ],
)
def test_a_report_that_breaks_its_own_rules_is_refused(tmp_path: Path, meta: dict[str, Any], code: str) -> None:
    """Exact keys, exact types, ranges, finite numbers."""
    assert _refusal(tmp_path, meta, MODEL, _expected()).code == code


def test_bytes_that_are_no_container_are_refused(tmp_path: Path) -> None:
    """Whatever a device sends."""
    path = tmp_path / "update.bin"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(PayloadError, match="not a fedfit container"):
        check_header(path, _expected())


def test_expectations_are_frozen() -> None:
    """One record serves a whole round."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        _expected().codec = "int8"  # type: ignore[misc]


def test_the_gate_needs_no_torch() -> None:
    """The coordinator's process never loads torch or numpy."""
    code = "import sys, coordinator.conductor.intake; sys.exit(bool({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4], check=False).returncode == 0


def test_a_plan_that_would_not_fit_the_next_assignment_is_refused(tmp_path: Path) -> None:
    """13 KB of unit names: it would come back in an assignment, which is one message of 16 KiB."""
    plan = {"microbatch": 1, "budget_bytes": 1, "predicted_bytes": 1, "groups": [["u" * 130 for _ in range(100)]]}
    meta = {"num_samples": 100, "payload": "params", "plan": plan}
    error = _refusal(tmp_path, meta, MODEL, _expected(evaluate=False))
    assert error.code == "too_large"
    assert "its plan has" in error.detail


PLAN = {"microbatch": 8, "budget_bytes": 10**9, "predicted_bytes": 10**8}
PLAN_ONLY = {"num_samples": 0, "num_held": 360, "num_test": 90, "plan": PLAN, "versions": {"torch": "2.13.0"}}


def test_a_plan_alone_has_no_tensors(tmp_path: Path) -> None:
    """What a dry run asks for: neither training nor evaluation."""
    path = tmp_path / "update.bin"
    path.write_bytes(_container(PLAN_ONLY, []))
    report = check_header(path, _expected(train=False, evaluate=False, num_samples=0))
    assert (report.payload, report.num_held, report.num_test) == ("none", 360, 90)
    assert report.plan is not None
    assert read_confusion(path, report) == ()


@pytest.mark.parametrize(
    ("meta", "table", "code"),
    [
        (PLAN_ONLY | {"plan": None}, [], "malformed"),
        (PLAN_ONLY, MODEL, "names"),
        (PLAN_ONLY | {"evaluation": EVALUATION}, [MATRIX], "malformed"),
        (PLAN_ONLY | {"steps": 1}, [], "range"),
        (PLAN_ONLY | {"num_held": 1001}, [], "sample_count"),
        (PLAN_ONLY | {"num_test": 1001}, [], "sample_count"),
        (PLAN_ONLY | {"versions": {str(n): "1" for n in range(17)}}, [], "too_large"),
    ],
)
def test_a_plan_with_anything_else_is_refused(
    tmp_path: Path, meta: dict[str, Any], table: list[TableRow], code: str
) -> None:
    """And one without a plan."""
    assert _refusal(tmp_path, meta, table, _expected(train=False, evaluate=False, num_samples=0)).code == code


COUNTS: TableRow = (CONFUSION, "i64", (3, 65))


@pytest.mark.parametrize(("row", "num_classes", "good"), [
    (COUNTS, 65, True),
    ((CONFUSION, "i64", (65, 65)), 65, False),
    ((CONFUSION, "i64", (64, 64)), 64, True),
    ((CONFUSION, "i64", (3, 64)), 64, False),
])  # fmt: skip
def test_above_64_classes_three_counts_per_class_come_instead_of_the_matrix(
    tmp_path: Path, row: TableRow, num_classes: int, good: bool
) -> None:
    """Exactly the one form that the number of classes asks for."""
    meta, expected = {"num_samples": 0, "evaluation": EVALUATION}, _expected(train=False, num_samples=0)
    expected = dataclasses.replace(expected, num_classes=num_classes)
    if good:
        (tmp_path / "update.bin").write_bytes(_container(meta, [row]))
        assert check_header(tmp_path / "update.bin", expected).evaluation is not None
    else:
        assert _refusal(tmp_path, meta, [row], expected).code == "shape"


def _counts(right: int, called: int, missed: int) -> list[int]:
    rest = [0] * 64
    return [right, *rest, called, *rest, missed, *rest]


def test_three_counts_with_the_numbers_of_the_report_are_read(tmp_path: Path) -> None:
    """7 right, 3 wrong: as many false positives as false negatives, 10 samples."""
    counts = _counts(7, 3, 3)
    assert read_confusion(*_with_matrix(tmp_path, counts, COUNTS)) == tuple(counts)


@pytest.mark.parametrize(
    "counts", [_counts(7, 2, 3), _counts(6, 4, 4), _counts(7, 4, 4), [8, -1, *_counts(7, 3, 3)[2:]]]
)
def test_three_counts_that_do_not_add_up_are_refused(tmp_path: Path, counts: list[int]) -> None:
    """Another number of false positives, of right answers, of samples; a negative count."""
    with pytest.raises(PayloadError) as caught:
        read_confusion(*_with_matrix(tmp_path, counts, COUNTS))
    assert caught.value.code == "evaluation"


DEEP: list[TableRow] = [
    ("model/first.weight", "fp32", (2,)),
    ("model/block1.weight", "fp32", (3,)),
    ("model/block2.weight", "fp32", (4,)),
    ("model/block3.weight", "fp32", (5,)),
    ("model/head.weight", "fp32", (6,)),
    ("extra/block1.weight", "fp32", (7,)),
    ("extra/block2.weight", "fp32", (8,)),
]
DEPTHWISE = PlanRules(groups=True, partial=True, auxiliary=True, max_models=2)


def _deep(**changes: Any) -> Expected:
    base = _container({"stem": "first"}, DEEP)
    return _expected(base=parse_header(base, len(base)), rules=changes.pop("rules", DEPTHWISE), **changes)


def _with_plan(groups: list[list[str]], skipped: list[str], **more: Any) -> dict[str, Any]:
    return PARAMS | {"plan": PLAN | {"groups": groups, "skipped": skipped, **more}}


@pytest.mark.parametrize(
    ("groups", "skipped", "rows"),
    [
        ([], [], [0, 1, 2, 3, 4]),
        ([["block1", "block2", "block3"]], [], [0, 1, 2, 3, 4]),
        ([["block1"], ["block2", "block3"]], [], [0, 1, 2, 3, 4, 5]),
        ([["block2"], ["block3"]], ["block1"], [2, 3, 4, 6]),
        ([["block3"]], ["block1", "block2"], [3, 4]),
    ],
)
def test_an_update_has_exactly_what_its_plan_trains(
    tmp_path: Path, groups: list[list[str]], skipped: list[str], rows: list[int]
) -> None:
    """With a skipped block the stem, here `first`, is missing, too; heads come from the ends of groups but the last.

    One tensor more or one less is refused, whichever it is.
    """
    path, meta = tmp_path / "update.bin", _with_plan(groups, skipped)
    path.write_bytes(_container(meta, [DEEP[row] for row in rows]))
    assert check_header(path, _deep(evaluate=False)).plan is not None
    for row in range(len(DEEP)):
        table = [DEEP[r] for r in sorted({*rows} ^ {row})]
        error = _refusal(tmp_path, meta, table, _deep(evaluate=False))
        assert error.code == "names"
        assert ("missing: " if row in rows else "unknown: ") in error.detail


def test_a_refused_part_of_a_model_says_what_its_plan_leaves_out(tmp_path: Path) -> None:
    """The line that a person reads."""
    error = _refusal(tmp_path, _with_plan([["block2"], ["block3"]], ["block1"]), DEEP, _deep())
    assert error.detail == (
        "update from 'jetson-3' for round 12 has 7 tensors, assignment listed 4 without the 3 that its method or its "
        "plan leaves out (unknown: 'first.weight', 'block1.weight', 'extra/block1.weight')"
    )


def test_with_plain_averaging_everything_comes_back(tmp_path: Path) -> None:
    """Also what the plan left untrained."""
    path, rules = tmp_path / "update.bin", dataclasses.replace(DEPTHWISE, masked=False)
    path.write_bytes(_container(_with_plan([["block3"]], ["block1", "block2"]), DEEP))
    assert check_header(path, _deep(rules=rules)).num_samples == 100


@pytest.mark.parametrize(
    ("meta", "rules", "message"),
    [
        (_with_plan([["a"], ["b"]], []), PlanRules(), "it has 2 groups"),
        (_with_plan([["b"]], ["a"]), PlanRules(groups=True), "it skips 1 blocks"),
        (_with_plan([], [], num_models=3), DEPTHWISE, "it has 3 models, the run's method allows 2"),
    ],
)
def test_a_plan_that_the_runs_method_does_not_allow_is_refused(
    tmp_path: Path, meta: dict[str, Any], rules: PlanRules, message: str
) -> None:
    """Whatever the tensors are."""
    error = _refusal(tmp_path, meta, DEEP, _deep(rules=rules))
    assert (error.code, message in error.detail) == ("plan", True)


def test_twelve_blocks_one_by_one_stay_within_the_steps(tmp_path: Path) -> None:
    """ViT-S with 12 groups, 10 epochs, 100 samples in batches of 1: 12,000 steps; 64 x 10 x 100 are let through."""
    path = tmp_path / "update.bin"
    path.write_bytes(_container(PARAMS | {"steps": 12_000}, MODEL))
    assert check_header(path, _expected(epochs=10)).steps == 12_000
