"""The command `edge-client`: join a federation and take part in it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. Nothing is imported before Ctrl-C is expected."""
    try:
        from edge_client.cli import commands

        return commands.run(arguments)
    except KeyboardInterrupt as interrupt:
        from edge_client.operate import interrupted

        return interrupted.end("edge-client", interrupt)


if __name__ == "__main__":
    sys.exit(main())
