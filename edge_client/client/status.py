"""The state of a client in `STATE/status.json`, for `edge-client status` and other programs on the device.

The daemon replaces the file when something has changed, at most once a second, and while only the steps of a training
go on, every five seconds, to spare SD cards. It is not synced: after a power cut it may say anything or be gone, and
nothing but people reads it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from edge_client import durable
from edge_client.client.identity import Bundle
from edge_client.config.quantities import format_bytes
from edge_client.errors import PayloadError
from edge_client.records import Between, Count, Matches, Text, from_map, to_map

__all__ = ["Moment", "Status", "StatusFile", "describe", "one_line", "one_line_status", "read_status", "summary"]

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_STEPS_EVERY_S = 5.0
_LONGEST_BYTES = 65_536

Link = Annotated[str, Matches(r"stopped|connecting|connected|let_in")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened; `at_s` is this device's clock, for people."""

    text: Text
    at_s: Annotated[float, Between(0, 2**40)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of a client, as the file holds it."""

    pid: Count
    client: Text = ""  # its version
    budget_bytes: Count = 0  # of a worker
    plan: Text = ""  # of the worker that runs
    link: Link = "connecting"
    state: Text = "idle"
    lease: Text = ""
    run: Text = ""
    round: Count = 0
    num_rounds: Count = 0
    phase: Text = ""
    step: Count = 0
    total: Count = 0
    loss: float | None = None
    receipt: Moment | None = None
    error: Moment | None = None


class StatusFile:
    """Writes the file; errors of the disk are ignored, because only people read it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Status | None = None
        self._written_at = 0.0
        self.due = 0.0  # no need to look before

    def update(self, status: Status, now: float) -> None:
        """Write the file if the status has changed and the last write is long enough ago."""
        self.due = now + _EVERY_S
        before = self._written
        if before is not None:
            only_steps = replace(before, step=status.step, loss=status.loss) == status
            if status == before or (only_steps and now - self._written_at < _STEPS_EVERY_S):
                return
        self._written, self._written_at = status, now
        temporary = self._path.with_name(f".{self._path.name}.tmp")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                json.dump(to_map(status), file)
            os.replace(temporary, self._path)
        except OSError as error:
            log.debug("cannot write %s: %s", self._path, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def read_status(path: Path) -> Status | None:
    """Read the file; None if it is missing or invalid."""
    try:
        with open(path, encoding="utf-8") as file:
            return from_map(Status, json.loads(file.read(_LONGEST_BYTES)))
    except (OSError, ValueError, RecursionError, PayloadError):
        return None


def summary(state_dir: Path, bundle: Bundle) -> dict[str, Any]:
    """The identity of a device, whether a client runs, and the status that the client wrote last."""
    running = durable.is_claimed(state_dir)
    status = read_status(state_dir / "status.json") or Status(pid=0)
    if not running:
        status = Status(pid=0, link="stopped", state="stopped", receipt=status.receipt, error=status.error)
    known = {"device": bundle.device, "federation": bundle.federation, "brokers": list(bundle.brokers)}
    dated = {"receipt": _dated(status.receipt), "error": _dated(status.error)}
    return {**known, "running": running, **to_map(status), **dated, "deployed": _deployed(state_dir)}


def _deployed(state_dir: Path) -> dict[str, Any] | None:
    """The deployed model, if there is one, and the outcome of the newest deployment."""
    from edge_client.client import deployed  # a daemon need not hold it

    folder = deployed.folder_of(state_dir)
    if not durable.is_there(folder):
        return None
    record, path = deployed.read_record(folder), deployed.current_path(state_dir)
    current = {"model": to_map(record.current), "path": str(path) if record.current is not None else None}
    return {**current, "wanted": to_map(record.wanted), "outcome": to_map(record.outcome)}


def _dated(moment: Moment | None) -> dict[str, str] | None:
    """A moment with its local time, in the format of the logs."""
    if moment is None:
        return None
    return {"text": moment.text, "at": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment.at_s))}


def describe(data: dict[str, Any], *, start: str = "edge-client start") -> str:
    """The text of `edge-client status`, from the data of its JSON; `start` is the command that starts the client."""
    rows = [
        ("device", f"{data['device']} of federation {data['federation']}"),
        ("client", f"runs (process {data['pid']})" if data["running"] else f"does not run; start it: {start}"),
        ("broker", f"{', '.join(data['brokers'])}{_link(data)}"),
    ]
    if data["running"]:
        budget = format_bytes(data["budget_bytes"]) if data["budget_bytes"] else "not known yet"
        rows += [("version", data["client"] or "-"), ("budget", budget), ("doing", _doing(data))]
        rows += [("plan", data["plan"])] if data["plan"] else []
    rows += _deployed_rows(data["deployed"]) if data["deployed"] else []
    for key, name in (("receipt", "last receipt"), ("error", "last error")):
        if data[key]:
            rows.append((name, f"{data[key]['text']} ({data[key]['at']})"))
    return "\n".join(f"{name:<12}  {one_line(text)}" for name, text in rows)


def _deployed_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    model, wanted, outcome = data["model"], data["wanted"], data["outcome"]
    rows = [("deployed", f"{_named(model)}: {data['path']}")] if model else []
    if wanted:
        rows.append(("deploying", _named(wanted)))
    elif outcome and outcome["state"] != "active":
        rows.append(("not deployed", f"{outcome['code']}: {outcome['detail']}"))
    return rows


def _named(model: dict[str, Any]) -> str:
    return f"{model['run']} version {model['version']} ({model['architecture']}, {model['precision']})"


def _link(data: dict[str, Any]) -> str:
    words = {"connecting": "not connected", "connected": "connected, the coordinator has not answered yet"}
    link = {**words, "let_in": "connected"}.get(data["link"], "")
    return f": {link}" if data["running"] and link else ""


def _doing(data: dict[str, Any]) -> str:
    if not data["run"]:
        return str(data["state"])
    steps = f" {data['step']}/{data['total']}" if data["total"] else ""
    loss = f", loss {data['loss']:.4g}" if data["loss"] is not None else ""
    phase = f", {data['phase']}{steps}{loss}" if data["phase"] else ""
    return f"{data['state']}: run {data['run']}, {_round_text(data['round'], data['num_rounds'])}{phase}"


def _round_text(round_: int, num_rounds: int) -> str:
    """The number of the round; the one after the last is the evaluation of the final model."""
    return f"round {round_} of {num_rounds}" if round_ <= num_rounds else "the last evaluation"


def one_line_status(status: Status) -> str:
    """One line for `systemctl status`: whether the coordinator accepted the client, and the current run."""
    if status.link != "let_in":
        return {"connecting": "not connected", "connected": "connected; the coordinator has not answered"}[status.link]
    work = f": run {status.run}, {_round_text(status.round, status.num_rounds)}" if status.run else ""
    return f"{status.state}{work}"


def one_line(text: str) -> str:
    """A text from another machine as one line without control characters."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
