"""FeDepth. Zhang et al., "Memory-adaptive Depth-wise Heterogeneous Federated Learning", arXiv:2303.04887.

Every device trains the same full model, however little memory it has: consecutive blocks that fit its budget form a
group, and the groups are trained one after another, each behind the frozen ones before it and in front of the model's
head. m-FeDepth gives every block that a group may end at a head of its own instead. Down: the model (and all auxiliary
heads). Up: what was trained of it; the coordinator takes each tensor's mean over the devices that sent it.

    z_{j-1} = f(x; theta_1 ... theta_{j-1})   without gradient, already trained in this round
    minimise CE(phi(skip(theta_j(z_{j-1}))), y) over theta_j, from the received weights, and phi, from group j - 1

Partial training: blocks that do not fit even alone stay as they were received, and so does the stem; they run all the
same (`bypass` jumps over them). Mutual knowledge distillation: a device with memory for M models trains them side by
side, each with CE + mean over the others of KL(softmax(other) || softmax(own)); the first is the run's model and is
sent, the others start from random weights of their own, as in deep mutual learning, and stay on the device.

Deviations, with the reasons in docs/explanation/fedepth.md: each group has an optimizer of its own; frozen BatchNorms
use their running statistics, where they have any; the head's running statistics come from the last group alone, as
others leave padded channels with a variance of 0; auxiliary heads belong to the block before them, not to the number of
a group.

Legend: theta_j = a group, phi = the head or an auxiliary head, J = the number of groups, M = parameters.mutual at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from edge_client.device.accelerator import Accelerator, device_of, same_randomness
from edge_client.errors import InputError, PayloadError
from edge_client.methods.base import Batch, Client, Job, Method, Outcome, Phase, PlainClient, Term
from edge_client.methods.cards.fedepth import FeDepthParameters
from edge_client.models import heads
from edge_client.models.contract import Model
from edge_client.records import TrainingPlan
from edge_client.training.objectives import cross_entropy, divergence
from edge_client.wire.container import EXTRA_PREFIX

__all__ = ["FeDepthClient", "method"]

_PEER = "peer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Blocks that are trained together; an empty `after` means that nothing before them is frozen."""

    blocks: tuple[str, ...]
    units: tuple[str, ...]  # that run with gradient: the blocks, the stem before the first and the head after the last
    after: str = ""  # the unit before them
    is_last: bool

    @property
    def phase(self) -> str:
        """The name of its phase, from which the order of samples follows: as in FedAvg if it is everything."""
        return f"train {self.blocks[-1]}" if self.after or not self.is_last else "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Learner:
    """A model that is trained, and its auxiliary heads by the block that they stand behind."""

    key: str = ""  # empty: the run's model
    model: Model
    heads: dict[str, nn.Module] = field(default_factory=dict)

    def modules(self) -> dict[str, nn.Module]:
        """Its modules as the loop calls them; the run's model itself is known there."""
        modules: dict[str, nn.Module] = {self.key: self.model} if self.key else {}
        return modules | {self.head_key(block): head for block, head in self.heads.items()}

    def head_key(self, block: str) -> str:
        """How the loop calls the head of a block: `extra/block3`, of a peer `peer/1/extra/block3`."""
        return f"{self.key}/{EXTRA_PREFIX}{block}" if self.key else f"{EXTRA_PREFIX}{block}"

    def names(self, names: Iterable[str]) -> frozenset[str]:
        """Parameters or buffers of the model as the loop calls them."""
        return frozenset(f"{self.key}.{name}" if self.key else name for name in names)

    def head_names(self, block: str) -> frozenset[str]:
        """The parameters of a block's head as the loop calls them."""
        return frozenset(name for name, _ in self.heads[block].named_parameters(prefix=self.head_key(block)))


class FeDepthClient(PlainClient):
    """Group by group, with the loss terms and gradient rules of the method underneath."""

    def __init__(self, parameters: FeDepthParameters, base: Callable[[], Client], *, auxiliary: bool) -> None:
        self._parameters = parameters
        self._auxiliary = auxiliary
        self._base = base()
        self._learners: list[_Learner] = []  # the run's model first
        self._groups: dict[str, _Group] = {}  # still to be trained, by the name of its phase
        self._skipped: tuple[str, ...] = ()
        self._trained: set[str] = set()  # blocks
        self._epochs_spent: dict[str, float] = {}  # by the phases that have begun
        self._heads: dict[str, nn.Module] = {}  # of the run's model, for the method underneath
        self._logits: list[Tensor] = []  # of all learners, for the piece that is in memory

    # what is trained

    def begin(self, job: Job) -> None:
        """Make the groups, peers and heads of the plan."""
        super().begin(job)
        num_models = job.plan.num_models if job.plan is not None else 1
        self._learners = [_Learner(model=job.model), *(self._peer(f"{_PEER}{k}") for k in range(1, num_models))]
        self._use(job.plan)
        self._base.begin(replace(job, loss=self._model_losses, modules=self._heads))

    def replan(self, plan: TrainingPlan) -> None:
        """The plan's groups without the blocks that are done; peers that no longer fit are given up."""
        del self._learners[plan.num_models :]
        self._use(plan)
        self._base.replan(plan)

    def _peer(self, key: str) -> _Learner:
        """A peer as it was after its last round, or with random weights of its own."""
        if self.job.build is None:
            raise ValueError("a plan with several models needs a job that can build them")
        model = self.job.build(key)
        _fill(model, self.job.state, f"{key}.", optional=True)
        return _Learner(key=key, model=model)

    def _use(self, plan: TrainingPlan | None) -> None:
        model = self.job.model
        self._skipped = plan.skipped if plan is not None else ()
        if self._parameters.bypass and self._skipped:
            _check_bypass(model, self._skipped)
        self._groups = {group.phase: group for group in _groups(model, plan, self._trained)}
        if self._auxiliary:
            for learner in self._learners:
                self._add_heads(learner)
            self._heads.update(self._learners[0].modules())

    def _add_heads(self, learner: _Learner) -> None:
        """Add the heads that the groups need: the run's as received, a peer's from its state or with random weights."""
        units = {unit.name: unit for unit in learner.model.units}
        for group in self._groups.values():
            if group.is_last or (end := group.blocks[-1]) in learner.heads:
                continue
            device = device_of(learner.model)
            with _seeded(self.job.rng(learner.head_key(end)), device):
                head = learner.heads[end] = device.move(heads.auxiliary(learner.model, units[end]))
            if learner.key:
                _fill(head, self.job.state, f"{learner.head_key(end)}.", optional=True)
            else:
                _fill(head, self.job.extra, f"{end}.")

    def modules(self) -> Mapping[str, nn.Module]:
        """The auxiliary heads of the run's model, the peers, and the heads of those."""
        return {key: module for learner in self._learners for key, module in learner.modules().items()}

    def phases(self) -> Sequence[Phase]:
        """One phase for each remaining group; what is the same in all of them comes from the method underneath."""
        (whole,) = self._base.phases()
        return [self._phase(name, group, whole) for name, group in self._groups.items()]

    def _phase(self, name: str, group: _Group, whole: Phase) -> Phase:
        units = {unit.name: unit for unit in self.job.model.units}
        head = units[self.job.model.order[-1]]
        units_trained = [units[unit] for unit in group.units]
        if not (group.is_last or self._auxiliary):
            units_trained.append(head)
        names = [param for unit in units_trained for param in unit.parameters if param in whole.trainable]
        trainable = _union(learner.names(names) for learner in self._learners)
        if self._auxiliary and not group.is_last:
            trainable |= _union(learner.head_names(group.blocks[-1]) for learner in self._learners)
        return replace(
            whole,
            name=name,
            trainable=trainable,
            epochs=self._epochs(),
            after=group.after,
            bypassed=frozenset(self._skipped) if self._parameters.bypass else frozenset(),
            beside=tuple(learner.key for learner in self._learners[1:]),
            restored=_union(learner.names(() if group.is_last else head.buffers) for learner in self._learners),
        )

    def _epochs(self) -> float:
        """The epochs of each remaining group: all of the run's, or an equal share of those that remain."""
        if self._parameters.budget_mode == "per_group":
            return self.job.epochs
        return max(0.0, self.job.epochs - sum(self._epochs_spent.values())) / len(self._groups)

    # how it is trained

    def terms(self, batch: Batch, phase: Phase) -> Iterator[Term]:
        """The terms of the method underneath for the run's model; then the losses of the peers, one by one.

        The graphs of all models live at once: each has its own loss, and its logits are in those of all others.
        """
        group = self._groups[phase.name]
        self._trained.update(group.blocks)
        self._epochs_spent[phase.name] = phase.epochs
        inputs = [batch.beside.get(learner.key, batch.x) for learner in self._learners]
        self._logits = [self._forward(*pair, group) for pair in zip(self._learners, inputs, strict=True)]
        yield from self._base.terms(batch, phase)
        for number, learner in enumerate(self._learners[1:], start=1):
            yield Term(name=learner.key, each=_losses(self._logits, number, batch.y), reported=False)
        self._logits = []

    def _model_losses(self, batch: Batch, phase: Phase) -> Tensor:
        """The loss of each sample that the method underneath minimises for the run's model."""
        losses = _losses(self._logits, 0, batch.y)
        self._logits[0] = self._logits[0].detach()
        return losses

    def _forward(self, learner: _Learner, x: Tensor, group: _Group) -> Tensor:
        x = learner.model.run_units(group.units, x)
        if group.is_last:
            return x
        if self._auxiliary:
            logits: Tensor = learner.heads[group.blocks[-1]](x)
            return logits
        head = learner.model.units[-1]
        x = heads.fit(x, head.in_shape)  # under the same name: the larger activation is not held any longer
        return learner.model.run_units((head.name,), x)

    def adjust(self, name: str, param: Tensor, grad: Tensor, kept: Mapping[str, Tensor]) -> None:
        """The rule of the method underneath, which knows nothing of peers."""
        if not name.startswith(_PEER):
            self._base.adjust(name, param, grad, kept)

    def after_step(self, params: Mapping[str, Tensor], learning_rate: float) -> None:
        """The rule of the method underneath."""
        model_params = {name: param for name, param in params.items() if not name.startswith(_PEER)}
        self._base.after_step(model_params, learning_rate)

    def observe(self, batch: Batch, taps: Mapping[str, Tensor], phase: Phase) -> None:
        """The method underneath observes."""
        self._base.observe(batch, taps, phase)

    def end(self) -> Outcome:
        """The auxiliary heads travel, the peers stay here."""
        outcome = self._base.end()
        first, *peers = self._learners
        extra = _tensors(first.heads)
        state = _tensors({key: module for peer in peers for key, module in peer.modules().items()})
        return replace(outcome, extra={**outcome.extra, **extra}, state={**outcome.state, **state})

    def predict(self, x: Tensor) -> Tensor:
        """The whole model, as the method underneath asks it."""
        return self._base.predict(x)


def _groups(model: Model, plan: TrainingPlan | None, trained: Collection[str]) -> list[_Group]:
    """The plan's groups without the blocks that are trained already; no plan: everything at once."""
    blocks = model.order[1:-1]
    if not blocks:
        return [_Group(blocks=(), units=model.order, is_last=True)]
    planned = plan.groups if plan is not None and plan.groups else (blocks,)
    skipped = plan.skipped if plan is not None else ()
    blocks_of_plan = (*skipped, *(block for group in planned for block in group))
    if blocks_of_plan != blocks:
        raise PayloadError(
            "plan", f"the plan has the blocks {_listed(blocks_of_plan)}, the model has {_listed(blocks)}"
        )
    remaining = [tuple(block for block in group if block not in trained) for group in planned]
    return [_group(model, group, is_last=group[-1] == blocks[-1]) for group in remaining if group]


def _group(model: Model, blocks: tuple[str, ...], *, is_last: bool) -> _Group:
    start = model.order.index(blocks[0])
    is_first = start == 1
    return _Group(
        blocks=blocks,
        units=model.order[0 if is_first else start : start + len(blocks) + is_last],
        after="" if is_first else model.order[start - 1],
        is_last=is_last,
    )


def _listed(blocks: Sequence[str]) -> str:
    return ", ".join(blocks[:12]) + (f" and {len(blocks) - 12} more" if len(blocks) > 12 else "") or "none"


def _check_bypass(model: Model, skipped: Sequence[str]) -> None:
    """Raise `InputError` unless the first trained block takes the input of the first skipped one."""
    units = {unit.name: unit for unit in model.units}
    start = model.order.index(skipped[0])
    before, first = units[skipped[0]], model.units[start + len(skipped)]
    if before.in_shape != first.in_shape:
        raise InputError(
            f"bypass: {model.order[start - 1]!r} gives {list(before.in_shape)}, {first.name!r} takes "
            f"{list(first.in_shape)}; set bypass = false, or give the device memory for the blocks between them"
        )


def _losses(logits: Sequence[Tensor], learner: int, labels: Tensor) -> Tensor:
    """Cross entropy of one learner, and the mean of its divergences from all others: [b]."""
    losses = cross_entropy(logits[learner], labels)
    others = [other.detach() for number, other in enumerate(logits) if number != learner]
    if not others:
        return losses
    return losses + torch.stack([divergence(other, logits[learner]) for other in others]).mean(dim=0)


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """All tensors of modules, as KEY.NAME."""
    return {f"{key}.{name}": value for key, module in modules.items() for name, value in module.state_dict().items()}


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str, *, optional: bool = False) -> None:
    """Copy the tensors below `prefix` into the module; `optional`: leave it as it is if some are not there."""
    state = module.state_dict()
    missing = [name for name in state if f"{prefix}{name}" not in tensors]
    if missing and not optional:
        raise PayloadError("names", f"the received model has no tensor {EXTRA_PREFIX + prefix + missing[0]!r}")
    for name, tensor in () if missing else state.items():
        value = tensors[f"{prefix}{name}"]
        if value.shape != tensor.shape:
            raise PayloadError(
                "shape", f"tensor {prefix + name!r} is {list(value.shape)}, expected {list(tensor.shape)}"
            )
        tensor.copy_(value)


@contextmanager
def _seeded(generator: torch.Generator, device: Accelerator) -> Iterator[None]:
    """Inside, torch's global generator draws what this one would; afterwards it continues as before."""
    with same_randomness(device):
        torch.manual_seed(generator.initial_seed())
        yield


def _auxiliary_tensors(base_tensors: Callable[[Model], Mapping[str, Tensor]], model: Model) -> Mapping[str, Tensor]:
    """A head for every block that a group may end at: all but the last."""
    if not hasattr(model, "units"):
        raise InputError(
            "method 'm-fedepth' needs the shape of a sample on the server, too; tell it, Task(input=(3, 96, 96))"
        )
    blocks = [unit for unit in model.units if unit.kind == "block"][:-1]
    return {**base_tensors(model), **_tensors({unit.name: heads.auxiliary(model, unit) for unit in blocks})}


def method(parameters: FeDepthParameters, base: Method, *, auxiliary: bool = False) -> Method:
    """FeDepth or m-FeDepth over another method, for the registry."""
    extra_tensors = base.travel.extra_tensors
    if auxiliary:
        extra_tensors = partial(_auxiliary_tensors, extra_tensors)
    return replace(
        base,
        client=partial(FeDepthClient, parameters, base.client, auxiliary=auxiliary),
        travel=replace(base.travel, extra_tensors=extra_tensors),
    )
