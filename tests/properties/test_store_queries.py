"""After any calls, what the store computes in SQL is what plain Python computes from its rows."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import sqlite3
from collections import Counter
from dataclasses import replace
from typing import Any, get_type_hints

from hypothesis import given, settings
from hypothesis import strategies as st
from rows import (
    PLAN,
    deployment_row,
    device_row,
    digest,
    evaluation_row,
    lease_row,
    left_out_row,
    model_row,
    part_row,
    report,
    round_row,
    run_row,
    update_row,
)

from coordinator.store.base import Store
from coordinator.store.rows import OPEN_LEASE, SERVER, WANTED_DEPLOYMENT, LeaseRow, UpdateRow
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import ConflictError, NoSuchNameError

Call = tuple[str, tuple[Any, ...], dict[str, Any]]  # a method such as `runs.add`, and its arguments

# few names and small numbers, so that calls are about the same rows
RUN_IDS = ("r-1", "r-2", "s-1")
NUMBERS = (1, 2, 3)
ISSUES = range(1, 10)
RUN = st.sampled_from(["r-1"] * 6 + ["r-2", "s-1"])
DEVICE = st.sampled_from(["b", "b", "a", "c"])
SMALL = st.sampled_from([1, 1, 1, 2, 2, 3])  # rounds, attempts, versions
ISSUE = st.sampled_from(ISSUES)
LEASE = ISSUE.map(lambda issue: f"lease-{issue}")
SCORE = st.sampled_from([0.0, 0.5, 2.0])
TEXT = st.sampled_from(["", "why", "\u2028 \u00fc"])
SLICE = st.sampled_from(["full", "width:1/2", "depth:1.1"])
RUN_STATE = st.sampled_from(["queued", "running", "finished", "failed"])
LEASE_STATE = st.sampled_from(["offered", "accepted", "stored", "declined", "refused", "expired", "cancelled"])
LABELS = st.dictionaries(st.sampled_from(["line", "site"]), TEXT, max_size=2)
BYTES = st.tuples(ISSUE, ISSUE)
FAILED = ("declined", "refused", "expired")
REFUSALS = (sqlite3.IntegrityError, ConflictError, NoSuchNameError)


@st.composite
def _lease(draw: st.DrawFn, run: str, number: int, attempt: int) -> LeaseRow:
    fields: dict[str, Any] = {"run": run, "round": number, "attempt": attempt, "slice": draw(SLICE)}
    fields |= {"train": draw(st.booleans()), "plan": draw(st.sampled_from([None, PLAN])), "state": draw(LEASE_STATE)}
    return lease_row(draw(ISSUE), draw(DEVICE), evaluate=draw(st.booleans()), log=draw(st.lists(TEXT)), **fields)


@st.composite
def _update(draw: st.DrawFn) -> UpdateRow:
    position = {"run": draw(RUN), "round": draw(SMALL), "attempt": draw(SMALL)}
    plan = draw(st.sampled_from([None, PLAN, replace(PLAN, microbatch=2)]))
    training = report(plan=plan, scalars={"loss": draw(SCORE)})
    return update_row(draw(DEVICE), draw(LEASE), norm=draw(SCORE), report=training, **position)


def _evaluation() -> st.SearchStrategy[Any]:
    devices = st.sampled_from(["a", "b", SERVER])
    return st.builds(evaluation_row, devices, SMALL, run=RUN, num_correct=st.integers(0, 9), slice=SLICE)


def _model() -> st.SearchStrategy[Any]:
    return st.builds(model_row, st.integers(0, 3), RUN, sent_sha256=st.sampled_from([digest("x"), digest("y")]))


def _call(method: str, /, *rows: st.SearchStrategy[Any], **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.tuples(st.just(method), st.tuples(*rows), st.fixed_dictionaries(keywords))


def _on_attempt(method: str, /, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return _call(method, RUN, SMALL, SMALL, **more)


@st.composite
def _open(draw: st.DrawFn) -> Call:
    run, number, attempt = draw(RUN), draw(SMALL), draw(SMALL)
    leases = draw(st.lists(_lease(run, number, attempt), max_size=3))
    round_ = round_row(number, attempt, run, extended=draw(st.booleans()))
    return "rounds.open", (round_, leases), {}


@st.composite
def _add_lease(draw: st.DrawFn) -> Call:
    return "leases.add", ([draw(_lease(draw(RUN), draw(SMALL), draw(SMALL)))],), {}


@st.composite
def _commit(draw: st.DrawFn) -> Call:
    number, attempt, model = draw(SMALL), draw(SMALL), draw(_model())
    row = st.builds(left_out_row, st.sampled_from(["", "a"]), st.sampled_from(["silent", "signature"]), SMALL)
    rows = [replace(row, run=model.run) for row in draw(st.lists(row, max_size=2))]
    return "rounds.commit", (number, attempt, model, rows), {}


WRITES: dict[str, st.SearchStrategy[Call]] = {
    "settings.next_epoch": _call("settings.next_epoch", ISSUE),
    "settings.federation": _call("settings.federation", st.sampled_from(["one", "two"])),
    "settings.set": _call("settings.set", st.just("k"), TEXT),
    "devices.add": _call("devices.add", st.builds(device_row, DEVICE, labels=LABELS), replace=st.booleans()),
    "devices.set_labels": _call("devices.set_labels", DEVICE, LABELS),
    "devices.remove": _call("devices.remove", DEVICE),
    "runs.add": _call("runs.add", st.builds(run_row, RUN, state=RUN_STATE, dry=st.booleans())),
    "runs.remove": _call("runs.remove", RUN),
    "runs.start": _call("runs.start", _model(), st.just(digest("s")), SMALL),
    "runs.set_state": _call("runs.set_state", RUN, RUN_STATE, TEXT),
    "runs.fail": _call("runs.fail", RUN, TEXT),
    "runs.save_device_info": _call("runs.save_device_info", RUN, DEVICE, LABELS),
    "models.save_score": _call("models.save_score", RUN, SMALL, SCORE, SMALL),
    "models.add_part": _call("models.add_part", st.builds(part_row, SMALL, SLICE, RUN)),
    "rounds.open": _open(),
    "rounds.save_deadline": _on_attempt(
        "rounds.save_deadline", remaining_s=SCORE, extended=st.booleans(), elapsed_s=SCORE
    ),
    "rounds.freeze": _on_attempt("rounds.freeze", set_hash=TEXT),
    "rounds.commit": _commit(),
    "rounds.announce": _on_attempt("rounds.announce"),
    "rounds.abandon": _on_attempt("rounds.abandon", reason=TEXT),
    "leases.add": _add_lease(),
    "leases.set_state": _call("leases.set_state", LEASE, LEASE_STATE, code=TEXT, detail=TEXT, log=st.lists(TEXT)),
    "updates.save": _call(
        "updates.save",
        st.none() | _update(),
        st.none() | _evaluation(),
        LEASE,
        st.dictionaries(DEVICE, BYTES, max_size=1),
    ),
    "updates.drop": _call("updates.drop", _update()),
    "evaluations.save": _call("evaluations.save", _evaluation()),
    "traffic.add": _call("traffic.add", RUN, st.dictionaries(DEVICE, BYTES, max_size=2)),
    "deployments.add": _call(
        "deployments.add", st.lists(st.builds(deployment_row, SMALL, DEVICE, run=RUN), max_size=2)
    ),
    "deployments.set_state": _call(
        "deployments.set_state",
        SMALL.map(lambda issue: f"deployment-{issue}"),
        DEVICE,
        st.sampled_from(["pending", "active", "refused", "rolled_back"]),
        code=TEXT,
        detail=TEXT,
    ),
}
FREQUENT = 6 * ["rounds.open", "updates.save", "rounds.commit", "leases.add", "leases.set_state"]
FREQUENT += 3 * ["models.save_score", "rounds.freeze"]


class Rows:
    """All rows of a store, in the order of their keys."""

    def __init__(self, store: Store) -> None:
        self.runs = store.runs.all()
        self.models = {run: store.models.all(run) for run in RUN_IDS}
        self.rounds = {run: store.rounds.all(run) for run in RUN_IDS}
        leases = (store.leases.get(f"lease-{issue}") for issue in ISSUES)
        self.leases = [lease for lease in leases if lease is not None]
        updates = (store.updates.of_lease(f"lease-{issue}") for issue in ISSUES)
        self.updates = sorted((row for row in updates if row is not None), key=lambda row: row.device)
        self.deployments = store.deployments.all()

    def updates_in(self, run: str, *states: str) -> list[UpdateRow]:
        """The updates of a run whose attempt is in one of these states, sorted by round and device."""
        attempts = {(row.number, row.attempt) for row in self.rounds[run] if row.state in states}
        updates = [row for row in self.updates if row.run == run and (row.round, row.attempt) in attempts]
        return sorted(updates, key=lambda row: row.round)

    def last_version(self, run: str) -> int:
        return max((model.version for model in self.models[run]), default=0)


def _check_run(store: Store, rows: Rows, run: str) -> None:
    """Queries about a run, its versions and its rounds."""
    models, evaluations = rows.models[run], store.evaluations.all(run)
    assert store.runs.get(run) == next((row for row in rows.runs if row.id == run), None)
    assert store.models.last(run) == next(reversed(models), None)
    assert store.models.get(run, 1) == next((row for row in models if row.version == 1), None)
    assert store.models.scores(run) == {row.version: row.score for row in models if row.score is not None}
    scored = [row for row in models if row.score is not None]
    assert store.models.scored_after(run, 0, 1) == [row for row in scored if row.version > 0][:1]
    assert store.rounds.last(run) == next(reversed(rows.rounds[run]), None)
    assert store.evaluations.versions(run) == sorted({row.version for row in evaluations})
    assert store.evaluations.all(run, 1) == [row for row in evaluations if row.version == 1]
    assert store.deployments.all(run) == [row for row in rows.deployments if row.run == run]


def _check_leases(store: Store, rows: Rows, run: str) -> None:
    """Queries about the leases of a run."""
    leases = [row for row in rows.leases if row.run == run]
    assert store.leases.run_failures(run, 2) == [row for row in reversed(leases) if row.state in FAILED][:2]
    training = [row for row in leases if row.train]
    finished = [row.state for row in reversed(training) if row.state not in (*OPEN_LEASE, "cancelled")][:4]
    dropped = [state for state in finished if state != "stored"]
    assert store.leases.drop_rate(run, 4) == (len(dropped) / len(finished) if finished else 0.0)
    assert store.leases.trained_slices(run) == {row.device: row.slice for row in training if row.state == "stored"}
    for number, attempt in itertools.product(NUMBERS, NUMBERS):
        in_attempt = [row for row in leases if (row.round, row.attempt) == (number, attempt)]
        assert store.leases.of_attempt(run, number, attempt) == in_attempt


def _check_updates(store: Store, rows: Rows, run: str) -> None:
    """Queries about the updates of a run."""
    updates = [row for row in rows.updates if row.run == run]
    for number, attempt in itertools.product(NUMBERS, NUMBERS):
        in_attempt = [row for row in updates if (row.round, row.attempt) == (number, attempt)]
        assert store.updates.of_attempt(run, number, attempt) == in_attempt
    newest_first = sorted(updates, key=lambda row: (-row.round, -row.attempt))
    assert store.updates.recent(run, 3) == newest_first[:3][::-1]
    assert store.updates.newest(run) == {row.device: row for row in reversed(newest_first)}
    counted = rows.updates_in(run, "COMMITTED", "ANNOUNCED")
    assert store.updates.counts(run) == Counter(row.round for row in counted)
    for device in "abc":
        of_device = [row for row in counted if row.device == device]
        newest = {row.lease for row in of_device if row.round == of_device[-1].round}  # one for each attempt
        last_counted_lease = store.updates.last_counted_lease(run, device)
        assert last_counted_lease in newest or (last_counted_lease is None and not newest)
    slices = {row.id: row.slice for row in rows.leases}
    for num_rounds in (0, 1, 2):
        norms: dict[str, list[float]] = {}
        for row in counted:
            if row.lease in slices and row.round > rows.last_version(run) - num_rounds:
                norms.setdefault(slices[row.lease], []).append(row.norm)
        assert _sorted(store.updates.recent_norms(run, num_rounds)) == _sorted(norms)


def _sorted(norms: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: sorted(values) for name, values in norms.items()}


def _check_federation(store: Store, rows: Rows) -> None:
    """Queries over all runs."""
    assert store.runs.counts() == Counter(run.state for run in rows.runs if not run.dry)
    for state in ("queued", "running"):
        assert store.runs.oldest(state) == next((run for run in rows.runs if run.state == state), None)
    numbers = [int(row.id.removeprefix("r-")) for row in rows.runs if row.id.startswith("r-")]
    assert store.runs.next_number("r") == max(numbers, default=0) + 1
    assert store.leases.next_issue() == max((row.issue for row in rows.leases), default=0) + 1
    for device in "abc":
        failures = [row for row in reversed(rows.leases) if row.device == device and row.state in FAILED]
        assert store.leases.device_failures(device, 3) == failures[:3]
    assert store.deployments.wanted() == [row for row in rows.deployments if row.state in WANTED_DEPLOYMENT]
    assert store.deployments.next_issue() == max((row.issue for row in rows.deployments), default=0) + 1


def _check_blobs(store: Store, rows: Rows, keep_models: int) -> None:
    """Which blobs must stay."""
    needed = {row.sha256 for row in rows.deployments if row.state in WANTED_DEPLOYMENT}
    others = {row.sha256 for row in rows.deployments} | {row.sha256 for row in rows.updates}
    for run in rows.runs:
        needed |= {sha256 for sha256 in (run.settings_sha256, run.task_sha256) if sha256}
        needed |= {row.sha256 for row in rows.updates_in(run.id, "RUNNING", "FROZEN")}
        for model in rows.models[run.id]:
            newest = model.version > rows.last_version(run.id) - keep_models
            (needed if newest or model.version == run.best_version else others).update(
                (model.sha256, model.sent_sha256)
            )
        (needed if run.state == "running" else others).update(part.sha256 for part in store.models.parts(run.id))
    assert store.blob_references.needed(keep_models) == needed
    for sha256 in needed | others:
        assert store.blob_references.is_needed(sha256, keep_models) == (sha256 in needed)


# read by `Rows`, compared with it, or returned as written, which the contract tests show
READS = {
    *(
        "settings.get",
        "devices.all",
        "devices.get",
        "runs.all",
        "runs.counts",
        "runs.get",
        "runs.oldest",
        "runs.next_number",
        "runs.device_info",
    ),
    *("models.last", "models.get", "models.all", "models.scores", "models.scored_after", "models.parts"),
    *("rounds.last", "rounds.all", "rounds.left_out"),
    *("leases.next_issue", "leases.get", "leases.of_attempt", "leases.device_failures", "leases.run_failures"),
    *("leases.drop_rate", "leases.trained_slices"),
    *("updates.of_attempt", "updates.of_lease", "updates.recent", "updates.counts", "updates.last_counted_lease"),
    *("updates.newest", "updates.recent_norms", "updates.body"),
    *("evaluations.all", "evaluations.versions", "traffic.by_device"),
    *("deployments.next_issue", "deployments.all", "deployments.wanted"),
    *("blob_references.needed", "blob_references.is_needed"),
}


def test_every_method_of_the_contract_is_called_or_compared() -> None:
    """A new method fails here until it is in `WRITES` or in `READS`; access to the page has only its contract tests."""
    parts = {
        name: get_type_hints(part.fget)["return"]
        for name, part in inspect.getmembers(Store)
        if isinstance(part, property) and part.fget is not None and name != "page_access"
    }
    methods = {
        f"{name}.{method}"
        for name, protocol in parts.items()
        for method, _ in inspect.getmembers(protocol, inspect.isfunction)
        if not method.startswith("_")
    }
    assert methods == WRITES.keys() | READS


@settings(max_examples=120)
@given(
    num_rounds=st.integers(0, 3),
    calls=st.lists(st.sampled_from(sorted(WRITES) + FREQUENT).flatmap(WRITES.__getitem__), min_size=20, max_size=60),
)
def test_queries_agree_with_the_rows(num_rounds: int, calls: list[Call]) -> None:
    """After some rounds and random calls, of which the store refuses some, queries return what Python computes."""
    with contextlib.closing(SqliteStore()) as store:
        store.runs.add(run_row("r-1"))
        store.runs.start(model_row(0), digest("s"), 1)
        for number in range(1, num_rounds + 1):
            store.rounds.open(round_row(number), [lease_row(number, "b", round=number)])
            store.updates.save(update_row("b", f"lease-{number}", round=number, norm=number), None, f"lease-{number}")
            store.rounds.commit(number, 1, model_row(number))
        for method, arguments, keywords in calls:
            with contextlib.suppress(*REFUSALS):
                operator.attrgetter(method)(store)(*arguments, **keywords)
        rows = Rows(store)
        _check_federation(store, rows)
        for run in RUN_IDS:
            _check_run(store, rows, run)
            _check_leases(store, rows, run)
            _check_updates(store, rows, run)
        for keep_models in (1, 2):
            _check_blobs(store, rows, keep_models)
