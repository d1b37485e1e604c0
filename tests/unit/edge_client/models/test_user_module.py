"""A user's own module: its units must be all of it, and the error says where they are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import InputError
from edge_client.models.user_module import adopt, check_shapes, parts

Change = Callable[[Tensor], Tensor]
UNITS = ["stem", "body.block", "head"]


class Net(nn.Module):
    """A stem, a nested block and a head; what happens between them is the test's."""

    def __init__(self, between: Change | None = None, last: Change | None = None) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.body = nn.Module()
        self.body.block = nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Flatten())
        self.head = nn.Linear(4 * 36, 3)
        self.between = between
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = self.body.block(self.stem(x))
        x = self.head(self.between(x) if self.between else x)
        return self.last(x) if self.last else x


def take(module: Any, units: Sequence[str] | None = UNITS) -> Any:
    return adopt(module, units, input_shape=(1, 6, 6), num_classes=3)


def test_units_in_order_are_the_model_and_keep_the_users_names() -> None:
    """Shapes by hand: 1x6x6 -> 4x6x6 -> 144 -> 3; state and result are those of the user's module."""
    torch.manual_seed(1)
    net = Net()
    generator_state = torch.get_rng_state()
    model = take(net)
    assert list(model.state_dict()) == list(net.state_dict())
    assert [(u.name, u.kind, u.in_shape, u.out_shape) for u in model.units] == [
        ("stem", "stem", (1, 6, 6), (4, 6, 6)),
        ("body.block", "block", (4, 6, 6), (144,)),
        ("head", "head", (144,), (3,)),
    ]
    assert model.units[1].parameters == ("body.block.1.weight", "body.block.1.bias")
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert net.training
    x = torch.rand(2, 1, 6, 6)
    assert torch.equal(model(x), net(x))
    assert torch.equal(model.forward_from("head", model.forward_to("body.block", x)), net(x))


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda: Net(between=torch.relu), r"units 'body.block' and 'head': forward\(\) changes the data between them"),
        (lambda: Net(between=lambda x: x.relu_()), "units 'body.block' and 'head'"),
        (lambda: Net(last=lambda x: x * 2), r"forward\(\) changes the output of the last unit 'head'"),
        (lambda: Net(last=lambda x: x[:, :2]), r"one score for each of 3 classes, \[2, 3\] .* got \[2, 2\]"),
        (lambda: Net(last=lambda x: (x, x)), "got tuple"),
    ],
)
def test_what_forward_does_between_units_is_found_and_named(net: Callable[[], nn.Module], message: str) -> None:
    """A functional ReLU, the same in place, and a scaled output; the message says what to do."""
    with pytest.raises(InputError, match=message):
        take(net())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(self.stem(x)))


class Jumps(nn.Module):
    """A skip connection over a unit: the head gets two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Flatten(), nn.Bilinear(36, 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x, x)


class Remembers(nn.Module):
    """The head reads what forward() left in it: nothing shows between the units, only at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Flatten(), Head()

    def forward(self, x: Tensor) -> Tensor:
        self.head.factor = 2.0
        try:
            return self.head(self.stem(x))
        finally:
            self.head.factor = 1.0


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(36, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.linear(x)


@pytest.mark.parametrize(
    ("net", "units", "message"),
    [
        (Twice, ["stem", "head"], r"forward\(\) calls unit 'stem' 2 times, expected once"),
        (Jumps, ["stem", "head"], "units 'stem' and 'head'"),
        (Remembers, ["stem", "head"], "units 'stem', 'head' in order give another result"),
        (Net, ["head", "stem", "body.block"], r"forward\(\) calls the units as 'stem', 'body.block', 'head'"),
        (Net, ["stem", "head"], "'body.block.1.weight', 'body.block.1.bias' belong to no unit"),
        (Net, ["stem", "body", "body.block", "head"], "units 'body' and 'body.block' overlap"),
        (Net, ["stem", "stem", "body.block", "head"], "units 'stem' and 'stem' overlap"),
        (Net, ["stem", "block", "head"], "no unit 'block'; Net has 'stem', 'body', 'head'"),
    ],
)
def test_units_that_are_not_the_model_are_refused(
    net: type[nn.Module], units: Sequence[str] | None, message: str
) -> None:
    """Each case by its own message."""
    with pytest.raises(InputError, match=message):
        take(net(), units)


def test_a_module_that_cannot_be_cut_is_one_unit() -> None:
    """Two branches with a parameter of the module itself, which no list of units covers; names stay."""
    module = Branches()
    model = take(module, None)
    assert [(unit.name, unit.kind, unit.in_shape, unit.out_shape) for unit in model.units] == [
        ("model", "head", (1, 6, 6), (3,))
    ]
    assert list(model.state_dict()) == list(module.state_dict())
    x = torch.rand(2, 1, 6, 6)
    assert torch.equal(model(x), module(x))


class Branches(nn.Module):
    """Its child has a name that fedfit's own models need, which does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.units, self.right, self.shift = nn.Linear(36, 3), nn.Linear(36, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return torch.relu_(self.units(flat)) + self.right(flat) + self.shift


def test_a_unit_that_changes_its_input_in_place_got_what_the_unit_before_put_out() -> None:
    """An in-place ReLU after a convolution: what it got is looked at before it runs."""
    model = take(Rectified(), ["stem", "relu", "head"])
    assert [unit.name for unit in model.units] == ["stem", "relu", "head"]


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(144, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.stem(x)))


def test_data_of_another_type_between_units_is_named() -> None:
    """The stem gives floats, the table of vectors gets whole numbers: no bare error of torch."""
    with pytest.raises(InputError, match="units 'stem' and 'head': forward\\(\\) changes the data between them"):
        take(Tokens(), ["stem", "head"])


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Flatten(), nn.EmbeddingBag(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x).long().abs())


def _tied() -> nn.Module:
    first, second = nn.Linear(36, 36, bias=False), nn.Linear(36, 36, bias=False)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second, nn.Linear(36, 3))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: nn.Sequential(), "has no submodules"),
        (lambda: "model", "expected a torch.nn.Module, got str"),
        (_tied, "'1.weight', '2.weight' are one tensor under 2 names"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3).double()), "'1.weight': expected float32 or int64"),
        (lambda: nn.Sequential(nn.Flatten()), "at least one parameter that can be trained"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3).requires_grad_(False)), "can be trained"),
        (lambda: nn.Sequential(nn.ModuleDict({"größe": nn.Linear(36, 3)})), "'0.größe.weight': expected a name of"),
        (lambda: nn.Sequential(*(nn.Linear(1, 1) for _ in range(4097))), "at most 8192 tensors, got 8194"),
        (lambda: nn.Sequential(nn.ModuleDict({"units": nn.Linear(36, 3)})), None),
    ],
)
def test_modules_that_cannot_travel_are_refused(module: Callable[[], Any], message: str | None) -> None:
    """Nothing of it needs data. A name below the first level is free."""
    if message is None:
        parts(module(), None)
        return
    with pytest.raises(InputError, match=message):
        parts(module(), None)


def test_a_buffer_of_the_module_itself_belongs_to_no_unit() -> None:
    """It would be lost when the units run alone."""
    net = Net()
    net.register_buffer("mean", torch.zeros(1))
    with pytest.raises(InputError, match="'mean' belongs to no unit"):
        take(net)


def test_a_child_with_a_name_that_the_contract_needs_is_refused() -> None:
    """`taps` is an attribute of every model."""
    net = Net()
    net.taps = nn.ReLU()
    with pytest.raises(InputError, match="'taps': a name that fedfit needs itself"):
        take(net)


def test_one_activation_used_twice_in_a_sequence_runs_twice() -> None:
    """Without it, the sequence Linear, ReLU, Linear, ReLU would lose its last module."""
    relu = nn.ReLU()
    layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), relu, nn.Linear(5, 3), relu)
    model = take(layers, None)
    assert [unit.name for unit in model.units] == ["0", "1", "2", "3", "4"]
    x = torch.randn(4, 1, 6, 6)
    assert torch.equal(model(x), layers(x))


def test_lazy_parameters_need_a_shape_and_get_it_from_the_data() -> None:
    """36 inputs once data went through; before that there is nothing to send."""
    with pytest.raises(InputError, match=r"'1.weight', '1.bias' have no shape yet; .*Task\(input="):
        check_shapes(parts(_lazy(), None))
    assert take(_lazy(), None).state_dict()["1.weight"].shape == (3, 36)


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(3))


def test_dropout_and_batchnorm_do_not_disturb_the_comparison() -> None:
    """Evaluation mode; the statistics stay those of a new module, and a part frozen in evaluation mode stays so."""
    layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(32, 3))
    layers[1].eval()
    model = take(layers, None)
    assert model.state_dict()["1.num_batches_tracked"].item() == 0
    assert (layers.training, layers[1].training, layers[2].training) == (True, False, True)


def test_a_name_that_methods_use_for_their_own_tensors_is_refused() -> None:
    """`extra/head.weight` would be a method's when it is averaged."""
    layers = nn.Sequential(nn.Flatten())
    layers.add_module("extra/head", nn.Linear(36, 3))
    with pytest.raises(InputError, match="names that begin with 'extra/' are those of methods"):
        take(layers, None)
