"""The contract of a method: a client half that the batch loop asks, a server half that folds the frozen updates.

    device       begin(job) -> phases -> [terms -> adjust -> step -> after_step -> observe]* -> end
    coordinator  fold(state, frozen, round) -> every tensor of the new state, one at a time
                 learn(memory, received) -> the new memory; tell(memory, slice) -> what devices are told next

Methods are pure: no network, disk or clock, and random generators are passed in. Updates are read tensor by tensor
(`Frozen.column`), as often as a method likes, so that a fold needs the memory of one tensor whatever the fleet.
A method file derives its client from `PlainClient` and overrides what the paper changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from edge_client.methods.slices import Place, slice_places
from edge_client.records import PlanRules
from edge_client.training.contract import Batch, Client, Job, Outcome, Phase, Term

if TYPE_CHECKING:
    from torch import Tensor, nn

    from edge_client.config.run_file import RunFile
    from edge_client.knowledge.kinds import Knowledge
    from edge_client.models.contract import Model
    from edge_client.params import IndexMap
    from edge_client.records import TrainingPlan

__all__ = [
    "Batch",
    "Client",
    "Exchange",
    "Frozen",
    "Header",
    "Job",
    "KnowledgeExchange",
    "LeftOut",
    "Lesson",
    "Method",
    "Outcome",
    "Phase",
    "Place",
    "PlainClient",
    "PlanRules",
    "Received",
    "Server",
    "SliceRules",
    "State",
    "Teacher",
    "Term",
    "Traffic",
    "Travel",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Everything small about an update; the headers of the whole cohort are read before any tensor."""

    device: str
    num_samples: int
    slice: str = "full"  # the part of the model that the device trained
    steps: int = 0
    scalars: Mapping[str, float] = field(default_factory=dict)


class State(Protocol):
    """The server's tensors before the round."""

    def names(self) -> list[str]:
        """All tensor names, in the order in which `fold` yields them; those of a method begin with `extra/`."""

    def tensor(self, name: str) -> Tensor:
        """One of them, read anew at every call."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """What `Travel.notes` returned when the run began: text, numbers, maps, and tuples of them."""


class Frozen(Protocol):
    """The updates of a round that count, sorted by device; the set never changes."""

    @property
    def headers(self) -> Sequence[Header]:
        """One per update."""

    @property
    def num_devices(self) -> int:
        """Devices of the run: those that could have been chosen for this round, or ever took part.

        Where each architecture is a model of its own, only those of this round: nobody knows how many others have it.
        """

    @property
    def momentum(self) -> float:
        """The momentum of the SGD that the devices trained with; 0 with another optimizer."""

    def column(self, name: str) -> Iterator[tuple[Header, Tensor, IndexMap | None]]:
        """The absolute values of one tensor, from each update that has it; no index map: the whole tensor."""


# the knowledge of each update that has any, sorted by device; can be asked for again
Received = Callable[[], Iterator[tuple[Header, "tuple[Knowledge, ...]"]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a teacher knows of the run when it learns or tells."""

    round: int  # in `learn` that of the updates, in `tell` the one that is about to begin
    num_classes: int
    seed: int  # of this run
    run: RunFile | None = None  # for teachers that have a model of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Knowledge of a round that could not be used, or was not there; people read it in `coordinator run show`."""

    device: str = ""  # empty: of all devices
    code: str  # missing_class | class_count | other_samples | signature | no_public | held_back | silent
    detail: str


class Teacher(Protocol):
    """The server's side of an exchange of knowledge: a memory of named tensors, which each round may replace."""

    def begin(self, run: RunFile) -> Mapping[str, Tensor]:
        """The memory before the first round; raises `InputError` if something that it needs is not there."""

    def learn(
        self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson, studied: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The memory after a round; `studied` is what `study` made of the old one, whose tensors are read on access."""

    def left_out(self, memory: Mapping[str, Tensor], received: Received, lesson: Lesson) -> Sequence[LeftOut]:
        """What `learn` cannot use of the same knowledge, or misses in it; it uses everything else."""

    def study(self, memory: Mapping[str, Tensor], lesson: Lesson) -> Mapping[str, Tensor]:
        """Work that takes long and needs only the memory after the round of `lesson`; it runs beside the next one."""

    def tell(self, memory: Mapping[str, Tensor], *, cut: str, device: str, lesson: Lesson) -> tuple[Knowledge, ...]:
        """The knowledge for a device with this slice; the same for every device without `KnowledgeRules.per_device`."""


class Server(Protocol):
    """A method on the coordinator."""

    def fold(self, state: State, frozen: Frozen, *, round: int) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the new state, in the order of `state.names()`; the caller may change each in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """What travels in a round and what stays on a device, in words."""

    down: str = "model"
    up: str = "model"
    device: str = ""  # kept there from round to round


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The knowledge of a typical round, for its size alone: its tensors may have no values (`device="meta"`)."""

    up: tuple[Knowledge, ...] = ()
    down: tuple[Knowledge, ...] = ()
    once: tuple[Knowledge, ...] = ()  # down, in a device's first round


def no_extra_tensors(model: Model) -> Mapping[str, Tensor]:
    """Most methods send the model and nothing else."""
    return {}


def all_tensors_return(model: Model) -> tuple[str, ...]:
    """Most devices send back every tensor that they received."""
    return ()


def no_notes(model: Model) -> Mapping[str, Any]:
    """Most folds need to know nothing of the model but its tensors."""
    return {}


def same_slice(cut: str) -> str:
    """Most methods train a slice as one network."""
    return cut


def keep_random_weights(model: Model, build: Callable[[str], Model]) -> None:
    """Most methods begin with the weights that the model was built with."""


def no_knowledge(model: Model) -> Traffic:
    """Most methods exchange weights alone."""
    return Traffic()


def no_sample_bytes(model: Model) -> int:
    """Most methods keep nothing of a pass but what the model itself keeps."""
    return 0


def accept_every_model(model: Model) -> None:
    """Most methods train any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Travel:
    """Which tensors travel beside the model's, and which never come back; by default the model goes both ways.

    On the server, what asks the model may get one without units and taps: of a task whose data only devices know.
    """

    # tensors that travel with the model (auxiliary heads, control variates); the server makes them once, with random
    # values from torch's global generator, which it seeds
    extra_tensors: Callable[[Model], Mapping[str, Tensor]] = no_extra_tensors
    # those that come to a device with a slice, made from that slice, for measurements; None: all, of the slice
    extra_of_slice: Callable[[Model, str], Mapping[str, Tensor]] | None = None
    inherits_extra: bool = True  # a run that starts from another run's model takes its extra tensors, too
    never_returned: Callable[[Model], tuple[str, ...]] = all_tensors_return  # prefixes of the names of such tensors
    notes: Callable[[Model], Mapping[str, Any]] = no_notes  # about the model, for `fold`, which has no model


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRules:
    """For methods whose slices are more than parts of one network: which network they are, and where they lie."""

    network: Callable[[str], str] = same_slice  # slice -> the slice whose network a device builds for it
    # the model, the slice, names in a container -> where each tensor of the slice lies among the server's; of the
    # model only the shapes count
    places: Callable[[Model, str, Sequence[str]], Mapping[str, Place]] = slice_places
    # changes the first weights of a run in place; the second argument builds the network of a slice with random weights
    first_weights: Callable[[Model, Callable[[str], Model]], None] = keep_random_weights
    predicts_by_client: bool = False  # `Client.predict` answers on the server, too: the model alone would answer wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class KnowledgeExchange:
    """For methods whose devices exchange features, logits or drafts, with weights or instead of them."""

    teacher: Teacher | None = None  # None: weights alone are exchanged
    traffic: Callable[[Model], Traffic] = no_knowledge
    sample_bytes: Callable[[Model], int] = no_sample_bytes  # memory of a pass beyond the model's, per sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A published algorithm with its parameters set.

    A method that shares weights needs a client and a server half; `travel` and `slices` are for what those cannot say,
    `knowledge` is for methods that exchange knowledge alone. The registry sets `name`, `paper`, `parameters` and
    `plans` from the method's card.
    """

    client: Callable[[], Client]
    server: Server
    name: str = ""
    paper: str = ""
    parameters: Any = None  # the card's dataclass
    plans: PlanRules = field(default_factory=PlanRules)
    exchange: Exchange = field(default_factory=Exchange)
    check: Callable[[Model], None] = accept_every_model  # raises `InputError` before a run begins: what works instead
    travel: Travel = field(default_factory=Travel)
    slices: SliceRules = field(default_factory=SliceRules)
    knowledge: KnowledgeExchange = field(default_factory=KnowledgeExchange)


class PlainClient:
    """Local training with cross entropy on all parameters; the base of the clients of all methods."""

    job: Job

    def begin(self, job: Job) -> None:
        """Keep the job."""
        self.job = job

    def modules(self) -> Mapping[str, nn.Module]:
        """The model alone is trained."""
        return {}

    def phases(self) -> Sequence[Phase]:
        """One phase over everything that can be trained."""
        trainable = frozenset(name for name, param in self.job.model.named_parameters() if param.requires_grad)
        return (Phase(name="train", trainable=trainable, epochs=self.job.epochs),)

    def replan(self, plan: TrainingPlan) -> None:
        """One phase has nothing between its parts; the loop takes smaller microbatches by itself."""

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """Cross entropy, or what a method that is put over this one minimises."""
        from edge_client.training.objectives import cross_entropy  # torch; this module is read without it

        loss = self.job.loss
        each = cross_entropy(self.job.model(batch.x), batch.y) if loss is None else loss(batch, phase)
        yield Term(name="cross_entropy", each=each)

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        """The gradient stays as it is."""

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        """The step stays as it is."""

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """Activations are not observed."""

    def end(self) -> Outcome:
        """Nothing beside the weights."""
        return Outcome()

    def predict(self, x: Tensor) -> Tensor:
        """The model's logits."""
        logits: Tensor = self.job.model(x)
        return logits
