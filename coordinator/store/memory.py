"""The store's twin in memory: the same rows and queries, gone with the process. For simulation and unit tests."""

from __future__ import annotations

from coordinator.store.sqlite import SqliteStore

__all__ = ["MemoryStore"]


class MemoryStore(SqliteStore):
    """A store that keeps nothing."""

    def __init__(self) -> None:
        super().__init__(None)
