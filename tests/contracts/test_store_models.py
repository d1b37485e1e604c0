"""Contract of `Models`: versions, scores and the parts in which the newest version travels."""

from __future__ import annotations

from rows import digest, model_row, part_row, round_row
from stores import with_run

from coordinator.store.base import Store


def test_the_best_version_stays_needed(store: Store) -> None:
    """Of versions 0 to 3 the newest and the best one (0) are needed; a version without a score has none."""
    with_run(store)
    for version in (1, 2, 3):
        store.rounds.open(round_row(version), [])
        store.rounds.commit(version, 1, model_row(version))
    store.models.save_score("r-1", 0, 0.25, 0)
    store.models.save_score("r-1", 2, 0.125, 0)
    run, model = store.runs.get("r-1"), store.models.get("r-1", 2)
    assert run is not None
    assert model is not None
    assert (run.best_version, model.score) == (0, 0.125)
    assert store.models.scores("r-1") == {0: 0.25, 2: 0.125}
    assert store.blob_references.needed(1) == {digest("settings"), model_row(0).sha256, model_row(3).sha256}
    assert store.blob_references.is_needed(model_row(0).sha256, 1)
    assert not store.blob_references.is_needed(model_row(2).sha256, 1)


def test_parts_are_of_the_newest_version_and_needed_while_the_run_trains(store: Store) -> None:
    """The first part of version 1 replaces those of version 0; a run that has ended needs no part."""
    with_run(store)
    assert store.models.add_part(part_row(0, "full")) == []
    assert store.models.add_part(part_row(0, "width:1/2")) == []
    assert store.models.parts("r-1") == [part_row(0, "full"), part_row(0, "width:1/2")]
    store.rounds.commit(1, 1, model_row(1))
    assert store.models.add_part(part_row(1, "full")) == [part_row(0, "full"), part_row(0, "width:1/2")]
    assert store.models.parts("r-1") == [part_row(1, "full")]
    assert store.blob_references.is_needed(part_row(1, "full").sha256, 1)
    store.runs.set_state("r-1", "finished")
    assert not store.blob_references.is_needed(part_row(1, "full").sha256, 1)
