"""`edge-client prove`: random models, batches, methods and budgets, each planned, tried, trained and measured here.

It proves on this machine, with its processor and its libraries, what fedfit promises: training never takes more than
was predicted, and never more than the budget. What does not fit its budget is counted beside.
Covers: how many cases, table, JSON, exit code. Does not cover: one case (`prove_case`), drawing them
(`measuring.proof_cases`), the picture (`prove_plot`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edge_client import durable
from edge_client.cli.prove_case import Outcome, Prover
from edge_client.config.quantities import format_bytes
from edge_client.config.shape_text import typed_shape
from edge_client.config.task_files import split_place
from edge_client.errors import FedfitError, InputError
from edge_client.measuring import proof_cases, proof_models
from edge_client.measuring.rehearsed import processor
from edge_client.records import to_map
from edge_client.task.task import read_source

__all__ = ["BrokenPromiseError", "Proof", "check", "describe", "run", "to_json", "write"]

Json = dict[str, Any]

_SMALL_BYTES = 16 * 10**6  # below it an excess is told in bytes: a megabyte of slack is a large share of little
_ROW = "{:<34} {:>5} {:>6} {:>9} {:>9} {:>7}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The results of all cases."""

    seed: int
    outcomes: tuple[Outcome, ...]
    seconds: float

    @property
    def measured(self) -> list[Outcome]:
        """The cases that trained to the end."""
        return [outcome for outcome in self.outcomes if outcome.measured_bytes]

    @property
    def above(self) -> list[Outcome]:
        """The cases that break the promise."""
        return [outcome for outcome in self.outcomes if outcome.is_above]


def run(options: argparse.Namespace) -> Proof:
    """Carry out the cases that the options ask for; raises `InputError`, `MachineError`."""
    if options.count < 1:
        raise InputError(f"--count: expected at least 1, got {options.count}")
    task, shape = _task(options)
    architectures = (task,) if task is not None else _architectures()
    began = time.monotonic()
    until = began + 60 * options.minutes if options.minutes is not None else None
    outcomes: list[Outcome] = []
    previous = os.environ.get("FEDFIT_CACHE_DIR")
    with tempfile.TemporaryDirectory(prefix="fedfit-prove-") as name:
        os.environ["FEDFIT_CACHE_DIR"] = str(Path(name) / "cache")  # nothing was measured before, and nothing is kept
        prover = Prover(Path(name), task=task, input_shape=shape)
        try:
            cases = proof_cases.cases(options.seed, options.count, architectures)
            while len(outcomes) < options.count and (until is None or time.monotonic() < until):
                outcomes.append(prover.carry_out(next(cases)))
                _show(len(outcomes), options.count, outcomes[-1])
                if options.out is not None:
                    _write_json(Proof(seed=options.seed, outcomes=tuple(outcomes), seconds=0), options.out)
        finally:
            prover.close()
            os.environ.pop("FEDFIT_CACHE_DIR")
            if previous is not None:
                os.environ["FEDFIT_CACHE_DIR"] = previous
    return Proof(seed=options.seed, outcomes=tuple(outcomes), seconds=time.monotonic() - began)


def _task(options: argparse.Namespace) -> tuple[str | None, tuple[int, ...] | None]:
    """A user's own model, and the shape of its samples."""
    if options.task is None:
        return None, None
    path, name = split_place(options.task)
    task = read_source(path, name).load()
    shape = typed_shape(options.input) or (tuple(task.input) if task.input is not None else None)
    if shape is None:
        raise InputError("--input: the task does not tell the shape of a sample; type it, such as --input 3x96x96")
    return f"{path.resolve()}:{name}", shape


def _architectures() -> tuple[str, ...]:
    return (*proof_cases.ZOO, *proof_models.ARCHITECTURES, *proof_models.installed())


def _show(number: int, count: int, outcome: Outcome) -> None:
    """A line for each case that is above, and on a terminal one that is overwritten."""
    case, numbers = outcome.case, _numbers(outcome)
    text = f"[{number}/{count}] {case}: {outcome.plan or outcome.detail[:60]}{numbers}: {outcome.result}"
    if outcome.is_above:
        print(f"{text} {outcome.detail[:300]}", file=sys.stderr)
    elif sys.stderr.isatty():
        sys.stderr.write("\r" + text[:118].ljust(118))
        sys.stderr.flush()


def _numbers(outcome: Outcome) -> str:
    if not outcome.measured_bytes:
        return ""
    shown = (format_bytes(n) for n in (outcome.measured_bytes, outcome.predicted_bytes, outcome.budget_bytes))
    return ", measured {}, predicted {}, budget {}".format(*shown)


def to_json(proof: Proof) -> Json:
    """The results as `--format json` prints them and `prove.json` stores them."""
    return {
        "seed": proof.seed,
        "seconds": round(proof.seconds, 1),
        "machine": {"processor": processor().partition(";")[0], "machine": platform.machine()},
        "torch": str(torch.__version__),
        "summary": _summary(proof),
        "cases": [to_map(outcome) for outcome in proof.outcomes],
    }


def _summary(proof: Proof) -> Json:
    measured = [one for one in proof.measured if not one.spare_bytes]  # spare memory is a bound, not a prediction
    large = [_excess(one) for one in measured if one.measured_bytes >= _SMALL_BYTES]
    small = [one.predicted_bytes - one.measured_bytes for one in measured if one.measured_bytes < _SMALL_BYTES]
    searched = [one.searched_bytes / one.measured_bytes - 1 for one in measured if one.measured_bytes >= _SMALL_BYTES]
    return {
        "cases": len(proof.outcomes),
        "architectures": len({outcome.case.architecture for outcome in proof.outcomes}),
        "measured": len(proof.measured),
        "with_spare_memory": len(proof.measured) - len(measured),
        "did_not_fit": sum(outcome.result == "did not fit" for outcome in proof.outcomes),
        "above_the_prediction": sum(outcome.result == "above the prediction" for outcome in proof.outcomes),
        "above_the_budget": sum(outcome.result == "above the budget" for outcome in proof.outcomes),
        "failed": sum(outcome.result == "failed" for outcome in proof.outcomes),
        "excess": _figures(large),
        "excess_bytes_below_16_mb": _figures(small),
        "excess_of_search": _figures(searched),
    }


def _excess(outcome: Outcome) -> float:
    return outcome.predicted_bytes / outcome.measured_bytes - 1


def _figures(values: Sequence[float]) -> Json:
    """Mean, 90th percentile and the largest; nothing of nothing."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "mean": round(statistics.mean(ordered), 4),
        "p90": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 4),
        "most": round(ordered[-1], 4),
    }


def describe(proof: Proof) -> str:
    """The results as a table: a line per architecture, then all together."""
    lines = [_ROW.format("model", "cases", "above", "closest", "excess", "no plan")]
    names = sorted({outcome.case.architecture for outcome in proof.outcomes})
    lines += [_line(name, [one for one in proof.outcomes if one.case.architecture == name]) for name in names]
    lines.append(_line("all", proof.outcomes))
    return "\n".join([*lines, *_ending(proof)])


def _line(name: str, outcomes: Iterable[Outcome]) -> str:
    group = list(outcomes)
    measured = [one for one in group if one.measured_bytes]
    closest = max((one.measured_bytes / max(1, one.predicted_bytes) for one in measured), default=None)
    excess = statistics.mean(_excess(one) for one in measured) if measured else None
    above, no_plan = sum(one.is_above for one in group), sum(one.result == "did not fit" for one in group)
    shown = Path(name).name if "/" in name else name
    return _ROW.format(
        shown[:34],
        len(group),
        above,
        f"{100 * closest:.1f} %" if closest is not None else "-",
        f"{100 * excess:.1f} %" if excess is not None else "-",
        no_plan,
    )


def _ending(proof: Proof) -> Iterator[str]:
    yield "closest: the largest share of its prediction that a case took; excess: how far predictions are above, mean"
    summary = _summary(proof)
    large, small = summary["excess"], summary["excess_bytes_below_16_mb"]
    if large["count"]:
        yield f"16 MB and more: mean excess {100 * large['mean']:.1f} %, nine in ten below {100 * large['p90']:.1f} %"
    if small["count"]:
        mean, most = (format_bytes(int(small[name])) for name in ("mean", "most"))
        yield f"less than 16 MB: mean excess {mean}, at most {most}"
    num_above = len(proof.above)
    yield f"{num_above} of {len(proof.outcomes)} cases were above" if num_above else "no case was above"


def write(proof: Proof, folder: Path) -> list[str]:
    """Write `prove.json` and `prove.png`; returns messages about them. Raises `MachineError`."""
    with durable.disk_errors(f"writing into {folder}"):
        _write_json(proof, folder)
        try:
            from edge_client.cli import prove_plot  # matplotlib
        except ModuleNotFoundError:
            hint = "no picture: matplotlib is missing; pip install 'fedfit[coordinator]'"
            return [f"wrote {folder / 'prove.json'}", hint]
        (folder / "prove.png").write_bytes(prove_plot.draw(proof))
    return [f"wrote {folder / 'prove.json'} and prove.png"]


def _write_json(proof: Proof, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prove.json").write_text(json.dumps(to_json(proof), indent=1) + "\n", encoding="utf-8")


class BrokenPromiseError(FedfitError):
    """A case took more than was predicted, or more than its budget."""


def check(proof: Proof) -> None:
    """Raise `BrokenPromiseError` if any case was above."""
    if proof.above:
        worst = "; ".join(f"{outcome.case}: {outcome.result}" for outcome in proof.above[:3])
        raise BrokenPromiseError(
            f"prove: {len(proof.above)} of {len(proof.outcomes)} cases were above ({worst}); please report prove.json"
        )
