"""The tables of report pages: plans, devices, failures, the run file, versions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coordinator.report import html as page
from coordinator.results.run_record import DeviceRecord, FailureRecord, RunRecord
from edge_client.config.run_file import RunFile
from edge_client.config.tables import to_table
from edge_client.config.toml_text import toml_value
from edge_client.errors import NoSuchNameError
from edge_client.methods import registry

__all__ = ["PLAN_HEADS", "SHARED_WORKERS", "as_toml", "environment_rows", "plan_rows", "sections"]

PLAN_HEADS = ("budget", "plan", "devices", "predicted", "measured at most", "samples")
SHARED_WORKERS = (
    "The workers of a simulation train one device after another: the first pays for what stays in the process, later "
    "ones use it again, so that a peak may be above or below that of a device with a process of its own."
)
_MAX_FAILURES = 20
_MEMORY = (
    "Budget, prediction and measured peak are of the round in which the device came nearest to its budget; the plan is "
    "the newest."
)
_MAX_OPEN = 40  # rows; a longer table opens with a click


def sections(run: RunRecord) -> list[str]:
    """The sections below the plots of a page."""
    file = f"<pre>{page.text(as_toml(to_table(run.file) | {'method': _method(run.file)}))}</pre>"
    return [
        _plans(run),
        _devices(run),
        _failures(run),
        _left_out(run),
        page.section("Run file, with all defaults", file),
        _environment(run),
    ]


def _method(file: RunFile) -> dict[str, Any]:
    """The method with all its parameters; of a user's own method that is not installed, those of the file."""
    parameters = {key.replace("_", "-"): value for key, value in file.method.parameters.items()}
    try:
        types = registry.parameter_types(file.method.name)
    except NoSuchNameError:
        return {"name": file.method.name, **parameters}
    defaults = {f.name.replace("_", "-"): f.default for cls in types for f in dataclasses.fields(cls)}
    return {"name": file.method.name, **defaults, **parameters}


def plan_rows(devices: Sequence[DeviceRecord]) -> list[list[object]]:
    """Rows for `PLAN_HEADS`: devices with the same budget and plan are one row."""

    def same(device: DeviceRecord) -> tuple[int, str]:
        return device.budget_bytes or 0, device.plan or device.failure or "never asked"

    rows: list[list[object]] = []
    for (budget, plan), members in itertools.groupby(sorted(devices, key=same), key=same):
        group = list(members)
        samples = [device.num_samples for device in group if device.num_samples is not None]
        rows.append(
            [
                page.size(budget) if budget else "no limit",
                plan,
                len(group),
                page.size(max((device.predicted_bytes or 0 for device in group), default=0)),
                page.size(max((device.peak_bytes or 0 for device in group), default=0)),
                f"{min(samples)} to {max(samples)}" if samples else "-",
            ]
        )
    return rows


def _plans(run: RunRecord) -> str:
    rows = plan_rows(run.devices)
    if len(rows) >= len(run.devices):  # the table of devices has the same rows
        return ""
    return page.section("Plans", page.table(PLAN_HEADS, rows, right=(0, 2, 3, 4, 5)))


def _devices(run: RunRecord) -> str:
    if not run.devices:
        return ""
    heads = ("device", "budget", "plan", "predicted", "measured", "replans", "rounds", "samples", "test samples")
    rows = [_device_row(device) for device in run.devices]
    table = page.table_of_known((*heads, "up", "down", "machine"), rows, right=(1, 3, 4, 5, 6, 7, 8, 9, 10))
    many = len(rows) > _MAX_OPEN
    known = any(device.peak_bytes and device.budget_bytes for device in run.devices)
    explanation = page.note(_MEMORY) if known else ""
    return page.section("Devices", page.details(f"all {len(rows)}", table) if many else table, explanation)


def _device_row(device: DeviceRecord) -> list[object]:
    peak = page.size(device.peak_bytes)
    return [
        device.name,
        page.size(device.budget_bytes),
        device.plan or device.failure or "-",
        page.size(device.predicted_bytes),
        peak if device.inside_budget else page.Html(f'<span class="over">{page.text(peak)}</span>'),
        device.replans,
        device.num_rounds,
        device.num_samples,
        device.num_test,
        page.size(device.bytes_up),
        page.size(device.bytes_down),
        page.words(device.machine) if device.machine else "",
    ]


def _failures(run: RunRecord) -> str:
    if not run.failures:
        return page.section("Failures", page.note("none"))
    shown = run.failures[-_MAX_FAILURES:]
    rows = [[f.device, f.round, f.state, f.code, _why(f)] for f in shown]
    heads = ("device", "round", "end", "reason", "detail")
    more = page.note(f"the last {len(shown)} of {len(run.failures)}") if len(shown) < len(run.failures) else ""
    return page.section("Failures", page.table(heads, rows, right=(1,), kind="words"), more)


def _left_out(run: RunRecord) -> str:
    """The knowledge that the run could not use; empty if it used all."""
    if not run.left_out:
        return ""
    shown = run.left_out[:_MAX_FAILURES]
    rows = [[row.device or "all", row.round, row.code, page.words(row.detail)] for row in shown]
    explanation = page.note(
        "The run went on without it. What is the same in every round stands here once, with the newest round.",
        *([f"the first {len(shown)} of {len(run.left_out)}"] if len(shown) < len(run.left_out) else []),
    )
    table = page.table(("without", "last in round", "reason", "detail"), rows, right=(1,), kind="words")
    return page.section("Knowledge that could not be used", table, explanation)


def _why(failure: FailureRecord) -> page.Html:
    lines = "\n".join(str(line) for line in failure.log)
    log = page.details("log", f"<pre>{page.text(lines)}</pre>") if lines else ""
    return page.Html(f"{page.words(failure.detail)}{log}")


def as_toml(file: Mapping[str, Any]) -> str:
    """A run file as it could be typed: keys outside of tables first."""
    plain = {key: value for key, value in file.items() if not isinstance(value, Mapping)}
    blocks = ["\n".join(_toml_lines(plain))] if plain else []
    for name, table in file.items():
        if isinstance(table, Mapping):
            blocks.append("\n".join((f"[{name}]", *_toml_lines(table))))
    return "\n\n".join(blocks)


def _toml_lines(table: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"{key.replace('_', '-')} = {toml_value(value)}" for key, value in table.items())


def _environment(run: RunRecord) -> str:
    rows = environment_rows([run.environment])
    if run.model_sha256:
        rows.append(["last model, sha256", run.model_sha256])
    table = page.table(("what", "value"), rows)
    return page.section("Versions and the machine", table) if rows else ""


def environment_rows(environments: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Versions and machines; all values where they differ."""
    names = dict.fromkeys(name for environment in environments for name in environment)
    rows = []
    for name in names:
        values = [environment[name] for environment in environments if environment.get(name, "") != ""]
        shown = dict.fromkeys(page.size(value) if name.endswith("_bytes") else str(value) for value in values)
        if shown:
            rows.append([name.removesuffix("_bytes"), "; ".join(shown)])
    return rows
