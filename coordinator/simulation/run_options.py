"""The runs of a simulation, from a run file, from flags, or from both: a flag stands for a key of the file.

    --method NAME[,NAME]    method.name          --data TEXT               simulate.data
    --model NAME            model.name           --partition TEXT          simulate.partition
    --rounds N              stop.rounds          --devices N               simulate.devices
    --participation SHARE   devices.fraction     --training-budgets LIST   simulate.training-budgets
    --seed N[,N]            seed                 --slices LIST             slices
    --accelerator NAME      simulate.accelerator
    --set a.b=VALUE         any key; a bare NAME means method.NAME, but for slices and sharing

Without a file, the model is small-cnn, the data are the digits, and the training settings are those that
`coordinator new` writes (`edge_client.config.recommended`); every other key has its default.

Covers: the resolved run file of each combination of methods and seeds, and what it means for virtual devices.
Does not cover: opening the data (`coordinator.simulation.data`), the folder of a run
(`coordinator.results.run_directory`).
"""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.results.training_budgets import budgets_of
from coordinator.run_check import check_run
from edge_client.config.recommended import TRAINING
from edge_client.config.run_file import RunFile, SimulateSection, refuse_user_method
from edge_client.config.tables import parse_table, read_toml
from edge_client.data import registry as data
from edge_client.errors import FedfitError, InputError
from edge_client.methods import registry as methods

__all__ = [
    "Combination",
    "Flags",
    "Missing",
    "check_simulation",
    "combinations",
    "complete",
    "put",
    "raw_table",
    "settings_of",
]

Table = dict[str, Any]

_SOURCE = "simulate"  # in messages about what was typed
_RUN_KEYS = ("slices", "sharing")  # bare names that no method has
_WITHOUT_FILE: Table = {
    "model": {"name": "small-cnn"},
    "train": dict(TRAINING),
    "simulate": {"data": "digits"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags as they were typed; None for those that were not."""

    file: Path | None = None
    name: str | None = None
    method: str | None = None
    model: str | None = None
    seed: str | None = None
    rounds: int | None = None
    participation: float | None = None
    data: str | None = None
    partition: str | None = None
    devices: int | None = None
    training_budgets: str | None = None
    accelerator: str | None = None
    slices: str | None = None
    set: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One run of a grid: its table, before the data completes it."""

    method: str
    seed: int
    table: Table
    source: str
    one_of_several: bool = False  # methods


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The shape and the classes of the data, for run files that do not name them."""

    shape: tuple[int, ...] | None
    classes: tuple[str, ...]


def combinations(flags: Flags) -> list[Combination]:
    """One run per method and seed, in the order in which they were typed; raises `InputError`."""
    table = raw_table(flags)
    source = str(flags.file) if flags.file is not None else _SOURCE
    if flags.method is None:
        refuse_user_method(table, source)
    method = table.get("method", {"name": "fedavg"})
    names = _listed(flags.method, "--method") if flags.method is not None else [str(method.get("name", "fedavg"))]
    seeds = [table.get("seed", 1)]
    if flags.seed is not None:
        seeds = [_whole(text) for text in _listed(flags.seed, "--seed")]
    settings = {key: value for key, value in settings_of(flags.set) if key not in _RUN_KEYS}
    _check_parameters(names, settings)
    combined = []
    for name, seed in itertools.product(names, seeds):
        run_table = copy.deepcopy(table)
        parameters = method if method.get("name", "fedavg") == name else {}
        run_table |= {"method": {**parameters, "name": name, **_parameters(name, settings, names)}, "seed": seed}
        several = len(names) > 1
        combined.append(Combination(method=name, seed=seed, table=run_table, source=source, one_of_several=several))
    return combined


def raw_table(flags: Flags) -> Table:
    """The run file with the flags in it, but for methods and seeds."""
    table: Table = read_toml(flags.file) if flags.file is not None else copy.deepcopy(_WITHOUT_FILE)
    for key in ("method", "model", "task"):
        if isinstance(table.get(key), str):
            table[key] = {"name": table[key]}
    if flags.model is not None:
        before = table.get("model", {})
        same = before.get("name") == flags.model
        table["model"] = {**(before if same else _shared_keys(before)), "name": flags.model}
    budgets = _listed(flags.training_budgets, "--training-budgets") if flags.training_budgets is not None else None
    typed = {
        "name": flags.name,
        "stop.rounds": flags.rounds,
        "devices.fraction": flags.participation,
        "simulate.data": flags.data,
        "simulate.partition": flags.partition,
        "simulate.devices": flags.devices,
        "simulate.training-budgets": budgets,
        "simulate.accelerator": flags.accelerator,
        "slices": _listed(flags.slices, "--slices") if flags.slices is not None else None,
    }
    for key, value in typed.items():
        if value is not None:
            put(table, key.split("."), value)
    for key, value in settings_of(flags.set):
        if "." in key or key in _RUN_KEYS:
            put(table, key.split("."), value)
    return table


def _shared_keys(model: Table) -> Table:
    """What another model needs as well."""
    return {key: model[key] for key in ("input", "init") if key in model}


def settings_of(typed: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Keys and values of what was typed after `--set`; raises `InputError`."""
    for text in typed:
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", key.strip()):
            raise InputError(f"--set: expected KEY=VALUE such as train.lr=0.1 or mu=0.01, got {text[:80]!r}")
        yield key.strip(), _toml(value.strip())


def _toml(text: str) -> Any:
    """A value as the run file has it; what is no TOML is text, so that nobody needs two kinds of quotes."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def put(table: Table, path: Sequence[str], value: Any) -> None:
    """Set a key in its table, whichever way its dashes are written there."""
    for name in path[:-1]:
        inner = table.setdefault(_as_written(table, name), {})
        if not isinstance(inner, dict):
            raise InputError(f"{'.'.join(path)}: expected a table {name!r}, got {inner!r}")
        table = inner
    table[_as_written(table, path[-1])] = value


def _as_written(table: Table, name: str) -> str:
    return next((key for key in table if key.replace("-", "_") == name.replace("-", "_")), name)


def _listed(text: str, flag: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    may_repeat = flag == "--training-budgets"
    if not all(parts) or (len(set(parts)) != len(parts) and not may_repeat):
        raise InputError(f"{flag}: expected different values with commas between them, got {text!r}")
    return parts


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"--seed: expected whole numbers such as 1,2,3, got {text!r}")
    return int(text)


def _parameters(method: str, settings: Mapping[str, Any], names: Sequence[str]) -> Table:
    """Bare names of --set that belong to this method; of several methods not all have the same."""
    bare = {key: value for key, value in settings.items() if "." not in key}
    if len(names) == 1:
        return bare
    return {key: value for key, value in bare.items() if _problem(method, key, value) is None}


def _check_parameters(names: Sequence[str], settings: Mapping[str, Any]) -> None:
    """With several methods, a parameter must be known to one of them at least."""
    for key, value in settings.items():
        problems = [_problem(name, key, value) for name in names]
        if "." not in key and len(names) > 1 and None not in problems:
            raise InputError(f"--set {key}: none of the methods takes it; {problems[0]}")


def _problem(method: str, key: str, value: Any) -> FedfitError | None:
    try:
        methods.validate(method, {key.replace("-", "_"): value})
    except FedfitError as error:
        return error
    return None


def complete(combination: Combination, missing: Missing | None) -> RunFile:
    """The resolved run file, completed by what the data knows (`missing`); raises `InputError`."""
    table = copy.deepcopy(combination.table)
    model = table.get("model")
    if missing is not None:
        table.setdefault("classes", list(missing.classes))
        if isinstance(model, dict) and missing.shape is not None:
            model.setdefault("input", list(missing.shape))
    simulate = table.setdefault("simulate", {})
    if isinstance(simulate, dict):
        _count_devices(simulate)
    _hold_out_shared_samples(table)
    table.setdefault("name", _name(table, ("model",) if combination.one_of_several else ("method", "model")))
    evaluate = table.setdefault("evaluate", {})
    file = parse_table(RunFile, table, source=combination.source)
    try:
        if "on" not in evaluate:
            file = replace(file, evaluate=replace(file.evaluate, on=_evaluator(file)))
        check_run(file)
        check_simulation(file)
    except FedfitError as error:
        raise InputError(f"{combination.source}: {error}") from None
    return file


def _hold_out_shared_samples(table: Table) -> None:
    """A method that needs shared samples, and names none, gets some of the data, which the devices then lack."""
    method, simulate = table.get("method"), table["simulate"]
    if not isinstance(method, dict) or not isinstance(simulate, dict) or not simulate.get("data"):
        return
    name = str(method.get("name", ""))
    if not method.get("public") and name and _problem(name, "public", "digits") is None:
        method["public"] = f"held-out:{simulate['data']}"


def _evaluator(file: RunFile) -> str:
    """The server evaluates, unless only a task can open its data, or the models stay on the devices."""
    method = file.method
    judged_here = file.task is None and methods.has_global_model(method.name, method.parameters)
    return "simulate" if judged_here else "devices"


def _count_devices(simulate: Table) -> None:
    """`40MB*10, 80MB*6` are sixteen devices, unless the number is set."""
    budgets = simulate.get(_as_written(simulate, "training-budgets"), ())
    counts = [text.partition("*")[2] for text in budgets if isinstance(text, str)]
    if any(counts) and all(count.isdecimal() or not count for count in counts):
        simulate.setdefault("devices", sum(int(count or 1) for count in counts))


def _name(table: Table, sections: Sequence[str]) -> str:
    """Of a run without a file: what people would call it."""
    words = [str(table[key].get("name", "")) for key in sections if isinstance(table.get(key), dict)]
    source = str(table["simulate"].get("data", "")) if isinstance(table["simulate"], dict) else ""
    text = "-".join(filter(None, (*words, source.partition(":")[0])))
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:40] or "simulation"


def check_simulation(file: RunFile) -> None:
    """What no fleet would ever do with this file; raises `InputError` before anything is opened."""
    section = file.simulate or SimulateSection()
    if file.task is None and not section.data:
        raise InputError("simulate.data is missing: what do the devices train on? digits, or SOURCE:PATH (--data)")
    if section.data:
        data.split_source(section.data)
    data.parse_partition(section.partition)
    if file.init.startswith("run:"):
        raise InputError(
            f'init = {file.init!r}: a simulation knows no runs of a coordinator; take init = "random", or file:PATH'
        )
    if file.devices.min > section.devices:
        raise InputError(
            f"devices.min = {file.devices.min}, and there are {section.devices} devices: no round would ever begin; "
            "set simulate.devices (--devices) to at least as many"
        )
    budgets_of(section)
