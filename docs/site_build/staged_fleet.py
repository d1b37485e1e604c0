"""The live page before a fleet that does not exist: pictures of any size, for the documentation and for benchmarks.

The page's own server, its rows, alerts and charts are the real ones; only the coordinator's loop and its devices are
staged: a store with the history of one run, and a picture of its open round that stands still at 64 seconds.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from coordinator.dashboard.access import Links
from coordinator.dashboard.log_ring import LogLine, LogRing
from coordinator.dashboard.picture import Change, DeviceFacts, RunFacts
from coordinator.dashboard.server import PageServer, Place, Seat
from coordinator.state import STATE_KIND, STATE_VERSION
from coordinator.store.base import PageAccess
from coordinator.store.rows import (
    DeviceRow,
    EvaluationRow,
    LeaseRow,
    ModelRow,
    PageActionRow,
    PageTokenRow,
    RoundRow,
    RunRow,
    UpdateRow,
)
from coordinator.store.sqlite import SqliteStore
from edge_client import durable
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.records import Report, TrainingPlan, to_map

__all__ = ["ROUND", "staged_page"]

ROUND = 14
_MB = 1_000_000
_ELAPSED_S = 64.0
_CLASSES = ("ok", "scratch", "dent")
_KINDS = (  # share, kind, budget in MB, peak and prediction as shares of it, plan, seconds to train
    (0.22, "jetson-nano", 430, 0.94, 0.96, "3 groups, microbatch 32", 38.0),
    (0.30, "raspberry-pi-4", 318, 0.915, 0.935, "full, microbatch 32, recompute", 49.0),
    (0.22, "raspberry-pi-zero", 300, 0.955, 0.97, "9 groups, microbatch 16, recompute", 62.0),
    (0.16, "jetson-orin", 1200, 0.345, 0.355, "full, microbatch 128", 20.0),
    (0.10, "gpu-host", 2400, 0.18, 0.185, "full, microbatch 128", 12.0),
)


class _Device:
    def __init__(self, number: int, total: int, chance: random.Random) -> None:
        place, self.kind = (number + 0.5) / total, _KINDS[-1][1]
        for share, *rest in _KINDS:
            if place < share:
                self.kind, budget, self.peak, self.predicted, self.plan, seconds = rest
                break
            place -= share
        else:
            _, self.kind, budget, self.peak, self.predicted, self.plan, seconds = _KINDS[-1]
        self.name = f"{self.kind.replace('raspberry-', '')}-{number + 1:0{len(str(total))}}"
        self.budget = int(budget * _MB * chance.uniform(0.95, 1.05))
        self.peak *= chance.uniform(0.975, 1.015)
        self.accuracy = chance.gauss(0.0, 0.02)
        self.seconds = seconds * chance.uniform(0.9, 1.12)
        self.fetch = chance.uniform(1.2, 3.4)
        self.line = "abc"[number % 3]
        self.trouble = ""


def _fleet(count: int) -> list[_Device]:
    chance = random.Random(7)
    devices = [_Device(number, count, chance) for number in range(count)]
    for device in chance.sample(devices, max(2, count // 22) if count > 4 else 1):
        is_small = device.budget < 500 * _MB
        device.trouble = chance.choice(("offline", "nothing_fits")) if count > 60 and is_small else "offline"
    if 4 < count <= 60:
        next(device for device in reversed(devices) if device.trouble).trouble = "nothing_fits"
    if count >= 500:
        for device in chance.sample(devices, 4):
            device.trouble = "unknown_class"
    return devices


def _run_file() -> RunFile:
    table: dict[str, Any] = {
        "name": "defects",
        "model": {"name": "preresnet20", "input": [3, 32, 32]},
        "classes": list(_CLASSES),
        "method": {"name": "fedepth"},
        "stop": {"rounds": 40, "target": 0.95},
        "rounds": {"deadline": "10min"},
    }
    return parse_table(RunFile, table, source="staged")


def _curve(version: int, best: float = 0.966) -> float:
    return best - (best - 0.33) * math.exp(-version / 3.4) + 0.004 * math.sin(2.3 * version)


def _fill(state_dir: Path, devices: list[_Device], rounds: int) -> None:
    os.close(durable.claim_state_dir(state_dir, kind=STATE_KIND, version=STATE_VERSION))
    (state_dir / "tmp").mkdir(exist_ok=True)
    store = SqliteStore(state_dir / "state.db", sync=False)
    store.devices.add(*(DeviceRow(name=device.name, key="0", password="0") for device in devices))
    for number, (method, best) in enumerate((("fedavg", 0.891), ("heterofl", 0.934)), start=5):
        _add_run(store, f"defects-{number}", devices[:6], 30, method, best)
        store.runs.set_state(f"defects-{number}", "finished", "30 rounds")
    _add_run(store, "defects-7", devices, rounds, "fedepth", 0.966)
    now = int(time.time())
    for name, role, used in (("anna", "operate", now - 40), ("wall-screen", "read", now - 4)):
        store.page_access.add_token(PageTokenRow(name=name, sha256=name, role=role, created_s=now, used_s=used))
    store.page_access.add_action(PageActionRow(at_s=now - 1900, name="anna", action="start run", detail="defects"))
    store.close()


def _add_run(store: SqliteStore, run: str, devices: list[_Device], rounds: int, method: str, best: float) -> None:
    file = to_map(_run_file())
    file["method"] = {**file["method"], "name": method}
    store.runs.add(RunRow(id=run, file=file, created_s=int(time.time()) - 1900))
    store.runs.start(_model(run, 0), "0" * 64, 1)
    with store._database.transaction("staged") as transaction:
        for version in range(rounds + 1):
            if version:
                transaction.insert("model", _model(run, version, score=_curve(version, best)))
                moments = {"announce": 80 + 7 * math.sin(version)}
                row = RoundRow(run=run, number=version, state="ANNOUNCED", goal=len(devices), moments=moments)
                transaction.insert("round", row)
            for device in devices:
                if not device.trouble or device.trouble == "offline":
                    _add_evaluation(transaction, run, version, device, _curve(version, best))
                    if version and (version > rounds - 3 or len(devices) <= 200):
                        _add_update(transaction, run, version, device)
        if run == "defects-7":
            _add_failures(transaction, run, devices)
        transaction.execute("UPDATE run SET best_version = ? WHERE id = ?", rounds - 1 if rounds > 1 else rounds, run)
        for device in devices[:100]:
            transaction.execute("INSERT INTO traffic VALUES (?, ?, ?, ?)", run, device.name, 7_200_000, 8_100_000)


def _add_evaluation(transaction: Any, run: str, version: int, device: _Device, level: float) -> None:
    samples = 60
    right = min(samples, max(0, round(samples * (level + device.accuracy))))
    parts = [right // 3 + (place < right % 3) for place in range(3)]
    counts = [20 - part for part in parts]
    confusion = (parts[0], counts[0], 0, counts[1], parts[1], 0, 0, counts[2], parts[2])
    loss = samples * (0.08 + 2.3 * math.exp(-version / 3.1))
    row = EvaluationRow(
        run=run,
        version=version,
        device=device.name,
        num_samples=samples,
        num_correct=right,
        loss_sum=loss,
        confusion=confusion,
    )
    transaction.insert("evaluation", row)


def _add_update(transaction: Any, run: str, version: int, device: _Device) -> None:
    budget = device.budget
    plan = TrainingPlan(microbatch=32, budget_bytes=budget, predicted_bytes=int(budget * device.predicted))
    peak = int(budget * device.peak * (1 - 0.006 * ((version * 7919 + len(device.name)) % 5)))
    report = Report(num_samples=240, plan=plan, peak_bytes=peak, seconds=device.seconds)
    row = UpdateRow(
        run=run,
        round=version,
        attempt=1,
        device=device.name,
        lease=f"{run}-{version}-{device.name}",
        sha256="0",
        length=1,
        num_samples=240,
        norm=1.0,
        report=report,
    )
    transaction.insert("update_", row)


def _add_failures(transaction: Any, run: str, devices: list[_Device]) -> None:
    for issue, device in enumerate((one for one in devices if one.trouble not in ("", "offline")), start=1):
        code, detail = _failure(device)
        row = LeaseRow(
            id=f"f{issue}",
            issue=issue,
            epoch=1,
            run=run,
            round=ROUND,
            attempt=1,
            device=device.name,
            train=True,
            evaluate=True,
            version=ROUND - 1,
            state="declined",
            code=code,
            detail=detail,
            log=(f"ERROR {code}: {detail}",),
        )
        transaction.insert("lease", row)


def _failure(device: _Device) -> tuple[str, str]:
    if device.trouble == "unknown_class":
        return device.trouble, "its data has the class 'kratzer', the run knows ok, scratch, dent"
    if device.trouble == "nothing_fits":
        return device.trouble, f"the smallest plan needs 271 MB, the budget is {device.budget * 3 // 4 // _MB} MB"
    return "", ""


def _model(run: str, version: int, score: float | None = None) -> ModelRow:
    return ModelRow(
        run=run, version=version, sha256=f"{version:064}", length=1, sent_sha256="0", sent_length=1, score=score
    )


def _facts(device: _Device) -> DeviceFacts:
    """The device 64 seconds into the round."""
    code, detail = _failure(device)
    is_offline = device.trouble == "offline"
    fetched, started = 0.3 + device.fetch, 0.3 + device.fetch + 3.4
    trained = started + device.seconds
    evaluated, sent = trained + 0.09 * device.seconds, trained + 0.09 * device.seconds + 2.5
    moments = [("assign", 0.0), ("accept", 0.3), ("fetch", fetched)]
    phases: list[tuple[str, float]] = []
    state, doing, phase = "accepted", "working", "train"
    if code:
        state, moments, doing, phase = "declined", moments[:2], "idle", ""
    elif not is_offline and sent < _ELAPSED_S:
        state, doing, phase = "stored", "idle", ""
        moments += [("offer", evaluated), ("arrive", sent), ("check", sent + 0.1)]
        phases = [("fetch", device.fetch), ("start", 3.4), ("train", device.seconds), ("evaluate", evaluated - trained)]
    elif evaluated < _ELAPSED_S:
        doing, phase = "offering", ""
    elif trained < _ELAPSED_S:
        phase = "evaluate"
    at = 31.0 if is_offline else _ELAPSED_S
    step = min(240, max(0, int(240 * (at - started) / device.seconds)))
    return DeviceFacts(
        name=device.name,
        online=not is_offline,
        suspended=False,
        client="0.2.0",
        kind=device.kind,
        budget_bytes=device.budget,
        labels=(("line", device.line),),
        doing=doing,
        phase=phase,
        step=step if phase else 0,
        total=240 if phase else 0,
        loss=0.21 if phase == "train" else None,
        plan="" if code else device.plan,
        predicted_bytes=int(device.budget * device.predicted),
        lease=f"lease-{device.name}",
        lease_state=state,
        trains=True,
        code=code,
        detail=detail,
        moments=tuple(moments),
        phases=tuple(phases),
    )


def _earlier(device: _Device, facts: DeviceFacts) -> Iterator[tuple[float, DeviceFacts]]:
    """The changes of phase that were seen of a device at work, and when."""
    if facts.lease_state != "accepted":
        return
    fetched = 0.3 + device.fetch
    times = (("fetching", "fetch", 0.4), ("working", "start", fetched), ("working", "train", fetched + 3.4))
    for doing, phase, at in times:
        yield at, facts._replace(online=True, doing=doing, phase=phase)
    if facts.doing == "offering" or facts.phase == "evaluate":
        yield fetched + 3.4 + device.seconds, facts._replace(doing="working", phase="evaluate")


def _seat(path: Path) -> Seat:
    """Stands for the coordinator's loop: what the page asks of it is done at once, by the page's own thread."""

    def do(act: Callable[[PageAccess], None]) -> Future[None]:
        store = SqliteStore(path, sync=False)
        act(store.page_access)
        store.close()
        return _done(None)

    return Seat(
        command=lambda request: _done(None),
        note=lambda row: do(lambda access: access.add_action(row)),
        add_session=lambda row: do(lambda access: access.add_session(row, int(time.time()))),
        end_session=lambda sha256: do(lambda access: access.end_session(sha256)),
        token_used=lambda sha256, at_s: _done(None),
        watch=lambda: None,
    )


def _done(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _StillLog(LogRing):
    """A log that says the same in every picture."""

    def lines(self) -> list[LogLine]:
        at = time.time()
        said = (
            (4, "info", "", "run defects-7 round 14: 31 of 46 updates are stored"),
            (33, "warning", "pi-4-13", "pi-4-13 is not heard any more"),
            (61, "info", "", "run defects-7 round 14: asks 48 devices"),
            (64, "info", "", "run defects-7 round 13: committed af70c1d22e91"),
            (70, "info", "jetson-orin-41", "jetson-orin-41 is here (client '0.2.0')"),
        )
        return [
            LogLine(len(said) - number, at - age, level, device, "defects-7", ROUND, text)
            for number, (age, level, device, text) in reversed(list(enumerate(said)))
        ]


@contextlib.contextmanager
def staged_page(devices: int) -> Iterator[tuple[str, Callable[[], str]]]:
    """Serve the page of a fleet of this size; yields its address, and what makes a link."""
    fleet = _fleet(devices)
    with tempfile.TemporaryDirectory() as folder:
        state_dir = Path(folder) / "state"
        _fill(state_dir, fleet, ROUND - 1)
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        port, links = listener.getsockname()[1], Links()
        place = Place(
            names=("127.0.0.1", "localhost"),
            port=port,
            federation="a9a5d5f8614f",
            state_dir=state_dir,
            brokers=("mqtts://192.168.1.10:8883",),
        )
        server = PageServer(listener, place, _seat(state_dir / "state.db"), links, _StillLog(lambda: ("", 0)))
        server.start()
        time.sleep(0.3)
        for change in _changes(fleet):
            server.take(change)
        for _ in range(5):  # what is still to be added up
            time.sleep(1.5 if devices > 200 else 0.3)
            server.take(Change(names=None, devices=(), seen_at={}, run=None, at=time.monotonic()))
        try:
            yield f"http://127.0.0.1:{port}/", lambda: f"http://127.0.0.1:{port}/#t={links.make('operate')}"
        finally:
            server.close()
            listener.close()


def _changes(fleet: list[_Device]) -> Iterator[Change]:
    now = time.monotonic()
    began = now - _ELAPSED_S
    run = RunFacts(
        run="defects-7",
        number=ROUND,
        attempt=1,
        phase="RUNNING",
        version=ROUND - 1,
        began_at=began,
        ends_at=began + 600,
        connected=True,
        file=_run_file(),
    )
    names = tuple(sorted(device.name for device in fleet))
    yield Change(names=names, devices=(), seen_at={}, run=run, at=now)
    facts = {device.name: _facts(device) for device in fleet}
    seen = {device.name: now - (33.0 if device.trouble == "offline" else 1.0) for device in fleet}
    earlier = [(at, one) for device in fleet for at, one in _earlier(device, facts[device.name])]
    for at, one in sorted(earlier, key=lambda entry: entry[0]):
        yield Change(names=None, devices=(one,), seen_at={}, run=None, at=began + at)
    yield Change(names=None, devices=tuple(facts.values()), seen_at=seen, run=run, at=now)
