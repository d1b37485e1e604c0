"""Bytes of knowledge on the wire against the formulas of the papers, and against FedAvg's for real models.

Payload: the tensors of knowledge in what the client half or the server really made, against the formula. Wire: what a
round of the simulator moves more than a method that exchanges no knowledge (FedAvg, or Local where no weights travel),
with names, tables, frames and messages. The network is an MLP with ends as wide as those of a ResNet18's middle for
32x32 images, so that the numbers are those of the specifications: 4,096 = 64x8x8 behind the extractor, F = 512, C = 10.
Containers of real models are made of their real drafts and tables, with the round's exchange of weights beside them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmarks.figures import Figure
from benchmarks.simulated_bytes import Moved, simulated
from coordinator.cli.methods import describe_method
from edge_client.knowledge.kinds import DraftSet, Knowledge, named_tensors
from edge_client.methods.draftfed import draft_taps
from edge_client.models import registry as models
from edge_client.models.taps import tapped
from edge_client.wire.container import build_header
from edge_client.wire.tensors import codec_for

__all__ = ["FORMULAS", "draft_bytes", "measure", "payload_bytes"]

_C, _F, _IN, _S, _N, _GKT = 10, 512, 4096, 16, 32, 2**20
_MODEL = {"model.name": "mlp", "model.input": [1, 8, 8], "model.hidden": [_IN, _F]}
_GKT_ROWS = _GKT // (4 * (_IN + _C) + 8)
FORMULAS = {  # numbers of 4 bytes, down and up
    "felo": (_C * (_F + _C), _C * (_F + _C)),
    "velo": (_C * (_F + _C), _C * (_F + _C)),
    "fedhe": (_C * _C, _C * _C),
    "fedproto": (_C * _F, _C * _F),
    "fedin": (_S * (_IN + _F), _S * (_IN + _F)),
    "fedmd": (_N * _C, _N * _C),
    "draftfed": (_N * (_IN + _F + _C), _N * (_IN + _F + _C)),
    "fedgkt": (_GKT_ROWS * _C, _GKT_ROWS * (_IN + _C)),
}
_SETTINGS: dict[str, dict[str, object]] = {
    "fedmd": {"public": "digits", "public-samples": _N},
    "draftfed": {"public": "digits", "public-samples": _N, "draft-batch": _N},
    "fedgkt": {"max-bytes": _GKT},
}
_WITH_WEIGHTS = ("felo", "velo", "fedin")
_RESNETS = {"resnet50": (49,), "resnet101": (49, 100), "resnet152": (49, 100, 151)}
_SAMPLES = 128


def measure(*, quick: bool) -> list[Figure]:
    """Payload and wire of every method; shares of FedAvg's bytes for ResNets."""
    return [*_on_the_wire(["fedhe"] if quick else list(FORMULAS)), *_resnet18(), *_drafts(quick=quick)]


def payload_bytes(items: Iterable[Knowledge]) -> int:
    """Of the floating-point tensors: what the formulas count."""
    named = named_tensors(items)
    return sum(4 * tensor.numel() for _, tensor in named if tensor.is_floating_point())


def _on_the_wire(names: list[str]) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="fedfit-knowledge-") as folder:
        plain = {name: simulated(name, Path(folder), settings=_MODEL) for name in ("fedavg", "local")}
        for name in names:
            moved = simulated(name, Path(folder), settings={**_MODEL, **_SETTINGS.get(name, {})})
            figures += _compared(name, moved, plain["fedavg" if name in _WITH_WEIGHTS else "local"])
    return figures


def _compared(name: str, moved: Moved, plain: Moved) -> list[Figure]:
    figures = []
    for way, formula in zip(("down", "up"), FORMULAS[name], strict=True):
        wire, payload = getattr(moved, way) - getattr(plain, way), 4 * formula
        framing = wire - payload
        allowed = 0.01 * payload + 512
        figures += [
            Figure(name=f"{name} {way}: formula", unit="bytes", values=(payload,)),
            Figure(name=f"{name} {way}: wire without it", unit="bytes", values=(framing,), at_most=allowed),
        ]
    return figures


def _resnet18() -> list[Figure]:
    """Containers as they travel."""
    about = {"model": "resnet18", "input_shape": (3, 32, 32), "num_classes": _C, "codec": "fp32"}
    plain, felo = (describe_method(name, {}, **about) for name in ("fedavg", "felo"))  # type: ignore[arg-type]
    figures = []
    for way in ("bytes_up", "bytes_down"):
        share = 100 * (felo[way] - plain[way]) / plain[way]
        figures.append(Figure(name=f"Felo over FedAvg, ResNet18, {way[6:]}", unit="%", values=(share,), at_most=0.05))
    return figures


def _drafts(*, quick: bool) -> list[Figure]:
    """Up with all supplements and down, over both ways of the weights; the mean of the three, as the paper counts."""
    figures = []
    for codec, goal in (("fp32", 8.0), ("fp16", 4.0)):
        drafts = weights = 0
        for name in list(_RESNETS)[: 1 if quick else None]:
            up, down = draft_bytes(name, codec)
            full = models.build(name, input_shape=(3, 32, 32), num_classes=_C, options={})
            own = 2 * sum(4 * tensor.numel() for tensor in full.state_dict().values())
            share = 100 * (up + down) / own
            figures.append(Figure(name=f"DraftFed over FedAvg (fp32), {name}, {codec}", unit="%", values=(share,)))
            drafts, weights = drafts + up + down, weights + own
        figures.append(
            Figure(
                name=f"DraftFed over FedAvg (fp32), mixed ResNets, {codec}",
                unit="%",
                values=(100 * drafts / weights,),
                at_most=goal,
            )
        )
    return figures


@torch.no_grad()
def draft_bytes(name: str, codec: str, samples: int = _SAMPLES) -> tuple[int, int]:
    """Containers of a model's real drafts, up with supplements for shallower ResNets, and of its targets, down."""
    model = models.build(name, input_shape=(3, 32, 32), num_classes=_C, options={}).eval()
    taps, ids = draft_taps(model), torch.arange(samples)
    wanted = [1, *_RESNETS[name]]
    assert max(taps) == wanted[-1]
    seen, logits = tapped(model, [taps[number] for number in wanted], torch.zeros(1, 3, 32, 32))
    convs = {number: seen[taps[number]].expand(samples, *seen[taps[number]].shape[1:]) for number in wanted}
    rows = logits.expand(samples, -1)
    up = DraftSet(ids=ids, depths=torch.tensor([max(taps)]), convs=convs, logits=rows)
    ends = {number: convs[number] for number in (1, max(taps))}
    down = DraftSet(ids=ids, depths=torch.tensor(_RESNETS["resnet152"]), convs=ends, logits=rows)
    return _container(up, codec), _container(down, codec)


def _container(drafts: DraftSet, codec: str) -> int:
    table = [(name, codec_for(tensor, codec), tuple(tensor.shape)) for name, tensor in named_tensors([drafts])]
    return len(build_header({}, table)) + drafts.nbytes(codec)
