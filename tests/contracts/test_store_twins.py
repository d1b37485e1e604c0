"""The same random calls to both stores: the same answers, the same refusals, the same rows at every step."""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
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

from coordinator.store.base import SERVER, Store
from coordinator.store.memory import MemoryStore
from coordinator.store.sqlite import SqliteStore
from edge_client.errors import ConflictError, NoSuchNameError

Call = tuple[str, Callable[[Store], object]]

# what a call is about: mostly the same few things, so that calls meet each other
RUNS = st.sampled_from(["r-1"] * 6 + ["r-2", "s-1"])
DEVICES = st.sampled_from(["b", "b", "a", "c"])
SMALL = st.sampled_from([1, 1, 1, 2, 2, 3])  # rounds, attempts, versions
ISSUES = st.integers(1, 9)
LEASES = ISSUES.map(lambda issue: f"lease-{issue}")
NUMBERS = st.sampled_from([0.0, 0.5, 2.0])
TEXTS = st.sampled_from(["", "why", "\u2028 \u00fc"])
SLICES = st.sampled_from(["full", "width:1/2", "depth:1.1"])
RUN_STATES = st.sampled_from(["queued", "running", "finished", "failed"])
LEASE_STATES = st.sampled_from(["offered", "accepted", "stored", "declined", "refused", "expired", "cancelled"])
REFUSALS = (sqlite3.IntegrityError, ConflictError, NoSuchNameError)


def _labels() -> st.SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(["line", "site"]), TEXTS, max_size=2)


@st.composite
def _lease(draw: st.DrawFn, run: str, number: int, attempt: int) -> Any:
    flags: dict[str, Any] = {
        "train": draw(st.booleans()),
        "evaluate": draw(st.booleans()),
        "plan": draw(st.sampled_from([None, PLAN])),
    }
    place = {"run": run, "round": number, "attempt": attempt}
    flags |= {"state": draw(LEASE_STATES), "slice": draw(SLICES), "log": draw(st.lists(TEXTS))}
    return lease_row(draw(ISSUES), draw(DEVICES), **place, **flags)


@st.composite
def _update(draw: st.DrawFn) -> Any:
    place = {"run": draw(RUNS), "round": draw(SMALL), "attempt": draw(SMALL)}
    told = report(plan=draw(st.sampled_from([None, PLAN])), scalars={"loss": draw(NUMBERS)})
    return update_row(draw(DEVICES), draw(LEASES), norm=draw(NUMBERS), report=told, **place)


def _evaluation() -> st.SearchStrategy[Any]:
    devices = st.sampled_from(["a", "b", SERVER])
    return st.builds(evaluation_row, devices, SMALL, run=RUNS, num_correct=st.integers(0, 9), slice=SLICES)


def _model() -> st.SearchStrategy[Any]:
    return st.builds(model_row, st.integers(0, 3), RUNS, sent_sha256=st.sampled_from([digest("x"), digest("y")]))


def _call(method: str, /, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    """A call with keywords; `rows` are positional."""

    def bind(values: dict[str, Any]) -> Call:
        named = {name: value for name, value in values.items() if name != "rows"}
        rows = values.get("rows", ())
        return f"{method}({rows}, {named})", lambda store: getattr(store, method)(*rows, **named)

    return st.fixed_dictionaries(arguments).map(bind)


def _attempt(method: str, /, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return _call(method, run_id=RUNS, number=SMALL, attempt=SMALL, **more)


@st.composite
def _opens(draw: st.DrawFn) -> Call:
    run, number, attempt = draw(RUNS), draw(SMALL), draw(SMALL)
    leases = draw(st.lists(_lease(run, number, attempt), max_size=3))
    round_ = round_row(number, attempt, run, extended=draw(st.booleans()))
    return f"open_round({round_}, {leases})", lambda store: store.open_round(round_, leases)


@st.composite
def _adds(draw: st.DrawFn) -> Call:
    leases = [draw(_lease(draw(RUNS), draw(SMALL), draw(SMALL)))]
    return f"add_leases({leases})", lambda store: store.add_leases(leases)


@st.composite
def _commits(draw: st.DrawFn) -> Call:
    number, attempt, model = draw(SMALL), draw(SMALL), draw(_model())
    known = st.builds(left_out_row, st.sampled_from(["", "a"]), st.sampled_from(["silent", "signature"]), SMALL)
    rows = [replace(row, run=model.run) for row in draw(st.lists(known, max_size=2))]
    return f"commit_round({model}, {rows})", lambda store: store.commit_round(number, attempt, model, rows)


CALLS: dict[str, st.SearchStrategy[Call]] = {
    "next_epoch": _call("next_epoch", wall_s=ISSUES),
    "federation": _call("federation", fresh=st.sampled_from(["one", "two"])),
    "set_setting": _call("set_setting", key=st.just("k"), value=TEXTS),
    "add_device": _call(
        "add_device",
        rows=st.lists(st.builds(device_row, DEVICES, labels=_labels()), max_size=2).map(tuple),
        replace=st.booleans(),
    ),
    "set_labels": _call("set_labels", name=DEVICES, labels=_labels()),
    "remove_device": _call("remove_device", name=DEVICES),
    "add_run": _call("add_run", run=st.builds(run_row, RUNS, state=RUN_STATES, dry=st.booleans())),
    "remove_run": _call("remove_run", run_id=RUNS),
    "save_score": _call("save_score", run_id=RUNS, version=SMALL, score=NUMBERS, best_version=SMALL),
    "remember_device": _call("remember_device", run_id=RUNS, device=DEVICES, info=_labels()),
    "set_run_state": _call("set_run_state", run_id=RUNS, state=RUN_STATES, reason=TEXTS),
    "fail_run": _call("fail_run", run_id=RUNS, reason=TEXTS),
    "add_initial_model": _call(
        "add_initial_model", model=_model(), settings_sha256=st.just(digest("s")), settings_length=SMALL
    ),
    "add_part": _call("add_part", part=st.builds(part_row, SMALL, SLICES, RUNS)),
    "open_round": _opens(),
    "add_leases": _adds(),
    "set_lease": _call("set_lease", lease_id=LEASES, state=LEASE_STATES, code=TEXTS, detail=TEXTS, log=st.lists(TEXTS)),
    "save_deadline": _attempt("save_deadline", remaining_s=NUMBERS, extended=st.booleans(), elapsed_s=NUMBERS),
    "save_update": _call(
        "save_update",
        update=st.none() | _update(),
        evaluation=st.none() | _evaluation(),
        lease_id=LEASES,
        traffic=st.dictionaries(DEVICES, st.tuples(ISSUES, ISSUES), max_size=1),
    ),
    "save_evaluation": _call("save_evaluation", evaluation=_evaluation()),
    "drop_update": _call("drop_update", update=_update()),
    "freeze": _attempt("freeze", set_hash=TEXTS),
    "commit_round": _commits(),
    "announce": _attempt("announce"),
    "abandon": _attempt("abandon", reason=TEXTS),
    "add_traffic": _call(
        "add_traffic", run_id=RUNS, moved=st.dictionaries(DEVICES, st.tuples(ISSUES, ISSUES), max_size=2)
    ),
}
CALLS |= {
    "add_deployment": _call(
        "add_deployment",
        rows=st.lists(st.builds(deployment_row, SMALL, DEVICES, run=RUNS), max_size=2).map(lambda rows: (rows,)),
    ),
    "set_deployment": _call(
        "set_deployment",
        deployment=SMALL.map(lambda issue: f"deployment-{issue}"),
        device=DEVICES,
        state=st.sampled_from(["pending", "active", "refused", "rolled_back"]),
        code=TEXTS,
        detail=TEXTS,
    ),
}
ASKED_ONLY = {"setting", "devices", "runs", "run", "first_run", "next_run_number", "next_issue", "lease", "leases"}
ASKED_ONLY |= {"rounds", "last_round", "updates", "recent_updates", "update_of_lease", "last_counted_lease"}
ASKED_ONLY |= {"num_updates"}
ASKED_ONLY |= {"last_model", "model", "models", "scores", "remembered_devices", "recent_failures", "run_failures"}
ASKED_ONLY |= {"evaluations", "evaluated_versions", "last_plans", "recent_norms", "drop_rate", "traffic"}
ASKED_ONLY |= {"needed_blobs", "is_needed", "parts", "left_out"}
ASKED_ONLY |= {"trained_slices", "next_deployment", "deployments", "wanted_deployments"}


def _answers(store: Store) -> list[object]:
    """Everything that can be asked, about everything that there may be."""
    told: list[object] = [store.setting("k"), store.devices(), store.runs(), store.next_issue()]
    told += [store.next_deployment(), store.deployments(), store.wanted_deployments()]
    told += [store.is_needed(deployment_row(issue).sha256, 1) for issue in (1, 2, 3)]
    told += [store.first_run(state) for state in ("queued", "running")]
    told += [store.next_run_number(name) for name in ("r", "s", "t")]
    told += [store.needed_blobs(keep) for keep in (1, 2)]
    told += [store.is_needed(sha256, 1) for sha256 in (digest("x"), digest("s"), digest("update a lease-1"))]
    for run in ("r-1", "r-2", "s-1"):
        about_run = (store.run, store.last_model, store.models, store.last_round, store.rounds, store.evaluations)
        told += [ask(run) for ask in (*about_run, store.evaluated_versions, store.last_plans, store.traffic)]
        told += [store.deployments(run), store.trained_slices(run)]
        told += [store.parts(run), store.left_out(run), store.is_needed(part_row(1, "full", run).sha256, 1)]
        told += [store.scores(run), store.remembered_devices(run), store.model(run, 1), store.evaluations(run, 1)]
        told += [store.recent_updates(run, 3), store.drop_rate(run, 4), store.run_failures(run, 2)]
        told += [store.num_updates(run)]
        told += [store.recent_norms(run, rounds) for rounds in (0, 1, 2)]
        told += [store.last_counted_lease(run, device) for device in "abc"]
        places = [(number, attempt) for number in (1, 2, 3) for attempt in (1, 2, 3)]
        told += [ask(run, *place) for place in places for ask in (store.leases, store.updates)]
    told += [store.recent_failures(device, 3) for device in "abc"]
    told += [ask(f"lease-{issue}") for issue in range(1, 10) for ask in (store.lease, store.update_of_lease)]
    return told


def _outcome(call: Callable[[Store], object], store: Store) -> object:
    try:
        return call(store)
    except REFUSALS as error:
        return type(error), str(error) if not isinstance(error, sqlite3.IntegrityError) else ""


def test_every_method_of_the_contract_is_called_or_asked() -> None:
    """A new one fails here until it is compared, too."""
    methods = {name for name, _ in inspect.getmembers(Store, inspect.isfunction) if not name.startswith("_")}
    assert methods - {"close", "backup"} == CALLS.keys() | ASKED_ONLY


OFTEN = 6 * ["open_round", "save_update", "commit_round", "add_leases", "set_lease"] + 3 * ["save_score", "freeze"]
BEGIN: list[Call] = [
    ("a run", lambda store: store.add_run(run_row("r-1"))),
    ("its first model", lambda store: store.add_initial_model(model_row(0), digest("s"), 1)),
]


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(calls=st.lists(st.sampled_from(sorted(CALLS) + OFTEN).flatmap(CALLS.__getitem__), min_size=20, max_size=60))
def test_both_stores_say_the_same_after_the_same_calls(tmp_path: Path, calls: list[Call]) -> None:
    """A call is refused by both or by neither; afterwards every question has one answer."""
    (tmp_path / "state.db").unlink(missing_ok=True)
    ours, theirs = MemoryStore(), SqliteStore(tmp_path / "state.db")
    theirs._db.execute("PRAGMA journal_mode=MEMORY")  # durability is not what is compared here
    theirs._db.execute("PRAGMA synchronous=OFF")
    try:
        for what, call in [*BEGIN, *calls]:
            assert _outcome(call, ours) == _outcome(call, theirs), what
        assert _answers(ours) == _answers(theirs)
    finally:
        theirs.close()
