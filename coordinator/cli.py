"""The command `coordinator`: run a federation, enrol devices, start runs, look at them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from coordinator import commands, control, launch, tables
from coordinator.service import STATE_KIND, STATE_VERSION, default_state_dir
from coordinator.store.sqlite import SqliteStore
from edge_client import __version__, durable, files, identity
from edge_client.errors import FedfitError, InputError, MachineError
from edge_client.records import from_map, to_map

__all__ = ["main"]

_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="coordinator", description="Run a federation of differently sized devices.")
    parser.add_argument("-V", "--version", action="version", version=f"coordinator {__version__}")
    nouns = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_start(nouns)
    _add_demo(nouns)
    device = nouns.add_parser("device", help="the devices of this federation").add_subparsers(
        required=True, metavar="VERB"
    )
    add = _verb(device, "add", _device_add, "enrol devices and write their join bundles")
    add.add_argument("names", nargs="+", metavar="NAME")
    add.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where NAME.join is written (default: here)"
    )
    _formatted(_verb(device, "list", _device_list, "who is enrolled, and who is there"))
    _verb(device, "remove", _device_remove, "forget a device; it is cut at once").add_argument("name", metavar="NAME")
    run = nouns.add_parser("run", help="trainings").add_subparsers(required=True, metavar="VERB")
    _formatted(_verb(run, "start", _run_start, "start a run")).add_argument("file", type=Path, metavar="FILE.toml")
    _formatted(_verb(run, "list", _run_list, "all runs"))
    _formatted(_verb(run, "show", _run_show, "rounds, results, devices of a run")).add_argument("run", metavar="RUN")
    stop = _verb(run, "stop", _run_stop, "end a run after its round")
    stop.add_argument("run", metavar="RUN")
    stop.add_argument("--now", action="store_true", help="drop the round that is under way")
    return parser


def _add_start(nouns: Any) -> None:
    start = _verb(nouns, "start", _start, "run the coordinator, with its own broker unless --broker names one")
    start.add_argument(
        "--listen", default="127.0.0.1", metavar="ADDRESS", help="where its broker listens (default: %(default)s)"
    )
    start.add_argument(
        "--port", type=int, help="default: 1883 on loopback, 8883 with TLS; 0 takes a free one and keeps it"
    )
    start.add_argument(
        "--advertise",
        action="append",
        default=[],
        metavar="NAME",
        help="name or address that devices connect to; repeatable",
    )
    start.add_argument("--tls", action="store_true", help="TLS on loopback too; elsewhere it is always on")
    start.add_argument(
        "--insecure", action="store_true", help="allow an unencrypted broker that is not on this machine"
    )
    start.add_argument("--broker", metavar="URL", help="use this MQTT broker; its password in FEDFIT_BROKER_PASSWORD")
    start.add_argument("--broker-ca", type=Path, metavar="FILE", help="the CA of --broker, as PEM")
    start.add_argument("--heartbeat", type=float, default=10.0, metavar="S", help=argparse.SUPPRESS)


def _add_demo(nouns: Any) -> None:
    demo = _formatted(_verb(nouns, "demo", _demo, "broker, coordinator and devices as real processes on this machine"))
    demo.add_argument("--rounds", type=int, default=5)
    demo.add_argument("--seed", type=int, default=1)
    demo.add_argument("--tls", action="store_true", help="encrypt the connections")
    demo.add_argument("--keep", type=Path, metavar="DIR", help="keep all state below DIR (default: a temporary folder)")
    demo.add_argument("--through", default=None, help=argparse.SUPPRESS)


def _verb(group: Any, name: str, do: Callable[..., None], help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = group.add_parser(name, help=help_text, description=help_text)
    parser.add_argument(
        "--state-dir", type=Path, default=default_state_dir(), metavar="DIR", help="default: %(default)s"
    )
    parser.set_defaults(do=do)
    return parser


def _formatted(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--format", choices=["table", "json"], default="table", help="default: %(default)s")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if sys.platform == "win32":
        print("coordinator: Windows is not supported; use Linux", file=sys.stderr)
        return 4
    options = _parser().parse_args(arguments)
    try:
        options.do(options)
    except FedfitError as error:
        print(f"coordinator: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


def _show(options: argparse.Namespace, data: Any, table: Callable[[Any], str]) -> None:
    print(json.dumps(data, indent=1) if options.format == "json" else table(data))


def _start(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT)
    launch.start(
        launch.StartOptions(
            state_dir=options.state_dir,
            listen=options.listen,
            port=options.port,
            advertise=tuple(options.advertise),
            tls=options.tls,
            insecure=options.insecure,
            broker=options.broker,
            broker_ca=options.broker_ca,
            heartbeat_s=options.heartbeat,
        )
    )


def _device_add(options: argparse.Namespace) -> None:
    if not options.out.is_dir():
        raise InputError(f"--out {options.out}: expected a folder that exists")
    for name in options.names:
        commands.new_device(name)  # all names are checked before the first is added
    try:
        bundles = control.request(options.state_dir, "device-add", names=options.names)["bundles"]
    except control.NotRunningError:
        bundles = _device_add_alone(options.state_dir, options.names)
    for number, data in enumerate(bundles):
        bundle = from_map(identity.Bundle, data)
        path = options.out / f"{bundle.device}.join"
        lacking = ", ".join(options.names[number:])
        with durable.disk_errors(f"cannot write {path}; device remove, then add again: {lacking}"):
            identity.write_bundle(path, bundle)
        print(f"{path}  (copy it to {bundle.device}, then there: edge-client join {path.name})")


def _device_add_alone(state_dir: Path, names: list[str]) -> list[Any]:
    """Without a running coordinator: the store alone changes; the next start lets the devices in."""
    if not (state_dir / "version").exists():
        raise MachineError(
            f"there is no coordinator in {state_dir} yet; start it once: coordinator start --state-dir {state_dir}"
        )
    lock = durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION)
    store = SqliteStore(state_dir / "state.db")
    try:
        brokers, ca = tuple(store.setting("brokers").split("\n")), store.setting("ca") or None
        rows = [commands.new_device(name) for name in names]
        store.add_device(*rows)
        federation = store.federation("")
        return [to_map(commands.bundle_for(row, federation=federation, brokers=brokers, ca=ca)) for row in rows]
    finally:
        store.close()
        os.close(lock)


def _device_list(options: argparse.Namespace) -> None:
    devices = control.request(options.state_dir, "device-list")["devices"]
    _show(options, devices, tables.devices)


def _device_remove(options: argparse.Namespace) -> None:
    control.request(options.state_dir, "device-remove", name=options.name)
    print(f"removed {options.name}")


def _run_start(options: argparse.Namespace) -> None:
    file = files.load_run_file(options.file)
    commands.check_run(file)
    started = control.request(options.state_dir, "run-start", file=to_map(file))
    _show(options, started, lambda data: f"started {data['run']}; look at it with: coordinator run show {data['run']}")


def _run_list(options: argparse.Namespace) -> None:
    _show(options, control.request(options.state_dir, "run-list")["runs"], tables.runs)


def _run_show(options: argparse.Namespace) -> None:
    _show(options, control.request(options.state_dir, "run-show", run=options.run), tables.run)


def _run_stop(options: argparse.Namespace) -> None:
    stopped = control.request(options.state_dir, "run-stop", run=options.run, now=options.now)
    print(f"{stopped['run']} ends {'now' if options.now else 'after its round'}")


def _demo(options: argparse.Namespace) -> None:
    from coordinator import demo

    result = demo.run_demo(
        demo.DemoOptions(
            rounds=options.rounds, seed=options.seed, tls=options.tls, keep=options.keep, through=options.through
        )
    )
    _show(options, result, tables.demo)


if __name__ == "__main__":
    sys.exit(main())
