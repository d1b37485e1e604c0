"""Metrics of a running coordinator for Prometheus: `coordinator start --metrics-port PORT`.

The loop samples the coordinator every few seconds (`Metrics.look`); a thread of prometheus-client serves the newest
samples, so that only the loop reads the store. They hold no secrets, and the listener is on loopback unless
`--metrics-listen` names another address. Needs prometheus-client, of the extra `coordinator`, and loads it only then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_client import __version__, durable
from edge_client.errors import MachineError

if TYPE_CHECKING:
    from coordinator.server.service import Service

__all__ = ["Metrics", "Sample"]

_EVERY_S = 5.0
_MAX_SHOWN_DEVICES = 1000  # of a larger fleet only the counts: each device would be five time series
_RUN_STATES = ("queued", "running", "finished", "stopped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A value with its labels."""

    name: str
    value: float
    labels: Mapping[str, str]


# name -> help; all are gauges, because a coordinator that starts again begins at zero
_HELP = {
    "fedfit_info": "version of fedfit and federation; always 1",
    "fedfit_broker_connected": "whether the coordinator is connected to its broker",
    "fedfit_paused": "whether runs pause, because the disk is nearly full",
    "fedfit_disk_free_bytes": "free below the state directory",
    "fedfit_devices": "enrolled devices by state",
    "fedfit_device_online": "whether a device sent a message lately",
    "fedfit_device_last_seen_seconds": "since a device's last word",
    "fedfit_device_budget_bytes": "what a worker may use on a device",
    "fedfit_device_free_disk_bytes": "free on a device's disk",
    "fedfit_device_step": "of the training that a device is in",
    "fedfit_runs": "runs by state",
    "fedfit_run_round": "rounds that the open run has committed",
    "fedfit_run_rounds": "rounds that the open run may have",
    "fedfit_run_best_score": "of the open run, by its metric",
    "fedfit_run_bytes": "of the open run's messages, by direction as the coordinator sees it",
}


class Metrics:
    """The newest samples, and the listener that serves them."""

    def __init__(self, port: int, listen: str = "127.0.0.1") -> None:
        """Listen; raises `MachineError` if that cannot be."""
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise MachineError(
                "--metrics-port needs prometheus-client, which is not installed: pip install 'fedfit[coordinator]'"
            ) from error
        self._samples: Sequence[Sample] = ()
        self._due = 0.0
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type,unused-ignore]  # has `collect`, which is all that is used
        try:
            self._server, self._thread = start_http_server(port, addr=listen, registry=registry)
        except OSError as error:
            raise MachineError(f"cannot listen on {listen}:{port} for --metrics-port: {error.strerror}") from error
        self.port = int(self._server.server_port)

    def collect(self) -> Iterator[Any]:
        """Yield the samples to prometheus-client, whose thread calls this."""
        from prometheus_client.core import GaugeMetricFamily

        samples = self._samples
        for name, help_text in _HELP.items():
            named = [sample for sample in samples if sample.name == name]
            if named:
                family = GaugeMetricFamily(name, help_text, labels=list(named[0].labels))
                for sample in named:
                    family.add_metric(list(sample.labels.values()), sample.value)
                yield family

    def look(self, service: Service, now: float) -> None:
        """Sample the coordinator, if the newest samples are old enough; the loop calls this."""
        if now >= self._due:
            self._due = now + _EVERY_S
            self._samples = list(picture(service, now))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def picture(service: Service, now: float | None = None) -> Iterator[Sample]:
    """Sample a coordinator."""
    moment = time.monotonic() if now is None else now
    with durable.disk_errors(f"cannot look at {service.state_dir}"):
        free = durable.free_bytes(service.state_dir)
    yield _sample("fedfit_info", 1, version=__version__, federation=service.federation)
    yield _sample("fedfit_broker_connected", service.connected)
    yield _sample("fedfit_paused", bool(service.paused))
    yield _sample("fedfit_disk_free_bytes", free)
    yield from _devices(service, moment)
    yield from _runs(service)


def _devices(service: Service, now: float) -> Iterator[Sample]:
    roster = service.roster
    online, suspended = roster.online(now), roster.suspended(now)
    counts = {"online": len(online), "suspended": len(suspended)}
    counts["offline"] = roster.num_enrolled - sum(counts.values())
    yield from (_sample("fedfit_devices", count, state=state) for state, count in counts.items())
    for name in roster.names() if roster.num_enrolled <= _MAX_SHOWN_DEVICES else ():
        yield _sample("fedfit_device_online", name in online, device=name)
        present = roster.presence(name)
        if present is not None:
            yield _sample("fedfit_device_last_seen_seconds", now - present.last_seen, device=name)
            yield _sample("fedfit_device_budget_bytes", present.profile.budget_bytes, device=name)
            yield _sample("fedfit_device_free_disk_bytes", present.free_bytes, device=name)
        if present is not None and present.heartbeat is not None and present.heartbeat.total:
            yield _sample("fedfit_device_step", present.heartbeat.step, device=name)


def _runs(service: Service) -> Iterator[Sample]:
    num_runs = service.store.runs.counts()
    for state in _RUN_STATES:
        yield _sample("fedfit_runs", num_runs.get(state, 0), state=state)
    machine = service.conductor.machine
    if machine is None:
        return
    model, run = service.store.models.last(machine.run), service.store.runs.get(machine.run)
    best = service.store.models.get(machine.run, run.best_version) if run and run.best_version is not None else None
    yield _sample("fedfit_run_round", model.version if model else 0, run=machine.run)
    yield _sample("fedfit_run_rounds", machine.file.stop.rounds, run=machine.run)
    if best is not None and best.score is not None:
        yield _sample("fedfit_run_best_score", best.score, run=machine.run, metric=machine.file.stop.metric)
    for number, way in enumerate(("up", "down")):
        total = sum(counts[number] for counts in service.traffic.moved.values())
        yield _sample("fedfit_run_bytes", total, run=machine.run, direction=way)


def _sample(name: str, value: float, **labels: str) -> Sample:
    return Sample(name=name, value=float(value), labels=labels)
