"""Tables for people."""

from __future__ import annotations

from typing import Any

from coordinator.cli import tables
from coordinator.columns import align, fold

LABELS = ["line=a", "site=b"]


def _device(**changes: Any) -> dict[str, Any]:
    row = {"id": "jetson-1", "online": True, "seen_s_ago": 3.2, "budget_bytes": 1_500_000_000, "client": "0.1"}
    row |= {"client_is": "same", "plan": "full, microbatch 32"}
    return row | {"labels": {}, "state": "working", "phase": "train", "step": 3, "total": 8} | changes


def _run(**changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"run": "r-1", "state": "running", "reason": "", "round": 1, "rounds": 3, "progress": None}
    row |= {"metric": "accuracy", "best_score": None, "best_version": None, "file": {"classes": ["no", "yes"]}}
    row |= {"evaluations": [], "device_evaluations": [], "devices": [], "failures": [], "round_rows": []}
    return row | {"left_out": []} | changes


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    """Text to the left, numbers to the right, no blanks at the end of a line."""
    text = align(["name", "n"], [["a", 1], ["long-name", 100]], right=(1,))
    assert text.splitlines() == ["name         n", "---------  ---", "a            1", "long-name  100"]


def test_long_texts_are_broken_into_lines_where_the_terminal_is_narrow() -> None:
    """Widths of 1, 15 and 31 with two gaps are 51; in 39 the last gives 12 of its 31, and words stay whole."""
    row = ["a", "one two, three.", "it has some more words than fit"]
    wide = fold(["n", "x", "y"], [row], columns=51, texts={1: 1, 2: 1})
    assert wide == align(["n", "x", "y"], [row]) == fold(["n", "x", "y"], [row], columns=None, texts={1: 1})
    narrow = fold(["n", "x", "y"], [row], columns=39, texts={1: 1, 2: 1}).splitlines()
    assert narrow[2:] == ["a  one two, three.  it has some more", " " * 20 + "words than fit"]
    assert max(map(len, narrow)) <= 39
    assert fold(["n"], [["unbreakable-as-it-is"]], columns=5, texts={0: 1}).endswith("unbreakable-as-it-is")


def test_what_a_device_says_cannot_move_the_cursor_or_break_a_line() -> None:
    """Escape sequences, bells, carriage returns and line ends become harmless in every table."""
    evil = "ok\x1b[2J\x1b]0;title\x07\r\nfake  row\x9b1m"
    lease = {"device": "a", "state": "declined", "round": 1, "code": "crashed", "detail": evil, "log": [evil]}
    abandoned = {"state": "ABANDONED", "number": 1, "attempt": 2, "reason": evil}
    text = tables.run(_run(failures=[lease], round_rows=[abandoned], reason=evil))
    text += tables.devices([_device(client=evil, labels={"line": evil})])
    assert not {c for c in text if not c.isprintable() and c != "\n"}
    assert "ok?[2J?]0;title? fake row?1m" in text


def test_a_device_is_described_in_one_line() -> None:
    """Plan, version, what it does, if it says; its labels, sorted; not seen yet; no budget yet; an older client."""
    unseen = _device(id="pi", online=False, seen_s_ago=None, budget_bytes=None, phase="", plan="", client_is="older")
    text = tables.devices([_device(labels={"site": "b", "line": "a"}), unseen])
    _, _, first, second = text.splitlines()
    known = ["jetson-1", "online", "3", "s", "ago", "1.5", "GB", "full,", "microbatch", "32", "0.1"]
    assert first.split() == [*known, "train", "3/8", *LABELS]
    assert second.split() == ["pi", "offline", "not", "yet", "-", "-", "0.1", "(older)", "working", "-"]


def test_empty_lists_say_what_to_do() -> None:
    """The command that makes the first one."""
    assert "coordinator device add" in tables.devices([])
    assert "coordinator run start" in tables.runs([])


def test_knowledge_that_was_not_there_is_listed() -> None:
    """By device, or of all; the newest round and why. More than 20 are counted."""
    one = {"device": None, "round": 3, "code": "no_public", "detail": "there are none"}
    two = {"device": "pi", "round": 2, "code": "missing_class", "detail": "tells nothing of 'no'"}
    lines = tables.run(_run(left_out=[one, two])).splitlines()
    assert lines[2].split() == ["without", "last", "in", "round", "code", "why"]
    assert lines[4].split() == ["all", "3", "no_public", "there", "are", "none"]
    assert lines[5].split(maxsplit=3) == ["pi", "2", "missing_class", "tells nothing of 'no'"]
    many = tables.run(_run(left_out=[two] * 23))
    assert many.count("missing_class") == 20
    assert many.endswith("and 3 more (--format json has all)")


def test_a_run_without_a_model_is_shown() -> None:
    """It failed before its first version."""
    assert tables.run(_run(state="failed", reason="input: no such model", round=0)) == (
        "r-1: failed (input: no such model), round 0 of 3"
    )


def test_a_run_shows_results_devices_and_problems() -> None:
    """One block each; the best version in the first line, and the recall of a class that nobody has as a dash."""
    evaluation = {"version": 1, "accuracy": 0.75, "balanced_accuracy": 0.7, "macro_f1": 0.71, "loss": 0.5}
    evaluation |= {"num_samples": 20, "num_devices": 2, "recall": [0.625, None]}
    own = {"version": 1, "device": "a", "slice": "width:1/2", "num_samples": 10, "accuracy": 0.8125}
    device = {"id": "a", "budget_bytes": 10**9, "plan": "full, microbatch 8", "predicted_bytes": 10**8}
    device |= {"peak_bytes": 2 * 10**8, "inside_budget": True, "replans": 3}
    device |= {"num_samples": 10, "bytes_up": 1000, "bytes_down": 2000}
    lease = {"device": "b", "state": "declined", "round": 1, "code": "over_budget", "detail": "3 GB", "log": ["line 1"]}
    found = {"evaluations": [evaluation], "device_evaluations": [own], "devices": [device], "failures": [lease]}
    text = tables.run(_run(best_score=0.75, best_version=1, **found))
    assert text.splitlines()[0] == "r-1: running, round 1 of 3; best accuracy 0.7500 (round 1)"
    for piece in ("0.7100", "full, microbatch 8", "no     ", "0.6250", "0.8125"):
        assert piece in text
    assert "b declined in round 1: over_budget: 3 GB\n    line 1" in text
    assert "a       width:1/2" in text
    (row,) = [line for line in text.splitlines() if "microbatch" in line]
    assert " ".join(row.split()) == "a 1.0 GB full, microbatch 8 100 MB 200 MB yes 3 10 1.0 kB 2.0 kB"
    outside = tables.run(_run(devices=[device | {"inside_budget": False}]))
    assert " NO " in outside
    here = tables.run(_run(evaluations=[evaluation | {"num_devices": 0}], device_evaluations=[own]))
    assert "20   server" in here


def test_runs_are_listed_with_their_rounds() -> None:
    """1/3, the best version so far; a run that waits says for whom."""
    row = {"run": "r-1", "state": "running", "round": 1, "rounds": 3, "method": "fedavg", "model": "mlp", "reason": ""}
    row |= {"metric": "macro-f1", "best_score": 0.5, "best_version": 1, "waits_for": ""}
    waits = row | {"run": "r-2", "state": "queued", "best_score": None, "waits_for": "r-1"}
    _, _, first, second = tables.runs([row, waits]).splitlines()
    assert "1/3" in first
    assert "macro-f1 0.5000 (round 1)" in first
    assert second.endswith("waits for r-1")


def test_a_device_is_shown_with_its_machine_its_tasks_and_its_failures() -> None:
    """One fact per line, names padded to the longest (17 letters); the failures name the run instead of the device."""
    profile = {"kind": "jetson", "machine": "aarch64", "cores": 6, "memory_bytes": 8_000_000_000}
    lease = {"run": "r-1", "state": "declined", "round": 2, "code": "no_data", "detail": "nothing there", "log": ["l"]}
    facts = {"labels_given": {"line": "a"}, "labels_own": {}, "profile": profile, "free_bytes": 4_000_000_000}
    facts |= {"tasks": {"defects": "ab12"}, "brokers": ["mqtts://10.0.0.1:8883"], "failures": [lease], "deployed": None}
    assert tables.device(_device(**facts)).splitlines() == [
        "jetson-1",
        "  state              online, seen 3 s ago",
        "  doing              train 3/8",
        "  client             0.1",
        "  plan               full, microbatch 32",
        "  labels given here  line=a",
        "  its own labels     -",
        "  machine            jetson aarch64, 6 cores, 8.0 GB of memory",
        "  budget             1.5 GB",
        "  free on disk       4.0 GB",
        "  task defects       ab12",
        "  new bundles name   mqtts://10.0.0.1:8883",
        "",
        "last failures",
        "r-1 declined in round 2: no_data: nothing there",
        "    l",
    ]


def test_a_device_that_was_never_here_is_shown() -> None:
    """Nothing is known of it but what was given here."""
    unknown = _device(online=False, seen_s_ago=None, budget_bytes=None, client="", plan="", state="", phase="", total=0)
    unknown |= {"labels_given": {}, "labels_own": {}, "profile": None, "free_bytes": None, "tasks": {}}
    lines = tables.device(unknown | {"brokers": [], "failures": [], "deployed": None}).splitlines()
    assert lines[1] == "  state              offline, seen not yet"
    assert [line.split()[-1] for line in lines[2:]] == ["-"] * 8


def test_a_run_that_waits_tells_for_what_and_why() -> None:
    """Devices that may be asked are not among those that may not."""
    candidates = [
        {"id": "a", "code": "", "detail": ""},
        {"id": "b", "code": "label", "detail": "the run wants line=a, the device has line=b"},
    ]
    progress = {"waiting": "waits for devices: 2 are needed, 1 can take part", "candidates": candidates}
    assert tables.run(_run(progress=progress)).splitlines() == [
        "r-1: running, round 1 of 3",
        "",
        "waits for devices: 2 are needed, 1 can take part",
        "device  not asked  why",
        "------  ---------  -------------------------------------------",
        "b       label      the run wants line=a, the device has line=b",
    ]


def _dry(devices: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    plan = {"id": "a", "budget_bytes": 300_000_000, "plan": "full, microbatch 8", "predicted_bytes": 271_000_000}
    data = {"file": {"name": "r"}, "failures": [], "barred": []}
    data |= {"devices": [plan | {"num_samples": 480, "num_test": 119, "plan_details": {"slice": "full"}}]}
    traffic = {"full": {"bytes_down": 85_800, "bytes_up": 86_000, "bytes_once": 21_000}}
    return tables.dry_run_rows(data | changes, devices, traffic)


def test_a_dry_run_shows_plans_and_what_stands_in_the_way() -> None:
    """a can; b declined; c is barred; d came too late; e is not there. One of five."""
    refused = {"device": "b", "code": "unknown_class", "detail": "kratzer", "log": ["line"]}
    barred = [{"id": "c", "code": "label", "detail": "the run wants line=a"}]
    devices = [{"id": name, "online": name != "e"} for name in "abcde"]
    result = _dry(devices, failures=[refused], barred=[*barred, {"id": "e", "code": "offline", "detail": "gone"}])
    assert [row["code"] for row in result["devices"]] == ["", "unknown_class", "label", "not_asked", "offline"]
    assert (result["run"], result["num_able"]) == ("r", 1)
    assert tables.dry_run(result).splitlines() == [
        "device  budget  plan                predicted peak  samples  test  down/round  up/round",
        "------  ------  ------------------  --------------  -------  ----  ----------  --------",
        "a       300 MB  full, microbatch 8          271 MB      480   119     85.8 kB   86.0 kB",
        "",
        "once, to each device, on top: 21.0 kB down",
        "",
        "b cannot: unknown_class: kratzer",
        "c cannot: label: the run wants line=a",
        "d cannot: not_asked: it came when the others had been asked already; try again",
        "e cannot: offline: gone",
        "",
        "1 of 5 devices can train; nothing was trained",
    ]


def test_a_dry_run_in_which_nobody_can_train_has_no_table() -> None:
    """Only the reason and the count; without any device, the command that adds one."""
    nobody = _dry([{"id": "b", "online": False}])
    assert tables.dry_run(nobody).splitlines() == [
        "b cannot: offline: not connected",
        "",
        "0 of 1 devices can train; nothing was trained",
    ]
    assert "coordinator device add" in tables.dry_run(_dry([]))
