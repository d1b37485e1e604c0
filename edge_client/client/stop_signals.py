"""Handles SIGTERM and SIGINT in a daemon whose main thread may be inside a call that no signal interrupts.

A name server or a broker that does not answer is waited for in such a call. What matters is on disk at every moment, so
the end may come at any.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["stop_at_signals"]

_LAST_RESORT_S = 9.0  # after the signal, of the ten seconds that supervisors give


@contextmanager
def stop_at_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` in a thread at SIGTERM or SIGINT, and end the process with 0 if it then takes too long."""
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    is_over = threading.Event()

    def wait_for_signal() -> None:
        if os.read(read_fd, 1):
            stop()
            if not is_over.wait(_LAST_RESORT_S):
                os._exit(0)  # without a word: whoever reads the log may be what we wait for

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the byte in the pipe is what counts
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait_for_signal, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(-1)
        os.close(write_fd)
        thread.join()
        os.close(read_fd)
