"""The devices' models on a few test samples: how alike their stages are, and features for a picture. Imports torch.

One device after the other: its model is filled with the weights of its update (or its own, where they never leave it),
runs over the samples without gradient and is gone; what stays of each stage is a centred Gram matrix [n, n]. The output
of a stage is averaged over its positions:

    [channels, height, width]   -> mean over height and width
    [a, b]                      -> mean over b and mean over a, side by side: of a sequence or of tokens, whichever the
                                   channels are

Covers: what the aggregator's job `probe` does. Does not cover: who is compared when (`similarity_record`).
"""

from __future__ import annotations

import base64
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from coordinator.aggregation.extraction import Cutter
from coordinator.aggregation.frozen import applied
from coordinator.aggregation.similarity import centred_gram, cka_matrix
from coordinator.results.similarity_record import MAX_SAMPLES, Compared, Comparison, Findings, Picture, Stage
from coordinator.store.rows import SERVER
from edge_client import records
from edge_client.data.sources import Samples
from edge_client.models.contract import Model
from edge_client.models.slicing import parse, take_tensor
from edge_client.models.taps import tapped
from edge_client.records import Report
from edge_client.task.run_model import Recipe, fill
from edge_client.training.loop import pieces_of
from edge_client.wire.container import MODEL_PREFIX
from edge_client.wire.tensors import ContainerReader
from edge_client.worker.method_state import read_state

__all__ = ["Probed", "Probing", "microbatch"]

_BATCH = 64
_BATCH_ELEMENTS = 2**24  # activations of a piece: 64 MB of float32, whatever the model
_MAX_STAGES = 6
_MAX_PICTURES = 3
_COMPONENTS = 30  # as in the experiments of the paper on t-SNE
_SAMPLE_SEED = 256  # the same samples in every round, of every run with this test data
_FEATURES = "features"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """A device: its update, and where its own tensors are if those do not travel."""

    device: str
    slice: str
    update: Path
    own: Path | None = None


def microbatch(model: Model) -> int:
    """Test samples that go through a model at once."""
    return max(1, min(_BATCH, _BATCH_ELEMENTS // sum(unit.num_activations for unit in model.units)))


class Probing:
    """The models of one round."""

    def __init__(self, recipe: Recipe, cutter: Cutter, samples: Samples) -> None:
        self._recipe = recipe
        self._cutter = cutter
        self._samples = samples
        rng = torch.Generator().manual_seed(_SAMPLE_SEED)
        self._chosen = torch.randperm(len(samples), generator=rng)[:MAX_SAMPLES].sort().values
        self._whole = self._build(cutter.rungs[0])
        self._stages = _spread(_stage_taps(self._whole))

    def findings(
        self, devices: Sequence[Probed], *, round_: int, before: Path, after: Path, is_global: bool
    ) -> Findings:
        """`before`: the model that the devices' deltas belong to; `after`: the one that was made of them."""
        began = time.perf_counter()
        devices = [one for one in devices if one.own is None or read_state(one.own, one.slice)]
        pictures = [self._server_picture(after)] if is_global else []
        shown = _of_different_size(devices)[: _MAX_PICTURES - len(pictures)]
        grams: list[Mapping[str, Tensor]] = []
        for one in devices:
            features = self._features(self._model_of(one, before))
            if one in shown:
                pictures.append(_picture(one.device, one.slice, features[_FEATURES]))
            grams.append({tap: centred_gram(x) for tap, x in features.items() if tap in self._stages})
        comparison = Comparison(
            round=round_,
            num_samples=len(self._chosen),
            devices=tuple(Compared(device=one.device, slice=one.slice) for one in devices),
            stages=tuple(Stage(name=_name(tap), cka=_matrix(grams, tap)) for tap in self._stages) if devices else (),
            seconds=round(time.perf_counter() - began, 3),
        )
        labels = self._samples.labels[self._chosen].tolist()
        known = tuple(picture for picture in pictures if picture.features)
        return Findings(comparison=comparison, labels=tuple(labels), pictures=known)

    def _build(self, cut: str) -> Model:
        return self._recipe.build(self._samples.shape, parse(self._cutter.method.slices.network(cut)))

    def _server_picture(self, path: Path) -> Picture:
        cut = self._cutter.rungs[0]
        with ContainerReader(path) as reader:
            tensors = zip(self._cutter.sources(cut, reader.header), self._cutter.tensors(cut, reader), strict=True)
            fill(self._whole, tensors)
        return _picture(SERVER, cut, self._features(self._whole)[_FEATURES])

    def _model_of(self, one: Probed, before: Path) -> Model:
        model = self._build(one.slice)
        with ContainerReader(before) as server, ContainerReader(one.update) as update:
            fill(model, self._weights(one, server, update))
        return model

    def _weights(self, one: Probed, server: ContainerReader, update: ContainerReader) -> Iterator[tuple[str, Tensor]]:
        """What the device had after its training; what it did not train, as it was sent."""
        is_delta = records.from_map(Report, update.header.meta).payload == "delta"
        came = set(update.names(MODEL_PREFIX))
        own = read_state(one.own, one.slice) if one.own is not None else {}
        for name, place in self._cutter.sources(one.slice, server.header).items():
            if not name.startswith(MODEL_PREFIX):
                continue
            if name in own:
                yield name, own[name]
            elif name in came and not is_delta:
                yield name, update.tensor(name)
            else:
                value = take_tensor(server.tensor(place.name), place.where)
                if name in came:
                    value = applied(name.removeprefix(MODEL_PREFIX), update.tensor(name), value, one.device)
                yield name, value

    @torch.no_grad()
    def _features(self, model: Model) -> dict[str, Tensor]:
        """Tap -> [n, width] of the samples; a model of one unit has its logits as features."""
        last = _FEATURES if _FEATURES in model.taps else "logits"
        taps = [tap for tap in (*self._stages, last) if tap in model.taps]
        seen: dict[str, list[Tensor]] = {tap: [] for tap in taps}
        model.eval()
        with self._recipe.user_code("comparing models"):
            for piece in pieces_of(self._chosen, microbatch(model)):
                x, _ = self._samples.batch(piece)
                outputs, _ = tapped(model, taps, x)
                for tap in seen:
                    seen[tap].append(_pooled(outputs[tap]))
        found = {tap: torch.cat(pieces) for tap, pieces in seen.items()}
        return {**found, _FEATURES: found[last]}


def _stage_taps(model: Model) -> list[str]:
    """The stem and the stages in order; of a model without either, its logits."""
    numbered = sorted(int(found[1]) for tap in model.taps if (found := re.fullmatch(r"stage_(\d+)_out", tap)))
    taps = [*(["stem_out"] if "stem_out" in model.taps else []), *(f"stage_{number}_out" for number in numbered)]
    return taps or ["logits"]


def _spread(taps: Sequence[str]) -> list[str]:
    """At most so many as there is room for, from the first to the last."""
    count = min(len(taps), _MAX_STAGES)
    return [taps[round(i * (len(taps) - 1) / max(1, count - 1))] for i in range(count)]


def _name(tap: str) -> str:
    """`stage_1_out` -> `stage 1`."""
    return tap.removesuffix("_out").replace("_", " ")


def _pooled(x: Tensor) -> Tensor:
    """[b, ...] as [b, width]."""
    if x.ndim == 3:
        return torch.cat([x.mean(dim=2), x.mean(dim=1)], dim=1)
    return x.flatten(2).mean(dim=2) if x.ndim > 3 else x.flatten(1)


def _matrix(grams: Sequence[Mapping[str, Tensor]], tap: str) -> tuple[tuple[float | None, ...], ...]:
    """Of all devices; without a value for one that has no such stage."""
    there = [number for number, own in enumerate(grams) if tap in own]
    found = cka_matrix([grams[number][tap] for number in there])
    rows: list[list[float | None]] = [[None] * len(grams) for _ in grams]
    for i, first in enumerate(there):
        for j, second in enumerate(there):
            value = found[i][j]
            rows[first][second] = round(value, 6) if math.isfinite(value) else None
    return tuple(tuple(row) for row in rows)


def _of_different_size(devices: Sequence[Probed]) -> list[Probed]:
    """One of each slice, then the others."""
    first = {one.slice: one for one in reversed(devices)}.values()
    return [*(one for one in devices if one in first), *(one for one in devices if one not in first)]


def _picture(name: str, cut: str, features: Tensor) -> Picture:
    """Principal components, scaled to at most 1; nothing of features that are all alike or not finite."""
    centred = features.double() - features.double().mean(dim=0)
    if not math.isfinite(float(centred.abs().sum())) or not float(centred.abs().max()) > 0:
        return Picture(name=name, slice=cut, width=0, features="")
    u, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    components = (u * sizes)[:, :_COMPONENTS]
    scaled = (components / components.abs().max()).half().contiguous()
    text = base64.b64encode(scaled.numpy().astype("<f2").tobytes()).decode("ascii")
    return Picture(name=name, slice=cut, width=scaled.shape[1], features=text)
