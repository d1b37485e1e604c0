"""FedIN: both rules by hand, what is sent, whose pairs come back, and that foreign features leave no trace."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from depth import NUM_CLASSES, Memory, equal, model_of, plan_of
from knowing import batch_of, begun, identity_model, job_for, run, weights
from linear import TensorFrozen, TensorState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from edge_client.errors import InputError
from edge_client.knowledge.kinds import FeaturePairs
from edge_client.methods import registry
from edge_client.methods.base import Header, Lesson
from edge_client.methods.cards.fedin import FedInParameters
from edge_client.methods.cards.fedprox import FedProxParameters
from edge_client.methods.fedin import FedInClient, PairPool, PairTeacher, check, extractor, fold_pairs, project
from edge_client.methods.fedprox import FedProxClient
from edge_client.models import registry as models
from edge_client.models.contract import Model, from_sequential
from edge_client.models.taps import tapped
from edge_client.training.loop import Settings, train

WAYS = ["weighted", "projection", "sequential"]


def client(**parameters: Any) -> FedInClient:
    """FedIN with these parameters."""
    return FedInClient(FedInParameters(**parameters))


@pytest.mark.parametrize(
    ("local", "mapping", "expected"),
    [
        ((1.0, 0.0), (-1.0, 1.0), (0.0, 1.0)),
        ((2.0, 0.0), (-0.5, 1.0), (0.0, 1.0)),
        ((1.0, 1.0), (2.0, 0.0), (2.0, 0.0)),
        ((0.0, 1.0, 1.0), (1.0, -2.0, 0.0), (1.0, -1.0, 1.0)),
        ((0.0, 0.0), (3.0, 4.0), (3.0, 4.0)),
    ],
)
def test_the_projection_by_hand(local: Any, mapping: Any, expected: Any) -> None:
    """Eq. 13: b = -1, -1, 2, -2, 0; a = 1, 4, 2, 2, 0; afterwards <Z, G_local> >= 0."""
    z = project(torch.tensor(local), torch.tensor(mapping))
    assert z.tolist() == list(expected)
    assert float(torch.dot(z, torch.tensor(local))) >= 0


def test_the_inner_product_of_matrices_is_that_of_their_elements() -> None:
    """tr(A^T B) = 70 for A = [[1,2],[3,4]], B = [[5,6],[7,8]]: with -B, Z = -B + 70/30 A, at right angles to A."""
    a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])
    assert torch.trace(a.T @ b) == 70
    torch.testing.assert_close(project(a, -b), -b + 70 / 30 * a)


@pytest.mark.parametrize(
    ("local", "mapping", "expected", "inner"),
    [
        ((1.0, 0.0), (-1.0, 1.0), (-0.5, 1.0), -0.5),
        ((2.0, 0.0), (-0.5, 1.0), (0.5, 1.0), 1.0),
        ((1.0, 1.0), (2.0, 0.0), (2.5, 0.5), 3.0),
    ],
)
def test_the_weighted_sum_by_hand(local: Any, mapping: Any, expected: Any, inner: float) -> None:
    """Eq. 14 with the weights of the client's terms; its inner product with G_local may be negative."""
    model, fedin = _scalar(), client(mu=0.0)
    fedin.begin(job_for(model, knowledge=(PAIRS,)))
    (phase,) = fedin.phases()
    terms = fedin.terms(batch_of([[1.0]], [0]), phase)
    own, foreign = (next(terms).weight for _ in range(2))
    z = own * torch.tensor(local) + foreign * torch.tensor(mapping)
    assert z.tolist() == list(expected)
    assert float(torch.dot(z, torch.tensor(local))) == inner


@pytest.mark.parametrize(("uniform", "expected"), [(False, (4.0, 23 / 3, 7.0)), (True, (3.0, 7.0, 7.0))])
def test_layers_are_averaged_over_the_devices_that_have_them(uniform: bool, expected: tuple[float, ...]) -> None:
    """10 samples: b0=1; 30: b0=3, b1=5; 60: b0=5, b1=9, b2=7. b0 = (10 + 90 + 300)/100, b1 = (150 + 540)/90."""
    devices = [(10, (1.0,)), (30, (3.0, 5.0)), (60, (5.0, 9.0, 7.0))]
    updates = [
        (Header(device=f"d{n}", num_samples=n), {f"b{k}": torch.tensor([v]) for k, v in enumerate(values)})
        for n, values in devices
    ]
    state = TensorState({f"b{k}": torch.zeros(1) for k in range(4)})
    server = registry.get("fedin", {"uniform": uniform}).server
    folded = {name: float(value) for name, value in server.fold(state, TensorFrozen(updates), round=1)}
    assert [folded[f"b{k}"] for k in range(3)] == pytest.approx(expected)
    assert folded["b3"] == 0.0  # nobody has it: as it was


@pytest.mark.parametrize(("side", "values", "nbytes"), [(32, 73_728, 294_912), (28, 58_368, 233_472)])
def test_the_payload_of_sixteen_pairs(side: int, values: int, nbytes: int) -> None:
    """A ResNet18's stem halves twice: 16 (64 x 8 x 8 + 512) values of 32x32 images, 16 (64 x 7 x 7 + 512) of 28x28."""
    model = models.build("resnet18", input_shape=(3, side, side), num_classes=10, options={})
    (pairs,) = registry.get("fedin", {}).knowledge.traffic(model).up
    assert sum(tensor.numel() for tensor in pairs.tensors().values()) == values
    assert pairs.nbytes() == nbytes


def _scalar() -> Model:
    """w_e = 2, w_in = 3, a head of 1 that is left alone."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    for layer, weight in zip(layers, (2.0, 3.0, 1.0), strict=True):
        layer.weight.data = torch.tensor([[weight]])
    return from_sequential(nn.Sequential(*layers), input_shape=(1,))


PAIRS = FeaturePairs(inputs=torch.tensor([[1.5]]), outputs=torch.tensor([[4.0]]))


def _after_one_step(lr: float = 0.001, **parameters: Any) -> dict[str, float]:
    """How far each weight moved, over the learning rate: the gradient that was used."""
    model = _scalar()
    fedin = client(mu=0.0, **parameters)
    squares = {"loss": lambda batch, phase: (model(batch.x)[:, 0] - 1).square()}
    fedin.begin(job_for(model, knowledge=(PAIRS,), **squares))
    data = Memory(1)
    data.x, data.labels = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    before = weights(model)
    train(model, fedin, data, Settings(batch=1, microbatch=1, learning_rate=lr, seed=1))
    return {name: float((before[name] - value) / lr) for name, value in weights(model).items()}


def test_the_weighted_gradient_of_a_scalar_net() -> None:
    """(w_e w_in - 1)^2 and (1.5 w_in - 4)^2 at w_e = 2, w_in = 3: w_e 30/2 = 15, w_in 1.5 + 20/2 = 11.5, head 60/2."""
    moved = _after_one_step()
    assert [moved[f"{k}.weight"] for k in range(3)] == pytest.approx([15, 11.5, 30], rel=1e-3)


def test_the_weighted_gradient_with_the_outer_parts_whole() -> None:
    """The same with 30 for w_e and 60 for the head."""
    moved = _after_one_step(rescale_outer=True)
    assert [moved[f"{k}.weight"] for k in range(3)] == pytest.approx([30, 11.5, 60], rel=1e-3)


def test_the_projected_gradient_of_a_scalar_net() -> None:
    """b = 20 x 1.5 >= 0: G_IN = 1.5 alone on the middle; G_local elsewhere."""
    moved = _after_one_step(alleviation="projection")
    assert [moved[f"{k}.weight"] for k in range(3)] == pytest.approx([30, 1.5, 60], rel=1e-3)


def test_one_step_after_the_other() -> None:
    """lr .001: w_in = 3 - .02 = 2.98 first, then the mapping's gradient there: 2 (1.5 x 2.98 - 4) 1.5 = 1.41."""
    moved = _after_one_step(alleviation="sequential")
    assert [moved[f"{k}.weight"] for k in range(3)] == pytest.approx([30, 21.41, 60], rel=1e-3)


def test_the_proximal_term_is_fedproxs() -> None:
    """w = (1, 2), anchor 0, mu/2 = .05: .25; halved with pairs."""
    model = from_sequential(nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(3)]), input_shape=(1,))
    for name, parameter in model.named_parameters():
        parameter.data = torch.zeros(1, 1)
        assert name
    for knowledge, expected in (((), 0.25), ((PAIRS,), 0.125)):
        for parameter in model.parameters():
            parameter.data = torch.zeros(1, 1)
        fedin = begun(client(mu=0.1), model, knowledge=knowledge)
        model.get_parameter("0.weight").data = torch.ones(1, 1)
        model.get_parameter("1.weight").data = torch.full((1, 1), 2.0)
        terms = list(fedin.terms(batch_of([[1.0]], [0]), fedin.phases()[0]))
        proximal = sum(t.weight * t.once.item() for t in terms if t.name == "proximal" and t.once is not None)
        assert proximal == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["mlp", "resnet10"])
@pytest.mark.parametrize(("microbatch", "count"), [(8, 8), (4, 8), (8, 3)])
def test_the_pairs_sent_are_those_of_the_last_batch_as_it_was_trained(kind: str, microbatch: int, count: int) -> None:
    """24 samples, batches of 8, 2 epochs: what the sixth step's forward pass put out before it; the last rows."""
    data = Memory(24)
    snapshots: list[tuple[Tensor, Tensor]] = []

    class Watching(FedInClient):
        def terms(self, batch, phase):  # type: ignore[no-untyped-def]
            state = {name: value.clone() for name, value in self.job.model.state_dict().items()}
            seen, _ = tapped(self.job.model, [first, "features"], batch.x)
            self.job.model.load_state_dict(state)  # this pass moved running statistics
            snapshots.append((seen[first].detach(), seen["features"].detach().flatten(1)))
            yield from super().terms(batch, phase)

    model = model_of(kind)
    first = "stem_out" if kind == "resnet10" else "block_1_out"
    watching = Watching(FedInParameters(pairs=count))
    outcome = run(watching, model, data, classes=NUM_CLASSES, epochs=2, microbatch=microbatch)
    (pairs,) = outcome.knowledge
    assert isinstance(pairs, FeaturePairs)
    last = snapshots[-8 // microbatch :]
    inputs, outputs = (torch.cat(rows)[-count:] for rows in zip(*last, strict=True))
    torch.testing.assert_close(pairs.inputs, inputs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pairs.outputs, outputs, rtol=1e-5, atol=1e-6)


def test_a_last_batch_that_is_small_is_filled_up_with_the_one_before() -> None:
    """20 samples in batches of 8: the last has 4; 8 pairs are asked for, 20 at most are there: of one epoch alone."""
    for asked, expected in ((8, 8), (30, 20)):
        (pairs,) = run(client(pairs=asked), model_of("mlp"), Memory(20), classes=NUM_CLASSES, epochs=2).knowledge
        assert isinstance(pairs, FeaturePairs)
        assert len(pairs.inputs) == expected


def _foreign(kind: str, rows: int = 6) -> FeaturePairs:
    torch.manual_seed(11)
    model = model_of(kind)
    shape = next(unit.out_shape for unit in model.units if unit.name == extractor(model))
    seen, _ = tapped(model, ["features"], torch.randn(2, *model.input_shape))
    return FeaturePairs(inputs=torch.randn(rows, *shape), outputs=torch.randn(rows, seen["features"][0].numel()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["mlp", "resnet10"])
def test_foreign_pairs_are_used(way: str, kind: str) -> None:
    """With pairs the middle becomes another; without, or with `pairs` = 0, it is FedProx's, bit for bit."""
    data, pairs = Memory(16), _foreign(kind)
    results = {}
    for key, used, knowledge in (
        ("prox", FedProxClient(FedProxParameters(mu=0.1)), (pairs,)),
        ("first", client(alleviation=way), ()),
        ("off", client(alleviation=way, pairs=0), (pairs,)),
        ("on", client(alleviation=way), (pairs,)),
    ):
        model = model_of(kind)
        run(used, model, data, classes=NUM_CLASSES, knowledge=knowledge)
        results[key] = weights(model)
    assert equal(results["prox"], results["first"])
    assert equal(results["prox"], results["off"])
    middle = model_of(kind).order[2]
    changed = [name for name in results["on"] if name.startswith(middle) and name.endswith("weight")]
    assert changed
    assert not torch.equal(results["prox"][changed[0]], results["on"][changed[0]])


def _users() -> Model:
    """What users write: an activation that is one module, in place, right behind the extractor; a tied layer."""
    act, tied = nn.LeakyReLU(0.3, inplace=True), nn.Linear(7, 7)
    layers = (nn.Linear(5, 7), act, tied, act, nn.Sequential(nn.BatchNorm1d(7), tied), nn.Tanh(), nn.Linear(7, 3))
    return from_sequential(nn.Sequential(*layers), input_shape=(5,))


@pytest.mark.parametrize("recompute", [None, "units"])
@pytest.mark.parametrize("way", WAYS)
def test_one_step_is_that_of_two_plain_losses(way: str, recompute: str | None) -> None:
    """By torch.autograd.grad of both losses over whole batches; sequential: one after the other."""
    torch.manual_seed(4)
    model = _users()
    twin = copy.deepcopy(model).train()
    rows = FeaturePairs(inputs=torch.randn(6, 7), outputs=torch.randn(6, 7))
    data = Memory(8)
    data.x, data.labels = torch.randn(8, 5), torch.arange(8) % 3
    model.recompute = recompute
    run(client(alleviation=way, mu=0.0), model, data, classes=3, knowledge=(rows,))

    params = dict(twin.named_parameters())

    def gradients(loss: Tensor) -> dict[str, Tensor | None]:
        return dict(zip(params, torch.autograd.grad(loss, list(params.values()), allow_unused=True), strict=True))

    def foreign() -> dict[str, Tensor | None]:
        x = rows.inputs
        for unit in model.order[1:-1]:
            x = twin.get_submodule(unit)(x.clone())
        return gradients((x - rows.outputs).square().mean())

    local = gradients(nn.functional.cross_entropy(twin(data.x), data.labels))
    mapping = foreign() if way != "sequential" else {}
    with torch.no_grad():
        for name, param in params.items():
            mine, other = local[name], mapping.get(name)
            assert mine is not None
            if way == "weighted":
                mine = mine / 2 + (0 if other is None else other)
            elif other is not None:
                mine = project(mine, other)
            param -= 0.1 * mine
    if way == "sequential":
        for name, grad in foreign().items():
            params[name].data -= 0.1 * grad if grad is not None else 0
    for name, param in params.items():
        torch.testing.assert_close(model.get_parameter(name), param, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_the_mapping_is_in_the_type_of_the_plan(way: str) -> None:
    """bf16: every pass of the middle puts that out, also the one of a step of its own."""
    model, data, types = model_of("mlp"), Memory(8), []
    middle = next(part for part in model.get_submodule("block2").modules() if isinstance(part, nn.Linear))
    middle.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    fedin, plan = client(alleviation=way), plan_of(dtype="bf16")
    fedin.begin(job_for(model, classes=NUM_CLASSES, knowledge=(_foreign("mlp"),), plan=plan))
    types.clear()
    train(model, fedin, data, Settings(batch=8, microbatch=8, learning_rate=0.1, seed=5, dtype="bf16"))
    assert len(types) >= 2
    assert set(types) == {torch.bfloat16}


def test_units_that_run_again_draw_the_same_random_numbers() -> None:
    """Dropout in three units: gradients as of one pass by plain autograd, and the generator stands where that left it.

    `features` is the output of the unit before the head, so that the head draws as well in both.
    """
    torch.manual_seed(4)
    blocks = [nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    model = from_sequential(nn.Sequential(nn.Linear(5, 6), *blocks, nn.Linear(6, 3)), input_shape=(5,)).train()
    pairs = FeaturePairs(inputs=torch.randn(4, 6), outputs=torch.randn(4, 6))
    torch.manual_seed(9)
    seen, _ = tapped(model, ["features"], pairs.inputs, start="1")
    nn.functional.mse_loss(seen["features"], pairs.outputs).backward()
    left = torch.get_rng_state()
    expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for param in model.parameters():
        param.grad = None
    fedin = client(mu=0.0)
    fedin.begin(job_for(model, knowledge=(pairs,)))
    torch.manual_seed(9)
    for term in fedin._mapping():
        assert term.once is not None
        term.once.backward()
    assert torch.equal(torch.get_rng_state(), left)
    for name, grad in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad)


@pytest.mark.parametrize("way", WAYS)
def test_pairs_too_few_for_batch_statistics_change_nothing(way: str) -> None:
    """One pair for a BatchNorm of single values: FedProx, whose loss is not halved for a mapping that is not there."""
    results = []
    for knowledge in ((), (FeaturePairs(inputs=torch.ones(1, 7), outputs=torch.ones(1, 7)),)):
        torch.manual_seed(4)
        model, data = _users(), Memory(8)
        data.x = torch.randn(8, 5)
        run(client(alleviation=way), model, data, classes=3, knowledge=knowledge)
        results.append(weights(model))
    assert equal(*results)


@pytest.mark.parametrize("way", WAYS)
def test_foreign_features_do_not_move_running_statistics(way: str) -> None:
    """Learning rate 0: the buffers are those of a round without pairs, counters too."""
    data = Memory(16)
    results = []
    for knowledge in ((), (_foreign("resnet10"),)):
        model = model_of("resnet10")
        run(client(alleviation=way), model, data, classes=NUM_CLASSES, knowledge=knowledge, learning_rate=0.0)
        results.append({name: value.clone() for name, value in model.named_buffers()})
    assert equal(*results)


def test_the_mapping_comes_in_pieces_of_a_microbatch() -> None:
    """An mlp: 6 pairs at once or 2 at a time give the same weights but for rounding."""
    results = []
    for microbatch in (8, 2):
        model = model_of("mlp")
        run(client(mu=0.0), model, Memory(8), classes=NUM_CLASSES, knowledge=(_foreign("mlp"),), microbatch=microbatch)
        results.append(weights(model))
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_beside_a_small_last_batch_the_pairs_stay_together(way: str) -> None:
    """Batches of 8 and 2, 6 pairs: BatchNorm sees 6 pairs at a time in both steps, not 2."""
    model, sizes = model_of("resnet10"), list[int]()
    norm = next(part for part in model.get_submodule(model.order[1]).modules() if isinstance(part, nn.BatchNorm2d))
    norm.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])) if module.training else None)
    run(client(alleviation=way), model, Memory(10), classes=NUM_CLASSES, knowledge=(_foreign("resnet10"),))
    assert set(sizes) == {8, 2, 6}
    assert sizes.count(2) == 1  # of its own samples
    sizes.clear()
    small = {"batch": 9, "microbatch": 3}
    run(client(alleviation=way), model, Memory(9), classes=NUM_CLASSES, knowledge=(_foreign("resnet10"),), **small)
    assert set(sizes) == {3}  # pieces of the plan's size


class _Largest(TorchDispatchMode):
    """The most elements that an operation puts out as floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        views = func.is_view or str(func).startswith("aten.detach")
        found = [out] if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else []
        for tensor in [] if views else found:
            if isinstance(tensor, Tensor) and not any(tensor is given for given in args):  # in place: nothing new
                self.numel = max(self.numel, tensor.numel())
        return out


def test_the_mapping_makes_no_second_gradient_of_large_weights() -> None:
    """ResNet10 with 512 x 512 x 3 x 3 in its last block: l_IN's gradient by plain autograd, added to what was there.

    While all gradients are there, nothing new is half as large as that.
    """
    model = models.build("resnet10", input_shape=(3, 16, 16), num_classes=NUM_CLASSES, options={"base_width": 64})
    torch.manual_seed(2)
    shape = next(unit.out_shape for unit in model.units if unit.name == extractor(model))
    pairs = FeaturePairs(inputs=torch.randn(4, *shape), outputs=torch.randn(4, 512))
    seen, _ = tapped(model, ["features"], pairs.inputs, start=model.order[model.order.index(extractor(model)) + 1])
    nn.functional.mse_loss(seen["features"].flatten(1), pairs.outputs).backward()
    expected = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    fedin = client(mu=0.0)
    fedin.begin(job_for(model, knowledge=(pairs,)))
    with _Largest() as largest:
        for term in fedin._mapping():
            assert term.once is not None
            term.once.backward()
    assert largest.numel < 512 * 512 * 9 / 2
    for name, grad in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad - 1, grad, rtol=1e-3, atol=1e-5)


def test_pairs_of_either_side_are_not_in_memory_beside_a_batch() -> None:
    """Foreign ones are read for the mapping alone; own rows go when a batch comes that brings as many.

    At the beginning of each of the 2 x 3 steps nobody holds any; a last batch of 4 leaves 4 of the one before.
    8 of 20 samples are kept, in batches of 8, or in pieces of 3 of batches of 10, in which 8 are the most: 3 + 3 + 2.
    """
    held: list[tuple[int, int]] = []
    alive: list[weakref.ref[Tensor]] = []

    class Told:
        def __iter__(self) -> Iterator[FeaturePairs]:
            pairs = _foreign("mlp")
            alive.append(weakref.ref(pairs.inputs))
            yield pairs

    class Watching(FedInClient):
        def terms(self, batch, phase):  # type: ignore[no-untyped-def]
            for number, term in enumerate(super().terms(batch, phase)):
                if number == 0:
                    foreign = sum(ref() is not None for ref in alive)
                    held.append((foreign, sum(len(rows) for rows, _ in self._seen)))
                yield term

    watching = Watching(FedInParameters(pairs=8))
    run(watching, model_of("mlp"), Memory(20), classes=NUM_CLASSES, epochs=2, knowledge=Told())
    assert held == [(0, 0)] * 5 + [(0, 4)]
    assert len(alive) == 1 + 6
    held.clear()
    watching = Watching(FedInParameters(pairs=8))
    run(watching, model_of("mlp"), Memory(20), classes=NUM_CLASSES, batch=10, microbatch=3, knowledge=Told())
    assert held == [(0, 0), (0, 3), (0, 6), (0, 8)] * 2


def _uploads(*names: str, width: int = 2, rows: int = 3) -> list[tuple[str, FeaturePairs]]:
    return [
        (name, FeaturePairs(inputs=torch.full((rows, width), float(ord(name))), outputs=torch.ones(rows, 1)))
        for name in names
    ]


def test_a_device_gets_the_pairs_of_others() -> None:
    """a, b and c sent 3 each: b draws from the 6 of a and c; alone in the pool it draws its own."""
    pools = fold_pairs({}, _uploads("a", "b", "c"), most=20)
    (pool,) = pools.values()
    rng = torch.Generator().manual_seed(1)
    drawn = pool.draw("b", 100, rng)
    assert drawn is not None
    assert sorted(drawn.inputs[:, 0].tolist()) == [97.0] * 3 + [99.0] * 3
    some = pool.draw("b", 4, rng)
    assert some is not None
    assert len(some.inputs) == 4
    alone = fold_pairs({}, _uploads("b"), most=20)["2>1"].draw("b", 2, rng)
    assert alone is not None
    assert alone.inputs[:, 0].tolist() == [98.0, 98.0]


def test_the_pool_keeps_the_newest_uploads_of_each_signature() -> None:
    """Three rounds of two uploads, at most 3 stay: d of round 2, and e, f of round 3; another width is another pool."""
    pools: dict[str, PairPool] = {}
    for names in ("ab", "cd", "ef"):
        pools = fold_pairs(pools, [*_uploads(*names), *_uploads(names[0], width=5)], most=3)
    assert sorted(pools) == ["2>1", "5>1"]
    assert sorted(set(pools["2>1"].inputs[:, 0].tolist())) == [100.0, 101.0, 102.0]
    assert sorted(set(pools["5>1"].inputs[:, 0].tolist())) == [97.0, 99.0, 101.0]


def test_the_extractor_ends_with_the_first_unit_that_has_parameters() -> None:
    """An mlp's stem only flattens: its output would be the sample itself."""
    assert extractor(model_of("mlp")) == "block1"
    assert extractor(model_of("resnet10")) == "stem"


def test_a_model_without_a_middle_is_refused() -> None:
    """Two units with parameters: nothing is between extractor and classifier."""
    with pytest.raises(InputError, match="this model has 2 of them; take one with three or more"):
        check(identity_model())


def test_pairs_of_another_signature_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """They belong to another architecture: FedProx alone, and a line in the log."""
    results = []
    for used, knowledge in ((client(), (PAIRS,)), (FedProxClient(FedProxParameters(mu=0.1)), ())):
        model = model_of("mlp")
        run(used, model, Memory(8), classes=NUM_CLASSES, knowledge=knowledge)
        results.append(weights(model))
    assert equal(*results)
    assert "pairs 1>1 are not of this model, which has 12>9; left out" in caplog.text


def test_one_device_cannot_change_the_signature_of_a_slice() -> None:
    """b and c send pairs of 2 numbers, a of 5: the pool has b's and c's, a is named and gets theirs."""
    said = [*_uploads("a", width=5), *_uploads("b", "c")]

    def received() -> Any:
        for name, pairs in said:
            yield Header(device=name, num_samples=1), (pairs,)

    teacher, lesson = PairTeacher(FedInParameters()), Lesson(round=1, num_classes=2, seed=1)
    memory = teacher.learn({}, received, lesson, {})
    assert {name.split("/")[1] for name in memory if name.startswith("pairs/")} == {"2>1"}
    (told,) = teacher.tell(memory, cut="full", device="a", lesson=lesson)
    assert told.signature == "2>1"
    (found,) = teacher.left_out({}, received, lesson)
    assert (found.device, found.code) == ("a", "signature")
    assert found.detail == "its pairs are 5>1, those of slice 'full' are 2>1; left out"


def test_each_slice_draws_from_the_pool_of_its_own_signature() -> None:
    """a and b are of one slice, with 2 numbers; c and d of another, with 5."""
    said = [*(("full", *one) for one in _uploads("a", "b")), *(("half", *one) for one in _uploads("c", "d", width=5))]

    def received() -> Any:
        for cut, name, pairs in said:
            yield Header(device=name, num_samples=1, slice=cut), (pairs,)

    teacher, lesson = PairTeacher(FedInParameters()), Lesson(round=1, num_classes=2, seed=1)
    memory = teacher.learn({}, received, lesson, {})
    for cut, device, other, signature in (("full", "a", "b", "2>1"), ("half", "c", "d", "5>1")):
        (told,) = teacher.tell(memory, cut=cut, device=device, lesson=lesson)
        assert told.signature == signature
        assert set(told.inputs.flatten().tolist()) == {float(ord(other))}
