"""The command `edge-client`: join a federation and take part in it."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edge_client import __version__, durable, logs
from edge_client.client import connection, identity, status
from edge_client.client.run_daemon import run_daemon
from edge_client.config.device_file import load_device_file
from edge_client.errors import FedfitError, InputError
from edge_client.operate import owner_file
from edge_client.operate.output_format import add_format
from edge_client.operate.service_commands import add_service_commands, confirm

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edge-client", description="Take part in a federation, inside this device's limits."
    )
    parser.add_argument("-V", "--version", action="version", version=f"edge-client {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    join = commands.add_parser("join", help="make this device a member, once")
    join.add_argument("bundle", metavar="FILE", help="the join bundle; - reads standard input")
    join.add_argument("--no-check", action="store_true", help="do not try the connection, e.g. before the server is up")
    join.add_argument(
        "--data", metavar="DIR", type=Path, help="this device's data: its device.toml is written, if there is none"
    )
    _state_dir(join)
    join.set_defaults(do=_join)
    start = commands.add_parser("start", help="run the client until it is stopped")
    start.add_argument("--join", metavar="FILE", help="join with this bundle first; the same one again changes nothing")
    start.add_argument("--config", metavar="FILE", type=Path, help="device.toml (default: in the state directory)")
    start.add_argument(
        "--root", metavar="DIR", type=Path, default=Path("/"), help="for tests: where /proc and /sys are read below"
    )
    start.add_argument("-v", "--verbose", action="store_true", help="log more")
    start.add_argument("--log-format", choices=logs.FORMATS, default="plain", help="default: %(default)s")
    _state_dir(start)
    start.set_defaults(do=_start)
    _add_owners_commands(commands)
    return parser


def _add_owners_commands(commands: Any) -> None:
    shown = commands.add_parser("status", help="what this device is, and what its client is doing")
    add_format(shown)
    _state_dir(shown)
    shown.set_defaults(do=_status)
    config = commands.add_parser("config", help="device.toml with all defaults, checked")
    config.add_argument("--format", choices=["toml", "json"], default="toml", help="default: %(default)s")
    config.add_argument("--config", metavar="FILE", type=Path, help="device.toml (default: in the state directory)")
    _state_dir(config)
    config.set_defaults(do=_config)
    profile = commands.add_parser("profile", help="what this device is, how much memory it may use, and why")
    other = profile.add_mutually_exclusive_group()
    other.add_argument("--root", metavar="DIR", type=Path, help="a copy of another system's /proc, /sys and /etc")
    other.add_argument("--profile", metavar="NAME", help="a device that is not at hand: a known model, or a TOML file")
    add_format(profile)
    profile.add_argument("--config", metavar="FILE", type=Path, help="device.toml (default: in the state directory)")
    _state_dir(profile)
    profile.set_defaults(do=_profile)
    _add_plan(commands)
    _add_bench(commands)
    _add_infer(commands)
    _add_export(commands)
    add_service_commands(commands, _state_dir)
    leave = commands.add_parser("leave", help="end this device's membership; device.toml stays")
    leave.add_argument("--yes", action="store_true", help="do not ask")
    _state_dir(leave)
    leave.set_defaults(do=_leave)


def _add_plan(commands: Any) -> None:
    from edge_client.measuring import plan_options

    plan = commands.add_parser("plan", help="how a model would be trained inside a memory budget")
    plan_options.add_subject(plan)
    budget = plan.add_mutually_exclusive_group()
    budget.add_argument("--budget", metavar="SIZE", help="of the whole worker process; default: what this device has")
    budget.add_argument("--training-budget", metavar="SIZE", help="of what training adds to a warmed-up worker")
    budget.add_argument("--profile", metavar="NAME", help="a device that is not at hand: edge-client profile --profile")
    add_format(plan)
    plan.set_defaults(do=_plan)


def _add_bench(commands: Any) -> None:
    from edge_client.measuring import plan_options

    bench = commands.add_parser("bench", help="measure on this device what plans for several budgets take and cost")
    plan_options.add_subject(bench)
    bench.add_argument(
        "--budgets", metavar="SIZE,...", help="of what training adds to a worker; default: halves down to the smallest"
    )
    bench.add_argument("--out", metavar="DIR", type=Path, help="for bench.json and bench.png; default: bench-MODEL")
    add_format(bench)
    bench.set_defaults(do=_bench)


def _add_infer(commands: Any) -> None:
    infer = commands.add_parser("infer", help="ask a trained model about data")
    what = infer.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="FILE.onnx|NAME", help="an exported model; or a built-in one: coordinator models list"
    )
    what.add_argument("--task", metavar="FILE:OBJ", help="a model of your own: defects.py:task")
    what.add_argument("--deployed", action="store_true", help="the model that the coordinator put on this device")
    infer.add_argument(
        "--run-model", metavar="FILE", type=Path, help="weights, unless ONNX: a model.bin, or a run's directory"
    )
    infer.add_argument(
        "--data", metavar="SOURCE:PATH", required=True, help="digits, npz:/data/a.npz, ...; with ONNX also a path alone"
    )
    infer.add_argument("--input", metavar="SHAPE", help="shape of one sample, such as 3x96x96; default: the data's")
    infer.add_argument("--classes", metavar="N", type=int, help="that the model tells apart; default: the data's")
    infer.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="an option of the model")
    infer.add_argument(
        "--batch",
        metavar="B",
        type=int,
        help="samples at a time; part of the result where BatchNorms keep no statistics; default: 32, of ONNX 1",
    )
    infer.add_argument("--depthwise", action="store_true", help="unit by unit, with activations on disk")
    infer.add_argument("--budget", metavar="SIZE", help="that this may take; with it, groups are as large as fits")
    infer.add_argument("--threads", metavar="N", type=int, default=1, help="default: %(default)s")
    infer.add_argument("--out", metavar="FILE", type=Path, help="for the predictions: .csv or .npz")
    add_format(infer)
    _state_dir(infer)
    infer.set_defaults(do=_infer, optimizer="sgd", momentum=0.0, method="fedavg", slices=None)


def _add_export(commands: Any) -> None:
    export = commands.add_parser("export", help="write this device's model of a run as an ONNX file")
    export.add_argument("run", metavar="RUN", help="id, unique prefix or latest")
    export.add_argument("--onnx", metavar="FILE", type=Path, required=True, help="the file to write; ends with .onnx")
    export.add_argument("--input", metavar="SHAPE", help="of one sample, such as 3x96x96, if the task does not tell")
    export.add_argument("--config", metavar="FILE", type=Path, help="device.toml (default: in the state directory)")
    add_format(export)
    _state_dir(export)
    export.set_defaults(do=_export)


def _state_dir(parser: argparse.ArgumentParser) -> None:
    default = identity.default_state_dir()
    parser.add_argument("--state-dir", type=Path, default=default, metavar="DIR", help=f"default: {default}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if sys.platform == "win32":
        print("edge-client: Windows is not supported; use Linux", file=sys.stderr)
        return 4
    options = _parser().parse_args(_with_negative(sys.argv[1:] if arguments is None else arguments))
    try:
        do: Callable[[argparse.Namespace], None] = options.do
        do(options)
        sys.stdout.flush()
    except FedfitError as error:
        print(f"edge-client: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's last flush complains
        return 141
    return 0


def _with_negative(arguments: Sequence[str]) -> list[str]:
    """`--budget -5MB` as `--budget=-5MB`: argparse would miss the value, and the answer would not say what is wrong."""
    joined: list[str] = []
    for argument in arguments:
        if re.match(r"-\d", argument) and joined and re.fullmatch(r"--[a-z-]+", joined[-1]):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _join(options: argparse.Namespace) -> None:
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


def _profile(options: argparse.Namespace) -> None:
    from edge_client.device import report  # a daemon need not hold it

    limit = _memory_limit(options)
    if options.profile is not None:
        device_report = report.report_known_model(options.profile, limit)
    else:
        device_report = report.report_system(Path("/") if options.root is None else options.root, limit)
    print(
        json.dumps(report.to_json(device_report), indent=1)
        if options.format == "json"
        else report.describe(device_report)
    )


def _plan(options: argparse.Namespace) -> None:
    from edge_client.measuring import plan_from_options  # loads torch

    what, choice = plan_from_options.find_plan(options)
    if options.format == "json":
        print(json.dumps(plan_from_options.to_json(choice), indent=1))
    else:
        print(plan_from_options.describe(what, choice))


def _bench(options: argparse.Namespace) -> None:
    from edge_client.cli import bench_command  # loads torch

    bench = bench_command.run(options)
    messages = bench_command.write(bench, options.out or Path(f"bench-{bench.what.run.what.replace(' ', '-')}"))
    if options.format == "json":
        print(json.dumps(bench_command.to_json(bench), indent=1))
    else:
        print(bench_command.describe(bench))
    print("\n".join(messages), file=sys.stderr)


def _infer(options: argparse.Namespace) -> None:
    if options.deployed:
        from edge_client.client import deployed

        options.model = str(deployed.model_path(options.state_dir))
    if options.model is not None and options.model.lower().endswith(".onnx"):
        from edge_client.onnx import infer as onnx_infer  # without torch

        predicted = onnx_infer.run(options)
        if options.format == "json":
            print(json.dumps(onnx_infer.to_json(predicted), indent=1))
        else:
            print(onnx_infer.describe(predicted))
        return
    from edge_client.cli import infer_command  # loads torch

    answer = infer_command.run(options)
    if options.format == "json":
        print(json.dumps(infer_command.to_json(answer), indent=1))
    else:
        print(infer_command.describe(answer))


def _export(options: argparse.Namespace) -> None:
    from edge_client.cli import personal_export as personal  # loads torch

    facts = personal.export(options)
    print(json.dumps(facts, indent=1) if options.format == "json" else personal.describe(facts))


def _memory_limit(options: argparse.Namespace) -> int | None:
    """limits.memory; that of this device says nothing about another one, unless it is named."""
    path: Path = options.config or options.state_dir / "device.toml"
    if options.config is None:
        if options.root is not None or options.profile is not None:
            return None
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
    return load_device_file(path).limits.memory


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


if __name__ == "__main__":
    sys.exit(main())
