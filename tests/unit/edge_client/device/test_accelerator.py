"""Where training happens: what is chosen on a machine without an accelerator, and what the CPU answers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edge_client.device import accelerator
from edge_client.device.accelerator import CPU, choose, device_of, of, same_randomness
from edge_client.errors import InputError, is_out_of_memory

WITHOUT = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@WITHOUT
def test_auto_falls_back_to_the_cpu_and_says_why() -> None:
    """Nobody asked for a GPU by name."""
    choice = choose("auto")
    assert choice.accelerator is CPU
    assert choice.reason.startswith("no 'cuda' device can be used: ")


def test_none_asks_no_accelerator() -> None:
    """There is nothing to explain either."""
    assert choose("none") == accelerator.Choice(accelerator=CPU, reason="")


@WITHOUT
def test_a_named_accelerator_never_falls_back() -> None:
    """The owner would train for days on the wrong device."""
    with pytest.raises(InputError, match=r"no 'cuda' device can be used: .+"):
        choose("cuda:0")


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("GPU 1", "expected auto, none or a name such as cuda:0, got 'GPU 1'"),
        ("cuda:", "expected auto, none or a name such as cuda:0, got 'cuda:'"),
        ("fpga", "has no devices of the kind 'fpga'"),
        ("mps", "has no devices of the kind 'mps'"),  # its backend counts no peak
    ],
)
def test_a_name_that_is_none_is_refused_in_one_line(wish: str, says: str) -> None:
    """What was expected, and what came."""
    with pytest.raises(InputError, match=r"limits\.accelerator") as caught:
        choose(wish)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_cpu_moves_nothing_and_has_no_second_memory() -> None:
    """The kernel counts its memory, `guard` limits it."""
    tensor = torch.ones(3)
    assert CPU.move(tensor) is tensor
    CPU.limit(1)
    assert CPU.move(torch.ones(2**20)).sum() == 2**20  # 4 MiB, in spite of the limit
    assert (CPU.reserved_bytes(), CPU.peak_reserved_bytes(), CPU.context_bytes(), CPU.memory_bytes()) == (
        0,
        0,
        0,
        (0, 0),
    )


def test_the_device_is_that_of_the_first_tensor() -> None:
    """Buffers count where there are no parameters; a model of nothing runs anywhere."""
    assert device_of(nn.Linear(2, 2)) is CPU
    assert device_of(nn.BatchNorm1d(2, affine=False)) is CPU
    assert device_of(nn.ReLU()) is CPU
    assert of(torch.device("meta")) is CPU


def test_randomness_goes_on_as_if_nothing_had_happened() -> None:
    """The numbers after the block are those that would have come without it."""
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with same_randomness(CPU):
        torch.manual_seed(2)
        torch.rand(10)
    assert torch.equal(torch.rand(4), expected)


def test_autocast_knows_its_state_and_repeats_it() -> None:
    """Inside of bf16 a second pass computes in bf16, outside of its context as well."""
    x = torch.ones(2, 2)
    with CPU.autocast("bf16"):
        assert CPU.autocasts()
        again = CPU.autocast_again()
    assert not CPU.autocasts()
    assert (x @ x).dtype == torch.float32
    with again:
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.44 GiB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1131',
    ],
)
def test_the_refusals_of_a_gpu_are_known(text: str) -> None:
    """The last is what a Jetson says: pytorch#112377."""
    assert is_out_of_memory(RuntimeError(text))


def test_another_error_of_a_gpu_is_none_of_memory() -> None:
    """The process cannot go on with it, and a smaller plan would not help."""
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
