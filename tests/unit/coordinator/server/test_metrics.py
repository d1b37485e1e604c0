"""What monitoring reads of a coordinator: a picture that the loop takes, answered by another thread."""

from __future__ import annotations

import socket
import sys
import urllib.request
from pathlib import Path

import pytest
import service_site
from rows import PROFILE, device_row

from coordinator.server.metrics import Metrics, picture
from edge_client import __version__
from edge_client.errors import MachineError

pytestmark = pytest.mark.usefixtures("aggregator")  # no job is done here


def figures(site: service_site.Site, now: float) -> dict[tuple[str, ...], float]:
    """By name and labels' values."""
    samples = picture(site.service, now)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_a_picture_has_devices_by_state_and_what_each_said(tmp_path: Path) -> None:
    """Two are enrolled; a spoke 7 s ago and is online until 25 s, b never did."""
    site = service_site.Site(tmp_path)
    with site.serving():
        site.hello("a", 3.0)
        seen = figures(site, 10.0)
        later = figures(site, 100.0)
    states = {state: seen["fedfit_devices", state] for state in ("online", "offline", "suspended")}
    assert states == {"online": 1, "offline": 1, "suspended": 0}
    assert seen["fedfit_device_last_seen_seconds", "a"] == 7.0
    assert seen["fedfit_device_budget_bytes", "a"] == PROFILE.budget_bytes
    assert (seen["fedfit_device_online", "a"], seen["fedfit_device_online", "b"]) == (1, 0)
    assert ("fedfit_device_budget_bytes", "b") not in seen
    assert later["fedfit_devices", "online"] == 0
    assert seen["fedfit_info", __version__, site.service.federation] == 1
    assert seen["fedfit_runs", "running"] == 0
    site.store.close()


def test_of_a_large_fleet_there_are_only_counts(tmp_path: Path) -> None:
    """1,000 devices have samples of their own, 1,001 have not."""
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        for num in (1000, 1001):
            service.roster.set_devices(device_row(f"d{number}") for number in range(num))
            seen = figures(site, 1.0)
            assert (("fedfit_device_online", "d0") in seen) == (num == 1000)
            assert seen["fedfit_devices", "offline"] == num
    site.store.close()


def test_a_picture_has_the_open_run(tmp_path: Path) -> None:
    """Its rounds, and the bytes of its messages both ways."""
    site = service_site.Site(tmp_path)
    service_site.with_run(site)
    with site.serving() as service:
        service.traffic.count("a", up=10, down=200)
        service.traffic.count("b", up=5, down=100)
        seen = figures(site, 1.0)
    assert seen["fedfit_run_bytes", "r-1", "up"] == 15
    assert seen["fedfit_run_bytes", "r-1", "down"] == 300
    assert seen["fedfit_runs", "running"] == 1
    assert ("fedfit_run_rounds", "r-1") in seen
    site.store.close()


def test_the_last_picture_is_answered_over_http(tmp_path: Path) -> None:
    """As text that Prometheus reads; a port that is taken is told."""
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    site = service_site.Site(tmp_path)
    with site.serving() as service:
        metrics = Metrics(0)
        try:
            metrics.look(service, 0.0)
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=10) as answer:
                text = answer.read().decode()
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                taken.listen()
                with pytest.raises(MachineError, match=r"cannot listen on 127\.0\.0\.1"):
                    Metrics(taken.getsockname()[1])
        finally:
            metrics.close()
    assert '\nfedfit_devices{state="offline"} 2.0\n' in text
    assert "# TYPE fedfit_devices gauge" in text
    site.store.close()


def test_without_the_package_the_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a part of the extra `coordinator`."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MachineError, match=r"pip install 'fedfit\[coordinator\]'"):
        Metrics(0)
