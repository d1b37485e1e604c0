"""The commands of a device's membership: join, start, status, config, leave. A daemon loads no others."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from edge_client import durable, logs
from edge_client.client import identity
from edge_client.operate import owner_file
from edge_client.operate.output_format import add_format
from edge_client.operate.service_commands import add_config, add_state_dir, confirm

__all__ = ["config_options", "join_options", "leave_options", "start_options", "status_options"]


def join_options(join: argparse.ArgumentParser) -> None:
    """Add the options of `join`."""
    join.add_argument("bundle", metavar="FILE", help="the join bundle; - reads standard input")
    join.add_argument("--no-check", action="store_true", help="do not try the connection, e.g. before the server is up")
    join.add_argument(
        "--data", metavar="DIR", type=Path, help="this device's data: its device.toml is written, if there is none"
    )
    add_state_dir(join)
    join.set_defaults(do=_join)


def start_options(start: argparse.ArgumentParser) -> None:
    """Add the options of `start`."""
    start.add_argument("--join", metavar="FILE", help="join with this bundle first; the same one again changes nothing")
    add_config(start)
    start.add_argument(
        "--root", metavar="DIR", type=Path, default=Path("/"), help="for tests: where /proc and /sys are read below"
    )
    start.add_argument("-v", "--verbose", action="store_true", help="log more")
    start.add_argument("--log-format", choices=logs.FORMATS, default="plain", help="default: %(default)s")
    add_state_dir(start)
    start.set_defaults(do=_start)


def status_options(shown: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    add_format(shown)
    add_state_dir(shown)
    shown.set_defaults(do=_status)


def config_options(config: argparse.ArgumentParser) -> None:
    """Add the options of `config`."""
    add_format(config, "toml")
    add_config(config)
    add_state_dir(config)
    config.set_defaults(do=_config)


def leave_options(leave: argparse.ArgumentParser) -> None:
    """Add the options of `leave`."""
    leave.add_argument("--yes", action="store_true", help="do not ask")
    add_state_dir(leave)
    leave.set_defaults(do=_leave)


def _join(options: argparse.Namespace) -> None:
    from edge_client.client import connection
    from edge_client.operate import data_folder  # a daemon need not hold it

    bundle = _bundle(options.bundle)
    layout = data_folder.recognise(options.data) if options.data else None
    if not options.no_check:
        connection.check(bundle)
    with durable.as_owner(options.state_dir):
        identity.join(options.state_dir, bundle)
    print(f"joined federation {bundle.federation} as {bundle.device}")
    if layout is not None:
        with durable.as_owner(options.state_dir):
            message = data_folder.write_device_file(options.state_dir / "device.toml", layout, asked=options.data)
        print(message)
    elif not durable.is_there(options.state_dir / "device.toml"):
        print(f"say where its data is, in {options.state_dir / 'device.toml'}, or join again with --data DIR")
    print(f"start it with: edge-client start{_named(options.state_dir)}")


def _named(state_dir: Path) -> str:
    return "" if state_dir == identity.default_state_dir() else f" --state-dir {state_dir}"


def _bundle(name: str) -> identity.Bundle:
    if name == "-":
        return identity.parse_bundle(sys.stdin.read(65_536), "standard input")
    return identity.read_bundle(Path(name))


def _start(options: argparse.Namespace) -> None:
    from edge_client.client import connection
    from edge_client.client.run_daemon import run_daemon

    context = logs.Context()
    logs.configure(options.log_format, context, level=logging.DEBUG if options.verbose else logging.INFO)
    durable.check_not_root(options.state_dir, "fedfit-device")
    if options.join:
        identity.join(options.state_dir, _bundle(options.join))
    bundle = identity.load_identity(options.state_dir)
    context.device = bundle.device
    device_file = owner_file.load(options.config or options.state_dir / "device.toml")
    longest_wait_s = device_file.limits.reconnect
    run_daemon(
        bundle=bundle,
        device_file=device_file,
        state_dir=options.state_dir,
        connect=lambda on_event, boot: connection.connect(bundle, on_event, boot, longest_wait_s=longest_wait_s),
        root=options.root,
        context=context,
    )


def _status(options: argparse.Namespace) -> None:
    from edge_client.client import status

    bundle = identity.load_identity(options.state_dir)
    summary = status.summary(options.state_dir, bundle)
    start = f"edge-client start{_named(options.state_dir)}"
    print(json.dumps(summary, indent=1) if options.format == "json" else status.describe(summary, start=start))


def _config(options: argparse.Namespace) -> None:
    path = options.config or options.state_dir / "device.toml"
    device_file = owner_file.load(path)
    if options.format == "json":
        shown = {"file": str(path), "device": owner_file.to_json(device_file)}
        print(json.dumps({**shown, "task-sha256": owner_file.task_hashes(device_file)}, indent=1))
    else:
        print(f"# {path}, with all defaults\n{owner_file.to_toml(device_file)}")


def _leave(options: argparse.Namespace) -> None:
    from edge_client.client import leaving  # a daemon need not hold it

    bundle = identity.load_identity(options.state_dir)
    if not options.yes:
        confirm(f"device {bundle.device} leaves federation {bundle.federation}: identity and work are removed; go on?")
    with durable.as_owner(options.state_dir):
        coordinator_knows = leaving.leave(options.state_dir, bundle)
    print(f"{bundle.device} has left federation {bundle.federation}; device.toml stays")
    if not coordinator_knows:
        print("the coordinator could not be told")
    print(f"on the server: coordinator device remove {bundle.device}")
