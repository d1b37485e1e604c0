"""A full or a dying disk while a process starts or a command writes: nothing is half-done, and it can be repeated."""

from __future__ import annotations

import contextlib
import hashlib
import select
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fleet import Fleet, mlp_run
from machine import Machine
from rows import device_row, run_row
from typed import in_a_process, ok, typed

from coordinator.cli import main as cli
from coordinator.control_messages import ExportedFile, StartDeployment
from coordinator.fleet.deployments import Deployments
from coordinator.fleet.roster import Roster
from coordinator.requests.deployments import DeployCommands, new_name
from coordinator.server.service import Service
from coordinator.store.rows import PageTokenRow
from coordinator.store.sqlite import SqliteStore
from edge_client import durable, faults
from edge_client.client import deploying, identity
from edge_client.config.device_file import ShareSection
from edge_client.errors import MachineError
from edge_client.knowledge.kinds import ClassTable
from edge_client.onnx.export import quantize, write_onnx
from edge_client.onnx.file import Facts, OnnxModel
from edge_client.operate import device_service, service_install
from edge_client.transport.blobs import BlobStore, Incoming
from edge_client.wire.chunks import make_chunk, parse_chunk, transfer_id
from edge_client.wire.messages import Deploy, Deployed
from edge_client.worker.privacy import Gate, Ledger

ROOT = Path(__file__).parents[2]

STARTING = {
    "state": (
        "state.version.write",
        "state.version.sync",
        "state.version.rename",
        "store.federation.commit",
        "broker.config.write",
        "broker.config.sync",
        "broker.config.rename",
        "broker.pid.write",
        "broker.pid.sync",
        "broker.pid.rename",
        "store.setting.commit",
        "store.epoch.commit",
    ),
    "certificates": tuple(
        f"pki.{file}.{step}"
        for file in ("ca-key", "ca", "server-key", "server")
        for step in ("write", "sync", "rename")
    ),
}


STEPS = [("enospc", 1), ("eio", 2), pytest.param("eio", 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("what", list(STARTING))
@pytest.mark.parametrize(("kind", "step"), STEPS)
def test_a_disk_that_fails_at_the_start_leaves_nothing_that_stops_the_next_start(
    tmp_path: Path, kind: str, step: int, what: str
) -> None:
    """All writes of a first start, or every second: each start ends with 4 and one line, the last one serves."""
    plan = ",".join(f"{kind}:{point}" for point in STARTING[what][::step])
    environment = {"FEDFIT_FAULT": plan, "FEDFIT_FAULT_LOG": str(tmp_path / "faults")}
    with Fleet(tmp_path, start_options=("--tls",)) as fleet:
        fleet.start_coordinator(environment)
        fleet.add_devices("a")
        fleet.start_device("a")
        fleet.wait_until(lambda: "the coordinator let us in" in fleet.log("a"), 120, "a device trusts the certificate")
    assert sorted((tmp_path / "faults").read_text().split()) == sorted(environment["FEDFIT_FAULT"].split(","))
    assert "Traceback" not in fleet.log("coordinator")
    assert all(" ended with 4: " in ended for ended in fleet.unexpected)
    assert not list(fleet.state_dir.rglob("*.tmp"))


ADDING = ("store.device.commit", "broker.config.sync:4")
STARTING_A_RUN = ("task.write", "task.sync", "task.rename", "store.run.commit")
REASONS = {"enospc": "No space left on device", "eio": "Input/output error"}


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_command_that_meets_a_failing_disk_changes_nothing_and_works_later(tmp_path: Path, kind: str) -> None:
    """Adding devices (rows, the broker's file) and starting a run (task, row): 4 and one line; then it works."""
    assert cli.main(["new", str(tmp_path / "widgets"), "--all"]) == 0
    path = tmp_path / "widgets/run.toml"
    path.write_text('name = "widgets"\ntask = "widgets"\nclasses = ["ok", "scratch", "dent"]\n')
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator({"FEDFIT_FAULT": ",".join(f"{kind}:{point}" for point in (*ADDING, *STARTING_A_RUN))})
        where = ("--state-dir", fleet.state_dir)
        add: tuple[object, ...] = ("device", "add", "x", "y", "--out", tmp_path, *where)
        start = ("run", "start", path, *where)
        for command in (*[add] * len(ADDING), *[start] * len(STARTING_A_RUN)):
            _assert_failed(typed("coordinator", *command), "coordinator", kind)
        assert not list(tmp_path.glob("*.join"))
        ok("coordinator", *add)
        ok("coordinator", *start)
        assert fleet.unexpected == []


WRITTEN = {
    "new": ("new.file.write", "new.file.sync", "new.file.rename"),
    "backup": ("backup.write", "backup.sync", "backup.rename"),
    "restore": ("restore.write", "restore.sync", "restore.rename"),
    "report": ("report.write", "report.sync", "report.rename"),
}


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_command_that_cannot_write_its_file_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """4 and one line for each write; the same command works afterwards."""
    made = tmp_path / "made"
    made.mkdir()
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        fleet.start_run(mlp_run(rounds=1))
        here = ("--state-dir", str(fleet.state_dir))
        commands = {
            "new": ("new", str(made / "widgets")),
            "backup": ("backup", str(made / "it.backup"), *here),
            "restore": ("restore", str(made / "it.backup"), "--state-dir", str(made / "restored")),
            "report": ("run", "report", "latest", "--out", str(made / "page.html"), *here),
        }
        for what, points in WRITTEN.items():
            before = {*made.rglob("*"), made / "widgets"}
            for point in points:
                monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
                assert cli.main(commands[what]) == 4
                told = capsys.readouterr().err
                assert (told.count("\n"), told.startswith("coordinator: "), REASONS[kind] in told) == (1, True, True)
                assert set(made.rglob("*")) <= before
            assert cli.main(commands[what]) == 0
        assert fleet.unexpected == []


LEDGER = ("worker.ledger.write", "worker.ledger.sync", "worker.ledger.rename")


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_what_is_not_in_the_ledger_is_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The privacy ledger cannot be written: no table comes out, and what was spent before stays on record."""
    ledger = Ledger(tmp_path / "ledger")
    gate = Gate(share=ShareSection(clip=1.0, noise=1.0), ledger=ledger)
    table = ClassTable(label="logit", counts=torch.tensor([40]), values=torch.ones(1, 1))

    def release(number: int) -> None:
        assert len(gate.release([table], run="r-1", round=number, noise=torch.Generator())) == 1

    release(1)
    for point in LEDGER:
        monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
        with pytest.raises(OSError, match=REASONS[kind]):
            release(2)
        assert [done.round for done in ledger.releases()] == [1]
    release(2)
    assert [done.round for done in ledger.releases()] == [1, 2]


EXPORTED = ("onnx.sync", "onnx.rename")
QUANTIZED = ("onnx.int8.sync", "onnx.int8.rename")


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_an_export_that_cannot_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Both files, at each step: what was there stays, nothing else does, and the next try works."""
    plain, small = tmp_path / "m.onnx", tmp_path / "q.onnx"
    facts = Facts(classes=("a", "b"), input=(4,))
    writes: dict[tuple[str, ...], Callable[[], object]] = {
        EXPORTED: lambda: write_onnx(torch.nn.Linear(4, 2), facts, plain),
        QUANTIZED: lambda: quantize(plain, facts, small),
    }
    small.write_bytes(b"old")
    plain.write_bytes(b"old")
    for points, write in writes.items():
        for point in points:
            before = {path: path.read_bytes() for path in tmp_path.iterdir()}
            monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
            with pytest.raises(MachineError, match=REASONS[kind]):
                write()
            assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        write()
        OnnxModel(plain)
    assert OnnxModel(small).facts.precision == "int8"


SIMULATED = (
    *(f"simulate.run.{step}" for step in ("write", "sync", "rename")),
    *(f"simulate.similarity.{step}" for step in ("write", "sync", "rename")),
    *(f"simulate.model.{step}" for step in ("sync", "rename")),
    *(f"simulate.result.{step}" for step in ("write", "sync", "rename")),
)


@pytest.mark.parametrize("kind", ["enospc", pytest.param("eio", marks=pytest.mark.slow)])
def test_a_simulation_that_cannot_write_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """4 and one line for each write; the same command goes on, and trains nothing twice: there is one round."""
    flags = ("--model", "mlp", "--set", "model.hidden=[4]", "--data", "digits", "--devices", "2", "--rounds", "1")
    command = ("simulate", *flags, "--workers", "1", "--out", str(tmp_path / "run"))
    for point in SIMULATED:
        monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
        assert cli.main(command) == 4
        told = capsys.readouterr().err
        assert (told.count("\n"), told.startswith("coordinator: "), REASONS[kind] in told) == (1, True, True)
    assert cli.main(command) == 0
    assert len((tmp_path / "run/rounds.jsonl").read_text().splitlines()) == 1
    assert not list(tmp_path.rglob("*.tmp"))


JOINING = (
    "state.version.write",
    *(f"{file}.{step}" for file in ("bundle", "device-file") for step in ("write", "sync", "rename")),
)


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_join_that_failed_can_be_repeated(tmp_path: Path, kind: str) -> None:
    """Nothing half-written stays, and the next try joins."""
    with Fleet(tmp_path) as fleet:
        fleet.start_coordinator()
        bundle, state_dir = fleet.write_bundle("a"), tmp_path / "device"
        (tmp_path / "train.npz").touch()
        join = ("edge_client", "join", bundle, "--data", tmp_path / "train.npz", "--state-dir", state_dir)
        for point in JOINING:
            failed = in_a_process(*join, environment={"FEDFIT_FAULT": f"{kind}:{point}"})
            _assert_failed(failed, "edge-client", kind)
            joined = {"bundle.json"} if point.startswith("device-file") else set()
            assert {path.name for path in state_dir.rglob("*")} <= {"lock", "version", "identity"} | joined
        ok(*join)
    assert identity.load_identity(state_dir) == fleet.bundle("a")
    assert (state_dir / "device.toml").exists()


INSTALLING = ("service.unit.write", "service.unit.sync", "service.unit.rename")


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_service_that_cannot_be_written_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No unit, whole or half; the same command works afterwards."""
    machine = Machine(tmp_path, monkeypatch)
    machine.join()
    unit = device_service.make_unit(machine.wanted())
    plan = service_install.Plan(name="fedfit-device", unit=unit, state_dir=machine.state_dir, command="edge-client")

    def install() -> None:
        service_install.install(machine.systemd, plan, replace=False, rehearse=lambda: None)

    for point in INSTALLING:
        monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
        with pytest.raises(MachineError, match=REASONS[kind]):
            install()
        assert list(machine.unit.parent.iterdir()) == []
    install()
    assert machine.unit.exists()


DEPLOYED = tuple(
    f"deployed.{what}.{step}"
    for what, steps in {
        "record": ("write", "sync", "rename"),
        "name": ("sync", "rename"),
        "current": ("sync", "rename"),
        "part": ("chunk", "rename"),
    }.items()
    for step in steps
)


@pytest.mark.parametrize("kind", ["enospc", "eio"])
@pytest.mark.parametrize("point", DEPLOYED)
def test_a_device_whose_disk_fails_uses_the_old_model_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, point: str
) -> None:
    """Every write of a deployment, on its way to the second model; the client starts over, and has it in the end.

    A record or a swap for which there is no space is waited for, and told; all else ends the client.
    """
    monkeypatch.setattr(deploying, "has_runtime", lambda: True)
    models = [b"an old model", b"a new model"]
    _deploy_to(tmp_path, models[0], "d1")
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
    if kind == "enospc" and not point.startswith("deployed.part"):
        told = _deploy_to(tmp_path, models[1], "d2")
        assert told.code == "disk_full"
        assert REASONS[kind] in told.detail
    else:
        with pytest.raises(MachineError, match=REASONS[kind]):
            _deploy_to(tmp_path, models[1], "d2")
    current = tmp_path / "deployed/current.onnx"
    assert current.read_bytes() in models
    assert _deploy_to(tmp_path, models[1], "d2") == Deployed(deployment="d2", state="active")
    assert current.read_bytes() == models[1]
    assert (tmp_path / "deployed/previous.onnx").read_bytes() == models[0]
    assert not list(tmp_path.rglob("*.tmp"))


def _deploy_to(folder: Path, content: bytes, name: str) -> Deployed:
    """A client that starts, is asked to use a model, gets it in one chunk, and tests it with a process that ends.

    Returns what it says last.
    """
    blobs = BlobStore(folder / "blobs", folder / "tmp")
    heard: list[Deployed] = []
    device = deploying.Deploying(
        state_dir=folder,
        blobs=blobs,
        is_allowed=True,
        send=heard.append,
        budget_bytes=lambda: 10**9,
        usual_bytes=lambda: 10**9,
        free_bytes=lambda: 10**9,
        command=("true",),
    )
    sha256 = hashlib.sha256(content).hexdigest()
    about: dict[str, Any] = {"run": "r-1", "version": 1, "input": (1,), "classes_sha256": sha256}
    device.asked(Deploy(deployment=name, sha256=sha256, length=len(content), **about))
    if device.wanted is not None and not blobs.has(sha256):
        with durable.disk_errors("cannot store a part"), contextlib.closing(_incoming(blobs, sha256, content)) as part:
            part.add(parse_chunk(make_chunk(transfer_id(sha256), 0, content)), 0.0)
            part.finish()
    device.tick(0.0, may_test=True)
    if device.fds:
        select.select(device.fds, [], [], 30)
        device.test_ended(1.0)
    return heard[-1]


def _incoming(blobs: BlobStore, sha256: str, content: bytes) -> Incoming:
    return Incoming(
        blobs,
        sha256,
        sha256=sha256,
        length=len(content),
        max_window_bytes=1 << 20,
        point="deployed.part",
        sync=False,
    )


DEPLOYING = ("deployment.sync", "deployment.rename", "store.deployment.commit")


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_deployment_that_cannot_be_recorded_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """No row and no word to a device; the same request works afterwards, and so does a device's answer."""
    store, blobs = SqliteStore(tmp_path / "state.db"), BlobStore(tmp_path / "blobs", tmp_path / "tmp")
    store.devices.add(device_row("a"))
    store.runs.add(run_row())
    roster = Roster("fed", store.devices.all(), epoch=1, heartbeat_s=1.0)
    sent: list[str] = []
    kept = Deployments(
        store=store, blobs=blobs, roster=roster, send=lambda device, message: sent.append(device), release=blobs.remove
    )
    service = cast(Service, SimpleNamespace(store=store, blobs=blobs, roster=roster, deployments=kept))
    commands = DeployCommands(service, lambda run: run_row(run))
    content = b"an ONNX file"
    sha256 = hashlib.sha256(content).hexdigest()

    def start() -> None:
        name = new_name()
        (tmp_path / "tmp" / name).write_bytes(content)
        file = ExportedFile(
            name=name,
            architecture="full",
            precision="fp32",
            sha256=sha256,
            length=len(content),
            input=(1,),
            classes_sha256=sha256,
            devices=("a",),
        )
        commands.start(StartDeployment(run="r-1", version=1, files=(file,)))

    for point in DEPLOYING:
        monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{point}")])
        with pytest.raises(MachineError, match=REASONS[kind]):
            start()
        assert (store.deployments.all(), sent) == ([], [])
        blobs.remove(sha256)
    start()
    (row,) = store.deployments.all()
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{DEPLOYED_HERE[0]}")])
    answer = Deployed(deployment=row.id, state="active")
    with pytest.raises(MachineError, match=REASONS[kind]):
        kept.reported("a", answer)
    kept.reported("a", answer)
    assert [row.state for row in store.deployments.all()] == ["active"]
    store.close()


DEPLOYED_HERE = ("store.deployed.commit",)


PAGE = ("store.page-access.commit",)


@pytest.mark.parametrize("kind", ["enospc", "eio"])
def test_a_disk_that_fails_while_a_token_is_added_leaves_none(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same token can be added when there is space again."""
    store = SqliteStore(tmp_path / "state.db")
    token = PageTokenRow(name="wall", sha256="h", role="read", created_s=1)
    monkeypatch.setattr(faults, "_faults", [faults._parse(f"{kind}:{PAGE[0]}")])
    with pytest.raises(MachineError, match=REASONS[kind]):
        store.page_access.add_token(token)
    assert store.page_access.tokens() == []
    store.page_access.add_token(token)
    assert store.page_access.tokens() == [token]
    store.close()


def _assert_failed(result: subprocess.CompletedProcess[str], program: str, kind: str) -> None:
    """4 and one line."""
    assert result.returncode == 4, (result.args, result.stderr)
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"{program}: ")
    assert REASONS[kind] in result.stderr
