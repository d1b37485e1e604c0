"""The file of a backup: a tar whose first member, `manifest.json`, lists the others with their length and SHA-256.

    manifest.json, version, state.db, pki/{ca,server}.{key,pem}, blobs/ab/<the blob's SHA-256>

Covers: writing an archive, and reading one that may come from a stranger. Headers are read one by one, so that no link,
no tar extension, no unknown name and no byte that the manifest does not announce ever reaches the disk.
Does not cover: which files belong in it (`backup`).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from edge_client import durable, faults
from edge_client.errors import InputError, PayloadError
from edge_client.records import Count, Hash, Text, from_map, to_map

__all__ = ["FORMAT", "Entry", "Manifest", "describe_file", "extract", "write"]

FORMAT = 1
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 16 << 20  # about 100,000 files
_NAME = re.compile(r"version|state\.db|pki/(ca|server)\.(key|pem)|blobs/([0-9a-f]{2})/(\3[0-9a-f]{62})")
_REQUIRED = {"version", "state.db"}
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of the archive."""

    name: Text
    length: Count
    sha256: Hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The first member of an archive: where it comes from, and its files."""

    format: Count
    fedfit: Text  # the version that wrote it
    created_s: Count
    federation: Text
    files: tuple[Entry, ...] = field(default=())


def describe_file(path: Path, name: str) -> Entry:
    """The entry of the file `path`, which is called `name` in the archive."""
    return Entry(name=name, length=path.stat().st_size, sha256=durable.sha256_file(path))


def write(path: Path, manifest: Manifest, root: Path) -> None:
    """Write the files below `root` into a new archive that only its owner may read; not synced. Raises `OSError`."""
    path.unlink(missing_ok=True)  # left by a killed backup, or put there by somebody who wants to read ours
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file, tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as tar:
        text = json.dumps(to_map(manifest)).encode()
        tar.addfile(_member(_MANIFEST, len(text), manifest.created_s), io.BytesIO(text))
        for entry in manifest.files:
            faults.point("backup.write")
            with open(root / entry.name, "rb") as content:
                tar.addfile(_member(entry.name, entry.length, manifest.created_s), content)


def _member(name: str, length: int, created_s: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = length, 0o600, created_s
    return member


def extract(path: Path, root: Path) -> Manifest:
    """Write the files of an archive below the new folder `root`, synced; raises `InputError` for a bad archive."""
    try:
        source = open(path, "rb", buffering=0)  # noqa: SIM115  # closed below
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    with source, _input_errors(path):
        manifest = _read_manifest(source)
        folders = sorted({(root / entry.name).parent for entry in manifest.files} | {root, root / "blobs"})
        with durable.disk_errors(f"cannot restore {path} into {root}"):
            for folder in folders:
                folder.mkdir(mode=0o700, exist_ok=True)
            for entry in manifest.files:
                _extract_one(source, entry, root / entry.name)
            for folder in folders:
                durable.sync_dir(folder)
        return manifest


@contextmanager
def _input_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (PayloadError, tarfile.HeaderError) as error:
        detail = error.detail if isinstance(error, PayloadError) else str(error)
        raise InputError(f"{path} is not a whole backup of a coordinator: {detail}; use another copy") from None


def _read_manifest(source: IO[bytes]) -> Manifest:
    length = _next_member(source, _MANIFEST)
    if length > _MAX_MANIFEST_BYTES:
        raise PayloadError("too_large", f"its manifest has {length} bytes, at most {_MAX_MANIFEST_BYTES} are expected")
    try:
        fields = json.loads(b"".join(_content(source, length)))
    except (ValueError, RecursionError) as error:
        raise PayloadError("malformed", f"its manifest is not JSON ({error})") from None
    if isinstance(fields, Mapping) and fields.get("format") != FORMAT:
        raise PayloadError("format", f"it has format {fields.get('format')!r:.40}, this fedfit reads {FORMAT}")
    manifest = from_map(Manifest, fields)
    _check_names(manifest.files)
    return manifest


def _check_names(files: Sequence[Entry]) -> None:
    names = [entry.name for entry in files]
    for entry in files:
        match = _NAME.fullmatch(entry.name)
        if match is None:
            raise PayloadError("name", f"it lists {entry.name[:80]!r}, which no backup has")
        if match[4] is not None and match[4] != entry.sha256:
            raise PayloadError("hash", f"it lists the blob {match[4][:12]} with another hash")
    if len(set(names)) != len(names) or not set(names) >= _REQUIRED:
        raise PayloadError("name", f"expected {' and '.join(sorted(_REQUIRED))} once and no name twice")


def _extract_one(source: IO[bytes], entry: Entry, target: Path) -> None:
    length = _next_member(source, entry.name)
    if length != entry.length:
        raise PayloadError("length", f"{entry.name} has {length} bytes, its manifest says {entry.length}")
    digest = hashlib.sha256()
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        for piece in _content(source, length):
            faults.point("restore.write")
            digest.update(piece)
            file.write(piece)
        file.flush()
        faults.point("restore.sync")
        os.fsync(file.fileno())
    if digest.hexdigest() != entry.sha256:
        raise PayloadError("hash", f"{entry.name} is damaged: its bytes have another hash")


def _next_member(source: IO[bytes], name: str) -> int:
    """Read the next header, which must announce a plain file of this name; returns its length."""
    header = _read(source, tarfile.BLOCKSIZE)
    member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    if member.name != name or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size < 0:
        raise PayloadError("name", f"expected the file {name}, found {member.name[:80]!r} of type {member.type!r}")
    return member.size


def _content(source: IO[bytes], length: int) -> Iterator[bytes]:
    """Read a member's bytes in pieces, and skip the padding behind them."""
    for start in range(0, length, _PIECE_BYTES):
        yield _read(source, min(_PIECE_BYTES, length - start))
    _read(source, -length % tarfile.BLOCKSIZE)


def _read(source: IO[bytes], length: int) -> bytes:
    pieces: list[bytes] = []
    while length:
        piece = source.read(length)
        if not piece:
            raise PayloadError("truncated", "it ends too early")
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
