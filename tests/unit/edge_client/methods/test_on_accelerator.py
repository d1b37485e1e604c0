"""Every method trains on an accelerator to the weights of the CPU: two rounds of two devices, three steps each.

The test accelerator runs the CPU's kernels, so nothing may differ; on a GPU the order of sums does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerated import discrete, is_real, needs_accelerator
from depth import NUM_CLASSES, SHAPE, Memory, halves, job_of, model_of, plan_of
from federation import Federation, Shifted
from torch import Tensor, nn

from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.device.accelerator import CPU, Accelerator
from edge_client.methods import registry as methods
from edge_client.models import registry
from edge_client.models.contract import Model
from edge_client.models.slicing import parse
from edge_client.training.evaluate import evaluate
from edge_client.training.loop import Settings, train

pytestmark = needs_accelerator()

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"hidden": [16, 8]}),
    "preresnet20": ("preresnet20", {"width": 4}),
    "small-cnn": ("small-cnn", {}),
    "vit": ("vit-t-16", {"patch": 4, "width": 8, "heads": 2, "depth": 4}),
}


@dataclass(frozen=True)
class Case:
    """What two devices train."""

    method: str
    model: str = "mlp"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    rung: str = "full"  # of the second device; the first has the whole model


CASES = (
    Case("fedavg", "preresnet20"),
    Case("fedavg", "vit"),
    Case("fedprox"),
    Case("scaffold", "preresnet20"),
    Case("fednova"),
    Case("moon", "preresnet20"),
    Case("fedper"),
    Case("local"),
    Case("heterofl", parameters={"mask": True}, rung="width:1/2"),
    Case("fedrolex", rung="width:1/2"),
    Case("inclusivefl", "preresnet20", rung="depth:1.1.1"),
    Case("scalefl", "preresnet20", rung="exit:2"),
    Case("splitmix", parameters={"bases": 2}, rung="width:1/2"),
    Case("inco", "preresnet20"),
    Case("inco+moon"),
    Case("fedepth", "preresnet20"),
    Case("m-fedepth", "preresnet20"),
    Case("felo", rung="width:1/2"),
    Case("velo"),
    Case("fedhe"),
    Case("fedproto"),
    Case("fedin", "preresnet20"),
    Case("fedin", parameters={"alleviation": "sequential"}),
    Case("fedmd", parameters={"samples": 8}),
    Case("draftfed", "small-cnn", parameters={"warmup_rounds": 0}),
    Case("fedgkt", "preresnet20"),
)


def built(case: Case, rung: str = "full") -> Model:
    name, options = MODELS[case.model]
    torch.manual_seed(1)
    return registry.build(name, input_shape=SHAPE, num_classes=NUM_CLASSES, options=options, spec=parse(rung))


def federation(case: Case, device: Accelerator) -> Federation:
    """Two rounds with momentum; 20 samples in batches of 8, in microbatches of 4."""
    slices = {"b": case.rung} if case.rung != "full" else {}
    name, options = MODELS[case.model]
    table = {
        "name": "t",
        "model": {"name": name, "input": list(SHAPE), **options},
        "classes": [str(number) for number in range(NUM_CLASSES)],
    }
    made = Federation(
        method=case.method,
        parameters=case.parameters,
        build=lambda: built(case),
        build_slice=lambda cut: built(case, cut),
        data={"a": Shifted(20, 0), "b": Shifted(20, 1)},
        slices=slices,
        rungs=("full", *slices.values()),
        settings={"momentum": 0.9, "microbatch": 4},
        device=device,
        run=parse_table(RunFile, table, source="test") if case.method == "fedgkt" else None,
    )
    if case.method in ("fedmd", "draftfed"):
        made.memory = {"public": torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(9))}
    for _ in range(2):
        made.round()
    return made


def largest_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert {*one} == {*other}
    pairs = ((value.cpu().double(), other[name].cpu().double()) for name, value in one.items())
    return max(float((value - same).abs().max()) for value, same in pairs if value.numel())


ALLOWED = 1e-4 if is_real() else 0.0


@pytest.mark.parametrize("case", CASES, ids=[f"{case.method}-{case.model}-{case.rung}" for case in CASES])
def test_a_method_trains_to_the_weights_of_the_cpu(case: Case) -> None:
    """Weights, the method's state on each device, and what it exchanges; nothing stays behind on the accelerator."""
    device = discrete()
    device.free()
    device.reset_peak()
    there, here = federation(case, device), federation(case, CPU)
    assert device.peak_reserved_bytes() > 0
    assert largest_difference(there.server, here.server) <= ALLOWED
    for name, state in here.states.items():
        assert {key: value.device.type for key, value in there.states[name].items()} == dict.fromkeys(state, "cpu")
        assert not state or largest_difference(there.states[name], state) <= ALLOWED


GROUPS: Mapping[str, dict[str, Any]] = {
    "groups": {},
    "buffered": {"buffered": True},
    "recomputed units": {"recompute": "units"},
    "fused": {"recompute": "fused"},
    "skipped": {"start": 2},
    "two models": {"num_models": 2, "together": True},
    "heads of their own": {"method": "m-fedepth"},
    "channels last": {"channels_last": True},
}


def trained_in_groups(kind: str, how: Mapping[str, Any], device: Accelerator, folder: Path) -> dict[str, Tensor]:
    """Everything that was trained: the model, its peers and heads."""
    how = dict(how)
    name, start, together = how.pop("method", "fedepth"), how.pop("start", 0), how.pop("together", False)
    model = model_of(kind)
    groups = () if together else halves(model, start)
    plan = plan_of(groups, skipped=() if together else model.order[1:-1][:start], microbatch=4, **how)
    if plan.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    made = methods.get(name, {})
    extra = {key: device.move(value) for key, value in made.travel.extra_tensors(model).items()}
    model = device.move(model)
    model.recompute = plan.recompute
    client = made.client()
    build: Callable[[str], Model] = lambda purpose: device.move(model_of(kind, seed=2))  # noqa: E731
    client.begin(job_of(model, plan, build=build, extra=extra))
    settings = Settings(
        batch=8,
        microbatch=4,
        learning_rate=0.1,
        seed=3,
        momentum=0.9,
        buffered=plan.buffered,
        folder=folder,
        channels_last=plan.channels_last,
    )
    train(model, client, Memory(24), settings)
    outcome = client.end()
    return {**model.state_dict(), **outcome.extra, **outcome.state}


@pytest.mark.parametrize("how", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("kind", ["preresnet20, running", "vit"])
def test_groups_of_blocks_train_to_the_weights_of_the_cpu(kind: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Outputs of frozen units pass through files or are made anew; heads and peers are trained beside."""
    if kind == "vit" and how.get("recompute") == "fused":
        pytest.skip("nothing of a transformer is fused")
    there, here = (trained_in_groups(kind, how, device, tmp_path) for device in (discrete(), CPU))
    assert largest_difference(there, here) <= ALLOWED


@pytest.mark.parametrize("recompute", [None, "units"])
def test_dropout_draws_the_same_in_the_second_pass(recompute: str | None) -> None:
    """A recomputed unit drops what it dropped before: with the device's own generator put back, both ways are equal."""
    device = discrete()
    weights = []
    for kind in (None, recompute):
        torch.manual_seed(4)
        options = {"hidden": [12, 12, 12]}
        model = registry.build("mlp", input_shape=SHAPE, num_classes=NUM_CLASSES, options=options)
        for name in model.order[1:-1]:
            unit = model.get_submodule(name)
            assert isinstance(unit, nn.Sequential)
            unit.append(nn.Dropout(0.5))
        model = device.move(model)
        model.recompute = kind
        client = methods.get("fedavg", {}).client()
        client.begin(job_of(model, None))
        torch.manual_seed(5)
        train(model, client, Memory(16), Settings(batch=8, microbatch=8, learning_rate=0.1, seed=1))
        weights.append(model.state_dict())
    assert largest_difference(*weights) == 0


def test_a_model_is_evaluated_where_it_lies() -> None:
    """The same counts and the same loss as on the CPU."""
    results = []
    for device in (discrete(), CPU):
        model = device.move(model_of("preresnet20"))
        results.append(evaluate(model, model, Memory(20), num_classes=NUM_CLASSES, microbatch=8))
    there, here = results
    assert torch.equal(there.confusion, here.confusion)
    assert there.loss_sum == pytest.approx(here.loss_sum, abs=ALLOWED)


def test_a_loss_that_forgets_a_tensor_on_the_host_fails_loudly() -> None:
    """As on a GPU: the mistake is not computed away."""
    device = discrete()
    model = device.move(model_of("mlp"))
    client = methods.get("fedavg", {}).client()
    weights = torch.ones(8)
    client.begin(job_of(model, None, loss=lambda batch, phase: model(batch.x).sum(1) * weights))
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        train(model, client, Memory(16), Settings(batch=8, microbatch=8, learning_rate=0.1, seed=1))
