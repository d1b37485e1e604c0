"""Backup and restore: whole or not at all, and nothing of a stranger's archive is believed."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import stat
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import device_row, digest, lease_row, model_row, round_row, run_row, update_row

from coordinator.cli import main as cli
from coordinator.state import STATE_KIND, STATE_VERSION
from coordinator.store import archive, backup, snapshot
from coordinator.store.sqlite import SqliteStore
from edge_client import durable, faults
from edge_client.errors import ConflictError, DiskFullError, InputError, MachineError
from edge_client.records import to_map

MODELS = [f"model {n}".encode() * 100 for n in range(3)]
PART = b"an update that is not folded yet"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put_blob(state_dir: Path, data: bytes) -> Path:
    path = state_dir / snapshot.blob_name(sha256(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A stopped coordinator in the third round of a run, one update stored, and a blob that nobody needs."""
    folder = tmp_path / "state"
    os.close(durable.claim_state_dir(folder, kind=STATE_KIND, version=STATE_VERSION))
    (folder / "pki").mkdir()
    (folder / "pki/ca.pem").write_text("the authority")
    (folder / "pki/ca.key").write_text("its key")
    store = SqliteStore(folder / "state.db")
    store.settings.federation("f1")
    store.settings.next_epoch(1000)
    store.settings.set("brokers", "mqtts://here:8883")
    store.devices.add(device_row("a"), device_row("b"))
    store.runs.add(run_row())
    settings = b"settings"
    for number, data in enumerate(MODELS):
        row = model_row(number, sha256=sha256(data), sent_sha256=sha256(data), length=len(data))
        if number == 0:
            store.runs.start(row, sha256(settings), len(settings))
        else:
            store.rounds.open(round_row(number), [])
            store.rounds.commit(number, 1, row)
    store.rounds.open(round_row(3), [lease_row(1, round=3)])
    store.updates.save(update_row(round=3, sha256=sha256(PART)), None, "lease-1")
    store.close()
    for data in (*MODELS, PART, settings, b"nobody needs it"):
        put_blob(folder, data)
    return folder


def dump(folder: Path) -> list[object]:
    store = SqliteStore(folder / "state.db")
    try:
        return [
            store.devices.all(),
            store.runs.all(),
            store.models.all("r-1"),
            store.rounds.all("r-1"),
            store.updates.of_attempt("r-1", 3, 1),
        ]
    finally:
        store.close()


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_was_backed_up_is_restored(state_dir: Path, tmp_path: Path) -> None:
    """Rows, certificates and the five needed blobs (three models, settings, one update); the sixth stays behind."""
    made = backup.make_backup(state_dir, tmp_path / "b")
    assert (made.num_blobs, made.lacking) == (5, ())
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o600
    restored = backup.restore(tmp_path / "b", tmp_path / "new")
    assert (restored.federation, restored.num_devices, restored.brokers) == ("f1", 2, ("mqtts://here:8883",))
    assert dump(tmp_path / "new") == dump(state_dir)
    unneeded = snapshot.blob_name(sha256(b"nobody needs it"))
    assert files_below(tmp_path / "new") == files_below(state_dir) - {unneeded}
    assert (tmp_path / "new/pki/ca.key").read_text() == "its key"
    modes = {stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "new").rglob("*")} | {
        stat.S_IMODE((tmp_path / "new").stat().st_mode)
    }
    assert modes == {0o600, 0o700}
    assert not (tmp_path / "new.tmp").exists()
    assert not snapshot.folder_of(state_dir).exists()


def test_nobody_who_may_write_there_gets_to_read_a_backup(state_dir: Path, tmp_path: Path) -> None:
    """Under the name that it has while it is written there is a file that everybody may read, or a link to one."""
    (tmp_path / "open").write_bytes(b"before")
    (tmp_path / ".b.tmp").write_bytes(b"")
    (tmp_path / ".b.tmp").chmod(0o666)
    (tmp_path / ".c.tmp").symlink_to(tmp_path / "open")
    for name in "bc":
        backup.make_backup(state_dir, tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).lstat().st_mode) == 0o600
    assert (tmp_path / "open").read_bytes() == b"before"


def test_a_blob_that_goes_after_the_snapshot_is_in_the_backup(state_dir: Path, tmp_path: Path) -> None:
    """The coordinator commits and cleans up while the file is being packed: what was linked stays."""
    store = SqliteStore(state_dir / "state.db")
    snapshot.make(store, state_dir)
    store.rounds.freeze("r-1", 3, 1, "hash")
    store.close()
    (state_dir / snapshot.blob_name(sha256(PART))).unlink()
    made = backup._pack(snapshot.folder_of(state_dir), tmp_path / "b")
    assert (made.num_blobs, made.lacking) == (5, ())
    backup.restore(tmp_path / "b", tmp_path / "new")
    assert (tmp_path / "new" / snapshot.blob_name(sha256(PART))).read_bytes() == PART


def test_a_restored_coordinator_is_newer_than_all_its_devices_saw(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made at 2000, restored at 5000: the epoch is above 5000 even if the clock is dead (0) at the next start."""
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    backup.make_backup(state_dir, tmp_path / "b")
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    backup.restore(tmp_path / "b", tmp_path / "new")
    store = SqliteStore(tmp_path / "new/state.db")
    assert store.settings.next_epoch(0) == 5001
    store.close()


def test_a_clock_before_the_backup_is_told(state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that believes it is 1970 would get an epoch that all devices refuse."""
    backup.make_backup(state_dir, tmp_path / "b")
    monkeypatch.setattr(time, "time", lambda: 60.0)
    with pytest.raises(MachineError, match=r"clock is \d+ s before .* set it and try again"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "state"]


def test_lost_and_damaged_blobs_are_left_out_and_told(
    state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One is gone, one has other bytes: the rest is worth a backup, and it can be restored."""
    gone, damaged = (state_dir / snapshot.blob_name(sha256(data)) for data in MODELS[:2])
    gone.unlink()
    damaged.write_bytes(b"x")
    assert cli.main(["backup", str(tmp_path / "b"), "--state-dir", str(state_dir)]) == 0
    told = capsys.readouterr().out
    assert "3 blobs" in told
    assert all(path.name[:12] in told for path in (gone, damaged))
    assert cli.main(["restore", str(tmp_path / "b"), "--state-dir", str(tmp_path / "new")]) == 0
    assert "f1, 2 devices" in capsys.readouterr().out


def test_what_is_there_is_never_overwritten(
    state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 8: an existing file, a directory in use, the rest of a killed restore; an empty folder is fine."""
    target, file = tmp_path / "new", tmp_path / "b"
    file.write_text("precious")
    assert cli.main(["backup", str(file), "--state-dir", str(state_dir)]) == 8
    assert file.read_text() == "precious"
    file.unlink()
    assert cli.main(["backup", str(file), "--state-dir", str(state_dir)]) == 0
    assert cli.main(["restore", str(file), "--state-dir", str(state_dir)]) == 8
    assert "move it away" in capsys.readouterr().err
    (tmp_path / "new.tmp").mkdir()
    assert cli.main(["restore", str(file), "--state-dir", str(target)]) == 8
    assert "remove it" in capsys.readouterr().err
    (tmp_path / "new.tmp").rmdir()
    target.mkdir()
    assert cli.main(["restore", str(file), "--state-dir", str(target)]) == 0


def test_places_that_are_not_there_are_named(
    state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No folder for the file, no coordinator, no archive: one line each."""
    nowhere = tmp_path / "nowhere"
    assert cli.main(["backup", str(nowhere / "b"), "--state-dir", str(state_dir)]) == 3
    assert cli.main(["backup", str(tmp_path / "b"), "--state-dir", str(nowhere)]) == 4
    assert cli.main(["restore", str(nowhere), "--state-dir", str(tmp_path / "new")]) == 3
    assert capsys.readouterr().err.count("\n") == 3
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_one_backup_at_a_time(state_dir: Path, tmp_path: Path) -> None:
    """The second is told; a start meanwhile leaves the snapshot alone, and a later one removes what was left."""
    folder = snapshot.folder_of(state_dir)
    folder.mkdir()
    with snapshot.only_one(state_dir):
        with pytest.raises(ConflictError, match="another backup"):
            backup.make_backup(state_dir, tmp_path / "b")
        snapshot.drop_stale(state_dir)
        assert folder.exists()
    snapshot.drop_stale(state_dir)
    assert not folder.exists()


@pytest.mark.parametrize("point", ["backup.snapshot", "backup.write:3", "backup.sync", "backup.rename"])
@pytest.mark.parametrize(("kind", "error"), [("enospc", DiskFullError), ("eio", MachineError)])
def test_a_disk_that_fails_leaves_no_half_backup(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, kind: str, error: type[Exception]
) -> None:
    """One line, and neither file nor snapshot; the next try works."""
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
    with pytest.raises(error, match="cannot"):
        backup.make_backup(state_dir, tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["state"]
    assert not snapshot.folder_of(state_dir).exists()
    assert backup.make_backup(state_dir, tmp_path / "b").num_blobs == 5


@pytest.mark.parametrize("point", ["restore.write:3", "restore.sync:2", "restore.rename"])
@pytest.mark.parametrize(("kind", "error"), [("enospc", DiskFullError), ("eio", MachineError)])
def test_a_disk_that_fails_leaves_no_half_restore(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, kind: str, error: type[Exception]
) -> None:
    """One line, and no directory; the next try works."""
    backup.make_backup(state_dir, tmp_path / "b")
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
    with pytest.raises(error, match="cannot"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "state"]
    backup.restore(tmp_path / "b", tmp_path / "new")


# archives of strangers

Members = list[tuple[tarfile.TarInfo, bytes]]


def members_of(path: Path) -> Members:
    with tarfile.open(path) as tar:
        return [(member, tar.extractfile(member).read()) for member in tar.getmembers()]  # type: ignore[union-attr]


def write_members(path: Path, members: Members) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for member, data in members:
            tar.addfile(member, io.BytesIO(data))


def retyped(kind: bytes) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        members[1][0].type, members[1][0].linkname = kind, "/etc/passwd"
        return members

    return change


def renamed(name: str) -> Callable[[Members], Members]:
    def change(members: Members) -> Members:
        members[1][0].name = name
        return members

    return change


def flipped(members: Members) -> Members:
    member, data = members[2]
    return [*members[:2], (member, data[:-1] + bytes([data[-1] ^ 1])), *members[3:]]


HOSTILE: dict[str, Callable[[Members], Members]] = {
    "a symbolic link": retyped(tarfile.SYMTYPE),
    "a hard link": retyped(tarfile.LNKTYPE),
    "a device": retyped(tarfile.CHRTYPE),
    "a folder": retyped(tarfile.DIRTYPE),
    "a sparse file": retyped(tarfile.GNUTYPE_SPARSE),
    "a name that leads out": renamed("../version"),
    "an absolute name": renamed("/tmp/version"),
    "a long name": renamed("v" * 300),
    "no manifest": lambda members: members[1:],
    "another order": lambda members: [members[0], *members[:0:-1]],
    "a file less": lambda members: members[:-1],
    "another byte": flipped,
    "nothing": lambda members: [],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_archive_that_breaks_the_rules_is_refused(state_dir: Path, tmp_path: Path, kind: str) -> None:
    """One line that names the file; nothing is written anywhere."""
    backup.make_backup(state_dir, tmp_path / "b")
    write_members(tmp_path / "b", HOSTILE[kind](members_of(tmp_path / "b")))
    with pytest.raises(InputError, match="is not a whole backup"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "state"]


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "pki/../version", "blobs/ab/short", "lock", "state.db-wal", ""]
)
def test_a_manifest_may_list_only_what_a_backup_has(tmp_path: Path, name: str) -> None:
    """Names are known ones; the manifest alone is enough to refuse it."""
    entries = [archive.Entry(name=n, length=0, sha256=digest("")) for n in ("version", "state.db", name)]
    _write_manifest(tmp_path / "b", tuple(entries))
    with pytest.raises(InputError, match="which no backup has"):
        archive.extract(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_manifest_with_a_name_twice_or_a_blob_of_another_hash_is_refused(tmp_path: Path) -> None:
    """A blob's name is its hash; `version` stands there once."""
    version, database = (archive.Entry(name=n, length=0, sha256=digest("")) for n in ("version", "state.db"))
    blob = archive.Entry(name=snapshot.blob_name(digest("x")), length=0, sha256=digest("y"))
    for entries, match in (((version, database, version), "no name twice"), ((version,), "once"), ((blob,), "another")):
        _write_manifest(tmp_path / "b", entries)
        with pytest.raises(InputError, match=match):
            archive.extract(tmp_path / "b", tmp_path / "new")


def _write_manifest(path: Path, entries: tuple[archive.Entry, ...], **changes: object) -> None:
    manifest = archive.Manifest(format=archive.FORMAT, fedfit="0", created_s=0, federation="f1", files=entries)
    text = json.dumps({**to_map(manifest), **changes}).encode()
    member = tarfile.TarInfo("manifest.json")
    member.size = len(text)
    write_members(path, [(member, text)])


def test_a_newer_format_and_random_bytes_are_refused(tmp_path: Path) -> None:
    """What to read it with, or that it is none."""
    _write_manifest(tmp_path / "b", (), format=2)
    with pytest.raises(InputError, match="format 2, this fedfit reads 1"):
        archive.extract(tmp_path / "b", tmp_path / "new")
    for data in (b"", b"x", bytes(512), b"\xff" * 5000):
        (tmp_path / "b").write_bytes(data)
        with pytest.raises(InputError, match="is not a whole backup"):
            archive.extract(tmp_path / "b", tmp_path / "new")


def test_every_truncation_is_noticed(state_dir: Path, tmp_path: Path) -> None:
    """Cut at every 7,000 bytes until the end of the last file."""
    backup.make_backup(state_dir, tmp_path / "b")
    whole = (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "b") as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + last.size
    for length in [*range(0, end, 7000), end - 1]:
        (tmp_path / "cut").write_bytes(whole[:length])
        with pytest.raises(InputError, match="is not a whole backup"):
            backup.restore(tmp_path / "cut", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_database_that_is_none_is_refused(state_dir: Path, tmp_path: Path) -> None:
    """The hashes fit, the content does not."""
    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "version").write_text("fedfit-coordinator 1\n")
    (folder / "state.db").write_bytes(b"no database" * 100)
    files = tuple(archive.describe_file(folder / name, name) for name in ("version", "state.db"))
    manifest = archive.Manifest(format=archive.FORMAT, fedfit="0", created_s=0, federation="f1", files=files)
    archive.write(tmp_path / "b", manifest, folder)
    with pytest.raises(InputError, match=r"its state\.db is damaged"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    (folder / "version").write_text("fedfit-device 1\n")
    (folder / "state.db").write_bytes((state_dir / "state.db").read_bytes())
    files = tuple(archive.describe_file(folder / name, name) for name in ("version", "state.db"))
    archive.write(tmp_path / "b", dataclasses.replace(manifest, files=files), folder)
    with pytest.raises(MachineError, match="not to a fedfit coordinator"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    assert not (tmp_path / "new").exists()
