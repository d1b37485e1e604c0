"""The verbs of `coordinator device`: add, list, show, label, remove.

Without a running coordinator those that only change the store take its lock and change it themselves; the next start
lets the devices in, or not.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from coordinator import control
from coordinator.broker import access_rules as broker_lines
from coordinator.cli import tables
from coordinator.cli.options import add_state_dir, formatted, listing, show, show_list
from coordinator.control_messages import AddDevices, LabelDevice, ListDevices, RemoveDevices, ShowDevice
from coordinator.requests import devices as device_commands
from coordinator.server.broker_accounts import access_of
from coordinator.state import STATE_KIND, STATE_VERSION, default_state_dir
from coordinator.store.rows import DeviceRow
from edge_client import durable
from edge_client.client import identity
from edge_client.errors import InputError
from edge_client.wire.topics import Topics

__all__ = ["add_options", "label_options", "list_options", "parse_labels", "remove_options", "show_options"]


_PAGE = 100  # of a table
_MAX_PAGE = 100_000


def add_options(add: argparse.ArgumentParser) -> None:
    """`device add`."""
    add_state_dir(add).set_defaults(do=_add)
    add.add_argument("names", nargs="+", metavar="NAME", help="letters, digits, - and _; each device needs its own")
    add.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="a label by which runs may choose; repeatable"
    )
    add.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="where NAME.join is written (default: here)"
    )
    add.add_argument(
        "--replace", action="store_true", help="fresh secrets for enrolled devices; their old bundles end at once"
    )


def list_options(parser: argparse.ArgumentParser) -> None:
    """`device list`."""
    listing(add_state_dir(parser))
    parser.add_argument("--limit", type=int, metavar="N", help="at most N devices (default: 100 in a table, else all)")
    parser.add_argument("--after", default="", metavar="NAME", help="only devices after this one: the next page")
    parser.add_argument("--state", default="", metavar="STATE", help="only those that are online, offline, working ...")
    parser.add_argument(
        "--label", action="append", default=[], metavar="K=V", help="only those with this label; repeatable"
    )
    parser.set_defaults(do=_list)


def show_options(parser: argparse.ArgumentParser) -> None:
    """`device show`."""
    formatted(add_state_dir(parser)).add_argument("name", metavar="NAME", help="a device of coordinator device list")
    parser.set_defaults(do=_show)


def label_options(label: argparse.ArgumentParser) -> None:
    """`device label`."""
    formatted(add_state_dir(label)).set_defaults(do=_label)
    label.add_argument("name", metavar="NAME", help="a device of coordinator device list")
    label.add_argument("labels", nargs="+", metavar="K=V | K-", help="K=V gives a label, K- takes it away")


def remove_options(remove: argparse.ArgumentParser) -> None:
    """`device remove`."""
    add_state_dir(remove).set_defaults(do=_remove)
    remove.add_argument("names", nargs="+", metavar="NAME", help="devices of coordinator device list")


def parse_labels(words: list[str], *, may_drop: bool) -> tuple[dict[str, str], list[str]]:
    """`k=v` and `k-`, as what to put and what to drop."""
    put: dict[str, str] = {}
    drop = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals:
            put[key] = value
        elif may_drop and word.endswith("-") and len(word) > 1:
            drop.append(word[:-1])
        else:
            raise InputError(f"label {word!r}: expected KEY=VALUE{', or KEY- to take it away' if may_drop else ''}")
    device_commands.check_labels(put)
    return put, drop


def _without_coordinator(options: argparse.Namespace) -> AbstractContextManager[device_commands.StoredDevices]:
    return device_commands.without_coordinator(options.state_dir, kind=STATE_KIND, version=STATE_VERSION)


def _add(options: argparse.Namespace) -> None:
    labels = parse_labels(options.label, may_drop=False)[0] if options.label else None
    for name in options.names:
        device_commands.new_device(name)  # all names are checked before the first is added
    _make_folder(options.out)
    request = AddDevices(names=tuple(options.names), labels=labels, replace=options.replace)
    try:
        answer = control.ask(options.state_dir, request)
    except control.NotRunningError:
        with _without_coordinator(options) as stored:
            answer = stored.add(request)
    _write_bundles(answer.bundles, options)
    if answer.external:
        print(_broker_lines(answer.bundles, replace=options.replace))


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists() or not path.absolute().parent.is_dir():
        raise InputError(f"--out {path}: expected a folder, or the name of a new one in a folder that exists")
    with durable.disk_errors(f"cannot make the folder {path}"):
        path.mkdir(mode=0o700)


def _write_bundles(bundles: Sequence[identity.Bundle], options: argparse.Namespace) -> None:
    for number, bundle in enumerate(bundles):
        path = options.out / f"{bundle.device}.join"
        lacking = " ".join(bundle.device for bundle in bundles[number:])
        again = f"coordinator device add {lacking} --replace{_named(options.state_dir)}"
        with durable.disk_errors(f"cannot write {path}; when there is a way, make it anew: {again}"):
            identity.write_bundle(path, bundle)
        print(f"{path}  (copy it to {bundle.device}, then there: edge-client join {path.name})")


def _named(state_dir: Path) -> str:
    return "" if state_dir == default_state_dir() else f" --state-dir {shlex.quote(str(state_dir))}"


def _broker_lines(bundles: Sequence[identity.Bundle], *, replace: bool) -> str:
    """The lines that the broker's operator has to add, for the two most common brokers."""
    rows = [DeviceRow(name=bundle.device, key=bundle.key, password=bundle.password) for bundle in bundles]
    users = [access_of(row, Topics(bundle.federation)) for row, bundle in zip(rows, bundles, strict=True)]
    return "\n".join(
        (
            "\nthe broker is not fedfit's own: let these devices in there",
            "\nmosquitto, in the folder of its password_file passwords and its acl_file acl; then reload it:\n",
            *(broker_lines.mosquitto_commands(user, replace=replace) for user in users),
            "\nor a NATS server, below authorization.users; then reload it:\n",
            *(broker_lines.nats_user(user) for user in users),
        )
    )


def _list(options: argparse.Namespace) -> None:
    if options.limit is not None and not 1 <= options.limit <= _MAX_PAGE:
        raise InputError(f"--limit: expected 1 to {_MAX_PAGE}, got {options.limit}")
    is_table = options.format != "json" and not options.quiet
    labels = parse_labels(options.label, may_drop=False)[0]
    request = ListDevices(
        limit=options.limit or (_PAGE if is_table else 0), after=options.after, state=options.state, labels=labels
    )
    answer = control.ask(options.state_dir, request)
    show_list(options, answer.devices, tables.devices, name=lambda row: row.id)
    if is_table and answer.next:
        counts = ", ".join(f"{count} {state}" for state, count in sorted(answer.counts.items()))
        again = f"--after {answer.next}"
        print(f"{len(answer.devices)} of {answer.num_matching} devices ({counts}); the next page: {again}")


def _show(options: argparse.Namespace) -> None:
    show(options, control.ask(options.state_dir, ShowDevice(name=options.name)), tables.device)


def _label(options: argparse.Namespace) -> None:
    put, drop = parse_labels(options.labels, may_drop=True)
    request = LabelDevice(name=options.name, put=put, drop=tuple(drop))
    try:
        answer = control.ask(options.state_dir, request)
    except control.NotRunningError:
        with _without_coordinator(options) as stored:
            answer = stored.label(request)
    show(options, answer, lambda data: f"{data.id}: {tables.labels(data.labels)}")


def _remove(options: argparse.Namespace) -> None:
    request = RemoveDevices(names=tuple(options.names))
    try:
        answer = control.ask(options.state_dir, request)
    except control.NotRunningError:
        with _without_coordinator(options) as stored:
            answer = stored.remove(request)
    print(f"removed {', '.join(answer.removed)}")
    if answer.external:
        print(
            "\nthe broker is not fedfit's own and still lets them in, though nobody listens: remove their users there; "
            "for mosquitto, in its folder, then reload it:\n"
        )
        print("\n".join(f"sed -i '/^{name}:/d' passwords" for name in answer.removed))
