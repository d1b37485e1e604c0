"""Who may look at the page and who may change something: links, tokens, sessions, and how often somebody may try.

A token or a session is known by the SHA-256 of its secret, which the store holds; a link is known to this process only.
Covers: the rules, without network. Does not cover: the tables (`coordinator.store.page_access`), headers (`server`).
"""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.store.rows import PageSessionRow

__all__ = ["LINK_S", "SESSION_S", "Links", "Rate", "Viewer", "digest", "new_session"]

LINK_S = 600
SESSION_S = 12 * 3600


def digest(secret: str) -> str:
    """What the store and the memory keep of a secret of 256 bits."""
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Somebody who has proven a token, or a browser that signed in."""

    name: str
    role: str
    csrf: str = ""  # empty: a token, which no browser sends by itself
    session: str = ""  # the hash of the cookie
    expires_s: int = 0  # wall clock

    @property
    def may_operate(self) -> bool:
        """Whether this viewer may change something."""
        return self.role == "operate"


def new_session(name: str, role: str, now_s: int) -> tuple[str, PageSessionRow]:
    """A cookie's value, and the row of its session."""
    cookie = secrets.token_urlsafe(32)
    row = PageSessionRow(
        sha256=digest(cookie), name=name, role=role, csrf=secrets.token_urlsafe(32), expires_s=now_s + SESSION_S
    )
    return cookie, row


class Links:
    """Links that sign a browser in: each once, within ten minutes. Any thread may use them."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._valid: dict[str, tuple[str, float]] = {}
        self._over: deque[str] = deque(maxlen=100)

    def make(self, role: str) -> str:
        """The secret of a new link."""
        secret = secrets.token_urlsafe(32)
        with self._lock:
            self._valid = {key: entry for key, entry in self._valid.items() if entry[1] > self._now()}
            self._valid[digest(secret)] = (role, self._now() + LINK_S)
        return secret

    def use(self, secret: str) -> str | None:
        """The role that a link gives; None for one that is used, too old or none of ours."""
        key = digest(secret)
        with self._lock:
            role, until = self._valid.pop(key, ("", 0.0))
            self._over.append(key)
        return role if until > self._now() else None

    def was_made_here(self, secret: str) -> bool:
        """Whether this was a link that is over."""
        with self._lock:
            return digest(secret) in self._over


class Rate:
    """At most so many events in so many seconds, for each key."""

    def __init__(self, most: int, within_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._within_s, self._now = most, within_s, now
        self._times: dict[str, deque[float]] = {}

    def is_exceeded(self, key: str) -> bool:
        """Whether one more would be too many."""
        times, now = self._times.get(key), self._now()
        while times and times[0] <= now - self._within_s:
            times.popleft()
        return times is not None and len(times) >= self._most

    def count(self, key: str) -> None:
        """One more has happened."""
        if len(self._times) > 1000:
            self._times = {known: times for known, times in self._times.items() if self.is_exceeded(known)}
        self._times.setdefault(key, deque()).append(self._now())
