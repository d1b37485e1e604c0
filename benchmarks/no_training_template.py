"""The template of workers that train nothing: `python -m benchmarks.no_training_template MEETING NUM FD`.

Forks as the template of `edge_client.worker.template` does, but of `no_training_worker`, and so without torch.
"""

from __future__ import annotations

import socket
import sys

from benchmarks import no_training_worker
from edge_client.device import guard
from edge_client.worker import process, template
from edge_client.worker.template_messages import Prepare, Ready, send


class _Template(template._Template):
    """There is nothing to prepare."""

    def _prepare(self, message: Prepare) -> None:
        send(self._control, Ready())


def main() -> int:
    """Serve until the socket ends; in a fork: do its assignment."""
    process.stand_guard()
    meeting, num, fd = sys.argv[1:]
    folder = _Template(socket.socket(fileno=int(fd))).serve()
    return no_training_worker.work(meeting, num, str(folder)) if folder is not None else 0


if __name__ == "__main__":
    guard.end(main())
