"""What a worker may use of an accelerator: its owner's budget, what others leave, and what it must have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerated import discrete, needs_test_accelerator, unified

from edge_client.device.accelerator import Accelerator
from edge_client.errors import NothingFitsError, is_out_of_accelerator_memory
from edge_client.worker import live_files
from edge_client.worker.accelerator_memory import AcceleratorMemory

pytestmark = needs_test_accelerator()

MIB = 2**20


@pytest.fixture
def device() -> Iterator[Accelerator]:
    """The discrete one, of 100 MiB, of which nobody else has anything."""
    found = discrete()
    module = torch.fedtest  # type: ignore[attr-defined]
    total = found.memory_bytes()[1]
    found.limit(None)
    found.free()
    module._set_total(100 * MIB, 0)
    found.take()
    found.free()
    yield found
    module._set_taken(0, 0)
    module._set_total(total, 0)
    found.limit(None)
    found.free()


def test_without_a_budget_a_worker_gets_nine_tenths_of_what_is_free(device: Accelerator, tmp_path: Path) -> None:
    """Of 100 MiB, and of half of them where two workers share the device."""
    for workers, expected in ((1, 90 * MIB), (2, 45 * MIB)):
        memory = AcceleratorMemory(device, tmp_path, limit_bytes=None, workers=workers)
        memory.warm()
        assert memory.budget_bytes == expected


def test_another_program_shrinks_the_budget(device: Accelerator, tmp_path: Path) -> None:
    """It takes 60 of 100 MiB: 0.9 x 40 are left. What this worker has is not another program's."""
    memory = AcceleratorMemory(device, tmp_path, limit_bytes=None)
    memory.warm()
    memory.begin(90 * MIB)
    block = device.move(torch.zeros(5 * MIB))  # 20 MiB
    memory._due = 0.0
    assert memory.look() is None
    torch.fedtest._set_taken(60 * MIB, 0)  # type: ignore[attr-defined]
    memory._due = 0.0
    assert memory.look() == 36 * MIB
    del block


def test_the_owners_budget_holds_while_there_is_so_much(device: Accelerator, tmp_path: Path) -> None:
    """50 MiB of 100; of the 30 that are left beside another program, 30."""
    memory = AcceleratorMemory(device, tmp_path, limit_bytes=50 * MIB)
    memory.warm()
    assert memory.budget_bytes == 50 * MIB
    torch.fedtest._set_taken(70 * MIB, 0)  # type: ignore[attr-defined]
    memory._due = 0.0
    assert memory.look() == 30 * MIB


def test_torch_refuses_what_is_beyond_the_budget_and_the_peak_counts_from_there(
    device: Accelerator, tmp_path: Path
) -> None:
    """Of 40 MiB, a tensor of 32 fits; a second one does not, and it was the accelerator's memory that was too small."""
    memory = AcceleratorMemory(device, tmp_path, limit_bytes=None)
    memory.warm()
    memory.begin(40 * MIB)
    assert memory.peak_bytes() == 0
    block = device.move(torch.zeros(8 * MIB))
    with pytest.raises(RuntimeError) as caught:
        device.move(torch.zeros(8 * MIB))
    assert is_out_of_accelerator_memory(caught.value)
    assert memory.peak_bytes() == 32 * MIB
    del block


def test_a_budget_below_what_is_there_already_is_refused(device: Accelerator, tmp_path: Path) -> None:
    """The model lies there, in a segment of 20 MiB; the budget is 10."""
    model = device.move(torch.zeros(MIB))
    memory = AcceleratorMemory(device, tmp_path, limit_bytes=10 * MIB)
    with pytest.raises(
        NothingFitsError, match=r"limits\.accelerator-memory: a worker may use 10\.5 MB .* the 21\.0 MB"
    ):
        memory.warm()
    del model


def test_the_daemon_learns_what_a_unified_device_has(tmp_path: Path) -> None:
    """4 MiB in a segment of 20: in no file of /proc would it be this worker's."""
    device = unified()
    device.take()
    device.free()
    block = device.move(torch.zeros(MIB))
    memory = AcceleratorMemory(device, tmp_path, limit_bytes=None)
    memory.warm()
    assert live_files.read_use(tmp_path) == 20 * MIB
    assert memory.look() is None  # the daemon watches the host's memory
    del block
    device.free()
