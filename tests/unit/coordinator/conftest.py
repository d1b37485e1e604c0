"""Fixtures that tests of several themes share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import service_site
from service_site import Site

from coordinator.aggregation import job_child


@pytest.fixture
def aggregator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that answers every job as `service_site.CHILD` says, without torch."""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return real([sys.executable, "-c", service_site.CHILD], **options)

    monkeypatch.setattr(job_child.subprocess, "Popen", start)


@pytest.fixture
def site(tmp_path: Path, aggregator: None) -> Iterator[Site]:
    """A service on a hub in memory, with the devices a and b."""
    made = Site(tmp_path)
    yield made
    made.store.close()
