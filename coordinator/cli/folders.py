"""The verbs of the command `coordinator` that make files and folders: new, backup, restore."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from coordinator.cli.options import add_state_dir
from edge_client.config.quantities import format_bytes
from edge_client.config.shape_text import parse_shape

__all__ = ["backup_options", "new_options", "restore_options"]


def new_options(new: argparse.ArgumentParser) -> None:
    """`new`."""
    new.set_defaults(do=_new)
    new.add_argument("folder", type=Path, metavar="DIR", help="its name becomes the run's name")
    new.add_argument("--data", type=Path, metavar="PATH", help="examples of the data: classes and shape follow from it")
    new.add_argument("--classes", metavar="A,B,...", help="default: those of --data, or ok,scratch,dent")
    new.add_argument("--model", default="small-cnn", metavar="NAME", help="a built-in model (default: %(default)s)")
    new.add_argument("--input", metavar="SHAPE", help="of one sample (default: that of --data, or 3x96x96)")
    new.add_argument("--rounds", type=int, default=10, metavar="N", help="rounds at most (default: %(default)s)")
    new.add_argument(
        "--all", action="store_true", help="write every key, with examples of a device's file and of a task"
    )


def backup_options(backup: argparse.ArgumentParser) -> None:
    """`backup`."""
    add_state_dir(backup).set_defaults(do=_backup)
    backup.add_argument("file", type=Path, metavar="FILE", help="a new file; it holds all secrets of the federation")


def restore_options(restore: argparse.ArgumentParser) -> None:
    """`restore`."""
    add_state_dir(restore).set_defaults(do=_restore)
    restore.add_argument("file", type=Path, metavar="FILE", help="what coordinator backup wrote")


def _new(options: argparse.Namespace) -> None:
    from coordinator.cli import new

    classes: tuple[str, ...] = ("ok", "scratch", "dent")
    shape: tuple[int, ...] = (3, 96, 96)
    seen = ""
    if options.data is not None:
        from coordinator.cli import new_from_data  # numpy

        data = new_from_data.look_at(options.data)
        classes, shape, seen = data.classes, data.input, data.describe()
    written = new.NewOptions(
        folder=options.folder,
        classes=tuple(options.classes.split(",")) if options.classes is not None else classes,
        model=options.model,
        input=parse_shape(options.input) if options.input is not None else shape,
        rounds=options.rounds,
        every_key=options.all,
    )
    run, *examples = new.make_folder(written)
    if seen:
        print(f"{seen}; up to {written.rounds} rounds, ends after {new.PATIENCE} without progress")
    print(f"{run}  (what to train{'' if seen else ': look at classes and [model] first'})")
    if examples:
        device, task = examples
        print(f"{device}  (an example of what each device has; edge-client join FILE --data DIR writes one there)")
        print(f"{task}  (an example of a model and data of your own; not used unless run.toml names it)")
    first = "" if seen else f"edit {run}, then: "
    print(f"next: {first}coordinator run start {run} --follow")


def _backup(options: argparse.Namespace) -> None:
    from coordinator.store import backup

    copy = backup.make_backup(options.state_dir, options.file)
    print(f"{copy.path}  ({format_bytes(copy.num_bytes)}, {copy.num_blobs} blobs; it holds the federation's secrets)")
    if copy.missing:
        names = ", ".join(sha256[:12] for sha256 in copy.missing)
        print(f"warning: missing or damaged in {options.state_dir}, hence not in the backup: {names}")


def _restore(options: argparse.Namespace) -> None:
    from coordinator.store import backup

    copy = backup.restore(options.file, options.state_dir)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(copy.created_s))
    print(f"{copy.state_dir}  (federation {copy.federation}, {copy.num_devices} devices, as of {when})")
    print(f"its devices connect to {', '.join(copy.brokers) or 'nothing yet'}: that must lead here, and to nobody else")
    print(f"next: coordinator start --state-dir {copy.state_dir}, with the same options as before")
