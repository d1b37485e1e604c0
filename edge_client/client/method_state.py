"""What methods keep on a device between rounds, in `STATE/method-state/RUN/`, and when that counts.

    next             written by the worker together with its update
    stored-LEASE     the same, after the coordinator has received that update
    current          the same, after that update went into a model: what the next worker begins with

A received update may still not count, because its round may be abandoned: the next assignment of the run names the
lease that did.
"""

from __future__ import annotations

from pathlib import Path

from edge_client import durable
from edge_client.worker.state_folder import STORED_PREFIX

__all__ = ["count_method_state", "settle_method_state"]


def settle_method_state(root: Path, lease: str, *, accepted: bool) -> None:
    """The lease is over: keep `next` of every run under its name, or drop it if its update was not received."""
    for following in root.glob("*/next"):
        if accepted:
            durable.publish(following, following.with_name(STORED_PREFIX + lease), point="daemon.state")
        else:
            following.unlink()
            durable.sync_dir(following.parent)


def count_method_state(folder: Path, counted: str | None, *, in_hand: str | None = None) -> None:
    """Make what was stored with the lease `counted` the current state; drop the rest, which would be applied twice.

    `in_hand` is a lease whose update is finished: whether it counts is not known yet.
    """
    for stored in folder.glob(f"{STORED_PREFIX}*"):
        if stored.name == f"{STORED_PREFIX}{in_hand}":
            continue
        if stored.name == f"{STORED_PREFIX}{counted}":
            durable.publish(stored, folder / "current", point="daemon.counted")
        else:
            stored.unlink()
            durable.sync_dir(folder)
