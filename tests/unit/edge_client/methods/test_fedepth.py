"""FeDepth: against a loop written from the paper, and the numbers of its worked examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import (
    KINDS,
    NUM_CLASSES,
    SHAPE,
    Memory,
    Snapshots,
    begun,
    equal,
    folder_of,
    halves,
    model_of,
    of_units,
    plan_of,
    trained,
    values,
)
from linear import Samples, TensorFrozen, TensorState, linear_model
from torch import Tensor, nn

from edge_client.errors import InputError, PayloadError
from edge_client.methods import registry
from edge_client.methods.base import Batch, Header, PlanRules
from edge_client.models.contract import Model, from_sequential
from edge_client.models.heads import fit
from edge_client.models.user_module import adopt
from edge_client.planning.paper_cost import block_costs, decompose, full_cost
from edge_client.training.contract import named_parameters
from edge_client.training.loop import generator
from edge_client.training.objectives import divergence

# one group: FedAvg


@pytest.mark.parametrize("name", ["fedepth", "m-fedepth"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grouped", [False, True])
def test_with_one_group_it_is_fedavg_bit_for_bit(name: str, kind: str, grouped: bool) -> None:
    """Without groups in the plan, or with one of all blocks; two epochs with momentum, buffers included."""
    data = Memory()
    plain, deep = model_of(kind), model_of(kind)
    trained(plain, begun(plain, None, name="fedavg", epochs=2), data)
    plan = plan_of([deep.order[1:-1]]) if grouped else plan_of()
    trained(deep, begun(deep, plan, name=name, epochs=2), data)
    assert equal(values(plain), values(deep))


# groups


def _reference(model: Model, groups: Sequence[Sequence[str]], data: Memory, epochs: int) -> None:
    """FeDepth as the paper has it, with torch's own SGD, a new one per group, and no microbatches."""
    blocks = list(model.order[1:-1])
    stem, head = (model.get_submodule(name) for name in (model.order[0], model.order[-1]))
    frozen: list[nn.Module] = []
    for group in groups:
        body = [model.get_submodule(name) for name in group]
        if not frozen:
            body.insert(0, stem)
        trainable = [*body, head]
        for module in (*trainable, *frozen):
            module.train(module not in frozen)
        kept = {name: buffer.clone() for name, buffer in head.named_buffers()}
        optimizer = torch.optim.SGD(
            [param for module in trainable for param in module.parameters()], lr=0.1, momentum=0.9, weight_decay=0.01
        )
        name = f"train {group[-1]}"
        for epoch in range(epochs):
            order = torch.randperm(len(data), generator=generator(5, "shuffle", name, epoch))
            for start in range(0, len(data), 8):
                chosen = order[start : start + 8]
                with torch.no_grad():
                    z = nn.Sequential(*frozen)(data.x[chosen])
                h = nn.Sequential(*body)(z)
                logits = head(h if group[-1] == blocks[-1] else fit(h, model.units[-1].in_shape))
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits, data.labels[chosen]).backward()
                optimizer.step()
        if group[-1] != blocks[-1]:
            for key, buffer in head.named_buffers():
                buffer.copy_(kept[key])
        frozen += body


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_trained_as_the_paper_says(kind: str) -> None:
    """Three groups, two epochs each: frozen ones have no gradient, the head is carried on, weights begin as received.

    An independent loop in float64; agreement to 1e-9 after 6 steps per group with momentum and weight decay.
    """
    model, reference, data = model_of(kind).double(), model_of(kind).double(), Memory()
    data.x = data.x.double()
    blocks = list(model.order[1:-1])
    groups = [blocks[:1], blocks[1:3], blocks[3:]]
    _reference(reference, groups, data, epochs=2)
    done = trained(model, begun(model, plan_of(groups), epochs=2), data)
    assert done.steps == 3 * 2 * 3
    for name, value in values(reference).items():
        torch.testing.assert_close(values(model)[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("microbatch", [8, 3])
@pytest.mark.parametrize("kind", ["mlp", "vit"])
def test_gradients_of_a_group_are_those_of_the_unsplit_computation(kind: str, microbatch: int) -> None:
    """One step with lr 1 in float64, kinds without BN: received - trained is the gradient of the whole net's loss."""
    model, whole, data = model_of(kind).double(), model_of(kind).double(), Memory(8)
    data.x = data.x.double()
    first, second = halves(model)
    plan = plan_of([first, second], microbatch=microbatch)
    client = begun(model, plan)
    phases = client.phases()
    client.phases = lambda: phases[1:]  # the group before it stays as received  # type: ignore[method-assign]
    trained(model, client, data, plan, learning_rate=1.0, momentum=0.0, weight_decay=0.0)
    nn.functional.cross_entropy(whole(data.x), data.labels).backward()
    for name, param in model.named_parameters():
        in_group = name.startswith(tuple(f"{unit}." for unit in (*second, "head")))
        grad = whole.get_parameter(name).grad if in_group else torch.zeros_like(param)
        torch.testing.assert_close(whole.get_parameter(name) - param, grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_does_not_move(kind: str) -> None:
    """Snapshots after every step: the second group waits as received, the first one rests once it is done.

    20 samples in batches of 8: 3 steps per group; momentum and weight decay would move what they still held.
    """
    model, data = model_of(kind), Memory()
    first, second = halves(model)
    snapshots = Snapshots(model)
    trained(model, begun(model, plan_of([first, second])), data, progress=snapshots)
    seen = snapshots.taken
    before, after = (of_units(seen[3], ["stem", *first]), of_units(seen[0], second))
    assert all(equal(of_units(snapshot, second), after) for snapshot in seen[:4])
    assert all(equal(of_units(snapshot, ["stem", *first]), before) for snapshot in seen[3:])
    assert not equal(of_units(seen[0], ["stem", *first]), before)
    assert not equal(of_units(seen[6], second), after)
    assert not equal(of_units(seen[6], ["head"]), of_units(seen[3], ["head"]))
    assert all(param.requires_grad and param.grad is None for param in model.parameters())


def test_the_heads_running_statistics_come_from_the_last_group() -> None:
    """Three batches in each group, three in its counter; padded channels of the first one have a variance of 0."""
    model = model_of("preresnet20, running")
    trained(model, begun(model, plan_of(halves(model))), Memory())
    assert int(model.get_buffer("head.norm.num_batches_tracked")) == 3
    assert int(model.get_buffer("block1.norm1.num_batches_tracked")) == 3


def _double(data: Memory) -> Memory:
    data.x = data.x.double()
    return data


@pytest.mark.parametrize("name", ["fedepth", "m-fedepth"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_trains_in_two_groups(name: str, kind: str) -> None:
    """With microbatches of 5, every parameter of both groups moves and stays finite."""
    model = model_of(kind)
    start = values(model)
    plan = plan_of(halves(model), microbatch=5)
    done = trained(model, begun(model, plan, name=name, epochs=2), Memory(), plan, weight_decay=0.0)
    assert math.isfinite(done.mean_loss)
    for param_name, param in model.named_parameters():
        assert param.isfinite().all()
        assert not torch.equal(param, start[param_name]), param_name


def test_a_model_of_one_block_is_one_group() -> None:
    """small-cnn: stem, block1, head."""
    torch.manual_seed(1)
    model = registry_model("small-cnn")
    client = begun(model, plan_of([["block1"]]))
    (phase,) = client.phases()
    assert phase.trainable == frozenset(name for name, _ in model.named_parameters())
    assert (phase.name, phase.after) == ("train", "")


def registry_model(name: str, **options: Any) -> Model:
    from edge_client.models import registry as models

    return models.build(name, input_shape=SHAPE, num_classes=NUM_CLASSES, options=options)


class Net(nn.Module):
    """Somebody's own model: its parts in another order than they run, and a name with a dot."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(10, NUM_CLASSES)
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU()), nn.Flatten())
        self.narrow = nn.Sequential(nn.Linear(54, 10), nn.ReLU())
        self.first = nn.Conv2d(1, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classes(self.narrow(self.body(self.first(x))))
        return out


def _sequential() -> Model:
    layers = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.BatchNorm2d(4),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1),
        nn.Flatten(),
        nn.Linear(54, 5),
        nn.ReLU(),
        nn.Linear(5, NUM_CLASSES),
    )
    return from_sequential(layers, input_shape=SHAPE)


def _net() -> Model:
    return adopt(Net(), ["first", "body.0", "body.1", "narrow", "classes"], input_shape=SHAPE, num_classes=NUM_CLASSES)


@pytest.mark.parametrize("name", ["fedepth", "m-fedepth"])
@pytest.mark.parametrize("make", [_sequential, _net])
@pytest.mark.parametrize("cut", [1, 2])
def test_a_model_of_ones_own_trains_in_two_groups(name: str, make: Any, cut: int) -> None:
    """Maps in front of a head that takes a vector; units without parameters; all that can move does."""
    torch.manual_seed(1)
    model = make()
    start, blocks = values(model), list(model.order[1:-1])
    plan = plan_of([blocks[:cut], blocks[cut:]])
    trained(model, begun(model, plan, name=name, epochs=4), Memory(), plan)
    assert all(not torch.equal(param, start[key]) for key, param in model.named_parameters())


@pytest.mark.parametrize("groups", [[["block1"]], [["block2", "block1", "block3", "block4"]], [["stem"]]])
def test_a_plan_for_another_model_is_refused(groups: list[list[str]]) -> None:
    """Blocks that are missing, in another order, or no blocks."""
    with pytest.raises(PayloadError, match="the model has block1, block2, block3, block4"):
        begun(model_of("mlp"), plan_of(groups))


@pytest.mark.parametrize("share", [1 / 6, 1 / 3, 1 / 2, 1])
def test_what_a_group_keeps_for_backward_fits_the_papers_budget(share: float) -> None:
    """The paper's splits of PreResNet-20: saved tensors of each group within its budget with 5 % tolerance.

    Budgets are for a batch of 32; what autograd keeps for 2 samples, without parameters, is a sixteenth.
    """
    from edge_client.models import registry as models

    model = models.build("preresnet20", input_shape=(3, 32, 32), num_classes=10, options={})
    budget = share * full_cost(model, batch=32)
    groups = decompose(block_costs(model, batch=32), budget).groups
    assert len(groups) == {1 / 6: 6, 1 / 3: 3, 1 / 2: 2, 1: 1}[share]
    client, y = begun(model, plan_of(groups)), torch.tensor([0, 1])
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    for phase in client.phases():
        shape = model.input_shape if not phase.after else model.units[model.order.index(phase.after)].out_shape
        kept: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: _note(t, kept), lambda t: t):  # type: ignore[misc]
            list(client.terms(Batch(x=torch.randn(2, *shape), y=y, num_whole=2, whole_y=y, first=True), phase))
        assert 0 < 16 * sum(size for place, size in kept.items() if place not in weights) <= 1.05 * budget


def _note(tensor: Tensor, kept: dict[int, int]) -> Tensor:
    storage = tensor.untyped_storage()
    kept[storage.data_ptr()] = storage.nbytes()
    return tensor


# budget mode


@pytest.mark.parametrize(("mode", "epochs", "steps"), [("per_group", 2, 12), ("split", 2, 6), ("split", 1, 4)])
def test_groups_have_all_epochs_each_or_share_them(mode: str, epochs: int, steps: int) -> None:
    """3 batches: two groups of 2 epochs are 12 steps; shared, 1 epoch each; half an epoch is 2 batches."""
    model = model_of("mlp")
    client = begun(model, plan_of(halves(model)), parameters={"budget-mode": mode}, epochs=epochs)
    assert trained(model, client, Memory()).steps == steps


def test_a_bound_on_steps_is_shared_by_the_groups() -> None:
    """2 x 6 steps, at most 4: 2 for each group, so that none is left out; at most 1: still one for each."""
    for most, steps in ((4, 4), (1, 2)):
        model = model_of("mlp")
        start = values(model)
        client = begun(model, plan_of(halves(model)), epochs=2)
        assert trained(model, client, Memory(), max_steps=most).steps == steps
        assert not any(torch.equal(param, start[name]) for name, param in model.named_parameters())


# buffered outputs


@pytest.mark.parametrize("kind", ["mlp", "resnet10", "vit", "preresnet20, running"])
@pytest.mark.parametrize("microbatch", [8, 3, 1])
def test_buffered_outputs_give_the_same_bits(tmp_path: Path, kind: str, microbatch: int) -> None:
    """20 samples, batches of 8, 8 and 4; read from a file or computed for every batch; nothing is left of the file."""
    results = []
    for buffered in (False, True):
        model = model_of(kind)
        microbatch = max(microbatch, model.min_batch)
        plan = plan_of(halves(model), microbatch=microbatch)
        done = trained(model, begun(model, plan, epochs=2), Memory(), plan, **folder_of(tmp_path, buffered))
        results.append((values(model), done))
    assert equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert list(tmp_path.iterdir()) == []


# partial training


def test_skipped_blocks_run_but_are_not_trained() -> None:
    """block1 and the stem stay as received; the group behind them is trained on their outputs."""
    model = model_of("resnet10")
    start, blocks = values(model), list(model.order[1:-1])
    client = begun(model, plan_of([blocks[1:2], blocks[2:]], skipped=blocks[:1]))
    assert [phase.after for phase in client.phases()] == [blocks[0], blocks[1]]
    trained(model, client, Memory())
    left = ["stem", blocks[0]]
    assert equal(of_units(values(model), left), of_units(start, left))
    for name, param in model.named_parameters():
        assert name.startswith(tuple(f"{unit}." for unit in left)) or not torch.equal(param, start[name])


@pytest.mark.parametrize("bypass", [False, True])
def test_bypass_jumps_from_the_stem_to_the_first_trained_block(bypass: bool) -> None:
    """One step with lr 1 equals the gradient of head(block4(...(block3(stem or block2)))) by autograd."""
    model, whole, data = model_of("preresnet20"), model_of("preresnet20"), Memory(8)
    blocks = list(model.order[1:-1])
    client = begun(model, plan_of([blocks[2:]], skipped=blocks[:2]), parameters={"bypass": bypass})
    trained(model, client, data, learning_rate=1.0, momentum=0.0, weight_decay=0.0)
    order = torch.randperm(8, generator=generator(5, "shuffle", "train block9", 0))
    frozen = ["stem"] if bypass else ["stem", *blocks[:2]]
    logits = whole.run_units([*frozen, *blocks[2:], "head"], data.x[order])
    nn.functional.cross_entropy(logits, data.labels[order]).backward()
    name = "block3.conv1.weight"
    moved = whole.get_parameter(name) - model.get_parameter(name)
    torch.testing.assert_close(moved, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def test_a_bypass_between_different_shapes_is_refused() -> None:
    """From the stem (2, 8, 8) to block5, which takes (4, 4, 4)."""
    model = model_of("preresnet20")
    blocks = list(model.order[1:-1])
    plan = plan_of([blocks[4:]], skipped=blocks[:4])
    with pytest.raises(InputError, match=r"'stem' gives \[2, 8, 8\], 'block5' takes \[4, 4, 4\]; set bypass = false"):
        begun(model, plan, parameters={"bypass": True})


def test_masked_and_plain_averages() -> None:
    """n=10 with value 1, n=30 with 3: both trained it, (10 + 90)/40 = 2.5; only the second, 3.0.

    Plain, the first one votes with the old value 0 it holds: 90/40 = 2.25.
    """
    small, large = Header(device="a", num_samples=10), Header(device="b", num_samples=30)
    old = TensorState({"both": torch.zeros(1), "one": torch.zeros(1)})
    second = (large, {"both": torch.tensor([3.0]), "one": torch.tensor([3.0])})
    for first, expected in (
        ({"both": torch.tensor([1.0])}, 3.0),
        ({"both": torch.tensor([1.0]), "one": torch.zeros(1)}, 2.25),
    ):
        server = registry.get("fedepth", {}).server
        folded = dict(server.fold(old, TensorFrozen([(small, first), second]), round=1))
        assert folded["both"].item() == 2.5
        assert folded["one"].item() == expected


# m-FeDepth


def test_auxiliary_heads_are_trained_instead_of_the_models() -> None:
    """Two groups: the head of the first group's end moves in the first phase, the model's head in the last one only."""
    model = model_of("resnet10")
    first, second = halves(model)
    sent = {key: value.clone() for key, value in registry.get("m-fedepth", {}).travel.extra_tensors(model).items()}
    client = begun(model, plan_of([first, second]), name="m-fedepth", extra=sent)
    phases = client.phases()
    assert not any(name.startswith("head.") for name in phases[0].trainable)
    assert {name for name in phases[0].trainable if name.startswith("extra/")} == {
        f"extra/{first[-1]}.{name}" for name in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")
    }
    assert not any(name.startswith("extra/") for name in phases[1].trainable)
    snapshots = Snapshots(model.get_submodule("head"))
    trained(model, client, Memory(), progress=snapshots)
    seen = snapshots.taken
    assert all(equal(snapshot, seen[0]) for snapshot in seen[:4])
    assert not equal(seen[0], seen[-1])
    extra = client.end().extra
    assert set(extra) == {name for name in sent if name.startswith(f"{first[-1]}.")}
    assert all(not torch.equal(value, sent[name]) for name, value in extra.items())


def test_auxiliary_heads_start_as_received() -> None:
    """Linear weights of zeros and biases of (0, 0, log 2): the first loss is that of softmax (1/4, 1/4, 1/2)."""
    model = model_of("mlp")
    sent = {
        key: torch.zeros_like(value) for key, value in registry.get("m-fedepth", {}).travel.extra_tensors(model).items()
    }
    sent["block2.linear.bias"] = torch.tensor([0.0, 0.0, math.log(2)])
    losses: list[float] = []
    client = begun(model, plan_of(halves(model)), name="m-fedepth", extra=sent)
    data = Memory(8)
    trained(model, client, data, progress=lambda step, total, loss: losses.append(loss))
    num_third = int((data.labels == 2).sum())
    assert losses[0] == pytest.approx((num_third * math.log(2) + (8 - num_third) * math.log(4)) / 8, rel=1e-6)


def test_every_block_but_the_last_has_a_head_of_its_own() -> None:
    """PreResNet-20 with 10 classes: 3 x 202 + 3 x 394 + 2 x 778 = 3,344 values for B1 to B8; FeDepth has none."""
    from edge_client.models import registry as models

    model = models.build("preresnet20", input_shape=(3, 32, 32), num_classes=10, options={})
    made = registry.get("m-fedepth", {}).travel.extra_tensors(model)
    assert {name.partition(".")[0] for name in made} == {f"block{number}" for number in range(1, 9)}
    assert sum(value.numel() for value in made.values()) == 3344
    assert registry.get("fedepth", {}).travel.extra_tensors(model) == {}


def test_a_model_that_came_without_its_heads_is_refused() -> None:
    """As from a coordinator whose run has another method."""
    with pytest.raises(PayloadError, match=r"no tensor 'extra/block2.linear.weight'"):
        begun(model_of("mlp"), plan_of([["block1", "block2"], ["block3", "block4"]]), name="m-fedepth", extra={})


# mutual knowledge distillation


def test_divergence_by_hand() -> None:
    """Own (0, 0), peer (2, 0): KL(peer || own) = 0.327813, KL(own || peer) = 0.433781."""
    own, peer = torch.zeros(1, 2), torch.tensor([[2.0, 0.0]])
    assert divergence(peer, own).item() == pytest.approx(0.327813, abs=1e-6)
    assert divergence(own, peer).item() == pytest.approx(0.433781, abs=1e-6)


def test_two_models_teach_each_other() -> None:
    """x=1, y=0, own logits (0, 0), peer (2, 0), lr 1: p = (.5, .5), q = (.880797, .119203).

    Losses: own log 2 + .327813 = 1.020960 (told), peer .126928 + .433781 (not told).
    Steps: own -= (p - y) + (p - q) = (-.5 - .380797, ...) = (.880797, -.880797); peer -= (q - y) + (q - p) =
    (-.119203 + .380797, ...): (1.738406, .261594).
    """
    model, peer = linear_model([0.0, 0.0]), linear_model([2.0, 0.0])
    client = begun(model, plan_of(num_models=2), parameters={"mutual": 2}, build=lambda _: peer)
    done = trained(model, client, Samples([1.0], [0]), learning_rate=1.0, momentum=0.0, weight_decay=0.0)  # type: ignore[arg-type]
    assert done.mean_loss == pytest.approx(1.020960, abs=1e-5)
    torch.testing.assert_close(model.get_parameter("0.weight").flatten(), torch.tensor([0.880797, -0.880797]))
    torch.testing.assert_close(peer.get_parameter("0.weight").flatten(), torch.tensor([1.738406, 0.261594]))
    assert client.end().extra == {}


def test_the_mean_over_several_peers_is_taken() -> None:
    """Own (0, 0), peers (2, 0) and (0, 0): log 2 + (0.327813 + 0)/2."""
    peers = {"peer/1": linear_model([2.0, 0.0]), "peer/2": linear_model([0.0, 0.0])}
    client = begun(linear_model([0.0, 0.0]), plan_of(num_models=3), parameters={"mutual": 3}, build=peers.__getitem__)
    y = torch.tensor([0])
    terms = list(client.terms(Batch(x=torch.ones(1, 1), y=y, num_whole=1, whole_y=y, first=True), client.phases()[0]))
    assert [(term.name, term.reported) for term in terms] == [
        ("cross_entropy", True),
        ("peer/1", False),
        ("peer/2", False),
    ]
    assert terms[0].each is not None
    assert terms[0].each.item() == pytest.approx(math.log(2) + 0.327813 / 2, abs=1e-6)


@pytest.mark.parametrize("name", ["fedepth", "m-fedepth"])
@pytest.mark.parametrize("microbatch", [8, 3])
def test_peers_stay_on_the_device_and_go_on_in_its_next_round(tmp_path: Path, name: str, microbatch: int) -> None:
    """Two groups, two models: all that is kept comes back as it was; only the run's model is sent."""
    model = model_of("resnet10")
    start, plan = values(model), plan_of(halves(model), microbatch=microbatch, num_models=2)
    client = begun(model, plan, name=name, parameters={"mutual": 2}, build=lambda purpose: model_of("resnet10", 7))
    trained(model, client, Memory(), plan, **folder_of(tmp_path, microbatch == 3))
    kept = client.end().state
    peer = {key.removeprefix("peer/1."): value for key, value in kept.items() if key.startswith("peer/1.")}
    assert peer.keys() == start.keys()
    assert not equal(peer, values(model_of("resnet10", 7)))
    assert not any(torch.equal(peer[key], value) for key, value in model.named_parameters())
    heads = [key for key in kept if key.startswith("peer/1/extra/")]
    assert len(heads) == (4 if name == "m-fedepth" else 0)
    again = begun(model, plan, name=name, parameters={"mutual": 2}, state=kept, build=lambda _: model_of("resnet10", 8))
    assert all(torch.equal(value, kept[key]) for key, value in again.end().state.items())
    assert len(again.end().state) == len(kept)


def test_a_peer_runs_its_own_frozen_units(tmp_path: Path) -> None:
    """Second group alone, lr 1, float64: its step is the gradient of its own CE + KL behind its own first group."""
    model, peer, data = model_of("mlp").double(), model_of("mlp", 7).double(), _double(Memory(8))
    alone, other = model_of("mlp").double(), model_of("mlp", 7).double()
    first, second = halves(model)
    client = begun(model, plan_of([first, second], num_models=2), parameters={"mutual": 2}, build=lambda _: peer)
    phases = client.phases()
    client.phases = lambda: phases[1:]  # type: ignore[method-assign]
    trained(model, client, data, learning_rate=1.0, momentum=0.0, weight_decay=0.0, **folder_of(tmp_path, True))
    teacher, logits = alone(data.x).softmax(dim=1).detach(), other(data.x)
    loss = nn.functional.cross_entropy(logits, data.labels)
    loss = loss + nn.functional.kl_div(logits.log_softmax(dim=1), teacher, reduction="batchmean")
    loss.backward()
    for unit in second:
        name = f"{unit}.linear.weight"
        moved = other.get_parameter(name) - peer.get_parameter(name)
        torch.testing.assert_close(moved, other.get_parameter(name).grad, rtol=1e-8, atol=1e-10)


# over another method


def test_over_fedprox_the_second_step_is_pulled_back() -> None:
    """w_2 = w_1 - lr (g + mu (w_1 - w_0)): against plain FeDepth's second step, for both groups and the carried head.

    Two steps per group without momentum; in the second group w_0 of its blocks is the received value.
    """
    data, mu, lr = _double(Memory(16)), 0.5, 0.1
    runs = {}
    for name, parameters in (("fedepth", {}), ("fedepth+fedprox", {"mu": mu}), ("fedepth+fedprox zero", {"mu": 0})):
        model = model_of("mlp").double()
        client = begun(model, plan_of(halves(model)), name=name.split()[0], parameters=parameters)
        seen = Snapshots(model)
        trained(model, client, data, momentum=0.0, weight_decay=0.0, progress=seen)
        runs[name] = seen.taken
    plain, pulled = runs["fedepth"], runs["fedepth+fedprox"]
    assert all(equal(*pair) for pair in zip(plain, runs["fedepth+fedprox zero"], strict=True))
    assert equal(plain[1], pulled[1])  # at the anchor the term is 0
    for name in of_units(plain[0], ["block1", "block2", "head"]):
        expected = plain[2][name] - lr * mu * (plain[1][name] - plain[0][name])
        torch.testing.assert_close(pulled[2][name], expected, rtol=1e-9, atol=1e-12)
    for name in of_units(plain[0], ["block3", "block4"]):
        assert torch.equal(pulled[2][name], plain[0][name])
        assert not torch.equal(pulled[4][name], plain[4][name])


def test_over_fedprox_auxiliary_heads_have_anchors() -> None:
    """They are weights of the run, too: with each element one away from its anchor, the distance is their number."""
    model = model_of("mlp")
    client = begun(model, plan_of(halves(model)), name="m-fedepth+fedprox", parameters={"mu": 10.0})
    phase = client.phases()[0]
    y = torch.tensor([0])
    batch = Batch(x=torch.ones(1, *SHAPE), y=y, num_whole=1, whole_y=y, first=True)
    params = named_parameters(model, client.modules())
    moved = [params[name] for name in phase.trainable]
    with torch.no_grad():
        for param in moved:
            param.add_(1.0)
    near = [term.once for term in client.terms(batch, phase) if term.name == "proximal"]
    distance = sum(float(term.detach()) for term in near if term is not None)
    assert distance == pytest.approx(sum(param.numel() for param in moved), rel=1e-4)
    assert sum(name.startswith("extra/") for name in phase.trainable) == 2


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("fedepth", {"budget-mode": "half"}, "'fedepth': budget-mode: 'half' does not match per_group|split"),
        ("fedepth", {"mutual": 9}, "mutual: expected 1 to 8, got 9; M in the paper: models"),
        ("fedepth+fedprox", {"mu": -1}, r"'fedepth\+fedprox': mu: expected 0 to 1000, got -1\.0; mu in the paper"),
        ("fedepth+fedprox", {"partial": 1}, "partial: expected bool, got int"),
        ("fedepth+fedprox", {"mutal": 2}, "did you mean 'mutual'"),
        ("fedepth", {"mu": 0.1}, "unknown key 'mu'"),
    ],
)
def test_parameters_of_all_parts_stand_in_one_table(name: str, parameters: dict[str, Any], message: str) -> None:
    """And each is checked by the part that has it."""
    registry.validate("m-fedepth+fedprox", {"mu": 0.1, "budget-mode": "split", "mutual": 2, "partial": False})
    with pytest.raises(InputError, match=message):
        registry.validate(name, parameters)


def test_what_a_planner_may_choose_follows_from_the_parameters() -> None:
    """Known without torch, and the same in the loaded method."""
    rules = registry.plan_rules("m-fedepth+fedprox", {"partial": False, "mutual": 3, "averaging": "plain"})
    copies = {"step_copies": 1, "fixed_bytes": 2**17}  # FedProx's
    assert rules == PlanRules(groups=True, partial=False, auxiliary=True, max_models=3, masked=False, **copies)
    assert registry.get("fedepth", {}).plans == registry.plan_rules("fedepth", {})
    assert registry.plan_rules("fedavg", {}) == registry.plan_rules("fedprox", {"mu": 0})
    assert not registry.plan_rules("fedprox", {}).groups


# a new plan in the middle


def test_a_smaller_plan_changes_what_is_left() -> None:
    """Groups {1, 2} {3, 4}; in the first one a plan of single blocks comes: {3} and {4} are left, 3 steps each."""
    model = model_of("mlp")
    client = begun(model, plan_of([["block1", "block2"], ["block3", "block4"]]))
    smaller = plan_of([["block1"], ["block2"], ["block3"], ["block4"]], microbatch=2)
    plans = iter([None, smaller])
    snapshots = Snapshots(model)
    done = trained(model, client, Memory(), replan=lambda: next(plans, None), progress=snapshots)
    seen = snapshots.taken
    assert done.steps == 9
    assert snapshots.told == [(1, 6), (2, 6), (3, 6), *((step, 9) for step in range(4, 10))]
    still = [equal(of_units(seen[6], [unit]), of_units(seen[9], [unit])) for unit in ("block2", "block3", "block4")]
    assert still == [True, True, False]
    assert equal(of_units(seen[3], ["block3"]), of_units(seen[0], ["block3"]))


def test_a_plan_without_groups_leaves_one_group() -> None:
    """block1 is done in its 3 steps; the others are trained together then, in 3 more."""
    model = model_of("mlp")
    client, plans = begun(model, plan_of([[block] for block in model.order[1:-1]])), iter([plan_of(microbatch=4)])
    snapshots = Snapshots(model)  # of the start, then after each step
    assert trained(model, client, Memory(), replan=lambda: next(plans, None), progress=snapshots).steps == 6
    seen = snapshots.taken
    assert equal(of_units(seen[3], ["block1"]), of_units(seen[6], ["block1"]))
    for block in ("block2", "block3", "block4"):
        assert equal(of_units(seen[3], [block]), of_units(seen[0], [block]))
        assert not equal(of_units(seen[4], [block]), of_units(seen[0], [block]))


def test_what_is_left_of_shared_epochs_is_shared_anew() -> None:
    """2 epochs for 2 groups: 1 is spent on the first; then 2 groups share the other: 3 + 2 + 2 steps of 3 batches."""
    model = model_of("mlp")
    client = begun(model, plan_of(halves(model)), parameters={"budget-mode": "split"}, epochs=2)
    plans = iter([plan_of([["block1"], ["block2"], ["block3"], ["block4"]])])
    assert trained(model, client, Memory(), replan=lambda: next(plans, None)).steps == 7


def test_a_plan_that_skips_blocks_and_needs_other_heads() -> None:
    """m-FeDepth over FedProx: block1 done, then {3} {4} behind skipped blocks 1 and 2; one model instead of two."""
    model = model_of("mlp")
    client = begun(
        model,
        plan_of([["block1"], ["block2", "block3", "block4"]], num_models=2),
        name="m-fedepth+fedprox",
        parameters={"mutual": 2},
        build=lambda _: model_of("mlp", 7),
    )
    start = values(model)
    plans = iter([plan_of([["block3"], ["block4"]], skipped=["block1", "block2"])])
    trained(model, client, Memory(), replan=lambda: next(plans, None))
    assert equal(of_units(values(model), ["block2"]), of_units(start, ["block2"]))
    assert not equal(of_units(values(model), ["block3"]), of_units(start, ["block3"]))
    assert {name.partition(".")[0] for name in client.end().extra} == {"block1", "block3"}
    assert client.end().state == {}


def test_the_order_of_samples_is_a_groups_own() -> None:
    """It follows from the name of the phase."""
    model = model_of("mlp")
    names = [phase.name for phase in begun(model, plan_of(halves(model))).phases()]
    assert names == ["train block2", "train block4"]
