"""The command `edge-client`: join a federation and take part in it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_client import __version__, daemon, files, identity
from edge_client.data import registry as data
from edge_client.errors import FedfitError, InputError, NoSuchNameError
from edge_client.transport.base import Event, Transport, Will, parse_broker_url
from edge_client.transport.mqtt import MqttTransport, tls_context
from edge_client.wire.topics import Topics

__all__ = ["main"]

_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edge-client", description="Take part in a federation, inside this device's limits."
    )
    parser.add_argument("-V", "--version", action="version", version=f"edge-client {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    join = commands.add_parser("join", help="make this device a member, once")
    join.add_argument("bundle", metavar="FILE", help="the join bundle; - reads standard input")
    _state_dir(join)
    join.set_defaults(do=_join)
    start = commands.add_parser("start", help="run the client until it is stopped")
    start.add_argument("--join", metavar="FILE", help="join with this bundle first; the same one again changes nothing")
    start.add_argument("--config", metavar="FILE", type=Path, help="device.toml (default: in the state directory)")
    start.add_argument("-v", "--verbose", action="store_true", help="log more")
    _state_dir(start)
    start.set_defaults(do=_start)
    return parser


def _state_dir(parser: argparse.ArgumentParser) -> None:
    default = identity.default_state_dir()
    parser.add_argument("--state-dir", type=Path, default=default, metavar="DIR", help=f"default: {default}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if sys.platform == "win32":
        print("edge-client: Windows is not supported; use Linux", file=sys.stderr)
        return 4
    options = _parser().parse_args(arguments)
    try:
        do: Callable[[argparse.Namespace], None] = options.do
        do(options)
    except FedfitError as error:
        print(f"edge-client: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _join(options: argparse.Namespace) -> None:
    bundle = _bundle(options.bundle)
    identity.join(options.state_dir, bundle)
    print(f"joined federation {bundle.federation} as {bundle.device}")
    print(f"start it with: edge-client start{_named(options.state_dir)}")


def _named(state_dir: Path) -> str:
    return "" if state_dir == identity.default_state_dir() else f" --state-dir {state_dir}"


def _bundle(name: str) -> identity.Bundle:
    if name == "-":
        return identity.parse_bundle(sys.stdin.read(65_536), "standard input")
    return identity.read_bundle(Path(name))


def _start(options: argparse.Namespace) -> None:
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.INFO, format=_LOG_FORMAT)
    if options.join:
        identity.join(options.state_dir, _bundle(options.join))
    bundle = identity.load_identity(options.state_dir)
    device_file = _device_file(options.config or options.state_dir / "device.toml", required=options.config is not None)
    daemon.run_daemon(
        bundle=bundle,
        device_file=device_file,
        state_dir=options.state_dir,
        connect=lambda on_event, boot: _connect(bundle, on_event, boot),
    )


def _device_file(path: Path, *, required: bool) -> files.DeviceFile:
    if not path.exists() and not required:
        raise InputError(
            f"{path} is missing: it says where this device's data is, for example\n"
            '  data = { source = "npz", train = "/data/train.npz" }'
        )
    device_file = files.load_device_file(path)
    if device_file.data is not None:
        try:
            data.validate(device_file.data)
        except NoSuchNameError as error:
            raise InputError(f"{path}: {error}") from None
    return device_file


def _connect(bundle: identity.Bundle, on_event: Callable[[Event], None], boot: str) -> Transport:
    url = parse_broker_url(bundle.brokers[0])
    state_topic = Topics(bundle.federation).device(bundle.device, "state")
    return MqttTransport(
        host=url.host,
        port=url.port,
        name=bundle.device,
        on_event=on_event,
        password=bundle.password,
        tls=tls_context(bundle.ca) if url.tls else None,
        will=Will(topic=state_topic, payload=f"offline {boot}".encode()),
        boot_id=boot,
    )


if __name__ == "__main__":
    sys.exit(main())
