"""FedGKT. He, Annavaram and Avestimehr, "Group Knowledge Transfer: Federated Learning of Large CNNs at the Edge",
NeurIPS 2020.

Devices train small models; the server trains a large one on what the first layers of the devices' models put out, and
both learn from each other's logits. Down: the server's logits for samples whose maps the device sent. Up: feature maps,
labels and logits of its samples. On the device: the model and the state of its optimizer.

    device   CE + alpha KD(server's logits || its own)      for samples that the server answered for; CE for the others
    server   CE + alpha KD(device's logits || its own)      over the maps of all devices of the round
    KD(t || s) = T^2 KL(softmax(t / T) || softmax(s / T))

A device's model is a slice of the run's, its maps are the output of the extractor (the units up to the first with
parameters); the server's model is what follows it in the largest slice whose extractor puts out the same shape. Nothing
of the server's part travels.

Deviations: instead of the maps of all samples a device sends in every round as many as fit into `max_bytes`, the next
ones in turn; answers that came stay on the device until there are newer ones. Samples are keyed by their positions, so
that batches may be shuffled. Maps are those of the model at the end of the round, in evaluation mode. Test samples are
not sent: the answer to a test sample is the device's own model's. The server trains while it folds, and the round waits
for it: what is made beside a round (`study`) is told a round later, so that answers would be those of maps two rounds
old.

Legend: T = temperature, E_s = server_epochs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor
from torch.nn import functional

from edge_client.config.run_file import RunFile
from edge_client.device.accelerator import device_of
from edge_client.errors import InputError
from edge_client.knowledge.kinds import FeatureMaps, SampleLogits, one
from edge_client.methods.base import (
    Batch,
    Job,
    KnowledgeExchange,
    LeftOut,
    Lesson,
    Method,
    Outcome,
    Phase,
    Received,
    Term,
    Traffic,
    Travel,
)
from edge_client.methods.cards.fedgkt import FedGktParameters
from edge_client.methods.class_means import device_number
from edge_client.methods.fedavg import CoverageServer
from edge_client.methods.fedin import extractor
from edge_client.methods.fedper import PersonalClient, everything
from edge_client.methods.local import keep_the_model
from edge_client.methods.registry import architectures
from edge_client.methods.shared_samples import window
from edge_client.models.contract import Model
from edge_client.models.slicing import parse
from edge_client.models.taps import tapped
from edge_client.task.run_model import recipe
from edge_client.training.objectives import cross_entropy
from edge_client.training.optimizers import Adam
from edge_client.training.seeds import derive

__all__ = ["FedGktClient", "GktTeacher", "check_gkt", "distillation", "method", "samples_within"]

_log = logging.getLogger(__name__)

_ANSWERS = "answers/"
_NET = "net/"
_CHUNK = 32
_BATCH = 64


def distillation(target: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """KD of each sample: [b, C] twice -> [b]."""
    log_q = functional.log_softmax(logits / temperature, dim=1)
    log_p = functional.log_softmax(target / temperature, dim=1)
    return temperature**2 * functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=1)


def samples_within(max_bytes: int, shape: Sequence[int], num_classes: int) -> int:
    """Samples of which map, logits and label fit into so many bytes; one at least."""
    return max(1, max_bytes // (4 * (math.prod(shape) + num_classes) + 8))


class FedGktClient(PersonalClient):
    """Cross entropy, and the distillation from the server's logits for each sample."""

    def __init__(self, parameters: FedGktParameters) -> None:
        super().__init__(everything)
        self._parameters = parameters
        self._answers: dict[str, Tensor] = {}  # `logits` [n, C] and `known` [n] of 0 and 1, by position

    def begin(self, job: Job) -> None:
        """Load the device's own model, the server's earlier answers and its new ones."""
        super().begin(job)
        check_gkt(job.model)
        if job.data is None:
            return
        shape = (len(job.data), math.prod(job.model.units[-1].out_shape))
        self._answers = {"logits": torch.zeros(shape), "known": torch.zeros(shape[0])}
        stored = {name: job.state[_ANSWERS + name].cpu() for name in self._answers if _ANSWERS + name in job.state}
        if stored and stored["logits"].shape == shape:
            self._answers = stored
        answers = one(job.knowledge, SampleLogits)
        if answers is not None and answers.values.shape[1] == shape[1] and int(answers.ids[-1]) < shape[0]:
            self._answers["logits"][answers.ids] = answers.values
            self._answers["known"][answers.ids] = 1.0
        elif answers is not None:
            largest_id_and_classes = (int(answers.ids[-1]), answers.values.shape[1])
            _log.warning(
                "answers up to sample %d, of %d classes, are not for this device's %d of %d",
                *largest_id_and_classes,
                *shape,
            )

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """One term: both losses come from one pass."""
        logits = self.job.model(batch.x)
        each = cross_entropy(logits, batch.y)
        if self._parameters.alpha > 0 and self._answers and batch.positions is not None:
            target, known = (self._answers[name][batch.positions].to(logits.device) for name in ("logits", "known"))
            if bool(known.any()):
                each = each + self._parameters.alpha * known * distillation(
                    target, logits, self._parameters.temperature
                )
        del logits
        yield Term(name="cross_entropy+distillation", each=each)

    def end(self) -> Outcome:
        """Maps, labels and logits of the next samples; answers stay here with the model."""
        outcome = super().end()
        data, model = self.job.data, self.job.model
        if data is None:
            return outcome
        shape = _map_shape(model, extractor(model))
        size = samples_within(self._parameters.max_bytes, shape, math.prod(model.units[-1].out_shape))
        ids = window(self.job.round, len(data), min(size, len(data)))
        chunk = self.job.plan.microbatch if self.job.plan is not None else _CHUNK
        pieces = [self._piece(ids[start : start + chunk]) for start in range(0, len(ids), chunk)]
        labels, maps, logits = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        answers = {_ANSWERS + name: tensor for name, tensor in self._answers.items()}
        knowledge = FeatureMaps(ids=ids, labels=labels, logits=logits, values=maps)
        return replace(outcome, state={**outcome.state, **answers}, knowledge=(knowledge,))

    @torch.no_grad()
    def _piece(self, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Labels, maps and logits of some samples, in evaluation mode; on the host."""
        model, data = self.job.model, self.job.data
        assert data is not None
        x, y = data.batch(positions)
        was_training = model.training
        model.eval()
        unit = extractor(model)
        tap = next(name for name, module in model.taps.items() if module == unit)
        seen, logits = tapped(model, [tap], device_of(model).move(x))
        model.train(was_training)
        return y, seen[tap].cpu().float().contiguous(), logits.cpu().float()


class GktTeacher:
    """The server's model by the shape of its maps (`net/SHAPE/...`), and its answers (`answers/DEVICE/...`)."""

    def __init__(self, parameters: FedGktParameters) -> None:
        self._parameters = parameters

    def begin(self, run: RunFile) -> Mapping[str, Tensor]:
        """An empty memory; raises `InputError` for a task, whose model cannot be built here."""
        if run.model is None:
            raise InputError(
                "method 'fedgkt' trains a part of the model on the server: use a built-in model instead of a task"
            )
        return {}

    def learn(
        self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson, studied: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """Train the server's part on all maps of this round, then answer for every one of them."""
        new_memory = {name: memory[name] for name in memory}
        shapes = sorted({maps.values.shape[1:] for _, maps in _maps(received)})
        for shape in shapes:
            prefix = f"{_NET}{_shape_text(shape)}/"
            server_part = self._server_part(lesson, tuple(shape))
            if server_part is None:
                continue
            model, start = server_part
            if prefix + next(iter(model.state_dict())) in memory:
                model.load_state_dict(
                    {name.removeprefix(prefix): memory[name] for name in memory if name.startswith(prefix)}
                )
            self._train(model, start, received, shape, lesson)
            new_memory |= {prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}
            for device, maps in _maps(received):
                if maps.values.shape[1:] == shape:
                    answers = f"{_ANSWERS}{device_number(device)}/"
                    new_memory |= {answers + "ids": maps.ids, answers + "values": _answer(model, start, maps.values)}
        return new_memory

    def _server_part(self, lesson: Lesson, shape: tuple[int, ...]) -> tuple[Model, str] | None:
        """The largest slice of the run whose extractor puts out such maps, and the unit after it."""
        assert lesson.run is not None
        for architecture in architectures(lesson.run):
            model, unit = _build(lesson.run, architecture)
            if _map_shape(model, unit) == shape:
                return model, model.order[model.order.index(unit) + 1]
        return None

    def _train(self, model: Model, start: str, received: Received, shape: Sequence[int], lesson: Lesson) -> None:
        model.train()
        params = dict(model.named_parameters())
        optimizer = Adam()
        rng = torch.Generator().manual_seed(derive(lesson.seed, "gkt", lesson.round))
        for _ in range(self._parameters.server_epochs):
            for _, maps in _maps(received):
                if maps.values.shape[1:] == shape:
                    for rows in _batches(len(maps.ids), rng):
                        if len(rows) >= model.min_batch:
                            self._step(model, start, params, optimizer, maps, rows)

    def _step(
        self, model: Model, start: str, params: Mapping[str, Tensor], optimizer: Adam, maps: FeatureMaps, rows: Tensor
    ) -> None:
        logits = model.forward_from(start, maps.values[rows])
        each = cross_entropy(logits, maps.labels[rows])
        each = each + self._parameters.alpha * distillation(maps.logits[rows], logits, self._parameters.temperature)
        grads = torch.autograd.grad(each.mean(), list(params.values()), allow_unused=True)
        for (name, param), grad in zip(params.items(), grads, strict=True):
            if grad is not None:
                optimizer.step(name, param, grad, self._parameters.server_lr)

    def left_out(self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson) -> Sequence[LeftOut]:
        """Maps of a shape that no slice of the run's model continues."""
        assert lesson.run is not None
        shapes = {_map_shape(*_build(lesson.run, architecture)) for architecture in architectures(lesson.run)}
        listed = ", ".join(_shape_text(shape) for shape in sorted(shapes))
        return [
            LeftOut(
                device=device,
                code="signature",
                detail=f"its maps are {_shape_text(maps.values.shape[1:])}, the run's slices have {listed}; left out",
            )
            for device, maps in _maps(received)
            if tuple(maps.values.shape[1:]) not in shapes
        ]

    def study(self, memory: Mapping[str, Tensor], lesson: Lesson) -> Mapping[str, Tensor]:
        """Nothing takes long."""
        return {}

    def tell(self, memory: Mapping[str, Tensor], *, cut: str, device: str, lesson: Lesson) -> tuple[SampleLogits, ...]:
        """The answers to the maps that this device sent last."""
        prefix = f"{_ANSWERS}{device_number(device)}/"
        if prefix + "ids" not in memory:
            return ()
        return (SampleLogits(ids=memory[prefix + "ids"], values=memory[prefix + "values"]),)


def _map_shape(model: Model, name: str) -> tuple[int, ...]:
    """The shape of a unit's output for one sample."""
    return next(tuple(unit.out_shape) for unit in model.units if unit.name == name)


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(str(dim) for dim in shape)


def _maps(received: Received) -> Iterator[tuple[str, FeatureMaps]]:
    for header, items in received():
        maps = one(items, FeatureMaps)
        if maps is not None:
            yield header.device, maps


def _batches(count: int, rng: Generator) -> Iterator[Tensor]:
    order = torch.randperm(count, generator=rng)
    yield from (order[start : start + _BATCH] for start in range(0, count, _BATCH))


@torch.no_grad()
def _answer(model: Model, start: str, maps: Tensor) -> Tensor:
    """Logits in evaluation mode."""
    model.eval()
    pieces = [model.forward_from(start, maps[first : first + _BATCH]) for first in range(0, len(maps), _BATCH)]
    return torch.cat(pieces).float()


def _build(run: RunFile, architecture: str) -> tuple[Model, str]:
    """A slice with its first weights, which follow from the run's seed alone, and the end of its extractor."""
    assert run.model is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(run.seed, "gkt", architecture))
        model = recipe(run, None).build(tuple(run.model.input), parse(architecture))
    return model, extractor(model)


def _traffic(parameters: FedGktParameters, model: Model) -> Traffic:
    """The traffic of a device with more samples than fit into one round."""
    shape = _map_shape(model, extractor(model))
    num_classes = math.prod(model.units[-1].out_shape)
    count = samples_within(parameters.max_bytes, shape, num_classes)
    ids, logits = torch.arange(count), torch.empty(count, num_classes, device="meta")
    maps = FeatureMaps(ids=ids, labels=ids, logits=logits, values=torch.empty(count, *shape, device="meta"))
    return Traffic(up=(maps,), down=(SampleLogits(ids=ids, values=logits),))


def method(parameters: FedGktParameters) -> Method:
    """FedGKT, for the registry."""
    return Method(
        client=partial(FedGktClient, parameters),
        server=CoverageServer(),
        check=check_gkt,
        travel=Travel(never_returned=keep_the_model),
        knowledge=KnowledgeExchange(teacher=GktTeacher(parameters), traffic=partial(_traffic, parameters)),
    )


def check_gkt(model: Model) -> None:
    """Raise `InputError` for a model with nothing after its first unit with parameters."""
    if hasattr(model, "taps") and len(_trainable_units(model)) < 2:
        raise InputError(
            "method 'fedgkt' divides a model behind its first unit with parameters, and this one has "
            f"{len(_trainable_units(model))}; take one with two or more"
        )


def _trainable_units(model: Model) -> list[str]:
    return [name for name in model.order if any(True for _ in model.unit(name).parameters())]
