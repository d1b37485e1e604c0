"""An update on its way: offered, fetched, checked, stored, or refused with a reason at each step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conductor_bench import Bench
from rows import digest, lease_row, model_row, round_row, update_row

from coordinator.conductor.active_run import ActiveRun
from coordinator.conductor.arrivals import Arrivals
from coordinator.fleet.uploads import FinishedUpload
from coordinator.rounds import events
from edge_client.errors import PayloadError
from edge_client.wire.container import TableRow, build_header, tensor_bytes
from edge_client.wire.messages import Offer, Receipt

TABLE: list[TableRow] = [("model/w", "fp32", (4, 2)), ("model/b", "fp32", (2,))]


def _container(meta: dict[str, Any], table: list[TableRow]) -> bytes:
    return build_header(meta, table) + bytes(sum(tensor_bytes(codec, shape) for _, codec, shape in table))


MODEL = _container({}, TABLE)
UPDATE = _container({"num_samples": 10, "steps": 2, "payload": "params"}, TABLE)


def _arrivals(bench: Bench) -> Arrivals:
    return Arrivals(
        store=bench.store,
        blobs=bench.blobs,
        uploads=bench.uploads,
        jobs=bench.jobs,
        parts=bench.parts,
        retention=bench.retention,
        send=bench.send,
        handle=bench.handle,
    )


def _run(bench: Bench) -> ActiveRun:
    """Round 1, in which a trains."""
    bench.add_run(model=MODEL)
    return bench.active_run(round_row(), lease_row(1, evaluate=False, state="accepted"))


def _offer(data: bytes = UPDATE, **changes: Any) -> Offer:
    fields: dict[str, Any] = {"lease": "lease-1", "run": "r-1", "round": 1, "length": len(data), "num_samples": 10}
    return Offer(**fields | {"sha256": hashlib.sha256(data).hexdigest()} | changes)


def _arrived(bench: Bench, data: bytes = UPDATE) -> FinishedUpload:
    sha256 = bench.put(data)
    return FinishedUpload(device="a", offer=_offer(data), path=bench.blobs.path(sha256))


def test_an_offer_of_an_open_lease_is_fetched(make_bench: Callable[..., Bench]) -> None:
    """It also says that the device accepted its lease; the same offer again changes nothing."""
    bench = make_bench()
    run, arrivals = _run(bench), _arrivals(bench)
    for _ in range(2):
        arrivals.offered(run, "a", _offer(), 1.0)
    assert bench.events == [events.Accepted("lease-1")]
    assert bench.uploads.is_open("a", _offer())
    assert bench.sent == []


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"run": "r-2"}, "malformed"),
        ({"round": 2}, "malformed"),
        ({"length": 0}, "too_large"),
        ({"length": 70_000}, "too_large"),  # 5 % more than the model, 64 kB and a matrix of 32 bytes
        ({"num_samples": -1}, "sample_count"),
        ({"num_samples": 10_000_001}, "sample_count"),
    ],
)
def test_an_impossible_offer_is_refused_before_its_bytes_travel(
    make_bench: Callable[..., Bench], changes: dict[str, Any], code: str
) -> None:
    """The machine closes the lease and answers the device."""
    bench = make_bench()
    run, arrivals = _run(bench), _arrivals(bench)
    arrivals.offered(run, "a", _offer(**changes), 1.0)
    refused = bench.events[-1]
    assert isinstance(refused, events.Refused)
    assert refused.code == code
    assert not bench.uploads.is_open("a", _offer(**changes))


def _past(bench: Bench, offer: Offer, device: str = "a") -> tuple[str, str]:
    _arrivals(bench).offered(None, device, offer, 1.0)
    (_, receipt) = bench.sent.pop()
    assert isinstance(receipt, Receipt)
    return receipt.status, receipt.code


def test_an_offer_of_a_closed_lease_gets_the_answer_of_the_first_time(make_bench: Callable[..., Bench]) -> None:
    """Stored: accepted, or refused for other bytes; refused: with the same code; anything else is late."""
    bench = make_bench()
    bench.add_run(model=MODEL)
    leases = [lease_row(number) for number in (1, 2, 3)]
    bench.store.rounds.open(round_row(), leases)
    bench.store.updates.save(update_row(lease="lease-1"), None, "lease-1")
    bench.store.leases.set_state("lease-2", "refused", code="norm", detail="too far")
    bench.store.leases.set_state("lease-3", "expired", code="late", detail="over")
    stored = update_row(lease="lease-1").sha256
    assert _past(bench, _offer(sha256=stored)) == ("accepted", "ok")
    assert _past(bench, _offer(sha256=digest("other"))) == ("refused", "equivocation")
    assert _past(bench, _offer(lease="lease-2")) == ("refused", "norm")
    assert _past(bench, _offer(lease="lease-3")) == ("late", "late")
    assert _past(bench, _offer(lease="lease-9")) == ("late", "unknown_lease")
    assert _past(bench, _offer(lease="lease-1"), device="b") == ("late", "unknown_lease")


def test_an_update_is_checked_twice_and_stored(make_bench: Callable[..., Bench]) -> None:
    """Header here, values in the aggregator; while it is checked its blob is held, and another offer is ignored."""
    bench = make_bench(check={"norm": 1.5})
    run, arrivals, arrived = _run(bench), _arrivals(bench), _arrived(bench)
    arrivals.arrived(run, arrived, 1.0)
    arrivals.offered(run, "a", arrived.offer, 1.0)
    assert bench.events == []
    assert bench.retention.is_held("lease-1")
    bench.answer_jobs()
    (stored,) = bench.events
    assert isinstance(stored, events.Stored)
    assert (stored.lease, stored.norm, stored.length) == ("lease-1", 1.5, len(UPDATE))
    assert stored.report.num_samples == 10
    assert not bench.retention.is_held("lease-1")
    (job,) = bench.asked_jobs()
    assert Path(job["update"]) == arrived.path
    assert job["max_norm"] is None  # no round was committed yet


def test_an_update_with_a_wrong_header_is_refused_and_deleted(make_bench: Callable[..., Bench]) -> None:
    """One of two tensors is missing: the aggregator never sees it."""
    bench = make_bench()
    run, arrivals = _run(bench), _arrivals(bench)
    meta = {"num_samples": 10, "steps": 2, "payload": "params"}
    arrived = _arrived(bench, _container(meta, TABLE[:1]))
    arrivals.arrived(run, arrived, 1.0)
    (refused,) = bench.events
    assert isinstance(refused, events.Refused)
    assert refused.code == "names"
    assert not bench.blobs.has(arrived.offer.sha256)
    assert bench.asked_jobs() == []


def test_an_update_with_wrong_values_is_refused_and_deleted(make_bench: Callable[..., Bench]) -> None:
    """The aggregator answers with a code; the run goes on."""
    bench = make_bench(check={"ok": False, "code": "not_finite", "detail": "nan"})
    run, arrivals, arrived = _run(bench), _arrivals(bench), _arrived(bench)
    arrivals.arrived(run, arrived, 1.0)
    bench.answer_jobs()
    (refused,) = bench.events
    assert isinstance(refused, events.Refused)
    assert (refused.code, refused.detail) == ("not_finite", "nan")
    assert not bench.blobs.has(arrived.offer.sha256)
    assert bench.failed == []


def test_an_upload_that_failed_is_refused_with_its_reason(make_bench: Callable[..., Bench]) -> None:
    """Its bytes never had the hash that was announced."""
    bench = make_bench()
    run, arrivals = _run(bench), _arrivals(bench)
    arrivals.arrived(
        run, FinishedUpload(device="a", offer=_offer(), path=None, error=PayloadError("hash", "other")), 1.0
    )
    arrivals.arrived(run, FinishedUpload(device="a", offer=_offer(), path=None), 1.0)
    assert [event.code for event in bench.events if isinstance(event, events.Refused)] == ["hash", "hash"]


def test_an_upload_whose_lease_is_over_is_late(make_bench: Callable[..., Bench]) -> None:
    """The round ended while it travelled: deleted, and answered."""
    bench = make_bench()
    bench.add_run(model=MODEL)
    run = bench.active_run(round_row(), lease_row(1, state="expired", code="late"))
    arrived = _arrived(bench)
    _arrivals(bench).arrived(run, arrived, 1.0)
    ((device, receipt),) = bench.sent
    assert isinstance(receipt, Receipt)
    assert (device, receipt.status) == ("a", "late")
    assert not bench.blobs.has(arrived.offer.sha256)


def test_the_bound_of_a_norm_follows_from_committed_rounds(make_bench: Callable[..., Bench]) -> None:
    """Norms 1 and 3 of round 1: the median 2, times max_norm_ratio 4, is 8."""
    bench = make_bench(check={"norm": 1.5})
    bench.add_run(model=MODEL, rounds={"max_norm_ratio": 4.0})
    bench.store.rounds.open(round_row(), [lease_row(1), lease_row(2, "b")])
    for number, (name, norm) in enumerate((("a", 1.0), ("b", 3.0)), 1):
        bench.store.updates.save(update_row(name, f"lease-{number}", norm=norm), None, f"lease-{number}")
    bench.store.rounds.freeze("r-1", 1, 1, "hash")
    sent = bench.put(MODEL)
    bench.store.rounds.commit(1, 1, model_row(1, sha256=sent, sent_sha256=sent, sent_length=len(MODEL)))
    lease = lease_row(3, round=2, evaluate=False, version=1, state="accepted")
    run = bench.active_run(round_row(2), lease)
    sha256 = bench.put(UPDATE)
    offer = _offer(lease="lease-3", round=2, sha256=sha256)
    _arrivals(bench).arrived(run, FinishedUpload(device="a", offer=offer, path=bench.blobs.path(sha256)), 1.0)
    bench.answer_jobs()
    (job,) = bench.asked_jobs()
    assert job["max_norm"] == 8.0
