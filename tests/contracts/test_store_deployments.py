"""Contract of `Deployments`: at most one pending and one active deployment for each device."""

from __future__ import annotations

import sqlite3
from dataclasses import replace

import pytest
from rows import deployment_row

from coordinator.store.base import Store


def test_a_newer_deployment_supersedes_a_pending_one(store: Store) -> None:
    """Only on its devices; a blob is needed as long as a device uses it or is to use it."""
    first, second = [deployment_row(1, "a"), deployment_row(1, "b")], [deployment_row(2, "b")]
    assert store.deployments.next_issue() == 1
    assert store.deployments.add(first) == []
    assert store.deployments.add(second) == [first[1]]
    assert store.deployments.next_issue() == 3
    assert store.deployments.all("r-1") == [first[0], replace(first[1], state="superseded"), second[0]]
    assert store.deployments.all("r-2") == []
    assert store.deployments.wanted() == [first[0], second[0]]
    assert store.blob_references.needed(1) == {first[0].sha256, second[0].sha256}
    assert store.deployments.set_state("deployment-1", "a", "rolled_back", code="self_test", detail="why") == []
    assert store.deployments.all()[0] == replace(first[0], state="rolled_back", code="self_test", detail="why")
    assert not store.blob_references.is_needed(first[0].sha256, 1)
    with pytest.raises(sqlite3.IntegrityError):
        store.deployments.add(second)
    assert store.deployments.wanted() == second


def test_an_active_deployment_stays_until_another_one_is_active(store: Store) -> None:
    """A newer one that is pending, refused or rolled back changes nothing; nor does one of another device."""
    rows = [deployment_row(1, "a"), deployment_row(2, "a"), deployment_row(3, "a"), deployment_row(3, "b")]
    first = replace(rows[0], state="active")
    store.deployments.add(rows[:1])
    assert store.deployments.set_state("deployment-1", "a", "active") == []
    assert store.deployments.add(rows[1:2]) == []
    assert store.deployments.wanted() == [first, rows[1]]
    assert store.deployments.set_state("deployment-2", "a", "refused", code="forbidden") == []
    assert store.deployments.wanted() == [first]
    assert store.deployments.add(rows[2:]) == []
    assert store.deployments.set_state("deployment-3", "b", "active") == []
    assert store.blob_references.is_needed(first.sha256, 1)
    assert store.deployments.set_state("deployment-3", "a", "active") == [first]
    assert store.deployments.all()[0] == replace(first, state="superseded")
    assert not store.blob_references.is_needed(first.sha256, 1)
    assert store.deployments.set_state("deployment-3", "a", "pending") == []
    assert [row.state for row in store.deployments.wanted()] == ["pending", "active"]
