"""The device that stands in for a GPU in the tests: it computes what the CPU does, and counts memory as CUDA does."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerated import discrete, environment, needs_test_accelerator, unified
from torch import Tensor, nn
from torch.nn import functional as F

from edge_client.device import meter
from edge_client.device.accelerator import Accelerator, same_randomness
from edge_client.device.probe import read_memory
from edge_client.device.tree import Tree
from edge_client.errors import is_out_of_memory
from edge_client.models.registry import build
from edge_client.planning.caching_allocator import MIB, replay, rounded

pytestmark = needs_test_accelerator()


@pytest.fixture
def device() -> Accelerator:
    """The discrete one, with nothing reserved and no limit."""
    found = discrete()
    found.limit(None)
    found.free()
    found.reset_peak()
    return found


class Recurrent(nn.Module):
    """Two layers of a recurrent kind over 8 steps of 12 numbers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layers, self.head = kind(12, 16, num_layers=2, batch_first=True), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x.flatten(1).view(len(x), 8, 12))[0][:, -1])
        return out


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 10


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 8, 12, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 10


def trained(model: nn.Module, device: Accelerator | None, data: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The weights after three steps with momentum."""
    model = copy.deepcopy(model)
    model = device.move(model) if device is not None else model
    x, y = (device.move(tensor) if device is not None else tensor for tensor in data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [tensor.cpu() for tensor in model.state_dict().values()]


@pytest.mark.parametrize(
    ("make", "data", "difference"),
    [
        (lambda: build("preresnet20", input_shape=(3, 32, 32), num_classes=10, options={}), images, 0.0),
        (lambda: build("vit-s-8", input_shape=(3, 32, 32), num_classes=10, options={}), images, 0.0),
        (lambda: Recurrent(nn.LSTM), rows, 1e-6),  # torch sums a cell in another order on devices that are no CPU
        (lambda: Recurrent(nn.GRU), rows, 1e-6),
    ],
    ids=["convolutions", "attention", "lstm", "gru"],
)
def test_it_trains_to_the_weights_of_the_cpu(
    device: Accelerator, make: Callable[[], nn.Module], data: Callable[[], tuple[Tensor, Tensor]], difference: float
) -> None:
    """The same kernels on the same numbers: bit for bit, but for the cells that torch fuses."""
    torch.manual_seed(0)
    model = make()
    pairs = zip(trained(model, None, data()), trained(model, device, data()), strict=True)
    assert max(float((one.double() - other.double()).abs().max()) for one, other in pairs) <= difference


def test_a_tensor_of_the_host_among_its_own_is_refused(device: Accelerator) -> None:
    """As CUDA does; a number is none."""
    ones = device.move(torch.ones(3))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        ones + torch.ones(3)
    with pytest.raises(RuntimeError, match=r"fedtest:0 and fedtest:1"):
        ones + unified().move(torch.ones(3))
    assert (ones + torch.tensor(1.0)).cpu().tolist() == [2.0, 2.0, 2.0]


def test_memory_is_counted_in_segments_and_comes_back(device: Accelerator) -> None:
    """3 MiB lie in a segment of 20 MiB, which stays until somebody asks for it."""
    tensor = device.move(torch.zeros(3 * MIB, dtype=torch.uint8))
    assert (device.reserved_bytes(), device.peak_reserved_bytes()) == (20 * MIB, 20 * MIB)
    del tensor
    assert device.reserved_bytes() == 20 * MIB
    device.free()
    device.reset_peak()
    assert (device.reserved_bytes(), device.peak_reserved_bytes()) == (0, 0)


def test_what_is_over_the_limit_is_refused_inside_of_kernels_too(device: Accelerator) -> None:
    """A product of two matrices of 16 MiB needs 16 more; 40 are allowed."""
    device.limit(40 * MIB)
    matrix = device.move(torch.zeros(2048, 2048))
    other = matrix + 1
    with pytest.raises(RuntimeError, match="fedtest out of memory") as caught:
        torch.mm(matrix, other)
    assert is_out_of_memory(caught.value)


def test_its_bytes_are_no_private_memory_of_the_process(device: Accelerator) -> None:
    """64 MiB there, less than 8 here: the kernel's limit of a worker's data does not see a GPU's memory."""
    before = meter.data_bytes()
    tensor = torch.ones(16 * MIB, device=device.device)
    assert device.reserved_bytes() == 64 * MIB
    assert meter.data_bytes() - before < 8 * MIB
    del tensor


def test_its_allocator_and_the_replay_agree_on_random_traces(device: Accelerator) -> None:
    """200 traces of 60 allocations of all sizes, freed in any order: reserved and its peak are equal."""
    random_sizes = random.Random(22)
    for _ in range(200):
        getattr(torch, device.kind).empty_cache()  # `free` would collect garbage, 200 times
        device.reset_peak()
        events, alive, most = [], dict[int, Tensor](), random_sizes.choice([3, 5, 8])
        for number in range(60):
            size = int(10 ** random_sizes.uniform(0, most))
            events.append((number, size))
            alive[number] = torch.empty(size, dtype=torch.uint8, device=device.device)
            while alive and random_sizes.random() < 0.45:
                name = random_sizes.choice(list(alive))
                events.append((name, -1))
                del alive[name]
        found = replay(events)
        assert device.reserved_bytes() == found.reserved_bytes
        assert device.peak_reserved_bytes() == found.peak_reserved_bytes
        assert sum(rounded(tensor.nbytes) for tensor in alive.values()) <= found.allocated_bytes
        alive.clear()


def test_it_draws_from_a_generator_of_its_own(device: Accelerator) -> None:
    """Whoever restores the host's state alone gets another dropout; `same_randomness` restores both."""
    ones = device.move(torch.ones(64))
    torch.manual_seed(1)
    first = F.dropout(ones, 0.5).cpu()
    torch.manual_seed(1)
    assert torch.equal(F.dropout(ones, 0.5).cpu(), first)
    state = torch.get_rng_state()
    second = F.dropout(ones, 0.5).cpu()
    torch.set_rng_state(state)
    assert not torch.equal(F.dropout(ones, 0.5).cpu(), second)
    torch.manual_seed(1)
    with same_randomness(device):
        F.dropout(ones, 0.5)
    assert torch.equal(F.dropout(ones, 0.5).cpu(), first)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_it_autocasts_products_and_keeps_sums_exact(device: Accelerator, name: str, dtype: torch.dtype) -> None:
    """CUDA's rules: convolutions and products in the lower type, softmax in float32; gradients in the weights' type."""
    net = device.move(nn.Conv2d(3, 4, 3))
    with device.autocast(name):
        assert device.autocasts()
        out = net(device.move(torch.ones(2, 3, 8, 8)))
        assert (out.dtype, F.softmax(out, dim=1).dtype) == (dtype, torch.float32)
    assert not device.autocasts()
    out.float().sum().backward()
    assert net.weight.grad is not None
    assert (net.weight.grad.dtype, net.weight.grad.device.type) == (torch.float32, "fedtest")


def test_a_unified_one_has_the_memory_of_the_host() -> None:
    """What is free is what the kernel calls available, give or take what happens meanwhile."""
    device, memory = unified(), read_memory(Tree())
    assert memory is not None
    assert (discrete().memory, device.memory) == ("separate", "unified")
    assert abs(device.memory_bytes()[0] - memory.available_bytes) < 512 * MIB


_TRAIN = """
import sys, time, torch
from torch import nn
net = nn.Linear(512, 512).to("fedtest:0")
net(torch.ones(4, 512, device="fedtest:0")).sum().backward()
print(torch.fedtest.memory_reserved(0), flush=True)
sys.stdin.read()
from edge_client.device import guard
guard.end(0)
"""


def test_processes_share_its_memory_and_a_dead_one_holds_none(tmp_path: Path) -> None:
    """A process finds it when it loads torch; this one sees 2 small segments and the context of 5 MB there, by pid."""
    ledger = tmp_path / "ledger"
    env = environment(FEDTEST_LEDGER=str(ledger), FEDTEST_CONTEXT="5000000")
    look = "import torch; print(torch.fedtest.mem_get_info(0), torch.fedtest._users(0))"
    with subprocess.Popen(
        [sys.executable, "-c", _TRAIN], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        reserved = int(other.stdout.readline())
        assert reserved in (2 * MIB, 4 * MIB)
        seen = subprocess.run([sys.executable, "-c", look], env=env, capture_output=True, text=True, check=True).stdout
        free = 2**40 - reserved - 2 * 5_000_000
        assert f"({free}, {2**40})" in seen
        assert f"{other.pid}: {reserved + 5_000_000}" in seen
        other.stdin.close()
        assert other.wait() == 0  # `guard.end` leaves without waiting for autograd's threads
    seen = subprocess.run([sys.executable, "-c", look], env=env, capture_output=True, text=True, check=True).stdout
    assert f"({2**40 - 5_000_000}, {2**40})" in seen
