"""Leases by key, against a look at every lease."""

from __future__ import annotations

import random
from dataclasses import replace

from rows import lease_row

from coordinator.rounds.lease_book import LeaseBook
from coordinator.store.rows import OPEN_LEASE


def test_any_history_gives_what_a_look_at_every_lease_gives() -> None:
    """300 random changes of twelve leases of four devices (seed 5); the order of open ones is that of issue."""
    rng = random.Random(5)
    leases = [lease_row(number, "abcd"[number % 4], train=number % 3 != 0) for number in range(12)]
    book, all_leases = LeaseBook(leases[:6]), {lease.id: lease for lease in leases[:6]}
    for lease in leases[6:]:
        book.put(lease)
        all_leases[lease.id] = lease
    for _ in range(300):
        lease = rng.choice(list(all_leases.values()))
        if lease.state in OPEN_LEASE:
            lease = replace(lease, state=rng.choice(["offered", "accepted", "offered", "stored", "expired"]))
            book.put(lease)
            all_leases[lease.id] = lease
        is_open = [x for x in all_leases.values() if x.state in OPEN_LEASE]
        assert book.by_id == all_leases
        assert book.all_open() == is_open
        assert book.open_devices() == {x.device for x in is_open}
        assert [book.num_open(train=t) for t in (True, False)] == [
            sum(x.train == t for x in is_open) for t in (True, False)
        ]
        for device in "abcd":
            assert book.open_of(device) == [x for x in is_open if x.device == device]
        for lease_id, row in all_leases.items():
            assert book.find_open(lease_id) == (row if row.state in OPEN_LEASE else None)
