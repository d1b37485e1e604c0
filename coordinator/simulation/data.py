"""What the virtual devices of a simulation share: opened, checked, copied once and divided, before anything is trained.

`python -m coordinator.simulation.data` does it, because it needs numpy and the coordinator loads none: one JSON request
on its input, one JSON answer on its output.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.simulation.run_options import Missing
from edge_client import durable, errors
from edge_client.config.run_file import RunFile
from edge_client.data import registry as data
from edge_client.errors import FedfitError, InputError, MachineError

__all__ = ["Prepared", "describe", "main", "prepare"]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """The data of a simulation."""

    path: str  # all samples, training and test
    parts: str  # which of them are whose
    sizes: tuple[int, ...]  # training samples of each device
    num_test: int  # of the test set that all share


def describe(text: str, partition: str) -> Missing:
    """The shape of a sample and the classes of the data named `text`; raises what is wrong with it."""
    try:
        data.split_source(text)
        data.parse_partition(partition)
    except FedfitError as error:
        raise InputError(str(error)) from None
    answer = _ask({"do": "describe", "data": text, "partition": partition})
    shape = answer["shape"]
    return Missing(shape=tuple(shape) if shape is not None else None, classes=tuple(answer["classes"]))


def prepare(file: RunFile, folder: Path) -> Prepared:
    """Copy and divide the data of `file.simulate` into `folder`; raises if a device would be without any."""
    section, model = file.simulate, file.model
    assert section is not None
    with durable.disk_errors(f"cannot write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    answer = _ask(
        {
            "do": "prepare",
            "data": section.data,
            "partition": section.partition,
            "devices": section.devices,
            "seed": file.seed,
            "classes": list(file.classes),
            "shape": list(model.input) if model is not None else None,
            "folder": str(folder),
        }
    )
    return Prepared(
        path=answer["path"], parts=answer["parts"], sizes=tuple(answer["sizes"]), num_test=answer["num_test"]
    )


def _ask(request: Json) -> Json:
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.simulation.data"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        start_new_session=True,  # Ctrl-C ends us, and we end it: it has nothing to say about that
    )
    try:
        answer: Json = json.loads(done.stdout)
    except ValueError:
        raise MachineError(f"reading the data ended with exit code {done.returncode}") from None
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer


def main() -> int:
    """Answer the request."""
    request = json.load(sys.stdin)
    try:
        with durable.relaxed(), durable.disk_errors("cannot copy the data"):
            answer = _describe(request) if request["do"] == "describe" else _prepare(request)
    except FedfitError as error:
        named = next(cls for cls in type(error).__mro__ if cls.__name__ in errors.__all__)
        answer = {"error": named.__name__, "message": str(error)}
    json.dump(answer, sys.stdout)
    return 0


def _describe(request: Json) -> Json:
    from edge_client.data.openers import describe_data

    facts = describe_data(request["data"], partition=request["partition"])
    return {"shape": facts.shape, "classes": facts.classes}


def _prepare(request: Json) -> Json:
    from edge_client.data.data_cache import cache_arrays, write_partition
    from edge_client.data.openers import describe_data

    folder, partition, seed = Path(request["folder"]), request["partition"], request["seed"]
    shape = tuple(request["shape"]) if request["shape"] is not None else None
    path = cache_arrays(
        request["data"], folder, partition=partition, classes=tuple(request["classes"]), shape=shape
    )  # one test set for all seeds: their results can be compared
    parts = folder / f"parts-{path.stem}-{request['devices']}-{seed}-{_plain(partition)}.npz"
    cached = f"npz:{path}"
    division = write_partition(cached, partition, request["devices"], seed, parts)
    num_test = describe_data(cached).num_test
    return {"path": str(path), "parts": str(parts), "sizes": division.sizes, "num_test": num_test}


def _plain(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".-" else "_" for c in text)[:60]


if __name__ == "__main__":
    sys.exit(main())
