"""Requests about runs: which run is meant, what is shown of it, what a dry run takes away."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from raw_requests import answer
from rows import (
    PLAN,
    evaluation_row,
    lease_row,
    model_row,
    report,
    round_row,
    run_file,
    run_row,
    update_row,
)
from service_site import Site

from coordinator.requests.runs import judged, version_of
from edge_client.errors import InputError, NoSuchNameError
from edge_client.records import to_map


def test_a_run_is_named_by_its_id_or_a_beginning_that_no_other_has(site: Site) -> None:
    """`r-1` is an id, though r-10 begins with it; `r` and nothing at all are no names."""
    for name in ("r-1", "r-10", "s-1"):
        site.store.runs.add(run_row(name, state="failed"))
    with site.serving() as service:
        for asked, found in {"r-1": "r-1", "r-10": "r-10", "s": "s-1", "latest": "s-1"}.items():
            assert answer(service, "run-show", run=asked)["run"] == found
        with pytest.raises(NoSuchNameError, match="run 'r' may be any of r-1, r-10; name one of them"):
            answer(service, "run-show", run="r")
        with pytest.raises(NoSuchNameError, match="unknown run 'x'; known: r-1, r-10, s-1"):
            answer(service, "run-show", run="x")


def test_a_long_run_is_shown_with_its_newest_rounds_and_counts(site: Site) -> None:
    """1,300 versions, 250 of them judged, 30 failed leases: 1,001 models, 200 evaluations, 20 failures, 50 rounds."""
    store = site.store
    store.runs.add(run_row("r-1"))
    store.runs.start(model_row(0), "0" * 64, 8)
    for version in range(1, 1301):
        store.rounds.open(round_row(version), [])
        store.rounds.commit(version, 1, model_row(version))
        store.rounds.announce("r-1", version, 1)
    store.rounds.open(round_row(1301), [lease_row(i, f"d{i}", round=1301) for i in range(1, 31)])
    for i in range(1, 31):
        store.leases.set_state(f"lease-{i}", "declined", code="crashed", detail="why", log=("x",))
    for version in range(250):
        store.updates.save(None, evaluation_row("a", version), "none")
    store.runs.set_state("r-1", "stopped")
    with site.serving() as service:
        shown = answer(service, "run-show", run="r-1")
        wider = answer(service, "run-show", run="r-1", newest=1000)
    assert (shown["num_models"], shown["num_evaluations"]) == (1301, 250)
    assert [model["version"] for model in shown["models"]] == list(range(300, 1301))
    assert [found["version"] for found in shown["evaluations"]] == list(range(50, 250))
    assert len(wider["evaluations"]) == 250
    assert len(shown["round_rows"]) == 50
    assert [lease["state"] for lease in shown["leases"]] == ["declined"] * 30
    told = {"round": 1301, "attempt": 1, "state": "declined", "code": "crashed", "detail": "why", "log": ["x"]}
    assert shown["failures"] == [{"device": f"d{i}", **told} for i in range(30, 10, -1)]  # the newest 20


def test_a_run_shows_what_each_device_planned_and_used(site: Site) -> None:
    """The newest plan; budget and peak of the round nearest to its budget; one peak beyond its own's is not inside.

    In round 1 device a had 200 bytes and used 190 (95 %), in round 2 it had 100 and used 90; b used 101 of 100.
    """
    store = site.store
    store.runs.add(run_row("r-1"))
    store.runs.start(model_row(0), "0" * 64, 8)
    used = {(1, "a"): (200, 190, 2.0), (2, "a"): (100, 90, 1.0), (2, "b"): (100, 101, 1e299)}
    for issue, ((number, device), (budget, peak, replans)) in enumerate(used.items(), start=1):
        if issue <= 2:
            leases = [lease_row(issue + k, name, round=number) for k, name in enumerate("ab"[:number])]
            store.rounds.open(round_row(number), leases)
        plan = replace(PLAN, budget_bytes=budget, predicted_bytes=97 - number, microbatch=4, groups=(("b1",), ("b2",)))
        told = report(plan=plan, peak_bytes=peak, base_bytes=50, scalars={"replans": replans})
        lease = f"lease-{issue}"
        store.updates.save(update_row(device, lease, round=number, report=told), None, lease)
        if issue == 1:
            store.rounds.commit(1, 1, model_row(1))
    with site.serving() as service:
        a, b = answer(service, "run-show", run="r-1")["devices"]
    assert (a["plan"], a["plan_details"]["microbatch"]) == ("2 groups, microbatch 4", 4)
    assert (a["budget_bytes"], a["predicted_bytes"], a["peak_bytes"], a["base_bytes"]) == (200, 96, 190, 50)
    assert (a["inside_budget"], a["replans"]) == (True, 3)
    assert (b["inside_budget"], b["replans"]) == (False, 10**6)


def test_test_data_that_the_server_lacks_are_told_before_the_run_begins(site: Site, tmp_path: Path) -> None:
    """A path of another machine: nothing is queued."""
    file = to_map(run_file(evaluate={"on": f"npz:{tmp_path / 'nowhere.npz'}"}))
    with site.serving() as service, pytest.raises(InputError, match=r"evaluate\.on: .*nowhere\.npz is none"):
        answer(service, "run-start", file=file)
    assert site.store.runs.all() == []


def test_a_new_dry_run_takes_away_the_one_before_and_its_blobs(site: Site) -> None:
    """Its settings and its first model, which may be large; what a real run needs too stays."""
    file = run_file(name="r")
    with site.serving() as service:
        content = {name: name.encode() for name in ("settings", "own", "shared")}
        hashed = {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}
        for name, data in content.items():
            service.blobs.write(data, hashed[name], point="test")
        for run, model, dry in (("r-1", "shared", False), ("r-dry-1", "shared", True), ("r-dry-2", "own", True)):
            site.store.runs.add(run_row(run, file, dry=dry))
            row = model_row(0, run, sha256=hashed["shared"], sent_sha256=hashed[model])
            site.store.runs.start(row, hashed["settings"] if dry else "0" * 64, 8)
            site.store.runs.set_state(run, "finished")
        answer(service, "run-start", file=to_map(file), dry=True)
        assert [run.id for run in site.store.runs.all()] == ["r-1", "r-dry-1"]  # the new one took a free number
        assert {name: service.blobs.path(sha256).exists() for name, sha256 in hashed.items()} == {
            "settings": False,
            "own": False,
            "shared": True,
        }


def test_the_version_that_is_meant_is_the_best_one_or_the_last_where_none_was_judged() -> None:
    """Typed versions stay; other words are one line. The answer says how a version was judged."""
    judged_run, other = run_row(best_version=4), run_row()
    assert (version_of(judged_run, ""), version_of(other, "")) == ("best", "last")
    assert [version_of(judged_run, text) for text in ("last", "best", "7")] == ["last", "best", "7"]
    with pytest.raises(InputError, match="expected a number, best or last, got 'newest'"):
        version_of(judged_run, "newest")
    assert judged(judged_run, model_row(4, score=0.55)) == {"metric": "accuracy", "score": 0.55, "is_best": True}
    assert judged(judged_run, model_row(10, score=0.39)) == {"metric": "accuracy", "score": 0.39, "is_best": False}
    assert judged(other, model_row(1)) == {"metric": "", "score": None, "is_best": False}
