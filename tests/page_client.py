"""A client of the live page's API for tests: requests exactly as they are asked for, over the standard library."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import raw_requests
from fleet import Fleet

__all__ = ["PageAnswer", "PageClient", "page_port"]

Json = dict[str, Any]


def page_port(fleet: Fleet) -> int:
    """The port on which a fleet's coordinator, started last with `--page`, serves its page."""
    return int(re.findall(r"Live page: https?://[^/]*:(\d+)/", fleet.log("coordinator"))[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAnswer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.json["error"]["code"])


class PageClient:
    """Asks one coordinator's page."""

    def __init__(self, state_dir: Path, port: int) -> None:
        self.state_dir, self.port = state_dir, port

    @property
    def origin(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.port}"

    def link(self, role: str = "operate") -> str:
        """A new link."""
        return str(raw_requests.request(self.state_dir, "page-link", role=role)["url"])

    def token(self, name: str, role: str = "read") -> str:
        """A new token."""
        return str(raw_requests.request(self.state_dir, "page-token-add", name=name, role=role)["token"])

    def ask(
        self, method: str, path: str, *, body: Any = None, headers: Mapping[str, str | None] | None = None
    ) -> PageAnswer:
        """Send a request; a header that is None is left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent: dict[str, str | None] = {"Host": f"127.0.0.1:{self.port}", **(headers or {})}
        data = json.dumps(body).encode() if body is not None else b""
        if body is not None:
            sent.setdefault("Content-Type", "application/json")
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**sent, "Content-Length": str(len(data))}.items():
            if value is not None:
                connection.putheader(name, value)
        connection.endheaders(data)
        response = connection.getresponse()
        answer = PageAnswer(
            status=response.status,
            headers={name.lower(): value for name, value in response.getheaders()},
            body=response.read(),
        )
        connection.close()
        return answer

    def get(self, path: str, token: str) -> PageAnswer:
        """Look, with a token."""
        return self.ask("GET", f"/api/v1/{path}", headers={"Authorization": f"Bearer {token}"})

    def sign_in(self, secret: str) -> PageAnswer:
        """Use a link or a token, as the page does."""
        return self.ask("POST", "/api/v1/session", body={"token": secret}, headers={"Origin": self.origin})

    def session(self, role: str = "operate") -> dict[str, str]:
        """The headers of a browser that has signed in with a new link."""
        answer = self.sign_in(self.link(role).partition("#t=")[2])
        cookie = answer.headers["set-cookie"].partition(";")[0]
        return {"Cookie": cookie, "Origin": self.origin, "X-Fedfit-CSRF": answer.json["csrf"]}
