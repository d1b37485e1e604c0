"""The coordinator's side of deployments, over a service in memory and devices that speak the real wire."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from raw_requests import answer
from rows import PROFILE, deployment_row, device_row, digest, lease_row, model_row, round_row, run_file, run_row

from coordinator.broker.broker import DeviceAccess, EmbeddedBroker, new_password
from coordinator.cli import deploy as cli_deploy
from coordinator.cli import tables
from coordinator.control_messages import Deployment, ShowDeployment, ShowDevice
from coordinator.requests.commands import Commands
from coordinator.requests.deployments import new_name
from coordinator.server.service import Service, ServiceOptions
from coordinator.store import snapshot
from coordinator.store.rows import DeploymentRow
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import ConflictError, FedfitError, InputError, MachineError, NoSuchNameError
from edge_client.transport.base import Event, Received
from edge_client.transport.blobs import BlobStore
from edge_client.transport.inproc import Hub
from edge_client.wire.chunks import parse_chunk
from edge_client.wire.messages import (
    Cancel,
    Deploy,
    Deployed,
    Hello,
    Message,
    Pull,
    context_down,
    context_up,
    open_message,
    seal_message,
)

FILE = b"an ONNX file" * 100
SHA = hashlib.sha256(FILE).hexdigest()


class Site:
    """A coordinator with the trained run r-1, and its devices a, b and c."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hub, self.store = folder, Hub(), SqliteStore()
        passwords = [(name, new_password()) for name in "abc"]
        self.store.devices.add(*(device_row(name, password=password) for name, password in passwords))
        self.blobs = BlobStore(folder / "blobs", folder / "tmp")
        access = DeviceAccess(name="coordinator", password=new_password(), publish=("fl/#",), subscribe=("fl/#",))
        self.broker = EmbeddedBroker(folder / "broker", coordinator=access)  # never started
        self.heard: dict[str, list[Message]] = {name: [] for name in "abc"}
        self.chunks: list[bytes] = []
        self.sessions: dict[str, str] = {}
        self.seq = 0
        self.trained(2)

    def trained(self, versions: int) -> None:
        """r-1 has so many versions; a trained half of the model, b only judged it."""
        model = hashlib.sha256(b"model").hexdigest()
        self.blobs.write(b"model", model, point="test")
        self.store.runs.add(run_row("r-1", run_file(slices=["full", "width:1/2"])))
        rows = [model_row(n, sha256=model, sent_sha256=model) for n in range(versions + 1)]
        self.store.runs.start(rows[0], "", 0)
        leases = [lease_row(1, "a", slice="width:1/2"), lease_row(2, "b", train=False)]
        self.store.rounds.open(round_row(), leases)
        for lease in leases:
            self.store.leases.set_state(lease.id, "stored")
        for number, row in enumerate(rows[1:], 1):
            self.store.rounds.commit(number, 1, row)
        self.store.runs.set_state("r-1", "finished")

    @contextlib.contextmanager
    def serving(self) -> Iterator[Service]:
        """Also again, as after a restart."""
        service = Service(
            state_dir=self.folder,
            store=self.store,
            broker=self.broker,
            brokers=("mqtt://hub",),
            ca=None,
            connect=lambda on_event: self.hub.transport("coordinator", on_event),
            options=ServiceOptions(disk_reserve_bytes=0),
        )
        with contextlib.ExitStack() as opened:
            opened.callback(service._aggregation.close)
            service.begin(opened)
            self.service = service
            for name in self.heard:
                self._listen(name)
            yield service

    def _listen(self, name: str) -> None:
        def on_event(event: Event) -> None:
            if not isinstance(event, Received):
                return
            if event.topic.endswith("/down"):
                self.chunks.append(event.payload)
                return
            key, context = bytes.fromhex(device_row(name).key), context_down(self.service.federation, name)
            self.heard[name].append(open_message(event.payload, key=key, context=context).message)

        device = self.hub.transport(name, on_event)
        device.subscribe(tuple(self.service.topics.device(name, channel) for channel in ("cmd", "down")))
        device.connect()
        assert self.service._transport is not None
        self.service._transport.connect()
        self.hub.poll()

    def say(self, device: str, message: Message, now: float | None = None) -> None:
        """From a device, and let the coordinator answer."""
        now = time.monotonic() if now is None else now
        self.seq += 1
        key, context = bytes.fromhex(device_row(device).key), context_up(self.service.federation, device)
        session = self.sessions.get(device, "")
        data = seal_message(message, session=session, seq=self.seq, key=key, context=context)
        self.service.router.receive(self.service.topics.device(device, "up"), data, now)
        self.hub.poll()

    def hello(self, device: str, *, deploys: bool = True, now: float | None = None) -> None:
        """A client of this version, or of one that does not know deployments."""
        hello = Hello(boot="b", hello=1, profile=PROFILE, labels={}, free_bytes=5, client="9.9", deploys=deploys)
        self.say(device, hello, now)
        present = self.service.roster.presence(device)
        assert present is not None
        self.sessions[device] = present.session

    def asked(self, device: str) -> list[Deploy]:
        """What a device was asked to use."""
        return [message for message in self.heard[device] if isinstance(message, Deploy)]

    def add(self, *rows: DeploymentRow, now: float = 0.0) -> None:
        """Record a deployment whose file is here."""
        self.blobs.write(FILE, SHA, point="test")
        self.service.deployments.add([replace(row, sha256=SHA, length=len(FILE)) for row in rows], now)
        self.hub.poll()

    def states(self) -> dict[str, tuple[str, str]]:
        """Device -> state and code of its newest deployment."""
        return {row.device: (row.state, row.code) for row in self.store.deployments.all()}

    def request(self, what: str, **fields: Any) -> dict[str, Any]:
        """As a command asks."""
        return answer(self.service, what, **fields)

    def shown(self) -> dict[str, str]:
        """Device -> what `run deploy --status` says of it."""
        rows = Commands(self.service).answer(ShowDeployment(run="r-1")).devices
        return {row.device: tables._deployment_state(row) for row in rows}


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.store.close()


def done(state: str, code: str = "ok", deployment: str = "deployment-1", detail: str = "") -> Deployed:
    return Deployed(deployment=deployment, state=state, code=code, detail=detail)


def test_a_device_is_told_at_once_again_and_when_it_comes_later(site: Site) -> None:
    """a is there; b comes later; c never does. Asked again after 20 s, until the answer; the row knows it."""
    with site.serving() as service:
        site.hello("a")
        site.add(deployment_row(1, "a"), deployment_row(1, "b"), deployment_row(1, "c"))
        (asked,) = site.asked("a")
        assert (asked.deployment, asked.sha256, asked.length, asked.input) == ("deployment-1", SHA, 1200, (1, 2, 2))
        site.hello("b", now=1.0)
        assert len(site.asked("b")) == 1
        service.deployments.tick(frozenset("ab"), 19.9)
        site.hub.poll()
        assert len(site.asked("a")) == 1
        service.deployments.tick(frozenset("ab"), 21.0)
        site.hub.poll()
        assert (len(site.asked("a")), len(site.asked("b")), site.asked("c")) == (2, 2, [])
        site.say("a", done("active"))
        service.deployments.tick(frozenset("ab"), 60.0)
        site.hub.poll()
        assert (len(site.asked("a")), len(site.asked("b"))) == (2, 3)
    assert site.states() == {"a": ("active", ""), "b": ("pending", ""), "c": ("pending", "")}


def test_a_client_that_is_too_old_is_never_sent_one(site: Site) -> None:
    """Its version would drop the message as one of an unknown kind; people see why nothing happens."""
    with site.serving() as service:
        site.hello("a", deploys=False)
        site.add(deployment_row(1, "a"), deployment_row(1, "b"))
        service.deployments.tick(frozenset("a"), 60.0)
        site.hub.poll()
        assert site.asked("a") == []
        shown = site.shown()
        assert shown["a"] == "pending (too old: client '9.9' does not know deployments; upgrade it)"
        assert shown["b"] == "pending (offline: it is told when it comes back)"
        site.hello("a", now=70.0)
        assert len(site.asked("a")) == 1


def test_a_restarted_coordinator_goes_on(site: Site) -> None:
    """Its rows and the blob are there, and a device that says hello is told."""
    with site.serving():
        site.add(deployment_row(1, "a"))
    with site.serving():
        assert site.blobs.path(SHA).read_bytes() == FILE
        site.hello("a")
        assert {asked.deployment for asked in site.asked("a")} == {"deployment-1"}


def test_what_a_device_says_on_its_way_is_shown_and_its_reason_kept(site: Site) -> None:
    """Downloading and testing are for people; a reason is one line, whatever the device wrote."""
    with site.serving():
        site.hello("a")
        site.add(deployment_row(1, "a"), deployment_row(1, "b"))
        for said, shown in (("fetching", "downloading"), ("testing", "testing")):
            site.say("a", done(said))
            assert site.shown()["a"] == shown
        site.say("a", done("rolled_back", "self_test", detail="it\ndiffers\x1b[2J"))
        assert site.shown()["a"] == "rolled back (self_test: it differs?[2J)"
        site.say("a", done("active"))  # a device that changes its mind
        assert site.states()["a"] == ("rolled_back", "self_test")


def test_a_model_that_was_damaged_later_is_rolled_back(site: Site) -> None:
    """Active, then not: what a device says after a start counts."""
    with site.serving():
        site.hello("a")
        site.add(deployment_row(1, "a"))
        site.say("a", done("active"))
        site.say("a", done("rolled_back", "damaged"))
        assert site.states() == {"a": ("rolled_back", "damaged")}
        assert not site.blobs.has(SHA)


def test_a_device_that_lost_its_disk_gets_its_model_again(site: Site) -> None:
    """It comes back without a word of it: asked 20 s after its hello, and again; then it fetches it as the first time.

    b lost its disk and onnxruntime with it: what it uses is nothing, and the table says why.
    """
    with site.serving() as service:
        for device in "ab":
            site.hello(device, now=0.0)
        site.add(deployment_row(1, "a"), deployment_row(1, "b"))
        for device in "ab":
            site.say(device, done("active"))
            site.hello(device, now=100.0)
        service.deployments.tick(frozenset("ab"), 119.9)
        site.hub.poll()
        assert (len(site.asked("a")), service.deployments.may_pull("a", SHA)) == (1, None)
        for now in (120.0, 139.9, 140.0):
            service.deployments.tick(frozenset("ab"), now)
        site.hub.poll()
        assert (len(site.asked("a")), len(site.asked("b"))) == (3, 3)
        site.say("a", done("fetching"))
        site.say("b", done("refused", "no_runtime", detail="none is in use"))
        assert site.shown() == {"a": "downloading", "b": "refused (no_runtime: none is in use)"}
        assert service.deployments.may_pull("a", SHA) == len(FILE)
        assert site.states() == {"a": ("pending", ""), "b": ("refused", "no_runtime")}
    with site.serving():
        site.hello("a")
        site.say("a", done("active"))
        assert site.states()["a"] == ("active", "")


def test_a_device_that_says_what_it_uses_is_not_asked(site: Site) -> None:
    """After every hello it says so by itself; a file that is lost on the server does not matter to it."""
    with site.serving():
        site.hello("a", now=0.0)
        site.add(deployment_row(1, "a"))
        site.say("a", done("active"))
    site.blobs.remove(SHA)
    with site.serving() as service:
        for now in (100.0, 200.0):
            site.hello("a", now=now)
            site.say("a", done("active"))
            service.deployments.tick(frozenset("a"), now + 50)
            site.hub.poll()
        assert len(site.asked("a")) == 1
        assert site.states() == {"a": ("active", "")}


def test_a_newer_deployment_that_is_not_taken_leaves_the_one_in_use(site: Site) -> None:
    """Active until another one is; the table says what is in use meanwhile, and its file is kept."""
    newer = b"another ONNX file"
    sha256 = hashlib.sha256(newer).hexdigest()
    with site.serving() as service:
        site.hello("a")
        site.add(deployment_row(1, "a"))
        site.say("a", done("active"))
        site.blobs.write(newer, sha256, point="test")
        row = deployment_row(2, "a", version=4, sha256=sha256, length=len(newer))
        service.deployments.add([row], time.monotonic())
        assert site.shown()["a"] == "pending; uses r-1 version 3 (full, fp32)"
        site.say("a", done("refused", "forbidden", "deployment-2", "run r-1 version 3 stays in use"))
        assert site.shown()["a"] == "refused (forbidden: run r-1 version 3 stays in use)"
        assert [(row.id, row.state) for row in site.store.deployments.wanted()] == [("deployment-1", "active")]
        assert (site.blobs.has(SHA), site.blobs.has(sha256)) == (True, False)
        site.blobs.write(newer, sha256, point="test")
        service.deployments.add([replace(row, id="deployment-3", issue=3)], time.monotonic())
        site.say("a", done("fetching", deployment="deployment-1"))  # the newer one is meant
        assert site.heard["a"][-1] == Cancel(lease="deployment-1", code="over")
        site.say("a", done("active", deployment="deployment-3"))
        assert [row.state for row in site.store.deployments.all()] == ["superseded", "refused", "active"]
        assert (site.blobs.has(SHA), site.blobs.has(sha256)) == (False, True)


def test_what_a_device_waits_for_is_shown(site: Site) -> None:
    """A disk that is full passes: the deployment stays open, and a command does not wait for it."""
    with site.serving():
        site.hello("a")
        site.add(deployment_row(1, "a"))
        site.say("a", done("fetching", "disk_full", detail="4 GB are needed on disk and 1 GB are free"))
        told = "disk_full: 4 GB are needed on disk and 1 GB are free; it is tried again"
        assert site.shown()["a"] == f"downloading ({told})"
        assert site.request("deploy-show", run="r-1")["devices"][0]["waits"] == told
        site.say("a", done("fetching"))
        assert site.shown()["a"] == "downloading"


def test_how_it_stands_on_some_devices_can_be_asked(site: Site) -> None:
    """By name or by label; one that has none of this run's models is not listed."""
    with site.serving() as service:
        service.enrolment.set_labels("b", {"line": "x"})
        site.add(deployment_row(1, "a"), deployment_row(1, "b"))
        asked = [{"devices": ["a", "c"]}, {"labels": {"line": "x"}}, {"devices": ["c"]}]
        shown = [site.request("deploy-show", run="r-1", **who)["devices"] for who in asked]
        assert [[row["device"] for row in rows] for rows in shown] == [["a"], ["b"], []]
        with pytest.raises(NoSuchNameError, match="unknown device 'x'; known: a, b, c"):
            site.request("deploy-show", run="r-1", devices=["x"])
        with pytest.raises(NoSuchNameError, match="there is no device with line=y"):
            site.request("deploy-show", run="r-1", labels={"line": "y"})


def test_a_device_that_works_on_what_nobody_wants_is_told_to_stop(site: Site) -> None:
    """After an older copy of the coordinator was restored, say; an outcome of such a one is only ignored."""
    with site.serving():
        site.hello("a")
        site.say("a", done("active", deployment="nobody"))
        assert site.heard["a"][1:] == []
        site.say("a", done("fetching", deployment="nobody"))
        assert site.heard["a"][1:] == [Cancel(lease="nobody", code="over")]


def test_a_pending_device_may_fetch_the_file_and_nobody_else(site: Site) -> None:
    """1,200 bytes in one chunk to a; nothing to b, and nothing more to a when it has it. It is no run's traffic."""
    with site.serving() as service:
        site.hello("a")
        site.hello("b")
        site.add(deployment_row(1, "a"))
        for device in "ab":
            site.say(device, Pull(sha256=SHA, ranges=((0, 1),)))
        service.downloads.send(lambda: 0, service.chunks.send, service.chunks.share)
        site.hub.poll()
        (chunk,) = site.chunks
        assert bytes(parse_chunk(chunk).body) == FILE
        assert service.deployments.is_chunk(chunk[4:20])
        site.say("a", done("active"))
        assert service.deployments.may_pull("a", SHA) is None


def test_the_blob_is_kept_and_in_a_backup_while_a_device_needs_it(site: Site) -> None:
    """Until the last of its devices has another one, or is gone."""
    with site.serving() as service:
        site.hello("a")
        site.add(deployment_row(1, "a"), deployment_row(1, "b"))
        snapshot.take(site.store, site.folder)
        assert (site.folder / "snapshot" / snapshot.blob_name(SHA)).read_bytes() == FILE
        site.say("a", done("rolled_back", "self_test"))
        assert site.blobs.has(SHA)
        service.enrolment.remove(["b"])
        assert not site.blobs.has(SHA)
        assert site.states() == {"a": ("rolled_back", "self_test")}


def test_a_file_that_is_lost_on_the_server_is_not_promised(site: Site) -> None:
    """The device is not asked for what cannot be sent."""
    with site.serving():
        site.add(deployment_row(1, "a"))
    site.blobs.path(SHA).write_bytes(FILE[:-1])
    with site.serving():
        site.hello("a")
        assert site.asked("a") == []
        assert site.states() == {"a": ("refused", "lost")}


def plan(site: Site, **changes: Any) -> dict[str, Any]:
    return site.request("deploy-plan", **{"run": "r-1", "precision": "fp32"} | changes)


def made_file(site: Site, content: bytes = FILE, **changes: Any) -> dict[str, Any]:
    """A file as the command puts it into the coordinator's directory."""
    name = new_name()
    (site.folder / "tmp" / name).write_bytes(content)
    about = {"name": name, "architecture": "full", "precision": "fp32", "sha256": SHA, "length": len(FILE)}
    return about | {"input": [1, 2, 2], "classes_sha256": digest("classes"), "devices": ["a", "b"]} | changes


def test_each_device_gets_what_it_trained(site: Site) -> None:
    """a trained half of the model; b and c trained nothing: theirs is left open."""
    with site.serving() as service:
        found = plan(site)
        assert found["devices"] == {"a": "width:1/2", "b": None, "c": None}
        assert (found["run"], found["version"]) == ("r-1", 2)
        assert plan(site, version="1", devices=["c", "c"])["devices"] == {"c": None}
        service.enrolment.set_labels("b", {"line": "x", "site": "n"})
        assert list(plan(site, labels={"line": "x"})["devices"]) == ["b"]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"run": "nobody"}, NoSuchNameError, "unknown run 'nobody'; known: r-1"),
        ({"version": "9"}, InputError, "--version: run 'r-1' has no version 9 any more"),
        ({"version": "-1"}, InputError, "--version: expected a number, best or last"),
        ({"version": "best"}, InputError, "--version: run 'r-1' has no best version"),
        ({"version": "0"}, InputError, "--version: 0 is what run 'r-1' began with"),
        ({"devices": ["x"]}, NoSuchNameError, "unknown device 'x'; known: a, b, c"),
        ({"labels": {"line": "x"}}, NoSuchNameError, "there is no device with line=x"),
    ],
    ids=str,
)
def test_what_cannot_be_deployed_is_told_in_a_line(
    site: Site, changes: dict[str, Any], kind: type[FedfitError], said: str
) -> None:
    """Nothing is changed by asking."""
    with site.serving(), pytest.raises(kind, match=said) as caught:
        plan(site, **changes)
    assert "\n" not in str(caught.value)
    assert site.store.deployments.all() == []


def test_a_run_without_a_trained_version_cannot_be_deployed(site: Site) -> None:
    """Its first model is random."""
    site.store.runs.add(run_row("r-2"))
    with site.serving():
        with pytest.raises(InputError, match="run 'r-2' has no trained model yet"):
            plan(site, run="r-2")
        site.store.runs.start(model_row(0, "r-2"), "", 0)
        with pytest.raises(InputError, match="run 'r-2' has no trained model yet"):
            plan(site, run="r-2")


def test_without_devices_there_is_nothing_to_deploy_to(site: Site) -> None:
    """One line with what to type."""
    with site.serving() as service:
        service.enrolment.remove(["a", "b", "c"])
        with pytest.raises(NoSuchNameError, match="coordinator device add NAME"):
            plan(site)


def test_a_deployment_keeps_its_file_and_a_later_one_uses_it_again(site: Site) -> None:
    """One issue after the other; the file in `tmp` has become a blob."""
    with site.serving():
        file = made_file(site)
        begun = site.request("deploy-start", run="r-1", version=2, files=[file])
        assert site.states() == {"a": ("pending", ""), "b": ("pending", "")}
        assert not (site.folder / "tmp" / file["name"]).exists()
        known = {key: file[key] for key in ("sha256", "length", "input", "classes_sha256")}
        assert plan(site)["made"] == {"full": known}
        assert plan(site, precision="int8")["made"] == {}
        assert plan(site, version="1")["made"] == {}
        again = {**file, "name": None, "devices": ["c"]}
        later = site.request("deploy-start", run="r-1", version=2, files=[again])
        assert later["deployment"] != begun["deployment"]
        assert [(row.device, row.issue, row.sha256) for row in site.store.deployments.all()] == [
            ("a", 1, SHA),
            ("b", 1, SHA),
            ("c", 2, SHA),
        ]
        one = site.request("deploy-show", run="r-1", deployment=later["deployment"])["devices"]
        assert [row["device"] for row in one] == ["c"]


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"name": "../../etc/passwd"}, InputError, "does not match"),
        ({"name": "deploy-0123456789abcdef.onnx"}, MachineError, "is gone"),
        ({"name": None, "sha256": digest("other")}, ConflictError, "gone meanwhile"),
        ({"sha256": digest("other")}, MachineError, "is not the file that was exported"),
        ({"length": 7}, MachineError, "is not the file that was exported"),
        ({"length": 2**33}, InputError, "expected 1 to"),
        ({"devices": ["a", "x"]}, NoSuchNameError, "unknown device 'x'"),
        ({"input": [0]}, InputError, "expected 1 to"),
    ],
    ids=str,
)
def test_a_file_that_is_not_what_was_said_changes_nothing(
    site: Site, changes: dict[str, Any], kind: type[FedfitError], said: str
) -> None:
    """No row, and no blob."""
    with site.serving():
        file = made_file(site)
        with pytest.raises(kind, match=said):
            site.request("deploy-start", run="r-1", version=2, files=[file | changes])
    assert site.store.deployments.all() == []
    assert not site.blobs.has(SHA)


def test_files_are_made_for_the_slices_that_are_needed() -> None:
    """What each device trained; the largest for those that trained nothing; one for all if it is named."""
    file = run_file(slices=["full", "width:1/2"])
    trained = {"a": "width:1/2", "b": None, "c": "full", "d": "width:1/2"}
    assert cli_deploy._by_architecture(file, trained, None) == {"width:1/2": ["a", "d"], "full": ["b", "c"]}
    assert cli_deploy._by_architecture(file, trained, "width:0.5") == {"width:1/2": ["a", "b", "c", "d"]}


def test_a_device_shows_the_model_that_it_uses(site: Site) -> None:
    """`device show`: one line; of a device without one, none."""
    with site.serving() as service:
        site.hello("a")
        site.add(deployment_row(1, "a"))
        site.say("a", done("active"))
        commands = Commands(service)
        shown = tables.device(commands.answer(ShowDevice(name="a")))
        assert "deployed           r-1 version 3 (full, fp32): active" in shown
        assert "deployed" not in tables.device(commands.answer(ShowDevice(name="b")))
        assert "is deployed to no device" in tables.deployments(Deployment(run="r-1", devices=()))
