"""Workers as the daemon sees them: how they end, and what may be sent about it."""

from __future__ import annotations

import json
import select
import sys
from pathlib import Path

import pytest
from rows import digest

from edge_client import durable, workers
from edge_client.session import Event, Finished, WorkerDone, WorkerFailed, WorkerProgress
from edge_client.wire.messages import Decline, context_up, open_message, seal_message

KEY = bytes(32)


def _run(folder: Path, code: str) -> list[Event]:
    """A worker that runs `code` in its folder; `say` writes a progress line."""
    script = "import json, os, sys, pathlib\nhere = pathlib.Path(sys.argv[1])\n"
    script += "def say(line): os.write(int(os.environ['FEDFIT_PROGRESS_FD']), line)\n" + code
    worker = workers.Worker("lease-1", folder, [sys.executable, "-c", script])
    events: list[Event] = []
    ended = False
    while not ended:
        select.select([worker.progress_fd], [], [], 20)
        new, ended = worker.read()
        events += new
    return events


def _failure(folder: Path, code: str) -> WorkerFailed:
    last = _run(folder, code)[-1]
    assert isinstance(last, WorkerFailed)
    return last


def test_a_worker_that_left_its_update_is_done(tmp_path: Path) -> None:
    """Exit code 0, and the update's file has the length that its manifest says."""
    told = {"sha256": digest("u"), "length": 3, "num_samples": 7}
    (tmp_path / "update.bin").write_bytes(b"abc")
    (tmp_path / "update.json").write_text(json.dumps(told))
    assert _run(tmp_path, "") == [WorkerDone("lease-1", Finished(**told))]


@pytest.mark.parametrize(
    "manifest", ["", "[]", '{"sha256": "x", "length": 3, "num_samples": 1}', '{"sha256": 1}', '{"length": 3.0}']
)
def test_half_an_update_is_none(tmp_path: Path, manifest: str) -> None:
    """A worker that says it is done and is not has crashed."""
    (tmp_path / "update.bin").write_bytes(b"abc")
    (tmp_path / "update.json").write_text(manifest)
    assert workers.finished_update(tmp_path) is None
    failed = _failure(tmp_path, "")
    assert (failed.code, failed.final) == ("crashed", False)


@pytest.mark.parametrize(
    ("code", "expected", "final"),
    [(74, "disk_full", False), (75, "over_budget", True), (76, "declined", True), (1, "crashed", False)],
)
def test_exit_codes_tell_how_it_ended(tmp_path: Path, code: int, expected: str, final: bool) -> None:
    """Over budget and declined are final: the next try would end the same."""
    failed = _failure(tmp_path, f"sys.exit({code})")
    assert (failed.code, failed.final) == (expected, final)


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
    worker = workers.Worker("lease-1", tmp_path, [sys.executable, "-c", script])
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


def test_the_methods_state_is_promoted_only_for_what_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`next` becomes `current` for good, or is dropped; without `next` nothing changes."""
    run = tmp_path / "r-1"
    run.mkdir()
    for name, text in (("current", "old"), ("next", "new")):
        (run / name).write_text(text)
    synced: list[Path] = []
    monkeypatch.setattr(durable, "sync_dir", synced.append)
    workers.settle_method_state(tmp_path, accepted=True)
    workers.settle_method_state(tmp_path, accepted=True)
    assert (run / "current").read_text() == "new"
    assert synced == [run]
    (run / "next").touch()
    workers.settle_method_state(tmp_path, accepted=False)
    assert [entry.name for entry in run.iterdir()] == ["current"]
