"""Recomputation: the same numbers as without it, from fewer kept tensors."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import InputError
from edge_client.methods.base import Batch, Job, Phase, PlainClient, Term
from edge_client.models import registry, slicing
from edge_client.models.contract import Model, from_sequential
from edge_client.models.densenet import densenet
from edge_client.training.loop import Settings, generator, train
from edge_client.training.objectives import cross_entropy

SHAPE = (3, 16, 16)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums of several threads may differ in their last bits from run to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _built(name: str, cut: str = "full", **options: object) -> Callable[[], Model]:
    def build() -> Model:
        torch.manual_seed(1)
        return registry.build(name, input_shape=SHAPE, num_classes=5, options=options, spec=slicing.parse(cut))

    return build


def _dense() -> Model:
    torch.manual_seed(1)
    layers = densenet(SHAPE, 5, layers=(2, 1), growth=4, base_width=6, small_stem=True)
    return from_sequential(layers, input_shape=SHAPE)


def _users() -> Model:
    """What users write: dropout, activations in place, a BatchNorm with a plain mean of all batches, a view."""
    torch.manual_seed(1)
    layers = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.LeakyReLU(inplace=True)),
        nn.Dropout2d(0.3),
        nn.Sequential(nn.LeakyReLU(inplace=True), nn.Conv2d(8, 6, 3), nn.InstanceNorm2d(6, track_running_stats=True)),
        nn.Sequential(nn.Conv2d(6, 6, 3), nn.Dropout(0.3), nn.Flatten()),
        nn.LeakyReLU(inplace=True),
        nn.Sequential(nn.Linear(6 * 100, 7), nn.BatchNorm1d(7)),
        nn.Linear(7, 5),
    )
    return from_sequential(layers, input_shape=SHAPE)


PRERESNETS = {
    f"preresnet20-{shortcut}-{'tracked' if track else 'plain'}": _built(
        "preresnet20", width=8, shortcut=shortcut, track_running_stats=track, stem_norm=track
    )
    for shortcut in ("conv", "pad")
    for track in (True, False)
}
FUSIBLE = {
    **PRERESNETS,
    "resnet10": _built("resnet10", base_width=8, small_stem=True),
    "bottlenecks": _built("resnet50", "depth:2.1.1.1", base_width=4, small_stem=True),
    "densenet": _dense,
}
MODELS = {
    **FUSIBLE,
    "vit": _built("vit-t-16", patch=4, width=16, heads=2, depth=2),
    "mlp": _built("mlp", hidden=[12, 9]),
    "small-cnn": _built("small-cnn", width=4),
    "users": _users,
}
EITHER = [(name, kind) for name in MODELS for kind in ("units", "fused") if kind == "units" or name in FUSIBLE]


def _batch(dtype: torch.dtype = torch.float32, seed: int = 3) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(4, *SHAPE, generator=rng, dtype=dtype), torch.randint(0, 5, (4,), generator=rng)


def _pair(name: str, kind: str, dtype: torch.dtype = torch.float32) -> tuple[Model, Model]:
    """A model and its twin that recomputes, both in training mode."""
    plain = MODELS[name]().to(dtype).train()
    twin = copy.deepcopy(plain)
    twin.recompute = kind
    return plain, twin


def _steps(model: Model, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Logits, gradients, buffers and the state of torch's generator over two batches, the second after a step."""
    seen: list[Tensor] = []
    torch.manual_seed(7)
    for seed in (3, 4):
        x, y = _batch(dtype, seed)
        logits = model(x)
        cross_entropy(logits, y).mean().backward()
        seen.append(logits.detach())
        for param in model.parameters():
            assert param.grad is not None
            seen.append(param.grad)
            param.data.sub_(param.grad, alpha=0.1)
            param.grad = None
    return [*seen, *(buffer.clone() for buffer in model.buffers()), torch.get_rng_state()]


@pytest.mark.parametrize("name", MODELS)
def test_units_that_run_again_train_bit_for_bit_as_they_do_without(name: str) -> None:
    """Logits, gradients, buffers and drawn random numbers of two steps."""
    plain, twin = _pair(name, "units")
    for ours, theirs in zip(_steps(twin), _steps(plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", FUSIBLE)
def test_fused_parts_train_as_they_do_without(name: str, dtype: torch.dtype, bound: float) -> None:
    """The same functions of the same numbers; what is left is rounding, if a kernel is another one."""
    plain, twin = _pair(name, "fused", dtype)
    for ours, theirs in zip(_steps(twin, dtype), _steps(plain, dtype), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound)


@pytest.mark.parametrize("kind", ["units", "fused"])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_evaluation_mode_has_the_same_gradients(kind: str, affine: bool, track: bool) -> None:
    """Running statistics, where there are some, instead of those of the batch; norms with and without parameters."""
    plain = _built("preresnet20", width=8, track_running_stats=track)()
    for parent in list(plain.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, nn.BatchNorm2d):
                setattr(parent, name, nn.BatchNorm2d(norm.num_features, affine=affine, track_running_stats=track))
    plain.train()(torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(5)))  # moves the statistics
    twin = copy.deepcopy(plain)
    twin.recompute = kind
    for ours, theirs in zip(_steps(twin.eval()), _steps(plain.eval()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), EITHER)
def test_gradients_can_be_asked_for_apart(name: str, kind: str) -> None:
    """torch.autograd.grad gives those of backward and touches no param.grad, as the loop needs for kept terms."""
    found: list[Sequence[Tensor]] = []
    for model in _pair(name, kind):
        x, y = _batch()
        torch.manual_seed(7)
        found.append(torch.autograd.grad(cross_entropy(model(x), y).sum(), list(model.parameters())))
        assert all(param.grad is None for param in model.parameters())
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), EITHER)
def test_one_unit_is_trained_behind_a_frozen_prefix(name: str, kind: str) -> None:
    """Its input asks for no gradient and those after it have frozen parameters: it learns as it does without."""
    found: list[dict[str, Tensor | None]] = []
    for model in _pair(name, kind):
        middle = next(unit for unit in model.units[1:] if unit.parameters)
        for param_name, param in model.named_parameters():
            param.requires_grad_(param_name in middle.parameters)
        x, y = _batch()
        torch.manual_seed(7)
        with torch.no_grad():
            before = model.forward_to(model.order[model.order.index(middle.name) - 1], x)
        assert not before.requires_grad
        cross_entropy(model.forward_from(middle.name, before), y).sum().backward()
        found.append({param_name: param.grad for param_name, param in model.named_parameters()})
        assert {key for key, grad in found[-1].items() if grad is not None} == set(middle.parameters)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), EITHER)
def test_nothing_is_different_where_no_gradient_is_asked_for(name: str, kind: str) -> None:
    """Under no_grad, or with every parameter frozen, a twin gives the same bits and no graph."""
    plain, twin = _pair(name, kind)
    x, _ = _batch()
    with torch.no_grad():
        assert torch.equal(twin.eval()(x), plain.eval()(x))
    twin.requires_grad_(False)
    assert twin(x).grad_fn is None


def _kept(model: Model) -> int:
    """Elements per sample of the different tensors that the graph of a forward pass keeps; the batch is 3."""
    kept: dict[int, int] = {}

    def look(tensor: Tensor) -> Tensor:
        if tensor.ndim > 1 and len(tensor) == 3:  # statistics are vectors, weights have other first axes
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 12
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        output = model(torch.zeros(3, *SHAPE))
        assert output.requires_grad
        return sum(kept.values())


def test_a_preresnet_keeps_what_it_should() -> None:
    """Width 8 on 3x16x16: 768 pixels; tensors of stage 1, 2, 3 have 2048, 1024, 512 elements.

    Without: a block keeps the inputs of its two norms and of its two convolutions. B1-B3 4*2048 each, B4 2*(2048+1024),
    B5-B6 4*1024, B7 2*(1024+512), B8-B9 4*512: 46,080; the head 512 + 512 + 32; with the pixels 47,904.
    Fused: half of the blocks', 23,040 + 1,056 + 768 = 24,864. Units: B1-B4 2048, B5-B7 1024, B8-B9 512: 12,288;
    with 1,056 of the head, from which backward begins, and the pixels 14,112.
    """
    model = PRERESNETS["preresnet20-conv-plain"]()
    kept = {}
    for kind in (None, "fused", "units"):
        model.recompute = kind
        kept[kind] = _kept(model)
    assert kept == {None: 47_904, "fused": 24_864, "units": 14_112}


def test_a_second_pass_sees_the_modes_of_the_first() -> None:
    """A method may judge the model in evaluation mode between forward and backward."""
    plain, twin = _pair("preresnet20-conv-tracked", "units")
    x, y = _batch()
    for model in (plain, twin):
        loss = cross_entropy(model(x), y).sum()
        model.eval()
        with torch.no_grad():
            model(x)
        loss.backward()
        assert not any(part.training for part in model.modules())
    for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class _Remembers(nn.Module):
    """Adds a buffer to its input and counts it up: a second pass without care would see the next value."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1  # another tensor, as some write it
        return x * self.weight * self.count


def test_a_second_pass_finds_the_buffers_of_the_first() -> None:
    """d sum(x w c)/dw = sum x c = 3 c per feature over three samples of ones, with c = 1, then 2."""
    model = from_sequential(nn.Sequential(_Remembers(), nn.Identity()), input_shape=(2,))
    start = model.get_buffer("0.count")[0].item()  # describing the model has run it once
    model.recompute = "units"
    for step in (1, 2):
        model(torch.ones(3, 2)).sum().backward()
        weight = model.get_parameter("0.weight")
        assert weight.grad is not None
        assert weight.grad.tolist() == [3 * (start + step)] * 2
        assert model.get_buffer("0.count").tolist() == [start + step] * 2
        weight.grad = None


class _Overwrites(nn.Module):
    """A function in place, which no attribute shows; `late`: only in training, which describing a model does not do."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x.mul_(2) if self.training or not self.late else x)
        return output


def _overwriting(*, late: bool) -> Model:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 4), _Overwrites(late=late), nn.Linear(4, 4))
    return from_sequential(layers, input_shape=(4,)).train()


def test_a_unit_that_overwrites_its_input_runs_again_on_the_input() -> None:
    """Doubled twice, it would give other gradients."""
    found = []
    for kind in (None, "units"):
        model = _overwriting(late=False)
        model.recompute = kind
        found.append(torch.autograd.grad(model(torch.eye(4)).square().sum(), list(model.parameters())))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_a_unit_that_overwrites_its_input_unseen_is_named() -> None:
    """The second pass would begin with the changed one."""
    model = _overwriting(late=True)
    model.recompute = "units"
    with pytest.raises(InputError, match=r"unit '1' changes its input in place.*makes a new tensor"):
        model(torch.ones(3, 4))


class _Shut(nn.Module):
    """A frozen part as some write it: without a gradient, though its parameters ask for one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = self.linear(x)
        return output


def test_a_unit_that_shuts_gradients_out_stays_without() -> None:
    """The head behind it learns."""
    model = from_sequential(nn.Sequential(_Shut(), nn.Linear(2, 2)), input_shape=(2,))
    model.recompute = "units"
    model(torch.ones(3, 2)).sum().backward()
    assert model.get_parameter("0.linear.weight").grad is None
    assert model.get_parameter("1.bias").grad is not None


@pytest.mark.parametrize(("name", "kind"), [("vit", "units"), ("resnet10", "fused")])
def test_parameters_that_change_before_backward_are_noticed(name: str, kind: str) -> None:
    """A second pass with other weights would give gradients of no function at all; torch's own error says so."""
    _, twin = _pair(name, kind)
    loss = twin(_batch()[0]).sum()
    with torch.no_grad():
        for param in twin.parameters():
            param.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_tells_its_kinds_and_refuses_others() -> None:
    """Only blocks with a BatchNorm, a ReLU and a convolution in a row can be fused."""
    mlp, preresnet = MODELS["mlp"](), PRERESNETS["preresnet20-conv-plain"]()
    assert (mlp.recompute, mlp.recompute_kinds) == (None, ("units",))
    assert preresnet.recompute_kinds == ("fused", "units")
    mlp.recompute = "units"
    for kind in ("fused", "blocks"):
        with pytest.raises(ValueError, match=f"expected recompute of None, 'units' for this model, got '{kind}'"):
            mlp.recompute = kind
    assert mlp.recompute == "units"
    mlp.recompute = None
    assert mlp.recompute is None


class _Watching(PlainClient):
    """Looks at taps; the gradient of a second term is kept apart and doubled."""

    def __init__(self, taps: set[str]) -> None:
        self.taps = frozenset(taps)
        self.seen: list[dict[str, Tensor]] = []

    def phases(self) -> Sequence[Phase]:
        names = frozenset(name for name, _ in self.job.model.named_parameters())
        return (Phase(name="train", trainable=names, taps=self.taps, keep=frozenset({"again"})),)

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        yield from super().terms(batch, phase)
        yield Term(name="again", each=cross_entropy(self.job.model(batch.x * 2), batch.y))

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        grad.add_(kept["again"], alpha=2.0)

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        assert not any(tap.requires_grad for tap in taps.values())
        self.seen.append({name: tap.clone() for name, tap in taps.items()})


class _Samples:
    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(2)
        self.x, self.labels = torch.randn(12, *SHAPE, generator=rng), torch.randint(0, 5, (12,), generator=rng)

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.labels[indices]


@pytest.mark.parametrize(("name", "kind"), EITHER)
def test_the_loop_trains_and_observes_the_same(name: str, kind: str) -> None:
    """Two terms, one of them kept apart, microbatches, momentum; all taps, those inside of fused parts too."""
    clients = []
    for model in (pair := _pair(name, kind)):
        client = _Watching(set(model.taps))
        client.begin(
            Job(
                model=model,
                round=1,
                num_rounds=1,
                epochs=1,
                learning_rate=0.05,
                class_counts=(0,) * 5,
                rng=lambda purpose: generator(1, purpose),
            )
        )
        torch.manual_seed(9)
        train(model, client, _Samples(), Settings(batch=8, microbatch=4, learning_rate=0.05, seed=5, momentum=0.9))
        clients.append(client)
    plain, twin = clients
    assert len(twin.seen) == 3
    assert twin.seen[0].keys() == twin.taps
    torch.testing.assert_close(twin.seen, plain.seen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pair[1].state_dict(), pair[0].state_dict(), rtol=1e-5, atol=1e-5)


def test_recomputing_loads_no_compiler() -> None:
    """torch.utils.checkpoint would bring torch._dynamo (68 MB), torch.autograd.grad with grad_outputs sympy (35 MB)."""
    code = """if True:
        import sys, torch
        from edge_client.models import registry
        model = registry.build("preresnet20", input_shape=(3, 8, 8), num_classes=2, options={"width": 1})
        for model.recompute in ("fused", "units"):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = model(torch.zeros(2, 3, 8, 8)).float().sum()
            loss.backward()
        print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "[]\n"
