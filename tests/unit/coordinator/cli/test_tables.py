"""Tables for people."""

from __future__ import annotations

import re
import time
from dataclasses import replace

from answers import (
    abandoned_round,
    device_details,
    device_evaluation,
    device_line,
    failed_lease,
    run_details,
    run_device,
    run_line,
    version_result,
)
from rows import run_file

from coordinator.cli import tables
from coordinator.columns import align, fold
from coordinator.control_messages import DeviceFailure
from coordinator.run_details import Candidate, LeftOut, ModelVersion, RunProgress
from edge_client.records import DeviceProfile

LABELS = ["line=a", "site=b"]


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
    lease, abandoned = failed_lease(detail=evil, log=(evil,)), abandoned_round(attempt=2, reason=evil)
    text = tables.run(run_details(failures=(lease,), round_rows=(abandoned,), reason=evil))
    text += tables.devices([device_line(client=evil, labels={"line": evil})])
    assert not {c for c in text if not c.isprintable() and c != "\n"}
    assert "ok?[2J?]0;title? fake row?1m" in text


def test_a_device_is_described_in_one_line() -> None:
    """Plan, version, what it does, if it says; its labels, sorted; not seen yet; no budget yet; an older client."""
    unseen = device_line(
        id="pi", online=False, seen_s_ago=None, budget_bytes=None, phase="", plan="", client_is="older"
    )
    text = tables.devices([device_line(labels={"site": "b", "line": "a"}), unseen])
    _, _, first, second = text.splitlines()
    known = ["jetson-1", "online", "3", "s", "ago", "1.5", "GB", "full,", "microbatch", "32", "0.1"]
    assert first.split() == [*known, "train", "3/8", *LABELS]
    assert second.split() == ["pi", "offline", "not", "yet", "-", "-", "0.1", "(older)", "-", "-"]


def test_a_device_that_is_off_says_since_when_and_what_it_was_doing() -> None:
    """Not as if it went on: no steps; a day later with the date."""
    (line,) = tables.devices([device_line(online=False, seen_s_ago=60.0)]).splitlines()[2:]
    minute = time.strftime("%H:%M", time.localtime(time.time() - 60))
    assert f"offline since {minute}, while it was in phase train" in line
    assert "3/8" not in line
    (line,) = tables.devices([device_line(online=False, seen_s_ago=200_000.0, phase="")]).splitlines()[2:]
    assert re.search(r"offline since \d{4}-\d\d-\d\d \d\d:\d\d  ", line)


def test_five_results_that_are_hardly_better_than_guessing_are_warned_of() -> None:
    """Two classes: 0.54 is below 1/2 + 0.05, 0.56 is not; four results say nothing yet."""

    def shown(scores: list[float]) -> str:
        models = tuple(ModelVersion(version=n, sha256="", bytes=1, score=s) for n, s in enumerate(scores, start=1))
        return tables.run(run_details(models=models))

    assert "accuracy 0.54 is close to guessing (0.50)" in shown([0.5, 0.54, 0.5, 0.5, 0.5])
    assert "guessing" not in shown([0.5, 0.56, 0.5, 0.5, 0.5])
    assert "guessing" not in shown([0.5, 0.5, 0.5, 0.5])


def test_empty_lists_say_what_to_do() -> None:
    """The command that makes the first one."""
    assert "coordinator device add" in tables.devices([])
    assert "coordinator run start" in tables.runs([])


def test_knowledge_that_was_not_there_is_listed() -> None:
    """By device, or of all; the newest round and why. More than 20 are counted."""
    one = LeftOut(device=None, round=3, code="no_public", detail="there are none")
    two = LeftOut(device="pi", round=2, code="missing_class", detail="tells nothing of 'no'")
    lines = tables.run(run_details(left_out=(one, two))).splitlines()
    assert lines[2].split() == ["without", "last", "in", "round", "code", "why"]
    assert lines[4].split() == ["all", "3", "no_public", "there", "are", "none"]
    assert lines[5].split(maxsplit=3) == ["pi", "2", "missing_class", "tells nothing of 'no'"]
    many = tables.run(run_details(left_out=(two,) * 23))
    assert many.count("missing_class") == 20
    assert many.endswith("and 3 more (--format json has all)")


def test_a_run_without_a_model_is_shown() -> None:
    """It failed before its first version."""
    assert tables.run(run_details(state="failed", reason="input: no such model", round=0)) == (
        "r-1: failed (input: no such model), round 0 of 3"
    )


def test_a_run_shows_results_devices_and_problems() -> None:
    """One block each; the best version in the first line, and the recall of a class that nobody has as a dash."""
    result, lease = version_result(), failed_lease(code="over_budget", detail="3 GB", log=("line 1",))
    own = device_evaluation(slice="width:1/2", accuracy=0.8125)
    device, two_classes = run_device(), run_file(classes=["no", "yes"])
    facts = {"file": two_classes, "evaluations": (result,), "device_evaluations": (own,), "devices": (device,)}
    text = tables.run(run_details(best_score=0.75, best_version=1, failures=(lease,), **facts))
    assert text.splitlines()[0] == "r-1: running, round 1 of 3; best accuracy 0.7500 (round 1)"
    for piece in ("0.7100", "full, microbatch 8", "no     ", "0.6250", "0.8125"):
        assert piece in text
    assert "b declined in round 1: over_budget: 3 GB\n    line 1" in text
    assert "a       width:1/2" in text
    (row,) = [line for line in text.splitlines() if "microbatch" in line]
    assert " ".join(row.split()) == "a 1.0 GB full, microbatch 8 100 MB 200 MB yes 3 10 1.0 kB 2.0 kB"
    outside = tables.run(run_details(devices=(replace(device, inside_budget=False),)))
    assert " NO " in outside
    by_server = facts | {"evaluations": (replace(result, num_devices=0),)}
    here = tables.run(run_details(**by_server))
    assert "20   server" in here


def test_runs_are_listed_with_their_rounds() -> None:
    """1/3, the best version so far; a run that waits says for whom."""
    row = run_line(metric="macro-f1", best_score=0.5, best_version=1)
    waits = replace(row, run="r-2", state="queued", best_score=None, waits_for="r-1")
    _, _, first, second = tables.runs([row, waits]).splitlines()
    assert "1/3" in first
    assert "macro-f1 0.5000 (round 1)" in first
    assert second.endswith("waits for r-1")


def test_a_device_is_shown_with_its_machine_its_tasks_and_its_failures() -> None:
    """One fact per line, names padded to the longest (17 letters); the failures name the run instead of the device."""
    profile = DeviceProfile(budget_bytes=1, kind="jetson", machine="aarch64", cores=6, memory_bytes=8_000_000_000)
    lease = DeviceFailure(run="r-1", state="declined", round=2, code="no_data", detail="nothing there", log=("l",))
    shown = device_details(
        labels_given={"line": "a"},
        profile=profile,
        free_bytes=4_000_000_000,
        tasks={"defects": "ab12"},
        brokers=("mqtts://10.0.0.1:8883",),
        failures=(lease,),
    )
    assert tables.device(shown).splitlines() == [
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
    unknown = {"online": False, "seen_s_ago": None, "budget_bytes": None, "client": None, "client_is": None}
    unknown |= {"plan": "", "state": None, "phase": "", "total": 0}
    lines = tables.device(device_details(**unknown)).splitlines()
    assert lines[1] == "  state              offline, seen not yet"
    assert [line.split()[-1] for line in lines[2:]] == ["-"] * 8


def test_a_run_that_waits_tells_for_what_and_why() -> None:
    """Devices that may be asked are not among those that may not."""
    candidates = [
        Candidate(id="a", code="", detail=""),
        Candidate(id="b", code="label", detail="the run wants line=a, the device has line=b"),
    ]
    waiting = "waits for devices: 2 are needed, 1 can take part"
    progress = RunProgress(phase="SELECTING", round=1, waiting=waiting, candidates=tuple(candidates))
    assert tables.run(run_details(progress=progress)).splitlines() == [
        "r-1: running, round 1 of 3",
        "",
        "waits for devices: 2 are needed, 1 can take part",
        "device  not asked  why",
        "------  ---------  -------------------------------------------",
        "b       label      the run wants line=a, the device has line=b",
    ]
