"""The folder of a simulated run: its run file, its results, and until it is finished the state for a restart.

    run.toml       the resolved run file; a run is finished or resumed only with the same one
    rounds.jsonl   one line per round, as soon as its model was evaluated
    similarity.json  the similarity of the devices' models (`similarity_record`), if they were compared
    state/, .simulation-data/  of the coordinator and its virtual devices, while the run is not finished
    result.json    the output of the command; with model.bin, the last model, it marks a finished run

Covers: these files, and whether a folder may be used. Does not cover: their contents (`simulation`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from edge_client import durable
from edge_client.config.run_file import RunFile, load_run_file
from edge_client.config.tables import to_table
from edge_client.config.toml_text import toml_value
from edge_client.errors import ConflictError, InputError

__all__ = ["DATA", "LOG", "RESULT", "ROUNDS", "RUN", "SIMILARITY", "STATE", "RunDirectory", "flat"]

Json = dict[str, Any]

RUN, ROUNDS, RESULT, STATE = "run.toml", "rounds.jsonl", "result.json", "state"
SIMILARITY = "similarity.json"
# a folder beside the run file: the data that the devices share while they train; its name is never a device's
DATA = ".simulation-data"
LOG = "log.txt"  # in `state`
_MAX_SHOWN = 5  # differences


class RunDirectory:
    """The files of one run in the folder `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = path / STATE
        self._run = path / RUN
        self._rounds = path / ROUNDS
        self._result = path / RESULT
        self._similarity = path / SIMILARITY
        self.model = path / "model.bin"

    def check(self, file: RunFile) -> Json | None:
        """The result of a finished run of the same file; None if it is to be begun or resumed.

        Raises `ConflictError` if the folder belongs to something else, or to a run of another file.
        """
        with durable.disk_errors(f"cannot look at {self.path}"):
            if self._run.exists():
                self._check_same(file)
            elif self.path.exists() and {entry.name for entry in self.path.iterdir()} - {DATA, self.state.name}:
                raise ConflictError(f"{self.path} is not empty and holds no simulation; name another folder with --out")
            return json.loads(self._result.read_bytes()) if self._result.exists() else None

    def _check_same(self, file: RunFile) -> None:
        try:
            existing = load_run_file(self._run)
        except InputError as error:
            raise ConflictError(f"{error}; name another folder with --out") from None
        before, now = dict(flat(to_table(existing))), dict(flat(to_table(file)))
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            differences = (f"{key}: {_shown(before, key)} there, {_shown(now, key)} now" for key in changed)
            shown = "; ".join(itertools.islice(differences, _MAX_SHOWN))
            more = f"; and {len(changed) - _MAX_SHOWN} more" if len(changed) > _MAX_SHOWN else ""
            raise ConflictError(
                f"{self.path} holds a run of another file ({shown}{more}); name another folder with --out, or remove it"
            )

    def begin(self, file: RunFile) -> None:
        """Write the run file, unless the run was begun before."""
        with durable.disk_errors(f"cannot write to {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._run.exists():
                text = "".join(f"{key} = {toml_value(value)}\n" for key, value in to_table(file).items())
                durable.write_bytes(self._run, text.encode(), point="simulate.run", mode=0o644)

    def leave(self) -> None:
        """Remove what a run left that ended before its first round, so that another run may use the folder."""
        if self._rounds.exists():
            return
        shutil.rmtree(self.path / DATA, ignore_errors=True)
        with contextlib.suppress(OSError):
            if self._run.exists():  # its state is a simulation's
                shutil.rmtree(self.state)
                self._run.unlink()
            self.path.rmdir()  # unless there is something else

    def begin_anew(self) -> None:
        """Remove the rounds and the state of a run that cannot be resumed; the state directory itself stays locked."""
        with durable.disk_errors(f"cannot clean up {self.path}"):
            self._rounds.unlink(missing_ok=True)
            self._similarity.unlink(missing_ok=True)
            for entry in self.state.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name not in ("lock", "version"):
                    entry.unlink()

    def rounds(self) -> list[Json]:
        """The rounds so far; a line that a full disk cut off is dropped."""
        with durable.disk_errors(f"cannot read {self._rounds}"):
            data = self._rounds.read_bytes() if self._rounds.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            if whole != data:
                self._rounds.write_bytes(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def add_round(self, line: Json) -> None:
        """Append the line of a round."""
        with durable.disk_errors(f"cannot write to {self._rounds}"), open(self._rounds, "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

    def keep_similarity(self, text: str) -> None:
        """Write the newest similarities of the models."""
        with durable.disk_errors(f"cannot write {self._similarity}"):
            durable.write_bytes(self._similarity, text.encode() + b"\n", point="simulate.similarity", mode=0o644)

    def finish(self, result: Json, model: Path) -> None:
        """Write the result and the model, and remove the state."""
        with durable.disk_errors(f"cannot write to {self.path}"):
            if model.exists():
                copy = self.path / ".model.bin.tmp"
                shutil.copyfile(model, copy)
                durable.publish(copy, self.model, point="simulate.model")
            text = json.dumps(result, indent=1) + "\n"
            durable.write_bytes(self._result, text.encode(), point="simulate.result", mode=0o644)
        shutil.rmtree(self.state, ignore_errors=True)


def flat(table: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a table and of its sections, as `section.key`, with their values."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value


def _shown(table: Mapping[str, Any], key: str) -> str:
    return toml_value(table[key]) if key in table else "nothing"
