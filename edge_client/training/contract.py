"""What a method tells the batch loop: phases, loss terms, gradient rules. The client half of `methods.base`.

It stands here, below the methods, because the loop is written against it and the methods are written above the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from edge_client.knowledge.kinds import Knowledge
    from edge_client.models.contract import Model
    from edge_client.records import TrainingPlan
    from edge_client.training.optimizers import Optimizer

__all__ = ["Batch", "Client", "Data", "Job", "Outcome", "Phase", "Term", "named_parameters"]


class Data(Protocol):
    """Samples by position; `data.sources.Samples` is one."""

    labels: Tensor  # [n] int64

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The piece of a batch that is in memory: a microbatch, and what a term must know of the whole."""

    x: Tensor  # [b, *input_shape] float32; or the output of `Phase.after`, without gradient
    y: Tensor  # [b] int64
    num_whole: int  # samples of the whole batch; means divide by it, so that microbatching changes nothing
    whole_y: Tensor  # [num_whole] int64, for masks: their sum over the whole batch is a term's `denominator`
    first: bool  # the first piece of its batch: the one in which `once` terms count
    most: int = 0  # samples that the plan's memory is for, at a time; the loop always tells it
    positions: Tensor | None = None  # [b] int64, of the samples in the phase's data; the loop always tells them
    last_epoch: bool = True  # of the last pass over the samples that the phase makes
    beside: Mapping[str, Tensor] = field(default_factory=dict)  # `x` of each model in `Phase.beside`, if it is another


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of the loss: `each` (per sample [b], averaged over the whole batch) or `once` (a scalar per step)."""

    name: str
    weight: float = 1.0
    each: Tensor | None = None
    mask: Tensor | None = None  # [b] of 0 and 1; then `denominator` is its sum over the whole batch
    denominator: float | None = None  # default: num_whole
    once: Tensor | None = None  # counted in the first piece of a batch only
    reported: bool = True  # part of the loss that is reported; not so for a model beside the run's


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One stretch of local training."""

    name: str
    trainable: frozenset[str]  # as `named_parameters` calls them; all others get no gradient and no step
    epochs: float = 1
    optimizer: str = "fresh"  # fresh, or a name: phases with equal names share one optimizer's state
    optimizer_state: dict[str, dict[str, Tensor]] | None = None  # that a fresh one goes on with; changed in place
    batchnorm: str = "train"  # train | eval | restore (train, and put the buffers back at the end)
    keep: frozenset[str] = frozenset()  # terms whose gradient is not added: `adjust` sees it apart
    taps: frozenset[str] = frozenset()  # activations that `observe` wants
    after: str = ""  # the units up to this one are frozen: they run without gradient, and `Batch.x` is their output
    bypassed: frozenset[str] = frozenset()  # of these units, the ones that are left out
    beside: tuple[str, ...] = ()  # keys of `Client.modules` that are models too: `after` holds for each of them
    data: Data | None = None  # other samples than the device's own
    restored: frozenset[str] = frozenset()  # buffers that are put back at the end, as `restore` does with all


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that a client half works with during one assignment."""

    model: Model  # holds the received weights
    round: int
    num_rounds: int
    epochs: int
    learning_rate: float
    class_counts: tuple[int, ...]
    slice: str = "full"  # of the run's model: what `model` is
    plan: TrainingPlan | None = None  # how this device trains inside its budget; none: all at once
    rng: Callable[[str], Generator]  # purpose -> its own generator
    state: Mapping[str, Tensor] = field(default_factory=dict)  # what `end` kept in this device's last counted round
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # the method's tensors that came with the model
    # what names of tensors begin with, in a container, that the server does not want back; None: it was not asked
    kept: tuple[str, ...] | None = None
    # what was received, as `named_parameters` calls it, read anew whenever it is asked for, so that it may be changed;
    # none: it is nowhere else
    received: Mapping[str, Tensor] | None = None
    build: Callable[[str], Model] | None = None  # purpose -> another model of this kind with random weights of its own
    data: Data | None = None  # the device's own samples, for passes that are no training
    knowledge: Iterable[Knowledge] = ()  # what came with the assignment beside weights, read anew in every pass over it
    class_min_count: int | None = 1  # samples that a class needs before its presence is revealed; None: it never is
    clip_norm: float | None = None  # of what a sample adds to a class mean, as this device's owner wants it
    optimizer: Callable[[], Optimizer] | None = None  # a fresh one of the run's kind
    # what a method that is put over another tells that one:
    modules: Mapping[str, nn.Module] = field(default_factory=dict)  # what is trained and sent beside the model, by key
    loss: Callable[[Batch, Phase], Tensor] | None = None  # of each sample; none: cross entropy of the whole model


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a method adds to the trained weights: numbers and tensors for the server, tensors for its own next time."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # new values of `Job.extra`; others go back as they came
    knowledge: tuple[Knowledge, ...] = ()  # as far as the device's owner lets it out


class Client(Protocol):
    """A method on a device. One object per assignment; no network, disk or clock."""

    def begin(self, job: Job) -> None:
        """Before anything is trained: keep what the other calls need."""

    def modules(self) -> Mapping[str, nn.Module]:
        """What is trained beside the model, by key; asked before every phase."""

    def phases(self) -> Sequence[Phase]:
        """What is left to train, in order; asked again after `replan`. A phase whose name was trained is left out."""

    def replan(self, plan: TrainingPlan) -> None:
        """Between two phases: there is less memory now, and this plan fits what is left of it."""

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """The loss; each term is back-propagated and freed before the next is asked for."""

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        """Change a gradient in place before the step; `kept`: term -> its gradient, for those in `Phase.keep`."""

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        """Change the trainable parameters in place after the optimizer did."""

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """See the activations (detached) of the model at `Phase.taps` for this piece."""

    def end(self) -> Outcome:
        """After the last phase."""

    def predict(self, x: Tensor) -> Tensor:
        """Logits for evaluation."""


def named_parameters(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The model's parameters by name, and those of each module beside it as KEY.NAME."""
    named = dict(model.named_parameters())
    for key, module in modules.items():
        for name, param in module.named_parameters(prefix=key):
            if name in named:
                raise ValueError(f"parameter {name!r} of the module {key!r} is one of the model, too; use another key")
            named[name] = param
    return named
