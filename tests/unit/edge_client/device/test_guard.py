"""The guards of a worker, each in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from edge_client.device import guard

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guards are the Linux kernel's")


BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}


def _run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=BUFFERED)


def test_a_process_dies_with_its_parent() -> None:
    """The child holds the only write end of a pipe: when it ends, the pipe does, though nobody told the child."""
    read_end, write_end = os.pipe()
    code = f"""
        import os, subprocess, sys, time
        child = "from edge_client.device import guard; import os, time; guard.die_with_parent({{}})\\n"
        child += "os.write({write_end}, b'ready'); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", child.format(os.getpid())], pass_fds=[{write_end}])
        os.close({write_end})
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], pass_fds=[write_end])
    os.close(write_end)
    assert os.read(read_end, 5) == b"ready"
    parent.kill()
    parent.wait()
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_an_orphan_ends_at_once() -> None:
    """The expected parent is another process than the real one: it must have ended before the call."""
    done = _run("from edge_client.device import guard; guard.die_with_parent(2**22 + 1); print('alive')")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""


def test_memory_beyond_the_limit_fails_cleanly() -> None:
    """64 MiB more are allowed: 16 MiB fit, 128 MiB raise MemoryError, and the process goes on."""
    done = _run(
        """
        from edge_client.device import guard
        guard.limit_growth(64 * 2**20)
        small = bytearray(16 * 2**20)
        try:
            bytearray(128 * 2**20)
        except MemoryError:
            print("refused")
        guard.lift_limit()
        print(len(bytearray(128 * 2**20)))
        """
    )
    assert (done.returncode, done.stdout) == (0, "refused\n134217728\n")


def test_a_pinned_malloc_gives_freed_memory_back() -> None:
    """200 blocks of 512 KiB, freed except the last: without the pin glibc keeps them below it on the heap."""
    done = _run(
        """
        import ctypes
        from edge_client.device import guard, meter
        guard.pin_malloc()
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free(libc.malloc(8 * 2**20))  # teaches an unpinned glibc to put 8 MB on the heap
        before = meter.rss_bytes()
        blocks = [libc.malloc(2**19) for _ in range(200)]
        for block in blocks:
            ctypes.memset(block, 1, 2**19)
        full = meter.rss_bytes()
        for block in blocks[:-1]:
            libc.free(block)
        print(full - before > 90 * 2**20, meter.rss_bytes() - before < 10 * 2**20)
        """
    )
    assert done.stdout == "True True\n", done.stderr


def test_the_oom_score_is_raised() -> None:
    """The kernel shows what it will choose by."""
    done = _run(
        """
        from edge_client.device import guard
        guard.raise_oom_score(800)
        with open("/proc/self/oom_score_adj") as file:
            print(file.read())
        """
    )
    assert done.stdout.split() == ["800"]


def test_nonsense_is_refused() -> None:
    """Callers' errors, not the kernel's."""
    with pytest.raises(ValueError, match="at least 0 bytes, got -1"):
        guard.limit_growth(-1)
    with pytest.raises(ValueError, match="0 to 1000, got 1001"):
        guard.raise_oom_score(1001)


def test_an_end_keeps_the_code_and_all_that_was_said() -> None:
    """Printed without a line's end, so that it waits in a buffer; the interpreter's own end would run `atexit`."""
    done = _run(
        """
        import atexit
        from edge_client.device import guard
        atexit.register(print, "taken apart")
        print("said", end="")
        guard.end(75)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (75, "said", "")


def test_an_end_with_nobody_to_listen_keeps_its_code() -> None:
    """The reader of standard output is gone, and standard error is closed."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys; from edge_client.device import guard; print('said'); sys.stderr.close(); guard.end(76)"
    done = subprocess.run([sys.executable, "-c", code], stdout=write_end, check=False, timeout=60, env=BUFFERED)
    os.close(write_end)
    assert done.returncode == 76
