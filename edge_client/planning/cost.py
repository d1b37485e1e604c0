"""Predicted peak memory of training: an upper bound, close to the truth, for any way to train a model.

    peak = what the process has before it trains, warmed up
         + weights that the method keeps + state of the optimizer
         + the worst moment of the worst group: activations, gradients, what kernels need beside them

The worst moment is added up from measured rows (`rows`, `calibration`): a full pass and each single unit were measured
as they are, a group of several units is put together from both. Where no rows exist, shapes give a looser bound.
Does not cover: which way is chosen (`planner`). No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edge_client import faults
from edge_client.config.run_file import TrainSection
from edge_client.planning.rows import Line, Lines, ModelRows, UnitRow, minus, peak, plus
from edge_client.records import PlanRules, TrainingPlan

__all__ = [
    "Shape",
    "Workload",
    "epoch_seconds",
    "evaluation_batch",
    "measured_bytes",
    "relative_time",
    "training_bytes",
]

# what a process takes beyond torch's allocations and what was seen hidden: rounding to pages, small objects
_MARGIN = 1.01
_SLACK_BYTES = 3 * 2**18
_STATE_COPIES = {"sgd": 0, "momentum": 1, "adam": 2}
_CHUNK = 16  # samples at a time through frozen units


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What decides the memory of training beside the model."""

    batch: int
    optimizer: str = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    weight_copies: int = 0  # of all weights, that the method keeps
    step_copies: int = 0  # of one parameter, that the method makes after a pass
    fixed_bytes: int = 0  # that the method keeps, whatever the model
    second_pass: int = 0  # samples that the method lets through once more, when all gradients are there
    separate_gradients: bool = False  # it keeps the gradients of that pass beside the others
    optimizers: int = 1  # with a state each
    recomputes: bool = True  # units may be recomputed in backward
    sample_bytes: int = 0  # that the method adds to a pass, per sample
    epochs: int = 1  # per group, for the time
    num_samples: int = 0  # of the device; 0: not known

    @classmethod
    def of(cls, train: TrainSection, rules: PlanRules, *, num_samples: int = 0, sample_bytes: int = 0) -> Workload:
        """The workload of a run, on a device with so many samples."""
        return cls(
            batch=train.batch,
            optimizer=train.optimizer,
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            weight_copies=rules.weight_copies,
            step_copies=rules.step_copies,
            fixed_bytes=rules.fixed_bytes,
            second_pass=rules.again,
            separate_gradients=rules.separate_gradients,
            optimizers=rules.optimizers,
            recomputes=rules.recomputes,
            sample_bytes=sample_bytes,
            epochs=train.epochs_of(num_samples),
            num_samples=num_samples,
        )

    @property
    def most_step_copies(self) -> int:
        """Of one parameter at a time: the gradient with weight decay, Adam's denominator, what the method makes."""
        return max((self.weight_decay > 0) + (self.optimizer == "adam"), self.step_copies)

    @property
    def state_copies(self) -> int:
        """Tensors that the optimizers keep per parameter."""
        kind = "momentum" if self.optimizer == "sgd" and self.momentum else self.optimizer
        return self.optimizers * _STATE_COPIES[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A way to train: the part of a plan that decides its memory and its time."""

    microbatch: int
    groups: tuple[tuple[str, ...], ...] = ()  # of blocks; none: all units at once
    skipped: tuple[str, ...] = ()
    recompute: str | None = None
    buffered: bool = False
    num_models: int = 1

    @classmethod
    def of(cls, plan: TrainingPlan) -> Shape:
        """The shape of a plan."""
        return cls(
            microbatch=plan.microbatch,
            groups=plan.groups,
            skipped=plan.skipped,
            recompute=plan.recompute,
            buffered=plan.buffered,
            num_models=plan.num_models,
        )


def training_bytes(rows: ModelRows, workload: Workload, shape: Shape) -> int:
    """What training adds to a warmed-up worker at most."""
    groups = list(_groups(rows.modes[shape.recompute or "plain"], shape))
    worst = max(
        _phase(rows, workload, shape, group) + shape.num_models * _hidden(rows, workload, shape, groups[: number + 1])
        for number, group in enumerate(groups)
    )
    copies = (workload.weight_copies + shape.num_models - 1) * rows.model_bytes
    lasting = copies + workload.fixed_bytes + _observed(rows, workload)
    predicted = (lasting + worst) * _MARGIN * rows.margin + _SLACK_BYTES
    return int(predicted * faults.scale("planning.predicted"))


def measured_bytes(rows: ModelRows, recompute: str | None, batch: int) -> int:
    """What torch allocates in a step of the whole model, without margins: what a measurement is held against."""
    group = _Group(0, rows.modes[recompute or "plain"], None)
    return int(max(_pass(group, batch, adds=False)))


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive units, and the head beside them."""

    first: int
    units: tuple[UnitRow, ...]
    head: UnitRow | None  # None: it is one of the units, all of them are trained at once

    @property
    def parameter_bytes(self) -> int:
        return sum(unit.parameter_bytes for unit in self.units) + (self.head.parameter_bytes if self.head else 0)

    @property
    def largest_bytes(self) -> int:
        return max(unit.largest_bytes for unit in (*self.units, *([self.head] if self.head else [])))


def _groups(units: Sequence[UnitRow], shape: Shape) -> Iterator[_Group]:
    """What is trained, one after another; the stem belongs to the first block."""
    if not shape.groups:
        yield _Group(0, tuple(units), None)
        return
    place = {unit.name: number for number, unit in enumerate(units)}
    for group in shape.groups:
        first, last = place[group[0]], place[group[-1]]
        if first == 1 and units[0].kind == "stem":
            first = 0
        yield _Group(first, tuple(units[first : last + 1]), units[-1])


def _phase(rows: ModelRows, workload: Workload, shape: Shape, group: _Group) -> float:
    """The worst moment while a group is trained."""
    models, parameters = shape.num_models, group.parameter_bytes
    adds = shape.microbatch < workload.batch  # gradients of earlier pieces wait for the later ones
    waiting = models * parameters if adds else 0
    step = (models + workload.separate_gradients) * parameters + workload.most_step_copies * group.largest_bytes
    # of several models, the others have their activations in memory, or their gradients already
    others = (models - 1) * max(parameters, _at_the_turn(group, shape.microbatch))
    passes = waiting + others + max(_pass(group, shape.microbatch, adds)) + shape.microbatch * workload.sample_bytes
    worst = max(step, waiting + models * _frozen(rows, shape, group), passes, _second_pass(workload, shape, group))
    return models * workload.state_copies * parameters + worst


def _observed(rows: ModelRows, workload: Workload) -> int:
    """Outputs of the first units that the method keeps to send them."""
    return workload.second_pass * max(unit.out_bytes for unit in rows.modes["plain"][:2])


def _second_pass(workload: Workload, shape: Shape, group: _Group) -> float:
    """The worst moment of the second pass that some methods make, when all gradients are there."""
    if not workload.second_pass:
        return 0.0
    size = min(workload.second_pass, shape.microbatch)
    if workload.separate_gradients:  # in pieces: later ones are added to what the first left
        first, later = max(_pass(group, size, adds=False)), max(_pass(group, size, adds=True))
        return group.parameter_bytes + max(first, group.parameter_bytes + later)
    between = size * sum(unit.out_bytes for unit in group.units)
    return group.parameter_bytes + between + max(peak(unit.adding, size) for unit in group.units)


def _hidden(rows: ModelRows, workload: Workload, shape: Shape, groups: Sequence[_Group]) -> float:
    """What libraries have taken until the last of these groups is trained."""
    # the last piece of a batch may be a smaller one, that of an epoch still another
    has_third = workload.batch % shape.microbatch > 0 or 0 < workload.second_pass != shape.microbatch
    rest = rows.hidden_rest_bytes if _last_piece(workload, shape) == rows.min_batch else 0
    whole = rows.hidden_at(shape.microbatch) + has_third * rows.hidden_size_bytes
    if groups[-1].head is None:
        return whole + rest

    def until(unit: UnitRow) -> int:
        return unit.hidden_bytes + has_third * unit.hidden_size_bytes

    # blocks that were trained together also hand gradients on, for which libraries keep more than for each alone
    together = any(sum(unit.kind == "block" for unit in group.units) > 1 for group in groups)
    blocks = [unit for unit in rows.modes["plain"] if unit.kind == "block"]
    handing_on = max(0.0, whole - until(blocks[-1])) if together else 0
    return until(groups[-1].units[-1]) + handing_on + rest


def _last_piece(workload: Workload, shape: Shape) -> int:
    """Samples in the last piece of an epoch; 0 if all pieces are whole, or their number is not known."""
    return workload.num_samples % workload.batch % shape.microbatch


def _pass(group: _Group, microbatch: int, adds: bool) -> Iterator[float]:
    """Forward and backward of one microbatch, moment by moment; gradients of earlier pieces come on top."""

    def at(held: Line, lines: Lines) -> float:
        return peak(tuple(plus(held, line) for line in lines), microbatch)

    gradients = 0.0  # that exist when a unit's backward begins
    if group.head:
        last, held = group.units[-1], _held(group, len(group.units) - 1)
        yield at(held, last.head_forward)
        yield at(held, last.head_adding if adds else last.head_backward)
        gradients = float(group.head.parameter_bytes)
    for number in reversed(range(len(group.units))):
        unit = group.units[number]
        alone = number == 0 and group.first > 0
        held = (0.0, 0.0) if number == 0 else _held(group, number - 1)
        yield at(held, unit.alone_forward if alone else unit.forward)
        if adds:
            yield at(held, unit.alone_adding if alone else unit.adding)
        else:
            yield at(held, unit.alone_backward if alone else unit.backward) + gradients
        gradients += unit.parameter_bytes


def _at_the_turn(group: _Group, microbatch: int) -> float:
    """What stays after the forward pass of a group."""
    last = group.units[-1]
    return peak((_held(group, len(group.units) - 1),), microbatch) + last.out_bytes * microbatch


def _held(group: _Group, number: int) -> Line:
    """What stays after the forward of a unit of the group, without its output."""
    unit, first = group.units[number], group.units[0]
    return unit.held if group.first == 0 else plus(first.alone_held, minus(unit.held, first.held))


def _frozen(rows: ModelRows, shape: Shape, group: _Group) -> float:
    """While the units before a group run without gradient, chunk by chunk; their outputs are put together."""
    if group.first == 0:
        return 0.0
    before = rows.modes["plain"][: group.first]
    out_bytes, microbatch = before[-1].out_bytes, shape.microbatch
    chunk = microbatch if rows.has_batch_statistics else min(_CHUNK, microbatch)
    running = max(peak(unit.evaluate, chunk) for unit in before)
    if shape.buffered:
        return max(running, out_bytes * microbatch)
    return running + (out_bytes * microbatch if chunk < microbatch else 0)


def evaluation_batch(rows: ModelRows, max_bytes: int, batch: int) -> int:
    """Samples that a forward pass takes at a time within `max_bytes`: `batch`, its half, ..., at least one."""
    while batch > 1 and max(peak(unit.evaluate, batch) for unit in rows.modes["plain"]) > max_bytes:
        batch //= 2
    return batch


def relative_time(rows: ModelRows, workload: Workload, shape: Shape) -> float:
    """Time of an epoch against training all units at once, without recomputing, with the whole batch."""
    plain = rows.modes["plain"]
    whole = sum(_seconds(unit, workload.batch) for unit in plain)
    units = rows.modes[shape.recompute or "plain"]
    pieces = -(-workload.batch // shape.microbatch)
    total, previous = 0.0, 0
    for group in _groups(units, shape):
        trained = [*group.units, *([group.head] if group.head else [])]
        total += pieces * sum(_seconds(unit, shape.microbatch) for unit in trained)
        # with outputs on disk: once per group, from where the group before began
        before = plain[previous if shape.buffered else 0 : group.first]
        passes = 1 / workload.epochs if shape.buffered else 1
        total += pieces * passes * sum(peak((unit.forward_s,), shape.microbatch) for unit in before)
        previous = group.first
    return total * shape.num_models / whole if whole > 0 else 1.0


def epoch_seconds(rows: ModelRows, workload: Workload, shape: Shape, num_samples: int) -> float:
    """Roughly, how long an epoch of so many samples takes, by the single steps from which the rows were measured."""
    whole_batch = sum(_seconds(unit, workload.batch) for unit in rows.modes["plain"])
    return relative_time(rows, workload, shape) * whole_batch * num_samples / workload.batch


def _seconds(unit: UnitRow, num_samples: int) -> float:
    return peak((unit.forward_s,), num_samples) + peak((unit.backward_s,), num_samples)
