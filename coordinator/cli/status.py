"""`coordinator status` and `coordinator stop`: how the running coordinator stands, and ending it."""

from __future__ import annotations

import argparse

from coordinator import control
from coordinator.cli.options import add_state_dir, formatted, show
from coordinator.control_messages import GetStatus, Status, StopCoordinator

__all__ = ["status_options", "stop_options"]

_MOST_NAMED = 10
_PHASES = {"SELECTING": "waits for devices", "EVALUATING": "is being evaluated", "FROZEN": "is being added up"}


def status_options(parser: argparse.ArgumentParser) -> None:
    """`status`."""
    formatted(add_state_dir(parser)).set_defaults(do=_status)


def stop_options(parser: argparse.ArgumentParser) -> None:
    """`stop`."""
    add_state_dir(parser).set_defaults(do=_stop)


def _status(options: argparse.Namespace) -> None:
    show(options, control.ask(options.state_dir, GetStatus()), _text)


def _text(status: Status) -> str:
    online = ", ".join(status.online[:_MOST_NAMED]) + (", ..." if len(status.online) > _MOST_NAMED else "")
    named = f" ({online})" if online else ""
    connected = "" if status.connected else "; it is not connected to its broker"
    lines = [
        f"the coordinator of federation {status.federation} is running{connected}",
        f"devices connect to {', '.join(status.brokers)}",
        f"{len(status.online)} of {status.enrolled} devices are online{named}",
        _run(status),
    ]
    return "\n".join([*lines, *([f"paused: {status.paused}"] if status.paused else [])])


def _run(status: Status) -> str:
    if status.run is None:
        return "no run is active; start one with: coordinator run start FILE.toml"
    return f"{status.run} is active: round {status.round} {_PHASES.get(status.phase or '', 'is running')}"


def _stop(options: argparse.Namespace) -> None:
    stopping = control.ask(options.state_dir, StopCoordinator())
    more = f"; {stopping.run} continues with round {stopping.round} at the next start" if stopping.run else ""
    print(f"the coordinator stops{more}")
