"""Layout of images and type of activations: which models may use them, and that nothing else changes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from edge_client.device.accelerator import CPU
from edge_client.methods.base import Batch, Job, Phase, PlainClient, Term
from edge_client.models import registry
from edge_client.models.contract import Model, from_sequential
from edge_client.models.layout import allows_bf16, allows_channels_last, arranged, to_channels_last
from edge_client.task.run_model import load_weights
from edge_client.training import optimizers
from edge_client.training.evaluate import evaluate
from edge_client.training.loop import Settings, generator, train
from edge_client.training.objectives import cross_entropy
from edge_client.wire.tensors import ContainerReader, codec_for, write_container

SHAPE = (3, 16, 16)
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums of several threads may differ in their last bits from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _built(name: str, shape: tuple[int, ...] = SHAPE, **options: object) -> Model:
    torch.manual_seed(1)
    return registry.build(name, input_shape=shape, num_classes=5, options=options)


def _laid_out(model: Model) -> Model:
    to_channels_last(model)
    return model


def _is_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=LAST) and not x.is_contiguous()


class _Views(nn.Module):
    """What many write instead of nn.Flatten; it refuses another order of memory."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


def _sequence(*layers: nn.Module, shape: tuple[int, ...] = SHAPE) -> Model:
    torch.manual_seed(1)
    return from_sequential(nn.Sequential(*layers), input_shape=shape)


def _users(*convs: nn.Module, flat: nn.Module | None = None, shape: tuple[int, ...] = SHAPE) -> Model:
    return _sequence(*convs, flat or nn.Flatten(), nn.LazyLinear(5), shape=shape)


CASES = {
    # channels 8, 16, 32 and so on: all multiples of 8
    "preresnet20": (lambda: _built("preresnet20", width=8), True),
    "resnet10, grey, 7x7 stem": (lambda: _built("resnet10", (1, 16, 16), base_width=24), True),
    "vit": (lambda: _built("vit-t-16", patch=4, width=16, heads=2, depth=1), True),
    "small-cnn": (lambda: _built("small-cnn", width=8), True),
    "first convolution takes 2 channels": (lambda: _users(nn.Conv2d(2, 8, 3), shape=(2, 8, 8)), True),
    # 4 channels in the first stage, 12 in the second layer
    "preresnet20, narrow": (lambda: _built("preresnet20", width=4), False),
    "12 channels": (lambda: _users(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 12, 3)), False),
    "3 channels inside": (lambda: _users(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 3, 1), nn.Conv2d(3, 8, 3)), False),
    "groups of one channel": (lambda: _users(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)), False),
    # the case of the memory error with the image's own channels
    "1x1 with a stride on the image": (lambda: _users(nn.Conv2d(3, 8, 1, stride=2)), False),
    # nothing to gain, or nothing known
    "no convolution": (lambda: _built("mlp"), False),
    "1-D": (lambda: _users(nn.Conv1d(8, 8, 3), shape=(8, 16)), False),
    "transposed": (lambda: _users(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 8, 3)), False),
    "view": (lambda: _users(nn.Conv2d(3, 8, 3), flat=_Views()), False),
}


@pytest.mark.parametrize("name", CASES)
def test_models_that_channels_last_cannot_harm_are_known(name: str) -> None:
    """All channels but the image's are multiples of 8, and no user's code looks at the order of memory."""
    build, expected = CASES[name]
    model = build()
    before = torch.get_rng_state()
    assert allows_channels_last(model) is expected
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_that_it_would_harm_is_refused() -> None:
    """Whatever a plan says: the harm is memory that is overwritten."""
    with pytest.raises(ValueError, match="multiples of 8 channels"):
        to_channels_last(_built("preresnet20", width=4))


def test_training_in_this_layout_is_sound_where_torch_has_its_error() -> None:
    """oneDNN limited to AVX2 overwrites memory in backward of odd strided 1x1 convolutions; allowed models pass.

    Their strided shortcuts have 8 -> 16 -> 32 and 24 -> 48 -> 96 -> 192 channels. Gradients are those of the other
    layout, up to rounding; the heap is whole: glibc ends a process whose blocks it does not recognise.
    """
    code = """if True:
        import torch
        from edge_client.models import registry
        from edge_client.models.layout import allows_bf16, allows_channels_last, arranged, to_channels_last
        torch.set_num_threads(1)
        for name, channels, options in (("preresnet20", 3, {"width": 8}), ("resnet10", 1, {"base_width": 24}),
                                        ("resnet10", 3, {"base_width": 8, "small_stem": True})):
            found = []
            for last in (False, True):
                torch.manual_seed(1)
                model = registry.build(name, input_shape=(channels, 16, 16), num_classes=5, options=options)
                x = torch.randn(6, channels, 16, 16)
                if last:
                    assert allows_channels_last(model)
                    to_channels_last(model)
                    x = arranged(x)
                for _ in range(3):
                    model.zero_grad()
                    model(x).square().mean().backward()
                found.append([param.grad for param in model.parameters()])
            for one, other in zip(*found, strict=True):
                assert (one - other).norm() <= 1e-3 * one.norm() + 1e-6, (name, one.shape)
        print("sound")
    """
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=limited)
    assert (done.returncode, done.stdout, done.stderr) == (0, "sound\n", "")


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: _built("resnet10", (3, 32, 32), base_width=8), True),  # the last stage begins with 2x2
        (lambda: _built("resnet10", base_width=8), False),  # with 1x1, and a stride of 2
        (lambda: _built("resnet10", base_width=8, small_stem=True), True),
        (lambda: _built("preresnet20", width=8), True),
        (lambda: _users(nn.Conv2d(3, 8, 3, stride=8), nn.Conv2d(8, 8, 3, stride=3, padding=1)), False),
        (lambda: _users(nn.Conv2d(3, 8, 3, stride=8), nn.Conv2d(8, 8, 1, stride=3)), True),
    ],
)
def test_models_whose_gradients_bf16_cannot_harm_are_known(build: Callable[[], Model], expected: bool) -> None:
    """3x3 with a stride of 2 on 1x1, or of 3 on 2x2: torch leaves the weights at the borders without a value.

    Of those that are allowed gradients are float32's, up to bfloat16's rounding, on any processor.
    """
    torch.manual_seed(1)
    model = build()
    assert allows_bf16(model) is expected
    assert model.training
    if not expected:
        return
    x, found = torch.randn(8, *model.input_shape), []
    for dtype in ("fp32", "bf16"):
        model.zero_grad()
        with CPU.autocast(dtype):
            out = model(x)
        out.float().square().mean().backward()
        found.append(torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None]))
    assert (found[0] - found[1]).norm() < 0.5 * found[0].norm()  # unset ones are larger by far, or no numbers


@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_containers_hold_values_in_logical_order(codec: str, tmp_path: Path) -> None:
    """Bytes of a model in one layout are those of the same model in the other; a delta to itself is all zeros."""
    plain, last = _built("small-cnn", width=8), _laid_out(_built("small-cnn", width=8))
    assert _is_last(last.get_parameter("block1.conv.weight"))
    hashes = []
    for number, model in enumerate((plain, last)):
        state = model.state_dict()
        table = [(f"model/{name}", codec_for(tensor, codec), tuple(tensor.shape)) for name, tensor in state.items()]
        hashes.append(write_container(tmp_path / f"{number}.bin", {}, table, state.values()))
    assert hashes[0] == hashes[1]
    with ContainerReader(tmp_path / "1.bin") as reader:
        for name, tensor in plain.state_dict().items():
            exact = codec == "fp32" or tensor.ndim == 1
            torch.testing.assert_close(reader.tensor(f"model/{name}"), tensor, rtol=0 if exact else 0.02, atol=1e-2)
        if codec == "fp32":
            assert not any((t - reader.tensor(f"model/{name}")).any() for name, t in last.state_dict().items())


def test_weights_are_loaded_into_either_layout(tmp_path: Path) -> None:
    """Values by their logical places; the layout of the model stays."""
    source, model = _built("small-cnn", width=8), _laid_out(_built("small-cnn", width=8))
    for param in model.parameters():
        param.data.zero_()
    state = source.state_dict()
    table = [(f"model/{name}", codec_for(tensor, "fp32"), tuple(tensor.shape)) for name, tensor in state.items()]
    write_container(tmp_path / "model.bin", {}, table, state.values())
    load_weights(model, tmp_path / "model.bin")
    for name, param in model.named_parameters():
        assert torch.equal(param, source.get_parameter(name))
    assert _is_last(model.get_parameter("block1.conv.weight"))


@pytest.mark.parametrize(("name", "momentum"), [("sgd", 0.9), ("adam", 0.0)])
def test_optimizers_do_the_same_in_either_layout(name: str, momentum: float) -> None:
    """Element by element, whatever the layouts of parameter, gradient and state."""
    rng = torch.Generator().manual_seed(3)
    start, grads = torch.randn(8, 8, 3, 3, generator=rng), torch.randn(3, 8, 8, 3, 3, generator=rng)
    results = []
    for of_param, of_grad in ((None, None), (LAST, LAST), (LAST, None)):
        optimizer = optimizers.make(name, momentum=momentum, weight_decay=0.01)
        param = start.clone(memory_format=of_param or torch.contiguous_format)
        for grad in grads:
            optimizer.step("w", param, grad.contiguous(memory_format=of_grad or torch.contiguous_format), 0.1)
        results.append(param)
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(results[2], results[0], rtol=1e-6, atol=1e-7)


class _Samples:
    """Images of noise."""

    def __init__(self, count: int = 12) -> None:
        rng = torch.Generator().manual_seed(2)
        self.x, self.labels = torch.randn(count, *SHAPE, generator=rng), torch.randint(0, 5, (count,), generator=rng)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.labels[indices]


class _Witness(PlainClient):
    """Trains all, or what comes after a unit; notes layout and type of what it gets and computes."""

    def __init__(self, after: str = "") -> None:
        self.after = after
        self.inputs: list[Tensor] = []
        self.types: set[torch.dtype] = set()

    def phases(self) -> Sequence[Phase]:
        names = [name for name, _ in self.job.model.named_parameters() if not self.after or name.startswith("head")]
        return (Phase(name="train", trainable=frozenset(names), after=self.after),)

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        self.inputs.append(batch.x)
        model = self.job.model
        logits = model.forward_from(model.order[-1], batch.x) if self.after else model(batch.x)
        self.types.add(logits.dtype)
        yield Term(name="cross_entropy", each=cross_entropy(logits, batch.y))

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        """Between forward passes products have the type of their factors."""
        assert (grad.dtype, torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype) == (torch.float32, torch.float32)


def _trained(model: Model, client: PlainClient, **settings: object) -> list[Tensor]:
    client.begin(
        Job(
            model=model,
            round=1,
            num_rounds=1,
            epochs=1,
            learning_rate=0.1,
            class_counts=(0,) * 5,
            rng=lambda purpose: generator(1, purpose),
        )
    )
    train(model, client, _Samples(), Settings(batch=8, microbatch=4, learning_rate=0.1, seed=5, **settings))
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("after", ["", "block1"])
def test_the_loop_trains_in_this_layout(after: str, tmp_path: Path) -> None:
    """Samples, and what frozen units make of them, also from a file; the weights are those of the other layout."""
    expected = _trained(_built("small-cnn", width=8), _Witness(after))
    for buffered in (False, True):
        client = _Witness(after)
        model = _laid_out(_built("small-cnn", width=8))
        found = _trained(model, client, channels_last=True, buffered=buffered, folder=tmp_path)
        assert all(_is_last(x) for x in client.inputs)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("after", ["", "block1"])
def test_the_loop_computes_activations_in_bf16(after: str) -> None:
    """Logits and frozen outputs have 8 bits of mantissa; steps and weights are float32 and near those without."""
    expected = _trained(_built("small-cnn", width=8), _Witness(after))
    client = _Witness(after)
    found = _trained(_built("small-cnn", width=8), client, dtype="bf16")
    assert client.types == {torch.bfloat16}
    assert {x.dtype for x in client.inputs} == {torch.bfloat16 if after else torch.float32}
    assert all(param.dtype == torch.float32 for param in found)
    assert not all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("kind", ["fused", "units"])
def test_recomputing_is_exact_in_bf16_and_channels_last(kind: str) -> None:
    """The second pass computes in the type of the first; outside of it backward would meet float32 activations."""
    options = {"width": 8, "track_running_stats": True}
    found = []
    for recompute in (None, kind):
        model = _laid_out(_built("preresnet20", **options))
        model.recompute = recompute
        torch.manual_seed(3)
        with CPU.autocast("bf16"):
            loss = cross_entropy(model(arranged(_Samples(4).x)), torch.arange(4)).sum()
        loss.backward()
        found.append([*(param.grad for param in model.parameters()), *model.buffers()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_evaluation_uses_both() -> None:
    """The same samples are right; the loss in bf16 is near the other one and not the same; layout changes rounding."""
    seen: list[tuple[bool, torch.dtype]] = []

    def predict(x: Tensor) -> Tensor:
        logits: Tensor = model(x)
        seen.append((_is_last(x), logits.dtype))
        return logits

    model = _laid_out(_built("small-cnn", width=8))
    plain = evaluate(model, predict, _Samples(), num_classes=5, microbatch=12)
    last = evaluate(model, predict, _Samples(), num_classes=5, microbatch=12, channels_last=True)
    short = evaluate(model, predict, _Samples(), num_classes=5, microbatch=12, channels_last=True, dtype="bf16")
    assert seen == [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
    assert last.loss_sum == pytest.approx(plain.loss_sum, rel=1e-5)
    assert short.loss_sum != last.loss_sum
    assert short.loss_sum == pytest.approx(last.loss_sum, rel=0.02)
    assert plain.num_correct == last.num_correct


def test_an_unknown_type_is_named() -> None:
    """Plans can only hold these two."""
    with pytest.raises(ValueError, match="expected a type of fp32, bf16, got 'fp16'"):
        CPU.autocast("fp16")
