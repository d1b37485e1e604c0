"""The only way in which fedfit makes a file permanent: temporary file, sync, rename, sync of the folder.

Covers: whole files, blobs that grew in a temporary file, folders, the lock of a state directory.
Does not cover: scratch files that may vanish (a worker's inputs), which are written plainly; databases.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from edge_client import faults
from edge_client.errors import ConflictError, DiskFullError, MachineError

__all__ = [
    "as_owner",
    "begin_sync",
    "cache_dir",
    "check_not_root",
    "claim_state_dir",
    "default_state_dir",
    "disk_errors",
    "free_bytes",
    "is_claimed",
    "make_dir",
    "publish",
    "publish_all",
    "relaxed",
    "sha256_file",
    "sync_dir",
    "write_bytes",
]

_HASH_PIECE = 1 << 20  # every piece hands the interpreter's lock to another thread and takes it back
_syncs = True


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Sync nothing in this process while the context is active: files survive the process, but not a power cut.

    For simulations, where a lost round is trained again and nobody was promised anything.
    """
    global _syncs
    before, _syncs = _syncs, False
    try:
        yield
    finally:
        _syncs = before


def sync_dir(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    if not _syncs:
        return
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def begin_sync(fd: int, offset: int, length: int) -> None:
    """Let the system begin to write a part of a file to the disk, so that its sync has little left to wait for.

    It promises nothing. Of what was written before in this part, the cache forgets what is on the disk already.
    """
    if _syncs and hasattr(os, "posix_fadvise"):  # not on macOS
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def make_dir(path: Path) -> None:
    """Make a folder and its parents, so that files that become permanent inside survive a power cut as well."""
    if not path.is_dir():
        make_dir(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync_dir(path.parent)


def publish(temporary: Path, final: Path, *, point: str, sync: bool = True) -> None:
    """Give a finished temporary file its name; afterwards it is there for good, whole or not at all.

    Both must be on one file system. Points: `<point>.sync`, `<point>.rename`, `<point>.done`. Without `sync` (for what
    can be fetched again) there is no such point, and a power cut may leave anything under the name.
    """
    if sync:
        publish_all([(temporary, final)], point=point)
        return
    faults.point(f"{point}.rename")
    os.replace(temporary, final)
    faults.point(f"{point}.done")


def publish_all(files: Sequence[tuple[Path, Path]], *, point: str) -> None:
    """`publish`, durably, for several files at once: each folder that they are in is synced once."""
    for temporary, _ in files:
        faults.point(f"{point}.sync")
        _sync(temporary, os.O_RDONLY)
    for temporary, final in files:
        faults.point(f"{point}.rename")
        os.replace(temporary, final)
    for folder in dict.fromkeys(final.parent for _, final in files):
        sync_dir(folder)
    for _ in files:
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


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn errors of the disk into `DiskFullError`, which passes once there is space, or `MachineError`."""
    try:
        yield
    except OSError as error:
        kind = DiskFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else MachineError
        raise kind(f"{what}: {error.strerror or error}") from error


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


def default_state_dir(kind: str, *, variable: str) -> Path:
    """The state directory: from the environment; for root `/var/lib/fedfit/KIND`; else below the home directory."""
    if named := os.environ.get(variable):
        return Path(named)
    return (Path("/var/lib") if os.geteuid() == 0 else Path.home() / ".local/state") / "fedfit" / kind


def cache_dir() -> Path:
    """The folder for files that can be made again: from the environment or systemd; for root `/var/cache/fedfit`."""
    if named := os.environ.get("FEDFIT_CACHE_DIR") or os.environ.get("CACHE_DIRECTORY"):
        return Path(named)
    return (Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache") / "fedfit"


@contextlib.contextmanager
def as_owner(path: Path) -> Iterator[None]:
    """As root, act as the owner of `path`: a service could not read files that root creates in its directory."""
    try:
        status = path.stat()
    except OSError:  # not there yet, or not readable: whoever uses it reports that
        status = None
    if status is None or os.geteuid() != 0 or status.st_uid == 0:
        yield
        return
    group = os.getegid()
    os.setegid(status.st_gid)
    os.seteuid(status.st_uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(group)


def check_not_root(path: Path, service: str) -> None:
    """Raise `MachineError` for root in the directory of a service, whose user has the service's name."""
    if os.geteuid() != 0:
        return
    import pwd

    try:
        owner = pwd.getpwuid(path.stat().st_uid).pw_name
    except (OSError, KeyError):
        return
    if owner == service:
        raise MachineError(
            f"{path} belongs to the service {service}, which could not read what root writes there: "
            f"sudo systemctl start {service}"
        )


def claim_state_dir(
    path: Path, *, kind: str, version: int, may_hold: Collection[str] = (), option: str = "--state-dir"
) -> int:
    """Make or take over a state directory and lock it until this process ends; returns the lock's descriptor.

    `may_hold` names files that a person may have put there before; `option` is how a person names another directory.
    Raises `MachineError` for a directory that is not ours or not writable, `ConflictError` if another process holds it.
    """
    marker = path / "version"
    expected = f"fedfit-{kind} {version}\n"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        foreign = any(entry.name not in may_hold for entry in path.iterdir())
        if foreign and not marker.exists() and not (path / "lock").exists():
            raise MachineError(
                f"{path} is not empty and was not made by fedfit; name an empty or new directory with {option}"
            )
        fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        os.set_inheritable(fd, False)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConflictError(f"another {kind} already runs on {path}; stop it, or name another {option}") from None
        try:
            if not marker.exists():
                write_bytes(marker, expected.encode(), point="state.version")
            _check_version(marker, kind, version, option)
        except (OSError, MachineError):
            os.close(fd)  # a refused directory is not held either
            raise
    except OSError as error:
        raise MachineError(
            f"cannot use the state directory {path}: {error.strerror}; check its owner and rights"
        ) from error
    return fd


def is_there(path: Path) -> bool:
    """Whether `path` exists; raises `MachineError` if this user is not allowed to see that."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # the last: a name that no file can have
        return False
    except OSError as error:
        raise MachineError(
            f"cannot look at {path}: {error.strerror}; if it is another user's, type the command as that user"
        ) from error
    return True


def is_claimed(path: Path) -> bool:
    """Whether a process holds the state directory now; takes the lock for a moment if it is free."""
    try:
        fd = os.open(path / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise MachineError(f"cannot look at {path / 'lock'}: {error.strerror}; check its owner and rights") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _check_version(marker: Path, kind: str, version: int, option: str) -> None:
    words = marker.read_text(encoding="utf-8", errors="replace").split()
    if len(words) != 2 or words[0] != f"fedfit-{kind}" or not words[1].isdecimal():
        raise MachineError(
            f"{marker.parent} belongs to {' '.join(words)[:60]!r}, not to a fedfit {kind}; name another {option}"
        )
    if int(words[1]) > version:
        raise MachineError(
            f"{marker.parent} was written by a newer fedfit (layout {words[1]}, this one knows {version}); upgrade"
        )
