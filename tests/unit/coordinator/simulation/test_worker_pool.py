"""Worker processes that virtual devices share: in turns, and what becomes of those that die."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregation import job_child
from coordinator.simulation.worker_pool import WorkerPool
from edge_client.client.events import Event, Finished, WorkerDone, WorkerFailed

# answers with the exit code that the folder names; "die" ends the process
_CHILD = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    code = open(job["folder"] + "/code").read()
    if code == "die":
        os._exit(9)
    with open(job["folder"] + "/worker", "w") as file:
        file.write(str(os.getpid()))
    print(json.dumps({"id": job["id"], "ok": True, "code": int(code)}), flush=True)
"""


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerPool]:
    """Two workers without torch."""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        assert options["env"]["OMP_NUM_THREADS"] == "3"
        return real([sys.executable, "-c", _CHILD], **options)

    monkeypatch.setattr(job_child.subprocess, "Popen", start)
    made = WorkerPool(2, threads=3)
    yield made
    made.close()


def _work(folder: Path, lease: str, code: object) -> Path:
    """A folder whose worker would end with this code; an update of three bytes is there for 0."""
    work = folder / lease
    work.mkdir()
    (work / "code").write_text(str(code))
    (work / "update.bin").write_bytes(b"abc")
    (work / "update.json").write_text(json.dumps({"sha256": "0" * 64, "length": 3, "num_samples": 7}))
    (work / "error.json").write_text(json.dumps({"code": "no_data", "detail": "none here"}))
    return work


def _ends(pool: WorkerPool, works: dict[str, Path]) -> dict[str, Event]:
    ended: dict[str, Event] = {}
    for lease, folder in works.items():
        pool.submit(lease, folder, lambda event, lease=lease: ended.setdefault(lease, event))
    while len(ended) < len(works):
        ready, _, _ = select.select(pool.fds(), [], [], 20)
        assert ready, "no worker answers"
        pool.read(ready, 0.0)
    return ended


def test_more_assignments_than_workers_are_done_in_turns(pool: WorkerPool, tmp_path: Path) -> None:
    """Seven by two processes; each ends as a worker of its own would."""
    works = {f"l{i}": _work(tmp_path, f"l{i}", 76 if i == 3 else 0) for i in range(7)}
    ended = _ends(pool, works)
    finished = Finished(sha256="0" * 64, length=3, num_samples=7)
    assert ended.pop("l3") == WorkerFailed(lease="l3", code="no_data", detail="none here", final=True)
    assert ended == {lease: WorkerDone(lease, finished) for lease in works if lease != "l3"}
    assert len({(work / "worker").read_text() for work in works.values()}) == 2


def test_an_assignment_that_kills_its_worker_fails_alone(pool: WorkerPool, tmp_path: Path) -> None:
    """Three deaths; the others are done by new processes."""
    ended = _ends(pool, {"bad": _work(tmp_path, "bad", "die"), "good": _work(tmp_path, "good", 0)})
    failed = ended["bad"]
    assert isinstance(failed, WorkerFailed)
    assert (failed.code, failed.final) == ("crashed", True)
    assert isinstance(ended["good"], WorkerDone)


def test_what_nobody_waits_for_is_not_begun(pool: WorkerPool, tmp_path: Path) -> None:
    """The third of three, forgotten while the workers have the first two."""
    works = {lease: _work(tmp_path, lease, 0) for lease in ("a", "b", "c")}
    pool.submit("c0", works["a"], lambda event: None)
    pool.submit("c1", works["b"], lambda event: None)
    pool.submit("c", works["c"], lambda event: pytest.fail("it was forgotten"))
    pool.forget("c")
    _ends(pool, {"d": _work(tmp_path, "d", 0)})
    assert not (works["c"] / "worker").exists()
