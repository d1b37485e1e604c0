"""Backup and restore of a coordinator: its database, its certificates, and the blobs that the database needs.

A backup is made in two steps. First, the owner of the store takes a snapshot: the running coordinator between two
events, or this process if no coordinator runs. Then this process packs the snapshot into one file, without anybody
waiting for it.

A restored coordinator takes a higher epoch than any before, so that the devices of the lost one continue with it, from
an older round. A backup leaves out what is created again without it: the broker's files, and updates that were on their
way.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from coordinator import control
from coordinator.control_messages import MakeSnapshot
from coordinator.state import RETAINED_MODELS, STATE_KIND, STATE_VERSION
from coordinator.store import archive, snapshot
from coordinator.store.sqlite import SqliteStore
from edge_client import __version__, durable, faults
from edge_client.errors import ConflictError, InputError, MachineError

__all__ = ["Backup", "Restored", "make_backup", "restore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """The file of a backup, and what is in it."""

    path: Path
    num_bytes: int
    num_blobs: int
    missing: tuple[str, ...]  # blobs that the database refers to and that are missing or damaged on the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A restored state directory."""

    state_dir: Path
    federation: str
    created_s: int  # when the backup was made, by the clock of its machine
    brokers: tuple[str, ...]  # the addresses at which its devices connect
    num_devices: int


def make_backup(state_dir: Path, path: Path) -> Backup:
    """Back up a coordinator, whether it runs or not, into the new file `path`."""
    _check_new(path)
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path}: expected a folder that exists, got {str(path.parent)!r}")
    if not durable.is_there(state_dir / "version"):
        raise MachineError(f"there is no coordinator in {state_dir}; name its directory with --state-dir")
    with snapshot.exclusive(state_dir):
        try:
            try:
                control.ask(state_dir, MakeSnapshot())
            except control.NotRunningError:
                _snapshot_alone(state_dir)
            return _pack(snapshot.folder_of(state_dir), path)
        finally:
            shutil.rmtree(snapshot.folder_of(state_dir), ignore_errors=True)


def _check_new(path: Path) -> None:
    if os.path.lexists(path):
        raise ConflictError(f"{path} exists already; name a new file")


def _snapshot_alone(state_dir: Path) -> None:
    """Take the snapshot without a coordinator, holding its lock so that none starts meanwhile."""
    with durable.as_owner(state_dir):
        _snapshot_as_owner(state_dir)


def _snapshot_as_owner(state_dir: Path) -> None:
    lock = durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION)
    try:
        store = SqliteStore(state_dir / "state.db")
        try:
            snapshot.take(store, state_dir)
        finally:
            store.close()
    finally:
        os.close(lock)


def _pack(folder: Path, path: Path) -> Backup:
    """Pack a snapshot into the file `path`, which appears as a whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    with durable.disk_errors(f"cannot write {path}"):
        try:
            manifest, missing = _describe(folder)
            archive.write(temporary, manifest, folder)
            num_bytes = temporary.stat().st_size
            _check_new(path)
            durable.publish(temporary, path, point="backup")
        finally:
            temporary.unlink(missing_ok=True)
    num_blobs = sum(entry.name.startswith("blobs/") for entry in manifest.files)
    return Backup(path=path, num_bytes=num_bytes, num_blobs=num_blobs, missing=missing)


def _describe(folder: Path) -> tuple[archive.Manifest, tuple[str, ...]]:
    """The files for the archive, and the blobs that are left out: a damaged one would spoil the whole archive."""
    store = SqliteStore(folder / "state.db")
    try:
        federation, needed = (
            store.settings.federation(secrets.token_hex(6)),
            sorted(store.blob_references.needed(RETAINED_MODELS)),
        )
    finally:
        store.close()
    names = [name for name in ("version", "state.db", *snapshot.PKI_FILES) if (folder / name).exists()]
    entries = [archive.describe_file(folder / name, name) for name in names]
    missing = []
    for sha256 in needed:
        name = snapshot.blob_name(sha256)
        entry = archive.describe_file(folder / name, name) if (folder / name).exists() else None
        if entry is not None and entry.sha256 == sha256:
            entries.append(entry)
        else:
            missing.append(sha256)
    manifest = archive.Manifest(
        format=archive.FORMAT,
        fedfit=__version__,
        created_s=int(time.time()),
        federation=federation,
        files=tuple(entries),
    )
    return manifest, tuple(missing)


def restore(path: Path, state_dir: Path) -> Restored:
    """Create the new state directory from a backup, as a whole or not at all."""
    state_dir = state_dir.absolute()
    temporary = state_dir.with_name(f"{state_dir.name}.tmp")
    _check_target(state_dir, temporary)
    with durable.disk_errors(f"cannot make {state_dir}"):
        durable.make_dir(state_dir.parent)
        temporary.mkdir(mode=0o700)
        try:
            manifest = archive.extract(path, temporary)
            _check_clock(manifest, path)
            _check_database(temporary / "state.db", path)
            restored = _take_epoch(temporary, manifest, state_dir)
            faults.point("restore.rename")
            _rename(temporary, state_dir)
            durable.sync_dir(state_dir.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return restored


def _check_target(state_dir: Path, temporary: Path) -> None:
    if os.path.lexists(state_dir) and (not state_dir.is_dir() or any(state_dir.iterdir())):
        raise ConflictError(
            f"{state_dir} is not an empty folder; stop its coordinator and move it away, or name another --state-dir"
        )
    if os.path.lexists(temporary):
        raise ConflictError(f"{temporary} is there already, perhaps of a restore that was killed; remove it")


def _check_clock(manifest: archive.Manifest, path: Path) -> None:
    """Refuse a clock that is behind: epochs follow it, and devices refuse an epoch older than one they have seen."""
    behind_s = manifest.created_s - int(time.time())
    if behind_s > 0:
        raise MachineError(
            f"this machine's clock is {behind_s} s before the time when {path} was made; set it and try again: "
            "by the clock the devices know that a restored coordinator is newer than the lost one"
        )


def _check_database(database: Path, path: Path) -> None:
    try:
        connection = sqlite3.connect(database)
        try:
            connection.execute("PRAGMA trusted_schema=OFF")
            ((problem,),) = connection.execute("PRAGMA quick_check(1)")
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        problem = str(error)
    if problem != "ok":
        raise InputError(f"{path}: its state.db is damaged ({problem}); use another copy")


def _take_epoch(folder: Path, manifest: archive.Manifest, state_dir: Path) -> Restored:
    """Check the version, and take an epoch above every one that devices can have seen."""
    lock = durable.claim_state_dir(folder, kind=STATE_KIND, version=STATE_VERSION)
    try:
        store = SqliteStore(folder / "state.db")
        try:
            store.settings.next_epoch(int(time.time()))
            return Restored(
                state_dir=state_dir,
                federation=store.settings.federation(secrets.token_hex(6)),
                created_s=manifest.created_s,
                brokers=tuple(filter(None, store.settings.get("brokers").split("\n"))),
                num_devices=len(store.devices.all()),
            )
        finally:
            store.close()
    finally:
        os.close(lock)


def _rename(temporary: Path, state_dir: Path) -> None:
    try:
        os.rename(temporary, state_dir)
    except OSError as error:
        if error.errno in (errno.EBUSY, errno.EXDEV):  # an empty volume is mounted there
            raise MachineError(
                f"{state_dir} is a mount point; restore into a new folder inside of it and name that with --state-dir"
            ) from error
        raise
