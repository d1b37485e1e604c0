"""A federation in memory for the tests of methods: the real loop and folds, states and updates as devices have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from linear import TensorFrozen, TensorState
from torch import Tensor

from edge_client.config.run_file import RunFile
from edge_client.device.accelerator import CPU, Accelerator
from edge_client.knowledge.kinds import Knowledge
from edge_client.methods import coverage, registry
from edge_client.methods.base import Batch, Client, Header, Job, Lesson, Phase, Place
from edge_client.models.contract import Model
from edge_client.models.slicing import take_tensor
from edge_client.training import optimizers
from edge_client.training.loop import Data, Settings, generator, train

Loss = Callable[[Model], Callable[[Batch, Phase], Tensor]]


@dataclass(kw_only=True)
class Federation:
    """Devices by name with their data; `loss` replaces cross entropy, for problems that are solved by hand."""

    method: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    build: Callable[[], Model]
    data: Mapping[str, Data]
    settings: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 1
    loss: Mapping[str, Loss] = field(default_factory=dict)
    num_classes: int = 3
    slices: Mapping[str, str] = field(default_factory=dict)  # of devices that do not train the whole model
    build_slice: Callable[[str], Model] | None = None
    rungs: Sequence[str] = ()  # of the run, for methods that ask
    device: Accelerator = CPU  # where all of them train
    run: RunFile | None = None  # for teachers that build a model

    def __post_init__(self) -> None:
        self.made = registry.get(self.method, self.parameters, self.rungs)
        model = self.build()
        self.made.slices.first_weights(
            model, lambda cut: self.build() if self.build_slice is None else self.build_slice(cut)
        )
        self.server = {name: value.clone() for name, value in model.state_dict().items()}
        self.notes = self.made.travel.notes(model)
        self.kept = self.made.travel.never_returned(model)
        self.server |= {f"extra/{name}": value for name, value in self.made.travel.extra_tensors(model).items()}
        self.states: dict[str, dict[str, Tensor]] = {name: {} for name in self.data}
        self.answered: set[str] = set()
        self.updates: list[tuple[Header, dict[str, Tensor]]] = []
        self.memory: Mapping[str, Tensor] = {}  # the server's, of methods that exchange knowledge
        self.said: list[tuple[Header, tuple[Knowledge, ...]]] = []  # in the last round
        self.number = 0

    def weights(self) -> dict[str, Tensor]:
        """The server's model."""
        return {name: value for name, value in self.server.items() if not name.startswith("extra/")}

    def places(self, device: str) -> Mapping[str, Place]:
        """The tensors of a device, by their names in a container."""
        stored = [name if name.startswith("extra/") else f"model/{name}" for name in self.server]
        return self.made.slices.places(self.build(), self.slices.get(device, "full"), stored)

    def sent(self, device: str) -> dict[str, Tensor]:
        """What a device gets, by the names in a container."""
        return {
            name: take_tensor(self.server[place.name.removeprefix("model/")], place.where).clone()
            for name, place in self.places(device).items()
        }

    def begun(self, device: str, settings: Settings | None = None) -> Client:
        """A device's client with the server's model and its own state, as for an evaluation."""
        cut = self.slices.get(device, "full")
        model = self.device.move(self._built(cut))
        sent = self.sent(device)
        model.load_state_dict({n.removeprefix("model/"): value for n, value in sent.items() if n.startswith("model/")})
        extra = {
            name.removeprefix("extra/"): self.device.move(value)
            for name, value in sent.items()
            if name.startswith("extra/")
        }
        client = self.made.client()
        client.begin(
            Job(
                model=model,
                round=self.number + 1,
                num_rounds=10,
                epochs=self.epochs,
                learning_rate=settings.learning_rate if settings is not None else 0.0,
                class_counts=self._class_counts(device),
                knowledge=self._told(device),
                data=self.data[device],
                optimizer=lambda: optimizers.make("sgd", momentum=0.0, weight_decay=0.0),
                slice=cut,
                rng=lambda purpose: generator(1, purpose),
                state={name: self.device.move(value.clone()) for name, value in self.states[device].items()},
                extra=extra,
                kept=self.kept,
                build=lambda purpose: self.device.move(self._built(cut)),
                loss=self.loss[device](model) if device in self.loss else None,
            )
        )
        return client

    def _lesson(self, number: int) -> Lesson:
        return Lesson(round=number, num_classes=self.num_classes, seed=1, run=self.run)

    def _told(self, device: str) -> tuple[Knowledge, ...]:
        teacher = self.made.knowledge.teacher
        number = max(1, self.number)
        return teacher.tell(self.memory, cut="full", device=device, lesson=self._lesson(number)) if teacher else ()

    def _built(self, cut: str) -> Model:
        return self.build() if self.build_slice is None else self.build_slice(self.made.slices.network(cut))

    def round(self, cohort: Sequence[str] | None = None) -> dict[str, Tensor]:
        """One round; returns the server's new model."""
        self.number += 1
        self.said = []
        self.updates = [self._train(device) for device in cohort or self.data]
        if self.made.knowledge.teacher is not None:
            teacher, before = self.made.knowledge.teacher, self._lesson(self.number - 1)
            studied = teacher.study(self.memory, before) if self.number > 1 else {}
            self.memory = teacher.learn(self.memory, lambda: iter(self.said), self._lesson(self.number), studied)
        self.answered |= {header.device for header, _ in self.updates}
        momentum = self.settings.get("momentum", 0.0) if self.settings.get("optimizer", "sgd") == "sgd" else 0.0
        placed = [self.places(header.device) for header, _ in self.updates]
        where = [{_keys(places)[name]: place.where for name, place in places.items()} for places in placed]
        frozen = TensorFrozen(self.updates, places=where, num_devices=len(self.answered), momentum=momentum)
        self.server = dict(self.made.server.fold(TensorState(self.server, self.notes), frozen, round=self.number))
        return self.weights()

    def _train(self, device: str) -> tuple[Header, dict[str, Tensor]]:
        table = {"batch": 8, "microbatch": 8, "learning_rate": 0.1, "seed": self.number, **self.settings}
        settings = Settings(**table)
        client = self.begun(device, settings)
        model: Model = client.job.model  # type: ignore[attr-defined]
        done = train(model, client, self.data[device], settings)
        outcome = client.end()
        if outcome.state:
            self.states[device] = {name: value.detach().cpu().clone() for name, value in outcome.state.items()}
        sent = {f"model/{name}": value.cpu().clone() for name, value in model.state_dict().items()}
        sent |= {name: value for name, value in self.sent(device).items() if name.startswith("extra/")}
        sent |= {f"extra/{name}": value.cpu() for name, value in outcome.extra.items()}
        meta = coverage.model_meta(self.made.plans, stem=model.order[0], never_returned=self.kept, notes=self.notes)
        lacking = coverage.missing_tensors(sent, None, self.made.plans, meta)
        places = self.places(device)
        update = {_keys(places)[name]: value for name, value in sent.items() if name not in lacking}
        header = Header(
            device=device,
            num_samples=len(self.data[device]),
            slice=self.slices.get(device, "full"),
            steps=done.steps,
            scalars=outcome.scalars,
        )
        self.said.append((header, outcome.knowledge))
        return header, update

    def _class_counts(self, device: str) -> tuple[int, ...]:
        labels = getattr(self.data[device], "labels", torch.zeros(0, dtype=torch.int64))
        return tuple(torch.bincount(labels, minlength=self.num_classes).tolist())


def _keys(places: Mapping[str, Place]) -> dict[str, str]:
    """The server's names of a device's tensors; of several that lie in one, `NAME#OWN NAME` for the later ones."""
    keys: dict[str, str] = {}
    for name, place in places.items():
        own = place.name.removeprefix("model/")
        keys[name] = f"{own}#{name}" if own in keys.values() else own
    return keys


class Shifted:
    """Random samples whose labels and inputs differ from device to device."""

    def __init__(self, num_samples: int, seed: int, shape: Sequence[int] = (1, 8, 8), num_classes: int = 3) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(0, num_classes, (num_samples,), generator=rng)
        self.labels[: num_samples // 2] = seed % num_classes
        self.x = torch.randn(num_samples, *shape, generator=rng) + self.labels.view(-1, *([1] * len(shape))) * 0.5

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.labels[indices]
