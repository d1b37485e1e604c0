"""What holds for every weight-sharing method: with its special part off it is FedAvg, bit for bit; with it, not."""

from __future__ import annotations

from typing import Any

import pytest
from depth import KINDS, equal, model_of
from federation import Federation, Shifted

from edge_client.errors import InputError
from edge_client.methods import registry

OFF = [
    ("fedprox", {"mu": 0}),
    ("scaffold", {"correction": False}),
    ("fednova", {}),  # devices make equally many steps here
    ("moon", {"mu": 0}),
    ("fedper", {"personal": 0}),
    ("felo", {"alpha": 0}),
    ("velo", {"alpha": 0}),
    ("fedin", {"mu": 0, "pairs": 0}),
    ("heterofl", {"uniform": False}),
    ("fedrolex", {"uniform": False}),
    ("inclusivefl", {}),
    ("scalefl", {"uniform": False}),
    ("splitmix", {"bases": 1}),
    ("fedepth", {}),  # no plan: everything at once
    ("fedepth+fedprox", {"mu": 0}),
    ("inco", {"rule": "off"}),
    ("inco+fedprox", {"rule": "off", "mu": 0}),
]
WEIGHTED = ["fedavg", "fedprox", "scaffold", "fednova", "moon", "fedper"]  # share weights; InCo can be put over them
WEIGHTED += ["heterofl", "fedrolex", "inclusivefl", "scalefl"]
ON = [
    ("fedprox", {}),
    ("scaffold", {}),
    ("moon", {}),
    ("fedper", {}),
    ("local", {}),
    ("felo", {}),
    ("fedin", {"mu": 0}),
]  # FedNova: in its own tests
ALONE = [
    ("fedhe", {"alpha": 0}, {}),
    ("fedproto", {"ld": 0}, {}),
]


def _three_rounds(name: str, parameters: dict[str, Any], kind: str) -> dict[str, Any]:
    """18, 24 and 21 samples in batches of 8: three steps each, with momentum."""
    data = {device: Shifted(n, k) for k, (device, n) in enumerate((("a", 18), ("b", 24), ("c", 21)))}
    made = Federation(
        method=name,
        parameters=parameters,
        build=lambda: model_of(kind),
        data=data,
        settings={"momentum": 0.9, "weight_decay": 0.01, "microbatch": 8},
    )
    for _ in range(3):
        weights = made.round()
    return weights


@pytest.mark.parametrize(("name", "parameters"), OFF, ids=[name for name, _ in OFF])
@pytest.mark.parametrize("kind", ["mlp", "resnet10"])
def test_with_its_extras_off_a_method_is_fedavg_bit_for_bit(name: str, parameters: dict[str, Any], kind: str) -> None:
    """One architecture, all devices, three rounds; buffers of BatchNorms included."""
    assert kind in KINDS
    assert equal(_three_rounds(name, parameters, kind), _three_rounds("fedavg", {}, kind))


@pytest.mark.parametrize(("name", "parameters"), ON, ids=[name for name, _ in ON])
def test_with_its_extras_on_it_is_not(name: str, parameters: dict[str, Any]) -> None:
    """Something is really used."""
    assert not equal(_three_rounds(name, parameters, "mlp"), _three_rounds("fedavg", {}, "mlp"))


@pytest.mark.parametrize(("name", "off", "on"), ALONE, ids=[name for name, _, _ in ALONE])
def test_devices_that_share_no_weights_train_alone_or_with_what_others_know(
    name: str, off: dict[str, Any], on: dict[str, Any]
) -> None:
    """Switched off, every device has the model of `local`, bit for bit; with knowledge another one after round 2."""
    models = {}
    for key, method, parameters in (("alone", "local", {}), ("off", name, off), ("on", name, on)):
        data = {device: Shifted(n, k) for k, (device, n) in enumerate((("a", 18), ("b", 24)))}
        made = Federation(method=method, parameters=parameters, build=lambda: model_of("mlp"), data=data)
        made.round()
        made.round()
        models[key] = {n: t for n, t in made.states["a"].items() if n.startswith("model/")}
        assert all("model/" not in name and not name.startswith("block") for _, sent in made.updates for name in sent)
    assert equal(models["alone"], models["off"])
    assert not equal(models["alone"], models["on"])


@pytest.mark.parametrize("base", WEIGHTED)
def test_inco_switched_off_is_its_base_bit_for_bit(base: str) -> None:
    """Three rounds, the base's own part on; the default rule is not."""
    plain = _three_rounds(base, {}, "vit")
    assert equal(_three_rounds(f"inco+{base}", {"rule": "off"}, "vit"), plain)
    assert not equal(_three_rounds(f"inco+{base}", {}, "vit"), plain)


@pytest.mark.parametrize(
    "name", ["scaffold", "fednova", "moon", "fedper", "local", "heterofl", "inclusivefl", "scalefl", "splitmix"]
)
@pytest.mark.parametrize("above", ["fedepth", "m-fedepth"])
def test_methods_that_need_the_whole_model_cannot_be_under_fedepth(name: str, above: str) -> None:
    """They are not listed as pairs, and the refusal says why."""
    assert f"{above}+{name}" not in registry.names()
    with pytest.raises(InputError, match=f"'{name}' cannot be under '{above}': its rule is for a model whose parts"):
        registry.validate(f"{above}+{name}", {})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("moon", {"mu": -1}, "mu: expected 0 to 1000, got -1.0; mu in the paper: weight of the contrastive loss"),
        ("moon", {"temperature": 0}, "temperature: expected 0.001 to 1000, got 0.0; tau in the paper: divides the"),
        ("fedper", {"personal": -1}, "personal: expected 0 to 1000, got -1; K_P in the paper: last units"),
        ("scaffold", {"correction": 1}, "correction: expected bool, got int 1; c - c_i in the paper: correct each"),
        ("local", {"mu": 1}, "'local' has no parameters of its own, got mu = 1"),
    ],
)
def test_parameters_out_of_range_name_field_value_range_and_symbol(
    name: str, parameters: dict[str, Any], message: str
) -> None:
    """The coordinator says so before a run starts."""
    with pytest.raises(InputError) as caught:
        registry.validate(name, parameters)
    assert message in str(caught.value)


def test_what_methods_keep_counts_in_the_plan() -> None:
    """Copies of all weights add up over the parts of a name; what a step makes is the largest of them."""
    kept = {name: registry.plan_rules(name, {}).weight_copies for name in registry.names()}
    assert {name: copies for name, copies in kept.items() if copies} == {
        "inco+moon": 2,
        "inco+scaffold": 2,
        "moon": 2,
        "scaffold": 2,
        "splitmix": 21,  # weights, gradients and momentum of seven bases
    }
    rules = registry.plan_rules("fedepth+fedprox", {})
    assert (rules.groups, rules.partial, rules.step_copies) == (True, True, 1)
    assert registry.plan_rules("moon", {"mu": 0}).weight_copies == 0


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({}, (1, 16, False, 1)),
        ({"mu": 0}, (0, 16, False, 1)),
        ({"pairs": 0}, (1, 0, False, 1)),
        ({"rescale-outer": True}, (1, 16, True, 1)),
        ({"alleviation": "projection", "mu": 0}, (2, 16, True, 1)),
        ({"alleviation": "sequential"}, (1, 16, False, 2)),
    ],
)
def test_what_fedin_needs_counts_in_the_plan(parameters: dict[str, Any], expected: tuple[int, int, bool, int]) -> None:
    """Copies of a parameter, foreign samples, whether their gradients are kept apart, optimizers with a state."""
    rules = registry.plan_rules("fedin", parameters)
    assert (rules.step_copies, rules.again, rules.apart, rules.optimizers) == expected


def test_learning_from_shared_samples_counts_in_the_plan() -> None:
    """A second optimizer with a state; DraftFed looks inside of units, which then cannot be made again in backward."""
    told = {name: registry.plan_rules(name, {}) for name in ("fedmd", "draftfed", "fedhe")}
    assert {name: rules.optimizers for name, rules in told.items()} == {"fedmd": 2, "draftfed": 2, "fedhe": 1}
    assert {name: rules.recomputes for name, rules in told.items()} == {"fedmd": True, "draftfed": False, "fedhe": True}
    assert registry.plan_rules("draftfed", {"draft-epochs": 0}) == registry.plan_rules("fedhe", {})


@pytest.mark.parametrize("name", registry.names())
def test_methods_that_share_a_measurement_have_the_same_client(name: str) -> None:
    """What differs on the server alone takes no other memory on a device."""
    other = registry.trains_as(name)
    made, measured = registry.get(name, {}), registry.get(other, {})
    assert other == name or type(made.client()) is type(measured.client())
    assert made.plans.weight_copies == measured.plans.weight_copies
