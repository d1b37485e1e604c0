"""InclusiveFL: whose tensors are averaged with whose, and what a top block learns from the larger size."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from depth import NUM_CLASSES, SHAPE, equal
from federation import Federation, Shifted
from linear import TensorFrozen, TensorState
from torch import Tensor, nn

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.methods.base import Header, Method
from edge_client.models import registry as models
from edge_client.models.contract import Model, from_sequential
from edge_client.models.slicing import parse
from edge_client.models.user_module import parts

SIZES = ("full", "depth:2")  # of `chain`: four blocks, and two


def chain() -> Model:
    """Four blocks of one number each in one stage; all tensors are 10."""
    layers = OrderedDict((name, nn.Linear(1, 1, bias=False)) for name in ("stem", "a", "b", "c", "d", "head"))
    model = from_sequential(nn.Sequential(layers), input_shape=(1,), stages=[0, 1, 1, 1, 1, 2])
    for param in model.parameters():
        nn.init.constant_(param, 10.0)
    return model


def _method(rungs: tuple[str, ...] = SIZES, **parameters: Any) -> Method:
    return registry.get("inclusivefl", parameters, rungs)


def _fold(updates: list[tuple[int, str, dict[str, float]]], rungs: tuple[str, ...] = SIZES, **parameters: Any) -> Any:
    """Updates as (n, slice, block -> change); returns what the server's tensors moved by."""
    method, model = _method(rungs, **parameters), chain()
    state = dict(model.state_dict())
    state |= {f"extra/{name}": value for name, value in method.travel.extra_tensors(model).items()}
    stored = [name if name.startswith("extra/") else f"model/{name}" for name in state]
    sent = []
    for number, (n, cut, changes) in enumerate(updates):
        places = method.slices.places(model, cut, stored)
        moved = {f"model/{block}.weight": torch.full((1, 1), 10 + change) for block, change in changes.items()}
        tensors = {places[name].name.removeprefix("model/"): value for name, value in moved.items()}
        sent.append((Header(device=str(number), num_samples=n, slice=cut), tensors))
    folded = method.server.fold(TensorState(state, method.travel.notes(model)), TensorFrozen(sent), round=1)
    return {name.replace(".weight", ""): round(float(value) - 10, 5) for name, value in folded}


LARGE = {"stem": 0.0, "a": 4.0, "b": 1.0, "c": 2.0, "d": 6.0, "head": 7.0}
SMALL = {"stem": 4.0, "a": 8.0, "b": 5.0, "head": 3.0}


def test_a_top_block_learns_from_the_larger_models_blocks() -> None:
    """Blocks d_s .. d_l of the large size moved by 1, 2, 6: m = 3; the small top by 5: .8 * 5 + .2 * 3 = 4.6.

    Below the top both are averaged, n = 1 and 3: stem (0 + 12)/4 = 3, a (4 + 24)/4 = 7. Classifiers are their own.
    """
    assert _fold([(1, "full", LARGE), (3, "depth:2", SMALL)]) == {
        "stem": 3.0,
        "a": 7.0,
        "b": 1.0,
        "c": 2.0,
        "d": 6.0,
        "head": 7.0,
        "extra/depth:2/b": 4.6,
        "extra/depth:2/head": 3.0,
    }


def test_without_momentum_a_top_block_is_its_sizes_mean() -> None:
    """beta = 0: (1 * 5 + 3 * 1)/4 = 2 of two small devices."""
    updates = [(1, "full", LARGE), (1, "depth:2", SMALL), (3, "depth:2", {**SMALL, "b": 1.0})]
    assert _fold(updates, momentum=0)["extra/depth:2/b"] == 2.0
    assert _fold(updates)["extra/depth:2/b"] == pytest.approx(0.8 * 2 + 0.2 * 3)


def test_m_is_of_the_larger_sizes_devices_alone() -> None:
    """Three sizes: the middle one learns from the largest, the smallest from the middle, whose top is not the model's.

    Sizes of 4, 3 and 2 blocks. Middle: b 3, c 9. m of the smallest = (3 + 9)/2 = 6: .8 * 5 + .2 * 6 = 5.2.
    m of the middle = (2 + 6)/2 = 4 of the largest's c and d: .8 * 9 + .2 * 4 = 8.
    """
    rungs = ("full", "depth:3", "depth:2")
    middle = {"stem": 0.0, "a": 0.0, "b": 3.0, "c": 9.0, "head": 0.0}
    moved = _fold([(1, "full", LARGE), (1, "depth:3", middle), (1, "depth:2", SMALL)], rungs)
    assert moved["extra/depth:2/b"] == pytest.approx(5.2)
    assert moved["extra/depth:3/c"] == pytest.approx(8.0)
    assert (moved["b"], moved["c"]) == (2.0, 2.0)  # b: the two larger ones', (1 + 3)/2; c: the largest's


@pytest.mark.parametrize(("updates", "top"), [([(1, "depth:2", SMALL)], 5.0), ([(1, "full", LARGE)], 0.0)])
def test_a_size_that_nobody_sent_teaches_and_learns_nothing(updates: Any, top: float) -> None:
    """No neighbour: the plain mean. No device of its own: it stays."""
    assert _fold(updates)["extra/depth:2/b"] == top


def _resnet(cut: str = "full") -> Model:
    torch.manual_seed(1)
    options = {"base_width": 2, "small_stem": True}
    return models.build("resnet18", input_shape=SHAPE, num_classes=NUM_CLASSES, options=options, spec=parse(cut))


def test_in_a_staged_model_every_stage_of_different_depth_has_a_top_block() -> None:
    """Stages 3 and 4 differ: block 1 of each is the small size's own; it learns from tensors of its shape alone."""
    rungs = ("full", "depth:2.2.1.1")
    method = _method(rungs)
    own = {name.split("/")[1].split(".")[0] for name in method.travel.extra_tensors(_resnet())}
    assert own == {"stage3_block1", "stage4_block1", "head"}
    names = [f"model/{name}" for name in _resnet().state_dict()]
    names += [f"extra/{name}" for name in method.travel.extra_tensors(_resnet())]
    places = method.slices.places(_resnet(), rungs[1], names)
    assert {name.removeprefix("model/") for name in places} == {*_resnet(rungs[1]).state_dict()}
    assert places["model/stage3_block1.conv1.weight"].name == "extra/depth:2.2.1.1/stage3_block1.conv1.weight"
    assert places["model/stage1_block2.conv1.weight"].name == "model/stage1_block2.conv1.weight"
    assert places["model/head.linear.bias"].name == "extra/depth:2.2.1.1/head.linear.bias"


def _federation(rungs: tuple[str, ...], slices: dict[str, str], name: str = "inclusivefl", **parameters: Any) -> Any:
    data = {device: Shifted(16, seed) for seed, device in enumerate(("a", "b", "c"))}
    made = Federation(
        method=name, parameters=parameters, build=_resnet, build_slice=_resnet, data=data, slices=slices, rungs=rungs
    )
    made.round()
    return made


def test_trained_tops_learn_and_buffers_do_not() -> None:
    """One round of three devices, with momentum and without: what differs are the parameters of small top blocks."""
    rungs, slices = ("full", "depth:1.1.1.1"), {"b": "depth:1.1.1.1", "c": "depth:1.1.1.1"}
    plain, learned = (_federation(rungs, slices, momentum=beta).server for beta in (0.0, 0.2))
    differing = {name for name, value in plain.items() if not torch.equal(value, learned[name])}
    tops = {name for name, _ in _resnet("depth:1.1.1.1").named_parameters() if "_block1." in name}
    assert differing == {f"extra/depth:1.1.1.1/{name}" for name in tops}
    assert not torch.equal(plain["head.linear.weight"], plain["extra/depth:1.1.1.1/head.linear.weight"])


def test_with_one_size_it_is_fedavg_bit_for_bit() -> None:
    """Nothing is anybody's own, and there is no neighbour; over it InCo, too."""
    plain = _federation(("full",), {}, "fedavg").server
    assert equal(_federation(("full",), {}).server, plain)
    off = _federation(("full",), {}, "inco+inclusivefl", rule="off").server
    assert equal(off, plain)


def test_inco_over_it_changes_what_lies_in_the_model() -> None:
    """Targets of anchors, and nothing of what is one size's own."""
    rungs, slices = ("full", "depth:1.1.1.1"), {"b": "depth:1.1.1.1"}
    plain, changed = (_federation(rungs, slices, name).server for name in ("inclusivefl", "inco+inclusivefl"))
    differing = [name for name, value in plain.items() if not torch.equal(value, changed[name])]
    assert differing == [f"stage{stage}_block2.conv{conv}.weight" for stage in (1, 2, 3, 4) for conv in (1, 2)]


def test_sizes_must_lie_inside_one_another() -> None:
    """A later slice with more blocks in some stage; the whole model last."""
    for rungs in (("full", "depth:1.1.2.2", "depth:2.2.1.1"), ("depth:1.1.1.1", "full")):
        with pytest.raises(InputError, match=r"needs each inside the one before it, and .* is not inside"):
            _method(rungs).check(_resnet())
    _method(("full", "depth:1.1.2.2", "depth:1.1.1.1")).check(_resnet())


def test_what_it_cannot_serve_is_said_before_the_run() -> None:
    """Widths; each architecture alone; a task whose shapes only devices know."""
    table = {"name": "x", "model": {"name": "resnet18", "input": [1, 8, 8]}, "classes": ["a", "b"]}
    table["method"] = {"name": "inclusivefl"}
    with pytest.raises(InputError, match="'inclusivefl' trains slices of depth or layers, got 'width:1/2'; widths are"):
        registry.architectures(parse_table(RunFile, {**table, "slices": ["full", "width:1/2"]}, source="test"))
    with pytest.raises(InputError, match="sharing: 'inclusivefl' combines the slices of one model"):
        registry.architectures(parse_table(RunFile, {**table, "sharing": "architecture"}, source="test"))
    lazy = parts(nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.LazyLinear(2)), None)
    with pytest.raises(InputError, match="'inclusivefl' needs the shape of a sample on the server"):
        _method(("full", "layers:0")).check(lazy)


def test_the_numbers_are_right_for_tensors_of_any_shape() -> None:
    """By hand on matrices: g = 1 everywhere, m = 3 everywhere: 1.4."""
    method = _method()
    ones = torch.ones(2, 2)
    state = TensorState({"b": 0 * ones, "top/b": 0 * ones}, {"momentum": (("top/", "depth:2", "full", ("",)),)})
    updates: list[tuple[Header, dict[str, Tensor]]] = [
        (Header(device="a", num_samples=1, slice="full"), {"b": 3 * ones}),
        (Header(device="b", num_samples=1, slice="depth:2"), {"top/b": ones}),
    ]
    folded = dict(method.server.fold(state, TensorFrozen(updates), round=1))
    torch.testing.assert_close(folded["top/b"], 1.4 * ones)
