"""The command `coordinator`: run a federation, enrol devices, start runs, look at them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Nothing is imported before Ctrl-C is expected."""
    try:
        from coordinator.cli import commands

        return commands.run(arguments)
    except KeyboardInterrupt as interrupt:
        from edge_client.operate import interrupted

        return interrupted.end("coordinator", interrupt)


if __name__ == "__main__":
    sys.exit(main())
