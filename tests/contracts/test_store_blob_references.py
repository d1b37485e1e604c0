"""Contract of `BlobReferences`: which blobs must stay on the disk."""

from __future__ import annotations

from rows import digest, lease_row, model_row, round_row, update_row
from stores import with_update

from coordinator.store.base import Store


def test_needed_blobs_are_settings_kept_models_and_open_updates(store: Store) -> None:
    """The newest two of three versions are kept; an update is needed until its round is committed."""
    with_update(store)
    update = update_row().sha256
    assert store.blob_references.needed(2) == {digest("settings"), model_row(0).sha256, update}
    store.rounds.freeze("r-1", 1, 1, "hash")
    assert store.blob_references.is_needed(update, 2)
    store.rounds.commit(1, 1, model_row(1))
    assert not store.blob_references.is_needed(update, 2)
    store.rounds.open(round_row(2), [lease_row(9, round=2)])
    store.rounds.commit(2, 1, model_row(2, sent_sha256=digest("sent")))
    newest = {model_row(1).sha256, model_row(2).sha256, digest("sent")}
    assert store.blob_references.needed(2) == {digest("settings")} | newest
    assert not store.blob_references.is_needed(model_row(0).sha256, 2)
    assert all(store.blob_references.is_needed(sha256, 2) for sha256 in newest | {digest("settings")})
