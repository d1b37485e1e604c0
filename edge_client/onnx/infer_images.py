"""`edge-client infer --model m.onnx cat.png`: the class of single images, with its probability; without torch.

Does not cover: whole data sets, latency and memory (`infer`), which files are images (`data.images`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.data.images import read_images
from edge_client.errors import InputError
from edge_client.onnx.file import OnnxModel

__all__ = ["ImageAnswer", "answer_images", "describe", "to_json"]

_MOST_SHOWN = 3  # classes of an image
_LEAST_SHOWN = 0.01  # probability of those behind the first


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAnswer:
    """What a model says of one image."""

    file: str
    probabilities: tuple[tuple[str, float], ...]  # of all classes, the most probable first


def answer_images(model_path: Path, images: Sequence[Path], *, threads: int = 1) -> list[ImageAnswer]:
    """Run the model on each image by itself; raises `InputError` for a file that is no image."""
    model = OnnxModel(model_path, threads=threads)
    if model.facts.batch_statistics:
        raise InputError(
            f"{model_path}: its BatchNorms use the statistics of many samples, so that one image says nothing; "
            "give it a folder with --data"
        )
    classes = model.facts.classes or tuple(str(number) for number in range(model.num_classes))
    answers = []
    for path in images:
        (logits,) = model.run(read_images([path], model.input_shape)).astype(np.float64)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        order = np.argsort(-shares, kind="stable")
        ranked = tuple((classes[number], float(shares[number])) for number in order.tolist())
        answers.append(ImageAnswer(file=str(path), probabilities=ranked))
    return answers


def to_json(answers: Sequence[ImageAnswer]) -> list[dict[str, Any]]:
    """As `--format json` prints it."""
    return [
        {
            "file": answer.file,
            "class": answer.probabilities[0][0],
            "probability": round(answer.probabilities[0][1], 6),
            "probabilities": {name: round(share, 6) for name, share in answer.probabilities},
        }
        for answer in answers
    ]


def describe(answers: Sequence[ImageAnswer]) -> str:
    """`cat.png: cat 0.93 (plane 0.05, ship 0.02)`."""
    return "\n".join(f"{answer.file}: {_classes(answer)}" for answer in answers)


def _classes(answer: ImageAnswer) -> str:
    (name, share), *others = answer.probabilities
    rest = [f"{other} {part:.2f}" for other, part in others[: _MOST_SHOWN - 1] if part >= _LEAST_SHOWN]
    return f"{name} {share:.2f}" + (f" ({', '.join(rest)})" if rest else "")
