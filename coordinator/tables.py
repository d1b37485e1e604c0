"""What people read: aligned tables of devices, runs and results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_client.files import format_bytes

__all__ = ["align", "demo", "devices", "run", "runs"]

Json = dict[str, Any]


def align(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """A table with padded columns; those in `right` are numbers."""
    cells = [[_plain(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]

    def line(row: list[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *(line(row) for row in cells[1:])])


def _plain(cell: object) -> str:
    """One line without control characters: what devices say may not move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(cell).split()))


def devices(rows: Sequence[Json]) -> str:
    """`coordinator device list`."""
    if not rows:
        return "no devices yet; add one with: coordinator device add NAME"
    return align(
        ["device", "state", "last seen", "budget", "client", "doing"],
        [
            [
                row["id"],
                "online" if row["online"] else "offline",
                "never" if row["seen_s_ago"] is None else f"{row['seen_s_ago']:.0f} s ago",
                format_bytes(row["budget_bytes"]) if row["budget_bytes"] is not None else "-",
                row["client"] or "-",
                _doing(row),
            ]
            for row in rows
        ],
        right=(2, 3),
    )


def _doing(row: Json) -> str:
    steps = f" {row['step']}/{row['total']}" if row["total"] else ""
    return f"{row['phase']}{steps}" if row["phase"] else row["state"] or "-"


def runs(rows: Sequence[Json]) -> str:
    """`coordinator run list`."""
    if not rows:
        return "no runs yet; start one with: coordinator run start FILE.toml"
    return align(
        ["run", "state", "round", "method", "model", "reason"],
        [[r["run"], r["state"], f"{r['round']}/{r['rounds']}", r["method"], r["model"], r["reason"]] for r in rows],
        right=(2,),
    )


def run(data: Json) -> str:
    """`coordinator run show`."""
    reason = f" ({_plain(data['reason'])})" if data["reason"] else ""
    version = data["models"][-1]["version"] if data["models"] else 0
    pieces = [f"{data['run']}: {data['state']}{reason}, round {version} of {data['rounds']}"]
    if data["evaluations"]:
        pieces.append(_evaluations(data["evaluations"]))
    if data["devices"]:
        pieces.append(_run_devices(data["devices"]))
    problems = [lease for lease in data["leases"] if lease["code"]]
    if problems:
        rows = [[p["device"], p["state"], p["code"], p["detail"]] for p in problems]
        pieces.append(align(["device", "newest round", "why", "detail"], rows))
    pieces += [f"{p['device']}: {_plain(line)}" for p in problems for line in p["log"]]
    abandoned = [r for r in data["round_rows"] if r["state"] == "ABANDONED"]
    pieces += [f"round {r['number']}, try {r['attempt']}: abandoned, {_plain(r['reason'])}" for r in abandoned]
    return "\n\n".join(pieces)


def _evaluations(rows: Sequence[Json]) -> str:
    return align(
        ["after round", "accuracy", "balanced", "macro-F1", "loss", "samples", "devices"],
        [
            [
                r["version"],
                f"{r['accuracy']:.4f}",
                f"{r['balanced_accuracy']:.4f}",
                f"{r['macro_f1']:.4f}",
                f"{r['loss']:.4f}",
                r["num_samples"],
                r["num_devices"],
            ]
            for r in rows
        ],
        right=range(7),
    )


def _run_devices(rows: Sequence[Json]) -> str:
    return align(
        ["device", "budget", "plan", "predicted", "peak", "samples", "up", "down"],
        [
            [
                r["id"],
                format_bytes(r["budget_bytes"]),
                r["plan"],
                format_bytes(r["predicted_bytes"]),
                format_bytes(r["peak_bytes"]),
                r["num_samples"],
                format_bytes(r["bytes_up"]),
                format_bytes(r["bytes_down"]),
            ]
            for r in rows
        ],
        right=(1, 3, 4, 5, 6, 7),
    )


def demo(data: Json) -> str:
    """`coordinator demo`: the table and how to go on."""
    accuracies = "  ".join(f"{value:.3f}" for value in (data["accuracy_before"], *data["accuracy_per_round"]))
    devices_table = _run_devices(data["devices"])
    up, down = format_bytes(data["bytes_up"]), format_bytes(data["bytes_down"])
    inside = all(device["peak_bytes"] <= device["budget_bytes"] for device in data["devices"])
    return "\n".join(
        [
            f"accuracy on the devices' own test data, before round 1 and after each of {data['rounds']} rounds:",
            f"  {accuracies}",
            "",
            devices_table,
            "",
            f"every device stayed inside its budget: {'yes' if inside else 'NO'}",
            f"model {data['model_sha256'][:16]}, {up} up, {down} down",
            "",
            "The same with your own devices: coordinator start --help, coordinator device add --help, README.md",
        ]
    )
