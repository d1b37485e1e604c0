"""The private memory of a process, cold or forked from a template. The children are real."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_client.device import private_memory
from edge_client.device.private_memory import PeakMeter, ProcessMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20
NOISE = 3 * MIB  # file pages of Python that are read meanwhile, and what the kernel's count may be off

# A template with 64 MiB of its own forks a worker. Both do what stdin asks; the worker answers with what it measures.
FORKED = """
import mmap, os, sys
from edge_client.device.private_memory import PeakMeter
block = bytearray(os.urandom(1)) * (64 * 2**20)
template, keep = os.getpid(), []
if os.fork() == 0:
    peak = PeakMeter(template)
    print(os.getpid(), template, flush=True)
    for line in sys.stdin:
        exec(line)
        print(peak.private_bytes(), peak.peak_bytes(), flush=True)
    os._exit(0)
os.wait()
"""


class Worker:
    """The forked worker of `FORKED`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid, self.template = self._answer()

    def _answer(self) -> tuple[int, int]:
        assert self._process.stdout is not None
        first, second = self._process.stdout.readline().split()
        return int(first), int(second)

    def do(self, line: str) -> tuple[int, int]:
        """Run a line there; returns its private memory then, and its peak."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()


@contextmanager
def forked_worker() -> Iterator[Worker]:
    command = [sys.executable, "-c", FORKED]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield Worker(process)


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(bytes(30 * MIB))
    return path


READ = "m = mmap.mmap(os.open({path!r}, os.O_RDONLY), 0, prot=mmap.PROT_READ); sum(m[::4096]); keep.append(m)"
WRITE_SHARED = "m = mmap.mmap(os.open({path!r}, os.O_RDWR), 0); m[:] = b'x' * len(m); keep.append(m)"


def test_30_mib_of_file_pages_do_not_move_the_figure(large_file: Path) -> None:
    """Read, 30 MiB of RSS are file pages; written through a shared mapping they still are, though dirty.

    `b'x' * len(m)` is 30 MiB of anonymous memory for a moment: in the peak, gone from the figure.
    """
    with forked_worker() as worker:
        before, peak_before = worker.do("pass")
        rss = private_memory.process_memory(worker.pid).rss_bytes
        read, peak_read = worker.do(READ.format(path=str(large_file)))
        assert private_memory.process_memory(worker.pid).rss_bytes >= rss + 29 * MIB
        assert abs(read - before) < MIB
        written, _ = worker.do(WRITE_SHARED.format(path=str(large_file)))
        assert abs(written - before) < MIB
        assert private_memory.worker_bytes(worker.pid, template=worker.template) == pytest.approx(written, abs=MIB)
        assert peak_read < peak_before + 32 * MIB  # the highest RSS cannot tell what it was of: above, never below


def test_a_worker_answers_for_its_template_and_what_it_has_written_to() -> None:
    """Template: 64 MiB and a Python. After 16 of the 64 and 10 new MiB are written: 26 MiB on top of the template."""
    with forked_worker() as worker:
        template = private_memory.process_memory(worker.template).private_bytes
        before, _ = worker.do("pass")
        assert template >= 64 * MIB
        assert template <= before <= template + NOISE
        rewritten, _ = worker.do("block[: 16 * 2**20] = bytes(16 * 2**20)")
        assert rewritten - before == pytest.approx(16 * MIB, abs=MIB)
        grown, _ = worker.do("keep.append(bytearray(os.urandom(1)) * (10 * 2**20))")
        assert grown - before == pytest.approx(26 * MIB, abs=MIB)
        own = private_memory.written_since_fork(worker.template, worker.pid)
        assert own == pytest.approx(grown - template, abs=MIB)


def test_a_worker_whose_template_has_ended_answers_for_everything_itself() -> None:
    """It goes on with all of the 64 MiB, none of which anybody else holds."""
    with forked_worker() as worker:
        before, _ = worker.do("pass")
        os.kill(worker.template, signal.SIGKILL)
        os.waitid(os.P_PID, worker.template, os.WEXITED | os.WNOWAIT)
        after, _ = worker.do("pass")
        assert after == private_memory.process_memory(worker.pid).private_bytes
        assert after == pytest.approx(before, abs=NOISE)


def test_the_peak_of_a_forked_worker_is_never_below_the_truth_and_close_to_it() -> None:
    """32 MiB for a moment, which only the peak remembers; it may count file pages that were read on the way."""
    with forked_worker() as worker:
        before, _ = worker.do("peak.begin()")
        truth, _ = worker.do("t = bytearray(os.urandom(1)) * (32 * 2**20)")
        now, peak = worker.do("del t")
        assert truth >= before + 31 * MIB
        assert now - before < MIB
        assert truth <= peak < truth + NOISE
        _, anew = worker.do("peak.begin()")
        assert anew < before + NOISE


def test_the_peak_of_this_process_is_never_below_the_truth() -> None:
    """While 32 MiB are held, the private memory is the truth; afterwards the peak is that, and at most 3 MiB more.

    Forty sizes, because the kernel counts pages in batches.
    """
    for size in range(40):
        peak = PeakMeter()
        block = bytearray(os.urandom(1)) * (32 * MIB + size * 41 * 4096)
        truth = private_memory.process_memory().private_bytes
        del block
        assert truth <= peak.peak_bytes() < truth + NOISE


def test_file_pages_that_were_dropped_for_a_while_do_not_lower_the_peak(large_file: Path) -> None:
    """30 MiB of file pages go while 32 MiB are held, and come back later: the highest RSS holds fewer than now."""
    with large_file.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        sum(pages[::4096])
        peak = PeakMeter()
        pages.madvise(mmap.MADV_DONTNEED)
        block = bytearray(os.urandom(1)) * (32 * MIB)
        truth = private_memory.process_memory().private_bytes
        peak.peak_bytes()
        del block
        sum(pages[::4096])
        assert truth <= peak.peak_bytes() < truth + NOISE


def recorded(root: Path, pid: int, *, status: str, smaps: str = "") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "status").write_text(status)
    if smaps:
        (folder / "smaps").write_text(smaps)


TEMPLATE_STATUS = (
    "VmHWM:\t90 kB\nVmRSS:\t 90 kB\nRssAnon:\t 50 kB\nRssFile:\t 40 kB\nRssShmem:\t 0 kB\nVmSwap:\t 6 kB\n"
)
WORKER_STATUS = (
    "VmHWM:\t 120 kB\nVmRSS:\t 110 kB\nRssAnon:\t 70 kB\nRssFile:\t 30 kB\nRssShmem:\t 10 kB\nVmSwap:\t 8 kB\n"
)

HEAP = "1000-2000 rw-p 0 00:00 0\nShared_Dirty: 40 kB\nAnonymous: 60 kB\nSwap: 8 kB\nSwapPss: 5 kB\n"
# 9 kB are dirty because somebody writes the file; 5 kB are copies that the template has made
LIBRARY = "2000-3000 rw-p 0 08:01 77 /lib/a.so\nShared_Dirty: 9 kB\nAnonymous: 5 kB\nSwap: 0 kB\nSwapPss: 0 kB\n"


def test_swapped_pages_are_private_memory(tmp_path: Path) -> None:
    """Nobody else could use them: 70 kB in RAM and 8 kB swapped, while 40 kB of RSS are file pages."""
    recorded(tmp_path, 7, status=WORKER_STATUS)
    memory = private_memory.process_memory(7, root=tmp_path)
    assert (memory.private_bytes, memory.rss_bytes, memory.file_bytes) == (78 * 1024, 110 * 1024, 40 * 1024)


def test_swapped_pages_of_the_template_count_once(tmp_path: Path) -> None:
    """Template 50 + 6 kB. Of the worker's 70 kB it shares 40 + 5, and of its 8 swapped kB at most 5 are its own."""
    recorded(tmp_path, 6, status=TEMPLATE_STATUS)
    recorded(tmp_path, 7, status=WORKER_STATUS, smaps=HEAP + LIBRARY)
    assert private_memory.written_since_fork(6, 7, root=tmp_path) == (70 - 45 + 5) * 1024
    assert private_memory.worker_bytes(7, template=6, root=tmp_path) == (56 + 30) * 1024


def test_what_the_kernel_does_not_tell_is_not_shared(tmp_path: Path) -> None:
    """Without `smaps`, as in some containers, the template's pages count twice: too much, never too little."""
    recorded(tmp_path, 6, status=TEMPLATE_STATUS)
    recorded(tmp_path, 7, status=WORKER_STATUS)
    assert private_memory.worker_bytes(7, template=6, root=tmp_path) == (56 + 78) * 1024


def test_no_more_is_shared_than_the_template_has(tmp_path: Path) -> None:
    """Pages that only other workers share are theirs to answer for: the template has 50 kB left of 65 once shared."""
    recorded(tmp_path, 6, status=TEMPLATE_STATUS)
    recorded(tmp_path, 7, status=WORKER_STATUS, smaps=HEAP.replace("40 kB", "60 kB"))
    assert private_memory.written_since_fork(6, 7, root=tmp_path) == (70 - 50 + 5) * 1024


def test_a_process_that_has_ended_has_none(tmp_path: Path) -> None:
    """And a system without `/proc` tells nothing of others."""
    assert private_memory.process_memory(2**22 + 1) == ProcessMemory()
    assert private_memory.worker_bytes(3, template=4, root=tmp_path) == 0
