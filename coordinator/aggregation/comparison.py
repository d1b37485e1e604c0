"""The aggregator's job `probe`: how similar the devices' models are, and features for a picture. Imports torch.

One device after the other: its model is filled with the weights of its update (or those that never leave the device),
runs over a few test samples without gradient and is freed; what stays of each stage is a centred Gram matrix [n, n].
The output of a stage is averaged over its positions:

    [channels, height, width]   -> mean over height and width
    [a, b]                      -> mean over b and mean over a, side by side: of a sequence or of tokens, whichever the
                                   channels are

Does not cover: which devices are compared in which rounds (`similarity_record`), the measure (`similarity`).
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

from coordinator.aggregation.evaluate import microbatch, server_samples
from coordinator.aggregation.extraction import SliceExtractor, extractor_of
from coordinator.aggregation.frozen import add_delta
from coordinator.aggregation.jobs import ProbedUpdate, ProbeJob
from coordinator.aggregation.similarity import centred_gram, cka_matrix
from coordinator.aggregation.task_source import recipe_of
from coordinator.results.similarity_record import MAX_SAMPLES, Compared, Comparison, Findings, Picture, Stage
from coordinator.store.rows import SERVER
from edge_client import faults, records
from edge_client.data.sources import Samples
from edge_client.errors import InputError
from edge_client.methods import registry
from edge_client.models.contract import Model
from edge_client.models.slicing import parse, take_tensor
from edge_client.models.taps import tapped
from edge_client.records import Report
from edge_client.task.run_model import Recipe, fill
from edge_client.training.loop import pieces_of
from edge_client.wire.container import MODEL_PREFIX
from edge_client.wire.tensors import ContainerReader
from edge_client.worker.method_state import read_state

__all__ = ["DeviceModel", "ModelComparison", "compare_models"]

_MAX_STAGES = 6
_MAX_PICTURES = 3
_COMPONENTS = 30  # as in the experiments of the paper on t-SNE
_SAMPLE_SEED = 256  # the same samples in every round, of every run with this test data
_FEATURES = "features"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """Where the tensors of a device's model are: in its update, or in its method's state if they do not travel."""

    device: str
    slice: str
    update: Path
    method_state: Path | None = None


def compare_models(job: ProbeJob) -> Findings:
    """Compare the models of a round; none of a method whose devices train several networks at once."""
    faults.point("aggregator.probe")
    recipe, extractor = recipe_of(job.run, job.task), extractor_of(job.run, job.task)
    samples = server_samples(recipe, job.data)
    if len(samples) == 0:
        raise InputError(f"{job.data}: expected at least one test sample, got none")
    has_several_networks, method = extractor.method.slices.predicts_by_client, job.run.method
    return ModelComparison(recipe, extractor, samples).findings(
        [] if has_several_networks else [_device_model(update) for update in job.updates],
        round_=job.round,
        before=Path(job.base),
        after=Path(job.model),
        is_global=not has_several_networks and registry.has_global_model(method.name, method.parameters),
    )


def _device_model(update: ProbedUpdate) -> DeviceModel:
    state = Path(update.method_state) if update.method_state is not None else None
    return DeviceModel(device=update.device, slice=update.slice, update=Path(update.path), method_state=state)


class ModelComparison:
    """The models of one round."""

    def __init__(self, recipe: Recipe, extractor: SliceExtractor, samples: Samples) -> None:
        self._recipe = recipe
        self._extractor = extractor
        self._samples = samples
        rng = torch.Generator().manual_seed(_SAMPLE_SEED)
        self._chosen = torch.randperm(len(samples), generator=rng)[:MAX_SAMPLES].sort().values
        self._whole = self._build(extractor.architectures[0])
        self._stages = _spread(_stage_taps(self._whole))

    def findings(
        self, devices: Sequence[DeviceModel], *, round_: int, before: Path, after: Path, is_global: bool
    ) -> Findings:
        """`before`: the model that the devices' deltas belong to; `after`: the one that was folded out of them."""
        began = time.perf_counter()
        devices = [one for one in devices if one.method_state is None or read_state(one.method_state, one.slice)]
        pictures = [self._server_picture(after)] if is_global else []
        shown = _different_slices_first(devices)[: _MAX_PICTURES - len(pictures)]
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
        pictures = [picture for picture in pictures if picture.features]
        return Findings(comparison=comparison, labels=tuple(labels), pictures=tuple(pictures))

    def _build(self, slice_name: str) -> Model:
        return self._recipe.build(self._samples.shape, parse(self._extractor.method.slices.network(slice_name)))

    def _server_picture(self, path: Path) -> Picture:
        architecture = self._extractor.architectures[0]
        with ContainerReader(path) as reader:
            self._extractor.fill(self._whole, architecture, reader)
        return _picture(SERVER, architecture, self._features(self._whole)[_FEATURES])

    def _model_of(self, one: DeviceModel, before: Path) -> Model:
        model = self._build(one.slice)
        with ContainerReader(before) as server, ContainerReader(one.update) as update:
            fill(model, self._weights(one, server, update))
        return model

    def _weights(
        self, one: DeviceModel, server: ContainerReader, update: ContainerReader
    ) -> Iterator[tuple[str, Tensor]]:
        """The device's weights after its training; those that it did not train are as it received them."""
        is_delta = records.from_map(Report, update.header.meta).payload == "delta"
        sent_names = set(update.names(MODEL_PREFIX))
        private = read_state(one.method_state, one.slice) if one.method_state is not None else {}
        for name, place in self._extractor.sources(one.slice, server.header).items():
            if not name.startswith(MODEL_PREFIX):
                continue
            if name in private:
                yield name, private[name]
            elif name in sent_names and not is_delta:
                yield name, update.tensor(name)
            else:
                value = take_tensor(server.tensor(place.name), place.where)
                if name in sent_names:
                    value = add_delta(name.removeprefix(MODEL_PREFIX), update.tensor(name), value, one.device)
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
        features = {tap: torch.cat(pieces) for tap, pieces in seen.items()}
        return {**features, _FEATURES: features[last]}


def _stage_taps(model: Model) -> list[str]:
    """The stem and the stages in order; of a model without either, its logits."""
    numbered = sorted(int(match[1]) for tap in model.taps if (match := re.fullmatch(r"stage_(\d+)_out", tap)))
    taps = [*(["stem_out"] if "stem_out" in model.taps else []), *(f"stage_{number}_out" for number in numbered)]
    return taps or ["logits"]


def _spread(taps: Sequence[str]) -> list[str]:
    """At most `_MAX_STAGES` of them, evenly spread from the first to the last."""
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
    """The similarities of all devices at one tap; None for a device that has no such stage."""
    numbers = [number for number, device_grams in enumerate(grams) if tap in device_grams]
    similarities = cka_matrix([grams[number][tap] for number in numbers])
    rows: list[list[float | None]] = [[None] * len(grams) for _ in grams]
    for i, first in enumerate(numbers):
        for j, second in enumerate(numbers):
            value = similarities[i][j]
            rows[first][second] = round(value, 6) if math.isfinite(value) else None
    return tuple(tuple(row) for row in rows)


def _different_slices_first(devices: Sequence[DeviceModel]) -> list[DeviceModel]:
    """One device of each slice, then the others."""
    first = {one.slice: one for one in reversed(devices)}.values()
    return [*(one for one in devices if one in first), *(one for one in devices if one not in first)]


def _picture(name: str, slice_name: str, features: Tensor) -> Picture:
    """The principal components, scaled to at most 1; none of features that are constant or not finite."""
    centred = features.double() - features.double().mean(dim=0)
    if not math.isfinite(float(centred.abs().sum())) or not float(centred.abs().max()) > 0:
        return Picture(name=name, slice=slice_name, width=0, features="")
    u, sizes, _ = torch.linalg.svd(centred, full_matrices=False)
    components = (u * sizes)[:, :_COMPONENTS]
    scaled = (components / components.abs().max()).half().contiguous()
    text = base64.b64encode(scaled.numpy().astype("<f2").tobytes()).decode("ascii")
    return Picture(name=name, slice=slice_name, width=scaled.shape[1], features=text)
