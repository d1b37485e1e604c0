"""Many virtual devices on this machine, and the real coordinator: one process, one loop, a pool of workers.

    coordinator    the service with its store, its rounds and its aggregator, as in a federation
    devices        `virtual_devices`: the real session and wire, over the hub in memory
    workers        `worker_pool`: processes that train, for whichever device's turn it is

The model depends on the run file alone (its seed is in it), not on the number of workers, on timing, or on how often
the simulation was killed: the whole cohort is waited for and folded in the order of its names.
Nothing is synced to the disk: a kill loses nothing but what was being trained, a power cut may lose the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from coordinator.aggregation.job_child import JobChild, aggregator
from coordinator.control_messages import StartRun
from coordinator.requests.commands import Commands
from coordinator.results.reference_bytes import whole_model_bytes
from coordinator.results.run_directory import LOG, RunDirectory
from coordinator.results.training_budgets import budgets_by_name
from coordinator.rounds.slice_choice import LABEL
from coordinator.server.service import Service, ServiceOptions, allow_many_files
from coordinator.simulation.data import Prepared
from coordinator.simulation.round_log import RoundLog
from coordinator.simulation.shared_parts import SharedParts
from coordinator.simulation.virtual_devices import Surroundings, VirtualDevice, settle_left
from coordinator.simulation.worker_pool import WorkerPool
from coordinator.store.rows import DeviceRow, RunRow
from coordinator.store.sqlite import SqliteStore
from edge_client import durable
from edge_client.config.device_file import DataSection, DeviceFile, LimitsSection, ShareSection
from edge_client.config.run_file import RunFile
from edge_client.data import registry as data
from edge_client.errors import FedfitError, InputError, NothingFitsError, RunFailedError
from edge_client.methods import registry as methods
from edge_client.records import to_map
from edge_client.transport.base import Event, Received
from edge_client.transport.inproc import Hub
from edge_client.wire.topics import Topics

__all__ = ["Observer", "Processes", "Setup", "Simulation", "simulate"]

Json = dict[str, Any]

STATE_KIND = "simulation"
STATE_VERSION = 1
_HEARTBEAT_S = 3600.0  # nobody has to be missed: heartbeats would only add bytes that depend on this machine's speed
_DEVICES_TICK_S = 0.25
_WRITTEN = frozenset({"input", "unknown_name"})  # why the aggregator refuses what a person wrote


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run: what, where, on which data."""

    file: RunFile
    folder: Path
    data: Prepared | None  # None: a task finds its data itself
    task_source: str = ""  # the text of the task's file
    task_path: str = ""  # FILE.py:OBJECT, absolute


class Observer(Protocol):
    """What watches a simulation."""

    def moved(self, round_: int, done: int, asked: int) -> None:
        """`done` of the `asked` devices of this round have answered."""

    def round_done(self, line: Json) -> None:
        """A line of `rounds.jsonl` was written."""


@dataclass(frozen=True, slots=True)
class Processes:
    """The workers and the aggregator: loaded once for all runs of a command."""

    pool: WorkerPool
    aggregator: JobChild = field(default_factory=aggregator)

    def close(self) -> None:
        """End all of them, whatever they are doing."""
        self.pool.close()
        self.aggregator.close()


def simulate(setup: Setup, processes: Processes, observer: Observer) -> Json:
    """Run a simulation to its end, or continue it; returns the result, which the run's folder holds as well."""
    allow_many_files()
    directory = RunDirectory(setup.folder)
    directory.begin(setup.file)
    with durable.relaxed(), contextlib.ExitStack() as opened:
        lock = durable.claim_state_dir(
            directory.state, kind=STATE_KIND, version=STATE_VERSION, may_hold=(LOG,), option="--out"
        )
        opened.callback(os.close, lock)
        simulation = Simulation(setup, directory, processes, observer, opened)
        simulation.run()
        result = simulation.result()
        directory.finish(result, simulation.model_path)
    return result


class Simulation:
    """A run in progress."""

    def __init__(
        self,
        setup: Setup,
        directory: RunDirectory,
        processes: Processes,
        observer: Observer,
        opened: contextlib.ExitStack,
    ) -> None:
        """What is `opened` is closed by the caller."""
        self._setup = setup
        self._file = setup.file
        self._pool = processes.pool
        self._observer = observer
        self._opened = opened
        self._state = directory.state
        self._store = _open_store(directory)
        opened.callback(self._store.close)
        self._woken, self._wake_fd = os.pipe()
        for fd in (self._woken, self._wake_fd):
            os.set_blocking(fd, False)
            opened.callback(os.close, fd)
        self._hub = Hub(on_wake=self._wake)
        self._service = Service(
            state_dir=self._state,
            store=self._store,
            broker=None,
            brokers=("memory",),
            ca=None,
            connect=lambda on_event: self._hub.transport("coordinator", on_event),
            options=ServiceOptions(
                heartbeat_s=_HEARTBEAT_S,
                disk_reserve_bytes=0,
                simulated=True,
                test_data=setup.data.path if setup.data is not None else "",
            ),
            aggregation=processes.aggregator,
        )
        self._devices: list[VirtualDevice] = []
        self._tick_at = 0.0
        self._run = ""
        self._first_attempt = 1
        self._log = RoundLog(setup.file, self._store, directory, budgets_by_name(setup.file))

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_fd, b"x")

    @property
    def model_path(self) -> Path:
        """The last model."""
        model = self._store.models.last(self._run)
        assert model is not None
        return self._service.blobs.path(model.sha256)

    def run(self) -> None:
        """Run until there is a final model; raises `RunFailedError` or `NothingFitsError`."""
        begun = _only_run(self._store)
        if begun is None or begun.state != "finished":
            self._begin(begun)
            while not self._is_over():
                self._turn()
        row = _only_run(self._store)
        assert row is not None
        self._run = row.id
        if row.state != "finished":
            code, _, detail = row.reason.partition(": ")
            if row.state == "failed" and code in _WRITTEN:
                raise InputError(f"{self._setup.folder}: {detail}")
            raise RunFailedError(f"{self._setup.folder}: the run {row.state}: {row.reason}")
        self._tell(self._log.write(row.id, over=True))

    def result(self) -> Json:
        """The result of the finished run."""
        model = self._store.models.last(self._run)
        assert model is not None
        path = self.model_path
        size = whole_model_bytes(path, self._file.rounds.codec) if path.exists() else None
        return {**self._log.summary(self._run), "model_sha256": model.sha256, "whole_model_bytes": size}

    # beginning

    def _begin(self, begun: RunRow | None) -> None:
        settle_left(self._state / "devices", self._was_stored)
        if not self._store.devices.all():
            self._store.devices.add(*(_new_row(name) for name in budgets_by_name(self._file)))
        self._service.begin(self._opened)
        self._hub.poll()
        self._opened.callback(self._close_devices)
        self._make_devices(begun)
        self._hub.poll()  # everybody says hello, and is let in, before any round is thought of
        self._service.traffic.take_all()  # connecting is no part of a round
        self._watch_announcements()
        if begun is None:
            request = StartRun(file=_with_shared_samples(self._setup), task_source=self._setup.task_source)
            self._run = Commands(self._service).answer(request).run
        else:
            self._run = begun.id
        machine = self._service.conductor.machine
        self._first_attempt = machine.attempt if machine is not None else 1
        self._pool.warm_up()

    def _was_stored(self, lease_id: str) -> bool:
        lease = self._store.leases.get(lease_id)
        return lease is not None and lease.state == "stored"

    def _make_devices(self, begun: RunRow | None) -> None:
        settings = {begun.settings_sha256} if begun is not None and begun.settings_sha256 else set()
        around = Surroundings(
            hub=self._hub,
            topics=Topics(self._service.federation),
            parts=SharedParts(self._state, keep=settings),
            pool=self._pool,
            folder=self._state / "devices",
        )
        self._opened.callback(around.parts.close)
        seen = self._store.traffic.by_device(begun.id) if begun is not None else {}
        budgets = budgets_by_name(self._file)
        asked, pinned = dict(wanted.split("=", 1) for wanted in self._file.devices.where), _pinned(self._file)
        for index, row in enumerate(self._store.devices.all()):
            device = VirtualDevice(
                row,
                device_file=to_map(_device_file(self._setup, index)),
                labels=asked | pinned.get(row.name, {}),
                tasks={self._file.task.name: self._file.task.sha256} if self._file.task is not None else {},
                training_budget_bytes=budgets[row.name],
                around=around,
            )
            device.parts.add(settings if row.name in seen else ())
            self._devices.append(device)

    def _close_devices(self) -> None:
        for device in self._devices:
            device.close()

    def _watch_announcements(self) -> None:
        """Follow the announcements, which end every round, as a device of a federation does."""

        def heard(event: Event) -> None:
            if isinstance(event, Received):
                self._log.announced(self._run, int(json.loads(event.payload)["version"]))

        transport = self._hub.transport("watcher", heard)
        transport.subscribe((Topics(self._service.federation).announcement,))
        transport.connect()
        self._hub.poll()

    # the loop

    def _turn(self) -> None:
        service = self._service
        busy = self._hub.busy or service.downloads.busy
        wait_s = 0.0 if busy else max(0.0, min(service.wait_s(), self._tick_at - time.monotonic()))
        ready = _wait([*service.fds(), *self._pool.fds(), self._woken], wait_s)
        if self._woken in ready:
            os.read(self._woken, 4096)
        self._pool.read(ready, time.monotonic())
        service.attend(ready)
        self._hub.poll()
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + _DEVICES_TICK_S
            for device in self._devices:
                device.tick(now)
        self._watch()

    def _is_over(self) -> bool:
        if self._service.conductor.run is not None:
            return False
        row = self._store.runs.get(self._run)
        return row is not None and row.state not in ("queued", "running")

    def _watch(self) -> None:
        machine = self._service.conductor.machine
        if machine is None:
            return
        if machine.attempt > self._first_attempt:
            raise self._failure()
        if machine.round is not None and machine.round.goal > 0:
            self._observer.moved(machine.number, len(machine.updates), machine.round.goal)
        self._tell(self._log.write(self._run, over=False))

    def _tell(self, lines: Iterator[Json]) -> None:
        for line in lines:
            self._observer.round_done(line)

    def _failure(self) -> FedfitError:
        """The error for a round without a result: virtual devices would only fail again."""
        last = self._store.rounds.last(self._run)
        assert last is not None
        failed = [lease for lease in self._store.leases.of_attempt(self._run, last.number, last.attempt) if lease.code]
        first = next((f"{lease.device}: {lease.code}: {lease.detail}" for lease in failed), last.reason)
        detail = f"round {last.number} of {self._setup.folder} failed on {len(failed)} devices; {first}"
        nothing_fits = bool(failed) and all(lease.code == "nothing_fits" for lease in failed)
        return NothingFitsError(detail) if nothing_fits else RunFailedError(detail)


def _pinned(file: RunFile) -> dict[str, dict[str, str]]:
    """Without budgets nothing decides about slices: equally many devices in a row train each of them."""
    budgets, architectures = budgets_by_name(file), methods.architectures(file)
    if len(architectures) == 1 or any(budget is not None for budget in budgets.values()):
        return {}
    return {
        name: {LABEL: architectures[number * len(architectures) // len(budgets)]} for number, name in enumerate(budgets)
    }


def _open_store(directory: RunDirectory) -> SqliteStore:
    """The run's store; that of a failed run is emptied, because the reason may be gone."""
    store = SqliteStore(directory.state / "state.db", sync=False)
    begun = _only_run(store)
    if begun is None or begun.state in ("queued", "running", "finished"):
        return store
    store.close()
    directory.begin_anew()
    return SqliteStore(directory.state / "state.db", sync=False)


def _only_run(store: SqliteStore) -> RunRow | None:
    return next(iter(store.runs.all()), None)


def _new_row(name: str) -> DeviceRow:
    return DeviceRow(name=name, key=secrets.token_hex(32), password="")


# no owner restricts a virtual device: it shares all that a method needs, as far as any device may
_SHARE = ShareSection(min_count=10, features=True, drafts=True)


def _device_file(setup: Setup, index: int) -> DeviceFile:
    """The device.toml of a virtual device: its part of the data of all."""
    section, task = setup.file.simulate, setup.file.task
    assert section is not None
    limits = LimitsSection(accelerator=section.accelerator)
    part = (index, section.devices)
    if setup.data is not None:
        data_section = DataSection(
            source=f"npz:{setup.data.path}", partition=f"file:{setup.data.parts}", part=part, seed=setup.file.seed
        )
        return DeviceFile(data=data_section, limits=limits, share=_SHARE)
    kind, path = data.split_source(section.data) if section.data else ("", "")
    data_section = DataSection(source=kind, train=path, partition=section.partition, part=part, seed=setup.file.seed)
    tasks = {task.name: setup.task_path} if task is not None else {}
    return DeviceFile(data=data_section, limits=limits, share=_SHARE, tasks=tasks)


def _wait(fds: Sequence[int], timeout_s: float) -> list[int]:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return [fd for fd, _ in poller.poll(timeout_s * 1000)]


def _with_shared_samples(setup: Setup) -> RunFile:
    """The run as the coordinator gets it: shared samples that were held out of the data are in a file now."""
    file = setup.file
    if setup.data is None or not setup.data.shared:
        return file
    parameters = {**file.method.parameters, "public": f"npz:{setup.data.shared}"}
    return replace(file, method=replace(file.method, parameters=parameters))
