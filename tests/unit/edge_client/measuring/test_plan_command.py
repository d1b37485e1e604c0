"""`edge-client plan` as a person types it: what it answers, and what it says of budgets and models that cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typed import ok, typed

MODEL = ("--model", "preresnet20", "--batch", "16")
UNORDERED = """
import torch
from torch import nn

from edge_client import Task


class Sum(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, num_classes)

    def forward(self, x):
        return self.head(torch.relu(self.left(x) + self.right(x)))


whole = Task(model=Sum, input=(4,), train_data=lambda device: None)
named = Task(model=Sum, units=["right", "left", "head"], input=(4,), train_data=lambda device: None)
"""


def test_a_plan_has_all_that_a_program_needs() -> None:
    """16 MB are less than all at once takes, so there are groups: all nine blocks, each once, in order."""
    told = json.loads(ok("edge_client", "plan", *MODEL, "--method=fedepth", "--training-budget=16MB", "--format=json"))
    assert {"slice", "skipped", "recompute", "reason"} <= told.keys()
    assert [name for group in told["groups"] for name in group] == [f"block{number}" for number in range(1, 10)]
    assert (told["fits"], told["microbatch"], told["skipped"]) == (True, 16, [])
    assert told["predicted_training_bytes"] <= 16 * 10**6
    assert told["predicted_total_bytes"] == told["base_bytes"] + told["predicted_training_bytes"]
    assert len(told["alternatives"]) == 3
    assert all(other["predicted_training_bytes"] <= 16 * 10**6 for other in told["alternatives"])


def test_what_is_said_to_be_enough_is() -> None:
    """Nothing fits into 100 MB, in which no worker starts; a byte less than the budget that it names does not do."""
    refused = typed("edge_client", "plan", *MODEL, "--budget", "100MB")
    assert (refused.returncode, refused.stdout) == (6, "")
    least = int(refused.stderr.partition("a budget of ")[2].partition(" bytes")[0])
    assert typed("edge_client", "plan", *MODEL, "--budget", least).returncode == 0
    assert typed("edge_client", "plan", *MODEL, "--budget", least - 1).returncode == 6


def test_a_known_device_is_planned_for() -> None:
    """A Raspberry Pi 4 with 1 GB has room beside what is spoken for; one that nobody knows is said to be unknown."""
    told = json.loads(ok("edge_client", "plan", *MODEL, "--profile", "raspberry-pi-4-1gb", "--format=json"))
    assert told["predicted_total_bytes"] <= told["budget_bytes"] < 10**9
    unknown = typed("edge_client", "plan", *MODEL, "--profile", "toaster")
    assert unknown.returncode == 7
    assert "unknown profile 'toaster'; known: jetson-agx-orin-32gb" in unknown.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--budget", "0"), "--budget: expected more than 0 bytes, got '0'"),
        (("--budget", "-5MB"), "--budget: expected a size such as 512MB or 1.5GiB, got '-5MB'"),
        (("--training-budget", "5 parsecs"), "--training-budget: expected a size such as 512MB or 1.5GiB, got '5 pars"),
        (("--budget", "1GB", "--batch", "0"), "--batch: expected 1 to 65536 samples, got 0"),
        (("--budget", "1GB", "--batch", "-3"), "--batch: expected 1 to 65536 samples, got -3"),
        (("--budget", "1GB", "--input", "3y4"), "--input: expected a shape such as 3x96x96, sizes from 1 to 99999"),
        (("--budget", "1GB", "--set", "model.mu=1"), "unknown key 'mu'"),  # as in `coordinator simulate`
        (("--budget", "1GB", "--method", "fedprox", "--set", "method.mu=-1"), "'fedprox': mu: expected 0 to 1000"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_measured(options: tuple[str, ...], expected: str) -> None:
    """3, one line that names the option and what came."""
    done = typed("edge_client", "plan", *MODEL, *options)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("edge-client: ")
    assert expected in line


def test_units_without_an_order_are_refused_and_without_names_are_one(tmp_path: Path) -> None:
    """Two branches that are added are no chain of units; as a whole they train."""
    (tmp_path / "sum.py").write_text(UNORDERED)
    done = typed("edge_client", "plan", "--task", f"{tmp_path}/sum.py:named", "--classes=3", "--budget=1GB")
    assert (done.returncode, done.stdout) == (3, "")
    order = "forward() calls the units as 'left', 'right', 'head', Task(units=...) has 'right', 'left', 'head'"
    assert order in done.stderr
    assert "full, microbatch 32" in ok(
        "edge_client", "plan", "--task", f"{tmp_path}/sum.py:whole", "--classes=3", "--budget=1GB"
    )
