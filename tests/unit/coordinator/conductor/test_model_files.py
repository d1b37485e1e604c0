"""How a version becomes files, and how people name one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conductor_bench import Bench
from rows import digest

from coordinator.aggregation.jobs import WrittenFile
from coordinator.conductor.active_run import ActiveRun
from coordinator.store.rows import ModelRow
from edge_client.errors import InputError


def _add(bench: Bench, run: ActiveRun, text: str) -> list[ModelRow]:
    out = bench.blobs.temporary_path("out")
    out.write_text(text)
    rows: list[ModelRow] = []
    written = WrittenFile(sha256=digest(text), length=len(text))
    bench.models.add(run.row, run.file, written, out, version=1, set_hash="set", then=rows.append)
    bench.answer_jobs()
    return rows


@pytest.mark.parametrize("tables", [{}, {"rounds": {"codec": "int8"}, "slices": ["full", "width:1/2"]}])
def test_a_model_that_travels_as_it_is_becomes_one_blob(
    make_bench: Callable[..., Bench], tables: dict[str, Any]
) -> None:
    """fp32, or a run that sends slices, which are encoded one by one: no job is asked for."""
    bench = make_bench()
    bench.add_run(**tables)
    (row,) = _add(bench, bench.active_run(), "next")
    assert (row.version, row.set_hash, row.length) == (1, "set", 4)
    assert row.sha256 == row.sent_sha256 == digest("next")
    assert bench.blobs.has(row.sha256)
    assert bench.asked_jobs() == []


def test_a_lossy_run_has_a_second_file_that_travels(make_bench: Callable[..., Bench]) -> None:
    """The aggregator encodes the whole model; its answer is the form that is sent."""
    bench = make_bench(encode={"write": "small"})
    bench.add_run(rounds={"codec": "int8"})
    (row,) = _add(bench, bench.active_run(), "next")
    assert (row.sha256, row.sent_sha256, row.sent_length) == (digest("next"), digest("small"), 5)
    assert bench.blobs.has(row.sent_sha256)
    (job,) = bench.asked_jobs()
    assert (job["job"], job["slice"]) == ("encode", "full")
    assert Path(job["model"]) == bench.blobs.path(row.sha256)


def test_a_version_is_named_by_its_run_and_its_number(make_bench: Callable[..., Bench]) -> None:
    """Without a number the newest; the best once one was judged."""
    bench = make_bench()
    bench.add_run()
    assert bench.models.named("r-1").version == bench.models.named("r-1@last").version == 0
    bench.store.models.save_score("r-1", 0, 0.5, 0)
    assert bench.models.named("r-1@best").version == bench.models.named("r-1@0").version == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("r-9", "--init: expected a run of this coordinator, got 'r-9'; see: coordinator run list"),
        ("r-1@best", "--init: run 'r-1' has no best version, nothing of it was judged; use last"),
        ("r-1@3", "--init: run 'r-1' has no version 3 any more; the last 10 and the best are kept"),
    ],
)
def test_a_version_that_is_not_there_is_explained(make_bench: Callable[..., Bench], name: str, message: str) -> None:
    """The message names the option and what to do."""
    bench = make_bench()
    bench.add_run()
    with pytest.raises(InputError) as caught:
        bench.models.named(name, option="--init")
    assert str(caught.value) == message


def test_a_damaged_version_is_not_handed_out(make_bench: Callable[..., Bench]) -> None:
    """Its file has other bytes than its name says."""
    bench = make_bench()
    bench.add_run()
    bench.damage(digest("model"))
    with pytest.raises(InputError, match="missing or damaged on disk; name another version"):
        bench.models.named("r-1")
