"""What people hear of a connection."""

from __future__ import annotations

import pytest

from edge_client.client.connection_log import ConnectionLog
from edge_client.errors import NetworkError
from edge_client.transport.base import Disconnected
from edge_client.wire.messages import Refuse

REFUSED = Disconnected(reason="h:1 does not accept the user or the password", code="credentials")
GONE = Disconnected(reason="gone", code="network")


@pytest.fixture
def errors() -> list[str]:
    """What the status file would show."""
    return []


@pytest.fixture
def connection(errors: list[str]) -> ConnectionLog:
    """Of a device with two brokers."""
    return ConnectionLog(device="d", num_brokers=2, note_error=errors.append)


def test_a_device_that_was_removed_says_so_once(connection: ConnectionLog, caplog: pytest.LogCaptureFixture) -> None:
    """Refused three times after it was let in: one line; let in and refused again: one more."""
    for num_lines in (1, 2):
        connection.connected(0.0)
        connection.welcomed()
        for _ in range(3):
            connection.lost(REFUSED)
        assert caplog.text.count("does not let device 'd' in any more") == num_lines
    assert caplog.text.count("not connected") == 0


def test_a_device_that_no_broker_lets_in_ends(connection: ConnectionLog) -> None:
    """Two brokers are tried, one after the other; a broker that cannot be reached may let it in later."""
    connection.lost(REFUSED)
    connection.lost(GONE)
    with pytest.raises(NetworkError, match="was it removed"):
        connection.lost(REFUSED)


def test_every_loss_is_logged_and_noted(
    connection: ConnectionLog, errors: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Two losses are two lines: each may have another reason; what the coordinator refuses is noted as well."""
    for _ in range(2):
        connection.lost(GONE)
    connection.refused(Refuse(boot="b", code="session", detail="unknown", retry_s=1.0))
    assert caplog.text.count("not connected (network): gone; trying again") == 2
    assert errors == ["not connected (network): gone"] * 2 + ["refused: session: unknown"]


def test_a_silent_coordinator_is_told_once(connection: ConnectionLog, caplog: pytest.LogCaptureFixture) -> None:
    """Connected at 10 s and no welcome: nothing at 70 s, one line after that, and none where a reason is known."""
    connection.connected(10.0)
    for now, num_lines in ((70.0, 0), (70.1, 1), (200.0, 1)):
        connection.warn_of_silence(now, is_online=False, refusal="")
        assert caplog.text.count("the coordinator does not answer") == num_lines
    connection.welcomed()
    connection.warn_of_silence(300.0, is_online=True, refusal="")
    connection.warn_of_silence(300.0, is_online=False, refusal="session: unknown")
    assert caplog.text.count("the coordinator does not answer") == 1


def test_the_state_tells_who_is_waited_for(connection: ConnectionLog) -> None:
    """The broker, the coordinator, nobody, and the broker again."""
    assert connection.state(is_online=False) == "connecting"
    connection.connected(0.0)
    assert connection.state(is_online=False) == "connected"
    assert connection.state(is_online=True) == "let_in"
    connection.lost(GONE)
    assert connection.state(is_online=False) == "connecting"
