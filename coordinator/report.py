"""`coordinator run report`: one HTML page about a run, plots included; nothing in it comes from the network.

Made from the answer to `run-show`; a key that is not there counts as empty. Whatever came from a device or a file is
text: it is escaped at the one place where text becomes HTML (`_text`).
"""

from __future__ import annotations

import base64
import html
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator import plots
from coordinator.new import toml_value
from edge_client import durable
from edge_client.errors import InputError
from edge_client.files import format_bytes

__all__ = ["render", "write_report"]

Json = Mapping[str, Any]

_METRICS = {"accuracy": "accuracy", "balanced-accuracy": "balanced_accuracy", "macro-f1": "macro_f1", "loss": "loss"}
_SHOWN = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "macro_f1": "macro-F1", "loss": "loss"}
_INLINE = ("parameters", "options")  # their keys stand in the table itself, as in the file
_STYLE = """
:root { color-scheme: light; --ink: #0f172a; --soft: #475569; --line: #e2e8f0; --card: #fff; --page: #f1f5f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 24px 16px 64px; }
h1 { font-size: 26px; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 0 0 12px; }
header p, .note { color: var(--soft); margin: 4px 0 0; }
.state { display: inline-block; font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 99px;
  vertical-align: 5px; margin-left: 8px; background: #e2e8f0; }
.finished { background: #dcfce7; color: #166534; } .failed { background: #fee2e2; color: #991b1b; }
.running, .queued { background: #dbeafe; color: #1e40af; } .stopped { background: #fef3c7; color: #92400e; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0; } .tile { flex: 1 1 150px; }
.tile, section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; } .tile b { display: block; font-size: 22px; line-height: 1.25; overflow-wrap: anywhere; }
.tile span { color: var(--soft); font-size: 13px; }
section { padding: 16px; margin: 0 0 16px; min-width: 0; }
.pair { display: flex; flex-wrap: wrap; gap: 0 16px; align-items: flex-start; } .pair section { flex: 1 1 440px; }
img { display: block; width: 100%; max-width: 760px; height: auto; margin: 0 auto; }
@media (max-width: 520px) { .pair section { flex-basis: 100%; } }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 6px 14px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.lines td { white-space: nowrap; } td p { margin: 0; min-width: 220px; }
.right { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.over { color: #b91c1c; font-weight: 600; }
pre { margin: 0; overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; } td pre { white-space: pre-wrap; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); font-size: 14px; }
"""


def write_report(show: Json, path: Path) -> None:
    """Write the page; `show` is the answer to `run-show`. Raises `InputError` for what is there and no plain file."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode) and not path.is_dir():
        # it would be renamed over: a link, a pipe, or as root a device such as /dev/stdout
        raise InputError(f"{path}: expected a new file or a plain one, got something else; name another file")
    with durable.disk_errors(f"cannot write {path}"):
        durable.write_bytes(path, render(show).encode("utf-8", "replace"), point="report", mode=0o644)


def render(show: Json) -> str:
    """The page."""
    pieces = "\n".join(
        piece
        for piece in (
            _head(show),
            _tiles(show),
            _pair(_progress(show), _recall(show)),
            _pair(_memory(show), _traffic(show)),
            _devices(show),
            _failures(show),
            _run_file(show),
            _environment(show),
        )
        if piece
    )
    title = _text(show.get("run", "run"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{pieces}\n</main>\n</body>\n</html>\n"
    )


def _text(value: object) -> str:
    """Any value as HTML text."""
    return html.escape(str(value), quote=True)


# how the run ended


def _head(show: Json) -> str:
    state, reason = str(show.get("state", "")), show.get("reason") or ""
    known = state if state in ("finished", "failed", "running", "queued", "stopped") else ""
    file = show.get("file") or {}
    what = [str(show.get("model") or ""), str((file.get("method") or {}).get("name") or "")]
    if show.get("created_s"):
        what.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(show["created_s"])))
    return (
        f'<header><h1>{_text(show.get("run", "run"))}<span class="state {known}">{_text(state)}</span></h1>'
        f"<p>{_text(' · '.join(filter(None, what)))}</p><p>{_text(_verdict(show, str(reason)))}</p></header>"
    )


def _verdict(show: Json, reason: str) -> str:
    """One or two sentences: how far it came and why it ended, which version is the best."""
    verb = {"queued": "Waits", "running": "Is running"}.get(str(show.get("state")), "Ended")
    why = f"; reason: {reason}" if reason else ""
    ended = f"{verb} after {_num_rounds(show)} of {show.get('rounds', '?')} rounds{why}."
    best = _best(show)
    if best is None:
        return f"{ended} No version was judged."
    metric = str(show.get("metric") or "accuracy")
    value = best.get(_METRICS.get(metric, metric))
    by = f" ({metric} {value:.4f})" if isinstance(value, float) else ""
    return f"{ended} The best version is the one {_after(best['version'])}{by}."


def _after(version: int) -> str:
    return f"after round {version}" if version else "before the first round"


def _num_rounds(show: Json) -> int:
    models = show.get("models") or []
    return int(models[-1]["version"]) if models else int(show.get("round") or 0)


def _best(show: Json) -> Json | None:
    """The result of the best version; of the newest judged one, if the run names none."""
    judged: list[Json] = list(show.get("evaluations") or [])
    named = [result for result in judged if result["version"] == show.get("best_version")]
    return next(iter(named or judged[-1:]), None)


def _tiles(show: Json) -> str:
    devices = show.get("devices") or []
    moved = sum(d.get("bytes_up", 0) + d.get("bytes_down", 0) for d in devices)
    tiles = [("rounds", f"{_num_rounds(show)} / {show.get('rounds', '?')}"), ("devices", str(len(devices)))]
    best = _best(show)
    if best is not None:
        tiles.append(("best version", _after(best["version"])))
        tiles += [(name, f"{best[key]:.4f}") for key, name in _SHOWN.items() if isinstance(best.get(key), float)]
        if best.get("num_samples"):
            tiles.append(("test samples", f"{best['num_samples']:,}"))
    tiles.append(("moved, all devices", format_bytes(moved)))
    shown = "".join(f'<div class="tile"><b>{_text(v)}</b><span>{_text(n)}</span></div>' for n, v in tiles)
    return f'<div class="tiles">{shown}</div>'


# plots


def _image(png: bytes, alt: str) -> str:
    return f'<img alt="{_text(alt)}" src="data:image/png;base64,{base64.b64encode(png).decode("ascii")}">'


def _section(title: str, *pieces: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{''.join(pieces)}</section>"


def _pair(*sections: str) -> str:
    shown = "".join(sections)
    return f'<div class="pair">{shown}</div>' if shown else ""


def _progress(show: Json) -> str:
    judged = show.get("evaluations") or []
    if not judged:
        return ""
    names = {"accuracy": "accuracy", "macro_f1": "macro-F1"}
    fleet = {f"{name}, all devices": [(r["version"], r[key]) for r in judged] for key, name in names.items()}
    devices: dict[str, list[tuple[int, float]]] = {}
    for row in show.get("device_evaluations") or []:
        if row.get("accuracy") is not None:
            devices.setdefault(str(row["device"]), []).append((row["version"], row["accuracy"]))
    best = show.get("best_version")
    png = plots.progress(fleet, [devices[name] for name in sorted(devices)], best=best)
    keys = ("version", "accuracy", "balanced_accuracy", "macro_f1", "loss", "num_samples", "num_devices")
    heads = ("after round", "accuracy", "balanced", "macro-F1", "loss", "test samples", "devices")
    rows = [[f"{r[k]:.4f}" if isinstance(r.get(k), float) else r.get(k, "") for k in keys] for r in judged]
    numbers = f"<details><summary>numbers</summary>{_table(heads, rows, right=range(len(keys)))}</details>"
    return _section("Results over the rounds", _image(png, "accuracy and macro-F1 after each round"), numbers)


def _recall(show: Json) -> str:
    best = _best(show)
    recall = list(best.get("recall") or []) if best is not None else []
    classes = [str(name) for name in (show.get("file") or {}).get("classes") or range(len(recall))]
    found = [(name, value) for name, value in zip(classes, recall, strict=False) if value is not None]
    if best is None or not found:
        return ""
    worst = sorted(found, key=lambda pair: pair[1])[: plots.MAX_BARS] if len(found) > plots.MAX_BARS else found
    parts = {"recall": [value for _, value in worst]}
    chart = plots.Bars(labels=[name for name, _ in worst], parts=parts, unit="recall", highest=1.0)
    told = ("nobody has it" if value is None else f"{value:.4f}" for value in recall)
    rows = list(zip(classes, told, strict=False))
    return _section(
        "Recall per class, best version",
        _image(plots.bars(chart), "recall of each class"),
        _more(len(found), "the lowest"),
        f"<details><summary>numbers</summary>{_table(('class', 'recall'), rows, right=(1,))}</details>",
    )


def _more(count: int, which: str) -> str:
    return f'<p class="note">{which} {plots.MAX_BARS} of {count}</p>' if count > plots.MAX_BARS else ""


def _largest(devices: Sequence[Json], key: str) -> list[Json]:
    """In the order of the table, unless there are too many to show."""
    if len(devices) <= plots.MAX_BARS:
        return list(devices)
    return sorted(devices, key=lambda d: -int(d.get(key) or 0))[: plots.MAX_BARS]


def _memory(show: Json) -> str:
    devices = show.get("devices") or []
    if not devices:
        return ""
    shown = _largest(devices, "peak_bytes")
    unit, size = _unit(max(max(d.get("peak_bytes") or 0, d.get("budget_bytes") or 0) for d in shown))
    chart = plots.Bars(
        labels=[str(d["id"]) for d in shown],
        parts={"peak": [(d.get("peak_bytes") or 0) / size for d in shown]},
        limits=[d["budget_bytes"] / size if d.get("budget_bytes") else None for d in shown],
        unit=unit,
    )
    return _section(
        "Peak memory of a worker against its budget",
        _image(plots.bars(chart), "peak memory and budget of each device"),
        _more(len(devices), "the highest"),
    )


def _traffic(show: Json) -> str:
    devices = show.get("devices") or []
    if not devices:
        return ""
    shown = _largest([{**d, "moved": d.get("bytes_up", 0) + d.get("bytes_down", 0)} for d in devices], "moved")
    unit, size = _unit(max(d["moved"] for d in shown))
    parts = {name: [d.get(key, 0) / size for d in shown] for name, key in (("up", "bytes_up"), ("down", "bytes_down"))}
    chart = plots.Bars(labels=[str(d["id"]) for d in shown], parts=parts, unit=unit)
    return _section(
        "Bytes moved per device",
        _image(plots.bars(chart), "bytes sent and received by each device"),
        _more(len(devices), "the highest"),
    )


def _unit(highest: int) -> tuple[str, int]:
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    return next(((name, size) for name, size in units if highest >= size), ("bytes", 1))


# tables


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = (), kind: str = "lines"
) -> str:
    """Cells are text; one that is `_Html` is taken as it is. `lines`: no cell is broken; a narrow screen scrolls."""

    def line(cells: Sequence[object], tag: str) -> str:
        shown = (f'<{tag}{" class=right" if i in right else ""}>{_cell(c)}</{tag}>' for i, c in enumerate(cells))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    head = f"<thead>{line(heads, 'th')}</thead>"
    return f'<div class="wide"><table class="{kind}">{head}<tbody>{body}</tbody></table></div>'


class _Html(str):
    """Text that is HTML already."""


def _cell(value: object) -> str:
    return value if isinstance(value, _Html) else _text(value)


def _size(value: object) -> str:
    return format_bytes(value) if isinstance(value, int) and value else "-"


def _devices(show: Json) -> str:
    devices = show.get("devices") or []
    if not devices:
        return ""
    heads = ("device", "budget", "plan", "predicted", "measured", "replans", "samples", "test samples", "up", "down")
    rows = [_device_row(device) for device in devices]
    return _section("Devices", _table((*heads, "machine"), rows, right=(1, 3, 4, 5, 6, 7, 8, 9)))


def _device_row(device: Json) -> list[object]:
    peak, budget = device.get("peak_bytes") or 0, device.get("budget_bytes") or 0
    over = not device.get("inside_budget", True)
    profile = device.get("profile") or {}
    machine = [profile.get("machine") or profile.get("kind") or ""]
    machine += [f"{name} {version}" for name, version in (device.get("versions") or {}).items()]
    return [
        device.get("id", ""),
        _size(budget),
        device.get("plan") or "-",
        _size(device.get("predicted_bytes")),
        _Html(f'<span class="over">{_text(_size(peak))}</span>') if over else _size(peak),
        device.get("replans", 0),
        device.get("num_samples", "-"),
        device.get("num_test", "-"),
        _size(device.get("bytes_up")),
        _size(device.get("bytes_down")),
        ", ".join(filter(None, map(str, machine))) or "-",
    ]


def _failures(show: Json) -> str:
    failures = show.get("failures") or [lease for lease in show.get("leases") or [] if lease.get("code")]
    abandoned = [r for r in show.get("round_rows") or [] if r.get("state") == "ABANDONED"]
    rows = [[f.get("device", ""), f.get("round", ""), f.get("state", ""), f.get("code", ""), _why(f)] for f in failures]
    rows += [["all", r["number"], f"abandoned, try {r['attempt']}", "", r.get("reason", "")] for r in abandoned]
    if not rows:
        return _section("Failures", '<p class="note">none</p>')
    heads = ("device", "round", "end", "reason", "detail")
    return _section("Failures", _table(heads, rows, right=(1,), kind="words"))


def _why(failure: Json) -> _Html:
    lines = "\n".join(str(line) for line in failure.get("log") or [])
    log = f"<details><summary>log</summary><pre>{_text(lines)}</pre></details>" if lines else ""
    return _Html(f"<p>{_text(failure.get('detail') or '')}</p>{log}")


# what it was made with


def _run_file(show: Json) -> str:
    file = show.get("file") or {}
    return _section("Run file, with all defaults", f"<pre>{_text(_as_toml(file))}</pre>") if file else ""


def _as_toml(file: Json) -> str:
    """As it could be typed: keys outside of tables first; what is not set is left out."""
    plain = {key: value for key, value in file.items() if not isinstance(value, Mapping)}
    blocks = ["\n".join(_toml_lines(plain))]
    for name, table in file.items():
        if isinstance(table, Mapping):
            flat = {key: value for key, value in table.items() if key not in _INLINE}
            for inner in _INLINE:
                flat |= table.get(inner) or {}
            blocks.append("\n".join((f"[{name}]", *_toml_lines(flat))))
    return "\n\n".join(blocks)


def _toml_lines(table: Json) -> Iterator[str]:
    yield from (f"{key.replace('_', '-')} = {toml_value(v)}" for key, v in table.items() if v is not None)


def _environment(show: Json) -> str:
    found = show.get("environment") or {}
    known = {key: value for key, value in found.items() if value != ""}
    rows = [[key.removesuffix("_bytes"), _size(v) if key.endswith("_bytes") else v] for key, v in known.items()]
    models = show.get("models") or []
    if models:
        rows.append(["last model, sha256", models[-1].get("sha256", "")])
    if not rows:
        return ""
    return _section("Versions and the server's hardware", _table(("what", "value"), rows))
