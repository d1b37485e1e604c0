"""Fixtures: the embedded broker, mosquitto where it is installed, and each broker in turn as `site`."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Undisturbed
from hypothesis import settings
from sites import BrokerSite, ExternalSite, HubSite, Site, access_of, close_all, find_mosquitto, mosquitto_config

from coordinator.broker.broker import EmbeddedBroker
from coordinator.store.base import Store
from coordinator.store.sqlite import SqliteStore
from edge_client.wire.topics import Topics


def pytest_configure(config: pytest.Config) -> None:
    """One cache of cost rows for the whole run of tests, xdist's processes included: each model is measured once.

    One thread: several processes with several threads each wait for each other. Hypothesis times nothing: the machine
    may be busy.
    """
    settings.register_profile("fedfit", deadline=None, derandomize=True)
    settings.load_profile("fedfit")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "FEDFIT_CACHE_DIR" not in os.environ:
        folder = tempfile.mkdtemp(prefix="fedfit-cache-")
        os.environ["FEDFIT_CACHE_DIR"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_finish(session: pytest.Session) -> None:
    """The test accelerator is there before the first backward pass, for which torch starts a thread for each device."""
    if any(item.get_closest_marker("accelerator") for item in session.items):
        from accelerated import register  # torch

        register()


@pytest.fixture(autouse=True)
def _clients_end() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What runs make that nobody disturbs, for those that somebody did."""
    own = tmp_path_factory.getbasetemp()
    return Undisturbed(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)


@pytest.fixture(params=[SqliteStore])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """An empty store of each kind that there is; SQLite's is in memory."""
    store: Store = request.param()
    yield store
    store.close()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A running embedded broker with the users `coordinator`, `d1` and `d2` of federation `f1`."""
    topics = Topics("f1")
    broker = EmbeddedBroker(
        tmp_path / "broker",
        coordinator=access_of(topics, "coordinator"),
        devices=[access_of(topics, "d1"), access_of(topics, "d2")],
    )
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def broker_site(embedded: EmbeddedBroker) -> BrokerSite:
    """Clients for the embedded broker."""
    passwords = {user.name: user.password for user in embedded.users}
    return BrokerSite("127.0.0.1", embedded.port, Topics("f1"), passwords)


@pytest.fixture
def mosquitto_site(tmp_path: Path) -> Iterator[BrokerSite]:
    """mosquitto with the same users and permissions."""
    binary = find_mosquitto()
    if binary is None or shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto is not installed")
    topics = Topics("f1")
    users = [access_of(topics, name) for name in ("coordinator", "d1", "d2")]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([binary, "-c", mosquitto_config(tmp_path, port, users)])
    while process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            break
    yield BrokerSite("127.0.0.1", port, topics, {user.name: user.password for user in users})
    process.terminate()
    process.wait()


@pytest.fixture
def external_site() -> ExternalSite:
    """The broker of FEDFIT_TEST_BROKER."""
    url = os.environ.get("FEDFIT_TEST_BROKER")
    if not url:
        pytest.skip("FEDFIT_TEST_BROKER names no broker")
    return ExternalSite(url)


@pytest.fixture(
    params=[
        "hub",
        pytest.param("broker_site", marks=pytest.mark.broker),
        pytest.param("mosquitto_site", marks=pytest.mark.mosquitto),
        "external_site",
    ]
)
def site(request: pytest.FixtureRequest) -> Site:
    """Each of the brokers in turn."""
    if request.param == "hub":
        return HubSite()
    chosen: Site = request.getfixturevalue(request.param)
    return chosen
