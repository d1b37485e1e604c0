"""A training step through the loop against the same step in plain PyTorch: the loop's own cost.

Both in one process, in turns, with the same model, samples, batch and arithmetic (SGD with momentum); CPU time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

from benchmarks.figures import Figure
from edge_client.device import guard

__all__ = ["measure"]

_MODELS = {"preresnet20": (3, 32, 32), "small-cnn": (3, 32, 32)}
_BATCH = 64
_GOAL = 1.03


def measure(*, quick: bool) -> list[Figure]:
    """Ratios, turn by turn."""
    figures = []
    for model in _MODELS:
        command = [sys.executable, "-m", "benchmarks.training_step", model, "5" if quick else "15"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=900)
        ratios = tuple(json.loads(done.stdout))
        figures.append(Figure(name=f"{model}: step against plain PyTorch", unit="x", values=ratios, at_most=_GOAL))
    return figures


def _ratios(name: str, turns: int) -> list[float]:
    import torch
    from torch.nn import functional as F

    from edge_client.methods.base import Job, PlainClient
    from edge_client.models import registry
    from edge_client.models.contract import Model
    from edge_client.models.layout import arranged, to_channels_last
    from edge_client.training.loop import Settings, generator, train

    torch.set_num_threads(1)
    shape, steps = _MODELS[name], 8

    def built() -> Model:
        torch.manual_seed(1)
        model = registry.build(name, input_shape=shape, num_classes=10, options={})
        to_channels_last(model)
        return model

    x = torch.randn(steps * _BATCH, *shape)
    labels = torch.randint(0, 10, (steps * _BATCH,))

    class Data:
        def __init__(self) -> None:
            self.labels = labels

        def __len__(self) -> int:
            return len(labels)

        def batch(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x[chosen], labels[chosen]

    ours, plain = built(), built()
    settings = Settings(batch=_BATCH, microbatch=_BATCH, learning_rate=0.01, seed=1, momentum=0.9, channels_last=True)

    def with_the_loop() -> None:
        client = PlainClient()
        client.begin(
            Job(
                model=ours,
                round=1,
                num_rounds=1,
                epochs=1,
                learning_rate=0.01,
                class_counts=(1,) * 10,
                rng=lambda purpose: generator(1, purpose),
            )
        )
        train(ours, client, Data(), settings)

    def without() -> None:
        plain.train()
        velocity: dict[str, torch.Tensor] = {}
        for chosen in torch.randperm(len(labels)).split(_BATCH):
            loss = F.cross_entropy(plain(arranged(x[chosen])), labels[chosen])
            loss.backward()
            with torch.no_grad():
                for key, param in plain.named_parameters():
                    grad = param.grad
                    velocity[key] = velocity[key].mul_(0.9).add_(grad) if key in velocity else grad.clone()
                    param.add_(velocity[key], alpha=-0.01)
                    param.grad = None

    def timed(work: object) -> float:
        begin = time.process_time()
        work()  # type: ignore[operator]
        return time.process_time() - begin

    timed(with_the_loop), timed(without)
    ratios = []
    for _ in range(turns):
        one, other, again = timed(without), timed(with_the_loop), timed(without)
        ratios.append(other / statistics.mean((one, again)))
    return ratios


if __name__ == "__main__":
    guard.pin_malloc()
    print(json.dumps(_ratios(sys.argv[1], int(sys.argv[2]))))
