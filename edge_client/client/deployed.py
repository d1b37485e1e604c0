"""The model that a coordinator has deployed to this device, in `STATE/deployed`, and how another one replaces it.

    current.onnx     what programs of this device may use; whole at every moment, replaced by a rename
    previous.onnx    what it replaced
    record.json      what these are, what is on its way, and what became of the newest deployment
    test/            job, result and log of the newest self-test; may vanish

The order that makes a crash harmless: the record names what is wanted, then the old file gets its second name, then the
new file its place, then the record says so. `repair` finds out after a restart how far that went.
Covers: files. Does not cover: deciding, downloading and testing (`deploying`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from edge_client import durable
from edge_client.errors import InputError, PayloadError
from edge_client.records import Count, from_map, to_map
from edge_client.wire.messages import Deploy, Deployed

__all__ = ["DeployedFolder", "Record", "current_path", "folder_of", "model_path", "read_record"]

log = logging.getLogger(__name__)

_LONGEST_BYTES = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What is known of the files; every field is empty on a device that never received a model."""

    current: Deploy | None = None
    previous: Deploy | None = None
    wanted: Deploy | None = None
    attempts: Count = 0  # self-tests of what is wanted that have begun
    outcome: Deployed | None = None  # of the newest deployment that has ended


def folder_of(state_dir: Path) -> Path:
    """The folder of the deployed model, whether it exists or not."""
    return state_dir / "deployed"


def current_path(state_dir: Path) -> Path:
    """The path of the model to use, whether it exists or not."""
    return folder_of(state_dir) / "current.onnx"


def model_path(state_dir: Path) -> Path:
    """The path of the model to use; raises `InputError` if there is none."""
    path = current_path(state_dir)
    if not durable.is_there(path):
        raise InputError(
            f"no model is deployed on this device ({path} does not exist); on the server: coordinator run deploy RUN"
        )
    return path


def read_record(folder: Path) -> Record:
    """Read the record; an empty one if the file is missing or invalid."""
    try:
        with open(folder / "record.json", "rb") as file:
            return from_map(Record, json.loads(file.read(_LONGEST_BYTES)))
    except FileNotFoundError:
        return Record()
    except (OSError, ValueError, RecursionError, PayloadError) as error:
        log.error("%s is not readable (%s); the model beside it stays", folder / "record.json", error)
        return Record()


class DeployedFolder:
    """The folder, for the daemon, which holds the lock of the state directory."""

    def __init__(self, state_dir: Path) -> None:
        self.folder = folder_of(state_dir)
        self.current, self._previous = self.folder / "current.onnx", self.folder / "previous.onnx"
        self.record = read_record(self.folder)

    def set_wanted(self, deploy: Deploy) -> None:
        """Record that another model is to be used; durable when this returns."""
        durable.make_dir(self.folder)
        self._write(replace(self.record, wanted=deploy, attempts=0))

    def begin_test(self) -> None:
        """Count a self-test before it begins: it may crash the device."""
        self._write(replace(self.record, attempts=self.record.attempts + 1))

    def end_test(self, *, passed: bool) -> None:
        """Take back the count of a self-test that passed or was stopped on purpose: a later crash is not its fault."""
        self._write(replace(self.record, attempts=0 if passed else max(0, self.record.attempts - 1)))

    def end(self, outcome: Deployed) -> None:
        """Record how the newest deployment ended, without a change of files."""
        self._write(replace(self.record, wanted=None, attempts=0, outcome=outcome))

    def swap(self, blob: Path) -> bool:
        """Install a tested file; False if the installed file is damaged, and the previous one was restored."""
        wanted = self.record.wanted
        assert wanted is not None
        if self._hash(self.current) != wanted.sha256:
            if self.record.current is not None and self.current.exists():
                self._name_also(self.current, self._previous)
            durable.publish(blob, self.current, point="deployed.current")
        if self._hash(self.current) != wanted.sha256:  # a disk that does not keep what it is given
            self._restore(wanted)
            return False
        self._activated(wanted)
        return True

    def adopt_current(self, deploy: Deploy) -> bool:
        """Take a deployment of the same file that is in use; True if there is nothing to fetch."""
        known = self.record.current
        if known is None or known.sha256 != deploy.sha256 or self._hash(self.current) != deploy.sha256:
            return False
        active = Deployed(deployment=deploy.deployment, state="active")
        self._write(replace(self.record, current=deploy, wanted=None, attempts=0, outcome=active))
        return True

    def repair(self) -> None:
        """Make the record agree with the files after a start, whatever ended the process before."""
        record = self.record
        if record.current is None and record.wanted is None:
            return
        sha256 = self._hash(self.current)
        if record.wanted is not None and sha256 == record.wanted.sha256:
            self._activated(record.wanted)  # tested and in its place, but not written down
        elif record.current is not None and sha256 != record.current.sha256:
            self._restore(record.current)

    def _activated(self, deploy: Deploy) -> None:
        active = Deployed(deployment=deploy.deployment, state="active")
        self._write(Record(current=deploy, previous=self.record.current, outcome=active))

    def _restore(self, bad: Deploy) -> None:
        """Replace the damaged current file by the previous one if that is intact, or else remove it."""
        record = self.record
        known = {deploy.sha256: deploy for deploy in (record.previous, record.current) if deploy is not None}
        back = known.get(self._hash(self._previous) or "")
        if back is not None:
            self._name_also(self._previous, self.current)
            replacement = f"run {back.run} version {back.version} is in use again"
        else:
            self.current.unlink(missing_ok=True)
            durable.sync_dir(self.folder)
            replacement = "there is no other one"
        detail = f"{self.current} is damaged on this device's disk; {replacement}"
        log.error("%s", detail)
        damaged = Deployed(deployment=bad.deployment, state="rolled_back", code="damaged", detail=detail)
        wanted = None if record.wanted == bad else record.wanted
        self._write(replace(record, current=back, previous=None, wanted=wanted, attempts=0, outcome=damaged))

    def _name_also(self, source: Path, target: Path) -> None:
        """Link a file under a second name and replace what had it; a copy where the file system has no links."""
        temporary = target.with_name(f".{target.name}.tmp")
        temporary.unlink(missing_ok=True)
        try:
            try:
                os.link(source, temporary)
            except OSError:
                shutil.copyfile(source, temporary)
            durable.publish(temporary, target, point="deployed.name")
        finally:
            temporary.unlink(missing_ok=True)  # half a copy; and a rename between two names of one file does nothing

    def _hash(self, path: Path) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return durable.sha256_file(path)
        return None

    def _write(self, record: Record) -> None:
        path = self.folder / "record.json"
        durable.write_bytes(path, json.dumps(to_map(record)).encode(), point="deployed.record")
        self.record = record
