"""Which rounds and devices are compared, and what of it is kept."""

from __future__ import annotations

import pytest
from rows import run_file

from coordinator.results import similarity_record
from coordinator.results.similarity_record import Compared, Comparison, Findings, Picture, Similarity, Stage

A, B = Compared(device="a", slice="full"), Compared(device="b", slice="width:1/2")


def comparison(round_: int, value: float | None) -> Comparison:
    stage = Stage(name="stage 1", cka=((1.0, value), (value, 1.0)))
    return Comparison(round=round_, num_samples=2, devices=(A, B), stages=(stage,))


def findings(round_: int, value: float | None) -> Findings:
    picture = Picture(name="server", slice="full", width=1, features=f"of round {round_}")
    return Findings(comparison=comparison(round_, value), labels=(0, 1), pictures=(picture,))


@pytest.mark.parametrize(
    ("every", "rounds", "expected"),
    [(10, 25, [1, 10, 20, 25]), (1, 3, [1, 2, 3]), (10, 4, [1, 4]), (10, 1, [1]), (0, 25, [])],
)
def test_the_first_the_last_and_some_between_are_compared(every: int, rounds: int, expected: list[int]) -> None:
    """Every tenth of 25, and both ends; a run of one round once; 0 is never."""
    file = run_file(evaluate={"similarity": every}, stop={"rounds": rounds})
    assert [number for number in range(1, rounds + 1) if similarity_record.is_due(file, number)] == expected


def test_devices_of_different_architectures_come_first() -> None:
    """Twelve of three sizes, nine of them whole: two of each small size, and the first four whole ones by name."""
    devices = [Compared(device=f"d{number:02}", slice="full") for number in range(9)]
    devices += [Compared(device=f"e{number}", slice="depth:1.1") for number in range(2)]
    devices += [Compared(device=f"f{number}", slice=f"width:1/2:o{number}") for number in range(2)]
    chosen = similarity_record.architectures_first(devices)
    assert [one.device for one in chosen] == ["d00", "d01", "d02", "d03", "e0", "e1", "f0", "f1"]
    assert similarity_record.architectures_first([B, A]) == [A, B]


def test_the_first_and_the_newest_are_kept_and_the_mean_of_each() -> None:
    """Rounds 1, 10, 20 with .2, .4, .6; pictures are of round 20. Round 20 again, after a restart, replaces it."""
    kept = Similarity()
    for round_, value in ((1, 0.2), (10, 0.4), (20, 0.5), (20, 0.6)):
        kept = similarity_record.added(kept, findings(round_, value))
    assert kept.first == comparison(1, 0.2)
    assert kept.last == comparison(20, 0.6)
    assert [(means.round, means.stages) for means in kept.means] == [
        (1, {"stage 1": 0.2}),
        (10, {"stage 1": 0.4}),
        (20, {"stage 1": 0.6}),
    ]
    assert [picture.features for picture in kept.pictures] == ["of round 20"]
    assert similarity_record.parse(similarity_record.text_of(kept)) == kept
    assert similarity_record.parse("") == Similarity()


def test_the_first_round_compared_again_is_still_the_first() -> None:
    """A restart before round 1 was announced."""
    kept = similarity_record.added(similarity_record.added(Similarity(), findings(1, 0.2)), findings(1, 0.3))
    assert kept.first == kept.last == comparison(1, 0.3)
    assert len(kept.means) == 1


def test_a_comparison_that_failed_is_told_until_the_next_one() -> None:
    """What was there before stays."""
    kept = similarity_record.added(Similarity(), findings(1, 0.2))
    broken = similarity_record.failed(kept, 10, "no test data")
    assert (broken.last, broken.problem) == (comparison(1, 0.2), "round 10: no test data")
    assert similarity_record.added(broken, findings(20, 0.6)).problem == ""


def test_a_mean_is_over_pairs_of_different_devices_that_have_a_value() -> None:
    """Three devices: (.2 + .4) / 2, without the pair that has none and without the ones of the diagonal."""
    stage = Stage(name="s", cka=((1.0, 0.2, 0.4), (0.2, 1.0, None), (0.4, None, 1.0)))
    assert stage.mean == pytest.approx(0.3)
    assert Stage(name="s", cka=((1.0,),)).mean is None
    assert similarity_record.added(Similarity(), findings(1, None)).means[0].stages == {}


def test_why_models_are_never_compared() -> None:
    """Switched off; models that stay on devices; no test data; a simulation has both, unless a task finds its data."""
    npz = {"on": "npz:/srv/test.npz"}
    assert similarity_record.why_never(run_file(evaluate=npz), simulated=False) == ""
    off = run_file(evaluate=npz | {"similarity": 0})
    assert "evaluate.similarity = 0" in similarity_record.why_never(off, simulated=True)
    assert "no test data" in similarity_record.why_never(run_file(), simulated=False)
    assert similarity_record.why_never(run_file(), simulated=True) == ""
    local = run_file(method="local")
    assert "models of local never leave the devices" in similarity_record.why_never(local, simulated=False)
    assert similarity_record.why_never(local, simulated=True) == ""
    task = run_file(model=None, task={"name": "t"})
    assert "no test data" in similarity_record.why_never(task, simulated=True)
    assert similarity_record.why_never(run_file(model=None, task={"name": "t"}, evaluate=npz), simulated=True) == ""
