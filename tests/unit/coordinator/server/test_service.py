"""The coordinator's loop by hand: what it drops, whom it suspends, what it finds damaged at its start."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rows import (
    PLAN,
    PROFILE,
    device_row,
    evaluation_row,
    lease_row,
    model_row,
    report,
    round_row,
    run_file,
    run_row,
    update_row,
)

from coordinator.aggregation import job_child
from coordinator.broker.broker import DeviceAccess, EmbeddedBroker, new_password
from coordinator.requests.commands import Commands
from coordinator.results.similarity_record import Compared, Comparison, Similarity, setting_of
from coordinator.rounds.instructions import Fold
from coordinator.server.service import Service, ServiceOptions
from coordinator.store.rows import PartRow
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import InputError, NoSuchNameError
from edge_client.records import from_map, to_map
from edge_client.transport.blobs import BlobStore
from edge_client.transport.inproc import Hub
from edge_client.wire.chunks import CHUNK_BYTES, make_chunk, transfer_id
from edge_client.wire.messages import (
    Decline,
    Hello,
    Message,
    Offer,
    Receipt,
    Welcome,
    context_down,
    context_up,
    open_message,
    seal_message,
)

_CHILD = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "ok": False, "code": "not_finite", "detail": "no"}), flush=True)
"""


@pytest.fixture(autouse=True)
def aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that refuses every job, without torch."""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", _CHILD], **options)

    monkeypatch.setattr(job_child.subprocess, "Popen", start)


class Site:
    """A service on a hub in memory, and the devices a and b, which speak the real wire."""

    def __init__(self, folder: Path, reserve: int = 0) -> None:
        self.folder, self.reserve = folder, reserve
        self.hub = Hub()
        self.store = SqliteStore()
        if not self.store.devices.all():
            passwords = {"a": new_password(), "b": new_password()}
            self.store.devices.add(*(device_row(name, password=passwords[name]) for name in passwords))
        everything = ("fl/#",)
        access = DeviceAccess(name="coordinator", password=new_password(), publish=everything, subscribe=everything)
        self.broker = EmbeddedBroker(folder / "broker", coordinator=access)  # never started: it only knows its users
        self.blobs = BlobStore(folder / "blobs", folder / "tmp")
        self.sessions: dict[str, str] = {}
        self.seq = 0
        self.said: list[tuple[str, bytes]] = []

    @contextlib.contextmanager
    def serving(self) -> Iterator[Service]:
        service = Service(
            state_dir=self.folder,
            store=self.store,
            broker=self.broker,
            brokers=("mqtt://hub",),
            ca=None,
            connect=lambda on_event: self.hub.transport("coordinator", on_event),
            options=ServiceOptions(disk_reserve_bytes=self.reserve),
        )
        with contextlib.ExitStack() as opened:
            opened.callback(service._aggregation.close)
            service.begin(opened)
            self.service = service
            yield service

    def receive(self, device: str, channel: str, payload: bytes, now: float = 0.0) -> None:
        self.service._received(self.service.topics.device(device, channel), payload, now)

    def say(self, device: str, message: Message, now: float = 0.0) -> None:
        self.seq += 1
        key, context = bytes.fromhex(device_row(device).key), context_up(self.service.federation, device)
        session = self.sessions.get(device, "")
        self.receive(device, "up", seal_message(message, session=session, seq=self.seq, key=key, context=context), now)

    def try_hello(self, device: str, now: float) -> None:
        self.say(device, Hello(boot="boot", hello=1, profile=PROFILE, labels={}, free_bytes=5, client="c\x1b[2J"), now)

    def hello(self, device: str, now: float = 0.0) -> None:
        self.try_hello(device, now)
        present = self.service.roster.presence(device)
        assert present is not None
        self.sessions[device] = present.session

    def users(self) -> set[str]:
        return {user.name for user in self.broker.users}

    def leases(self) -> dict[str, tuple[str, str]]:
        return {lease.device: (lease.state, lease.code) for lease in self.store.leases.of_attempt("r-1", 1, 1)}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


JUNK = {
    "large messages": ("up", b"FF" + bytes(119_998), 290),
    "large chunks": ("data", make_chunk(bytes(16), 0, bytes(CHUNK_BYTES)), 290),
    "small messages": ("up", b"junk", 2001),
    "small chunks": ("data", b"junk", 2001),
    "chunks without a session": ("data", make_chunk(bytes(16), 0, b"x"), 2001),
}


@pytest.mark.parametrize("kind", list(JUNK))
def test_a_device_that_floods_is_suspended_told_and_let_in_again(
    site: Site, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """a sends junk: one line of log, the broker cuts a alone, nothing of a is heard, and 61 s later it is."""
    caplog.set_level(logging.INFO)
    channel, payload, count = JUNK[kind]
    with site.serving() as service:
        site.hello("b")
        if kind != "chunks without a session":
            site.hello("a")
        for _ in range(count):
            site.receive("a", channel, payload, 1.0)
        service._suspend(1.0)
        assert site.users() == {"coordinator", "b"}
        assert service.roster.online(1.0) == {"b"}
        assert len([record for record in caplog.records if "dropped" in record.message]) == 1
        before = service.roster.presence("a")
        site.try_hello("a", 2.0)
        assert service.roster.presence("a") is before
        service._suspend(61.1)
        assert site.users() == {"coordinator", "a", "b"}
        site.hello("a", 62.0)
        assert "a" in service.roster.online(62.0)


def test_a_suspended_device_is_shown_as_one(site: Site) -> None:
    """`device list`: the state, and nothing of what it said before."""
    with site.serving() as service:
        now = time.monotonic()
        site.hello("a", now)
        for _ in range(2001):
            site.receive("a", "up", b"junk", now)
        rows = {row["id"]: row for row in Commands(service).handle({"request": "device-list"})["devices"]}
        assert (rows["a"]["state"], rows["a"]["online"]) == ("suspended: flooding", False)
        assert rows["b"]["state"] is None


def test_what_a_client_calls_itself_cannot_move_the_cursor(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """An escape sequence is logged as text."""
    caplog.set_level(logging.INFO)
    with site.serving():
        site.hello("a")
    (line,) = [record.getMessage() for record in caplog.records if "is here" in record.message]
    assert "\x1b" not in line
    assert "\\x1b" in line


def _with_run(site: Site, *, state: str = "RUNNING", sha256: str | None = None, **evaluate: Any) -> None:
    """A run in round 1: a's update is stored, b's lease is accepted; all blobs are there."""
    model, settings, update = b"model", b"settings", b"update of a"
    names = [hashlib.sha256(data).hexdigest() for data in (model, settings, update)]
    for data, name in zip((model, settings, update), names, strict=True):
        site.blobs.write(data, name, point="test")
    file = run_file(devices={"min": 1}, rounds={"deadline": "60s"}, evaluate={"every": 0} | evaluate)
    site.store.runs.add(run_row("r-1", file))
    site.store.runs.start(model_row(0, sha256=names[0], sent_sha256=names[0]), names[1], len(settings))
    leases = [lease_row(1, "a", state="accepted"), lease_row(2, "b", state="accepted")]
    site.store.rounds.open(round_row(goal=2, quorum=1), leases)
    site.store.updates.save(update_row("a", "lease-1", sha256=sha256 or names[2]), None, "lease-1")
    if state == "FROZEN":
        site.store.leases.set_state("lease-2", "expired", code="late")
        site.store.rounds.freeze("r-1", 1, 1, "hash")


def test_traffic_is_counted_for_devices_with_a_session_only(site: Site) -> None:
    """Junk under a's name before it was let in counts nowhere; its hello does, both ways."""
    _with_run(site)
    with site.serving() as service:
        site.receive("a", "up", b"junk")
        site.receive("stranger", "up", b"junk")
        site.receive("a", "data", b"junk")
        assert service.conductor.traffic == {}
        site.hello("a")
        assert list(service.conductor.traffic) == ["a"]
        up, down = service.conductor.traffic["a"]
        assert up > 100
        assert down > 100


def test_a_shared_chunk_counts_for_each_listener(site: Site) -> None:
    """a and b get 1,000 bytes each from one publication on all/down."""
    _with_run(site)
    with site.serving() as service:
        heard: list[bytes] = []
        device = site.hub.transport("b", lambda event: heard.append(getattr(event, "payload", b"")))
        device.subscribe((service.topics.shared_down,))
        device.connect()
        assert service._transport is not None
        service._transport.connect()
        site.hub.poll()
        for name in ("a", "b"):
            site.hello(name)
        before = {name: service.conductor.traffic[name] for name in ("a", "b")}
        service._share_chunk(("a", "b"), b"x" * 1000)
        site.hub.poll()
        for name, (up, down) in before.items():
            assert service.conductor.traffic[name] == (up, down + 1000)
        assert heard.count(b"x" * 1000) == 1


def _damage(site: Site, data: bytes, how: str) -> None:
    path = site.blobs.path(hashlib.sha256(data).hexdigest())
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(data[:-1] + b"x")


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("state", ["RUNNING", "FROZEN"])
def test_a_lost_update_is_asked_for_again_at_the_start(site: Site, state: str, how: str) -> None:
    """Its row is gone, its lease is offered, the round runs; a frozen set was never used."""
    _with_run(site, state=state)
    _damage(site, b"update of a", how)
    with site.serving() as service:
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "RUNNING"
        assert site.store.updates.of_attempt("r-1", 1, 1) == []
        assert site.leases()["a"] == ("offered", "")
        assert not list(site.blobs.path("ab").parent.parent.glob("*/" + hashlib.sha256(b"update of a").hexdigest()))


def test_a_round_whose_lost_update_is_forgotten_by_its_device_still_ends(site: Site) -> None:
    """b's update counts; a deleted its own after the receipt and declines as `forgotten`: one of one is the quorum."""
    _with_run(site)
    site.blobs.write(b"update of b", hashlib.sha256(b"update of b").hexdigest(), point="test")
    update = update_row("b", "lease-2", sha256=hashlib.sha256(b"update of b").hexdigest())
    site.store.updates.save(update, None, "lease-2")
    _damage(site, b"update of a", "missing")
    with site.serving() as service:
        site.hello("a")
        site.say("a", Decline(lease="lease-1", code="forgotten"))
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "FROZEN"


def test_an_update_that_is_whole_is_kept_at_the_start(site: Site) -> None:
    """Nothing changes."""
    _with_run(site)
    with site.serving():
        assert [update.device for update in site.store.updates.of_attempt("r-1", 1, 1)] == ["a"]
        assert site.leases() == {"a": ("stored", ""), "b": ("accepted", "")}


@pytest.mark.parametrize("what", [b"model", b"settings"])
def test_a_damaged_model_ends_the_run_with_the_reason(site: Site, what: bytes) -> None:
    """Failed: its round is abandoned, its leases are closed, its update's blob is gone; the next start is as any."""
    _with_run(site)
    _damage(site, what, "damaged")
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
    _with_run(site, state="FROZEN")
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
    monkeypatch.setattr(sys.modules[__name__], "_CHILD", _CUT_FAILS)
    _with_run(site)
    with site.serving() as service:
        conductor = service.conductor
        assert conductor.machine is not None
        assert conductor.run is not None
        assert conductor.model is not None
        conductor._cutting["width:1/2"] = {}
        job = conductor._encoding(conductor.run, conductor.model.sha256, "width:1/2", site.folder / "out")
        cut = functools.partial(conductor._was_cut, conductor.run, conductor.model, "width:1/2", site.folder / "out")
        conductor._aggregation.submit(job, cut)
        conductor._fold(Fold(round_row(), tuple(site.store.updates.of_attempt("r-1", 1, 1)), "hash"))
        _read_until(service, lambda: conductor.machine is None)
        assert conductor._aggregation.idle
        site.store.runs.add(run_row("r-2"))
        conductor.tick(frozenset(), 2, 0.0)
        _read_until(service, lambda: site.store.runs.oldest("queued") is None)
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
    monkeypatch.setattr(sys.modules[__name__], "_CHILD", _CUTS)
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
    _damage(site, cut, how)
    with site.serving() as service:
        site.hello("b")
        offer = Offer(lease="lease-1", run="r-1", round=1, sha256="ab" * 32, length=10, num_samples=5)
        site.say("b", offer)
        assert not service.uploads.is_open("b", offer)
        assert service.conductor.may_pull("b", names[cut]) is None
        _read_until(service, lambda: site.blobs.has(names[cut]))
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
    monkeypatch.setattr(sys.modules[__name__], "_CHILD", _FOLDS)
    _with_run(site, state="FROZEN", on=f"npz:/{name}.npz")
    with site.serving() as service:
        _read_until(service, lambda: site.store.rounds.all("r-1")[0].state == "ANNOUNCED")
        shown = Commands(service).handle({"request": "run-show", "run": "r-1", "report": True})
        assert "similarity" not in Commands(service).handle({"request": "run-show", "run": "r-1"})
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
    monkeypatch.setattr(sys.modules[__name__], "_CHILD", _FOLDS)
    _with_run(site, state="FROZEN", **evaluate)
    with site.serving() as service:
        _read_until(service, lambda: site.store.rounds.all("r-1")[0].state == "ANNOUNCED")
    assert site.store.settings.get(setting_of("r-1")) == ""


def _ended_run(site: Site) -> None:
    """The run r-1 with the model `model`, over."""
    _with_run(site)
    site.store.runs.fail("r-1", "over")


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_run_that_goes_on_from_a_lost_model_fails_alone(site: Site, how: str) -> None:
    """Queued while the model was there: it ends with the reason, and the coordinator serves; a new one is refused."""
    _ended_run(site)
    file = run_file(model={"name": "mlp", "input": [1, 2, 2], "init": "run:r-1"})
    site.store.runs.add(run_row("r-2", file))
    _damage(site, b"model", how)
    with site.serving() as service:
        service.conductor.tick(frozenset(), 2, 0.0)
        run = site.store.runs.get("r-2")
        assert run is not None
        assert run.state == "failed"
        assert "version 0 of run 'r-1'" in run.reason
        assert "missing or damaged" in run.reason
        with pytest.raises(InputError, match="missing or damaged"):
            Commands(service).handle({"request": "run-start", "file": to_map(file)})


_STUCK = f"import time{_CHILD}".replace("    print", "    time.sleep(1000 if 'stuck' in line else 0)\n    print")


@pytest.mark.parametrize("dry", [False, True])
def test_a_run_that_is_stopped_while_its_first_model_is_made_stands_in_nobodys_way(
    site: Site, monkeypatch: pytest.MonkeyPatch, dry: bool
) -> None:
    """A task's own code never ends. The stopped run stays stopped, and the next one gets its answer; not the same."""
    monkeypatch.setattr(sys.modules[__name__], "_CHILD", _STUCK)
    first, second = (to_map(run_file(classes=["no", word])) for word in ("stuck", "yes"))
    with site.serving() as service:
        commands = Commands(service)
        stuck = commands.handle({"request": "run-start", "file": first, "dry": dry})["run"]
        service.conductor.tick(frozenset(), 2, 0.0)
        commands.handle({"request": "run-stop", "run": stuck})
        after = commands.handle({"request": "run-start", "file": second, "dry": dry})["run"]
        assert (stuck, after) == (("r-dry-1", "r-dry-1") if dry else ("r-1", "r-2"))  # the number of a dry run is free
        service.conductor.tick(frozenset(), 2, 1.0)
        _read_until(service, lambda: site.store.runs.oldest("queued") is None)
    ended = [(run.file["classes"][1], run.state, run.reason) for run in site.store.runs.all()]
    assert ended[-1] == ("yes", "failed", "not_finite: no")
    assert ended[:-1] == ([] if dry else [("stuck", "stopped", "stopped before it began")])


def test_a_run_that_is_stopped_while_the_server_judges_it_stands_in_nobodys_way(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation never ends; the run is stopped, and the next one gets its answer."""
    monkeypatch.setattr(sys.modules[__name__], "_CHILD", _STUCK)
    _with_run(site)
    site.store.rounds.abandon("r-1", 1, 1, "why")
    site.store.runs.fail("r-1", "why")
    names = [hashlib.sha256(data).hexdigest() for data in (b"model", b"settings")]
    site.store.runs.add(run_row("r-2", run_file(evaluate={"on": "npz:/stuck.npz"})))
    site.store.runs.start(model_row(0, "r-2", sha256=names[0], sent_sha256=names[0]), names[1], 8)
    site.store.runs.add(run_row("r-3"))
    with site.serving() as service:
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "EVALUATING"
        Commands(service).handle({"request": "run-stop", "run": "r-2"})
        for now in (0.0, 1.0):
            service.conductor.tick(frozenset(), 2, now)
        _read_until(service, lambda: site.store.runs.oldest("queued") is None)
    assert [(run.state, run.reason) for run in site.store.runs.all()[1:]] == [
        ("stopped", "stopped on request"),
        ("failed", "not_finite: no"),
    ]


def _read_until(service: Service, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        assert service._aggregation.fd is not None
        select.select([service._aggregation.fd], [], [], 1)
        service._aggregation.read(0.0)


def test_a_run_is_named_by_its_id_or_a_beginning_that_no_other_has(site: Site) -> None:
    """`r-1` is an id, though r-10 begins with it; `r` and nothing at all are no names."""
    for name in ("r-1", "r-10", "s-1"):
        site.store.runs.add(run_row(name, state="failed"))
    with site.serving() as service:
        commands = Commands(service)
        for asked, found in {"r-1": "r-1", "r-10": "r-10", "s": "s-1", "latest": "s-1"}.items():
            assert commands.handle({"request": "run-show", "run": asked})["run"] == found
        with pytest.raises(NoSuchNameError, match="run 'r' may be any of r-1, r-10; name one of them"):
            commands.handle({"request": "run-show", "run": "r"})
        with pytest.raises(NoSuchNameError, match="unknown run 'x'; known: r-1, r-10, s-1"):
            commands.handle({"request": "run-show", "run": "x"})


def test_the_log_names_the_device_whose_failure_ends_a_round(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """b is the last that could answer, and a's update is lost: the round is abandoned in the same step."""
    _with_run(site)
    _damage(site, b"update of a", "missing")
    with site.serving() as service, caplog.at_level(logging.WARNING):
        later = time.monotonic() + 31.0  # nobody waits for substitutes any more
        for number, name in enumerate("ab", 1):
            site.hello(name, later)
            site.say(name, Decline(lease=f"lease-{number}", code="crashed", detail="why"), later)
        assert service.conductor.machine is not None
        assert service.conductor.machine.round is None
    assert [f"{name}: declined (crashed: 'why')" in caplog.text for name in "ab"] == [True, True]


def test_a_removed_device_ends_its_leases_at_once(site: Site) -> None:
    """a's update is the quorum: with b's lease gone the round is frozen."""
    _with_run(site)
    with site.serving() as service:
        commands = Commands(service)
        assert commands.handle({"request": "device-remove", "names": ["b"]}) == {"removed": ["b"], "external": False}
        assert site.leases()["b"] == ("cancelled", "removed")
        assert service.conductor.machine is not None
        assert service.conductor.machine.phase == "FROZEN"
        assert site.users() == {"coordinator", "a"}
        with pytest.raises(NoSuchNameError, match="known: a"):
            commands.handle({"request": "device-remove", "names": ["a", "\ud800"]})
        assert site.users() == {"coordinator", "a"}  # all, or none


def _answers(site: Site, device: str, hear: list[bytes]) -> list[Message]:
    key, context = bytes.fromhex(device_row(device).key), context_down(site.service.federation, device)
    return [open_message(payload, key=key, context=context).message for payload in hear]


@pytest.mark.parametrize(("run", "number"), [("r-2", 1), ("r-1", 2)])
def test_an_offer_for_another_run_or_round_than_its_lease_is_refused(site: Site, run: str, number: int) -> None:
    """b's lease is of r-1, round 1."""
    _with_run(site)
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
        welcome, receipt = _answers(site, "b", heard)
        assert isinstance(welcome, Welcome)
        assert isinstance(receipt, Receipt)
        assert (receipt.status, receipt.code) == ("refused", "malformed")
        device.close()


def test_no_update_is_asked_for_when_the_granted_bytes_would_eat_the_reserve(tmp_path: Path) -> None:
    """4 chunks of 122,880 bytes are granted; with a reserve of all that is free but for 2 of them, nothing is left."""
    site = Site(tmp_path)
    _with_run(site)
    with site.serving() as service:
        offer = Offer(lease="lease-2", run="r-1", round=1, sha256="1" * 64, length=40 * CHUNK_BYTES, num_samples=3)
        service.uploads.expect("b", offer)
        service._grant(0.0)
        granted = service.uploads.outstanding_bytes
        assert granted == 4 * CHUNK_BYTES
        assert service.paused == ""
        free = shutil.disk_usage(tmp_path).free
        service._options = ServiceOptions(disk_reserve_bytes=free - granted // 2)
        service._grant(0.1)
        assert service.paused.startswith("disk: ")
    site.store.close()


WRONG: list[dict[str, Any]] = [
    {"request": "device-add", "names": "abc"},
    {"request": "device-add", "names": [1]},
    {"request": "device-add", "names": None},
    {"request": "device-add", "names": ["x"], "labels": {"k": 1}},
    {"request": "device-add", "names": ["x"], "colour": "red"},
    {"request": "device-remove", "names": "a"},
    {"request": "device-label", "name": "a", "put": ["k=v"]},
    {"request": "run-show", "run": 7},
    {"request": "run-show", "run": "latest", "newest": "all"},
    {"request": "run-stop", "run": "latest", "now": "yes"},
    {"request": "run-stop", "run": {"id": 1}},
    {"request": "run-start", "file": [1]},
    {"request": "run-start", "file": {"name": 1}},
    {"request": "status", "verbose": True},
    {"request": None},
]


@pytest.mark.parametrize("asked", WRONG, ids=range(len(WRONG)))
def test_a_request_with_wrong_or_unknown_arguments_is_refused(site: Site, asked: dict[str, Any]) -> None:
    """Of a newer command, or of somebody who writes his own; the coordinator goes on."""
    with site.serving() as service, pytest.raises(InputError, match=r"request|run"):
        Commands(service).handle(dict(asked))


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
        shown = Commands(service).handle({"request": "run-show", "run": "r-1"})
        wider = Commands(service).handle({"request": "run-show", "run": "r-1", "newest": 1000})
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
        a, b = Commands(service).handle({"request": "run-show", "run": "r-1"})["devices"]
    assert (a["plan"], a["plan_details"]["microbatch"]) == ("2 groups, microbatch 4", 4)
    assert (a["budget_bytes"], a["predicted_bytes"], a["peak_bytes"], a["base_bytes"]) == (200, 96, 190, 50)
    assert (a["inside_budget"], a["replans"]) == (True, 3)
    assert (b["inside_budget"], b["replans"]) == (False, 10**6)


def test_chunks_of_an_upload_that_is_over_count_against_their_device(site: Site) -> None:
    """290 well-formed chunks of an update that nobody waits for are a flood, too."""
    with site.serving() as service:
        site.hello("a")
        payload = make_chunk(transfer_id("1" * 64), 0, bytes(CHUNK_BYTES))
        for _ in range(290):
            site.receive("a", "data", payload, 1.0)
        assert service.roster.suspended(1.0) == {"a"}


def test_test_data_that_the_server_lacks_are_told_before_the_run_begins(site: Site, tmp_path: Path) -> None:
    """A path of another machine: nothing is queued."""
    file = to_map(run_file(evaluate={"on": f"npz:{tmp_path / 'nowhere.npz'}"}))
    with site.serving() as service, pytest.raises(InputError, match=r"evaluate\.on: .*nowhere\.npz is none"):
        Commands(service).handle({"request": "run-start", "file": file})
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
        Commands(service).handle({"request": "run-start", "file": to_map(file), "dry": True})
        assert [run.id for run in site.store.runs.all()] == ["r-1", "r-dry-1"]  # the new one took a free number
        assert {name: service.blobs.path(sha256).exists() for name, sha256 in hashed.items()} == {
            "settings": False,
            "own": False,
            "shared": True,
        }
