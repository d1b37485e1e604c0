"""What holds for every weight-sharing method: with its special part off it is FedAvg, bit for bit; with it, not."""

from __future__ import annotations

from typing import Any

import pytest
from depth import KINDS, equal, model_of
from federation import Federation, Shifted

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
