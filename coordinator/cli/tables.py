"""What people read: aligned tables of devices, runs and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.columns import align, plain
from edge_client.config.quantities import format_bytes

__all__ = [
    "demo",
    "deployments",
    "device",
    "devices",
    "dry_run",
    "dry_run_rows",
    "failure",
    "labels",
    "run",
    "runs",
]

Json = dict[str, Any]

_MAX_LEFT_OUT = 20


def devices(rows: Sequence[Json]) -> str:
    """`coordinator device list`."""
    if not rows:
        return "no devices yet; add one with: coordinator device add NAME"
    return align(
        ["device", "state", "last seen", "budget", "plan", "client", "doing", "labels"],
        [
            [
                row["id"],
                "online" if row["online"] else "offline",
                _seen(row),
                format_bytes(row["budget_bytes"]) if row["budget_bytes"] is not None else "-",
                row["plan"] or "-",
                _client(row),
                _doing(row),
                labels(row["labels"]),
            ]
            for row in rows
        ],
        right=(2, 3),
    )


def _client(row: Json) -> str:
    """The client's version; one that is not ours is marked."""
    if not row["client"]:
        return "-"
    return row["client"] if row["client_is"] == "same" else f"{row['client']} ({row['client_is']})"


def _seen(row: Json) -> str:
    """A coordinator that was started a moment ago has seen nobody yet."""
    return "not yet" if row["seen_s_ago"] is None else f"{row['seen_s_ago']:.0f} s ago"


def labels(given: Mapping[str, str]) -> str:
    """`line=a site=berlin`."""
    return " ".join(f"{key}={value}" for key, value in sorted(given.items())) or "-"


def device(data: Json) -> str:
    """`coordinator device show`."""
    profile = data["profile"]
    facts = [
        ("state", f"{'online' if data['online'] else 'offline'}, seen {_seen(data)}"),
        ("doing", _doing(data)),
        ("client", _client(data)),
        ("plan", data["plan"] or "-"),
        ("labels given here", labels(data["labels_given"])),
        ("its own labels", labels(data["labels_own"])),
        ("machine", _machine(profile) if profile else "-"),
        ("budget", format_bytes(data["budget_bytes"]) if data["budget_bytes"] is not None else "-"),
        ("free on disk", format_bytes(data["free_bytes"]) if data["free_bytes"] is not None else "-"),
        *((f"task {name}", sha256) for name, sha256 in sorted(data["tasks"].items())),
        *(("deployed", f"{_deployed_model(d)}: {_deployment_state(d)}") for d in [data["deployed"]] if d),
        *(("new bundles name", broker) for broker in data["brokers"]),
    ]
    width = max(len(name) for name, _ in facts)
    pieces = ["\n".join([data["id"], *(f"  {name:<{width}}  {plain(value)}" for name, value in facts)])]
    if data["failures"]:
        pieces.append("\n".join(["last failures", *(failure({**f, "device": f["run"]}) for f in data["failures"])]))
    return "\n\n".join(pieces)


def deployments(data: Json) -> str:
    """`coordinator run deploy`, and what became of it."""
    rows = data["devices"]
    if not rows:
        return f"{data['run']} is deployed to no device"
    return align(
        ["device", "model", "size", "state"],
        [[r["device"], _deployed_model(r), format_bytes(r["bytes"]), _deployment_state(r)] for r in rows],
        right=(2,),
    )


def _deployed_model(row: Json) -> str:
    return f"{row['run']} version {row['version']} ({row['architecture']}, {row['precision']})"


def _deployment_state(row: Json) -> str:
    state = row["state"].replace("_", " ")
    why = row["waits"] or (f"{row['code']}: {row['detail']}" if row["code"] else "")
    uses = f"; uses {_deployed_model(row['in_use'])}" if row["in_use"] and not row["code"] else ""
    return f"{state} ({plain(why)}){uses}" if why else f"{state}{uses}"


def _machine(profile: Json) -> str:
    memory = format_bytes(profile["memory_bytes"]) if profile["memory_bytes"] else "unknown"
    return f"{profile['kind']} {profile['machine']}, {profile['cores'] or 'unknown'} cores, {memory} of memory"


def _doing(row: Json) -> str:
    steps = f" {row['step']}/{row['total']}" if row["total"] else ""
    return f"{row['phase']}{steps}" if row["phase"] else row["state"] or "-"


def runs(rows: Sequence[Json]) -> str:
    """`coordinator run list`."""
    if not rows:
        return "no runs yet; start one with: coordinator run start FILE.toml"
    return align(
        ["run", "state", "round", "best", "method", "model", "reason"],
        [
            [
                r["run"],
                r["state"],
                f"{r['round']}/{r['rounds']}",
                _best(r),
                r["method"],
                r["model"],
                f"waits for {r['waits_for']}" if r["waits_for"] else r["reason"],
            ]
            for r in rows
        ],
        right=(2,),
    )


def _best(row: Json) -> str:
    if row["best_score"] is None:
        return "-"
    return f"{row['metric']} {row['best_score']:.4f} (round {row['best_version']})"


def run(data: Json) -> str:
    """`coordinator run show`."""
    reason = f" ({plain(data['reason'])})" if data["reason"] else ""
    best = f"; best {_best(data)}" if data["best_score"] is not None else ""
    pieces = [f"{data['run']}: {data['state']}{reason}, round {data['round']} of {data['rounds']}{best}"]
    if data["progress"] and data["progress"]["waiting"]:
        pieces.append(_waiting(data["progress"]))
    if data["evaluations"]:
        pieces.append(_evaluations(data["evaluations"]))
        pieces.append(_recalls(data["evaluations"][-1], data["file"]["classes"]))
        pieces.append(_per_device(data))
    if data["devices"]:
        pieces.append(_run_devices(data["devices"]))
    if data["failures"]:
        pieces.append("\n".join(failure(found) for found in data["failures"]))
    if data["left_out"]:
        pieces.append(_left_out(data["left_out"]))
    abandoned = [r for r in data["round_rows"] if r["state"] == "ABANDONED"]
    pieces += [f"round {r['number']}, try {r['attempt']}: abandoned, {plain(r['reason'])}" for r in abandoned]
    return "\n\n".join(piece for piece in pieces if piece)


def _left_out(rows: Sequence[Json]) -> str:
    """Knowledge that was not there or could not be used; the run goes on without it."""
    shown = [[r["device"] or "all", r["round"], r["code"], plain(r["detail"])] for r in rows[:_MAX_LEFT_OUT]]
    rest = len(rows) - len(shown)
    more = f"\nand {rest} more (--format json has all)" if rest > 0 else ""
    return align(["without", "last in round", "code", "why"], shown, right=(1,)) + more


def failure(found: Json) -> str:
    """A lease that brought nothing: who, when, why, and the last lines of its log where the owner shares them."""
    detail = f": {plain(found['detail'])}" if found["detail"] else ""
    head = f"{found['device']} {found['state']} in round {found['round']}: {found['code']}{detail}"
    return "\n".join([head, *(f"    {plain(line)}" for line in found["log"])])


def _waiting(progress: Json) -> str:
    rows = [[c["id"], c["code"], c["detail"]] for c in progress["candidates"] if c["code"]]
    table = align(["device", "not asked", "why"], rows) if rows else ""
    return f"{progress['waiting']}\n{table}".rstrip()


def _recalls(result: Json, classes: Sequence[str]) -> str:
    rows = [
        [name, "-" if recall is None else f"{recall:.4f}"]
        for name, recall in zip(classes, result["recall"], strict=True)
    ]
    return align(["class", f"recall after round {result['version']}"], rows, right=(1,))


def _per_device(data: Json) -> str:
    """The newest judged version on each device's own test data; of the server, on its test data, slice by slice."""
    version = data["evaluations"][-1]["version"]
    rows = [
        [r["device"], r["slice"], f"{r['accuracy']:.4f}", r["num_samples"]]
        for r in data["device_evaluations"]
        if r["version"] == version and r["accuracy"] is not None
    ]
    heads = ["device", "model", f"accuracy after round {version}", "test samples"]
    return align(heads, rows, right=(2, 3))


def dry_run_rows(data: Json, devices: Sequence[Json], traffic: Mapping[str, Json]) -> Json:
    """The answers of a dry run: one row per enrolled device, with its plan or why it cannot train.

    `traffic`: bytes of a round for a device with each slice, as far as they are known.
    """
    answered = {entry["id"]: entry for entry in data["devices"]}
    refused = {found["device"]: found for found in data["failures"]}
    barred = {found["id"]: found for found in data["barred"]}
    late = {"code": "not_asked", "detail": "it came when the others had been asked already; try again"}
    barred |= {row["id"]: late for row in devices if row["online"] and row["id"] not in barred}
    rows = [_dry_row(row["id"], answered, refused, barred, traffic) for row in devices]
    return {"run": data["file"]["name"], "num_able": sum(row["code"] == "" for row in rows), "devices": rows}


def _dry_row(name: str, answered: Json, refused: Json, barred: Json, traffic: Mapping[str, Json]) -> Json:
    found = answered.get(name)
    moved = traffic.get(found["plan_details"]["slice"], {}) if found and found["plan_details"] else {}
    problem = refused.get(name) or barred.get(name) or {"code": "offline", "detail": "not connected"}
    return {
        "id": name,
        "budget_bytes": found["budget_bytes"] if found else None,
        "plan": found["plan"] if found else "",
        "predicted_bytes": found["predicted_bytes"] if found else None,
        "num_samples": found["num_samples"] if found else None,
        "num_test": found["num_test"] if found else None,
        "bytes_down": moved.get("bytes_down"),
        "bytes_up": moved.get("bytes_up"),
        "bytes_once": moved.get("bytes_once"),
        "code": "" if found else problem["code"],
        "detail": "" if found else problem["detail"],
        "log": [] if found else problem.get("log", []),
    }


def dry_run(result: Json) -> str:
    """`coordinator run start --dry-run`."""
    if not result["devices"]:
        return "no devices yet; add one with: coordinator device add NAME"
    able = [row for row in result["devices"] if not row["code"]]
    table = align(
        ["device", "budget", "plan", "predicted peak", "samples", "test", "down/round", "up/round"],
        [
            [
                r["id"],
                format_bytes(r["budget_bytes"]),
                r["plan"],
                format_bytes(r["predicted_bytes"]),
                r["num_samples"],
                r["num_test"],
                *("?" if r[way] is None else format_bytes(r[way]) for way in ("bytes_down", "bytes_up")),
            ]
            for r in able
        ],
        right=(1, 3, 4, 5, 6, 7),
    )
    problems = [f"{r['id']} cannot: {r['code']}: {plain(r['detail'])}" for r in result["devices"] if r["code"]]
    once = [format_bytes(r["bytes_once"]) for r in able if r["bytes_once"]]
    note = f"once, to each device, on top: {', '.join(dict.fromkeys(once))} down" if once else ""
    count = f"{len(able)} of {len(result['devices'])} devices can train; nothing was trained"
    return "\n\n".join(piece for piece in (table if able else "", note, "\n".join(problems), count) if piece)


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
                r["num_devices"] or "server",
            ]
            for r in rows
        ],
        right=range(7),
    )


def _run_devices(rows: Sequence[Json]) -> str:
    return align(
        ["device", "budget", "plan", "predicted", "peak", "inside", "replans", "samples", "up", "down"],
        [
            [
                r["id"],
                format_bytes(r["budget_bytes"]),
                r["plan"],
                format_bytes(r["predicted_bytes"]),
                format_bytes(r["peak_bytes"]),
                "yes" if r["inside_budget"] else "NO",
                r["replans"],
                r["num_samples"],
                format_bytes(r["bytes_up"]),
                format_bytes(r["bytes_down"]),
            ]
            for r in rows
        ],
        right=(1, 3, 4, 6, 7, 8, 9),
    )


def demo(data: Json) -> str:
    """`coordinator demo`: the table and how to go on."""
    accuracies = "  ".join(f"{value:.3f}" for value in (data["accuracy_before"], *data["accuracy_per_round"]))
    devices_table = _run_devices(data["devices"])
    up, down = format_bytes(data["bytes_up"]), format_bytes(data["bytes_down"])
    inside = all(device["inside_budget"] for device in data["devices"])
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
            *([f"report: {data['report']}", ""] if data.get("report") else []),
            "The same with your own devices (README.md has every step):",
            "  server  coordinator start --advertise ADDRESS",
            "          coordinator device add NAME ... --out bundles",
            "          coordinator new FOLDER --classes A,B,...",
            "  device  edge-client join NAME.join --data DIR, then: edge-client start",
            "  server  coordinator run start FOLDER/run.toml --dry-run, then --follow",
        ]
    )
