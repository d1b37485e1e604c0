"""What a phase trains on: the frozen units' outputs, in chunks or from a file, whatever their BatchNorms keep."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import DiskFullError, MachineError
from edge_client.models.contract import Model, from_sequential
from edge_client.training.contract import Phase
from edge_client.training.inputs import StoredOutputs, frozen_units, inputs

PHASE = Phase(name="p", trainable=frozenset(), after="1")


class Memory:
    """Sample i is a signal of two points, i and i; remembers how many were read at a time."""

    def __init__(self, num_samples: int) -> None:
        self.x = torch.arange(float(num_samples))[:, None, None].expand(-1, 1, 2)
        self.labels = torch.arange(num_samples)
        self.reads: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        self.reads.append(len(indices))
        return self.x[indices], self.labels[indices]


def _model(norm: nn.Module | None = None, factor: float = 3.0) -> Model:
    """x -> factor * x -> norm or nothing -> head."""
    scale = nn.Conv1d(1, 1, 1, bias=False)
    nn.init.constant_(scale.weight, factor)
    head = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    return from_sequential(nn.Sequential(scale, norm or nn.Identity(), head), input_shape=(1, 2)).eval()


def _numbers(rows: Tensor) -> list[float]:
    assert torch.equal(rows[:, 0, 0], rows[:, 0, 1])
    return rows[:, 0, 0].tolist()


@pytest.mark.parametrize("buffered", [False, True])
def test_outputs_belong_to_the_samples_that_were_asked_for(tmp_path: Path, buffered: bool) -> None:
    """f(i) = 3 i, in any order and more than once; labels come along; nothing is left in the folder."""
    chosen = torch.tensor([7, 0, 39, 7])
    with inputs({"": _model()}, PHASE, Memory(40), microbatch=4, folder=tmp_path if buffered else None) as take:
        outputs, labels = take(chosen, 4)
        assert list(tmp_path.iterdir()) == []
    assert _numbers(outputs[""]) == [21, 0, 117, 21]
    assert not outputs[""].requires_grad
    assert labels.tolist() == chosen.tolist()


@pytest.mark.parametrize(
    ("norm", "microbatch", "reads"),
    [
        (None, 40, [16, 16, 16]),  # 40 samples: the last 8 are filled up to 16
        (None, 5, [5]),
        (nn.BatchNorm1d(1), 40, [16, 16, 16]),
        (nn.BatchNorm1d(1, track_running_stats=False), 40, [40]),
        (nn.InstanceNorm1d(1), 40, [16, 16, 16]),
    ],
)
def test_samples_go_through_in_groups_of_one_size(norm: nn.Module | None, microbatch: int, reads: list[int]) -> None:
    """16 at most, or a whole microbatch where a BatchNorm has no other statistics."""
    data = Memory(40)
    with inputs({"": _model(norm)}, PHASE, data, microbatch=microbatch) as take:
        outputs, _ = take(torch.arange(microbatch), microbatch)
    assert data.reads == reads
    assert len(outputs[""]) == microbatch


def test_a_smaller_microbatch_makes_smaller_groups() -> None:
    """As after a new plan in the middle of a phase."""
    data = Memory(40)
    with inputs({"": _model()}, PHASE, data, microbatch=40) as take:
        take(torch.arange(8), 8)
        take(torch.arange(2), 2)
    assert data.reads == [8, 2]


def test_batch_statistics_in_a_file_are_those_of_random_microbatches(tmp_path: Path) -> None:
    """10 samples, microbatches of 4: 4, 4, and 2 with the first 2 again; each group has mean 0 and variance 1.

    Samples in order would give every group a mean of its own; a drawn one does not depend on how they lie.
    """
    norm, data = nn.BatchNorm1d(1, track_running_stats=False, affine=False, eps=1e-12), Memory(10)
    order = torch.Generator().manual_seed(3)
    with inputs({"": _model(norm)}, PHASE, data, microbatch=4, folder=tmp_path, order=order) as take:
        outputs, _ = take(torch.arange(10), 4)
    assert data.reads == [4, 4, 4]
    drawn = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    for group in (drawn[:4], drawn[4:8], torch.cat((drawn[8:], drawn[:2]))):
        x = 3 * data.x[group]
        expected = (x - x.mean()) / x.var(unbiased=False).sqrt()
        kept = group if len(set(group.tolist()) & set(drawn[8:].tolist())) == 0 else drawn[8:]
        torch.testing.assert_close(outputs[""][kept], expected[: len(kept)])


def test_several_models_run_their_own_units(tmp_path: Path) -> None:
    """The run's own triples, the one beside it takes five times the sample; each has its own file."""
    for folder in (None, tmp_path):
        models = {"": _model(), "peer/1": _model(factor=5.0)}
        with inputs(models, PHASE, Memory(3), microbatch=2, folder=folder) as take:
            outputs, _ = take(torch.tensor([2, 1]), 2)
        assert {key: _numbers(value) for key, value in outputs.items()} == {"": [6, 3], "peer/1": [10, 5]}


def test_without_frozen_units_samples_are_what_they_are() -> None:
    """One read of the whole piece."""
    data = Memory(40)
    with inputs({"": _model()}, Phase(name="p", trainable=frozenset()), data, microbatch=40) as take:
        outputs, labels = take(torch.tensor([5, 4]), 40)
    assert (_numbers(outputs[""]), labels.tolist(), data.reads) == ([5, 4], [5, 4], [2])


def test_bypassed_units_are_left_out() -> None:
    """Of the units up to `after`."""
    phase = Phase(name="p", trainable=frozenset(), after="1", bypassed=frozenset({"0"}))
    assert frozen_units(_model(), phase) == ["1"]
    with inputs({"": _model()}, phase, Memory(4), microbatch=4) as take:
        assert _numbers(take(torch.tensor([2]), 4)[0][""]) == [2.0]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_layout_of_images_survives(tmp_path: Path, layout: torch.memory_format) -> None:
    """Part of a result's bits: the same from the file, from one group and from several."""

    class Images(Memory):
        def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            x, y = super().batch(indices)
            return x[:, :, :1, None].expand(-1, 2, 3, 3).contiguous(memory_format=layout), y

    layers = nn.Sequential(nn.Identity(), nn.Identity(), nn.Flatten(), nn.Linear(18, 2))
    model = from_sequential(layers, input_shape=(2, 3, 3))
    for folder in (None, tmp_path):
        for count in (4, 20):
            with inputs({"": model}, PHASE, Images(20), microbatch=count, folder=folder) as take:
                x = take(torch.arange(count), count)[0][""]
            assert x.is_contiguous(memory_format=layout)
            assert x[:, 1, 2, 2].tolist() == list(range(count))


def test_a_folder_that_is_not_there_is_an_error_of_the_machine(tmp_path: Path) -> None:
    """And not a bug."""
    with (
        pytest.raises(MachineError, match=r"keeping activations in .*nowhere"),
        inputs({"": _model()}, PHASE, Memory(4), microbatch=4, folder=tmp_path / "nowhere"),
    ):
        pass


def test_a_full_disk_is_told_as_one() -> None:
    """/dev/full takes no byte: a write of this module's kind there fails as on a full disk."""
    from edge_client import durable
    from edge_client.training.row_file import _write_all

    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(DiskFullError, match="No space left"),
        durable.disk_errors("x"),
    ):
        _write_all(full.fileno(), memoryview(b"row"), 0)


def _chain() -> Model:
    """x -> 3 x -> 3 x -> 3 x -> head."""
    scales = [nn.Conv1d(1, 1, 1, bias=False) for _ in range(3)]
    for scale in scales:
        nn.init.constant_(scale.weight, 3.0)
    head = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    return from_sequential(nn.Sequential(*scales, head), input_shape=(1, 2)).eval()


def _phase(after: str, bypassed: frozenset[str] = frozenset()) -> Phase:
    return Phase(name=f"after {after}", trainable=frozenset(), after=after, bypassed=bypassed)


def test_a_phase_goes_on_from_the_file_of_the_one_before(tmp_path: Path) -> None:
    """f(i) = 3 i, then 9 i, then 27 i; samples are read for the first file only, and no file is left open."""
    model, data = _chain(), Memory(5)
    files = len(list(Path("/proc/self/fd").iterdir()))
    with StoredOutputs() as stored:
        for after, factor in (("0", 3), ("1", 9), ("2", 27)):
            with inputs({"": model}, _phase(after), data, microbatch=4, folder=tmp_path, stored=stored) as take:
                assert _numbers(take(torch.tensor([4, 1]), 4)[0][""]) == [4 * factor, factor]
        assert data.reads == [4, 4]
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_only_units_behind_the_earlier_file_run_again(tmp_path: Path) -> None:
    """The first unit becomes 5 x after the first file was written: 9 i, not 15 i, shows that it has not run again."""
    model, data = _chain(), Memory(3)
    with StoredOutputs() as stored:
        with inputs({"": model}, _phase("0"), data, microbatch=4, folder=tmp_path, stored=stored):
            pass
        nn.init.constant_(model.get_parameter("0.weight"), 5.0)
        with inputs({"": model}, _phase("1"), data, microbatch=4, folder=tmp_path, stored=stored) as take:
            assert _numbers(take(torch.tensor([1]), 4)[0][""]) == [9]


@pytest.mark.parametrize("between", [_phase(""), _phase("1", frozenset({"0"}))])
def test_a_file_of_other_units_is_not_used(tmp_path: Path, between: Phase) -> None:
    """After a phase that trains everything, or one that jumps over a unit, samples are read again: 3 x 3 x 1 = 9."""
    model, data = _chain(), Memory(3)
    with StoredOutputs() as stored:
        for phase in (_phase("0"), between):
            with inputs({"": model}, phase, data, microbatch=4, folder=tmp_path, stored=stored):
                pass
        data.reads.clear()
        with inputs({"": model}, _phase("1"), data, microbatch=4, folder=tmp_path, stored=stored) as take:
            assert _numbers(take(torch.tensor([1]), 4)[0][""]) == [9]
    assert data.reads == [3]
