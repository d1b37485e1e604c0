"""What a method adds to a device's work: each one's time against FedAvg's, same model, samples and steps.

All clients of the registry that train a whole model by themselves, in one process, in turns with FedAvg; CPU time from
the first step to what is sent. Each is in its third round: it has the state that two rounds left, and has been told
what its server made of what another device said in them, so that nothing of it rests. Methods whose devices do what
another's do (InCo) are that other one's. Devices have the whole model: of ScaleFL with two early exits, of SplitMix all
eight bases. FedMD and DraftFed learn from 128 shared samples beside 384 of their own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.figures import Figure
from edge_client.device import guard

__all__ = ["measure"]

_MODEL, _SHAPE, _BATCH, _STEPS = "preresnet20", (3, 32, 32), 32, 12
_SHARED = 128  # samples that all devices have, for those methods that want some
_PLAIN = "fedavg"
_SLICES = {"scalefl": ("full", "exit:6", "exit:3")}  # its exits; all other methods as they are on the largest device
_GOALS = {"fedprox": 1.05, "scaffold": 1.05}


def measure(*, quick: bool) -> list[Figure]:
    """Ratios, turn by turn."""
    command = [sys.executable, "-m", "benchmarks.method_time", "3" if quick else "11"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1800)
    return [
        Figure(name=f"{name}: local work against FedAvg's", unit="x", values=tuple(ratios), at_most=_GOALS.get(name))
        for name, ratios in json.loads(done.stdout).items()
    ]


def _ratios(turns: int, names: Sequence[str], folder: Path) -> dict[str, list[float]]:
    import numpy as np
    import torch
    from torch import Tensor

    from edge_client.config.run_file import RunFile
    from edge_client.config.tables import parse_table
    from edge_client.errors import FedfitError
    from edge_client.knowledge.kinds import Knowledge, PublicSamples
    from edge_client.methods import registry
    from edge_client.methods.base import Header, Job, Lesson, Method, Outcome
    from edge_client.models import registry as models
    from edge_client.models.contract import Model
    from edge_client.models.layout import allows_channels_last, to_channels_last
    from edge_client.models.slicing import parse
    from edge_client.training import optimizers
    from edge_client.training.loop import Settings, generator, train
    from edge_client.wire.container import MODEL_PREFIX
    from edge_client.wire.tensors import codec_for, write_container
    from edge_client.worker.stored_tensors import StoredTensors

    torch.set_num_threads(1)
    x, labels = torch.randn(_STEPS * _BATCH, *_SHAPE), torch.arange(_STEPS * _BATCH) % 10
    settings = Settings(batch=_BATCH, microbatch=_BATCH, learning_rate=0.01, seed=1, momentum=0.9)
    np.savez(folder / "public.npz", x=np.zeros((_SHARED, *_SHAPE), np.float32), y=np.zeros(_SHARED, np.int64))

    class Data:
        def __init__(self) -> None:
            self.labels = labels

        def __len__(self) -> int:
            return len(labels)

        def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
            return x[chosen], labels[chosen]

    def run_with(name: str) -> RunFile:
        shared = {"public": f"npz:{folder / 'public.npz'}"} if name in ("fedmd", "draftfed") else {}
        table = {
            "name": "time",
            "model": {"name": _MODEL, "input": list(_SHAPE)},
            "classes": [str(number) for number in range(10)],
            "method": {"name": name, **shared},
            "slices": list(_SLICES.get(name, ())),
        }
        return parse_table(RunFile, table, source="time")

    def built(method: Method, purpose: str) -> Model:
        made = models.build(
            _MODEL, input_shape=_SHAPE, num_classes=10, options={}, spec=parse(method.slices.network("full"))
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

    def worked(
        method: Method, round_: int, state: Mapping[str, Tensor], told: tuple[Knowledge, ...]
    ) -> tuple[float, Outcome]:
        """Seconds of a round that begins so, and what is sent and kept."""
        torch.manual_seed(1)
        model, data = built(method, "first"), Data()
        of_slice = method.travel.extra_of_slice
        received = method.travel.extra_tensors(model) if of_slice is None else of_slice(model, "full")
        client = method.client()
        client.begin(
            Job(
                model=model,
                round=round_,
                num_rounds=10,
                epochs=1,
                learning_rate=0.01,
                class_counts=tuple(torch.bincount(labels).tolist()),
                rng=lambda purpose: generator(1, purpose),
                state={key: value.clone() for key, value in state.items()},
                extra={key: value.clone() for key, value in received.items()},
                received=stored(model),
                build=partial(built, method),
                data=data,
                knowledge=told,
                optimizer=partial(optimizers.make, "sgd", momentum=0.9),
            )
        )
        begin = time.process_time()
        train(model, client, data, replace(settings, channels_last=allows_channels_last(model)))
        outcome = client.end()
        seconds = time.process_time() - begin
        return seconds, replace(outcome, state={key: value.detach().clone() for key, value in outcome.state.items()})

    def third_round(name: str) -> partial[tuple[float, Outcome]]:
        """What a device does when it has taken part twice, beside another one that did the same."""
        run = run_with(name)
        method = registry.get(name, run.method.parameters, run.slices)
        teacher, state, told = method.knowledge.teacher, dict[str, Tensor](), tuple[Knowledge, ...]()
        memory = {} if teacher is None else teacher.begin(run)
        shared = (PublicSamples(values=memory["public"]),) if "public" in memory else ()
        for round_ in (1, 2):
            _, outcome = worked(method, round_, state, (*told, *shared))
            state = dict(outcome.state)
            if teacher is not None:
                said = [(Header(device=name, num_samples=len(labels)), outcome.knowledge) for name in ("mine", "other")]
                lesson = Lesson(round=round_, num_classes=10, seed=1, run=run)
                memory = teacher.learn(memory, partial(iter, said), lesson, teacher.study(memory, lesson))
                told = teacher.tell(memory, cut="full", device="mine", lesson=replace(lesson, round=round_ + 1))
        return partial(worked, method, 3, state, (*told, *shared))

    ratios: dict[str, list[float]] = {}
    plain = third_round(_PLAIN)
    for name in names or [name for name in registry.names() if name != _PLAIN and "inco" not in name.split("+")]:
        try:
            work = third_round(name)
        except FedfitError as error:
            print(f"{name}: not with {_MODEL} alone: {error}", file=sys.stderr)
            continue
        ratios[name] = []
        for _ in range(turns):
            before, (mine, _), after = plain()[0], work(), plain()[0]
            ratios[name].append(mine / statistics.mean((before, after)))
    return ratios


if __name__ == "__main__":
    guard.pin_malloc()
    with tempfile.TemporaryDirectory(prefix="fedfit-time-") as scratch:
        print(json.dumps(_ratios(int(sys.argv[1]), sys.argv[2:], Path(scratch))))
