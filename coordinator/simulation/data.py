"""What the virtual devices of a simulation share: opened, checked, copied once and divided, before anything is trained.

`python -m coordinator.simulation.data` does it, because it needs numpy and the coordinator loads none: one JSON request
on its input, one JSON answer on its output. Requests and answers are records on both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coordinator.aggregation.jobs import Failure
from coordinator.simulation.run_options import Missing
from edge_client import durable, records
from edge_client.config.run_file import RunFile
from edge_client.data import registry as data
from edge_client.errors import FedfitError, InputError, MachineError
from edge_client.methods import registry as methods

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Prepared", "describe", "main", "prepare"]

A = TypeVar("A")

_HELD_OUT = 0x5A3D  # keeps the draw of shared samples apart from the partition's
_HELD_OUT_PARTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The data of a simulation."""

    path: str  # all samples, training and test
    parts: str  # which of them are whose
    sizes: tuple[int, ...]  # training samples of each device
    num_test: int  # of the test set that all share
    shared: str = ""  # training samples that no device has, for a method that needs shared ones


@dataclass(frozen=True, slots=True, kw_only=True)
class _Describe:
    """Asks for the shape and the classes of data; the answer is a `Missing`."""

    data: str
    partition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepare:
    """Asks for data to be copied and divided; the answer is a `Prepared`."""

    data: str
    partition: str
    devices: int
    seed: int
    classes: tuple[str, ...]
    shape: tuple[int, ...] | None
    folder: str
    num_held_out: int = 0  # training samples that no device gets: the method shares them


_REQUESTS: dict[str, type[_Describe | _Prepare]] = {"describe": _Describe, "prepare": _Prepare}


def describe(text: str, partition: str) -> Missing:
    """The shape of a sample and the classes of the data named `text`; raises what is wrong with it."""
    try:
        data.split_source(text)
        data.parse_partition(partition)
    except FedfitError as error:
        raise InputError(str(error)) from None
    return _ask(_Describe(data=text, partition=partition), Missing)


def prepare(file: RunFile, folder: Path) -> Prepared:
    """Copy and divide the data of `file.simulate` into `folder`; raises if a device would be without any."""
    section, model = file.simulate, file.model
    assert section is not None
    with durable.disk_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    request = _Prepare(
        data=section.data,
        partition=section.partition,
        devices=section.devices,
        seed=file.seed,
        classes=file.classes,
        shape=model.input if model is not None else None,
        folder=str(folder),
        num_held_out=_num_held_out(file),
    )
    return _ask(request, Prepared)


def _num_held_out(file: RunFile) -> int:
    if not str(file.method.parameters.get("public", "")).startswith("held-out:"):
        return 0
    rules = methods.knowledge(file.method.name, file.method.parameters)
    return rules.max_rows if rules is not None else 0


def _ask(request: _Describe | _Prepare, answer: type[A]) -> A:
    name = next(name for name, kind in _REQUESTS.items() if kind is type(request))
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.simulation.data"],
        input=json.dumps({"request": name, **records.to_map(request)}),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        start_new_session=True,  # Ctrl-C ends us, and we end it: it has nothing to say about that
    )
    try:
        fields = json.loads(done.stdout)
        is_ok = fields.pop("ok")
    except (ValueError, KeyError):
        raise MachineError(f"reading the data ended with exit code {done.returncode}") from None
    if not is_ok:
        raise records.from_map(Failure, fields, where="answer about the data").error()
    return records.from_map(answer, fields, where="answer about the data")


def main() -> int:
    """Answer the request."""
    fields: dict[str, Any] = json.load(sys.stdin)
    request = records.from_map(_REQUESTS[fields.pop("request")], fields, where="request about the data")
    answer: Missing | Prepared | Failure
    try:
        with durable.relaxed(), durable.disk_errors("cannot copy the data"):
            answer = _described(request) if isinstance(request, _Describe) else _prepared(request)
    except FedfitError as error:
        answer = Failure.of(error)
    json.dump({"ok": not isinstance(answer, Failure), **records.to_map(answer)}, sys.stdout)
    return 0


def _described(request: _Describe) -> Missing:
    from edge_client.data.openers import describe_data

    facts = describe_data(request.data, partition=request.partition)
    return Missing(shape=facts.shape, classes=facts.classes)


def _prepared(request: _Prepare) -> Prepared:
    from edge_client.data.data_cache import cache_arrays, write_partition
    from edge_client.data.openers import describe_data

    folder, partition = Path(request.folder), request.partition
    path = cache_arrays(
        request.data, folder, partition=partition, classes=request.classes, shape=request.shape
    )  # one test set for all seeds: their results can be compared
    kept_back = f"-without-{request.num_held_out}" if request.num_held_out else ""
    parts = folder / f"parts-{path.stem}-{request.devices}-{request.seed}-{_plain(partition)}{kept_back}.npz"
    cached = f"npz:{path}"
    without, shared = _held_out(cached, request, folder)
    division = write_partition(cached, partition, request.devices, request.seed, parts, without=without)
    num_test = describe_data(cached).num_test
    return Prepared(path=str(path), parts=str(parts), sizes=tuple(division.sizes), num_test=num_test, shared=shared)


def _held_out(text: str, request: _Prepare, folder: Path) -> tuple[NDArray[np.int64] | None, str]:
    """The positions of the training samples that the method shares, a fifth at most, and a file with them."""
    if not request.num_held_out:
        return None, ""
    import numpy as np

    from edge_client.data.openers import open_named

    train = open_named(text, request.classes)
    total = len(train.labels.values)
    rng = np.random.Generator(np.random.PCG64([request.seed, _HELD_OUT]))
    chosen = np.sort(rng.permutation(total)[: min(request.num_held_out, total // _HELD_OUT_PARTS)])
    shape = train.shape or request.shape
    assert shape is not None  # of the copy, which has one
    rows, _ = train.rows(chosen, shape)
    path = folder / f"shared-{Path(text).stem}-{len(chosen)}-{request.seed}.npz"
    np.savez(path, x=rows.take(np.arange(len(chosen))), y=train.labels.values[chosen])
    return chosen, str(path)


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text)[:60]


if __name__ == "__main__":
    sys.exit(main())
