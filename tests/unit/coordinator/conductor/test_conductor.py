"""A conductor in a coordinator whose loop is turned by hand: what it finds damaged at its start, and how runs end."""

from __future__ import annotations

import hashlib
import logging
import select
import time
from typing import Any

import pytest
import service_site
from raw_requests import answer
from rows import (
    lease_row,
    model_row,
    round_row,
    run_file,
    run_row,
    update_row,
)
from service_site import CHILD, Site, answers, damage, read_until, with_run

from coordinator.results.similarity_record import Compared, Comparison, Similarity, setting_of
from coordinator.rounds.instructions import Fold
from coordinator.store.rows import PartRow
from edge_client.errors import InputError
from edge_client.records import from_map, to_map
from edge_client.wire.messages import (
    Decline,
    Offer,
    Receipt,
    Welcome,
)


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_lost_update_is_asked_for_again_at_the_start(site: Site, state: str, how: str) -> None:
    """Its row is gone, its lease is offered, the round runs; a frozen set was never used."""
    with_run(site, state=state)
    damage(site, b"update of a", how)
    with site.serving() as service:
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "RUNNING"
        assert site.store.updates.of_attempt("r-1", 1, 1) == []
        assert site.leases()["a"] == ("offered", "")
        assert not list(site.blobs.path("ab").parent.parent.glob("*/" + hashlib.sha256(b"update of a").hexdigest()))


def test_a_round_whose_lost_update_is_forgotten_by_its_device_still_ends(site: Site) -> None:
    """b's update counts; a deleted its own after the receipt and declines as `forgotten`: one of one is the quorum."""
    with_run(site)
    site.blobs.write(b"update of b", hashlib.sha256(b"update of b").hexdigest(), point="test")
    update = update_row("b", "lease-2", sha256=hashlib.sha256(b"update of b").hexdigest())
    site.store.updates.save(update, None, "lease-2")
    damage(site, b"update of a", "missing")
    with site.serving() as service:
        site.hello("a")
        site.say("a", Decline(lease="lease-1", code="forgotten"))
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "FROZEN"


def test_an_update_that_is_whole_is_kept_at_the_start(site: Site) -> None:
    """Nothing changes."""
    with_run(site)
    with site.serving():
        assert [update.device for update in site.store.updates.of_attempt("r-1", 1, 1)] == ["a"]
        assert site.leases() == {"a": ("stored", ""), "b": ("accepted", "")}


@pytest.mark.parametrize("what", [b"model", b"settings"])
def test_a_damaged_model_ends_the_run_with_the_reason(site: Site, what: bytes) -> None:
    """Failed: its round is abandoned, its leases are closed, its update's blob is gone; the next start is as any."""
    with_run(site)
    damage(site, what, "damaged")
    for _ in range(2):
        with site.serving() as service:
            assert service.conductor.machine is None
    run = site.store.runs.get("r-1")
    assert run is not None
    assert run.state == "failed"
    assert "version 0 is missing or damaged" in run.reason
    assert [round_.state for round_ in site.store.rounds.all("r-1")] == ["ABANDONED"]
    assert site.leases()["b"] == ("cancelled", "abandoned")
    assert not site.blobs.has(hashlib.sha256(b"update of a").hexdigest())


def test_a_run_that_fails_in_its_fold_gives_up_its_round(site: Site) -> None:
    """The aggregator refuses the fold: the round is abandoned and nobody needs the update any more."""
    with_run(site, state="FROZEN")
    update = hashlib.sha256(b"update of a").hexdigest()
    with site.serving() as service:
        while service.conductor.machine is not None:
            fd = service._aggregation.fd
            assert fd is not None
            select.select([fd], [], [], 20)
            service._aggregation.read(0.0)
    run = site.store.runs.get("r-1")
    assert run is not None
    assert (run.state, run.reason) == ("failed", "not_finite: no")
    assert [round_.state for round_ in site.store.rounds.all("r-1")] == ["ABANDONED"]
    assert not site.store.blob_references.is_needed(update, 10)
    assert not site.blobs.has(update)


_CUT_FAILS = """
import hashlib, json, sys
for line in sys.stdin:
    job = json.loads(line)
    answer = {"ok": False, "code": "input", "detail": "no"}
    if job["job"] == "fold":
        open(job["out"], "wb").write(b"next")
        answer = {"ok": True, "sha256": hashlib.sha256(b"next").hexdigest(), "length": 4}
    print(json.dumps({"id": job["id"], **answer}), flush=True)
"""


def test_a_fold_that_ends_after_its_run_stops_nobody(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a round is folded, a slice for a late device cannot be cut, and the run fails with that reason.

    Nobody waits for the fold any more: its answer changes nothing, and the next run is begun.
    """
    monkeypatch.setattr(service_site, "CHILD", _CUT_FAILS)
    with_run(site)
    with site.serving() as service:
        conductor, updates = service.conductor, tuple(site.store.updates.of_attempt("r-1", 1, 1))
        run = conductor._active
        assert run is not None
        late = lease_row(3, "b", slice="width:1/2")
        conductor._assignments._parts.make(run, late.slice, late, lambda is_current: None)
        conductor._commits.fold(run, Fold(round_row(), updates, "hash"))
        read_until(service, lambda: conductor.machine is None)
        assert service._aggregation.idle
        site.store.runs.add(run_row("r-2"))
        conductor.tick(frozenset(), 2, 0.0)
        read_until(service, lambda: site.store.runs.oldest("queued") is None)
    reasons = {run.id: (run.state, run.reason) for run in site.store.runs.all()}
    assert reasons == {"r-1": ("failed", "input: no"), "r-2": ("failed", "input: no")}


_CUTS = """
import hashlib, json, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["job"] == "encode" and job["slice"] == "width:1/2":
        open(job["out"], "wb").write(b"slice")
    answer = {"ok": True, "sha256": hashlib.sha256(b"slice").hexdigest(), "length": 5}
    print(json.dumps({"id": job["id"], **answer}), flush=True)
"""


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_lost_slice_is_cut_again_at_the_start(site: Site, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The model that it is cut from is whole.

    Device b has accepted, and offers too early: it is heard when the slice is there again, which b can fetch then.
    """
    monkeypatch.setattr(service_site, "CHILD", _CUTS)
    file = run_file(model={"name": "mlp", "input": [1, 2, 2]}, slices=["full", "width:1/2"], evaluate={"every": 0})
    model, settings, cut = b"model", b"{}", b"slice"
    names = {data: hashlib.sha256(data).hexdigest() for data in (model, settings, cut)}
    for data, name in names.items():
        site.blobs.write(data, name, point="test")
    site.store.runs.add(run_row("r-1", file))
    first = model_row(0, sha256=names[model], sent_sha256=names[model])
    site.store.runs.start(first, names[settings], len(settings))
    site.store.models.add_part(PartRow(run="r-1", version=0, slice="width:1/2", sha256=names[cut], length=len(cut)))
    site.store.rounds.open(round_row(goal=1, quorum=1), [lease_row(1, "b", state="accepted", slice="width:1/2")])
    damage(site, cut, how)
    with site.serving() as service:
        site.hello("b")
        offer = Offer(lease="lease-1", run="r-1", round=1, sha256="ab" * 32, length=10, num_samples=5)
        site.say("b", offer)
        assert not service.uploads.is_open("b", offer)
        assert service.conductor.may_pull("b", names[cut]) is None
        read_until(service, lambda: site.blobs.has(names[cut]))
        assert service.conductor.may_pull("b", names[cut]) == len(cut)
        site.say("b", offer)
        assert service.uploads.is_open("b", offer)
        assert site.leases() == {"b": ("accepted", "")}


_FOLDS = """
import hashlib, json, sys
compared = {"round": 1, "num_samples": 3, "devices": [{"device": "a", "slice": "full"}]}
for line in sys.stdin:
    job = json.loads(line)
    answer = {"ok": False, "code": "input", "detail": "no such file"}
    if job["job"] == "fold":
        open(job["out"], "wb").write(b"next")
        answer = {"ok": True, "sha256": hashlib.sha256(b"next").hexdigest(), "length": 4}
    if job["job"] == "probe" and job["data"] == "/good.npz" and [u["device"] for u in job["updates"]] == ["a"]:
        answer = {"ok": True, "comparison": compared, "labels": [], "pictures": []}
    print(json.dumps({"id": job["id"], **answer}), flush=True)
"""


@pytest.mark.parametrize("name", ["good", "bad"])
def test_a_round_goes_on_whatever_came_of_comparing_its_models(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The round is announced; what came of it, or why nothing did, is shown to who asks."""
    monkeypatch.setattr(service_site, "CHILD", _FOLDS)
    with_run(site, state="FROZEN", on=f"npz:/{name}.npz")
    with site.serving() as service:
        read_until(service, lambda: site.store.rounds.all("r-1")[0].state == "ANNOUNCED")
        shown = answer(service, "run-show", run="r-1", report=True)
        assert "similarity" not in answer(service, "run-show", run="r-1")
    assert shown["updates_by_round"] == [{"round": 1, "num_updates": 1}]
    found = from_map(Similarity, shown["similarity"])
    if name == "good":
        assert found.last == Comparison(round=1, num_samples=3, devices=(Compared(device="a", slice="full"),))
    else:
        assert (found.last, found.problem) == (None, "round 1: no such file")
        assert "the devices' models could not be compared: input: no such file" in caplog.text


@pytest.mark.parametrize("evaluate", [{"on": "npz:/good.npz", "similarity": 0}, {"on": "devices"}])
def test_models_are_not_compared_where_nobody_can_or_wants_to(
    site: Site, monkeypatch: pytest.MonkeyPatch, evaluate: dict[str, Any]
) -> None:
    """Switched off, and without test data: nothing is asked for, and nothing is kept."""
    monkeypatch.setattr(service_site, "CHILD", _FOLDS)
    with_run(site, state="FROZEN", **evaluate)
    with site.serving() as service:
        read_until(service, lambda: site.store.rounds.all("r-1")[0].state == "ANNOUNCED")
    assert site.store.settings.get(setting_of("r-1")) == ""


def _ended_run(site: Site) -> None:
    """The run r-1 with the model `model`, over."""
    with_run(site)
    site.store.runs.fail("r-1", "over")


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_run_that_goes_on_from_a_lost_model_fails_alone(site: Site, how: str) -> None:
    """Queued while the model was there: it ends with the reason, and the coordinator serves; a new one is refused."""
    _ended_run(site)
    file = run_file(model={"name": "mlp", "input": [1, 2, 2], "init": "run:r-1"})
    site.store.runs.add(run_row("r-2", file))
    damage(site, b"model", how)
    with site.serving() as service:
        service.conductor.tick(frozenset(), 2, 0.0)
        run = site.store.runs.get("r-2")
        assert run is not None
        assert run.state == "failed"
        assert "version 0 of run 'r-1'" in run.reason
        assert "missing or damaged" in run.reason
        with pytest.raises(InputError, match="missing or damaged"):
            answer(service, "run-start", file=to_map(file))


_STUCK = f"import time{CHILD}".replace("    print", "    time.sleep(1000 if 'stuck' in line else 0)\n    print")


@pytest.mark.parametrize("dry", [False, True])
def test_a_run_that_is_stopped_while_its_first_model_is_made_stands_in_nobodys_way(
    site: Site, monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    """A task's own code never ends. The stopped run stays stopped, and the next one gets its answer; not the same."""
    monkeypatch.setattr(service_site, "CHILD", _STUCK)
    first, second = (to_map(run_file(classes=["no", word])) for word in ("stuck", "yes"))
    with site.serving() as service:
        stuck = answer(service, "run-start", file=first, dry=dry)["run"]
        service.conductor.tick(frozenset(), 2, 0.0)
        answer(service, "run-stop", run=stuck)
        after = answer(service, "run-start", file=second, dry=dry)["run"]
        assert (stuck, after) == (("r-dry-1", "r-dry-1") if dry else ("r-1", "r-2"))  # the number of a dry run is free
        service.conductor.tick(frozenset(), 2, 1.0)
        read_until(service, lambda: site.store.runs.oldest("queued") is None)
    ended = [(run.file["classes"][1], run.state, run.reason) for run in site.store.runs.all()]
    assert ended[-1] == ("yes", "failed", "not_finite: no")
    assert ended[:-1] == ([] if dry else [("stuck", "stopped", "stopped before it began")])


def test_a_run_that_is_stopped_while_the_server_judges_it_stands_in_nobodys_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation never ends; the run is stopped, and the next one gets its answer."""
    monkeypatch.setattr(service_site, "CHILD", _STUCK)
    with_run(site)
    site.store.rounds.abandon("r-1", 1, 1, "why")
    site.store.runs.fail("r-1", "why")
    names = [hashlib.sha256(data).hexdigest() for data in (b"model", b"settings")]
    site.store.runs.add(run_row("r-2", run_file(evaluate={"on": "npz:/stuck.npz"})))
    site.store.runs.start(model_row(0, "r-2", sha256=names[0], sent_sha256=names[0]), names[1], 8)
    site.store.runs.add(run_row("r-3"))
    with site.serving() as service:
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "EVALUATING"
        answer(service, "run-stop", run="r-2")
        for now in (0.0, 1.0):
            service.conductor.tick(frozenset(), 2, now)
        read_until(service, lambda: site.store.runs.oldest("queued") is None)
    assert [(run.state, run.reason) for run in site.store.runs.all()[1:]] == [
        ("stopped", "stopped on request"),
        ("failed", "not_finite: no"),
    ]


def test_the_log_names_the_device_whose_failure_ends_a_round(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """b is the last that could answer, and a's update is lost: the round is abandoned in the same step."""
    with_run(site)
    damage(site, b"update of a", "missing")
    with site.serving() as service, caplog.at_level(logging.WARNING):
        later = time.monotonic() + 31.0  # nobody waits for substitutes any more
        for number, name in enumerate("ab", 1):
            site.hello(name, later)
            site.say(name, Decline(lease=f"lease-{number}", code="crashed", detail="why"), later)
        assert service.conductor.machine is not None
        assert service.conductor.machine.round is None
    assert [f"{name}: declined (crashed: 'why')" in caplog.text for name in "ab"] == [True, True]


@pytest.mark.parametrize(("run", "number"), [("r-2", 1), ("r-1", 2)])
def test_an_offer_for_another_run_or_round_than_its_lease_is_refused(site: Site, run: str, number: int) -> None:
    """b's lease is of r-1, round 1."""
    with_run(site)
    with site.serving() as service:
        heard: list[bytes] = []
        device = site.hub.transport("b", lambda event: heard.append(getattr(event, "payload", b"")))
        device.subscribe((service.topics.device("b", "cmd"),))
        device.connect()
        assert service._transport is not None
        service._transport.connect()
        site.hub.poll()
        heard.clear()
        site.hello("b")
        offer = Offer(lease="lease-2", run=run, round=number, sha256="0" * 64, length=50, num_samples=3)
        site.say("b", offer)
        site.hub.poll()
        assert site.leases()["b"] == ("refused", "malformed")
        welcome, receipt = answers(site, "b", heard)
        assert isinstance(welcome, Welcome)
        assert isinstance(receipt, Receipt)
        assert (receipt.status, receipt.code) == ("refused", "malformed")
        device.close()
