"""Durable writes, and the state directory's lock."""

from __future__ import annotations

import errno
import hashlib
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from edge_client import durable, faults
from edge_client.errors import ConflictError, DiskFullError, MachineError


def _strike(monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    monkeypatch.setattr(faults, "_faults", [faults._parse(text) for text in texts])


@pytest.mark.parametrize("point", ["write", "sync", "rename"])
@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_failed_write_leaves_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, kind: str
) -> None:
    """Every step before the rename."""
    path = tmp_path / "file"
    durable.write_bytes(path, b"old", point="p")
    _strike(monkeypatch, f"{kind}:p.{point}")
    with pytest.raises(OSError, match="injected"):
        durable.write_bytes(path, b"new", point="p")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_whole_file_is_written_for_its_owner(tmp_path: Path) -> None:
    """Mode 0600 unless said otherwise; the new content replaces the old one."""
    path = tmp_path / "file"
    durable.write_bytes(path, b"first, longer", point="p")
    durable.write_bytes(path, b"second", point="p")
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ENOSPC, "full"), DiskFullError),
        (OSError(errno.EDQUOT, "quota"), DiskFullError),
        (OSError(errno.EIO, "broken"), MachineError),
    ],
)
def test_errors_of_the_disk_become_ours(error: Exception, kind: type[MachineError]) -> None:
    """A full disk passes alone; the rest does not."""
    with pytest.raises(MachineError, match="cannot do it") as caught, durable.disk_errors("cannot do it"):
        raise error
    assert type(caught.value) is kind


def test_a_state_directory_is_held_by_one_process(tmp_path: Path) -> None:
    """A second claim conflicts; after the first is closed it works; the lock is not inherited by children."""
    first = durable.claim_state_dir(tmp_path / "s", kind="device", version=1)
    assert not os.get_inheritable(first)
    with pytest.raises(ConflictError, match="already runs"):
        durable.claim_state_dir(tmp_path / "s", kind="device", version=1)
    os.close(first)
    os.close(durable.claim_state_dir(tmp_path / "s", kind="device", version=2))


@pytest.mark.parametrize(
    ("marker", "expected"),
    [
        ("fedfit-coordinator 1\n", "belongs to"),
        ("fedfit-device 2\n", "newer"),
        ("", "belongs"),
        ("fedfit-device ²", "be"),
    ],
)
def test_a_foreign_or_newer_directory_is_refused_and_not_held(tmp_path: Path, marker: str, expected: str) -> None:
    """And its marker stays as it was."""
    (tmp_path / "version").write_text(marker, encoding="utf-8")
    (tmp_path / "lock").touch()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        with pytest.raises(MachineError, match=expected):
            durable.claim_state_dir(tmp_path, kind="device", version=1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "version").read_text(encoding="utf-8") == marker


def test_somebody_elses_folder_is_not_taken(tmp_path: Path) -> None:
    """Not empty, and no marker of ours."""
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(MachineError, match="was not made by fedfit"):
        durable.claim_state_dir(tmp_path, kind="device", version=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["photo.jpg"]


def test_the_owners_file_may_be_there_first(tmp_path: Path) -> None:
    """A device.toml alone is no foreign folder if the caller says so; with something else beside it, it is."""
    (tmp_path / "device.toml").touch()
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(MachineError, match="was not made by fedfit"):
        durable.claim_state_dir(tmp_path, kind="device", version=1, may_hold=("device.toml",))
    (tmp_path / "photo.jpg").unlink()
    os.close(durable.claim_state_dir(tmp_path, kind="device", version=1, may_hold=("device.toml",)))


def test_folders_are_made_with_those_above_them_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent of each new one is synced; a folder that is there costs nothing."""
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_dir", synced.append)
    for _ in range(2):
        durable.make_dir(tmp_path / "work" / "lease")
    assert synced == [tmp_path, tmp_path / "work"]
    assert (tmp_path / "work" / "lease").stat().st_mode & 0o777 == 0o700


def test_a_claim_that_died_before_its_marker_is_repeated(tmp_path: Path) -> None:
    """The lock file alone is ours."""
    (tmp_path / "lock").touch()
    os.close(durable.claim_state_dir(tmp_path, kind="device", version=1))
    assert (tmp_path / "version").read_text() == "fedfit-device 1\n"


def test_the_hash_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    """Longer than one piece."""
    data = os.urandom(600_000)
    (tmp_path / "f").write_bytes(data)
    assert durable.sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()
    assert durable.free_bytes(tmp_path) > 0


def test_a_simulation_syncs_nothing_and_writes_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file and its folder: two syncs before and after, none meanwhile."""
    synced: list[int] = []
    monkeypatch.setattr(durable.os, "fsync", synced.append)
    durable.write_bytes(tmp_path / "a", b"1", point="test")
    with durable.relaxed():
        durable.write_bytes(tmp_path / "b", b"2", point="test")
        durable.sync_dir(tmp_path)
    durable.write_bytes(tmp_path / "c", b"3", point="test")
    assert len(synced) == 4
    assert [(tmp_path / name).read_bytes() for name in "abc"] == [b"1", b"2", b"3"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")
def test_root_acts_as_the_owner_of_a_services_directory(tmp_path: Path) -> None:
    """What is made there belongs to the service; afterwards root is root again."""
    with tempfile.TemporaryDirectory() as name:  # below tmp_path nobody else may look
        folder = Path(name)
        os.chown(folder, 12_345, 12_346)
        with durable.as_owner(folder):
            durable.write_bytes(folder / "file", b"x", point="test")
        found = (folder / "file").stat()
    assert (found.st_uid, found.st_gid) == (12_345, 12_346)
    assert (os.geteuid(), os.getegid()) == (0, 0)
    with durable.as_owner(tmp_path / "none"):
        assert os.geteuid() == 0


def test_root_does_not_run_in_the_directory_of_a_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named by its user; anybody else's directory is used as before."""
    owner = pwd.getpwuid(tmp_path.stat().st_uid).pw_name
    durable.check_not_root(tmp_path, "fedfit-device")
    durable.check_not_root(tmp_path / "none", owner)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(MachineError, match=f"sudo systemctl start {owner}"):
        durable.check_not_root(tmp_path, owner)
