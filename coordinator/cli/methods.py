"""`coordinator methods ...`: which methods there are, and what one exchanges. Needs no running coordinator.

Bytes are those of containers as they travel, from the tables that a run builds for the model. An update's report has
numbers of varying length; it is counted with usual ones, and without test results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.aggregation.task_source import recipe_of
from coordinator.cli.models import parse_settings
from coordinator.cli.options import formatted, listing, show, show_list, terminal_columns
from coordinator.columns import align, fold
from edge_client.config.key_descriptions import describe
from edge_client.config.quantities import format_bytes
from edge_client.config.run_file import MethodSection, ModelSection, RoundsSection, RunFile
from edge_client.config.shape_text import parse_shape
from edge_client.errors import InputError
from edge_client.methods import coverage, registry
from edge_client.methods.slices import WHOLE_MODEL
from edge_client.models import registry as models
from edge_client.models.slicing import parse
from edge_client.records import Report, TrainingPlan, to_map
from edge_client.wire.container import (
    EXTRA_PREFIX,
    FLOAT_CODECS,
    MODEL_PREFIX,
    TableRow,
    build_header,
    codec_rule,
    payload_kind,
    tensor_bytes,
)

if TYPE_CHECKING:
    from edge_client.knowledge.kinds import Knowledge
    from edge_client.methods.base import Method, Traffic
    from edge_client.models.contract import Model

__all__ = ["SliceTraffic", "describe_method", "list_options", "run_bytes", "show_options"]

Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SliceTraffic:
    """Bytes of a round to and from a device that trains one slice."""

    slice: str
    bytes_up: int
    bytes_down: int
    bytes_once: int  # down, before its first round


def list_options(parser: argparse.ArgumentParser) -> None:
    """`methods list`."""
    listing(parser)
    parser.set_defaults(do=_list)


def show_options(shown: argparse.ArgumentParser) -> None:
    """`methods show`."""
    formatted(shown).set_defaults(do=_show)
    shown.add_argument("name", metavar="NAME", help="coordinator methods list has them all")
    shown.add_argument("--model", metavar="NAME", help="default: a small one that the method can train")
    shown.add_argument("--input", metavar="SHAPE", help="of one sample, such as 3x224x224 (default: the model's usual)")
    shown.add_argument("--slices", metavar="LIST", help="of the model, the largest first (default: the method's own)")
    shown.add_argument("--classes", type=int, default=10, metavar="N", help="default: %(default)s")
    shown.add_argument("--codec", choices=FLOAT_CODECS, default="fp32", help="default: %(default)s")
    shown.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a parameter of the method; repeatable"
    )


def _list(options: argparse.Namespace) -> None:
    rows = [{"name": name} for name in registry.names()]
    if not options.quiet:
        rows = [{"name": row["name"], **_about(row["name"], {})} for row in rows]
    show_list(options, rows, _list_table, name=lambda row: str(row["name"]))


def _about(name: str, parameters: Mapping[str, Any]) -> Json:
    return {"paper": registry.paper(name), "exchanges": to_map(registry.exchange(name, parameters))}


def _list_table(rows: Sequence[Json]) -> str:
    cells = [[row["name"], row["exchanges"]["down"], row["exchanges"]["up"], row["paper"]] for row in rows]
    texts = {1: 1, 2: 1, 3: 1}
    return fold(["method", "down", "up", "paper"], cells, columns=terminal_columns(), texts=texts)


def _show(options: argparse.Namespace) -> None:
    model = options.model or registry.usual_model(options.name)
    data = describe_method(
        options.name,
        parse_settings(options.set),
        model=model,
        input_shape=parse_shape(options.input) if options.input else models.default_input(model),
        num_classes=options.classes,
        codec=options.codec,
        slices=options.slices.split(",") if options.slices else (),
    )
    show(options, data, _table)


def describe_method(
    name: str,
    parameters: Mapping[str, Any],
    *,
    model: str,
    input_shape: Sequence[int],
    num_classes: int,
    codec: str,
    slices: Sequence[str] = (),
) -> Json:
    """What a method is, and its bytes with these slices of the model; raises `InputError` and `NoSuchNameError`."""
    if num_classes < 2:
        raise InputError(f"--classes: expected 2 or more, got {num_classes}")
    file = RunFile(
        name="shown",
        method=MethodSection(name=name, parameters=parameters),
        model=ModelSection(name=model, input=tuple(input_shape)),
        classes=tuple(str(number) for number in range(num_classes)),
        slices=tuple(slices),
        rounds=RoundsSection(codec=codec),
    )
    sizes = list(run_bytes(file, None).values())
    return {
        "name": name,
        **_about(name, parameters),
        "parameters": [row for cls in registry.parameter_types(name) for row in _parameters(cls)],
        "model": {"name": model, "input": list(input_shape), "classes": num_classes, "codec": codec},
        "bytes_up": sizes[0].bytes_up,
        "bytes_down": sizes[0].bytes_down,
        "bytes_once": sizes[0].bytes_once,
        "slices": [to_map(size) for size in sizes] if len(sizes) > 1 else [],
    }


def run_bytes(file: RunFile, task: str | None) -> dict[str, SliceTraffic]:
    """What travels in a round of a run to and from a device with each slice. Loads torch.

    `task`: where the file of the run's task lies. Empty if it does not say what shape its samples
    have: then only devices can make its model.
    """
    recipe = recipe_of(file, task)
    if recipe.input_shape is None:
        return {}
    method, whole = registry.of_run(file), recipe.build(recipe.input_shape)
    method.check(whole)
    traffic = {}
    for architecture in registry.architectures(file):
        # features of a slice may be narrower, and only an architecture knows where it can end
        architecture_model = (
            recipe.build(recipe.input_shape, parse(architecture)) if architecture != WHOLE_MODEL else whole
        )
        model, slice_name = (architecture_model, WHOLE_MODEL) if parse(architecture).model else (whole, architecture)
        traffic[architecture] = _bytes(
            architecture, method, model, slice_name, file.rounds.codec, method.knowledge.traffic(architecture_model)
        )
    return traffic


def _bytes(
    architecture: str, method: Method, model: Model, slice_name: str, codec: str, known: Traffic
) -> SliceTraffic:
    """What travels to and from a device that trains `architecture`, which is the slice `slice_name` of `model`."""
    meta = coverage.model_meta(
        method.plans,
        stem=model.order[0],
        never_returned=method.travel.never_returned(model),
        notes=method.travel.notes(model),
    )
    table = _rows(method, model, slice_name, codec)
    lacking = coverage.missing_tensors([name for name, _, _ in table], None, method.plans, meta)
    weights, changes = _num_bytes(meta, table), len(lacking) < len(table)  # what nobody changes is not sent again
    down, once = (_num_bytes({}, _knowledge(items, codec)) if items else 0 for items in (known.down, known.once))
    up = [*(row for row in table if row[0] not in lacking), *_knowledge(known.up, codec)]
    return SliceTraffic(
        slice=architecture,
        bytes_up=_num_bytes(_report(codec), up),
        bytes_down=down + (weights if changes else 0),
        bytes_once=once + (0 if changes else weights),
    )


def _parameters(cls: type) -> list[Json]:
    defined = {field.name: field for field in dataclasses.fields(cls)}
    rows = []
    for row in describe(cls):
        field = defined[row.key.replace("-", "_")]
        symbol, limits = field.metadata["symbol"], row.range.replace("`", "")
        rows.append({"name": row.key, "symbol": symbol, "default": field.default, "range": limits, "help": row.help})
    return rows


def _rows(method: Method, model: Model, slice_name: str, codec: str) -> list[TableRow]:
    """The table of a slice of the model as it travels to a device."""
    tensors = {MODEL_PREFIX + name: value for name, value in model.state_dict().items()}
    tensors |= {EXTRA_PREFIX + name: value for name, value in method.travel.extra_tensors(model).items()}
    return [
        (
            name,
            codec_rule(value.ndim, codec, integer=not value.is_floating_point()),
            tuple(value.shape) if place.where is None else tuple(len(indices) for indices in place.where),
        )
        for name, place in method.slices.places(model, slice_name, list(tensors)).items()
        for value in (tensors[place.name],)
    ]


def _knowledge(items: Sequence[Knowledge], codec: str) -> list[TableRow]:
    from edge_client.knowledge.kinds import named_tensors

    return [
        (name, codec_rule(value.ndim, codec, integer=not value.is_floating_point()), tuple(value.shape))
        for name, value in named_tensors(items)
    ]


def _report(codec: str) -> Json:
    """What a device says beside its tensors, with numbers of the usual size."""
    import torch

    versions = {"python": "{}.{}.{}".format(*sys.version_info[:3]), "torch": str(torch.__version__)}
    budget = 2 * 10**9
    plan = TrainingPlan(
        microbatch=32,
        budget_bytes=budget,
        predicted_bytes=budget // 2,
        training_bytes=budget // 4,
        private_budget_bytes=budget,
        private_predicted_bytes=budget // 2,
    )
    report = Report(
        num_samples=1000,
        num_held=1000,
        steps=32,
        payload=payload_kind(codec),
        plan=plan,
        peak_bytes=budget // 2,
        base_bytes=budget // 4,
        scalars={"loss": 0.5, "replans": 0.0},
        versions=versions,
    )
    described: dict[str, Any] = to_map(report)
    return described


def _num_bytes(meta: Mapping[str, Any], table: Sequence[TableRow]) -> int:
    return len(build_header(meta, table)) + sum(tensor_bytes(codec, shape) for _, codec, shape in table)


def _table(data: Json) -> str:
    """`coordinator methods show`."""
    exchanges, model = data["exchanges"], data["model"]
    facts = [
        ["paper", data["paper"]],
        ["down", exchanges["down"]],
        ["up", exchanges["up"]],
        ["on a device", exchanges["device"] or "nothing"],
    ]
    columns = terminal_columns()
    lines = [data["name"], *(_fact(name, text, columns) for name, text in facts), ""]
    if data["parameters"]:
        rows = [[p["name"], p["symbol"], json.dumps(p["default"]), p["range"], p["help"]] for p in data["parameters"]]
        heads = ["parameter", "in the paper", "default", "range", ""]
        lines += [fold(heads, rows, columns=columns, texts={1: 1, 3: 1, 4: 2}), ""]
    what = f"{model['name']}, input {'x'.join(map(str, model['input']))}, {model['classes']} classes, {model['codec']}"
    if data["slices"]:
        return "\n".join([*lines, "per round and device:", _slices(data["slices"]), f"({what})"])
    once = f"; once {format_bytes(data['bytes_once'])} down" if data["bytes_once"] else ""
    traffic = (
        f"per round and device: {format_bytes(data['bytes_down'])} down, {format_bytes(data['bytes_up'])} up{once}"
    )
    return "\n".join([*lines, traffic, f"({what})"])


def _fact(name: str, text: str, columns: int | None) -> str:
    head = f"  {name:<12} "
    return textwrap.fill(head + text, columns, subsequent_indent=" " * len(head)) if columns else head + text


def _slices(rows: Sequence[Json]) -> str:
    """The bytes of each slice; those that travel once where there are any."""
    ways = {"down": "bytes_down", "up": "bytes_up"}
    if any(row["bytes_once"] for row in rows):
        ways["once, down"] = "bytes_once"
    cells = [[row["slice"], *(format_bytes(row[way]) for way in ways.values())] for row in rows]
    return align(["slice", *ways], cells, right=range(1, 1 + len(ways)))
