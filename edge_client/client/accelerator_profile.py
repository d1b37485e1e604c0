"""What the coordinator hears of a device's accelerator: asked once, before the client says hello.

An accelerator that cannot be used does not stop the client: it stays online, says why in its log, and its worker
declines where the owner named the accelerator, or trains on the CPU where `auto` allows that.
Covers: the profile. Does not cover: the budget of a worker, which measures its own (`worker.accelerator_memory`).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from edge_client.config.device_file import LimitsSection
from edge_client.config.quantities import format_bytes
from edge_client.errors import FedfitError
from edge_client.measuring.accelerator_check import AcceleratorFacts, check
from edge_client.records import DeviceProfile

__all__ = ["usable_bytes", "with_accelerator"]

_log = logging.getLogger(__name__)

_USABLE_PERCENT = 90  # of what is free, where the owner names no budget


def with_accelerator(profile: DeviceProfile, limits: LimitsSection) -> DeviceProfile:
    """The profile with the accelerator that the owner allows, if there is one that works."""
    if limits.accelerator == "none":
        return profile
    try:
        facts = check(limits.accelerator)
    except (FedfitError, MemoryError) as error:
        _log.error("the accelerator %s cannot be used: %s", limits.accelerator, error)
        return profile
    if not facts.name:
        _log.warning("training on the CPU: %s", facts.reason)
        return profile
    usable = usable_bytes(facts, limits)
    of = f"{format_bytes(usable)} of {format_bytes(facts.total_bytes)}" if usable else "the host's memory"
    _log.info("trains on %s (%s), with %s", facts.name, facts.fingerprint, of)
    for user in facts.users:
        _log.warning("%s is shared: %s", facts.name, user)
    return replace(
        profile,
        accelerator=facts.fingerprint,
        accelerator_memory=facts.memory,
        accelerator_bytes=usable,
    )


def usable_bytes(facts: AcceleratorFacts, limits: LimitsSection) -> int:
    """What a worker may use of separate memory; 0 where it is the host's."""
    if facts.memory != "separate":
        return 0
    if limits.accelerator_memory is not None:
        return limits.accelerator_memory
    return min(facts.free_bytes, facts.total_bytes // limits.workers) * _USABLE_PERCENT // 100
