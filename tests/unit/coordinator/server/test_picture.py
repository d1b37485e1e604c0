"""One picture for all viewers: what is in it, that only what changed is made anew, and that nobody pays without one."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import service_site
from rows import PLAN, PROFILE, device_row, evaluation_row, lease_row, report, update_row

from coordinator.conductor.work_log import WorkLog
from coordinator.rounds.instructions import CloseLease, SaveUpdate
from coordinator.server.picture import MEMORY_BINS, memory_bin
from edge_client.wire.messages import Decline, Heartbeat

pytestmark = pytest.mark.usefixtures("aggregator")  # no job is done here


def test_a_picture_has_every_enrolled_device(tmp_path: Path) -> None:
    """a said hello and trains, step 3 of 10; b never connected."""
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        site.hello("a", 3.0)
        site.say("a", Heartbeat(state="working", phase="train", step=3, total=10, loss=0.5), 4.0)
        picture = service.pictures.newest(service, 5.0)
    a, b = picture.devices["a"], picture.devices["b"]
    assert (a.state, a.phase, a.step, a.total, a.loss, a.is_online) == ("working", "train", 3, 10, 0.5, True)
    assert (a.budget_bytes, a.kind) == (PROFILE.budget_bytes, PROFILE.kind)
    assert a.seen_s == pytest.approx(picture.taken_s - 1.0, abs=0.2)  # heard at 4, looked at 5
    assert (b.state, b.is_online, b.seen_s, b.budget_bytes) == ("offline", False, None, None)
    assert (picture.counts, picture.num_online, picture.run) == ({"offline": 1, "working": 1}, 1, None)
    assert (picture.federation, picture.epoch) == (service.federation, service.epoch)
    site.store.close()


def test_only_what_changed_has_a_new_number(tmp_path: Path) -> None:
    """A heartbeat that says the same moves `seen_s` alone; one that says more moves the row; b is the same object."""
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        site.hello("a", 0.0)
        site.say("a", Heartbeat(state="idle"), 0.1)
        first = service.pictures.newest(service, 1.0)
        assert service.pictures.newest(service, 1.9) is first  # not a second old
        site.say("a", Heartbeat(state="idle"), 3.0)
        second = service.pictures.newest(service, 3.0)
        site.say("a", Heartbeat(state="working"), 4.0)
        third = service.pictures.newest(service, 5.0)
        late = service.pictures.newest(service, 100.0)  # a is silent since 96 s: offline
    assert [picture.number for picture in (first, second, third, late)] == [1, 2, 3, 4]
    assert second.devices["b"] is first.devices["b"]
    assert second.changed_since(1) == []
    assert second.devices["a"] == replace(first.devices["a"], seen_s=second.devices["a"].seen_s)
    assert [row.name for row in third.changed_since(2)] == ["a"]
    assert [(row.name, row.state) for row in late.changed_since(3)] == [("a", "offline")]
    assert first.devices["a"].state == "idle"  # a picture does not change
    assert late.counts == {"offline": 2}
    site.store.close()


def test_enrolled_and_removed_devices_change_the_names(tmp_path: Path) -> None:
    """c is enrolled before the second picture, a removed before the third; labels change no names."""
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        first = service.pictures.newest(service, 0.0)
        service.roster.set_devices([device_row(name) for name in "abc"])
        second = service.pictures.newest(service, 2.0)
        service.roster.set_devices([device_row(name) for name in "bc"])
        third = service.pictures.newest(service, 4.0)
        service.roster.set_devices([device_row("b", labels={"line": "7"}), device_row("c")])
        fourth = service.pictures.newest(service, 6.0)
    assert [list(p.devices) for p in (first, second, third)] == [["a", "b"], ["a", "b", "c"], ["b", "c"]]
    assert [p.names_changed_in for p in (first, second, third, fourth)] == [1, 2, 3, 3]
    assert [row.name for row in second.changed_since(1)] == ["c"]
    assert third.counts == {"offline": 2}
    assert [(row.name, row.labels) for row in fourth.changed_since(3)] == [("b", {"line": "7"})]
    site.store.close()


def test_a_picture_has_the_open_run_and_why_a_device_brought_nothing(tmp_path: Path) -> None:
    """After a restart in round 1: a's update is stored, b declines; its reason stays on its row."""
    site = service_site.Site(tmp_path)
    service_site.with_run(site)
    with site.serving() as service:
        site.hello("b", 0.0)
        before = service.pictures.newest(service, 0.0)
        site.say("b", Decline(lease="lease-2", code="nothing_fits", detail="needs 3 GB"), 1.0)
        after = service.pictures.newest(service, 2.0)
    run = before.run
    assert run is not None
    assert (run.run, run.state, run.phase, run.round, run.goal, run.num_updates) == (
        "r-1",
        "running",
        "RUNNING",
        1,
        2,
        1,
    )
    assert (before.devices["a"].lease, before.devices["a"].reported_in) == ("stored", 1)
    assert before.devices["a"].predicted_bytes == PLAN.predicted_bytes
    assert (before.devices["b"].lease, before.devices["b"].why) == ("accepted", "")
    assert (after.devices["b"].lease, after.devices["b"].why) == ("declined", "nothing_fits: needs 3 GB")
    site.store.close()


def test_without_a_viewer_no_picture_is_taken(tmp_path: Path) -> None:
    """Only after somebody asked for the newest one, and for five seconds."""
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        pictures = service.pictures
        pictures.look(service, 0.0)
        assert pictures._picture is None
        assert pictures.latest is None  # from now on somebody looks
        wanted_at = pictures._wanted_at
        pictures.look(service, wanted_at + 1)
        first = pictures._picture
        assert first is not None
        pictures.look(service, wanted_at + 1.5)
        assert pictures._picture is first
        pictures.look(service, wanted_at + 10)
        assert pictures._picture is first
    site.store.close()


def test_a_viewer_in_another_thread_is_woken(tmp_path: Path) -> None:
    """It has picture 1 and waits for a later one, which the loop takes; nobody takes a third."""
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        first = service.pictures.newest(service, 0.0)
        seen: list[int] = []

        def view() -> None:
            picture = service.pictures.wait_for(first.number, 20.0)
            seen.append(picture.number if picture is not None else 0)

        viewer = threading.Thread(target=view)
        viewer.start()
        second = service.pictures.newest(service, 5.0)
        viewer.join(20.0)
        assert seen == [second.number]
        assert service.pictures.wait_for(second.number, 0.01) is None
    site.store.close()


def test_the_bins_of_memory() -> None:
    """A peak of the whole budget is inside it; one byte more is not. 40 bins of 2.5 %: a half begins the 21st."""
    budget = 40_000
    assert [memory_bin(peak, budget) for peak in (1, 999, 1000, 20_000, 39_999, 40_000, 40_001)] == [
        *(0, 0, 1, 20, MEMORY_BINS - 1, MEMORY_BINS - 1, MEMORY_BINS)
    ]


def test_the_log_of_work_follows_a_lease() -> None:
    """Offered, stored with a report and an evaluation (9 of 10), then declined in the next round: the peak stays."""
    changed: list[str] = []
    log = WorkLog(changed.append)
    log.opened([lease_row(1, "a")])
    evaluation = evaluation_row("a", num_samples=10, num_correct=9)
    log.stored(SaveUpdate("lease-1", update_row(report=report(peak_bytes=70)), evaluation))
    work = log.of("a")
    assert work is not None
    assert (work.lease, work.reported_in, work.peak_bytes, work.accuracy) == ("stored", 1, 70, 0.9)
    log.opened([lease_row(2, "a", round=2)])
    log.closed(CloseLease("lease-2", "declined", "crashed", "twice", ()))
    work = log.of("a")
    assert work is not None
    assert (work.lease, work.why, work.round, work.reported_in, work.peak_bytes) == (
        "declined",
        "crashed: twice",
        2,
        1,
        70,
    )
    assert changed == ["a"] * 4
    log.closed(CloseLease("lease-1", "expired", "late", "", ()))  # of an attempt that is over: nobody shows it
    assert log.of("a") is work
    assert log.of("b") is None
