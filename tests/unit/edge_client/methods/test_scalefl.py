"""ScaleFL: the losses of exits by hand, where exits lie on the server, and that they are trained together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import equal
from federation import Federation, Shifted
from linear import TensorFrozen, TensorState
from torch import Tensor, nn

from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.base import Batch, Header, Job
from edge_client.methods.scalefl import exit_losses
from edge_client.models import registry as models
from edge_client.models.contract import Model
from edge_client.models.slicing import parse
from edge_client.models.user_module import parts
from edge_client.training.loop import generator

SHAPE = (1, 8, 8)
RUNGS = ("full", "exit:6-width:1/2", "exit:3-width:1/2")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "preresnet20": ("preresnet20", {"width": 4, "track_running_stats": True}),
    "resnet18": ("resnet18", {"base_width": 4, "small_stem": True}),
    "mlp": ("mlp", {"hidden": [12, 6, 20, 8, 8, 10, 4]}),
    "vit": ("vit-t-16", {"patch": 4, "width": 8, "heads": 2, "depth": 7}),
}


def build(kind: str, cut: str = "full") -> Model:
    torch.manual_seed(1)
    name, options = KINDS[kind]
    return models.build(name, input_shape=SHAPE, num_classes=3, options=options, spec=parse(cut))


def logits_with_losses(*losses: float) -> list[Tensor]:
    """Two classes, label 0: CE of (0, a) is log(1 + e^a)."""
    return [torch.tensor([[0.0, float(torch.log(torch.expm1(torch.tensor(loss))))]]) for loss in losses]


def test_later_exits_weigh_more() -> None:
    """Losses 3, 2, 1 of exits 1, 2, 3: (1 * 3 + 2 * 2 + 3 * 1)/6 = 1.6667; one exit: its own."""
    label = torch.tensor([0])
    assert exit_losses(logits_with_losses(3, 2, 1), label, 0.0, 3.0).tolist() == pytest.approx([10 / 6], rel=1e-5)
    assert exit_losses(logits_with_losses(2.5), label, 1.0, 3.0).tolist() == pytest.approx([2.5], rel=1e-5)


def test_the_last_exit_teaches_the_others_and_learns_nothing_from_them() -> None:
    """z_1 = (0, 0), z_2 = (3, 0), T = 3, y = 0: KL(softmax(1, 0) || 1/2) = log 2 - H(.731059) = .110944.

    L_1 = log 2 + .5 * 9 * .110944 = 1.192395, L_2 = log(1 + e^-3) = .048587: (L_1 + 2 L_2)/3 = .429857.
    """
    first, last = torch.zeros(1, 2, requires_grad=True), torch.tensor([[3.0, 0.0]], requires_grad=True)
    label = torch.tensor([0])
    loss = exit_losses([first, last], label, 0.5, 3.0)
    assert loss.tolist() == pytest.approx([0.429857], abs=1e-5)
    loss.sum().backward()
    plain = last.detach().clone().requires_grad_()
    (torch.nn.functional.cross_entropy(plain, label) * 2 / 3).backward()
    assert last.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(last.grad, plain.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_ends_at_an_exit_that_lies_beside_the_model(kind: str) -> None:
    """What a device gets has exactly the tensors and shapes of the network that it builds, and of earlier exits."""
    method, whole = registry.get("scalefl", {}, RUNGS), build(kind)
    state = {f"model/{name}": value for name, value in whole.state_dict().items()}
    state |= {f"extra/{name}": value for name, value in method.travel.extra_tensors(whole).items()}
    for cut, early in ((RUNGS[0], [3, 6]), (RUNGS[1], [3]), (RUNGS[2], [])):
        places = method.slices.places(whole, cut, list(state))
        model = build(kind, cut)
        shapes = {
            name: tuple(state[place.name].shape if place.where is None else map(len, place.where))
            for name, place in places.items()
        }
        own = {f"model/{name}": tuple(value.shape) for name, value in model.state_dict().items()}
        assert method.travel.extra_of_slice is not None
        extra = method.travel.extra_of_slice(model, cut)
        assert sorted({int(name.split("/")[1]) for name in extra}) == early
        assert shapes == own | {f"extra/{name}": tuple(value.shape) for name, value in extra.items()}
    head = [
        place.name for name, place in method.slices.places(whole, RUNGS[2], list(state)).items() if "/head." in name
    ]
    assert head
    assert all(name.startswith("extra/exit/3/") for name in head)


def fleet(kind: str, rungs: tuple[str, ...] = RUNGS, name: str = "scalefl", rounds: int = 1, **parameters: Any) -> Any:
    data = {device: Shifted(16, seed, SHAPE) for seed, device in enumerate(("a", "b", "c"))}
    made = Federation(
        method=name,
        parameters=parameters,
        build=lambda: build(kind),
        build_slice=lambda cut: build(kind, cut),
        data=data,
        slices=dict(zip(data, rungs, strict=False)),
        rungs=rungs,
        settings={"microbatch": 4},
    )
    for _ in range(rounds):
        made.round()
    return made


@pytest.mark.parametrize("kind", ["preresnet20", "mlp"])
def test_each_exit_is_the_mean_of_those_that_have_it(kind: str) -> None:
    """Exit 3 at half width: all three devices; its other half: the largest alone; uniform weights."""
    made = fleet(kind)
    weight = next(n for n in made.server if n.startswith("extra/exit/3/") and n.endswith("weight") and "norm" not in n)
    sent = {header.device: tensors[weight] for header, tensors in made.updates}
    half = sent["c"].shape[1]
    mean = torch.stack([sent["a"][:, :half], sent["b"], sent["c"]]).double().mean(dim=0).float()
    assert torch.equal(made.server[weight][:, :half], mean)
    assert torch.equal(made.server[weight][:, half:], sent["a"][:, half:])
    last = next(n for n in made.server if n.startswith("head") and n.endswith("weight") and "norm" not in n)
    assert [header.device for header, tensors in made.updates if last in tensors] == ["a"]


@pytest.mark.parametrize(("parameters", "expected"), [({}, 3.0), ({"uniform": False}, 4.6)])
def test_all_devices_count_the_same(parameters: dict[str, Any], expected: float) -> None:
    """1 and 5 of devices with 10 and 90 samples: 3; by their samples (10 + 450) / 100 = 4.6."""
    updates = [
        (Header(device=name, num_samples=n), {"w": torch.tensor([value])})
        for name, n, value in (("a", 10, 1.0), ("b", 90, 5.0))
    ]
    server = registry.get("scalefl", parameters, RUNGS).server
    ((_, new),) = server.fold(TensorState({"w": torch.zeros(1)}), TensorFrozen(updates), round=1)
    assert new.item() == pytest.approx(expected)


def test_exits_are_trained_by_devices_that_go_further() -> None:
    """Without exits (one level) or with: other weights of the same device; and distillation changes them again."""
    alone = fleet("mlp", ("full",))
    together, taught = fleet("mlp", rounds=1), fleet("mlp", rounds=1, gamma=1.0, warm_up=0)
    of_a = [made.updates[0][1] for made in (alone, together, taught)]
    assert not torch.equal(of_a[0]["block1.linear.weight"], of_a[1]["block1.linear.weight"])
    assert not torch.equal(of_a[1]["block1.linear.weight"], of_a[2]["block1.linear.weight"])
    assert not torch.equal(of_a[1]["extra/exit/3/weight"], of_a[2]["extra/exit/3/weight"])


def loss_in_round(number: int, **parameters: Any) -> float:
    method, model = registry.get("scalefl", {"gamma": 1.0, **parameters}, RUNGS), build("mlp")
    client = method.client()
    client.begin(
        Job(
            model=model,
            round=number,
            num_rounds=8,
            epochs=1,
            learning_rate=0.1,
            class_counts=(1, 1, 1),
            rng=lambda purpose: generator(1, purpose),
            extra={name: torch.ones_like(value) for name, value in method.travel.extra_tensors(model).items()},
        )
    )
    y = torch.tensor([0, 1])
    batch = Batch(x=torch.ones(2, *SHAPE), y=y, num_whole=2, whole_y=y, first=True)
    (term,) = client.terms(batch, client.phases()[0])
    assert term.each is not None
    return float(term.each.sum().detach())


def test_distillation_begins_after_a_quarter_of_the_rounds() -> None:
    """Of 8 rounds: from the third on."""
    assert loss_in_round(2) == loss_in_round(2, gamma=0.0)
    assert loss_in_round(3) > loss_in_round(3, gamma=0.0)
    assert loss_in_round(2, warm_up=0.0) == loss_in_round(3)


@pytest.mark.parametrize("name", ["scalefl", "inco+scalefl"])
def test_with_one_level_it_is_fedavg_bit_for_bit(name: str) -> None:
    """No early exits; devices weighted by their samples."""
    off = {"rule": "off"} if name != "scalefl" else {}
    plain = fleet("preresnet20", ("full",), "fedavg", 2).server
    assert equal(fleet("preresnet20", ("full",), name, 2, uniform=False, **off).server, plain)


def test_what_it_cannot_serve_is_said_before_the_run() -> None:
    """Levels that do not lie inside one another, exits that the model has not, a model without exits, no shapes."""
    wrong = [("exit:3", "full"), ("full", "exit:3", "exit:6"), ("full", "exit:3-width:1/2", "exit:2")]
    for rungs in wrong:
        with pytest.raises(InputError, match=r"'scalefl' needs each inside the one before it"):
            registry.get("scalefl", {}, rungs).check(build("mlp"))
    with pytest.raises(InputError, match="expected an exit behind one of 7 blocks"):
        registry.get("scalefl", {}, ("full", "exit:9")).check(build("mlp"))
    with pytest.raises(InputError, match="this model has no exits"):
        models.build("small-cnn", input_shape=(1, 28, 28), num_classes=3, options={}, spec=parse("exit:1"))
    lazy = parts(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.LazyLinear(2)), None)
    with pytest.raises(InputError, match="'scalefl' needs the shape of a sample on the server"):
        registry.get("scalefl", {}, ("full", "exit:1")).check(lazy)
    registry.get("scalefl", {}, RUNGS).check(build("resnet18"))


def test_exits_are_scalefls_alone() -> None:
    """Other methods have no classifier there."""
    said = registry.slicing("fedavg", {})
    with pytest.raises(InputError, match="'fedavg' trains slices of depth or layers or width, got 'exit:3'"):
        said.architectures(["full", "exit:3"], "fedavg")
