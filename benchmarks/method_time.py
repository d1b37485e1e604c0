"""What a method adds to local training: each one's time against FedAvg's, same model, samples and steps.

All clients of the registry that train a whole model by themselves, in one process, in turns with FedAvg; CPU time of
training alone. Each begins as in its second round, with the state that its first one left, so that nothing of it rests.
Methods whose devices do what another's do (InCo) are that other one's. Devices have the whole model: of ScaleFL with
two early exits, of SplitMix all eight bases.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.figures import Figure
from edge_client.device import guard

__all__ = ["measure"]

_MODEL, _SHAPE, _BATCH, _STEPS = "preresnet20", (3, 32, 32), 32, 6
_PLAIN = "fedavg"
_SLICES = {"scalefl": ("full", "exit:6", "exit:3")}  # its exits; all other methods as they are on the largest device
_GOALS = {"fedprox": 1.05, "scaffold": 1.05}


def measure(*, quick: bool) -> list[Figure]:
    """Ratios, turn by turn."""
    command = [sys.executable, "-m", "benchmarks.method_time", "3" if quick else "11"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1800)
    return [
        Figure(name=f"{name}: training against FedAvg's", unit="x", values=tuple(ratios), at_most=_GOALS.get(name))
        for name, ratios in json.loads(done.stdout).items()
    ]


def _ratios(turns: int, names: Sequence[str], folder: Path) -> dict[str, list[float]]:
    import torch
    from torch import Tensor

    from edge_client.assignment import StoredTensors
    from edge_client.errors import FedfitError
    from edge_client.methods import registry
    from edge_client.methods.base import Job, Method
    from edge_client.models import registry as models
    from edge_client.models.contract import Model
    from edge_client.models.layout import allows_channels_last, to_channels_last
    from edge_client.models.slicing import parse
    from edge_client.training.loop import Settings, generator, train
    from edge_client.wire.container import MODEL_PREFIX
    from edge_client.wire.tensors import codec_for, write_container

    torch.set_num_threads(1)
    x, labels = torch.randn(_STEPS * _BATCH, *_SHAPE), torch.randint(0, 10, (_STEPS * _BATCH,))
    settings = Settings(batch=_BATCH, microbatch=_BATCH, learning_rate=0.01, seed=1, momentum=0.9)

    class Data:
        def __init__(self) -> None:
            self.labels = labels

        def __len__(self) -> int:
            return len(labels)

        def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
            return x[chosen], labels[chosen]

    def built(method: Method, purpose: str) -> Model:
        made = models.build(
            _MODEL, input_shape=_SHAPE, num_classes=10, options={}, cut=parse(method.built("full"))
        )
        if allows_channels_last(made):
            to_channels_last(made)
        return made

    def stored(model: Model) -> StoredTensors:
        """In a file, as they come to a device."""
        tensors = {MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
        table = [(name, codec_for(value, "fp32"), tuple(value.shape)) for name, value in tensors.items()]
        write_container(folder / "model.bin", {}, table, iter(tensors.values()))
        return StoredTensors(folder / "model.bin", MODEL_PREFIX)

    def trained(name: str, state: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        """Seconds of a round that begins with this state, and the state that it leaves."""
        torch.manual_seed(1)
        method = registry.get(name, {}, _SLICES.get(name, ()))
        model = built(method, "first")
        of_slice = method.extra_of_slice
        received = method.extra_tensors(model) if of_slice is None else of_slice(model, "full")
        extra = {key: value.clone() for key, value in received.items()}
        client = method.client()
        client.begin(
            Job(
                model=model,
                round=2,
                num_rounds=10,
                epochs=1,
                learning_rate=0.01,
                class_counts=(1,) * 10,
                rng=lambda purpose: generator(1, purpose),
                state={key: value.clone() for key, value in state.items()},
                extra=extra,
                received=stored(model),
                build=partial(built, method),
            )
        )
        begin = time.process_time()
        train(model, client, Data(), replace(settings, channels_last=allows_channels_last(model)))
        seconds = time.process_time() - begin
        return seconds, {key: value.detach().clone() for key, value in client.end().state.items()}

    ratios: dict[str, list[float]] = {}
    for name in names or [name for name in registry.names() if name != _PLAIN and "inco" not in name.split("+")]:
        try:
            _, state = trained(name, {})
        except FedfitError as error:
            print(f"{name}: not with {_MODEL} alone: {error}", file=sys.stderr)
            continue
        ratios[name] = []
        for _ in range(turns):
            before, (mine, _), after = trained(_PLAIN, {})[0], trained(name, state), trained(_PLAIN, {})[0]
            ratios[name].append(mine / statistics.mean((before, after)))
    return ratios


if __name__ == "__main__":
    guard.pin_malloc()
    with tempfile.TemporaryDirectory(prefix="fedfit-time-") as scratch:
        print(json.dumps(_ratios(int(sys.argv[1]), sys.argv[2:], Path(scratch))))
