"""A call of one function in a process of its own, `python -m MODULE JOB.json RESULT.json`: both of its sides.

What is measured must not depend on what ran before, torch's profiler leaves tens of megabytes behind, and a model that
ends its process must not end another one. Covers: the process, its guards, its exit. Does not cover: what is measured
(`calibration`, `trial`). No torch.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edge_client.device import accelerator_environment, guard
from edge_client.errors import FedfitError, InputError, MachineError, NoSuchNameError, is_out_of_memory, torch_failure
from edge_client.measuring import exit_codes
from edge_client.records import from_map, to_map

__all__ = ["call", "serve", "stand_guard"]

J = TypeVar("J")

_TIMEOUT_S = 3600.0


def call(module: str, job: object, *, threads: int, what: str) -> Any:
    """The result of `job` as plain data; raises as `job` did, `MachineError`, or `MemoryError` if it needs too much."""
    env = {**os.environ, "FEDFIT_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory(prefix="fedfit-") as folder:
        job_path, out = Path(folder) / "job.json", Path(folder) / "result.json"
        job_path.write_text(json.dumps(to_map(job)), encoding="utf-8")
        command = [sys.executable, "-m", module, str(job_path), str(out)]
        try:
            process = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
                start_new_session=True,  # Ctrl-C in the terminal reaches us alone, and `run` then kills it
            )
        except subprocess.TimeoutExpired as error:
            raise MachineError(f"{what} did not end within {_TIMEOUT_S:g} s") from error
        _check(process, out, what)
        try:
            return json.loads(out.read_bytes())
        except (OSError, ValueError) as error:
            raise MachineError(f"{what} ended without a result: {error}") from error


def _check(process: subprocess.CompletedProcess[bytes], out: Path, what: str) -> None:
    """Raise what the other side raised, or an error that tells how the process ended."""
    code = process.returncode
    if code == 0:
        return
    if out.exists():  # the process reported its error
        why = json.loads(out.read_bytes())["error"]
        kinds = {
            InputError.exit_code: InputError,
            NoSuchNameError.exit_code: NoSuchNameError,
            exit_codes.OVER_BUDGET: MemoryError,
        }
        raise kinds[code](why) if code in kinds else MachineError(f"{what} failed: {why}")
    lines = [line for line in process.stderr.decode(errors="replace").splitlines() if not line.startswith("USDT:")]
    ended = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    raise MachineError(f"{what} ended with {ended}: {lines[-1][:300] if lines else 'it said nothing'}")


def serve(kind: type[J], function: Callable[[J], object], arguments: Sequence[str]) -> int:
    """Read the job, run `function` on it, write the result; returns the exit code. Nothing has loaded torch before."""
    job_path, out = Path(arguments[0]), Path(arguments[1])
    stand_guard()
    try:
        result = function(from_map(kind, json.loads(job_path.read_bytes()), where=kind.__name__))
    except FedfitError as error:
        return _fail(out, error.exit_code, str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        guard.lift_limit()  # what was in the way is free again; to say so takes a little
        return _fail(out, exit_codes.OVER_BUDGET, str(error) or "an allocation failed")
    except (ImportError, OSError) as error:
        failure = torch_failure(error)
        if failure is None:
            raise
        return _fail(out, failure.exit_code, str(failure))
    return _write(out, 0, to_map(result))


def _fail(out: Path, code: int, why: str) -> int:
    return _write(out, code, {"error": " ".join(why.split())[:2000]})


def _write(out: Path, code: int, result: object) -> int:
    """Write the result; returns the exit code, another one if the disk does not take the result and nothing is left."""
    try:
        out.write_text(json.dumps(result), encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):
            out.unlink(missing_ok=True)
        print(f"cannot write {out}: {error.strerror}", file=sys.stderr)
        return exit_codes.RESULT_UNWRITTEN
    return code


def stand_guard() -> None:
    """Protect the device as a worker does, before torch is loaded."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    parent = os.environ.get("FEDFIT_PARENT_PID", "")
    guard.die_with_parent(int(parent) if parent.isdigit() else None)
    guard.pin_malloc()
    guard.raise_oom_score()
    accelerator_environment.prepare()
