"""The snapshot that the owner of the store takes for a backup: a copy of the database, and links to the needed blobs.

It stays in `STATE/snapshot` until `backup` has packed it. A blob never changes, and its link keeps it on the disk when
the coordinator removes it, so that the coordinator does not wait for the packing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from coordinator.state import RETAINED_MODELS
from coordinator.store.base import Store
from edge_client import durable, faults
from edge_client.errors import ConflictError, FedfitError

__all__ = ["PKI_FILES", "blob_name", "exclusive", "folder_of", "remove_stale", "take"]

PKI_FILES = ("pki/ca.key", "pki/ca.pem", "pki/server.key", "pki/server.pem")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)


def folder_of(state_dir: Path) -> Path:
    """The folder of a snapshot, whether it exists or not."""
    return state_dir / "snapshot"


def blob_name(sha256: str) -> str:
    """The path of a blob below a state directory or a snapshot, and its name in an archive."""
    return f"blobs/{sha256[:2]}/{sha256}"


def take(store: Store, state_dir: Path) -> None:
    """Take the snapshot. Its caller owns the store and changes nothing meanwhile.

    Raises `DiskFullError` or `MachineError`, and leaves no files behind then.
    """
    folder = folder_of(state_dir)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        with durable.disk_errors(f"cannot make a snapshot in {folder}"):
            faults.point("backup.snapshot")
            folder.mkdir(mode=0o700)
            store.backup(folder / "state.db")
            for name in ("version", *PKI_FILES):
                if (state_dir / name).exists():
                    _copy(state_dir / name, folder / name)
            for sha256 in store.blob_references.needed(RETAINED_MODELS):
                name = blob_name(sha256)
                if (state_dir / name).exists():  # a missing one is reported when the snapshot is packed
                    _link(state_dir / name, folder / name)
    except (FedfitError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.touch(mode=0o600)
    shutil.copyfile(source, target)


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _copy(source, target)  # a file system without hard links


@contextlib.contextmanager
def exclusive(state_dir: Path) -> Iterator[None]:
    """Allow one backup at a time, as there is one snapshot; raises `ConflictError` while another one is being made."""
    with durable.disk_errors(f"cannot open {state_dir}"):
        fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)  # a lock file might belong to another user than the state
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(f"another backup of {state_dir} is being made; wait for its end") from None
        yield
    finally:
        os.close(fd)


def remove_stale(state_dir: Path) -> None:
    """Remove the snapshot of a backup that was killed; one that is being packed stays."""
    with contextlib.suppress(ConflictError), exclusive(state_dir):
        shutil.rmtree(folder_of(state_dir), ignore_errors=True)
