"""The sections of a report page about the similarity of the devices' models: heat maps of CKA, t-SNE of features.

Without any comparison they give the reason. t-SNE is computed when a page is made, so that no round waits for it.
Imports numpy.
"""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.report import html as page
from coordinator.report import plots
from coordinator.report.tsne import tsne
from coordinator.results import similarity_record
from coordinator.results.run_record import RunRecord
from coordinator.results.similarity_record import Comparison, Picture, Similarity
from coordinator.store.rows import SERVER
from edge_client.errors import InputError, NoSuchNameError

__all__ = ["sections"]

_TITLE = "How alike the devices' models are"
_FEATURES = "Features of the test samples"
_MIN_POINTS = 10  # fewer have no neighbourhoods


def sections(run: RunRecord) -> list[str]:
    """The sections about similarity."""
    similarity = run.similarity
    if similarity.last is None:
        return [
            page.section(_TITLE, page.note(f"Not compared, and no features drawn: {similarity.problem or _why(run)}."))
        ]
    return list(
        filter(None, (_heat_maps(run.file.method.name, similarity, similarity.last), _pictures(run, similarity)))
    )


def _why(run: RunRecord) -> str:
    try:
        never = similarity_record.why_never(run.file, simulated=run.folder is not None)
    except (InputError, NoSuchNameError) as error:  # a run of another version of fedfit
        return str(error)
    return never or "no round has been compared yet"


def _heat_maps(method: str, similarity: Similarity, last: Comparison) -> str:
    if len(last.devices) < 2:
        one = f"one device trained in round {last.round}"
        why = one if last.devices else f"a device of {method} has several models"
        what = "Not compared" if similarity.pictures else "Not compared, and no features drawn"
        return page.section(_TITLE, page.note(f"{what}: {why}."))
    first = similarity.first if similarity.first is not None and similarity.first.round != last.round else None
    begin = page.details(f"after round {first.round}", _maps(first)) if first is not None else ""
    problem = f"The newest comparison could not be made: {similarity.problem}." if similarity.problem else ""
    explanation = (
        f"Linear CKA of what each stage puts out for {last.num_samples} test samples, the same for all, averaged over "
        "positions; the models as devices had trained them, before they were combined. 1: equal but for rotation and "
        "scale. "
        f"At most {similarity_record.MAX_DEVICES} devices, of different architectures first. "
        f"Comparing them took the coordinator {last.seconds:.1f} s."
    )
    lines = [line for line in (explanation, problem) if line]
    return page.section(
        f"{_TITLE}, after round {last.round}", _maps(last), begin, _means(similarity), page.note(*lines)
    )


def _maps(comparison: Comparison) -> str:
    labels = [f"{one.device}, {one.slice}" for one in comparison.devices]
    maps = [plots.HeatMap(title=stage.name, values=stage.cka) for stage in comparison.stages]
    rows = [[number, one.device, one.slice] for number, one in enumerate(comparison.devices, start=1)]
    return page.image(
        plots.heat_maps(maps, labels), f"similarity of the devices' stages after round {comparison.round}"
    ) + page.details("devices", page.table(("number", "device", "trained"), rows, right=(0,)))


def _means(similarity: Similarity) -> str:
    """The mean similarity over the rounds, if several were compared."""
    if len(similarity.means) < 2:
        return ""
    names = dict.fromkeys(name for means in similarity.means for name in means.stages)
    curves = [
        plots.Curve(name=name, points=[(m.round, m.stages[name]) for m in similarity.means if name in m.stages])
        for name in names
    ]
    panel = plots.Panel(curves=curves, y="mean CKA of two devices", limits=(-0.02, 1.02))
    rows = [[m.round, *(f"{m.stages[n]:.4f}" if n in m.stages else "-" for n in names)] for m in similarity.means]
    return page.image(plots.lines([panel], x="round"), "mean similarity of two devices in each stage") + page.details(
        "numbers", page.table(["round", *names], rows, right=range(len(names) + 1))
    )


def _pictures(run: RunRecord, similarity: Similarity) -> str:
    """The t-SNE map of each model whose features were kept."""
    if len(similarity.labels) < _MIN_POINTS or not similarity.pictures or similarity.last is None:
        return ""
    order = _by_count(similarity.labels)
    places = {label: place for place, label in enumerate(order)}
    kinds = [places[label] for label in similarity.labels]
    clouds = [
        plots.Cloud(title=_title(picture), points=points, kinds=kinds)
        for picture, points in _planes(run, similarity.pictures, len(similarity.labels))
    ]
    classes = run.file.classes
    names = [classes[label] if label < len(classes) else f"class {label}" for label in order]
    number, width = similarity.last.round, similarity.pictures[0].width
    explanation = (
        f"t-SNE of the input of the classifier for {len(similarity.labels)} test samples after round {number}: "
        "samples that a model takes for similar are near each other. Each picture is by itself: directions, distances "
        f"and places of one say nothing about another. From the first {width} principal components."
    )
    image = page.image(plots.clouds(clouds, names), f"t-SNE of features after round {number}")
    return page.section(_FEATURES, image, page.note(explanation))


def _title(picture: Picture) -> str:
    who = "the server's model" if picture.name == SERVER else picture.name
    return f"{who}, {picture.slice}"


def _by_count(labels: Sequence[int]) -> list[int]:
    """Classes in their order; if there are more than markers, the most frequent ones first."""
    counted = Counter(labels)
    most = sorted(sorted(counted), key=lambda label: -counted[label])[: plots.MAX_KINDS]
    return [*sorted(most), *sorted(set(counted) - set(most))]


def _planes(run: RunRecord, pictures: Sequence[Picture], count: int) -> Iterator[tuple[Picture, plots.Line]]:
    for picture in pictures:
        y = tsne(_decoded(picture, count), seed=run.file.seed)
        yield picture, [(float(one[0]), float(one[1])) for one in y]


def _decoded(picture: Picture, count: int) -> NDArray[np.float64]:
    """The features of a picture; raises `InputError` if they are damaged."""
    try:
        raw = np.frombuffer(base64.b64decode(picture.features, validate=True), dtype="<f2")
    except (ValueError, binascii.Error):
        raw = np.zeros(0, dtype="<f2")
    if len(raw) != count * picture.width or not len(raw) or not np.isfinite(raw).all():
        raise InputError(f"expected {count} x {picture.width} features of {picture.name!r}, got {len(raw)} numbers")
    return raw.reshape(count, picture.width).astype(np.float64)
