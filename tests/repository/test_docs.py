"""The pages that describe formats say what the code says."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks import method_bytes
from coordinator.run_check import check_run
from edge_client import errors, records
from edge_client.client.identity import Bundle
from edge_client.config.device_file import DeviceFile
from edge_client.config.key_descriptions import describe
from edge_client.config.quantities import parse_bytes, parse_duration
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.data import registry as data
from edge_client.methods import registry as methods
from edge_client.methods.cards.fedepth import FeDepthParameters
from edge_client.models import registry as models
from edge_client.wire import messages
from edge_client.wire.topics import Topics

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).parents[2] / "docs"
WIRE = (DOCS / "reference/wire.md").read_text(encoding="utf-8")


def table_of(cls: type) -> str:
    """A file's keys as a table of docs/reference/files.md."""
    head = ["| key | type | default | range | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(f"| `{key}` | {' | '.join(rest)} |" for key, *rest in describe(cls))])


def field_names(cls: type) -> str:
    return ", ".join(f"`{f.name}`" for f in dataclasses.fields(cls))


@pytest.mark.parametrize("cls", [RunFile, DeviceFile])
def test_files_page_has_the_generated_table(cls: type) -> None:
    """Whoever changes a key pastes the new table: it is in the failure's message."""
    page = (DOCS / "reference/files.md").read_text(encoding="utf-8")
    assert table_of(cls) in page, f"put this table into docs/reference/files.md:\n{table_of(cls)}"


def test_a_described_key_has_type_default_range_and_help() -> None:
    """By hand from the fields: a number, a choice, a required text, a size without a unit in the code."""
    rows = {row.key: row for row in (*describe(RunFile), *describe(DeviceFile))}
    assert rows["train.lr"] == ("train.lr", "number", "`0.05`", "0 to 1000", "learning rate")
    assert rows["train.optimizer"][1:4] == ("text", '`"sgd"`', "`sgd` or `adam`")
    assert rows["name"][1:4] == ("text", "required", "`[A-Za-z0-9_-]{1,64}`")
    assert rows["stop.metric"][3] == "`accuracy` or `balanced-accuracy` or `macro-f1` or `loss`"
    assert rows["train.schedule"][3] == ""  # a pattern that nobody reads; the help tells
    assert rows["limits.disk"][1:4] == ("size", "`4.0 GB`", "0 or more")
    assert rows["method.*"][1] == "any"


def test_defaults_that_are_shown_can_be_written() -> None:
    """Sizes and durations of the table are in the form that the parser takes: 4 GB and 30 min."""
    rows = {row.key: row for row in (*describe(RunFile), *describe(DeviceFile))}
    assert parse_bytes(rows["limits.disk"].default.strip("`")) == 4 * 10**9
    assert parse_duration(rows["rounds.deadline"].default.strip("`")) == 1800.0


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", DOCS / "reference/files.md"], ids=lambda page: page.name)
def test_files_that_are_shown_are_accepted(page: Path) -> None:
    """One run file and one device file each, through the same checks as the commands."""
    blocks = re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    run, device = (tomllib.loads(block) for block in blocks)
    check_run(parse_table(RunFile, run, source=page.name))
    section = parse_table(DeviceFile, device, source=page.name).data
    assert section is not None
    data.validate(section)


def options_table() -> str:
    """The models' own options as the table of docs/reference/models.md; models with the same options share rows."""
    sharing: dict[type, list[str]] = {}
    for name in models.names():
        sharing.setdefault(models.options_type(name), []).append(f"`{name}`")
    return "\n".join(
        f"| {', '.join(names)} | `{row.key}` | {row.default} | {row.help} |"
        for cls, names in sharing.items()
        for row in describe(cls)
    )


def test_models_page_has_every_model_with_its_parameters_and_options() -> None:
    """One row each, with the count at the input that the row names; whoever changes an option pastes the new table."""
    page = (DOCS / "reference/models.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \|.*\| ([0-9,]+) \| [0-9x]+ \|$", page, re.MULTILINE))
    with torch.device("meta"):
        built = {name: models._layers(name, models.default_input(name), 10, {}) for name in models.names()}
    assert rows == {name: f"{sum(p.numel() for p in layers.parameters()):,}" for name, layers in built.items()}
    assert options_table() in page, f"put this table into docs/reference/models.md:\n{options_table()}"


def test_fedepth_page_has_every_parameter_and_a_run_that_is_accepted() -> None:
    """Default, the paper's word and help as the code has them."""
    page = (DOCS / "explanation/fedepth.md").read_text(encoding="utf-8")
    for f in dataclasses.fields(FeDepthParameters):
        name, about = f.name.replace("_", "-"), f.metadata
        row = f"| `{name}` | `{json.dumps(f.default)}` | {about['symbol']} | {about['help']} |"
        assert row in page, f"put this row into docs/explanation/fedepth.md:\n{row}"
    (block,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    check_run(parse_table(RunFile, tomllib.loads(block), source="fedepth.md"))


def methods_tables() -> tuple[str, str, str]:
    """The tables of docs/reference/methods.md: what every method is, and its parameters; and the names of all pairs."""
    made = {name: methods.get(name, {}) for name in methods.names() if "+" not in name}
    pairs = ", ".join(f"`{name}`" for name in methods.names() if "+" in name)
    parameters = {name: [row for cls in methods.parameter_types(name) for row in parameter_rows(cls)] for name in made}
    first = [
        f"| `{name}` | {method.paper} | {method.exchange.down} | {method.exchange.up} | {method.exchange.device} | "
        f"{', '.join(f'`{key}` ({symbol})' for key, symbol, *_ in parameters[name])} |"
        for name, method in made.items()
    ]
    sharing: dict[type, list[str]] = {}
    for name in made:
        sharing.setdefault(methods.parameter_types(name)[0], []).append(f"`{name}`")
    second = [
        f"| {', '.join(names)} | `{key}` | {symbol} | {default} | {limits} | {told} |"
        for cls, names in sharing.items()
        for key, symbol, default, limits, told in parameter_rows(cls)
    ]
    return "\n".join(first), "\n".join(second), f"Pairs: {pairs}."


def parameter_rows(cls: type) -> list[tuple[str, str, str, str, str]]:
    symbols = {f.name.replace("_", "-"): f.metadata["symbol"] for f in dataclasses.fields(cls)}
    escaped = {row.key: row.help.replace("|", "\\|") for row in describe(cls)}
    return [(row.key, symbols[row.key], row.default, row.range, escaped[row.key]) for row in describe(cls)]


def test_methods_page_has_every_method_and_parameter_and_runs_that_are_accepted() -> None:
    """Whoever adds a method pastes the new tables: they are in the failure's message."""
    page = (DOCS / "reference/methods.md").read_text(encoding="utf-8")
    for table in methods_tables():
        assert table in page, f"put this table into docs/reference/methods.md:\n{table}"
    for block in re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        check_run(parse_table(RunFile, tomllib.loads(block), source="methods.md"))


def test_methods_page_has_the_bytes_that_were_measured() -> None:
    """Every method that is none over another, as `python -m benchmarks.method_bytes` prints it."""
    made = method_bytes.table()
    page = (DOCS / "reference/methods.md").read_text(encoding="utf-8")
    assert made in page, f"put this table into docs/reference/methods.md:\n{made}"
    names = {line.split("`")[1] for line in made.splitlines()[2:]}
    assert names == {name for name in methods.names() if "+" not in name}


@pytest.mark.parametrize("cls", get_args(messages.Message), ids=lambda cls: cls.__name__)
def test_wire_page_has_every_message_with_its_kind_and_fields(cls: type) -> None:
    """Kind numbers are for ever: the page is the second place that would have to change."""
    kind = messages._NUMBERS[cls]
    assert f"| {kind} | `{cls.__name__}` | {field_names(cls)} |" in WIRE


@pytest.mark.parametrize(
    "cls",
    [records.DeviceProfile, records.TrainingPlan, records.PartRef, records.Report, records.Evaluation],
    ids=lambda cls: cls.__name__,
)
def test_wire_page_has_every_record_with_its_fields(cls: type) -> None:
    """Those that travel inside messages and containers."""
    assert f"| `{cls.__name__}` | {field_names(cls)} |" in WIRE


def test_wire_page_has_the_fields_of_the_bundle() -> None:
    """In any order: they are explained in a sentence."""
    section = WIRE.partition("## Join bundle")[2]
    assert [f.name for f in dataclasses.fields(Bundle) if f"`{f.name}`" not in section] == []


def test_wire_and_operations_pages_have_every_topic() -> None:
    """Also the permissions for a broker of one's own: exactly what a device may write and read."""
    topics = Topics("FED")
    write, read = topics.device_publishes("NAME"), topics.device_may_subscribe("NAME")
    assert [topic for topic in (*write, *read) if f"| `{topic}` |" not in WIRE] == []
    lines = [*(f"topic write {topic}" for topic in write), *(f"topic read {topic}" for topic in read)]
    assert "\n".join(["user NAME", *lines]) + "\n```" in (DOCS / "how-to/operate.md").read_text(encoding="utf-8")


def test_exit_codes_page_has_every_code() -> None:
    """One row per code of the exception tree."""
    page = (DOCS / "reference/exit-codes.md").read_text(encoding="utf-8")
    codes = {getattr(errors, name).exit_code for name in errors.__all__ if name.endswith("Error")}
    assert [code for code in sorted(codes) if f"\n| {code} | " not in page] == []
