"""Which slice a device gets: by its memory, by its label, and less if that was too much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from cost_rows import rows
from rows import run_file

from coordinator.rounds.slice_choice import SliceChoice
from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.slices import architecture

ARCHITECTURES = ("full", "width:1/2", "width:1/4")
# per unit of scale, a batch of 8 takes a few thousand bytes: about 2 GB, 20 MB, 200 kB and what each plan has beside
MEASURED = {
    name: rows(scale=scale, base_bytes=10**8) for name, scale in zip(ARCHITECTURES, (10**6, 10**4, 10**2), strict=True)
}


def _choice(
    budgets: Mapping[str, int | None],
    labels: Mapping[str, Mapping[str, str]] | None = None,
    *,
    of_training: bool = True,
    measured: bool = True,
    **changes: Any,
) -> SliceChoice:
    file = run_file(**{"slices": list(ARCHITECTURES), "train": {"batch": 8}} | changes)
    return SliceChoice(
        file,
        MEASURED if measured else {},
        budget_of=budgets.get,
        labels_of=lambda device: (labels or {}).get(device, {}),
        of_training=of_training,
    )


def _of(choice: SliceChoice, *devices: str, round_: int = 1) -> list[str]:
    return [choice.of(device, round_=round_, seed=0) for device in devices]


def test_a_device_gets_the_largest_slice_that_trains_whole_batches() -> None:
    """Budgets between the needs; where not even the smallest has room, the device tries that in smaller pieces."""
    choice = _choice({"server": 10**10, "jetson": 10**8, "pi": 3 * 10**6, "toy": 10, "unknown": None})
    devices = ("server", "jetson", "pi", "toy", "unknown")
    assert _of(choice, *devices) == ["full", "width:1/2", "width:1/4", "width:1/4", "full"]


def test_a_real_devices_budget_has_to_hold_the_process_as_well() -> None:
    """100 MB of a warm worker and 20 MB for training: 110 MB is too little for the half, 200 MB is not."""
    choice = _choice({"a": 110 * 10**6, "b": 200 * 10**6}, of_training=False)
    assert _of(choice, "a", "b") == ["width:1/4", "width:1/2"]


def test_a_label_decides_unless_the_run_has_no_such_slice(caplog: pytest.LogCaptureFixture) -> None:
    """An unknown one is told, and the memory decides."""
    labels = {"a": {"slice": "width:1/4"}, "b": {"slice": "width:1/3"}}
    choice = _choice({"a": 10**10, "b": 10**10}, labels)
    assert _of(choice, "a", "b") == ["width:1/4", "full"]
    assert "label slice=width:1/3 is none of the run's" in caplog.text
    assert not choice.give_less("a", "width:1/4")


def test_what_did_not_fit_is_not_given_again() -> None:
    """From name to name; below the smallest there is nothing. Others are not touched."""
    choice = _choice({"a": 10**10, "b": 10**10})
    assert choice.give_less("a", "full")
    assert _of(choice, "a", "b") == ["width:1/2", "full"]
    assert choice.give_less("a", "width:1/2")
    assert not choice.give_less("a", "width:1/4")
    assert _of(choice, "a") == ["width:1/4"]


def test_without_measurements_everybody_tries_the_largest() -> None:
    """The shape of a sample is known to the devices alone, or this machine could not measure."""
    assert _of(_choice({"a": 10, "b": 10**10}, measured=False), "a", "b") == ["full", "full"]


def test_a_run_without_slices_has_the_whole_model() -> None:
    """Whatever the device has; and there is nothing smaller."""
    choice = _choice({"a": 10}, slices=[])
    assert _of(choice, "a") == ["full"]
    assert not choice.give_less("a", "full")


def test_a_rolling_window_is_the_same_architecture() -> None:
    """FedRolex: round 3 begins at channel 2; what did not fit is the name, not the window."""
    choice = _choice({"a": 10**8}, method={"name": "fedrolex"})
    assert _of(choice, "a", round_=1) == ["width:1/2"]
    assert _of(choice, "a", round_=3) == ["width:1/2:o2"]
    assert architecture("width:1/2:o2") == "width:1/2"
    assert choice.give_less("a", "width:1/2:o2")
    assert _of(choice, "a", round_=3) == ["width:1/4:o2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slices": ["full", "full"]}, "slices: expected different ones, got full, full"),
        ({"slices": ["half"]}, "slice 'half': expected full, depth:1.1.2.2"),
        ({"method": {"name": "fedepth"}}, "'fedepth' trains the whole model, got 'width:1/2'; it fits the whole"),
        ({"method": {"name": "heterofl"}, "slices": ["layers:2"]}, "'heterofl' trains slices of width, got 'layers:2'"),
    ],
)
def test_slices_that_a_run_cannot_have(changes: dict[str, Any], message: str) -> None:
    """Said before it begins."""
    with pytest.raises(InputError) as caught:
        registry.architectures(run_file(**{"slices": list(ARCHITECTURES)} | changes))
    assert message in str(caught.value)
