"""Workers as the daemon sees them: how they end, and what may be sent about it."""

from __future__ import annotations

import json
import select
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rows import PLAN, digest

from edge_client.client import workers
from edge_client.client.events import Event, Finished, WorkerDone, WorkerFailed, WorkerProgress
from edge_client.records import Ceiling, to_map
from edge_client.wire.messages import Decline, context_up, open_message, seal_message
from edge_client.worker import live_files

KEY = bytes(32)
TRIAL = live_files.Trial(key=digest("model"), budget_bytes=7, plan=replace(PLAN, training_bytes=5))
EXCEEDED = Ceiling(key=digest("model"), training_bytes=5, budget_bytes=7)
SCRIPT = f"""
import json, os, sys, pathlib
here = pathlib.Path(sys.argv[1])
def say(line): os.write(int(os.environ['FEDFIT_PROGRESS_FD']), line)
def plan(): (here / 'plan.json').write_text({json.dumps(to_map(TRIAL))!r})
"""


def _launch(code: str) -> workers.Launch:
    """Workers that are a Python with this code."""
    return partial(workers.spawn, command=(sys.executable, "-c", code))


def _run(folder: Path, code: str, root: Path = Path("/")) -> list[Event]:
    """A worker that runs `code` in its folder; `say` writes a progress line, `plan` the plan of `TRIAL`."""
    worker = workers.Worker("lease-1", folder, _launch(SCRIPT + code), root=root)
    events: list[Event] = []
    ended = False
    while not ended:
        select.select([worker.progress_fd], [], [], 20)
        new, ended = worker.read()
        events += new
    return events


def _failure(folder: Path, code: str, root: Path = Path("/")) -> WorkerFailed:
    last = _run(folder, code, root)[-1]
    assert isinstance(last, WorkerFailed)
    return last


def test_a_worker_that_left_its_update_is_done(tmp_path: Path) -> None:
    """Exit code 0, and the update's file has the length that its manifest says."""
    told = {"sha256": digest("u"), "length": 3, "num_samples": 7}
    (tmp_path / "update.bin").write_bytes(b"abc")
    (tmp_path / "update.json").write_text(json.dumps(told))
    assert _run(tmp_path, "") == [WorkerDone("lease-1", Finished(**told))]


def test_a_worker_that_goes_over_its_budget_leaves_what_it_tried(tmp_path: Path) -> None:
    """Then it is not final; the plan of an earlier worker in the same folder is not taken for its own."""
    failed = _failure(tmp_path, "plan(); sys.exit(75)")
    assert (failed.code, failed.final, failed.exceeded) == ("over_budget", False, EXCEEDED)
    failed = _failure(tmp_path, "sys.exit(75)")
    assert (failed.code, failed.final, failed.exceeded) == ("over_budget", True, None)
    failed = _failure(tmp_path, "plan(); sys.exit(1)")
    assert (failed.code, failed.final, failed.exceeded) == ("crashed", False, None)


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [(3, 4, "over_budget"), (3, 3, "crashed"), (None, None, "over_budget")],
    ids=["killed by the kernel", "killed by a person", "not told"],
)
def test_a_worker_that_the_kernel_killed_for_want_of_memory_went_over_its_budget(
    tmp_path: Path, before: int | None, after: int | None, code: str
) -> None:
    """The kernel's own count tells; where it has none, SIGKILL is taken for it, but never before there is a plan."""
    vmstat = tmp_path / "root/proc/vmstat"
    vmstat.parent.mkdir(parents=True)
    if before is not None:
        vmstat.write_text(f"oom_kill {before}\n")
    count = f"pathlib.Path({str(vmstat)!r}).write_text('oom_kill {after}\\n')\n" if after is not None else ""
    failed = _failure(tmp_path, count + "plan(); os.kill(os.getpid(), 9)", tmp_path / "root")
    assert (failed.code, failed.final) == (code, False)
    assert failed.exceeded == (EXCEEDED if code == "over_budget" else None)
    failed = _failure(tmp_path, "os.kill(os.getpid(), 9)", tmp_path / "root")
    assert (failed.code, failed.final, failed.exceeded) == ("crashed", False, None)


def test_a_worker_that_we_killed_did_not_run_out_of_memory(tmp_path: Path) -> None:
    """It was asked to end and did not in time."""
    code = "import signal; signal.signal(15, signal.SIG_IGN); plan(); say(b'x'); signal.pause()"
    worker = workers.Worker("lease-1", tmp_path, _launch(SCRIPT + code), root=tmp_path)
    select.select([worker.progress_fd], [], [], 20)
    worker.stop(0.0)
    assert worker.overdue(100.0)
    while True:
        events, ended = worker.read()
        if ended:
            break
        select.select([worker.progress_fd], [], [], 20)
    (failed,) = events
    assert isinstance(failed, WorkerFailed)
    assert (failed.code, failed.exceeded) == ("crashed", None)


def test_a_declining_worker_names_its_reason(tmp_path: Path) -> None:
    """In error.json; a reason that programs could not compare becomes `declined`."""
    write = "(here / 'error.json').write_text(json.dumps({'code': %r, 'detail': 'why'})); sys.exit(76)"
    failed = _failure(tmp_path, write % "nothing_fits")
    assert (failed.code, failed.detail) == ("nothing_fits", "why")
    assert _failure(tmp_path, write % "Not a code!").code == "declined"


def test_what_a_worker_warns_of_is_known_when_it_has_ended(tmp_path: Path) -> None:
    """Its own lines with that level, not what it says otherwise; the log goes with the lease."""
    code = "print('INFO x: fine'); print('WARNING data: a.png cannot be decoded'); sys.exit(1)"
    script = "import sys\n" + code
    worker = workers.Worker("lease-1", tmp_path, _launch(script))
    while not worker.read()[1]:
        select.select([worker.progress_fd], [], [], 20)
    assert worker.warnings() == ["WARNING data: a.png cannot be decoded"]


@pytest.mark.parametrize("text", ["\\ud800" * 2000, "\\u6f22" * 2000, "\U0001f525" * 2000], ids=["half", "3", "4"])
def test_whatever_a_worker_leaves_its_failure_can_be_sent(tmp_path: Path, text: str) -> None:
    """File names that are not UTF-8, long texts in any language, a log of binary noise: it fits and is read."""
    (tmp_path / "x").mkdir()
    code = "sys.stdout.buffer.write(b'\\xff\\xfe' * 9000 + b'\\n' + bytes(range(128, 256)) * 30)\n"
    code += f"(here / 'error.json').write_text('{{\"detail\": \"{text}\"}}', encoding='utf-8')\nsys.exit(1)"
    failed = _failure(tmp_path / "x", code)
    assert failed.log
    assert failed.detail
    decline = Decline(lease=failed.lease, code=failed.code, detail=failed.detail, log=failed.log)
    context = context_up("fed", "a")
    sealed = seal_message(decline, session="s", seq=1, key=KEY, context=context)
    assert open_message(sealed, key=KEY, context=context).message == decline


def test_the_newest_progress_is_told_and_nonsense_is_not(tmp_path: Path) -> None:
    """Half a line waits; a line that is no JSON is skipped."""
    code = """say(b'{"phase": "train", "step": 1, "total": 4, "loss": 0.5}\\nno json\\n')\nsys.exit(1)"""
    assert [e for e in _run(tmp_path, code) if isinstance(e, WorkerProgress)] == []
    code = """say(b'no json\\n{"phase": "train", "step": 2, "total": 4, "loss": null}\\n{"pha')\nsys.exit(1)"""
    assert WorkerProgress("train", 2, 4, None) in _run(tmp_path, code)


@pytest.mark.parametrize(
    "line",
    ["[1]", "null", "7", '{"phase": "Train!", "step": 1, "total": 1, "loss": 1}', "[" * 60_000]
    + [f'{{"phase": "train", "step": {step}, "total": 1, "loss": {loss}}}' for step, loss in ((-1, 1), (1, "NaN"))],
    ids=range(7),
)
def test_progress_that_could_not_be_sent_is_skipped(tmp_path: Path, line: str) -> None:
    """Any JSON that is not exactly a line of progress with sendable values."""
    (tmp_path / "line").write_text(line + "\n")
    events = _run(tmp_path, "say((here / 'line').read_bytes())\nsys.exit(1)")
    assert [type(event) for event in events] == [WorkerFailed]


def test_cpu_time_of_a_worker_is_read(tmp_path: Path) -> None:
    """One that computes for a quarter of a second says so then; a bracket and blanks in its name do not confuse."""
    code = """
import os, time
open("/proc/self/comm", "w").write("a) b c")
while time.process_time() < 0.25: pass
os.write(int(os.environ["FEDFIT_PROGRESS_FD"]), b"x\\n")
time.sleep(60)
"""
    worker = workers.Worker("l", tmp_path, _launch(code))
    assert select.select([worker.progress_fd], [], [], 20)[0]
    assert (worker.cpu_seconds() or 0.0) >= 0.2
    assert worker.read() == ([], False)
    assert worker.num_lines == 1
    worker.kill()
