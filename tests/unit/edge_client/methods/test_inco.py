"""InCo: the spec's examples by hand, another implementation kernel by kernel, and what must stay as it was."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from depth import NUM_CLASSES, SHAPE, model_of
from federation import Federation, Shifted
from linear import TensorFrozen, TensorState
from torch import Tensor, nn

from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.base import Header
from edge_client.models import registry as models
from edge_client.models import slicing
from edge_client.models.anchors import anchors
from edge_client.models.contract import Model
from edge_client.models.user_module import adopt, parts
from edge_client.params import IndexMap

RULES = ["released", "theorem", "text", "no_opt", "no_norm", "sum"]
PAIR = {"anchors": (("0", "k"),)}  # the first tensor is the anchor of the second
BASES = ["fedavg", "fedprox", "scaffold", "fednova", "moon", "fedper"]


def fold(
    changes: dict[str, Tensor], notes: dict[str, Any], *, old: float = 0.0, **parameters: Any
) -> dict[str, Tensor]:
    """What becomes of mean updates; each is that of one device, from weights that are all `old`."""
    state = TensorState({name: torch.full_like(change, old) for name, change in changes.items()}, notes)
    update = {name: change + old for name, change in changes.items()}
    frozen = TensorFrozen([(Header(device="a", num_samples=5, steps=1), update)])
    folded = registry.get("inco", parameters).server.fold(state, frozen, round=1)
    return {name: value - old for name, value in folded}


def pair(anchor: Sequence[float], target: Sequence[float], **parameters: Any) -> list[float]:
    """The target's new update; vectors are taken whole."""
    folded = fold({"0": torch.tensor(anchor), "k": torch.tensor(target)}, PAIR, clip=0, **parameters)
    assert folded["0"].tolist() == pytest.approx(list(anchor))
    return list(folded["k"].tolist())


@pytest.mark.parametrize(
    ("anchor", "target", "expected"),
    [
        (
            (1.0, 0.0),
            (-0.6, 0.8),
            {"theorem": (0, 0.8), "text": (0, 0.8), "released": (0, 0.8), "no_opt": (0.4, 0.8)},
        ),
        (
            (1.0, 0.0),
            (0.6, 0.8),
            {"theorem": (0.6, 0.8), "text": (0, 0.8), "released": (1.2, 0.8), "no_opt": (1.6, 0.8)},
        ),
        (
            (2.0, 0.0),
            (3.0, 4.0),
            {"theorem": (2.1, 2.8), "text": (0, 2.8), "released": (7.35, 2.8), "no_opt": (5.6, 2.8)},
        ),
        ((2.0, 0.0), (-3.0, 4.0), {"theorem": (0, 2.8), "text": (0, 2.8), "released": (3.15, 2.8)}),
        ((2.0, 0.0), (60.0, 80.0), {"released": (285.6, 40.8)}),
        ((2.0, 0.0), (3.0, 4.0), {"no_norm": (6.0, 4.0), "sum": (5.0, 4.0), "off": (3.0, 4.0)}),
    ],
)
def test_vectors_by_hand(anchor: Any, target: Any, expected: dict[str, tuple[float, float]]) -> None:
    """beta = <h_0, h_k>, scale = mean of the norms. Third row: h_k = (.6, .8), scale 3.5, theta = 6/4 = 1.5, so
    released (.6 + 1.5, .8) * 3.5; no_norm (3 + 1.5 * 2, 4). Fifth: theta = 120/4 = 30, at most 5: (.6 + 5, .8) * 51.
    """
    for rule, result in expected.items():
        assert pair(anchor, target, rule=rule) == pytest.approx(result, rel=1e-5, abs=1e-6), rule


def test_theta_has_the_limit_that_is_set() -> None:
    """theta = 30, at most 7: (.6 + 7) * 51 = 387.6."""
    assert pair((2.0, 0.0), (60.0, 80.0), theta_max=7) == pytest.approx([387.6, 40.8], rel=1e-5)


def test_every_element_is_clipped() -> None:
    """(1.2, .8) to .1; below the limit nothing happens: (.012, .008), theta = .00006/(.0001 + 1e-7) = .5994."""
    near = {"0": torch.tensor([1.0, 0.0]), "k": torch.tensor([0.6, 0.8])}
    assert fold(near, PAIR)["k"].tolist() == pytest.approx([0.1, 0.1])
    assert fold(near, PAIR, rule="sum", clip=0.9)["k"].tolist() == pytest.approx([0.9, 0.8])
    small = {name: value / 100 for name, value in near.items()}
    assert fold(small, PAIR)["k"].tolist() == pytest.approx([0.011994, 0.008], rel=1e-4)


@pytest.mark.parametrize(
    ("granularity", "expected"),
    [("kernel", [[0.0, 1.0], [0.0, -0.75]]), ("tensor", [[0.3265, 1.2906], [0.0, -0.6376]])],
)
def test_each_kernel_has_a_theta_of_its_own(granularity: str, expected: list[list[float]]) -> None:
    """Kernel 1: orthogonal, equal norms: unchanged. Kernel 2: theta = 2/4, scale 1.5: (0, -1 + .5) * 1.5.

    Whole: |<g_0, g_k>| = 2, theta = 2/5, norms sqrt 2 and sqrt 5, scale 1.8251: g_k/sqrt 2 + .4 g_0/sqrt 5.
    """
    anchor, target = torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]]]]), torch.tensor([[[[0.0, 1.0]], [[0.0, -1.0]]]])
    folded = fold({"0": anchor, "k": target}, PAIR, granularity=granularity, clip=0)["k"]
    torch.testing.assert_close(folded[0, :, 0], torch.tensor(expected), rtol=1e-4, atol=1e-4)


def by_kernel(anchor: np.ndarray, target: np.ndarray, rule: str, clip: float) -> np.ndarray:
    """Another implementation: float64, one kernel after another, as the paper and the authors' code write it."""
    if not anchor.any() or not target.any():
        return target
    norm_0, norm_k = np.sqrt((anchor**2).sum()), np.sqrt((target**2).sum())
    scale = (norm_0 + norm_k) / 2
    if rule in ("theorem", "text"):
        h_0, h_k = anchor / norm_0, target / norm_k
        beta = (h_0 * h_k).sum()
        result = (h_k if rule == "theorem" and beta >= 0 else h_k - beta * h_0) * scale
    else:
        h_0, h_k = anchor / (norm_0 + 1e-7), target / (norm_k + 1e-7)
        theta = min(abs((anchor * target).sum()) / ((anchor**2).sum() + 1e-7), 5.0)
        result = {
            "released": (h_k + theta * h_0) * scale,
            "no_opt": (h_k + h_0) * scale,
            "no_norm": target + theta * anchor,
            "sum": target + anchor,
        }[rule]
    return np.clip(result, -clip, clip) if clip else result


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", [0.0, 0.02])
@pytest.mark.parametrize("shape", [(6, 5, 3, 3), (4, 3, 5), (7, 4)], ids=str)
def test_random_tensors_as_another_implementation_has_them(rule: str, clip: float, shape: tuple[int, ...]) -> None:
    """Two targets of one anchor, each from the mean updates alone; matrices whole; some kernels untouched."""
    rng = np.random.default_rng(sum(shape))
    anchor, one, two = (rng.normal(size=shape) * size for size in (0.02, 0.01, 0.1))
    anchor[0], one[1], two[:2] = 0, 0, 0
    tensors = {name: torch.tensor(value) for name, value in (("0", anchor), ("1", one), ("2", two))}
    folded = fold(tensors, {"anchors": (("0", "1", "2"),)}, rule=rule, clip=clip, old=1.0)
    for name, target in (("1", one), ("2", two)):
        if len(shape) == 2:
            expected = by_kernel(anchor, target, rule, clip)
        else:
            rows = zip(anchor.reshape(-1, *shape[2:]), target.reshape(-1, *shape[2:]), strict=True)
            expected = np.stack([by_kernel(*kernel, rule, clip) for kernel in rows]).reshape(shape)
        np.testing.assert_allclose(folded[name].numpy(), expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_what_nobody_trained_stays_and_is_not_clipped(rule: str) -> None:
    """Kernels: target untouched, anchor untouched (its target is above the clip), both untouched."""
    anchor, target = torch.zeros(3, 1, 1, 2), torch.zeros(3, 1, 1, 2)
    anchor[0] = 0.5
    target[1] = 7.0
    folded = fold({"0": anchor, "k": target}, PAIR, rule=rule, old=0.25)
    assert torch.equal(folded["k"], target)
    assert torch.equal(folded["0"], anchor)


@pytest.mark.parametrize("granularity", ["kernel", "tensor"])
def test_kernels_that_no_device_covers_stay_zero(granularity: str) -> None:
    """The target is covered in its first output channel, the anchor in both: nothing of it leaks into the second."""

    class Narrow(TensorFrozen):
        def column(self, name: str) -> Iterator[tuple[Header, Tensor, IndexMap | None]]:
            place = None if name == "0" else (torch.tensor([0]), torch.arange(2), torch.arange(3))
            for header, tensors in self.updates:
                yield header, tensors[name], place

    rng = torch.Generator().manual_seed(1)
    old = {name: torch.randn(2, 2, 3, generator=rng) for name in ("0", "k")}
    update = {"0": old["0"] + 0.01, "k": old["k"][:1] + torch.randn(1, 2, 3, generator=rng)}
    frozen = Narrow([(Header(device="a", num_samples=1), update)])
    server = registry.get("inco", {"granularity": granularity}).server
    folded = dict(server.fold(TensorState(old, PAIR), frozen, round=1))
    assert torch.equal(folded["k"][1], old["k"][1])
    assert not torch.equal(folded["k"][0], update["k"][0])


def test_a_target_or_an_anchor_that_no_update_has_changes_nothing() -> None:
    """Only the anchor was sent: the target stays. Only the target: its plain mean, above the clip."""
    old = {"0": torch.ones(2), "k": torch.ones(2)}
    for sent in ({"0": torch.zeros(2)}, {"k": torch.full((2,), 9.0)}):
        frozen = TensorFrozen([(Header(device="a", num_samples=1), sent)])
        folded = dict(registry.get("inco", {}).server.fold(TensorState(old, PAIR), frozen, round=1))
        assert all(torch.equal(folded[name], value) for name, value in (old | sent).items())


def two_devices(**parameters: Any) -> dict[str, Tensor]:
    """From zero, n = 1 and 3: a weight, a BatchNorm, its counter and a tensor of the method."""
    old = {"w": torch.zeros(1), "bn.running_var": torch.zeros(1), "bn.num_batches_tracked": torch.tensor(0)}
    old["extra/c"] = torch.zeros(1)
    updates = [
        (Header(device=str(n), num_samples=n), {name: torch.full_like(value, n) for name, value in old.items()})
        for n in (1, 3)
    ]
    made = registry.get("inco", {"rule": "off", **parameters})
    return dict(made.server.fold(TensorState(old), TensorFrozen(updates), round=1))


def test_devices_count_as_underneath_or_all_the_same() -> None:
    """(1 * 1 + 3 * 3)/4 = 2.5, and (1 + 3)/2 = 2, of weights and buffers; counters are the largest either way."""
    for weights, mean in (("samples", 2.5), ("uniform", 2.0)):
        folded = two_devices(weights=weights)
        assert [float(value) for value in folded.values()] == [mean, mean, 3, mean]
    idle = TensorFrozen([(Header(device="a", num_samples=0), {"w": torch.ones(1)})])
    server = registry.get("inco", {"rule": "off", "weights": "uniform"}).server
    assert dict(server.fold(TensorState({"w": torch.zeros(1)}), idle, round=1))["w"].tolist() == [0.0]


def test_a_server_learning_rate_moves_parameters_and_nothing_else() -> None:
    """A fifth of 2.5; buffers, counters and the method's own as without it."""
    assert [float(value) for value in two_devices(server_lr=0.2).values()] == pytest.approx([0.5, 2.5, 3, 2.5])


def test_the_rule_gets_the_step_times_the_learning_rate() -> None:
    """(4, 0) and (6, 8), halved, are (2, 0) and (3, 4): (7.35, 2.8), and the clip comes last."""
    changes = {"0": torch.tensor([4.0, 0.0]), "k": torch.tensor([6.0, 8.0])}
    folded = fold(changes, PAIR, server_lr=0.5, clip=3)
    assert folded["0"].tolist() == pytest.approx([2.0, 0.0])
    assert folded["k"].tolist() == pytest.approx([3.0, 2.8], rel=1e-5)


def one_round(name: str, kind: str, **parameters: Any) -> dict[str, Tensor]:
    """Two devices; FedNova's make 2 and 3 steps."""
    data = {device: Shifted(n, n) for device, n in (("a", 10), ("b", 24))}
    made = Federation(method=name, parameters=parameters, build=lambda: model_of(kind), data=data)
    made.round()
    return made.server


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["preresnet20, running", "vit"])
def test_over_any_method_the_targets_change_and_nothing_else(base: str, kind: str) -> None:
    """After one round: the model's later weights of a shape; anchors, buffers and the method's own are the same."""
    changed, plain = one_round(f"inco+{base}", kind), one_round(base, kind)
    assert changed.keys() == plain.keys()
    assert {name for name in plain if not torch.equal(changed[name], plain[name])} == {*anchors(model_of(kind))}


@pytest.mark.parametrize("base", ["heterofl", "fedrolex", "fedavg"])
@pytest.mark.parametrize("granularity", ["kernel", "tensor"])
def test_over_narrow_slices_what_nobody_has_keeps_its_bits(base: str, granularity: str) -> None:
    """Two devices with the first half of the channels: the targets change there, and nothing does elsewhere."""

    def build(cut: str = "full") -> Model:
        torch.manual_seed(1)
        options = {"width": 4}
        return models.build("preresnet20", input_shape=SHAPE, num_classes=3, options=options, spec=slicing.parse(cut))

    servers = []
    for name, parameters in ((base, {}), (f"inco+{base}", {"granularity": granularity})):
        slices = {"a": "width:1/2", "b": "width:1/2"}
        data = {device: Shifted(10, n) for n, device in enumerate(slices)}
        made = Federation(method=name, parameters=parameters, build=build, build_slice=build, data=data, slices=slices)
        made.round()
        servers.append(made.server)
    plain, changed = servers
    assert {name for name in plain if not torch.equal(changed[name], plain[name])} == {*anchors(build())}
    for name, place in slicing.index_map(build(), slicing.parse("width:1/2")).items():
        outside = torch.ones_like(plain[name], dtype=torch.bool)
        outside[torch.meshgrid(*place, indexing="ij") if place is not None else ...] = False
        assert torch.equal(changed[name][outside], build().state_dict()[name][outside])


def test_it_is_the_mean_update_of_the_method_underneath_that_is_changed() -> None:
    """By the other implementation, from FedAvg's model, for every target of a ResNet."""
    first = model_of("preresnet20").state_dict()
    plain, changed = one_round("fedavg", "preresnet20"), one_round("inco", "preresnet20")
    for target, anchor in anchors(model_of("preresnet20")).items():
        g_k, g_0 = ((plain[name] - first[name]).flatten(0, 1).double().numpy() for name in (target, anchor))
        expected = np.stack([by_kernel(*pair, "released", 0.1) for pair in zip(g_0, g_k, strict=True)])
        moved = (changed[target] - first[target]).flatten(0, 1).numpy()
        np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6)


def test_other_rules_give_other_models() -> None:
    """All seven, two granularities."""
    found = [one_round("inco", "preresnet20", rule=rule)["block3.conv2.weight"] for rule in [*RULES, "off"]]
    found.append(one_round("inco", "preresnet20", granularity="tensor")["block3.conv2.weight"])
    assert len({value.numpy().tobytes() for value in found}) == 8


def test_anchors_are_those_of_the_model() -> None:
    """ResNet: second convolution of a stage's first block, for the convolutions of its later blocks; not stage 1 of
    one block, not the shortcuts. ViT: the first norm's weight of a block, for its second's.
    """
    built = models.build("resnet14", input_shape=SHAPE, num_classes=NUM_CLASSES, options={"base_width": 2})
    assert noted(built) == {
        f"stage{stage}_block2.conv{number}.weight": f"stage{stage}_block1.conv2.weight"
        for stage in (3, 4)
        for number in (1, 2)
    }
    vit = model_of("vit")
    assert noted(vit) == {f"block{n}.norm2.weight": f"block{n}.norm1.weight" for n in range(1, 5)}


def noted(model: Model) -> dict[str, str]:
    groups = registry.get("inco", {}).travel.notes(model)["anchors"]
    return {target: anchor for anchor, *targets in groups for target in targets}


class Block(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


def test_a_model_of_the_users_own_has_anchors_inside_its_units() -> None:
    """Each unit is a stage."""
    model = adopt(nn.Sequential(nn.Flatten(), Block(), Block(), nn.Linear(3, 2)), None, input_shape=(3,), num_classes=2)
    assert noted(model) == {"1.second.weight": "1.first.weight", "2.second.weight": "2.first.weight"}
    registry.get("inco", {}).check(model)


def test_a_model_without_equal_layers_is_refused_before_the_run() -> None:
    """It would be the method underneath, under another name; one that says so (`off`) is not refused."""
    for name in ("inco", "inco+scaffold"):
        with pytest.raises(InputError, match=r"this model has none; use a deeper one .*, or the method underneath"):
            registry.get(name, {}).check(model_of("mlp"))
    registry.get("inco", {"rule": "off"}).check(model_of("mlp"))
    single = adopt(nn.Sequential(Block()), None, input_shape=(3,), num_classes=3)
    with pytest.raises(InputError, match="'moon' compares what the model's classifier gets"):  # asked as well
        registry.get("inco+moon", {}).check(single)


def test_a_model_whose_shapes_only_devices_know_is_refused() -> None:
    """Stages and units are unknown on the server then."""
    with pytest.raises(InputError, match="needs the shape of a sample on the server"):
        registry.get("inco", {}).check(parts(nn.Sequential(nn.Flatten(), Block(), nn.LazyLinear(2)), None))


def test_a_state_of_fewer_layers_has_the_anchors_that_are_in_it() -> None:
    """Where each slice is a model of its own, the notes are the whole model's."""
    notes = {"anchors": (("0", "k", "absent"), ("gone", "1"))}
    folded = fold({"0": torch.ones(2), "k": torch.ones(2), "1": torch.ones(2)}, notes, rule="sum", clip=0)
    assert [value.tolist() for value in folded.values()] == [[1, 1], [2, 2], [1, 1]]


def test_more_names_than_a_container_can_note_are_refused() -> None:
    """101 layers of one shape with names of 2 + 120 + 7 characters each: 101 (129 + 3) = 13,332."""
    name = "x" * 117
    layers = nn.Sequential(OrderedDict((f"{name}{n}", nn.Linear(2, 2, bias=False)) for n in range(100, 201)))
    model = adopt(nn.Sequential(nn.Flatten(), layers, nn.Linear(2, 2)), None, input_shape=(2,), num_classes=2)
    with pytest.raises(InputError, match=r"the 100 layers .* have 13332 characters, at most 12000 can be noted"):
        registry.get("inco", {}).check(model)


def test_layers_defined_in_another_order_than_they_run_are_refused() -> None:
    """The fold meets tensors in the order in which they are defined."""
    model = model_of("vit")
    model.anchor_names = {"block1.norm1.weight": "block1.norm2.weight"}
    with pytest.raises(InputError, match=r"'block1\.norm2\.weight' runs before .* and is defined after it"):
        registry.get("inco", {}).check(model)


def test_over_fedepth_devices_train_as_fedepth_tells() -> None:
    """Groups and skipped blocks come from the part that decides, wherever it stands in the name."""
    assert registry.plan_rules("inco+fedepth", {}) == registry.plan_rules("fedepth", {})
    assert registry.plan_rules("inco+m-fedepth+fedprox", {}) == registry.plan_rules("m-fedepth+fedprox", {})
    assert registry.get("inco+m-fedepth", {}).travel.extra_tensors(model_of("vit")).keys()


def test_there_is_nothing_to_change_over_local() -> None:
    """Not listed, and the refusal says why."""
    assert "inco+local" not in registry.names()
    with pytest.raises(InputError, match="'local' cannot be under 'inco': it shares nothing"):
        registry.validate("inco+local", {})


def test_parameters_name_their_range() -> None:
    """Before a run starts."""
    with pytest.raises(InputError, match=r"clip: expected 0 to 1000, got -1\.0; g_k in the paper: largest element"):
        registry.validate("inco", {"clip": -1})
    with pytest.raises(InputError, match="'inco': theta-max: expected 0 to 1000"):  # as it stands in a file
        registry.validate("inco", {"theta_max": -1})
    with pytest.raises(InputError, match="rule"):
        registry.validate("inco", {"rule": "best"})
