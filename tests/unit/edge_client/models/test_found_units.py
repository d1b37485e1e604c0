"""Units of any module: found, run by themselves, trained, shortened; what cannot be cut says why."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_client.data.input_sums import MEAN, SCALE
from edge_client.errors import PayloadError
from edge_client.methods.coverage import found_units, missing_tensors, model_meta
from edge_client.models import heads
from edge_client.models.contract import Model
from edge_client.models.found_units import running
from edge_client.models.found_units.adoption import found_model
from edge_client.models.found_units.checks import buffers_of, restore
from edge_client.models.found_units.model import FoundModel
from edge_client.models.found_units.result import FoundUnits, UnitsDifferError
from edge_client.models.found_units.search import find_units
from edge_client.models.normalised import normalise_inputs
from edge_client.models.slicing import parse, shorten
from edge_client.models.user_module import adopt
from edge_client.records import PlanRules, TrainingPlan
from edge_client.training.depthwise import loaded, predict_depthwise, release
from edge_client.wire.container import MODEL_PREFIX

IMAGE = (3, 16, 16)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test finds its units itself."""
    monkeypatch.setenv("FEDFIT_CACHE_DIR", str(tmp_path / "cache"))


class Branch(nn.Module):
    """Two ways through a block, added; the activation is a function, as torchvision writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv1(x)) + self.conv2(x))


class Branches(nn.Module):
    """A CNN with branches, functional pooling and dropout that looks at the module's own mode."""

    def __init__(self, depth: int = 4, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Branch(width) for _ in range(depth))
        self.fc = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.stem(x))
        for block in self.blocks:
            x = functional.dropout(block(x), 0.1, training=self.training)
        return self.fc(x.mean(dim=(2, 3)))


class UNet(nn.Module):
    """Skips across stages: no cut lies between a stage and what reads it later."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down1, self.down2 = self._two(3, 8), self._two(8, 16), self._two(16, 32)
        self.up1, self.up2 = self._two(48, 16), self._two(24, 8)
        self.last, self.head = self._two(8, 8), nn.Linear(8, 10)

    def _two(self, a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        one = self.inc(x)
        two = self.down1(functional.max_pool2d(one, 2))
        three = self.down2(functional.max_pool2d(two, 2))
        x = self.up1(torch.cat([functional.interpolate(three, scale_factor=2), two], 1))
        x = self.up2(torch.cat([functional.interpolate(x, scale_factor=2), one], 1))
        return self.head(self.last(x).mean(dim=(2, 3)))


class Transformer(nn.Module):
    """A class token and a table of positions that belong to no submodule."""

    def __init__(self, depth: int = 4, width: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 32, batch_first=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class InPlace(nn.Module):
    """A ReLU in place right after each convolution: a cut there has a leaf that may not be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if n == 0 else 8, 8, 3, padding=1) for n in range(4))
        self.relus = nn.ModuleList(nn.ReLU(inplace=True) for _ in range(4))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, relu in zip(self.convs, self.relus, strict=True):
            x = relu(conv(x))
        return self.fc(x.mean(dim=(2, 3)))


class Shared(nn.Module):
    """One convolution is used in the first and in the fourth of five steps: those are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.shared = nn.Conv2d(8, 8, 3, padding=1)
        self.other = nn.Conv2d(8, 8, 3, padding=1)
        self.later = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(torch.relu(self.stem(x)))
        x = self.shared(torch.relu(self.other(torch.relu(x))))
        return self.fc(torch.relu(self.later(torch.relu(x))).mean(dim=(2, 3)))


class MaskedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.relu(self.fc(x)) * mask


class Masked(nn.Module):
    """Tokens of 0 are padding, and every block looks the mask up in the input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(MaskedBlock() for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x * 8).long().clamp(0, 7)
        mask = (ids > 0).unsqueeze(-1).float()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x.sum(dim=1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 12, 2, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class ByValue(nn.Module):
    """How often a block runs depends on what is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.fc = nn.Linear(6, 6), nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + len(x) % 3):
            x = torch.relu(self.block(x))
        return self.fc(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 8), nn.Linear(5, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, left: Tensor, right: dict[str, Tensor]) -> dict[str, Any]:
        x = self.left(left) + self.right(right["values"])
        for block in self.blocks:
            x = torch.relu(block(x))
        return {"logits": self.head(x), "parts": (x.mean(dim=1), None)}


CUT = [(Branches, IMAGE), (UNet, IMAGE), (Transformer, IMAGE), (InPlace, IMAGE), (Masked, (12,))]


def take(module: nn.Module, shape: tuple[int, ...], **given: Any) -> FoundModel:
    model = adopt(module, None, input_shape=shape, num_classes=10, **given)
    assert isinstance(model, FoundModel)
    return model


def by_units(model: Model, x: Tensor) -> Tensor:
    for unit in model.order:
        x = model.run_units([unit], x)
    return x


def run(forward: Any, model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Output, gradients and buffers of one training pass from a fixed seed."""
    before = buffers_of(model)
    model.zero_grad()
    torch.manual_seed(5)
    out = forward(x)
    out.square().sum().backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    after = buffers_of(model)
    restore(model, before)
    return out.detach(), grads, after


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("build", "shape"), CUT)
@pytest.mark.parametrize("kind", [None, "units"])
def test_units_give_the_bits_of_forward(build: Any, shape: tuple[int, ...], kind: str | None) -> None:
    """Outputs in both modes, every gradient and every buffer of the module, for a batch that was not recorded."""
    torch.manual_seed(0)
    module = build()
    reference, names = copy.deepcopy(module), list(module.state_dict())
    model = take(module, shape)
    assert len(model.order) >= 4
    assert list(model.state_dict()) == names
    assert sorted(name for unit in model.units for name in (*unit.parameters, *unit.buffers)) == sorted(names)
    x = torch.rand(5, *shape)
    model.recompute = kind
    model.train()
    reference.train()
    out, grads, buffers = run(lambda x: by_units(model, x), model, x)
    expected, wanted, after = run(reference, reference, x)
    assert torch.equal(out, expected)
    assert wanted.keys() == grads.keys()
    assert same(grads.values(), wanted.values())
    assert same(buffers.values(), after.values())
    model.eval()
    reference.eval()
    assert torch.equal(by_units(model, x), reference(x))
    assert torch.equal(model(x), reference(x))


@pytest.mark.parametrize(
    ("build", "shape", "reason"),
    [
        (Lstm, (7, 6), ""),
        (ByValue, (6,), "other calls for another number of samples"),
    ],
)
def test_what_cannot_be_cut_trains_whole(build: Any, shape: tuple[int, ...], reason: str) -> None:
    """An LSTM of one call has at most its head behind it; one whose calls depend on the batch is whole, and says so."""
    module = build()
    model = take(module, shape)
    assert len(model.order) <= 2
    assert reason in model.found.reason
    assert list(model.state_dict()) == list(module.state_dict())
    x = torch.rand(4, *shape)
    assert torch.equal(model(x), module(x))


def test_weights_used_twice_join_all_units_between_their_uses() -> None:
    """`shared` runs before and after `other`: one unit has both, `later` and the head are their own."""
    model = take(Shared(), IMAGE)
    owners = [unit for unit in model.units if any("shared" in name for name in unit.parameters)]
    assert len(owners) == 1
    assert any("other" in name for name in owners[0].parameters)
    assert not any("later" in name for name in owners[0].parameters)


def test_several_inputs_tuples_and_dictionaries_are_cut() -> None:
    """Two inputs, one in a dictionary, and a dictionary with a tuple in it as output."""
    sample = (torch.rand(4, 4), {"values": torch.rand(4, 5)})
    units = find_units(TwoInputs(), sample)
    assert len(units.names) >= 4


def test_a_cut_needs_the_leaf_and_the_tainting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mode that makes positions and tokens meta, the transformer cannot be cut behind its first addition."""
    with monkeypatch.context() as without:
        without.setattr(running, "_as_meta", lambda item: item)
        plain = find_units(Transformer(), torch.rand(4, *IMAGE))
    assert len(plain.names) < 4 <= len(find_units(Transformer(), torch.rand(4, *IMAGE)).names)
    ends = find_units(InPlace(), torch.rand(4, *IMAGE)).names[:-1]
    assert all(name.startswith("relus") for name in ends)  # never right before an operation in place


def test_units_that_came_with_the_run_are_used_or_refused() -> None:
    """The same module takes them without a search; one with other tensors, or another way through, declines."""
    units = found_model(Branches(), input_shape=IMAGE).found
    assert take(Branches(), IMAGE, found=units).order == units.names
    with pytest.raises(UnitsDifferError, match="other names or shapes"):
        take(Branches(depth=5), IMAGE, found=units)

    class Other(Branches):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in reversed(self.blocks):
                x = block(x)
            return self.fc(x.mean(dim=(2, 3)))

    with pytest.raises(UnitsDifferError, match="calls its submodules otherwise"):
        take(Other(), IMAGE, found=units)


def test_a_search_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing is searched."""
    first = take(Branches(), IMAGE).found
    monkeypatch.setattr("edge_client.models.found_units.adoption.find_units", lambda *_: pytest.fail("searched again"))
    assert take(Branches(), IMAGE).found == first


def test_depth_slices_of_found_units_run_without_what_they_leave_out() -> None:
    """Blocks of equal shape are a stage: two of four remain, and their sum by hand is the output."""
    torch.manual_seed(1)
    module = Branches().eval()
    reference = copy.deepcopy(module)
    model = shorten(take(module, IMAGE), parse("layers:2"))
    blocks = [unit for unit in model.units if unit.kind == "block"]
    assert len(blocks) == 2
    x = torch.rand(3, *IMAGE)
    expected = torch.relu(reference.stem(x))
    left = [name for name in reference.state_dict() if name in model.state_dict()]
    assert 0 < len(left) < len(reference.state_dict())
    kept = sorted({int(name.split(".")[1]) for name in left if name.startswith("blocks.")})
    for number in kept:
        expected = reference.blocks[number](expected)
    assert torch.equal(model.eval()(x), reference.fc(expected.mean(dim=(2, 3))))


def test_depthwise_inference_needs_the_weights_of_one_group_at_a_time(tmp_path: Any) -> None:
    """All values are on meta but those of the running group, and the logits are those of the whole model."""
    torch.manual_seed(2)
    for build in (Branches, Transformer):
        module = build().eval()
        x = torch.rand(8, *IMAGE)
        values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        model = take(module, IMAGE)
        with torch.no_grad():  # the kernels of evaluation, which may have other last bits
            expected = torch.cat([model(x[:4]), model(x[4:])])
        release(model)

        class Samples:
            labels = torch.zeros(8, dtype=torch.int64)

            def __len__(self) -> int:
                return 8

            def batch(self, indices: Tensor, x: Tensor = x) -> tuple[Tensor, Tensor]:
                return x[indices], self.labels[indices]

        groups = [[name] for name in model.order]
        logits = torch.cat(list(predict_depthwise(model, values.__getitem__, Samples(), groups, tmp_path, 4)))
        assert torch.equal(logits, expected)
        with loaded(model, [model.order[1]], values.__getitem__):
            assert sum(not tensor.is_meta for tensor in model.state_dict().values()) == len(
                [*model.units[1].parameters, *model.units[1].buffers]
            )


def test_frozen_units_are_in_evaluation_mode_and_others_are_not() -> None:
    """The dropout of the module itself has the mode of the unit that runs."""
    torch.manual_seed(3)
    model = take(Branches(), IMAGE)
    model.train()
    x = torch.rand(4, *IMAGE)
    for name in model.order[:3]:
        model.unit(name).eval()
    before = torch.get_rng_state()
    with torch.no_grad():
        once = model.run_units(model.order[:3], x)
        assert torch.equal(model.run_units(model.order[:3], x), once)
    assert torch.equal(torch.get_rng_state(), before)
    model.run_units(model.order[3:5], once)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_server_knows_which_tensors_a_partial_update_lacks() -> None:
    """Names of found units are no prefixes: stem and skipped blocks are looked up in what came with the model."""
    model = take(Transformer(), IMAGE)
    rules = PlanRules(groups=True, partial=True, masked=True)
    meta = model_meta(rules, stem=model.order[0], never_returned=(), units=model.found)
    assert found_units(meta) == model.found
    names = [MODEL_PREFIX + name for name in model.state_dict()]
    skipped, trained = model.order[1], model.order[2:-1]
    plan = TrainingPlan(groups=(trained,), skipped=(skipped,), microbatch=4, budget_bytes=0, predicted_bytes=0)
    lacking = missing_tensors(names, plan, rules, meta)
    expected = {name for unit in model.units[:2] for name in (*unit.parameters, *unit.buffers)}
    assert lacking == {MODEL_PREFIX + name for name in expected}
    assert f"{MODEL_PREFIX}cls_token" in lacking
    with pytest.raises(PayloadError, match="no unit of the model"):
        missing_tensors(
            names,
            replace(plan, skipped=("nope",)),
            rules,
            meta,
        )


def test_inputs_are_normalised_in_the_first_unit() -> None:
    """(x - 2) * 0.5 by hand; the numbers are buffers of the module itself, whether it is cut or whole."""
    for build, shape in ((Branches, IMAGE), (Transformer, IMAGE), (Lstm, (7, 6))):
        torch.manual_seed(4)
        module = build().eval()
        reference = copy.deepcopy(module)
        model = normalise_inputs(take(module, shape)).eval()
        assert {MEAN, SCALE} <= set(model.units[0].buffers) & set(model.state_dict())
        module.get_buffer(MEAN).fill_(2.0)
        module.get_buffer(SCALE).fill_(0.5)
        x = torch.rand(3, *shape)
        expected = reference((x - 2.0) * 0.5)
        assert torch.equal(model(x), expected)
        assert torch.equal(by_units(model, x), expected)


def test_hostile_units_are_refused() -> None:
    """A unit for each tensor, no more and no fewer, and no unit that is not there."""
    names = ("a", "b")
    for spans in (((0, 1),), ((0, 3),), ((7, 2),), ((0,),)):
        with pytest.raises(PayloadError):
            FoundUnits(names=("x", "y"), cuts=(1,), spans=spans).tensors(names)
    assert FoundUnits(names=("x", "y"), cuts=(1,), spans=((1, 1), (0, 1))).tensors(names) == {"x": ("b",), "y": ("a",)}


def test_heads_for_found_units_take_maps_and_tokens() -> None:
    """An auxiliary head gives a score for each class; the model's own head takes what any block puts out."""
    for build in (Branches, Transformer):
        model = take(build(), IMAGE)
        for unit in model.units[1:-1]:
            x = torch.rand(3, *unit.out_shape)
            assert heads.auxiliary(model, unit)(x).shape == (3, 10)
            head = model.units[-1]
            assert model.run_units([head.name], heads.fit(x, head.in_shape)).shape == (3, 10)
