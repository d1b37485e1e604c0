"""`coordinator run ...`: start a training, also as a dry run, look at it, stop it, report on it; its model, too."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator import control
from coordinator.aggregation.pretrained import resolved
from coordinator.aggregation.task_source import with_task
from coordinator.cli import tables, timeline_text
from coordinator.cli.options import add_state_dir, formatted, listing, show, show_list, warn
from coordinator.control_messages import ListDevices, ListRuns, ShowRun, ShowTimeline, StartedRun, StartRun, StopRun
from coordinator.results import run_folders, run_record
from coordinator.results.run_record import RunRecord
from coordinator.run_check import check_run, warnings_of
from coordinator.run_details import RunDetails
from coordinator.simulation.run_options import put, settings_of
from edge_client.config.key_descriptions import describe
from edge_client.config.run_file import RunFile, check_run_file, load_run_file, refuse_user_method
from edge_client.config.tables import parse_table, read_toml
from edge_client.config.task_files import split_place
from edge_client.errors import InputError, NoSuchNameError, NothingFitsError, RunFailedError
from edge_client.records import is_id

__all__ = ["list_options", "report_options", "show_options", "start_options", "stop_options"]

_POLL_S = 0.2


def start_options(start: argparse.ArgumentParser) -> None:
    """`run start`."""
    formatted(add_state_dir(start)).set_defaults(do=_start)
    start.add_argument("file", type=Path, metavar="FILE.toml", help="the run file: what to train")
    start.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="instead of what the file says: train.lr=0.1"
    )
    start.add_argument("--dry-run", action="store_true", help="ask every device what it would train; train nothing")
    start.add_argument("--follow", action="store_true", help="watch until the run ends; Ctrl-C only stops watching")


def list_options(parser: argparse.ArgumentParser) -> None:
    """`run list`."""
    listing(add_state_dir(parser))
    parser.set_defaults(do=_list)


def show_options(shown: argparse.ArgumentParser) -> None:
    """`run show`."""
    formatted(add_state_dir(shown)).set_defaults(do=_show)
    shown.add_argument("run", metavar="RUN", help="id, unique prefix or latest")
    shown.add_argument("--timeline", action="store_true", help="show where the time of the newest rounds went")
    shown.add_argument("--round", type=int, metavar="N", help="with --timeline: this round")
    shown.add_argument("--follow", action="store_true", help="watch until the run ends; Ctrl-C only stops watching")


def stop_options(stop: argparse.ArgumentParser) -> None:
    """`run stop`."""
    add_state_dir(stop).set_defaults(do=_stop)
    stop.add_argument("run", metavar="RUN", help="id, unique prefix or latest")
    stop.add_argument("--now", action="store_true", help="drop the round that is under way")


def report_options(report: argparse.ArgumentParser) -> None:
    """`run report`."""
    add_state_dir(report).set_defaults(do=_report)
    report.add_argument(
        "run", metavar="RUN|DIR", help="id, unique prefix or latest; or the folder of a simulation, or of several"
    )
    report.add_argument("--out", type=Path, metavar="FILE", help="default: RUN.html or DIR.html here")
    report.add_argument("--plots", type=Path, metavar="DIR", help="write the page's plots there as PNG files, too")


def _start(options: argparse.Namespace) -> None:
    file = resolved(_with_whole_paths(_load(options.file, options.set)), options.file)
    source = place = ""
    if file.task is not None:
        file, source, place = with_task(file, file.task, options.file)
    check_run(file)
    task = str(split_place(place)[0]) if place else None
    _check_model(options.file, file, task)
    warn(warnings_of(file))
    started = control.ask(options.state_dir, StartRun(file=file, task_source=source, dry=options.dry_run))
    if options.dry_run:
        _dry_run(options, started.run, file, task)
    elif options.follow:
        _follow(options, started.run)
    else:
        show(options, started, _started)


def _load(path: Path, settings: Sequence[str]) -> RunFile:
    """The run file with the keys that were typed after `--set`; raises `InputError`."""
    if not settings:
        return load_run_file(path)
    table = read_toml(path)
    refuse_user_method(table, str(path))
    for key, value in settings_of(settings):
        keys = [row.key for row in describe(RunFile)]
        if key not in keys and "." not in key:
            near = next((f"; did you mean {full}?" for full in keys if full.endswith(f".{key}")), "")
            raise InputError(f"--set {key}: expected a key of the run file, such as train.lr{near}")
        put(table, key.split("."), value)
    file = parse_table(RunFile, table, source=f"{path} with --set")
    check_run_file(file)
    return file


def _with_whole_paths(file: RunFile) -> RunFile:
    """Shared samples by the place that the person means: the coordinator runs in another folder."""
    source, _, path = str(file.method.parameters.get("public", "")).partition(":")
    if not path or Path(path).is_absolute():
        return file
    parameters = {**file.method.parameters, "public": f"{source}:{Path(path).absolute()}"}
    return dataclasses.replace(file, method=dataclasses.replace(file.method, parameters=parameters))


def _check_model(path: Path, file: RunFile, task: str | None) -> None:
    """What only the model itself shows, such as slices that it has not: now, not when the run's turn comes."""
    from coordinator.aggregation.first_model import check_first_model

    try:
        check_first_model(file, task)
    except (InputError, NoSuchNameError) as error:
        raise InputError(f"{path}: {error}") from None


def _started(data: StartedRun) -> str:
    waits = f"; it waits for {data.waits_for}" if data.waits_for else ""
    return f"started {data.run}{waits}; look at it with: coordinator run show {data.run}"


def _dry_run(options: argparse.Namespace, run: str, file: RunFile, task: str | None) -> None:
    """Wait for the devices' plans and show them; raises if too few devices can train."""
    from coordinator.cli import dry_run, follow
    from coordinator.cli import methods as cli_methods

    shown = ""
    try:
        while True:
            data = follow.ask(options.state_dir, ShowRun(run=run))
            shown = _show_answers(data, shown)
            if follow.is_over(data):
                break
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        control.ask(options.state_dir, StopRun(run=run, now=True))
        raise KeyboardInterrupt("stopped; nothing was trained") from None
    if data.state == "failed":
        raise InputError(f"{options.file}: {data.reason}")
    if data.state == "stopped":
        raise RunFailedError(f"the dry run {run} was stopped by somebody; start it again")
    devices = follow.ask(options.state_dir, ListDevices()).devices
    result = dry_run.evaluate(data, devices, cli_methods.run_bytes(file, task) if data.devices else {})
    show(options, result, dry_run.describe)
    if result.num_able < file.devices.min:
        raise NothingFitsError(
            f"{file.devices.min} devices are needed (devices.min), {result.num_able} can train; see why above"
        )


def _show_answers(data: RunDetails, shown: str) -> str:
    """Say how many of the devices that were asked have answered, whenever that changes."""
    asked = {lease.device for lease in data.leases}
    answered = asked & ({device.id for device in data.devices} | {lease.device for lease in data.failures})
    text = f"{len(answered)} of {len(asked)} devices answered" if asked else ""
    if text and text != shown:
        print(text, file=sys.stderr, flush=True)
    return text or shown


def _follow(options: argparse.Namespace, run: str) -> None:
    from coordinator.cli import follow  # rich takes 0.1 s to load

    try:
        data = follow.follow(options.state_dir, run)
    except KeyboardInterrupt:
        print(f"{run} goes on; watch it again with: coordinator run show {run} --follow")
        return
    show(options, data, tables.run)
    follow.check_model(data)


def _list(options: argparse.Namespace) -> None:
    rows = control.ask(options.state_dir, ListRuns()).runs
    show_list(options, rows, tables.runs, name=lambda row: row.run)


def _show(options: argparse.Namespace) -> None:
    if options.timeline:
        question = ShowTimeline(run=options.run, round=options.round)
        show(options, control.ask(options.state_dir, question), timeline_text.text)
        return
    if options.round is not None:
        raise InputError("--round: it belongs to --timeline, which is missing")
    data = control.ask(options.state_dir, ShowRun(run=options.run))
    if options.follow:
        _follow(options, data.run)
    else:
        show(options, data, tables.run)


def _stop(options: argparse.Namespace) -> None:
    stopped = control.ask(options.state_dir, StopRun(run=options.run, now=options.now))
    if stopped.state in ("queued", "running"):
        print(f"{stopped.run} ends {'now' if options.now else 'after its round'}")
    else:
        print(f"{stopped.run} is over already: {stopped.state}")


def _report(options: argparse.Namespace) -> None:
    from coordinator.report import run_page as report  # loads the plots' library

    runs = _runs_to_report(options)
    name = runs[0].name if len(runs) == 1 else Path(options.run).resolve().name
    path = options.out or Path(f"{name}.html")
    if len(runs) == 1:
        content = report.render(runs[0])
    else:
        from coordinator.report import comparison_page as report_comparison

        content = report_comparison.render(name, runs)
    report.write_page(content, path)
    print(path)
    if options.plots is not None:
        for plot in report.write_plots(content, options.plots):
            print(plot)


def _runs_to_report(options: argparse.Namespace) -> list[RunRecord]:
    """Of a folder the simulations in it; else of the coordinator, whose runs have no slash in their names."""
    place = Path(options.run)
    if run_folders.holds_runs(place) or not is_id(options.run):
        return [run_folders.read_run(folder) for folder in run_folders.find_runs([place])]
    return [run_record.fetch_record(options.state_dir, options.run)]
