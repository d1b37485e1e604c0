"""HeteroFL and FedRolex: which channels, what is scaled and masked, and whose elements are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import NUM_CLASSES, SHAPE, equal
from federation import Federation, Shifted
from linear import TensorFrozen, TensorState
from torch import Tensor

from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.base import Batch, Client, Header, Job, Phase
from edge_client.methods.slices import Turn
from edge_client.models import registry as models
from edge_client.models.contract import Model
from edge_client.models.slicing import index_map, parse
from edge_client.training.loop import generator

OPTIONS = {"hidden": [4, 6]}


def _mlp(cut: str = "full") -> Model:
    torch.manual_seed(1)
    return models.build("mlp", input_shape=SHAPE, num_classes=NUM_CLASSES, options=OPTIONS, spec=parse(cut))


def _fleet(method: str, slices: dict[str, str], rounds: int = 1, **parameters: Any) -> Federation:
    data = {name: Shifted(16, seed) for seed, name in enumerate(("a", "b", "c"))}
    made = Federation(method=method, parameters=parameters, build=_mlp, build_slice=_mlp, data=data, slices=slices)
    for _ in range(rounds):
        made.round()
    return made


def _client(
    cut: str, counts: tuple[int, ...] = (1, 1, 1), class_min_count: int | None = 1, **parameters: Any
) -> tuple[Client, Model]:
    model = _mlp(cut)
    client = registry.get("heterofl", parameters).client()
    job = Job(
        model=model,
        round=1,
        num_rounds=1,
        epochs=1,
        learning_rate=0.1,
        class_counts=counts,
        class_min_count=class_min_count,
        slice=cut,
        rng=lambda purpose: generator(1, purpose),
    )
    client.begin(job)
    return client, model


def _loss(client: Client, x: Tensor, y: Tensor) -> float:
    phase = Phase(name="train", trainable=frozenset())
    batch = Batch(x=x, y=y, num_whole=len(y), whole_y=y, first=True)
    (term,) = client.terms(batch, phase)
    assert term.each is not None
    return float(term.each.detach().mean())


def test_absent_classes_have_logit_zero() -> None:
    """Logits (1, 2, 3), label 0, class 2 absent: -log(e / (e + e^2 + 1)) = 1.407606; with all classes 2.407606."""
    for counts, expected in (((1, 1, 0), 1.407606), ((1, 1, 1), 2.407606)):
        client, model = _client("full", counts, mask=True)
        with torch.no_grad():
            tensors = dict(model.named_parameters())
            tensors["head.weight"].zero_()
            tensors["head.bias"].copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert _loss(client, torch.zeros(1, *SHAPE), torch.tensor([0])) == pytest.approx(expected, abs=1e-6)


def test_a_device_that_may_not_tell_its_classes_has_no_mask() -> None:
    """Class 2 is absent: with a mask its logit 3 would be 0, and 1.407606 the loss; without one it is 2.407606.

    A mask alone would tell, too: the rows of masked classes do not move. Where classes are told, only those with enough
    samples are; the loss has all that are there.
    """
    for class_min_count, expected, told in (
        (None, 2.407606, set()),
        (32, 1.407606, {"class/0"}),
        (1, 1.407606, None),
    ):
        client, model = _client("full", (40, 5, 0), class_min_count, mask=True)
        with torch.no_grad():
            tensors = dict(model.named_parameters())
            tensors["head.weight"].zero_()
            tensors["head.bias"].copy_(torch.tensor([1.0, 2.0, 3.0]))
        assert _loss(client, torch.zeros(1, *SHAPE), torch.tensor([0])) == pytest.approx(expected, abs=1e-6)
        assert {*client.end().scalars} == ({"class/0", "class/1"} if told is None else told)


def test_a_narrow_model_without_normalisation_is_scaled_while_it_trains() -> None:
    """Half of the channels: both hidden layers put out twice as much, the classifier does not; in evaluation as is."""
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(2))
    _, scaled = _client("width:1/2")
    plain = _mlp("width:1/2")
    assert torch.equal(plain(x), scaled.eval()(x))
    scaled.train()
    with torch.no_grad():
        layers = [layer for layer in plain.modules() if isinstance(layer, torch.nn.Linear)]
        h = x.flatten(1)
        for layer in layers[:-1]:
            h = torch.relu(layer(h) * 2)
        expected = layers[-1](h)
    assert torch.allclose(scaled(x), expected, atol=1e-6)


def test_without_the_scaler_and_in_a_wide_model_nothing_is_scaled() -> None:
    """The same bits as the plain model in training."""
    x = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(2))
    for cut, parameters in (("width:1/2", {"scaler": False}), ("full", {})):
        _, model = _client(cut, **parameters)
        assert torch.equal(model.train()(x), _mlp(cut).train()(x))


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
@pytest.mark.parametrize(("parameters", "first"), [({}, 3.0), ({"uniform": False}, 4.6)])
def test_the_mean_is_over_those_that_have_an_element(method: str, parameters: dict[str, Any], first: float) -> None:
    """Server [[9, 9], [9, 9]], all of it [[1, 2], [3, 4]], the narrow one [[5]]: uniform mean [[3, 2], [3, 4]].

    By their 10 and 90 samples the first element is (10 + 450) / 100 = 4.6.
    """
    server = registry.get(method, parameters).server
    whole, narrow = Header(device="a", num_samples=10), Header(device="b", num_samples=90, slice="width:1/2")
    frozen = TensorFrozen(
        [(whole, {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}), (narrow, {"w": torch.tensor([[5.0]])})],
        places=[{}, {"w": (torch.tensor([0]), torch.tensor([0]))}],
    )
    ((_, new),) = server.fold(TensorState({"w": torch.full((2, 2), 9.0)}), frozen, round=1)
    assert new.flatten().tolist() == pytest.approx([first, 2.0, 3.0, 4.0])


def test_rows_of_absent_classes_are_not_counted() -> None:
    """Device a has class 0 only, b has 0 and 1: row 0 is the mean of both, row 1 is b's, row 2 stays."""
    model = _mlp()
    method = registry.get("heterofl", {"mask": True})
    notes = method.travel.notes(model)
    assert set(notes["by_class"]) == {"head.weight", "head.bias"}
    a = Header(device="a", num_samples=1, scalars={"class/0": 1.0})
    b = Header(device="b", num_samples=1, scalars={"class/0": 1.0, "class/1": 1.0})
    updates = [(a, {"head.bias": torch.tensor([1.0, 1.0, 1.0])}), (b, {"head.bias": torch.tensor([3.0, 3.0, 3.0])})]
    state = TensorState({"head.bias": torch.tensor([9.0, 9.0, 9.0])}, notes=notes)
    ((_, new),) = method.server.fold(state, TensorFrozen(updates), round=1)
    assert new.tolist() == [2.0, 3.0, 9.0]


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_what_nobody_trained_keeps_its_bits(method: str) -> None:
    """All devices have the first half of 4 and 6 channels: nothing else of the server's tensors moves."""
    before = _mlp().state_dict()
    after = _fleet(method, dict.fromkeys("abc", "width:1/2")).weights()
    inside = index_map(_mlp(), parse("width:1/2"))
    for name, value in before.items():
        moved = torch.zeros(value.shape, dtype=torch.bool)
        where = inside[name]
        moved[torch.meshgrid(*where, indexing="ij") if where is not None else ...] = True
        assert torch.equal(after[name][~moved], value[~moved]), name
        assert not torch.equal(after[name][moved], value[moved]), name


def test_the_window_rolls_forward_by_one_in_every_round() -> None:
    """n = 4, r = 1/2, as the paper has it: [0, 1], [1, 2], [2, 3], [3, 0]."""
    turn = registry.slicing("fedrolex", {}).turn
    windows = []
    for round_ in range(1, 5):
        cut = turn("width:1/2", Turn(rungs=("full", "width:1/2"), round=round_, device="a", seed=0))
        (channels,) = index_map(_mlp(), parse(cut))["block1.linear.bias"] or ()
        windows.append(channels.tolist())
    assert windows == [[0, 1], [1, 2], [2, 3], [3, 0]]
    assert turn("full", Turn(rungs=("full",), round=3, device="a", seed=0)) == "full"
    stays = registry.slicing("fedrolex", {"roll": False}).turn
    assert stays("width:1/2", Turn(rungs=("full", "width:1/2"), round=3, device="a", seed=0)) == "width:1/2"


def test_redrawn_slices_are_never_larger_than_the_devices_own() -> None:
    """Three rungs; from the middle one, over many seeds, it and the smallest come about equally often."""
    turn = registry.slicing("heterofl", {"redraw": True}).turn
    rungs = ("full", "width:1/2", "width:1/4")
    found = [turn("width:1/2", Turn(rungs=rungs, round=1, device="a", seed=seed)) for seed in range(100)]
    assert {*found} == {"width:1/2", "width:1/4"}
    assert 40 <= found.count("width:1/4") <= 60


@pytest.mark.parametrize("change", [{"scaler": False}, {"mask": True}, {"uniform": False}])
def test_every_parameter_changes_the_model(change: dict[str, Any]) -> None:
    """Devices of three sizes with different numbers of samples and classes; something is really used."""
    data = {"a": Shifted(16, 0), "b": Shifted(24, 1), "c": Shifted(8, 2)}
    data["c"].labels.fill_(2)
    slices = {"b": "width:1/2", "c": "width:1/4"}
    results = []
    for parameters in ({}, change):
        made = Federation(
            method="heterofl", parameters=parameters, build=_mlp, build_slice=_mlp, data=data, slices=slices
        )
        results.append(made.round())
    assert not equal(*results)


def test_only_widths_are_taken() -> None:
    """Another slice is refused before a run begins, with what would work."""
    slicing = registry.slicing("heterofl", {})
    with pytest.raises(InputError, match=r"'heterofl' trains slices of width, got 'depth:1\.1'; layer-wise sharing"):
        slicing.architectures(["full", "depth:1.1"], "heterofl")
    assert slicing.architectures([], "heterofl") == ("full", "width:1/2", "width:1/4", "width:1/8", "width:1/16")
