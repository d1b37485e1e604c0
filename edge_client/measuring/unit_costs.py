"""What each unit of a model costs: rows from traces of real steps, and from what the kernel counts beside them.

Steps on random samples at two small batches go through the same loop and the same method as a worker's. The profiler
reports every allocation: of the whole model at once, of each block as a group of its own where the method trains by
groups, of a pass without gradients; once for each kind of recomputation. Each step has two pieces: the second one adds
its gradients to those of the first.
Covers: reading the rows. Does not cover: the steps (`step_runner`), their traces (`allocation_trace`), what torch does
not see (`hidden_memory`), the process and its cache (`calibration`), what follows (`planning.cost`).
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from edge_client.device import guard
from edge_client.device.private_memory import process_memory
from edge_client.measuring.allocation_trace import TracePair
from edge_client.measuring.hidden_memory import HiddenMemory, measure_hidden
from edge_client.measuring.prepared_training import PreparedTraining
from edge_client.measuring.step_runner import StepRunner, TracedStep, batches_for
from edge_client.models.contract import Model, Unit
from edge_client.planning.cost import measured_bytes
from edge_client.planning.paper_cost import unit_cost
from edge_client.planning.rows import Line, Lines, ModelRows, UnitRow, envelope, line_through, minus, plus

__all__ = ["measure"]

_LEAST_HIDDEN_BYTES = 2**18
_FAR_BYTES, _FAR_SHARE = 3 * 10**6, 0.2  # what is hidden by less than this below the constant is the constant
_WORKER_BYTES = 4 * 10**6  # that a worker takes beside what is done here: its order, progress, results


def measure(prepared: PreparedTraining, *, key: str, limit_bytes: int = 0) -> ModelRows:
    """The rows of a model that is warm, in this process."""
    memory = process_memory()
    if limit_bytes:
        guard.limit_growth(limit_bytes)
    model = prepared.model
    runner = StepRunner(prepared=prepared, batches=batches_for(model))
    hidden = measure_hidden(runner)
    kinds = (None, *model.recompute_kinds)
    modes = {"plain" if kind is None else kind: _unit_rows(runner, kind, hidden) for kind in kinds}
    rows = ModelRows(
        key=key,
        torch=str(torch.__version__),
        machine=platform.machine(),
        channels_last=prepared.channels_last,
        dtype=prepared.dtype,
        batches=runner.batches,
        base_bytes=memory.rss_bytes + _WORKER_BYTES,
        private_base_bytes=memory.private_bytes + _WORKER_BYTES,
        model_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        hidden_bytes=hidden.lasting.whole,
        hidden_size_bytes=hidden.size.whole,
        hidden_rest_bytes=hidden.rest_bytes,
        has_batchnorm=any(True for _ in _norms(model)),
        has_batch_statistics=any(not norm.track_running_stats for norm in _norms(model)),
        min_batch=model.min_batch,
        modes=modes,
    )
    beside_torch = hidden.peak_bytes - measured_bytes(rows, None, hidden.batch)
    at_once = max(hidden.lasting.whole, beside_torch)
    return replace(rows, hidden_bytes=at_once, hidden_line=_hidden_line(rows, hidden, at_once))


def _hidden_line(rows: ModelRows, hidden: HiddenMemory, at_once: int) -> Line:
    """What is hidden in private memory, by the batch; nothing where the constant says nearly the same."""
    batches, private = (hidden.small_batch, hidden.batch), hidden.private
    peaks = (private.small_peak_bytes, private.peak_bytes)
    small, large = (
        max(private.lasting_bytes, peak - measured_bytes(rows, None, batch), _LEAST_HIDDEN_BYTES)
        for batch, peak in zip(batches, peaks, strict=True)
    )
    if at_once - min(small, large) < max(_FAR_BYTES, at_once * _FAR_SHARE):
        return 0.0, 0.0
    return line_through(batches, small, large)


def _norms(model: Model) -> Iterator[nn.modules.batchnorm._BatchNorm]:
    return (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))


def _unit_rows(runner: StepRunner, kind: str | None, hidden: HiddenMemory) -> tuple[UnitRow, ...]:
    """One row per unit, with this kind of recomputation."""
    runner.model.recompute = kind
    whole = runner.traced_steps(())[0]
    groups = runner.single_blocks()
    alone = dict(zip((name for (name,) in groups), runner.traced_steps(groups), strict=True)) if groups else {}
    evaluation = runner.traced_evaluation()
    runner.model.recompute = None
    readers = (_RowReader(runner, name, whole, alone.get(name), evaluation) for name in runner.model.order)
    lasting, size = (dict(zip(alone, growth.until, strict=True)) for growth in (hidden.lasting, hidden.size))
    return tuple(
        replace(reader.row(), hidden_bytes=lasting.get(reader.name, 0), hidden_size_bytes=size.get(reader.name, 0))
        for reader in readers
    )


@dataclass(frozen=True, slots=True)
class _RowReader:
    """Reads the row of one unit from the traces."""

    runner: StepRunner
    name: str
    whole: TracedStep  # of all units at once
    alone: TracedStep | None  # of this one as a group
    evaluation: TracePair

    def row(self) -> UnitRow:
        """Everything that a plan needs to know of the unit."""
        units = self.runner.model.units
        number = self.runner.model.order.index(self.name)
        sizes = self._sizes(number)
        fresh = self.whole.fresh
        before = units[number - 1].name if number else None
        following = sum(sum(self._sizes(later)) for later in range(number + 1, len(units)))
        held = self._held(fresh, before) if before else (0.0, 0.0)
        after, ends = f"post/{self.name}", f"grad/{before}" if fresh.has(f"grad/{before}") else "done"
        begins = after if units[number].kind == "head" else f"grad/{self.name}"
        return UnitRow(
            name=self.name,
            kind=units[number].kind,
            parameter_bytes=sum(sizes),
            largest_bytes=max(sizes, default=0),
            out_bytes=self.runner.out_bytes[self.name],
            held=self._held(fresh, self.name),
            forward=_above(fresh.moments(f"post/{before}" if before else f"pre/{self.name}", after), held),
            backward=_above(fresh.moments(begins, ends), plus(held, (0.0, following))),
            adding=_above(self.whole.adding.moments(begins, ends), held),
            evaluate=envelope(self.evaluation.moments(f"frozen/pre/{self.name}", f"frozen/post/{self.name}")),
            forward_s=fresh.seconds(f"pre/{self.name}", after),
            backward_s=fresh.seconds(begins, ends),
            paper=self._paper(units[number]),
            **self._as_group(units[-1].name, self._sizes(len(units) - 1)),
        )

    def _paper(self, unit: Unit) -> Line:
        return line_through((1, 2), *(float(unit_cost(self.runner.model, unit, batch=batch)) for batch in (1, 2)))

    def _as_group(self, head: str, head_sizes: list[int]) -> dict[str, Any]:
        if self.alone is None:
            return {}
        fresh, adding = self.alone.fresh, self.alone.adding
        held = self._held(fresh, self.name)
        has_head = fresh.has(f"post/{head}")  # an auxiliary head is no unit: it counts as one piece, both ways
        gradients = (0.0, float(sum(head_sizes)) if has_head else 0.0)
        turn, end = f"post/{head if has_head else self.name}", f"grad/{self.name}"
        return {
            "alone_held": held,
            "alone_forward": envelope(fresh.moments(_first(fresh), f"post/{self.name}")),
            "alone_backward": _above(fresh.moments(end, "done"), gradients),
            "alone_adding": envelope(adding.moments(end, "done")),
            "head_forward": _above(fresh.moments(f"post/{self.name}", turn), held) if has_head else (),
            "head_backward": _above(fresh.moments(turn, end), held),
            "head_adding": _above(adding.moments(turn, end), held),
        }

    def _held(self, pair: TracePair, name: str) -> Line:
        return minus(pair.live(f"post/{name}"), (float(self.runner.out_bytes[name]), 0.0))

    def _sizes(self, number: int) -> list[int]:
        parameters = dict(self.runner.model.named_parameters())
        unit_parameters = (parameters[name] for name in self.runner.model.units[number].parameters)
        return [param.nbytes for param in unit_parameters if param.requires_grad]


def _first(pair: TracePair) -> str:
    """Where a group begins: the first block is trained with the stem."""
    return next(mark for mark in pair.small.marks if mark.startswith("pre/"))


def _above(lines: Sequence[Line], floor: Line) -> Lines:
    return envelope(minus(line, floor) for line in lines)
