"""How alike the devices of a DraftFed simulation see the same samples: linear CKA of D2, mean over pairs of devices.

D2 is what the last convolution of a device's own model puts out, in evaluation mode, for the first shared samples. The
models are read from the simulation's state between two rounds; a model that nobody taught is measured the same way.
"""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coordinator.aggregation.similarity import linear_cka
from edge_client.config.run_file import RunFile
from edge_client.methods.draftfed import draft_taps
from edge_client.methods.shared_samples import outputs
from edge_client.models.slicing import parse
from edge_client.task.run_model import recipe
from edge_client.wire.container import MODEL_PREFIX, read_header
from edge_client.worker.stored_tensors import StoredTensors

__all__ = ["Alignment", "alignment"]

_SAMPLES = 128


class Alignment:
    """An observer of a simulation that measures as often as devices are judged, into `alignment.json` of its folder."""

    def __init__(self, file: RunFile, folder: Path, public: Path) -> None:
        self._file = file
        self._folder = folder
        self._path = folder / "alignment.json"
        self._seen = 0
        with np.load(public) as arrays:
            self._x = torch.from_numpy(arrays["x"][:_SAMPLES]).float() / 255

    def moved(self, round_: int, done: int, asked: int) -> None:
        """When a round begins, every device has the model that it ended the last one with."""
        del asked
        if round_ > self._seen and done == 0:
            self._seen = round_
            if round_ > 1 and (round_ - 1) % self._file.evaluate.every == 0:
                found = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
                found[str(round_ - 1)] = alignment(self._folder, self._file, self._x)
                self._path.write_text(json.dumps(found), encoding="utf-8")

    def round_done(self, line: dict[str, Any]) -> None:
        """Nothing."""


def _newest(folder: Path) -> list[Path]:
    """What each device keeps, as it sent its last update."""
    found = [own for own in sorted(folder.glob("state/devices/*/method-state/*")) if own.is_dir()]
    return [path for own in found for path in sorted(own.glob("stored-*")) or sorted(own.glob("current"))]


def alignment(folder: Path, file: RunFile, x: Tensor) -> float:
    """The mean over all pairs of devices that have a model of their own."""
    made = recipe(file, None)
    drafts = []
    for path in _newest(folder):
        kept, cut = StoredTensors(path), parse(read_header(path).meta["slice"])
        model = made.build(tuple(x.shape[1:]), cut)
        names = model.state_dict()
        model.load_state_dict({name: kept[MODEL_PREFIX + name] for name in names})
        taps = draft_taps(model)
        seen, _ = outputs(model, x, [taps[max(taps)]], _SAMPLES)
        drafts.append(seen[taps[max(taps)]].flatten(1))
    return statistics.mean(linear_cka(a, b) for a, b in itertools.combinations(drafts, 2))
