"""Which blobs stay on the coordinator's disk: the last ten models, the best one, settings; updates go at commit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from rows import lease_row, model_row, round_row, run_row, update_row

from coordinator.aggregation.job_child import aggregator
from coordinator.conductor.conductor import Conductor
from coordinator.fleet.roster import Roster
from coordinator.fleet.traffic import TrafficMeter
from coordinator.fleet.transfers import Downloads, Uploads
from coordinator.rounds.instructions import Announce, Commit, OpenRound, SaveScore, SaveUpdate
from coordinator.state import RETAINED_MODELS
from coordinator.store.rows import ModelRow
from coordinator.store.sqlite import SqliteStore
from edge_client.transport.blobs import BlobStore


class Site:
    """A conductor on a real store and real blobs; each version has a form that travels and one that stays."""

    def __init__(self, folder: Path) -> None:
        self.store = SqliteStore(folder / "state.db")
        self.blobs = BlobStore(folder / "blobs", folder / "tmp")
        self.uploads = Uploads(self.blobs, arrived=lambda arrived: None)
        self.conductor = Conductor(
            store=self.store,
            blobs=self.blobs,
            uploads=self.uploads,
            downloads=Downloads(self.blobs),
            traffic=TrafficMeter(),
            aggregation=aggregator(),
            send=lambda device, message: None,
            announce=lambda what: None,
            roster=Roster("f1", [], epoch=1, heartbeat_s=1.0),
            epoch=1,
        )
        self.store.runs.add(run_row())
        self.settings = self.put("settings")
        self.store.runs.start(self.model(0), self.settings, 8)
        self.conductor.run = self.store.runs.get("r-1")

    def put(self, text: str) -> str:
        sha256 = hashlib.sha256(text.encode()).hexdigest()
        self.blobs.write(text.encode(), sha256, point="test")
        return sha256

    def model(self, version: int) -> ModelRow:
        return model_row(version, sha256=self.put(f"model {version}"), sent_sha256=self.put(f"sent {version}"))

    def run_round(self, number: int) -> None:
        """One update comes, is folded into the next version, and everybody is told."""
        round_ = round_row(number)
        lease = lease_row(number, round=number)
        update = update_row(lease=lease.id, round=number, sha256=self.put(f"update {number}"))
        self.conductor._carry_out([OpenRound(round_, (lease,)), SaveUpdate(lease.id, update, None)])
        assert self.blobs.has(update.sha256)
        self.conductor._carry_out([Commit(round_, self.model(number)), Announce(round_, number)])

    def judge(self, version: int, best: int) -> None:
        self.conductor._carry_out([SaveScore(version, 0.5, best)])

    def versions(self) -> list[int]:
        """Those whose two blobs are here; never only one of them. Beside them only the settings are."""
        rows = self.store.models.all("r-1")
        kept = [row for row in rows if self.blobs.has(row.sha256)]
        assert kept == [row for row in rows if self.blobs.has(row.sent_sha256)]
        named = {name for row in kept for name in (row.sha256, row.sent_sha256)} | {self.settings}
        assert set(self.blobs.names()) == named
        assert self.store.blob_references.needed(RETAINED_MODELS) == named
        assert all(self.store.blob_references.is_needed(name, RETAINED_MODELS) for name in named)
        return [row.version for row in kept]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.uploads.close()
    made.store.close()


def test_the_best_version_survives_fifteen_rounds_and_an_older_one_goes(site: Site) -> None:
    """Ten newest of 15 are 6 to 15; version 3 is the best; 0 to 2, 4, 5 and all updates are gone."""
    for number in range(1, 16):
        site.run_round(number)
        if number == 3:
            site.judge(3, best=3)
    assert site.versions() == [3, *range(6, 16)]


def test_a_best_version_that_is_beaten_goes_at_once(site: Site) -> None:
    """Version 3 was kept for being the best only; a former best among the newest ten stays."""
    for number in range(1, 16):
        site.run_round(number)
        if number == 3:
            site.judge(3, best=3)
    site.judge(12, best=12)
    assert site.versions() == list(range(6, 16))
    site.judge(15, best=15)
    assert site.versions() == list(range(6, 16))


def test_a_restart_keeps_the_same(site: Site) -> None:
    """What the clean-up at a start leaves is what was there; a stray blob goes."""
    for number in range(1, 16):
        site.run_round(number)
        if number == 3:
            site.judge(3, best=3)
    site.put("stray")
    site.conductor._clean_up(site.store.runs.get("r-1"))
    assert site.versions() == [3, *range(6, 16)]
