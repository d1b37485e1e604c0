"""How a coordinator is started: the options of `start`, which `install-service` takes as well; and doctor."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.cli.options import add_state_dir
from edge_client import logs
from edge_client.operate.service_commands import add_doctor_options, confirm

if TYPE_CHECKING:
    from coordinator.server import launch

__all__ = ["doctor_options", "install_options", "start_options", "uninstall_options"]


def start_options(start: argparse.ArgumentParser) -> None:
    """`start`."""
    add_state_dir(start).set_defaults(do=_start)
    _add_start_options(start)
    start.add_argument("--heartbeat", type=float, default=10.0, metavar="S", help=argparse.SUPPRESS)


def doctor_options(parser: argparse.ArgumentParser) -> None:
    """`doctor`."""
    add_doctor_options(add_state_dir(parser))
    parser.set_defaults(do=_doctor)


def install_options(install: argparse.ArgumentParser) -> None:
    """`install-service`."""
    add_state_dir(install).set_defaults(do=_install)
    install.add_argument("--dry-run", action="store_true", help="print the unit and change nothing")
    install.add_argument("--replace", action="store_true", help="replace a service that is there")
    install.add_argument(
        "--read", action="append", default=[], type=Path, metavar="PATH", help="test data that runs name; repeatable"
    )
    _add_start_options(install)
    install.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help=argparse.SUPPRESS)


def uninstall_options(uninstall: argparse.ArgumentParser) -> None:
    """`uninstall-service`."""
    add_state_dir(uninstall).set_defaults(do=_uninstall)
    uninstall.add_argument("--purge", action="store_true", help="remove the whole federation and the user as well")
    uninstall.add_argument("--yes", action="store_true", help="do not ask")
    uninstall.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help=argparse.SUPPRESS)


def _add_start_options(parser: argparse.ArgumentParser) -> None:
    """Where devices connect to."""
    parser.add_argument(
        "--listen",
        metavar="ADDRESS[:PORT]",
        help="where its broker listens; 127.0.0.1: for this machine only (default: as last time, or on all addresses)",
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help="default: 1883 on loopback, 8883 with TLS; 0 takes a free one and keeps it",
    )
    parser.add_argument(
        "--advertise",
        action="append",
        default=[],
        metavar="NAME",
        help="name or address that devices connect to; repeatable",
    )
    parser.add_argument("--tls", action="store_true", help="TLS on loopback too; elsewhere it is always on")
    parser.add_argument(
        "--insecure", action="store_true", help="allow an unencrypted broker that is not on this machine"
    )
    parser.add_argument("--broker", metavar="URL", help="use this MQTT broker; its password in FEDFIT_BROKER_PASSWORD")
    parser.add_argument("--broker-ca", type=Path, metavar="FILE", help="the CA of --broker, as PEM")
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="figures for Prometheus at /metrics")
    parser.add_argument("--metrics-listen", default="127.0.0.1", metavar="ADDRESS", help="default: %(default)s")
    parser.add_argument(
        "--page", metavar="HOST:PORT", help="where the live page is served (default: 127.0.0.1:8765; elsewhere: TLS)"
    )
    parser.add_argument("--page-cert", type=Path, metavar="FILE", help="a certificate for the page instead of our own")
    parser.add_argument("--page-key", type=Path, metavar="FILE", help="the key of --page-cert")
    parser.add_argument("--no-page", action="store_true", help="serve no live page")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="plain", help="default: %(default)s")
    parser.add_argument(
        "--broker-password-file", type=Path, metavar="FILE", help="holds the password of --broker and nothing else"
    )


def _typed(options: argparse.Namespace) -> launch.StartOptions:
    from coordinator.server import launch
    from coordinator.server.addresses import split_listen

    listen, port = split_listen(options.listen, options.port)
    return launch.StartOptions(
        state_dir=options.state_dir,
        listen=listen,
        port=port,
        advertise=tuple(options.advertise),
        tls=options.tls,
        insecure=options.insecure,
        broker=options.broker,
        broker_ca=options.broker_ca,
        broker_password_file=options.broker_password_file,
        heartbeat_s=getattr(options, "heartbeat", 10.0),
        metrics_port=options.metrics_port,
        metrics_listen=options.metrics_listen,
    )


def _typed_again(options: argparse.Namespace) -> tuple[str, ...]:
    """The options of `start` for the service; the password's file is handed over by systemd."""
    words: list[str] = []
    for name in ("listen", "port", "broker", "page"):
        value = getattr(options, name)
        words += [f"--{name}", str(value)] if value is not None else []
    words += [word for name in options.advertise for word in ("--advertise", name)]
    words += ["--broker-ca", str(options.broker_ca.absolute())] if options.broker_ca is not None else []
    for name in ("page_cert", "page_key"):
        file = getattr(options, name)
        words += [f"--{name.replace('_', '-')}", str(file.absolute())] if file is not None else []
    words += ["--no-page"] if options.no_page else []
    if options.metrics_port is not None:
        words += ["--metrics-port", str(options.metrics_port), "--metrics-listen", options.metrics_listen]
    words += ["--log-format", options.log_format] if options.log_format != "plain" else []
    return (*words, *(f"--{name}" for name in ("tls", "insecure") if getattr(options, name)))


def _service_options(options: argparse.Namespace, *, start: tuple[str, ...] = ()) -> Any:
    from coordinator.cli import server_service
    from edge_client.operate.service_install import Programs
    from edge_client.operate.systemd import Systemd

    files = [*getattr(options, "read", ()), getattr(options, "broker_ca", None)]
    password = getattr(options, "broker_password_file", None)
    return server_service.ServiceOptions(
        state_dir=options.state_dir.absolute(),
        start=start,
        password_file=password.absolute() if password is not None else None,
        readable=tuple(file.absolute() for file in files if file is not None),
        systemd=Systemd(options.root),
        programs=Programs.of_this_process(),
    )


def _start(options: argparse.Namespace) -> None:
    from coordinator.dashboard import opening
    from coordinator.requests.commands import Commands
    from coordinator.server import launch

    page = opening.PageOptions(
        page=options.page,
        cert=options.page_cert,
        key=options.page_key,
        no_page=options.no_page,
        is_read_by_programs=options.log_format == "json",
    )
    context = logs.Context()
    logs.configure(options.log_format, context)
    typed = _typed(options)
    launch.check(typed)
    with opening.prepare(page) as prepared:
        path = typed.state_dir / "state.db"
        launch.start(typed, lambda service: prepared.join(service, Commands(service, store_path=path).handle), context)


def _doctor(options: argparse.Namespace) -> None:
    from coordinator.cli import server_service
    from coordinator.cli.server_checks import ServerChecks
    from edge_client.operate import doctor

    if options.as_service:
        findings = server_service.examine_as_service(_service_options(options), options.only)
    else:
        checks = ServerChecks(options.state_dir, root=options.root).known()
        findings = doctor.examine(checks, options.only)
    print(doctor.to_json(findings) if options.format == "json" else doctor.describe(findings), flush=True)
    problem = doctor.verdict(findings)
    if problem is not None:
        raise problem


def _install(options: argparse.Namespace) -> None:
    from coordinator.cli import server_service
    from coordinator.server import launch

    launch.check(_typed(options))
    service = _service_options(options, start=_typed_again(options))
    if options.dry_run:
        print(server_service.make_unit(service).text, end="")
        return
    server_service.install(service, replace=options.replace)
    name = server_service.NAME
    print(f"{name} runs, and will at every start; its state is {options.state_dir}")
    print(f"look at it: systemctl status {name}; journalctl -u {name} -f; sudo coordinator device list")


def _uninstall(options: argparse.Namespace) -> None:
    from coordinator.cli import server_service
    from edge_client.operate.systemd import Systemd

    if options.purge and not options.yes:
        confirm(f"the service and the whole federation in {options.state_dir} are removed; go on?")
    for path in server_service.uninstall(Systemd(options.root), options.state_dir, purge=options.purge):
        print(f"removed {path}")
    if not options.purge:
        print(f"the federation is kept: {options.state_dir}; its files belong to {server_service.NAME}")
