"""Writes what a client of this version says, one frame of each kind: `python tests/versions/make.py`, at a release.

A file that is there stays: clients of that version are in the field.
"""

from __future__ import annotations

import json
from pathlib import Path

from edge_client import __version__
from edge_client.records import DeviceProfile, to_map
from edge_client.wire.messages import (
    Accept,
    Decline,
    Deployed,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Offer,
    Pull,
    context_up,
    seal_message,
)

KEY = bytes(range(32))
PROFILE = DeviceProfile(budget_bytes=10**9, memory_bytes=4 * 10**9, cores=4, kind="raspberry-pi", machine="Pi 5")
SAID: tuple[Message, ...] = (
    Hello(
        boot="b1",
        hello=1,
        client=__version__,
        profile=PROFILE,
        labels={"line": "a"},
        tasks={"defects": "ab" * 32},
        free_bytes=10**9,
        held="lease-1",
        finished=True,
        deploys=True,
    ),
    Heartbeat(state="working", lease="lease-1", phase="train", step=3, total=8, loss=0.5, free_bytes=10**9),
    Accept(lease="lease-1"),
    Decline(lease="lease-1", code="nothing_fits", detail="too large", log=("a line",)),
    Offer(lease="lease-1", run="r-1", round=2, sha256="cd" * 32, length=1000, num_samples=10),
    Pull(sha256="cd" * 32, ranges=((0, 3),)),
    Goodbye(reason="stopped"),
    Deployed(deployment="deployment-1", state="rolled_back", code="self_test", detail="it differs"),
)


def main() -> None:
    """Write the file of this version."""
    path = Path(__file__).with_name(f"{__version__}.json")
    if path.exists():
        raise SystemExit(f"{path} is there already: clients of {__version__} are in the field")
    frames = [
        {
            "kind": type(message).__name__,
            "said": to_map(message),
            "frame": seal_message(message, session="s", seq=1, key=KEY, context=context_up("fed", "d")).hex(),
        }
        for message in SAID
    ]
    path.write_text(json.dumps(frames, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
