"""The page about a run: whole in itself, true to the run, and harmless whatever a device calls itself."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from folders import line, write_run
from page import Page
from rows import run_file

from coordinator.cli import main as cli
from coordinator.report import plots
from coordinator.report import run_page as report
from coordinator.results.run_folders import read_run
from coordinator.results.run_record import DeviceRecord, FailureRecord, LeftOutRecord, RoundRecord, RunRecord
from edge_client import faults
from edge_client.config.run_file import RunFile
from edge_client.config.tables import parse_table
from edge_client.errors import DiskFullError, InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EVIL = "<script>alert('x')</script>\"&$x_{"


def judged(number: int, **changes: Any) -> RoundRecord:
    metrics: dict[str, Any] = {"accuracy": 0.5, "balanced_accuracy": 0.4, "macro_f1": 0.3, "loss": 1.5}
    told = {"recall": (0.25, None), "num_samples": 10, "num_devices": 1, "per_device": {"a": 0.5}}
    return RoundRecord(number=number, **metrics | told | changes)


def device(name: str, **changes: Any) -> DeviceRecord:
    sizes: dict[str, Any] = {"peak_bytes": 90 * 10**6, "budget_bytes": 10**8, "predicted_bytes": 95 * 10**6}
    moved = {"bytes_up": 2 * 10**6, "bytes_down": 3 * 10**6}
    return DeviceRecord(**{"name": name, "plan": "full, microbatch 16", "num_samples": 77} | sizes | moved | changes)


RUN = RunRecord(  # finished after three rounds, of which the second made the best version
    name="r-1",
    state="finished",
    reason="3 rounds",
    num_rounds=3,
    best=2,
    file=run_file(method={"name": "fedprox", "mu": 0.5}, stop={"rounds": 3, "metric": "macro-f1"}),
    rounds=[
        judged(0),
        RoundRecord(number=1, bytes_up=10, bytes_down=20),
        judged(2, macro_f1=0.8125, bytes_up=30, bytes_down=40),
        judged(3),
    ],
    devices=[device("a")],
    failures=[
        FailureRecord(device="b", round=2, state="late", code="crashed", detail="why", log=["l"]),
        FailureRecord(device="all", round=1, state="abandoned, try 1", detail="too few"),
    ],
    left_out=[LeftOutRecord(round=2, code="no_class", detail="nobody has 'yes'")],
    environment={"fedfit": "0.1.0", "commit": "c0ffee", "empty": "", "memory_bytes": 2 * 10**9},
    model_sha256="ab" * 32,
)


@pytest.fixture(scope="module")
def whole() -> str:
    """The page about it, which takes a second to draw."""
    return report.render(RUN)


def test_the_page_tells_what_the_run_did(whole: str) -> None:
    """Verdict, tiles, the device's row (5 MB moved in all), failures with reason and log, versions."""
    text = Page(whole).text
    assert "Ended after 3 of 3 rounds; reason: 3 rounds." in text
    assert "The best version is the one after round 2 (macro-f1 0.8125)." in text
    for piece in ("full, microbatch 16", "100 MB", "95.0 MB", "90.0 MB", "77", "2.0 MB", "3.0 MB", "5.0 MB"):
        assert piece in text
    for piece in ("crashed", "why", "abandoned, try 1", "too few", "c0ffee", "2.0 GB", "ab" * 32, "nobody has it"):
        assert piece in text
    assert "empty" not in text


def test_knowledge_that_could_not_be_used_is_on_the_page(whole: str) -> None:
    """Of all devices, with the newest round; of more than 20 the first 20 and how many there are; else nothing."""
    assert "Knowledge that could not be used" in whole
    assert "all2no_classnobody has 'yes'" in Page(whole).text
    many = [LeftOutRecord(device=f"d-{k}", round=1, code="class_count", detail="8 of 10") for k in range(21)]
    text = Page(report.render(replace(RUN, left_out=many, rounds=[], devices=[]))).text
    assert "d-191class_count8 of 10" in text
    assert "d-20" not in text
    assert "the first 20 of 21" in text
    assert "Knowledge" not in Page(report.render(replace(RUN, left_out=[], rounds=[], devices=[]))).text


def test_a_version_that_the_server_judged_says_so() -> None:
    """In the column where others have the number of devices."""
    rounds = [judged(1, num_devices=0, num_samples=360, per_device={})]
    assert "360server" in Page(report.render(replace(RUN, rounds=rounds, devices=[]))).text


def test_the_plots_are_in_the_page(whole: str) -> None:
    """Results, recall, bytes per round, memory, bytes per device: PNGs that can be read, wide enough for any screen."""
    images = Page(whole).images()
    assert list(images) == [
        "accuracy and macro-F1 after each round",
        "recall of each class",
        "bytes moved in each round, and so far",
        "peak memory, prediction and budget of each device",
        "bytes sent and received by each device",
    ]
    for image in images.values():
        assert image.format == "PNG"
        image.load()
        assert image.width >= 1000


def test_the_exchange_after_the_last_round_is_explained() -> None:
    """A fleet judges its last model in one more, in which much travels down and little up."""
    rounds = [RoundRecord(number=number, bytes_up=10, bytes_down=20) for number in (3, 4)]
    told = "round 4 only judged the model of round 3"
    assert told in Page(report.render(replace(RUN, rounds=rounds, devices=[]))).text
    assert told not in Page(report.render(replace(RUN, rounds=rounds[:1], devices=[]))).text


def test_architectures_have_a_plot_where_there_are_several() -> None:
    """A line for each of two; the numbers of the last round that has them."""
    rounds = [judged(number, per_architecture={"small": 0.125, "large": 0.375}) for number in (1, 2)]
    page = Page(report.render(replace(RUN, rounds=rounds, devices=[])))
    assert "accuracy of each architecture after each round" in page.images()
    assert re.search(r"after round 2.*large0\.3750small0\.1250", page.text, re.DOTALL)
    many = [judged(1, per_architecture={f"width:{k}/20": 0.5 for k in range(1, 15)})]
    text = Page(report.render(replace(RUN, rounds=many, devices=[]))).text
    assert "the first 12 of 14" in text
    assert "width:14/20" in text
    one = [judged(1, per_architecture={"full": 0.5})]
    assert "architecture" not in Page(report.render(replace(RUN, rounds=one, devices=[]))).text


def test_nothing_comes_from_elsewhere(whole: str) -> None:
    """No address but data: in the page, a policy that forbids the rest, and a width for phones."""
    page = Page(whole)
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object")
        for name in ("src", "href", "srcset", "action"):
            assert (attributes.get(name) or "data:").startswith("data:")
    metas = [attributes for tag, attributes in page.tags if tag == "meta"]
    assert any("default-src 'none'" in (m.get("content") or "") for m in metas)
    assert any(m.get("name") == "viewport" for m in metas)
    assert "url(" not in whole


def test_what_devices_and_files_say_stays_text(whole: str) -> None:
    """The same nasty text at every place that is not ours: it is read as it is, and makes no tag."""
    file = run_file(classes=[EVIL, "\N{CJK UNIFIED IDEOGRAPH-88C2}"], method={"name": "fedavg", "x": EVIL})
    told = {"recall": (0.5, 0.5), "per_device": {EVIL: 0.5}, "per_architecture": {EVIL: 0.5, f"{EVIL}{EVIL}": 0.25}}
    hostile = replace(
        RUN,
        name=EVIL,
        state=EVIL,
        reason=EVIL,
        file=file,
        rounds=[judged(2, **told)],
        devices=[device(EVIL, plan=EVIL, machine=EVIL, num_samples=EVIL)],
        failures=[FailureRecord(device=EVIL, round=1, state=EVIL, code=EVIL, detail=EVIL, log=[EVIL])],
        left_out=[LeftOutRecord(device=EVIL, round=1, code=EVIL, detail=EVIL)],
        environment={EVIL: EVIL},
        model_sha256=EVIL,
    )
    page = Page(report.render(hostile))
    assert {tag for tag, _ in page.tags} == {tag for tag, _ in Page(whole).tags}
    assert page.text.count(EVIL) >= 23


def test_what_is_not_known_is_left_out() -> None:
    """A run of which nothing is known, one that waits, one whose best version is not named, bare devices."""
    Page(report.render(RunRecord(name="r-1", file=run_file())))
    waiting = replace(RUN, state="queued", reason="", num_rounds=0, best=None, rounds=[], devices=[], failures=[])
    text = Page(report.render(waiting)).text
    assert "Waits after 0 of 3 rounds. No version was judged." in text
    assert "none" in text
    assert "the one after round 3" in Page(report.render(replace(RUN, best=None, devices=[]))).text
    bare = replace(RUN, devices=[DeviceRecord(name="a")], environment={}, rounds=[RoundRecord(number=0, accuracy=0.5)])
    assert "test samples" not in Page(report.render(bare)).text


def test_a_peak_above_the_budget_is_marked() -> None:
    """Only the device that used 101 MB of 100 MB."""
    over = device("b", peak_bytes=101 * 10**6, inside_budget=False)
    page = Page(report.render(replace(RUN, devices=[device("a"), over], rounds=[])))
    assert [attributes for _, attributes in page.tags].count({"class": "over"}) == 1


def test_large_fleets_are_cut_in_the_plots_only() -> None:
    """Of 60 devices and 60 classes the plots show 40, and say so; the tables have all."""
    names = [f"d-{number}" for number in range(60)]
    file = run_file(classes=[f"c-{number}" for number in range(60)])
    rounds = [judged(2, recall=tuple(number / 60 for number in range(60)))]
    page = Page(report.render(replace(RUN, devices=[device(n) for n in names], file=file, rounds=rounds)))
    assert page.text.count("40 of 60") == 3
    assert all(name in page.text for name in [*names, "c-59"])
    assert plots.MAX_BARS == 40


def test_devices_with_one_budget_and_one_plan_are_one_row_of_the_plans(whole: str) -> None:
    """Two of 100 MB and one of 50 MB: the higher peak of the two, and from 7 to 77 samples."""
    devices = [device("a"), device("b", peak_bytes=80 * 10**6, num_samples=7), device("c", budget_bytes=5 * 10**7)]
    text = Page(report.render(replace(RUN, devices=devices, rounds=[]))).text
    assert "50.0 MBfull, microbatch 16195.0 MB90.0 MB77 to 77" in text
    assert "100 MBfull, microbatch 16295.0 MB90.0 MB7 to 77" in text
    assert "Plans" not in Page(whole).text


def test_the_run_file_can_be_typed_again() -> None:
    """The block is TOML that gives the same run, the method's and the model's own keys included."""
    file = run_file(
        method={"name": "fedprox", "mu": 0.5},
        model={"name": "mlp", "input": [1, 2, 2], "hidden": [4]},
        stop={"rounds": 3, "patience": 2},
        devices={"where": ["line=a"]},
    )
    text = Page(report.render(RunRecord(name="r-1", file=file))).text
    block = re.search(r"name = .*", text[text.index("Run file") :], re.DOTALL)
    assert block is not None
    assert parse_table(RunFile, tomllib.loads(block[0]), source="report") == file


def test_the_run_file_tells_the_parameters_that_a_method_had_by_default() -> None:
    """Felo with a weight of 0.25; of a method of one's own that is not here, what the file says."""
    text = Page(report.render(replace(RUN, file=run_file(method={"name": "felo", "alpha": 0.25})))).text
    assert re.search(r'name = "felo"\s+alpha = 0.25\s+kl-reduction = "batchmean"', text)
    mine = replace(RUN.file, method=replace(RUN.file.method, name="mine-0a1b2c3d4e5f", parameters={"some_share": 0.5}))
    assert re.search(
        r'name = "mine-0a1b2c3d4e5f"\s+some-share = 0.5', Page(report.render(replace(RUN, file=mine))).text
    )


def test_a_simulation_has_the_same_page(tmp_path: Path) -> None:
    """From its folder: memory is that of training, 12 of 20 MB; bytes of rounds; no coordinator is asked."""
    write_run(tmp_path / "sim", [line(1, 0.5), line(2, 0.75)])
    out = tmp_path / "page.html"
    assert cli.main(["run", "report", str(tmp_path / "sim"), "--out", str(out), "--state-dir", "/nowhere"]) == 0
    page = Page(out.read_text(encoding="utf-8"))
    assert "Ended after 2 of 2 rounds; reason: 2 rounds. The best version is the one after round 2" in page.text
    assert "Peak memory of training against its budget" in page.text
    assert "bytes moved in each round, and so far" in page.images()
    for piece in ("mlp · fedavg · seed 1, simulated", "12.0 MB", "20.0 MB", "2 groups", "ab" * 32):
        assert piece in page.text
    unfinished = replace(read_run(tmp_path / "sim"), state="unfinished", reason="")
    assert "train one device after another" in page.text
    unlimited = [replace(found, budget_bytes=None) for found in read_run(tmp_path / "sim").devices]
    bare = Page(report.render(replace(read_run(tmp_path / "sim"), devices=unlimited)))
    assert "Peak memory of training" in bare.text
    assert "against its budget" not in bare.text
    assert "Is not finished after 2 of 2 rounds." in Page(report.render(unfinished)).text


def test_a_folder_that_holds_no_simulation_may_be_the_name_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`defects` is a folder made by `coordinator new`: a coordinator is asked. `./defects` is no run's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "defects").mkdir()
    assert cli.main(["run", "report", "defects", "--state-dir", str(tmp_path / "state")]) == 4
    assert cli.main(["run", "report", "./defects", "--state-dir", str(tmp_path / "state")]) == 7
    assert "no simulation in defects" in capsys.readouterr().err


def test_a_report_is_written_whole_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves the report of yesterday; the next one replaces it."""
    path = tmp_path / "r-1.html"
    path.write_text("yesterday")
    monkeypatch.setattr(faults, "_faults", [faults._parse("enospc:report.sync")])
    with pytest.raises(DiskFullError, match="cannot write"):
        report.write_page("today", path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("r-1.html", "yesterday")]
    report.write_page("today", path)
    assert path.read_text() == "today"


def test_what_is_no_plain_file_is_not_replaced_by_a_report(tmp_path: Path) -> None:
    """A report is renamed into its place: a pipe, a device or a link (`--out /dev/stdout`) would be gone."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "link", "dangling"):
        with pytest.raises(InputError, match=rf"{name}: expected a new file or a plain one"):
            report.write_page("page", tmp_path / name)
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "pipe"]
