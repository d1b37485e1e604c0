"""The manifest of an archive is checked before anything is written."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from rows import digest

from coordinator.store import archive, snapshot
from edge_client.errors import InputError
from edge_client.records import to_map


def _write_manifest(path: Path, entries: tuple[archive.Entry, ...], **changes: object) -> None:
    manifest = archive.Manifest(format=archive.FORMAT, fedfit="0", created_s=0, federation="f1", files=entries)
    text = json.dumps({**to_map(manifest), **changes}).encode()
    member = tarfile.TarInfo("manifest.json")
    member.size = len(text)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member, io.BytesIO(text))


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "pki/../version", "blobs/ab/short", "lock", "state.db-wal", ""]
)
def test_a_manifest_may_list_only_what_a_backup_has(tmp_path: Path, name: str) -> None:
    """An archive whose manifest lists any other name is refused before its files are read."""
    entries = [archive.Entry(name=n, length=0, sha256=digest("")) for n in ("version", "state.db", name)]
    _write_manifest(tmp_path / "b", tuple(entries))
    with pytest.raises(InputError, match="which no backup has"):
        archive.extract(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_manifest_with_a_name_twice_or_a_blob_of_another_hash_is_refused(tmp_path: Path) -> None:
    """A blob is named after its hash, and each file is listed once."""
    version, database = (archive.Entry(name=n, length=0, sha256=digest("")) for n in ("version", "state.db"))
    blob = archive.Entry(name=snapshot.blob_name(digest("x")), length=0, sha256=digest("y"))
    for entries, match in (((version, database, version), "no name twice"), ((version,), "once"), ((blob,), "another")):
        _write_manifest(tmp_path / "b", entries)
        with pytest.raises(InputError, match=match):
            archive.extract(tmp_path / "b", tmp_path / "new")


def test_a_newer_format_and_random_bytes_are_refused(tmp_path: Path) -> None:
    """The error names the format, or says that the file is not a backup."""
    _write_manifest(tmp_path / "b", (), format=2)
    with pytest.raises(InputError, match="format 2, this fedfit reads 1"):
        archive.extract(tmp_path / "b", tmp_path / "new")
    for data in (b"", b"x", bytes(512), b"\xff" * 5000):
        (tmp_path / "b").write_bytes(data)
        with pytest.raises(InputError, match="is not a whole backup"):
            archive.extract(tmp_path / "b", tmp_path / "new")
