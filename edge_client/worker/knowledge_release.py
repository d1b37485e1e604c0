"""Which of a method's knowledge leaves the device: what its owner allows and the coordinator would accept."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from edge_client.errors import PayloadError
from edge_client.knowledge.kinds import Knowledge, as_read
from edge_client.methods import registry as methods
from edge_client.worker.order_files import Assignment
from edge_client.worker.privacy import fresh_noise

__all__ = ["ReleasedKnowledge", "release"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedKnowledge:
    """What goes into the update, and why other items stay."""

    items: tuple[Knowledge, ...] = ()
    withheld: tuple[str, ...] = ()  # CODE: REASON of each item that the coordinator would refuse


def release(items: tuple[Knowledge, ...], assignment: Assignment) -> ReleasedKnowledge:
    """Pass `items` through the owner's gate, then leave out what would make the coordinator refuse the whole update."""
    if not items:
        return ReleasedKnowledge()
    order, run = assignment.order, assignment.run
    allowed = assignment.gate.release(items, run=order.run, round=order.round, noise=fresh_noise())
    limits = methods.knowledge_limits(run)
    accepted: list[Knowledge] = []
    withheld: list[str] = []
    for item in allowed:
        try:
            as_read([*accepted, item], limits, codec=run.rounds.codec, source="this device")
        except PayloadError as error:
            withheld.append(f"{error.code}: {error.detail}")
            _log.warning("%r stays here: %s", item.kind, error)
        else:
            accepted.append(item)
    return ReleasedKnowledge(items=tuple(accepted), withheld=tuple(withheld))
