"""Bytes of knowledge: what clients and servers really make has the size of the papers' formulas, and of the tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from depth import NUM_CLASSES, SHAPE, Memory, model_of
from knowing import run

from edge_client.knowledge.kinds import Knowledge, PublicSamples
from edge_client.methods import registry
from edge_client.methods.draftfed import draft_taps
from edge_client.methods.fedin import extractor
from edge_client.models.contract import Model
from edge_client.models.taps import flat_width, tapped

PUBLIC = PublicSamples(values=torch.randn(12, *SHAPE, generator=torch.Generator().manual_seed(4)))
KNOWING = [name for name in registry.names() if registry.knowledge(name, {}) is not None]
PARAMETERS: dict[str, dict[str, Any]] = {
    "fedmd": {"public-samples": 12},
    "draftfed": {"public-samples": 12, "draft-batch": 5},
    "fedgkt": {"max-bytes": 1000},
}


def _numbers(name: str, model: Model) -> int:
    """Of one upload, by the formulas of the specifications; FedGKT's labels are integers beside them."""
    features, classes = flat_width(model, "features"), NUM_CLASSES
    (between,) = (torch.Size(unit.out_shape).numel() for unit in model.units if unit.name == extractor(model))
    taps = draft_taps(model)
    seen, _ = tapped(model, [taps[1], taps[max(taps)]], torch.zeros(2, *SHAPE))
    drafted = sum(tensor[0].numel() for tensor in seen.values())
    return {
        "felo": classes * (features + classes),
        "velo": classes * (features + classes),
        "fedhe": classes * classes,
        "fedproto": classes * features,
        "fedin": 16 * (between + features),
        "fedmd": 12 * classes,
        "draftfed": 5 * (drafted + classes),
        "fedgkt": 1000 // (4 * (between + classes) + 8) * (between + classes),
    }[name]


def _floats(items: tuple[Knowledge, ...]) -> int:
    return sum(t.numel() for item in items for t in item.tensors().values() if t.is_floating_point())


@pytest.mark.parametrize("kind", ["mlp", "resnet10"])
@pytest.mark.parametrize("name", KNOWING)
def test_an_upload_has_the_formulas_numbers_and_the_tables_bytes(name: str, kind: str) -> None:
    """20 samples of 3 classes; what `methods show` counts is what the client half sends, to the byte."""
    method, model = registry.get(name, PARAMETERS.get(name, {})), model_of(kind)
    sent = run(method.client(), model, Memory(20), knowledge=(PUBLIC,), classes=NUM_CLASSES, round=1).knowledge
    assert _floats(sent) == _numbers(name, model)
    for codec in ("fp32", "fp16"):
        assert sum(item.nbytes(codec) for item in sent) == sum(
            item.nbytes(codec) for item in method.knowledge.traffic(model).up
        )
    integers = sum(item.nbytes() for item in sent) - 4 * _floats(sent)
    labels = sum(8 * len(item.tensors()["labels"]) for item in sent if item.kind == "maps")
    assert integers - labels <= 0.01 * 4 * _floats(sent) + 512
