"""`coordinator models ...`: which models there are, and what one is made of. Needs no running coordinator.

Building a model loads torch, in `show` alone; nothing of it is left in the coordinator, which is another process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator import columns
from coordinator.cli.options import formatted, listing, show, show_list
from edge_client import durable
from edge_client.config.quantities import format_bytes
from edge_client.config.run_file import RunFile
from edge_client.config.shape_text import parse_shape
from edge_client.config.tables import parse_table
from edge_client.errors import InputError
from edge_client.measuring.calibration import calibrated, job_for
from edge_client.methods import registry as methods
from edge_client.models import registry
from edge_client.planning.cost import Shape, Workload, training_bytes

__all__ = ["describe_model", "list_options", "parse_settings", "show_options"]

Json = dict[str, Any]


def list_options(parser: argparse.ArgumentParser) -> None:
    """`models list`."""
    listing(parser)
    parser.set_defaults(do=_list)


def show_options(shown: argparse.ArgumentParser) -> None:
    """`models show`."""
    formatted(shown).set_defaults(do=_show)
    shown.add_argument("name", metavar="NAME", help="coordinator models list has them all")
    shown.add_argument("--input", metavar="SHAPE", help="of one sample, such as 3x224x224 (default: the model's usual)")
    shown.add_argument("--classes", type=int, default=10, metavar="N", help="default: %(default)s")
    shown.add_argument("--batch", type=int, default=32, metavar="N", help="samples per step (default: %(default)s)")
    shown.add_argument(
        "--slice",
        default="full",
        metavar="SLICE",
        help="depth:1.1.2.2, layers:8, width:1/4, depth:1.1.2.2-width:1/2, or a smaller model of the family",
    )
    shown.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the model; repeatable"
    )
    shown.add_argument(
        "--measure", action="store_true", help="measure what the units need on this machine (some seconds, then kept)"
    )


def _list(options: argparse.Namespace) -> None:
    show_list(options, registry.names(), _list_table, name=str)


def _list_table(names: Sequence[str]) -> str:
    rows = [[name, _shape(registry.default_input(name)), _options_of(name)] for name in names]
    return columns.align(["model", "usual input", "options"], rows)


def _options_of(name: str) -> str:
    fields = dataclasses.fields(registry.options_type(name))
    return " ".join(f"{field.name.replace('_', '-')}={json.dumps(field.default)}" for field in fields)


def _show(options: argparse.Namespace) -> None:
    data = describe_model(
        options.name,
        input_shape=parse_shape(options.input) if options.input else registry.default_input(options.name),
        num_classes=options.classes,
        batch=options.batch,
        slice_name=options.slice,
        options=parse_settings(options.set),
    )
    show(options, measured(data, parse_settings(options.set)) if options.measure else data, _table)


def measured(data: Json, options: Mapping[str, Any]) -> Json:
    """The same with what training takes, predicted from a measurement: each block alone, and everything at once.

    Beside the block its group trains the head, and the first one the stem, as FeDepth does. With plain SGD.
    """
    model = {"name": data["name"], "input": data["input"], **options}
    classes = [str(number) for number in range(data["classes"])]
    table = {"name": "show", "model": model, "classes": classes, "method": {"name": "fedepth"}}
    run = parse_table(RunFile, table, source="--set")
    rules = methods.plan_rules(run.method.name, run.method.parameters)
    rows = calibrated(job_for(run, rules, data["input"], slice_name=data["slice"]), durable.cache_dir())
    workload = Workload(batch=data["batch"])

    def needed(groups: tuple[tuple[str, ...], ...]) -> int:
        return training_bytes(rows, workload, Shape(microbatch=data["batch"], groups=groups))

    units = [
        unit | {"training_bytes": needed(((unit["name"],),)) if unit["kind"] == "block" else None}
        for unit in data["units"]
    ]
    return {**data, "units": units, "training_bytes": needed(()), "base_bytes": rows.worker_bytes}


def parse_settings(words: Sequence[str]) -> Json:
    """`width=8`, `small-stem=true`, `hidden=[64,64]`, `shortcut=pad`: a value is JSON, or else text."""
    settings: Json = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise InputError(f"--set {word!r}: expected KEY=VALUE, such as base-width=16")
        try:
            settings[key] = json.loads(value)
        except ValueError:
            settings[key] = value
    return settings


def describe_model(
    name: str, *, input_shape: Sequence[int], num_classes: int, batch: int, slice_name: str, options: Mapping[str, Any]
) -> Json:
    """What a model is made of; raises `InputError` and `NoSuchNameError`."""
    from edge_client.planning import paper_cost  # loads torch

    if batch < 1:
        raise InputError(f"--batch: expected 1 or more, got {batch}")
    spec = registry.parse_slice(name, slice_name)
    model = registry.build(name, input_shape=input_shape, num_classes=num_classes, options=options, spec=spec)
    sizes = {parameter: tensor.numel() for parameter, tensor in model.named_parameters()}
    return {
        "name": name,
        "slice": str(spec),
        "input": list(model.input_shape),
        "classes": num_classes,
        "batch": batch,
        "parameters": sum(sizes.values()),
        "units": [
            {
                "name": unit.name,
                "kind": unit.kind,
                "stage": unit.stage,
                "index": unit.index,
                "in_shape": list(unit.in_shape),
                "out_shape": list(unit.out_shape),
                "parameters": sum(sizes[parameter] for parameter in unit.parameters),
                "num_activations": unit.num_activations,
                "min_batch": unit.min_batch,
                "table_1_rule_bytes": paper_cost.unit_cost(model, unit, batch=batch),
            }
            for unit in model.units
        ],
        "taps": dict(model.taps),
    }


def _table(data: Json) -> str:
    """`coordinator models show`."""
    is_measured = "training_bytes" in data
    part = "" if data["slice"] == "full" else f", slice {data['slice']}"
    sizes = f"input {_shape(data['input'])}, {data['classes']} classes"
    rows = [
        [
            unit["name"],
            unit["kind"],
            unit["stage"],
            _shape(unit["in_shape"]),
            _shape(unit["out_shape"]),
            f"{unit['parameters']:,}",
            format_bytes(unit["table_1_rule_bytes"]),
            *([format_bytes(unit["training_bytes"]) if unit["training_bytes"] else ""] if is_measured else []),
        ]
        for unit in data["units"]
    ]
    titles = ["unit", "kind", "stage", "in", "out", "parameters", "table-1 rule", *(["alone"] if is_measured else [])]
    lines = [
        f"{data['name']}{part}: {data['parameters']:,} parameters, {sizes}",
        "",
        columns.align(titles, rows, right=(2, 5, 6, 7)),
        "",
        f"table-1 rule: bytes that FeDepth's rule charges for training the unit alone, batch {data['batch']}",
    ]
    if is_measured:
        lines.append(
            f"alone: what training the block and the head takes beside the {format_bytes(data['base_bytes'])} of a "
            f"worker, predicted from a measurement; all blocks at once: {format_bytes(data['training_bytes'])}"
        )
    else:
        lines.append("what training takes on this machine: --measure")
    return "\n".join(lines)


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
