"""The part of a backup that the owner of the store makes: a copy of the database, and links to the blobs it needs.

It lies in `STATE/snapshot` until it is packed (`backup`). A blob never changes, and a linked one stays when the
coordinator removes its own name of it; so nobody has to wait for the packing.
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

__all__ = ["PKI_FILES", "blob_name", "drop_stale", "folder_of", "make", "only_one"]

PKI_FILES = ("pki/ca.key", "pki/ca.pem", "pki/server.key", "pki/server.pem")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)


def folder_of(state_dir: Path) -> Path:
    """Where the snapshot is, or would be."""
    return state_dir / "snapshot"


def blob_name(sha256: str) -> str:
    """A blob's place below a state directory, a snapshot, an archive."""
    return f"blobs/{sha256[:2]}/{sha256}"


def make(store: Store, state_dir: Path) -> None:
    """Take the snapshot; the store's owner calls it, and changes nothing meanwhile.

    Raises `DiskFullError` or `MachineError`; then nothing is left of it.
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
                if (state_dir / name).exists():  # a lost one is told when the snapshot is packed
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
def only_one(state_dir: Path) -> Iterator[None]:
    """One backup at a time, because there is one snapshot; raises `ConflictError` while another is being made."""
    with durable.disk_errors(f"cannot open {state_dir}"):
        fd = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY)  # a lock file might get another owner than the state
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(f"another backup of {state_dir} is being made; wait for its end") from None
        yield
    finally:
        os.close(fd)


def drop_stale(state_dir: Path) -> None:
    """Remove what a killed backup left behind; a snapshot that is being packed stays."""
    with contextlib.suppress(ConflictError), only_one(state_dir):
        shutil.rmtree(folder_of(state_dir), ignore_errors=True)
