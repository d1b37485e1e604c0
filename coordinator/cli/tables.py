"""Aligned tables of devices, runs and results, for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from coordinator.columns import align, plain
from coordinator.control_messages import (
    DeployedModel,
    Deployment,
    DeploymentLine,
    DeviceDetails,
    DeviceFailure,
    DeviceLine,
)
from coordinator.run_check import guessing_warning
from coordinator.run_details import (
    FailedLease,
    LeftOut,
    RunDetails,
    RunDevice,
    RunLine,
    RunProgress,
    VersionResult,
)
from edge_client.config.quantities import format_bytes
from edge_client.records import DeviceProfile

__all__ = ["deployments", "device", "devices", "failure", "labels", "run", "run_devices", "runs"]

_MAX_LEFT_OUT = 20
_DAY_S = 86400


def devices(rows: Sequence[DeviceLine]) -> str:
    """`coordinator device list`."""
    if not rows:
        return "no devices yet; add one with: coordinator device add NAME"
    return align(
        ["device", "state", "last seen", "budget", "plan", "client", "doing", "labels"],
        [
            [
                row.id,
                _state(row),
                _seen(row),
                format_bytes(row.budget_bytes) if row.budget_bytes is not None else "-",
                row.plan or "-",
                _client(row),
                _doing(row),
                labels(row.labels),
            ]
            for row in rows
        ],
        right=(2, 3),
    )


def _client(row: DeviceLine) -> str:
    """The client's version; one that differs from the coordinator's is marked."""
    if not row.client:
        return "-"
    return row.client if row.client_is == "same" else f"{row.client} ({row.client_is})"


def _state(row: DeviceLine) -> str:
    """Whether it is there; of a device that is not, since when, and what it was doing."""
    if row.online:
        return "online"
    if row.seen_s_ago is None:
        return "offline"
    moment = time.localtime(time.time() - row.seen_s_ago)
    form = "%H:%M" if row.seen_s_ago < _DAY_S else "%Y-%m-%d %H:%M"
    during = f", while it was in phase {row.phase}" if row.phase else ""
    return f"offline since {time.strftime(form, moment)}{during}"


def _seen(row: DeviceLine) -> str:
    """A coordinator that started a moment ago has seen nobody yet."""
    return "not yet" if row.seen_s_ago is None else f"{row.seen_s_ago:.0f} s ago"


def labels(pairs: Mapping[str, str]) -> str:
    """`line=a site=berlin`."""
    return " ".join(f"{key}={value}" for key, value in sorted(pairs.items())) or "-"


def device(data: DeviceDetails) -> str:
    """`coordinator device show`."""
    profile = data.profile
    facts = [
        ("state", f"{_state(data)}, seen {_seen(data)}"),
        ("doing", _doing(data)),
        ("client", _client(data)),
        ("plan", data.plan or "-"),
        ("labels given here", labels(data.labels_given)),
        ("its own labels", labels(data.labels_own)),
        ("machine", _machine(profile) if profile else "-"),
        ("budget", format_bytes(data.budget_bytes) if data.budget_bytes is not None else "-"),
        ("free on disk", format_bytes(data.free_bytes) if data.free_bytes is not None else "-"),
        *((f"task {name}", sha256) for name, sha256 in sorted(data.tasks.items())),
        *_deployed_fact(data.deployed),
        *(("new bundles name", broker) for broker in data.brokers),
    ]
    width = max(len(name) for name, _ in facts)
    pieces = ["\n".join([data.id, *(f"  {name:<{width}}  {plain(value)}" for name, value in facts)])]
    if data.failures:
        failures = (_failure(lease.run, lease) for lease in data.failures)
        pieces.append("\n".join(["last failures", *failures]))
    return "\n\n".join(pieces)


def _deployed_fact(line: DeploymentLine | None) -> list[tuple[str, str]]:
    return [("deployed", f"{_deployed_model(line)}: {_deployment_state(line)}")] if line is not None else []


def deployments(data: Deployment) -> str:
    """`coordinator run deploy`, and what became of it."""
    rows = data.devices
    if not rows:
        return f"{data.run} is deployed to no device"
    return align(
        ["device", "model", "size", "state"],
        [[r.device, _deployed_model(r), format_bytes(r.bytes), _deployment_state(r)] for r in rows],
        right=(2,),
    )


def _deployed_model(row: DeploymentLine | DeployedModel) -> str:
    return f"{row.run} version {row.version} ({row.architecture}, {row.precision})"


def _deployment_state(row: DeploymentLine) -> str:
    state = row.state.replace("_", " ")
    why = row.waits or (f"{row.code}: {row.detail}" if row.code else "")
    uses = f"; uses {_deployed_model(row.in_use)}" if row.in_use and not row.code else ""
    return f"{state} ({plain(why)}){uses}" if why else f"{state}{uses}"


def _machine(profile: DeviceProfile) -> str:
    memory = format_bytes(profile.memory_bytes) if profile.memory_bytes else "unknown"
    return f"{profile.kind} {profile.machine}, {profile.cores or 'unknown'} cores, {memory} of memory"


def _doing(row: DeviceLine) -> str:
    if not row.online:
        return "-"
    steps = f" {row.step}/{row.total}" if row.total else ""
    return f"{row.phase}{steps}" if row.phase else row.state or "-"


def runs(rows: Sequence[RunLine]) -> str:
    """`coordinator run list`."""
    if not rows:
        return "no runs yet; start one with: coordinator run start FILE.toml"
    return align(
        ["run", "state", "round", "best", "method", "model", "reason"],
        [
            [
                r.run,
                r.state,
                f"{r.round}/{r.rounds}",
                _best(r),
                r.method,
                r.model,
                f"waits for {r.waits_for}" if r.waits_for else r.reason,
            ]
            for r in rows
        ],
        right=(2,),
    )


def _best(row: RunLine) -> str:
    if row.best_score is None:
        return "-"
    return f"{row.metric} {row.best_score:.4f} (round {row.best_version})"


def run(data: RunDetails) -> str:
    """`coordinator run show`."""
    reason = f" ({plain(data.reason)})" if data.reason else ""
    best = f"; best {_best(data)}" if data.best_score is not None else ""
    pieces = [f"{data.run}: {data.state}{reason}, round {data.round} of {data.rounds}{best}"]
    if data.progress and data.progress.waiting:
        pieces.append(_waiting(data.progress))
    if data.evaluations:
        pieces.append(_evaluations(data.evaluations))
        pieces.append(_recalls(data.evaluations[-1], data.file.classes))
        pieces.append(_per_device(data))
    scores = [model.score for model in data.models if model.score is not None and model.version > 0]
    if warning := guessing_warning(scores, len(data.file.classes), data.file.stop.metric):
        pieces.append(f"warning: {warning}")
    if data.devices:
        pieces.append(run_devices(data.devices))
    if data.failures:
        pieces.append("\n".join(failure(lease) for lease in data.failures))
    if data.left_out:
        pieces.append(_left_out(data.left_out))
    abandoned = [r for r in data.round_rows if r.state == "ABANDONED"]
    pieces += [f"round {r.number}, try {r.attempt}: abandoned, {plain(r.reason)}" for r in abandoned]
    return "\n\n".join(piece for piece in pieces if piece)


def _left_out(rows: Sequence[LeftOut]) -> str:
    """Knowledge that was not there or could not be used; the run goes on without it."""
    shown = [[r.device or "all", r.round, r.code, plain(r.detail)] for r in rows[:_MAX_LEFT_OUT]]
    rest = len(rows) - len(shown)
    more = f"\nand {rest} more (--format json has all)" if rest > 0 else ""
    return align(["without", "last in round", "code", "why"], shown, right=(1,)) + more


def failure(lease: FailedLease) -> str:
    """A lease that brought nothing: who, when, why, and the last lines of its log where the owner shares them."""
    return _failure(lease.device, lease)


def _failure(who: str, lease: FailedLease | DeviceFailure) -> str:
    detail = f": {plain(lease.detail)}" if lease.detail else ""
    head = f"{who} {lease.state} in round {lease.round}: {lease.code}{detail}"
    return "\n".join([head, *(f"    {plain(line)}" for line in lease.log)])


def _waiting(progress: RunProgress) -> str:
    rows = [[c.id, c.code, c.detail] for c in progress.candidates if c.code]
    table = align(["device", "not asked", "why"], rows) if rows else ""
    return f"{progress.waiting}\n{table}".rstrip()


def _recalls(result: VersionResult, classes: Sequence[str]) -> str:
    rows = [
        [name, "-" if recall is None else f"{recall:.4f}"] for name, recall in zip(classes, result.recall, strict=True)
    ]
    return align(["class", f"recall after round {result.version}"], rows, right=(1,))


def _per_device(data: RunDetails) -> str:
    """The newest judged version on each device's own test data; of the server, on its test data, slice by slice."""
    version = data.evaluations[-1].version
    rows = [
        [r.device, r.slice, f"{r.accuracy:.4f}", r.num_samples]
        for r in data.device_evaluations
        if r.version == version and r.accuracy is not None
    ]
    heads = ["device", "model", f"accuracy after round {version}", "test samples"]
    return align(heads, rows, right=(2, 3))


def _evaluations(rows: Sequence[VersionResult]) -> str:
    return align(
        ["after round", "accuracy", "balanced", "macro-F1", "loss", "samples", "devices"],
        [
            [
                r.version,
                f"{r.accuracy:.4f}",
                f"{r.balanced_accuracy:.4f}",
                f"{r.macro_f1:.4f}",
                f"{r.loss:.4f}",
                r.num_samples,
                r.num_devices or "server",
            ]
            for r in rows
        ],
        right=range(7),
    )


def run_devices(rows: Sequence[RunDevice]) -> str:
    """What each device planned, used and moved in a run."""
    return align(
        ["device", "budget", "plan", "predicted", "peak", "inside", "replans", "samples", "up", "down"],
        [
            [
                r.id,
                format_bytes(r.budget_bytes),
                r.plan,
                format_bytes(r.predicted_bytes),
                format_bytes(r.peak_bytes),
                "yes" if r.inside_budget else "NO",
                r.replans,
                r.num_samples,
                format_bytes(r.bytes_up),
                format_bytes(r.bytes_down),
            ]
            for r in rows
        ],
        right=(1, 3, 4, 6, 7, 8, 9),
    )
