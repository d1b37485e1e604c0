"""Who may use the page, and what was done there (tables `page_token`, `page_session`, `page_action`)."""

from __future__ import annotations

import sqlite3

from coordinator.store.base import PageAccess
from coordinator.store.database import Database
from coordinator.store.rows import PageActionRow, PageSessionRow, PageTokenRow
from edge_client.errors import ConflictError

__all__ = ["PageAccessTables"]

_KEPT_ACTIONS = 1000


class PageAccessTables(PageAccess):
    """`PageAccess` in three tables."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def tokens(self) -> list[PageTokenRow]:
        return self._database.all(PageTokenRow, "SELECT * FROM page_token ORDER BY name")

    def add_token(self, token: PageTokenRow) -> None:
        with self._database.transaction("page-access") as transaction:
            try:
                transaction.insert("page_token", token)
            except sqlite3.IntegrityError:
                raise ConflictError(f"token {token.name!r} exists already; choose another name") from None

    def remove_token(self, name: str) -> bool:
        with self._database.transaction("page-access") as transaction:
            transaction.execute("DELETE FROM page_session WHERE name = ?", name)
            return transaction.execute("DELETE FROM page_token WHERE name = ?", name) > 0

    def token_used(self, sha256: str, at_s: int) -> None:
        with self._database.transaction("page-access") as transaction:
            transaction.execute("UPDATE page_token SET used_s = ? WHERE sha256 = ?", at_s, sha256)

    def token(self, sha256: str) -> PageTokenRow | None:
        return self._database.first(PageTokenRow, "SELECT * FROM page_token WHERE sha256 = ?", sha256)

    def add_session(self, session: PageSessionRow, now_s: int) -> None:
        with self._database.transaction("page-access") as transaction:
            transaction.execute("DELETE FROM page_session WHERE expires_s <= ?", now_s)
            transaction.insert("page_session", session)

    def session(self, sha256: str, now_s: int) -> PageSessionRow | None:
        query = "SELECT * FROM page_session WHERE sha256 = ? AND expires_s > ?"
        return self._database.first(PageSessionRow, query, sha256, now_s)

    def end_session(self, sha256: str) -> None:
        with self._database.transaction("page-access") as transaction:
            transaction.execute("DELETE FROM page_session WHERE sha256 = ?", sha256)

    def add_action(self, action: PageActionRow) -> None:
        with self._database.transaction("page-access") as transaction:
            transaction.insert("page_action", action)
            query = "DELETE FROM page_action WHERE id <= (SELECT max(id) FROM page_action) - ?"
            transaction.execute(query, _KEPT_ACTIONS)

    def actions(self, limit: int) -> list[PageActionRow]:
        return self._database.all(PageActionRow, "SELECT * FROM page_action ORDER BY id DESC LIMIT ?", limit)
