"""Workers that are forks of a template: they do and end as those that load torch themselves. Real processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from worker_runs import make_work, read_error, read_update, run_worker

from edge_client.client import workers
from edge_client.client.events import Event, WorkerDone, WorkerFailed, WorkerProgress
from edge_client.client.template import COMMAND, Template, TemplateError
from edge_client.device.private_memory import process_memory

THREADS = """
import sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
from edge_client.worker import template
template.main(sys.argv[1:])
"""
PARALLEL = """
import sys, torch
from edge_client.worker import template
serve = template._Template.serve
def parallel_region(self):
    torch.set_num_threads(2)
    torch.ones(2000, 2000).sum()
    return serve(self)
template._Template.serve = parallel_region
template.main(sys.argv[1:])
"""
DAEMON = """
import select, sys, time
from pathlib import Path
from edge_client.client import template, workers
folder, moment = sys.argv[1:]
def reached(name, *pids):
    if name == moment:
        print(*pids, flush=True)
        time.sleep(60)
forks = template.Template()
reached("lease", forks.pid)
while not forks.is_ready:
    select.select([forks.fd], [], [])
    forks.read()
def launch(folder, progress, log):
    return forks.fork(folder, progress=progress, log_file=log)
worker = workers.Worker("l1", Path(folder), launch)
reached("fork", forks.pid, worker.pid)
while not any(event.phase == "train" for event in worker.read()[0]):
    time.sleep(0.01)
reached("train", forks.pid, worker.pid)
"""


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    """One for all tests that do not end it."""
    template = _ready(Template())
    yield template
    template.end()


def _ready(template: Template) -> Template:
    while not template.is_ready:
        assert select.select([template.fd], [], [], 60)[0]
        template.read()
        assert not template.has_ended
    return template


def _fork(template: Template, work: Path) -> workers.Worker:
    def launch(folder: Path, progress: int, log_file: int) -> workers.WorkerProcess:
        return template.fork(folder, progress=progress, log_file=log_file)

    return workers.Worker("l1", work, launch)


def _events(worker: workers.Worker) -> Iterator[Event]:
    has_ended = False
    while not has_ended:
        assert select.select([worker.progress_fd], [], [], 60)[0]
        events, has_ended = worker.read()
        yield from events


def _end(worker: workers.Worker) -> Event:
    *_, last = _events(worker)
    return last


def _same(work: Path, expected: Path) -> bool:
    (_, tensors), (_, others) = read_update(work), read_update(expected)
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def test_a_fork_gives_the_same_tensors_as_a_new_process(tmp_path: Path, template: Template, trained: Path) -> None:
    """Bit for bit, with one thread and with two; the second fork is not changed by the first."""
    two = make_work(tmp_path / "two", threads=2)
    assert run_worker(two) == 0
    for number, (threads, expected) in enumerate(((1, trained), (2, two), (1, trained))):
        work = make_work(tmp_path / f"fork{number}", threads=threads)
        assert isinstance(_end(_fork(template, work)), WorkerDone)
        assert _same(work, expected)


def test_a_prepared_template_gives_the_same_tensors_and_holds_no_model(tmp_path: Path, trained: Path) -> None:
    """Bit for bit with one thread and with two, after a step on zeros there; a model of 45 MB leaves less than half."""
    two = make_work(tmp_path / "two", threads=2)
    assert run_worker(two) == 0
    template = _ready(Template())
    before = process_memory(template.pid).private_bytes
    large = make_work(tmp_path / "large", run={"model": {"name": "resnet18", "input": [3, 32, 32]}})
    template.prepare(large / "run.json", "full", 10**9)
    assert template.is_ready is False
    assert process_memory(_ready(template).pid).private_bytes - before < 20 * 10**6
    template.prepare(trained / "run.json", "full", 10**9)
    _ready(template)
    for number, (threads, expected) in enumerate(((1, trained), (2, two), (1, trained))):
        work = make_work(tmp_path / f"fork{number}", threads=threads)
        assert isinstance(_end(_fork(template, work)), WorkerDone)
        assert _same(work, expected)
    template.end()


@pytest.mark.parametrize("content", ["{", '{"name": 1}', None])
def test_what_cannot_be_prepared_changes_nothing(tmp_path: Path, template: Template, content: str | None) -> None:
    """A broken file of a run, none at all; and a model for which the budget has no room."""
    run = tmp_path / "run.json"
    if content is not None:
        run.write_text(content)
    template.prepare(run, "full", 10**9)
    _ready(template)
    small = make_work(tmp_path / "small", run={"model": {"name": "resnet18", "input": [3, 32, 32]}})
    template.prepare(small / "run.json", "full", 1)
    _ready(template)
    assert isinstance(_end(_fork(template, make_work(tmp_path / "w"))), WorkerDone)


def test_a_template_that_has_computed_with_two_threads_does_not_fork() -> None:
    """The pool of a parallel region would be missing in the worker, which waits for it for ever."""
    template = _ready(Template((sys.executable, "-c", PARALLEL)))
    with pytest.raises(TemplateError, match=r"^the template has \d+ threads, expected 1$"):
        template.fork(Path("/nowhere"), progress=1, log_file=2)
    template.end()


def test_a_fork_ends_in_every_way_that_a_new_process_does(tmp_path: Path, template: Template, trained: Path) -> None:
    """Declined, a bug with its traceback, SIGTERM, SIGKILL: the template serves on."""
    declined = _end(_fork(template, make_work(tmp_path / "declined", device_file={"data": {"source": "npz"}})))
    assert isinstance(declined, WorkerFailed)
    assert (declined.code, declined.final) == ("bad_data", True)
    bug = make_work(tmp_path / "bug")
    (bug / "model.bin").unlink()
    crashed = _end(_fork(template, bug))
    assert isinstance(crashed, WorkerFailed)
    assert (crashed.code, crashed.detail) == ("crashed", "the worker ended with exit code 1")
    assert crashed.log[-1].startswith("FileNotFoundError: ")
    for number, (signal_name, code) in enumerate((("SIGTERM", 143), ("SIGKILL", -9))):
        worker = _fork(template, make_work(tmp_path / f"signal{number}", run={"train": {"epochs": 1000}}))
        events = _events(worker)
        assert any(isinstance(event, WorkerProgress) and event.phase == "train" for event in events)
        os.kill(worker.pid, getattr(signal, signal_name))
        *_, last = events
        assert isinstance(last, WorkerFailed)
        assert last.detail == f"the worker ended with exit code {code}"
    assert isinstance(_end(_fork(template, make_work(tmp_path / "after"))), WorkerDone)


def test_a_fork_without_room_asks_for_a_process_of_its_own(tmp_path: Path, template: Template, trained: Path) -> None:
    """A budget in which nothing fits, and a model that is not measured yet: the template's memory is in the way."""
    for name, change, code in (
        ("small", {"order": {"budget_bytes": 10**6}}, "nothing_fits"),
        ("unmeasured", {"run": {"model": {"name": "small-cnn", "input": [1, 8, 8], "width": 3}}}, "calibration"),
    ):
        work = make_work(tmp_path / name, run=change.get("run"), **change.get("order", {}))
        worker = _fork(template, work)
        assert isinstance(_end(worker), WorkerFailed)
        assert worker.needs_own_process
        assert read_error(work)["code"] == code


def test_a_fault_that_has_fired_does_not_fire_again_in_the_next_fork(tmp_path: Path, trained: Path) -> None:
    """As in new processes; the template itself was started before the fault fired."""
    environment = {"FEDFIT_FAULT": "kill:worker.train.step:2", "FEDFIT_FAULT_LOG": str(tmp_path / "log")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        template = _ready(Template())
    work = make_work(tmp_path / "w")
    assert isinstance(_end(_fork(template, work)), WorkerFailed)
    assert isinstance(_end(_fork(template, work)), WorkerDone)
    template.end()


def test_a_template_with_threads_does_not_fork() -> None:
    """What another thread holds at the fork stays locked for ever in the worker."""
    template = _ready(Template((sys.executable, "-c", THREADS)))
    with pytest.raises(TemplateError, match=r"^the template has 2 threads, expected 1$"):
        template.fork(Path("/nowhere"), progress=1, log_file=2)
    template.end()


@pytest.mark.parametrize(("moment", "num_processes"), [("lease", 1), ("fork", 2), ("train", 2)])
def test_template_and_worker_end_with_their_daemon(
    tmp_path: Path, trained: Path, moment: str, num_processes: int
) -> None:
    """If it is killed while the template loads, just after a fork, in a training: nothing is left to use memory."""
    work = make_work(tmp_path / "w", run={"train": {"epochs": 1000}})
    daemon = subprocess.Popen([sys.executable, "-c", DAEMON, str(work), moment], stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    with daemon.stdout as lines:
        processes = [psutil.Process(int(pid)) for pid in lines.readline().split()]
        assert [process.is_running() for process in processes] == [True] * num_processes
        daemon.kill()
        daemon.wait()
    gone, alive = psutil.wait_procs(processes, timeout=10)
    assert (len(gone), alive) == (num_processes, [])


def test_a_worker_of_a_killed_template_has_ended_and_the_next_fork_fails(tmp_path: Path, trained: Path) -> None:
    """Somebody, such as the kernel, kills the template: its worker goes with it, by the same signal."""
    template = _ready(Template(COMMAND))
    worker = _fork(template, make_work(tmp_path / "w", run={"train": {"epochs": 1000}}))
    os.kill(template.pid, signal.SIGKILL)
    last = _end(worker)
    assert isinstance(last, WorkerFailed)
    assert last.detail == "the worker ended with exit code -9"
    with pytest.raises(TemplateError):
        template.fork(tmp_path, progress=1, log_file=2)
