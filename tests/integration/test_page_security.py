"""Who may ask what of the live page, and what a hostile or clumsy client meets; a real coordinator without devices."""

from __future__ import annotations

import socket
import sqlite3
import ssl
import time
from collections.abc import Iterator
from typing import Any

import pytest
import raw_requests
from fleet import Fleet, mlp_run
from page_client import PageClient, page_port
from typed import typed

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with its page, a run that waits for devices, and the device a, which never comes."""
    with Fleet(tmp_path_factory.mktemp("fleet"), start_options=("--page", "127.0.0.1:0")) as started:
        started.start_coordinator()
        started.add_devices("a")
        started.start_run(mlp_run(rounds=1))
        yield started


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> PageClient:
    """Its API."""
    return PageClient(fleet.state_dir, page_port(fleet))


@pytest.fixture(scope="module")
def reader(client: PageClient) -> str:
    """A token that may look."""
    return client.token("reader")


def test_a_link_is_valid_once_and_its_secret_is_nowhere(fleet: Fleet, client: PageClient) -> None:
    """The second use is 401; neither links nor tokens nor cookies stand in the database."""
    secret = client.link().partition("#t=")[2]
    first = client.sign_in(secret)
    assert first.status == 200
    again = client.sign_in(secret)
    assert (again.status, again.code) == (401, "wrong_token")
    assert "coordinator page link" in again.json["error"]["message"]
    token = client.token("once")
    cookie = first.headers["set-cookie"].partition("=")[2].partition(";")[0]
    assert "HttpOnly" in first.headers["set-cookie"]
    assert "SameSite=Strict" in first.headers["set-cookie"]
    with sqlite3.connect(fleet.state_dir / "state.db") as database:
        stored = "\n".join(database.iterdump())
    database.close()
    assert all(text not in stored for text in (secret, token, cookie))
    raw_requests.request(fleet.state_dir, "page-token-remove", name="once")
    assert client.get("live", token).status == 401


HEADERS: list[tuple[dict[str, str | None], int, str]] = [
    ({"Host": "evil.example"}, 421, "wrong_host"),
    ({"Host": "127.0.0.1:1"}, 421, "wrong_host"),
    ({"Origin": None}, 403, "wrong_origin"),
    ({"Origin": "http://127.0.0.1:1"}, 403, "wrong_origin"),
    ({"Origin": "null"}, 403, "wrong_origin"),
    ({"X-Fedfit-CSRF": "wrong"}, 403, "wrong_csrf"),
    ({"X-Fedfit-CSRF": None}, 403, "wrong_csrf"),
    ({"Content-Type": "text/plain"}, 415, "content_type"),
    ({"Cookie": None}, 401, "signed_out"),
    ({"Cookie": "fedfit-x=1"}, 401, "signed_out"),
]


@pytest.mark.parametrize(("change", "status", "code"), HEADERS, ids=[str(entry[0]) for entry in HEADERS])
def test_a_change_needs_every_proof(
    fleet: Fleet, client: PageClient, change: dict[str, str | None], status: int, code: str
) -> None:
    """The run goes on waiting."""
    answer = client.ask("POST", "/api/v1/runs/test-1/stop", body={}, headers={**_session(client), **change})
    assert (answer.status, answer.code) == (status, code)
    assert fleet.show("test-1")["state"] in ("queued", "running")


_KEPT: dict[int, dict[str, str]] = {}


def _session(client: PageClient) -> dict[str, str]:
    if client.port not in _KEPT:
        _KEPT[client.port] = client.session()
    return _KEPT[client.port]


def test_who_may_look_changes_nothing(fleet: Fleet, client: PageClient, reader: str) -> None:
    """Neither a token nor a browser with the role `read` stops a run."""
    by_token = {"Authorization": f"Bearer {reader}"}
    for headers in (by_token, client.session("read")):
        answer = client.ask("POST", "/api/v1/runs/test-1/stop", body={}, headers=headers)
        assert (answer.status, answer.code) == (403, "read_only")
    assert fleet.show("test-1")["state"] in ("queued", "running")


BAD: list[tuple[str, int, str]] = [
    ("devices?limit=100000", 400, "out_of_range"),
    ("devices?limit=-1", 400, "out_of_range"),
    ("devices?limit=1e3", 400, "out_of_range"),
    ("devices?colour=red", 400, "unknown_parameter"),
    ("devices?state=happy", 400, "bad_parameter"),
    ("devices/nobody", 404, "unknown_device"),
    ("devices/..%2F..%2Fetc%2Fpasswd", 404, "unknown_path"),
    ("runs/none-1", 404, "unknown_run"),
    ("runs/test-1/rounds/99", 404, "unknown_round"),
    ("compare?run=none-1", 404, "unknown_run"),
    ("jobs/1", 404, "unknown_job"),
    ("nothing", 404, "unknown_path"),
    ("runs/test-1/stop", 405, "method"),
]


@pytest.mark.parametrize(("path", "status", "code"), BAD, ids=[entry[0] for entry in BAD])
def test_what_cannot_be_answered_is_one_line(
    client: PageClient, reader: str, path: str, status: int, code: str
) -> None:
    """A stable code, and what was expected."""
    answer = client.get(path, reader)
    assert (answer.status, answer.code) == (status, code)
    assert "\n" not in answer.json["error"]["message"]


def test_every_answer_has_the_headers_and_nothing_is_inline(client: PageClient, reader: str) -> None:
    """Files, answers and errors alike; the page's own file has neither a script nor a style in it."""
    for answer in (client.ask("GET", "/"), client.get("live", reader), client.get("nothing", reader)):
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers
    html = client.ask("GET", "/").body.decode()
    assert "style=" not in html
    assert "<script>" not in html
    assert client.ask("GET", "/favicon.ico").status == 204
    assert client.ask("GET", "/../server.py").status == 404


def _connect(client: PageClient) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", client.port))
    connection.settimeout(20)
    return connection


RAW = {
    "long-header": b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000,
    "no-http": b"\x16\x03\x01\x02\x00\x01\x00" + b"a" * 100 + b"\r\n\r\n",
    "two-hosts": b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "long-body": b"POST /api/v1/session HTTP/1.1\r\nHost: x\r\nContent-Length: 70000\r\n\r\n" + b"a" * 70_000,
    "two-lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "chunked-and-length": b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x, chunked\r\n\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("sent", list(RAW))
def test_what_is_no_request_is_refused(client: PageClient, reader: str, sent: str) -> None:
    """An error or the end of the connection, never a request that somebody else reads differently; others go on."""
    with _connect(client) as connection:
        connection.sendall(RAW[sent])
        answer = b""
        try:
            while piece := connection.recv(65_536):
                answer += piece
        except ConnectionResetError:
            pass
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4") or answer.startswith(b"HTTP/1.1 5")
    assert client.get("live", reader).status == 200


def test_more_than_64_connections_are_closed(client: PageClient, reader: str) -> None:
    """Those who are there stay; when they have gone, others may come."""
    connections = [_connect(client) for _ in range(70)]
    time.sleep(0.5)
    closed = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            closed += connection.recv(1) == b""
        except ConnectionResetError:
            closed += 1
        except BlockingIOError:
            pass
    for connection in connections:
        connection.close()
    assert closed == 6
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            if client.get("live", reader).status == 200:
                break
        except OSError:
            time.sleep(0.1)
    assert client.get("live", reader).status == 200


def _matches(value: Any, schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Where a value differs from its schema; empty if it does not."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        problems = [_matches(value, one, schemas) for one in schema["anyOf"]]
        return "" if "" in problems else problems[0]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "null": type(None)}
    kind = schema.get("type")
    if kind == "number":
        return "" if isinstance(value, (int, float)) and not isinstance(value, bool) else f"{value!r} is no number"
    if kind and (not isinstance(value, kinds[kind]) or (kind == "integer" and isinstance(value, bool))):
        return f"{value!r} is no {kind}"
    if kind == "array":
        return next(filter(None, (_matches(one, schema["items"], schemas) for one in value)), "")
    if kind == "object" and "properties" in schema:
        if set(value) != set(schema["properties"]):
            return f"{sorted(value)} are not {sorted(schema['properties'])}"
        each = (_matches(value[name], one, schemas) for name, one in schema["properties"].items())
        return next(filter(None, each), "")
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return next(
            filter(None, (_matches(one, schema["additionalProperties"], schemas) for one in value.values())), ""
        )
    return ""


def test_the_answers_are_those_of_the_document(client: PageClient, reader: str) -> None:
    """Each address that can be looked at, against the OpenAPI document that the coordinator serves."""
    document = client.get("schema", reader).json
    schemas = document["components"]["schemas"]
    places = {"{name}": "a", "{run}": "test-1", "{number}": "1", "{job}": "1"}
    looked = []
    for path, operations in document["paths"].items():
        if "get" not in operations or path.startswith(("/events", "/jobs", "/schema")) or "rounds/" in path:
            continue
        if path.endswith("/report"):
            continue
        content = operations["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        filled = path
        for placeholder, value in places.items():
            filled = filled.replace(placeholder, value)
        answer = client.get(filled.lstrip("/"), reader)
        assert answer.status == 200, (path, answer.body)
        assert _matches(answer.json, content, schemas) == "", path
        looked.append(path)
        assert operations["get"]["summary"]
    assert len(looked) >= 10


def test_the_stream_has_numbered_events_and_ends_with_its_token(fleet: Fleet, client: PageClient) -> None:
    """A viewer hears of a device that is labelled; who comes back with an old number is told to ask again."""
    token = client.token("stream")
    with _connect(client) as connection:
        head = f"GET /api/v1/events?since=1 HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n"
        connection.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
        heard = b""
        while b"event: resync" not in heard:
            heard += connection.recv(65_536)
        fleet.ask("device-label", name="a", put={"seen": "yes"})
        while b'"seen":"yes"' not in heard:
            heard += connection.recv(65_536)
    assert b"\nid: " in heard
    assert b"event: devices" in heard


def test_too_many_failed_attempts_are_answered_with_wait(client: PageClient) -> None:
    """The sixth wrong token within a minute is not looked at."""
    statuses = [client.sign_in("wrong").status for _ in range(7)]
    assert statuses[-1] == 429
    assert client.get("live", "wrong").status == 429


def test_bad_options_are_one_line(tmp_path: Any, fleet: Fleet, client: PageClient) -> None:
    """A port without a number, an address of another machine, a port that is taken: named, with what to type."""
    state = str(tmp_path / "other")
    for option, expected in (
        ("8765:127", "expected HOST:PORT, such as 127.0.0.1:8765"),
        ("203.0.113.7:8765", "expected an address of this machine"),
        (f"127.0.0.1:{client.port}", f"cannot serve the page on 127.0.0.1:{client.port}"),
    ):
        result = typed("coordinator", "start", "--listen", "127.0.0.1", "--page", option, "--state-dir", state)
        assert result.returncode in (3, 4)
        assert expected in result.stderr
        assert result.stderr.count("\n") == 1


def test_off_loopback_the_page_has_tls_of_our_own_ca(tmp_path: Any) -> None:
    """On all addresses, without any option for TLS: the certificate is signed by the CA that devices trust."""
    with Fleet(tmp_path, start_options=("--page", "0.0.0.0:0", "--advertise", "localhost")) as fleet:
        fleet.start_coordinator()
        port = page_port(fleet)
        context = ssl.create_default_context(cafile=str(fleet.state_dir / "pki" / "ca.pem"))
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            connection.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode())
            assert connection.recv(15) == b"HTTP/1.1 200 \r\n"
        assert "the page's certificate: SHA-256 " in fleet.log("coordinator")
