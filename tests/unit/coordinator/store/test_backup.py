"""A backup and a restored directory appear as a whole or not at all, and an archive of a stranger cannot do harm."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import stat
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rows import device_row, lease_row, model_row, round_row, run_row, update_row

from coordinator.cli import main as cli
from coordinator.state import STATE_KIND, STATE_VERSION
from coordinator.store import archive, backup, snapshot
from coordinator.store.sqlite import SqliteStore
from edge_client import durable, faults
from edge_client.errors import DiskFullError, InputError, MachineError

MODELS = [f"model {n}".encode() * 100 for n in range(3)]
PART = b"an update of an open round"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put_blob(state_dir: Path, data: bytes) -> Path:
    path = state_dir / snapshot.blob_name(sha256(data))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """A stopped coordinator in the third round of a run, with one update and with a blob that no row refers to."""
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


def test_a_restored_coordinator_equals_the_original(state_dir: Path, tmp_path: Path) -> None:
    """It has all rows, certificates and the five needed blobs (three models, settings, one update), not the sixth."""
    made_backup = backup.make_backup(state_dir, tmp_path / "b")
    assert (made_backup.num_blobs, made_backup.missing) == (5, ())
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


def test_a_prepared_temporary_file_does_not_expose_a_backup(state_dir: Path, tmp_path: Path) -> None:
    """Another user put a readable file, or a link to one, at the path that the backup has while it is written."""
    (tmp_path / "open").write_bytes(b"before")
    (tmp_path / ".b.tmp").write_bytes(b"")
    (tmp_path / ".b.tmp").chmod(0o666)
    (tmp_path / ".c.tmp").symlink_to(tmp_path / "open")
    for name in "bc":
        backup.make_backup(state_dir, tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).lstat().st_mode) == 0o600
    assert (tmp_path / "open").read_bytes() == b"before"


def test_a_blob_removed_after_the_snapshot_is_in_the_backup(state_dir: Path, tmp_path: Path) -> None:
    """The coordinator removes an update while the snapshot is packed: the link in the snapshot keeps it."""
    store = SqliteStore(state_dir / "state.db")
    snapshot.take(store, state_dir)
    store.rounds.freeze("r-1", 3, 1, "hash")
    store.close()
    (state_dir / snapshot.blob_name(sha256(PART))).unlink()
    made_backup = backup._pack(snapshot.folder_of(state_dir), tmp_path / "b")
    assert (made_backup.num_blobs, made_backup.missing) == (5, ())
    backup.restore(tmp_path / "b", tmp_path / "new")
    assert (tmp_path / "new" / snapshot.blob_name(sha256(PART))).read_bytes() == PART


def test_a_restored_coordinator_takes_a_higher_epoch(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backed up at 2000 and restored at 5000: the next epoch is 5001, even at a start with a dead clock (0)."""
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    backup.make_backup(state_dir, tmp_path / "b")
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    backup.restore(tmp_path / "b", tmp_path / "new")
    store = SqliteStore(tmp_path / "new/state.db")
    assert store.settings.next_epoch(0) == 5001
    store.close()


def test_a_clock_before_the_backup_is_refused(state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock shows 1970 would take an epoch that all devices refuse."""
    backup.make_backup(state_dir, tmp_path / "b")
    monkeypatch.setattr(time, "time", lambda: 60.0)
    with pytest.raises(MachineError, match=r"clock is \d+ s before .* set it and try again"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "state"]


def test_missing_and_damaged_blobs_are_left_out_and_reported(
    state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of five blobs is missing and one has other bytes: the backup holds three and can be restored."""
    missing, damaged = (state_dir / snapshot.blob_name(sha256(data)) for data in MODELS[:2])
    missing.unlink()
    damaged.write_bytes(b"x")
    assert cli.main(["backup", str(tmp_path / "b"), "--state-dir", str(state_dir)]) == 0
    output = capsys.readouterr().out
    assert "3 blobs" in output
    assert all(path.name[:12] in output for path in (missing, damaged))
    assert cli.main(["restore", str(tmp_path / "b"), "--state-dir", str(tmp_path / "new")]) == 0
    assert "f1, 2 devices" in capsys.readouterr().out


def test_nothing_is_overwritten(state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 8: an existing file, a directory in use, the rest of a killed restore. An empty folder is fine."""
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


def test_missing_paths_are_reported(state_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a folder for the file, a coordinator or an archive, the error is one line."""
    nowhere = tmp_path / "nowhere"
    assert cli.main(["backup", str(nowhere / "b"), "--state-dir", str(state_dir)]) == 3
    assert cli.main(["backup", str(tmp_path / "b"), "--state-dir", str(nowhere)]) == 4
    assert cli.main(["restore", str(nowhere), "--state-dir", str(tmp_path / "new")]) == 3
    assert capsys.readouterr().err.count("\n") == 3
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("point", ["backup.snapshot", "backup.write:3", "backup.sync", "backup.rename"])
@pytest.mark.parametrize(("kind", "error"), [("enospc", DiskFullError), ("eio", MachineError)])
def test_a_disk_that_fails_leaves_no_half_backup(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, kind: str, error: type[Exception]
) -> None:
    """The error is one line, neither file nor snapshot is left, and the next try succeeds."""
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
    """The error is one line, no directory is left, and the next try succeeds."""
    backup.make_backup(state_dir, tmp_path / "b")
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
    with pytest.raises(error, match="cannot"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "state"]
    backup.restore(tmp_path / "b", tmp_path / "new")


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
    """The error names the file, and nothing is written."""
    backup.make_backup(state_dir, tmp_path / "b")
    write_members(tmp_path / "b", HOSTILE[kind](members_of(tmp_path / "b")))
    with pytest.raises(InputError, match="is not a whole backup"):
        backup.restore(tmp_path / "b", tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "state"]


def test_every_truncated_archive_is_refused(state_dir: Path, tmp_path: Path) -> None:
    """It is truncated at every 7,000 bytes, and one byte before the end of the last file."""
    backup.make_backup(state_dir, tmp_path / "b")
    whole = (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "b") as tar:
        last = tar.getmembers()[-1]
    end = last.offset_data + last.size
    for length in [*range(0, end, 7000), end - 1]:
        (tmp_path / "truncated").write_bytes(whole[:length])
        with pytest.raises(InputError, match="is not a whole backup"):
            backup.restore(tmp_path / "truncated", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_archive_with_a_bad_state_is_refused(state_dir: Path, tmp_path: Path) -> None:
    """Its hashes are right, but it holds a broken database, or the state of a device."""
    folder = tmp_path / "forged"
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
