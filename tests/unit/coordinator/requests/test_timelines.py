"""Timelines of a run's rounds from its rows."""

from __future__ import annotations

import pytest
from raw_requests import answer
from rows import evaluation_row, lease_row, model_row, round_row, run_row, update_row
from service_site import Site

from edge_client.errors import InputError

MOMENTS = {"assign": 0.0, "accept": 0.25, "offer": 2.25, "arrive": 2.5, "check": 2.75}


def _train(site: Site) -> None:
    store = site.store
    store.runs.add(run_row("r-1"))
    store.runs.start(model_row(0), "0" * 64, 8)
    for number in (1, 2):
        leases = [lease_row(10 * number, "b", round=number), lease_row(10 * number + 1, "a", round=number)]
        store.rounds.open(round_row(number), leases)
        update = update_row("b", f"lease-{10 * number}", round=number)
        store.updates.save(update, evaluation_row("b"), update.lease, moments=MOMENTS, phases={"train": 1.5})
        store.rounds.commit(number, 1, model_row(number))
        store.rounds.announce("r-1", number, 1, {"freeze": 3.0, "fold": 3.5, "announce": 4.0, "pause": 0.5})
    store.runs.set_state("r-1", "stopped")


def test_a_timeline_has_each_device_of_the_newest_rounds(site: Site) -> None:
    """In the order of their names; a has not answered. The rounds are asked for by count or by number."""
    _train(site)
    with site.serving() as service:
        both = answer(service, "run-timeline", run="r-1")
        newest = answer(service, "run-timeline", run="latest", newest=1)
        first = answer(service, "run-timeline", run="r-1", round=1)
    assert [row["round"] for row in both["rounds"]] == [1, 2]
    assert [row["round"] for row in newest["rounds"]] == [2]
    (row,) = first["rounds"]
    assert (row["round"], row["attempt"], row["state"], row["pause_s"]) == (1, 1, "ANNOUNCED", 0.5)
    assert row["spans"][1] == {"name": "fold", "begins_s": 3.0, "ends_s": 3.5}
    silent, told = row["devices"]
    assert (silent["device"], silent["spans"]) == ("a", [])
    assert [span["name"] for span in told["spans"]] == ["send", "train", "write", "upload", "check"]
    assert told["spans"][1] == {"name": "train", "begins_s": 0.25, "ends_s": 1.75}


def test_a_round_that_is_not_there_is_told(site: Site) -> None:
    """With those that are."""
    _train(site)
    with site.serving() as service, pytest.raises(InputError, match=r"^--round: run 'r-1' has no round 7; .* 1 to 2$"):
        answer(service, "run-timeline", run="r-1", round=7)
