"""The only way a file of fedfit becomes permanent: temporary file, sync, rename, sync of the folder.

Covers: whole files, blobs that grew in a temporary file, SQLite commits, the lock of a state directory.
Does not cover: scratch files that may vanish (a worker's inputs), which are written plainly.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from edge_client import faults
from edge_client.errors import ConflictError, DiskFullError, MachineError

__all__ = [
    "claim_state_dir",
    "commit",
    "disk_errors",
    "free_bytes",
    "open_database",
    "publish",
    "sha256_file",
    "sync_dir",
    "write_bytes",
]

_HASH_PIECE = 1 << 20  # every piece hands the interpreter's lock to another thread and takes it back


def sync_dir(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, final: Path, *, point: str) -> None:
    """Give a finished temporary file its name; afterwards it is there for good, whole or not at all.

    Both must be on one file system. Points: `<point>.sync`, `<point>.rename`, `<point>.done`.
    """
    faults.point(f"{point}.sync")
    fd = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    faults.point(f"{point}.rename")
    os.replace(temporary, final)
    sync_dir(final.parent)
    faults.point(f"{point}.done")


def write_bytes(path: Path, data: bytes, *, point: str, mode: int = 0o600) -> None:
    """Write a whole file durably; readers see the old one or the new one. Points as `publish`, and `<point>.write`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        faults.point(f"{point}.write")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        publish(temporary, path, point=point)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def commit(connection: sqlite3.Connection, *, point: str) -> None:
    """Commit, or roll back and raise. Points: `<point>.commit`, `<point>.committed`."""
    try:
        faults.point(f"{point}.commit")
        connection.commit()
    except (OSError, sqlite3.Error):
        connection.rollback()
        raise
    faults.point(f"{point}.committed")


def open_database(path: Path) -> sqlite3.Connection:
    """Open a SQLite file with the settings that survive a power cut, used by one thread."""
    connection = sqlite3.connect(path, isolation_level="IMMEDIATE")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")
    os.chmod(path, 0o600)
    return connection


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn the disk's errors into ours: `DiskFullError` passes alone, `MachineError` does not."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else MachineError
        raise kind(f"{what}: {error.strerror or error}") from error
    except sqlite3.OperationalError as error:
        kind = DiskFullError if "full" in str(error) else MachineError
        raise kind(f"{what}: {error}") from error
    except sqlite3.DatabaseError as error:
        if type(error) is not sqlite3.DatabaseError:  # a broken constraint is a bug of ours
            raise
        raise MachineError(f"{what}: {error}; restore a backup of the state directory") from error


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write below `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        piece = memoryview(bytearray(min(_HASH_PIECE, max(1, os.fstat(file.fileno()).st_size))))
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def claim_state_dir(path: Path, *, kind: str, version: int) -> int:
    """Make or take over a state directory and lock it until this process ends; returns the lock's descriptor.

    Raises `MachineError` for a directory that is not ours or not writable, `ConflictError` if another process holds it.
    """
    marker = path / "version"
    expected = f"fedfit-{kind} {version}\n"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not marker.exists() and any(path.iterdir()) and not (path / "lock").exists():
            raise MachineError(
                f"{path} is not empty and was not made by fedfit; name an empty or new directory with --state-dir"
            )
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(fd, False)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConflictError(
                f"another {kind} already runs on {path}; stop it, or name another --state-dir"
            ) from None
        try:
            if not marker.exists():
                write_bytes(marker, expected.encode(), point="state.version")
            _check_version(marker, kind, version)
        except (OSError, MachineError):
            os.close(fd)  # a refused directory is not held either
            raise
    except OSError as error:
        raise MachineError(
            f"cannot use the state directory {path}: {error.strerror}; check its owner and rights"
        ) from error
    return fd


def _check_version(marker: Path, kind: str, version: int) -> None:
    found = marker.read_text(encoding="utf-8", errors="replace").split()
    if len(found) != 2 or found[0] != f"fedfit-{kind}" or not found[1].isdecimal():
        raise MachineError(
            f"{marker.parent} belongs to {' '.join(found)[:60]!r}, not to a fedfit {kind}; name another --state-dir"
        )
    if int(found[1]) > version:
        raise MachineError(
            f"{marker.parent} was written by a newer fedfit (layout {found[1]}, this one knows {version}); upgrade"
        )
